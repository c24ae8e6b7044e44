/* HTTP GET over a Unix socket or TCP, by libcurl, as much of it as the daemons' status sockets
 * need.
 *
 * Requests of one client run beside each other and never block: its owner waits with
 * http_client_wait() and lets them go on with http_client_perform(). Every request ends by its
 * deadline, and no answer grows beyond the bound given: the daemons are not trusted.
 *
 * Happy path: http_start(), then wait and perform until it is no more RUNNING, use body,
 * http_free(). Or http_client_run(). Failure modes: err says what is wrong in words that name the
 * socket.
 */
#ifndef SHD_CTL_HTTP_H
#define SHD_CTL_HTTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

/* The requests that run beside each other. One thread at a time. */
struct http_client {
    void *multi; /* owned, libcurl's */
    uint32_t running;
};

int http_client_init(struct http_client *c, struct shd_err *e);
void http_client_deinit(struct http_client *c); /* its requests are freed */

/* Do what can be done without waiting. */
void http_client_perform(struct http_client *c);

/* Wait until there is something to do, fd can be read (-1: none) or timeout_ms have passed. */
void http_client_wait(struct http_client *c, int fd, int timeout_ms);

/* Until all have ended. */
void http_client_run(struct http_client *c);

enum http_state { HTTP_RUNNING, HTTP_DONE, HTTP_FAILED };

#define HTTP_NAME_BYTES 128u

struct http {
    enum http_state state;
    const char *body;   /* DONE: terminated by NUL; owned */
    size_t body_bytes;  /* DONE */
    struct shd_err err; /* FAILED */

    struct http_client *client; /* borrowed */
    void *easy;                 /* owned, libcurl's */
    char name[HTTP_NAME_BYTES]; /* of the socket, for errors */
    char *buf;                  /* owned: what came of the body */
    size_t bytes_max, used, capacity;
    uint64_t started_ns;
};

/* Begin GET target at a socket: a path from the root, or HOST:PORT. The caller's to free; NULL: no
 * memory. May have ended already. */
struct http *http_start(struct http_client *c, const char *path, const char *target,
                        size_t bytes_max, uint64_t timeout_ms);

void http_free(struct http *h); /* whatever its state; NULL is a no-op */

#endif
