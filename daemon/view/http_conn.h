/* The table of HTTP connections, and how long each may stay. HTTP thread. */
#ifndef SHD_HTTP_CONN_H
#define SHD_HTTP_CONN_H

#include <stdint.h>

struct MHD_Connection;
struct http;
struct http_conn;

struct http_conn *http_conn_add(struct http *h, struct MHD_Connection *connection, int fd);
void http_conn_remove(struct http *h, struct http_conn *c);
/* Shut what has been there too long. Returns in how many ms to look again; -1: nothing to see. */
int http_conns_sweep(struct http *h, uint64_t now_ns);

#endif
