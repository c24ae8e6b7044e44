/* Which slices of a model the daemons of each host hold: one each, in the order of the hosts; or,
 * with --replicas 2, each slice on two hosts, by the pairs that `shardctl host` makes
 * (client/ctl/base/pairs.h). */
#ifndef SHD_CTL_PLAN_COPIES_H
#define SHD_CTL_PLAN_COPIES_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

struct plan_host {
    char name[64];
    uint32_t daemons, workers;
};

struct plan_copy { /* what one daemon holds */
    uint32_t host, slice;
    bool primary; /* workers read this one where there are no mirrors */
};

struct plan_copies {
    struct plan_copy *items; /* owned, [count] */
    uint32_t count;          /* of daemons, on all hosts */
};

/* Leaves it empty; an empty one, { 0 }, is a no-op. */
void plan_copies_free(struct plan_copies *c);

/* Of hosts[count], replicas: 1 or 2. Errors: SHD_EINVAL they make no pairs, and why; SHD_ERANGE too
 * many for pairs; SHD_ENOMEM. */
int plan_copies_new(const struct plan_host *hosts, uint32_t count, uint32_t replicas,
                    struct plan_copies *ret_copies, struct shd_err *e);

#endif
