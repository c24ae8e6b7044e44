/* A small HTTP server for what a verb shows: GET and HEAD of a few paths, on loopback unless it was
 * asked for otherwise, until a signal ends it.
 *
 * One thread answers; connections, their idle time and the size of a request are bounded. On
 * loopback it answers to names of this host only. */
#ifndef SHD_CTL_SERVE_H
#define SHD_CTL_SERVE_H

#include <stdbool.h>
#include <stddef.h>

#include "proto/share/listen.h"

struct serve_answer {
    unsigned code;    /* of HTTP */
    const char *type; /* Content-Type; NULL: plain text */
    const void *body;
    size_t bytes;
    bool changes; /* body is another one at the next call; else it is constant */
};

struct serve {
    /* The answer to a path; code 0: there is no such path. */
    void (*answer)(void *ctx, const char *path, struct serve_answer *ret_answer);
    void *ctx;         /* borrowed */
    const char *paths; /* "there are / and /healthz\n" */
    const char *seen;  /* "names and pids of all workers": what a stranger would see */
    bool allow_remote;
    void *asking; /* whose request is being answered; NULL: nobody's */
};

/* While it answers: the value of an argument of the request's, decoded; NULL: it has none. */
const char *serve_argument(const struct serve *s, const char *key);

/* A text as an answer. */
struct serve_answer serve_text(unsigned code, const char *text);

/* Where to listen: a Unix socket, or else HOST:PORT. name: of a TCP socket. Errors: as
 * listen_tcp(), with what to do instead. */
int serve_listen(const struct serve *s, const char *where, const char *socket, int *ret_fd,
                 char name[LISTEN_NAME_BYTES], struct shd_err *e);

/* Serve on fd, which is the server's from here on, until SIGINT or SIGTERM; begun() is called when
 * it answers (NULL: nothing). Returns the exit code. */
int serve_until_signal(struct serve *s, int fd, void (*begun)(void *arg), void *arg);

#endif
