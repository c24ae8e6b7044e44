/* shardd --relay: one host's voice to others (docs/hosts.md).
 *
 *   beside daemons        listens on TCP, at the address of its own that the cluster file has, and
 * lets relays of other hosts in, whose workers then have sessions here (serve.h, feed.h) in their
 * stead        with `from`: makes the sockets of that host's daemons in its own runtime directory,
 * at which workers attach as to the daemons (stand_in.h, mirror.h)
 *
 * It keeps no state: a session through it is a session of the daemon, and whoever of the four dies,
 * the others hang up, and the worker repeats what was not credited, as ever.
 *
 * A thread for each connection, which waits for it and for what it belongs to; what they share is
 * behind one lock. */
#ifndef SHD_RELAY_RELAY_H
#define SHD_RELAY_RELAY_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

#define RELAY_DEVICES_MAX 64u

struct bulk_keys;
struct mirror;
struct stand_in;

struct relay_config {
    const char *runtime_dir; /* of the daemons beside it, or of the workers */
    const char *cluster;     /* path of the cluster file */
    const char *host;        /* this host's name in it */
    const char *from;        /* whose daemons it stands in for; NULL: it serves its own */
    const char *devices;     /* of these: "cpu0,cpu1" */
};

struct relay { /* what its threads share */
    const struct relay_config *config;
    struct bulk_keys *keys;   /* owned */
    pthread_mutex_t lock;     /* of what follows */
    struct mirror *mirrors;   /* those that live */
    struct stand_in *waiting; /* sessions whose worker has not said Hello yet */
    uint32_t threads;         /* counted without the lock */
};

/* Run until SIGTERM or SIGINT: SHD_OK, and the process is to end by _exit(), for its threads go on.
 * `ready` is called when it can be reached. Errors: SHD_EINVAL, SHD_EEXIST a daemon or another
 * relay has a socket, SHD_EBUSY the address is taken; as of bulk_keys_new(). */
int relay_run(const struct relay_config *config, void (*ready)(void), struct shd_err *e);

#endif
