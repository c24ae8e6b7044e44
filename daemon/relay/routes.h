/* Which devices a relay answers for: those of other hosts in whose daemons' stead it is, and those
 * of its own host, to which it lets the others.
 *
 * From the command line, else from the cluster file. A name belongs to one host, whoever says so.
 */
#ifndef SHD_RELAY_ROUTES_H
#define SHD_RELAY_ROUTES_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/share/cluster.h"

#define RELAY_DEVICES_MAX CLUSTER_RELAY_DEVICES_MAX

struct relay_config;

struct route {
    char device[CLUSTER_DEVICE_BYTES], host[CLUSTER_NAME_BYTES];
};

struct routes {
    struct route items[RELAY_DEVICES_MAX]; /* in another host's stead */
    uint32_t count;
    char own[CLUSTER_DEVICES_BYTES]; /* "cpu0,cpu1"; "": whatever is there, if it serves */
    bool serves;                     /* it lets other hosts in */
};

/* With `devices` or, without, devices of this host in the cluster file it lets others in to these;
 * with `from`, or devices of other hosts in the file, it stands in for those; with neither it lets
 * others in to whatever daemon is there. Errors, each with the name: SHD_ENOENT no such host or
 * device in the file; SHD_EEXIST a device of two hosts, or named twice; SHD_EINVAL this host
 * itself, no name, a host of which nobody says what it has; SHD_ERANGE too many. */
int routes_make(const struct cluster *cluster, const struct relay_config *config,
                struct routes *ret_routes, struct shd_err *e);

/* The host that has it; NULL: the relay does not stand in for it. */
const char *routes_host(const struct routes *routes, const char *device);

/* May another host's worker have it here? What the relay stands in for it may not, lest two that
 * stand in for each other went round for ever. SHD_ENOENT with what there is. */
int routes_admit(const struct routes *routes, const char *device, struct shd_err *e);

#endif
