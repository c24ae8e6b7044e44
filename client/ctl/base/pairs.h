/* Which two daemons hold each slice, where state is held twice: pairs of devices on different
 * hosts. A *pair* is written "PRIMARY+SECONDARY"; its place in the list is the slice's.
 *
 *     a: cpu0 cpu1   b: cpu2 cpu3     →     cpu0+cpu2, cpu3+cpu1
 *
 * All devices are taken in the order of (place within their host, host), both natural: each not yet
 * taken with the next one that is on another host. A host that has half of what is left has to be
 * in each pair from there on, or its last devices would be left over. So pairs are found whenever
 * no host has more than half of all. Then each pair gets its direction, by which a host has as many
 * primaries as secondaries, and one more of either where its devices are odd: pairs are the edges
 * of a graph of hosts, and walks that use each edge once come and go equally often.
 *
 * All hosts compute the same, in whatever order the cluster file has hosts and devices. Pure. */
#ifndef SHD_CTL_PAIRS_H
#define SHD_CTL_PAIRS_H

#include <stddef.h>
#include <stdint.h>

#include "client/ctl/base/devices.h"
#include "proto/files/replicas.h"

#define PAIRS_MAX (REPLICAS_DEVICES_MAX / 2)

struct pair {
    char primary[CLUSTER_DEVICE_BYTES], secondary[CLUSTER_DEVICE_BYTES];
    uint32_t primary_host, secondary_host; /* in hosts of the replicas */
};

struct pairs {
    struct pair *pairs; /* owned, [count], in the order of the slices */
    uint32_t count;
};

/* Leaves it empty; an empty one, { 0 }, is a no-op. */
void pairs_free(struct pairs *p);

/* Errors: SHD_EINVAL there are none, and why: one host, an odd number of devices, a host with more
 * than half of them; SHD_ENOMEM. */
int pairs_make(const struct replicas *r, struct pairs *ret_pairs, struct shd_err *e);

/* The address of them at path: "DIR?cpu0+cpu2,cpu3+cpu1", in DEVICES_ADDRESS_BYTES(). */
void pairs_address(const struct pairs *p, const char *path, char *buf, size_t bytes);

#endif
