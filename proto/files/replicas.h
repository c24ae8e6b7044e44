/* A cluster whose state is held twice, as its hosts tell workers and tools: replicas.json in a
 * runtime directory.
 *
 *   {"schema": 1, "arbiter": "file:/shared/arbiter", "cluster": "6f1d0c5f2b8e4a37",
 *    "hosts": [{"name": "a", "devices": ["cpu0", "cpu1"]}, ...]}
 *
 * It is there while `shardctl host --replicas` keeps the directory, and all hosts of the cluster
 * write the same. Hosts without devices are not in it: nothing is lost with them. What names the
 * cluster at the arbiter is a hash of the hosts' names and keys.
 *
 * Any thread; files are read in turn. */
#ifndef SHD_REPLICAS_H
#define SHD_REPLICAS_H

#include <stddef.h>
#include <stdint.h>

#include "proto/files/arbiter_view.h"
#include "proto/share/cluster.h"

#define REPLICAS_FILE        "replicas.json"
#define REPLICAS_FILE_MAX    (UINT64_C(1) << 20)
#define REPLICAS_DEVICES_MAX 1024u
#define REPLICAS_ARBITER_MAX 8192u /* bytes of its text, without NUL */

struct replicas_host {
    char name[CLUSTER_NAME_BYTES];
    char devices[CLUSTER_DEVICES_BYTES]; /* "cpu0,cpu1": cluster_next_device() walks it */
};

struct replicas {
    char *arbiter;                    /* owned: as arbiter_open() takes it */
    char cluster[ARBITER_NAME_BYTES]; /* likewise */
    struct replicas_host *hosts;      /* owned, [host_count], names and devices unique; ascending
                                       * by strcmp() of their names */
    uint32_t host_count;              /* 1 to CLUSTER_HOSTS_MAX */
    uint32_t device_count;            /* of all hosts: 1 to REPLICAS_DEVICES_MAX */
};

/* Leaves it empty; an empty one, { 0 }, is a no-op. */
void replicas_free(struct replicas *r);

/* Of a cluster file. Errors: SHD_EINVAL no host has devices, SHD_ERANGE, SHD_ENOMEM. */
int replicas_of(const struct cluster *cluster, const char *arbiter, struct replicas *ret_replicas,
                struct shd_err *e);

/* dir/replicas.json. Errors: SHD_ENOENT there is none: no replicas here; SHD_EINVAL and SHD_ERANGE,
 * with the member; SHD_EIO, SHD_ENOMEM. */
int replicas_read(const char *dir, struct replicas *ret_replicas, struct shd_err *e);

/* Of a file's text[bytes]. */
int replicas_parse(const char *text, size_t bytes, struct replicas *ret_replicas,
                   struct shd_err *e);

/* Put dir/replicas.json in place, whole, readable for the directory's group. Errors: SHD_EIO,
 * SHD_ENOMEM. */
int replicas_write(const char *dir, const struct replicas *r, struct shd_err *e);

/* NULL: there is none. */
const struct replicas_host *replicas_by_name(const struct replicas *r, const char *name);

/* The host that has the device; NULL: none. */
const struct replicas_host *replicas_host_of(const struct replicas *r, const char *device);

#endif
