/* The threads of a relay: one for each connection. */
#ifndef SHD_RELAY_THREAD_H
#define SHD_RELAY_THREAD_H

#include "proto/base/status.h"
#include "proto/share/cluster.h"

#define RELAY_THREADS_MAX CLUSTER_RELAY_CONNECTIONS_MAX

struct relay;

/* Begin a thread of its own: main(arg). Errors: SHD_EBUSY there are too many, SHD_ENOMEM. */
int relay_thread(struct relay *relay, void (*main)(struct relay *relay, void *arg), void *arg,
                 struct shd_err *e);

#endif
