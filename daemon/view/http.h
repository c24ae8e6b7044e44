/* HTTP for people and tools that look: DIR/DEVICE.status, and TCP where asked (docs/status.md).
 *
 * A thread of its own polls libmicrohttpd's epoll descriptors and the view's eventfd. A request
 * that needs a fresh snapshot is suspended until the loop has published one, 200 ms at most; then
 * it is answered with the last one; one that asks for a tensor, until that is counted. The thread
 * never waits for the loop.
 *
 * Bounds: 64 connections or half of the spare descriptors, half of them of one user; 5 s without
 * progress, 10 s until the request is there, 60 s in all; 8 KiB of headers; GET and HEAD; one
 * request per connection; two traces at a time.
 *
 * Failure modes: no descriptors or no memory: that one connection is refused. */
#ifndef SHD_HTTP_H
#define SHD_HTTP_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

struct daemon;
struct MHD_Connection;
struct MHD_Daemon;

#define HTTP_CONNECTIONS     64u
#define HTTP_CONNECTIONS_MIN 4u
#define HTTP_SPARE           8u /* being pushed out */

struct http_conn {
    struct MHD_Connection *connection; /* NULL: free */
    int fd;                            /* borrowed */
    int64_t uid;                       /* of its peer; -1: not known, as by TCP */
    uint64_t since_ns;
    bool asked;       /* its request is there */
    bool shut;        /* on its way out */
    bool suspended;   /* until a snapshot is published, or: */
    uint64_t wait_ns; /* since when it waits; 0: it has not waited */
    uint64_t tensor;  /* number of its question about one (tensor.h); 0: none */
    bool with_spans;
    bool traces; /* its answer is a trace */
};

struct http_conns {
    struct http_conn items[HTTP_CONNECTIONS + HTTP_SPARE];
    uint32_t count, traces;
    uint32_t max; /* HTTP_CONNECTIONS, or fewer where descriptors are short */
    bool removed; /* one went: run libmicrohttpd again, it may listen again */
};

enum http_kind { HTTP_UNIX, HTTP_TCP, HTTP_KINDS };

struct http_server {
    struct MHD_Daemon *mhd; /* owned; NULL: none */
    int listen_fd;          /* MHD's once it runs */
    int epoll_fd;           /* borrowed */
    bool loopback;          /* TCP: reachable from this host only */
};

struct http {
    struct daemon *daemon;
    struct http_server servers[HTTP_KINDS];
    struct http_conns conns;
    char path[600];
    pthread_t thread;
    bool running;
    _Atomic bool stop;
};

/* address: "HOST:PORT" for TCP as well, or NULL. Starts the thread. */
int http_init(struct http *h, struct daemon *d, const char *address, struct shd_err *e);
void http_deinit(struct http *h); /* joins the thread, removes the socket file */

#endif
