/* Listening stream sockets: TCP, or a Unix socket. Non-blocking, closed by exec. */
#ifndef SHD_LISTEN_H
#define SHD_LISTEN_H

#include <stdbool.h>
#include <stddef.h>

#include "proto/base/status.h"

#define LISTEN_HOST_BYTES 256u
#define LISTEN_NAME_BYTES 160u

/* "HOST:PORT" in two; the brackets of an IPv6 address, "[::1]:80", are dropped. *ret_port points
 * into text. False: it is none. */
bool listen_split(const char *text, char host[LISTEN_HOST_BYTES], const char **ret_port);

enum {
    LISTEN_NAMES = 1,  /* HOST may be a name to be looked up */
    LISTEN_REMOTE = 2, /* it may be reachable by other machines */
};

/* where: "HOST:PORT"; HOST is a numeric address or "localhost", PORT 0 takes any. *ret_remote: it
 * can be reached by other machines. Errors: SHD_EINVAL malformed; SHD_EAUTH remote and no leave for
 * it; SHD_EBUSY taken; SHD_EIO. */
int listen_tcp(const char *where, unsigned flags, int *ret_fd, bool *ret_remote, struct shd_err *e);

/* Host and port of a TCP socket as in a URL. */
int listen_name(int fd, char name[LISTEN_NAME_BYTES], struct shd_err *e);

/* A socket file of mode 0600; one whose owner is dead is replaced. Errors: SHD_ERANGE path too
 * long; SHD_EBUSY somebody listens there; SHD_EIO. */
int listen_unix(const char *path, int *ret_fd, struct shd_err *e);

/* Whether somebody has a datagram socket bound at path, running or stopped: a service manager at
 * its NOTIFY_SOCKET. True as well when it may not be asked. */
bool listen_is_bound(const char *path);

/* Whether an HTTP Host header ("localhost:8440", "127.0.0.1", "[::1]:80") names this machine as
 * such. A page of another origin whose name was pointed here (DNS rebinding) says its own name. */
bool listen_host_is_local(const char *host);

#endif
