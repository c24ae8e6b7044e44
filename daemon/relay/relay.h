/* shardd --relay: one host's voice to others (docs/hosts.md), which does two things, or one of
 * them:
 *
 *   it lets them in       listens on TCP, at the address of its own that the cluster file has, and
 * lets relays of other hosts in, whose workers then have sessions at the daemons here (serve.h,
 * feed.h)
 *   in others' stead      makes the sockets of other hosts' daemons in its own runtime directory,
 * beside those of daemons that are here; workers attach there as to the daemons (stand_in.h,
 * mirror.h)
 *
 * Which is which says routes.h. It keeps no state: a session through it is a session of the daemon,
 * and whoever of the four dies, the others hang up, and the worker repeats what was not credited,
 * as ever.
 *
 * A thread for each connection, which waits for it and for what it belongs to; what they share is
 * behind one lock. */
#ifndef SHD_RELAY_RELAY_H
#define SHD_RELAY_RELAY_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

struct bulk_keys;
struct mirror;
struct routes;
struct stand_in;
struct strangers;
struct traffic;

struct relay_config {
    const char *runtime_dir; /* of the daemons beside it, and of the workers */
    const char *cluster;     /* path of the cluster file */
    const char *host;        /* this host's name in it */
    const char *devices;     /* of this host, that others may have: "cpu0,cpu1"; NULL: routes.h */
    const char *const *from; /* [from_count], "HOST:cpu0,cpu1": of others; none: routes.h */
    uint32_t from_count;
    bool files; /* daemons here write and read checkpoints for other hosts' workers */
};

struct relay { /* what its threads share */
    const struct relay_config *config;
    const struct routes *routes; /* borrowed */
    struct bulk_keys *keys;      /* owned */
    struct strangers
        *strangers;           /* borrowed: connections of which nobody knows yet whose they are */
    uint64_t hung_up_ns;      /* when it was last said that one of them was hung up on */
    uint64_t since_ns;        /* it runs */
    pthread_mutex_t lock;     /* of what follows */
    struct mirror *mirrors;   /* those that live */
    struct stand_in *waiting; /* sessions whose worker has not said Hello yet */
    struct traffic *traffic;  /* what has crossed */
    uint32_t threads;         /* counted without the lock */
};

/* Run until SIGTERM or SIGINT: SHD_OK, and the process is to end by _exit(), for its threads go on
 * (config is theirs until then). `ready` is called when it can be reached, `alive` twice a second
 * while it goes on. Errors: SHD_EEXIST a daemon or another relay has a socket, SHD_EBUSY the
 * address is taken; as of bulk_keys_new() and routes_make(). */
int relay_run(const struct relay_config *config, void (*ready)(void), void (*alive)(void),
              struct shd_err *e);

#endif
