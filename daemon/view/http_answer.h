/* Answers to HTTP requests (docs/status.md). HTTP thread. */
#ifndef SHD_HTTP_ANSWER_H
#define SHD_HTTP_ANSWER_H

#include "daemon/view/http.h"

#define HTTP_TRACES_MAX 2u

/* Begin or answer a request. Returns whether it is to wait for a snapshot first. */
enum http_next { HTTP_ANSWERED, HTTP_WAIT, HTTP_FAILED };
enum http_next http_answer(struct http *h, enum http_kind kind, struct http_conn *c,
                           const char *url, const char *method);

#endif
