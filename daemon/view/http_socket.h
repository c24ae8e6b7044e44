/* The sockets that HTTP listens on. */
#ifndef SHD_HTTP_SOCKET_H
#define SHD_HTTP_SOCKET_H

#include <stdbool.h>

#include "proto/base/status.h"

struct http;

int http_listen_unix(struct http *h, int *ret_fd, struct shd_err *e);
int http_listen_tcp(const char *address, int *ret_fd, bool *ret_loopback, struct shd_err *e);

#endif
