/* HTTP connections: who is too many, and how long each may stay.
 *
 * libmicrohttpd bounds their number, their memory and how long one may be without a byte. Two
 * things it has no limit for are kept here. At its number it accepts no further connection, so that
 * a crowd that connects and says nothing would shut others out: the newest pushes out the oldest
 * that has not asked anything. And each byte begins its timeout anew, so that a request sent byte
 * by byte would never end: it has 10 s in all, the answer 60 s.
 */
#ifndef SHD_HTTP_CONN_H
#define SHD_HTTP_CONN_H

#include <stdbool.h>
#include <stdint.h>

struct MHD_Connection;

#define HTTP_CONNECTIONS 64u
#define HTTP_SPARE       8u /* being pushed out */

struct http_conn {
    struct MHD_Connection *connection; /* NULL: free */
    int fd;                            /* borrowed */
    uint64_t since_ns;
    bool asked;       /* its request is there */
    bool shut;        /* on its way out */
    bool suspended;   /* until a snapshot is published, or: */
    uint64_t wait_ns; /* since when it waits; 0: it has not waited */
    bool with_spans;
    bool traces; /* its answer is a trace */
};

struct http_conns {
    struct http_conn items[HTTP_CONNECTIONS + HTTP_SPARE];
    uint32_t count, traces;
    bool removed; /* one went: run libmicrohttpd again, it may listen again */
};

/* NULL: no room; it is shut down. */
struct http_conn *http_conn_add(struct http_conns *all, struct MHD_Connection *connection, int fd);
void http_conn_remove(struct http_conns *all, struct http_conn *c);

/* Shut what has been there too long. Returns in how many ms to look again; -1: nothing to see. */
int http_conns_sweep(struct http_conns *all, uint64_t now_ns);

#endif
