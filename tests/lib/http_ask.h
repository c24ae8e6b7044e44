/* A small HTTP client for tests: one request over the status socket, everything in memory. */
#ifndef SHD_HTTP_ASK_H
#define SHD_HTTP_ASK_H

#include "tests/lib/fixture.h"
#include "tests/lib/test.h"

struct http_reply {
    int code;   /* 0: the connection was closed without an answer */
    char *text; /* owned: head and body, NUL-terminated */
    const char *body;
    size_t body_bytes;
    uint64_t took_ms;
};

int http_connect(const struct fixture *f, int index);

void http_send(int fd, const char *text);

/* Read to the end; closes fd. */
struct http_reply http_receive(int fd, uint64_t timeout_ms);

struct http_reply http_ask(const struct fixture *f, int index, const char *method,
                           const char *path);

struct http_reply http_get(const struct fixture *f, int index, const char *path);

#endif
