/* A listening stream socket for people's tools: TCP on this machine, or a Unix socket.
 *
 * TCP beyond loopback is refused unless it is asked for: what is served has no password. A Unix
 * socket is 0600; one whose owner is dead is replaced, a live one is an error.
 */
#ifndef SHD_CTL_LISTEN_H
#define SHD_CTL_LISTEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

#define LISTEN_NAME_BYTES 160u

/* where: "HOST:PORT", "[HOST]:PORT"; HOST is a numeric address or "localhost", PORT 0 takes any.
 * *ret_fd is the caller's. name: host and port as in a URL. Errors: SHD_EINVAL malformed; SHD_EAUTH
 * not loopback and no leave for it; SHD_EBUSY taken; SHD_EIO. */
int listen_tcp(const char *where, bool allow_remote, int *ret_fd, char name[LISTEN_NAME_BYTES],
               struct shd_err *e);

/* Errors: SHD_ERANGE path too long; SHD_EBUSY somebody listens there; SHD_EIO. */
int listen_unix(const char *path, int *ret_fd, struct shd_err *e);

/* Whether an HTTP Host header ("localhost:8440", "127.0.0.1", "[::1]:80") names this machine as
 * such. A page of another origin whose name was pointed here (DNS rebinding) says its own name. */
bool listen_host_is_local(const char *host);

#endif
