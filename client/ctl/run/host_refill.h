/* `shardctl host --refill`: this host is filled whenever it is found out, by another shardctl
 * beside the daemons (`shardctl hosts --in NAME --by DIR --watch`), which ends with this process.
 */
#ifndef SHD_CTL_HOST_REFILL_H
#define SHD_CTL_HOST_REFILL_H

#include "proto/base/status.h"

/* Start it. name: of this host; runtime: the directory of its sockets; dir: that all hosts have.
 * Errors: those of child_spawn(). */
int host_refill_begin(const char *name, const char *runtime, const char *dir, struct shd_err *e);

#endif
