/* One HTTP request with a JSON body, by libcurl, which is loaded when the first is made: libshd has
 * no need of it otherwise. Any thread. */
#ifndef SHD_ARBITER_HTTP_H
#define SHD_ARBITER_HTTP_H

#include <stdbool.h>
#include <stddef.h>

#include "proto/base/status.h"

/* Load libcurl. Errors: SHD_ENOTSUP there is none here. */
int arbiter_http_load(struct shd_err *e);

struct arbiter_post {
    const char *url;  /* http:// or https:// */
    const char *body; /* JSON */
    size_t answer_bytes_max;
    long timeout_ms;         /* of all of it */
    long connect_timeout_ms; /* until there is a connection */
};

/* POST it. *ret_answer: the body of an answer of HTTP 200, NUL behind it; the caller's to free.
 * *ret_sent: the server may have had the request, also behind an error. No proxy is used, no
 * redirection followed. Errors, which name the URL: SHD_EGONE nobody listens, SHD_ENOENT no such
 * host, SHD_ETIMEDOUT, SHD_EAUTH HTTP 401 or 403, SHD_ERANGE a longer answer, SHD_EPROTO it is no
 * HTTP, SHD_EIO any other answer or way to fail, SHD_ENOTSUP, SHD_ENOMEM. */
int arbiter_http_post(const struct arbiter_post *post, char **ret_answer, size_t *ret_bytes,
                      bool *ret_sent, struct shd_err *e);

#endif
