/* HTTP GET over a Unix socket or TCP, as much of it as the daemons' status sockets need.
 *
 * A struct http is one request that never blocks: its owner polls its descriptor for what it wants
 * and lets it step, beside as many others as it likes. Every request ends by its deadline, and no
 * answer grows beyond the bound given: who answers is not trusted.
 *
 * Happy path: http_start(), then poll() and http_step() until http_ended(), use body, http_end().
 * Failure modes: err says what is wrong in words that name the socket.
 */
#ifndef SHD_CTL_HTTP_H
#define SHD_CTL_HTTP_H

#include <netinet/in.h>
#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "proto/base/status.h"

#define HTTP_HEAD_BYTES_MAX   16384u
#define HTTP_TARGET_BYTES_MAX 64u
#define HTTP_NAME_BYTES       128u

enum http_state { HTTP_IDLE, HTTP_CONNECTING, HTTP_SENDING, HTTP_READING, HTTP_DONE, HTTP_FAILED };

struct http {
    enum http_state state;
    int code;          /* DONE: 200; FAILED: what the server said, 0 when it did not come to that */
    const char *body;  /* DONE: into buf, terminated by NUL */
    size_t body_bytes; /* DONE */
    struct shd_err err;  /* FAILED */
    uint64_t started_ns; /* by clock_now_ns() */

    int fd;                     /* owned */
    char name[HTTP_NAME_BYTES]; /* of the socket, for errors */
    union {
        struct sockaddr any;
        struct sockaddr_un local;
        struct sockaddr_in6 tcp6;
        struct sockaddr_storage storage;
    } address;
    socklen_t address_bytes;
    uint64_t deadline_ns;
    size_t bytes_max;
    char request[HTTP_TARGET_BYTES_MAX + 96];
    size_t request_bytes, sent;
    char *buf; /* owned */
    size_t used, capacity;
    size_t head_bytes;   /* 0: the head is not complete */
    size_t length_bytes; /* of the body; SIZE_MAX: until the end of the stream */
    bool chunked;
};

/* Begin GET target at a socket: a path from the root, or HOST:PORT. h is IDLE (zeroed). May end at
 * once. */
void http_start(struct http *h, const char *path, const char *target, size_t bytes_max,
                uint64_t timeout_ms);

/* What to poll for; fd -1 when there is nothing to wait for but time. */
struct pollfd http_poll(const struct http *h);

/* Do what can be done without waiting. Call it whenever poll() says so, and ten times a second. */
void http_step(struct http *h);

bool http_ended(const struct http *h); /* DONE or FAILED */
void http_end(struct http *h);         /* back to IDLE; a no-op on an idle one */

/* Run all of them, started or not, to their ends, beside each other. */
void http_run(struct http *all, uint32_t count);

#endif
