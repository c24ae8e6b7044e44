/* `shardctl host --replicas 2`: which pairs of daemons hold the slices, and what workers and tools
 * of this host are told (proto/files/replicas.h). */
#ifndef SHD_CTL_HOST_REPLICAS_H
#define SHD_CTL_HOST_REPLICAS_H

#include "client/ctl/base/pairs.h"
#include "proto/files/replicas.h"

struct host_replicas {
    struct replicas told;
    struct pairs pairs; /* count 0: there are no replicas */
};

void host_replicas_free(struct host_replicas *h);

/* Of a cluster file, with pairs. Errors: SHD_EINVAL no pairs, or no text of an arbiter; SHD_ERANGE,
 * SHD_ENOMEM. */
int host_replicas_plan(const struct cluster *cluster, const char *arbiter,
                       struct host_replicas *ret_replicas, struct shd_err *e);

/* Before this host's daemons start: ask the arbiter, and put the file in dir. An arbiter that
 * cannot be reached now is said alone: whoever needs it asks again. So is it that this host is out.
 * Errors: what is wrong there until somebody mends it; those of replicas_write(). */
int host_replicas_begin(const struct host_replicas *h, const char *dir, const char *name,
                        struct shd_err *e);

#endif
