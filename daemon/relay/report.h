/* A relay's own /status by HTTP, at DIR/relay.status (docs/hosts.md): whom it stands in for, what
 * has crossed. A thread of libmicrohttpd's, 16 connections of 5 s each. */
#ifndef SHD_RELAY_REPORT_H
#define SHD_RELAY_REPORT_H

#include "proto/base/status.h"

#define REPORT_FILE "relay.status"

struct relay;

/* Goes on until the process ends, which removes the socket by report_end(). Errors: SHD_EBUSY there
 * is another relay in the directory; SHD_ERANGE its path is too long; SHD_EIO. */
int report_begin(struct relay *relay, struct shd_err *e);
void report_end(const struct relay *relay);

#endif
