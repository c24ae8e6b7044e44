/* One shardd: a device, its models, its sessions, and the event loop that ties them together.
 *
 *   socket → mailbox → op → wire → op_*.c → step (pure) → apply → kernel, and back.
 *
 * It owns all parts (base/state.h), starts them in order and frees them in reverse.
 */
#ifndef SHD_DAEMON_H
#define SHD_DAEMON_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/homes.h"
#include "daemon/model/quota.h"
#include "proto/base/status.h"

struct daemon; /* base/state.h */

struct daemon_config {
    const char *device;      /* "cpu0", or "gpu0": CUDA's device of that number */
    const char *runtime_dir; /* absolute; made with mode 0700 when missing */
    uint32_t threads;        /* compute threads of a host device; 0: one per CPU */
    bool pin;
    const char *isa;            /* NULL: the best ones (kern.h) */
    const char *status_address; /* NULL: none; else HOST:PORT for HTTP over TCP as well */
    struct homes_words homes;   /* where what is large is made */
    struct quota_config quota;
};

/* Start everything: lock, sockets, compute threads. On SHD_OK the daemon is reachable as soon as
 * daemon_run() is called. Errors: SHD_EINVAL, SHD_EEXIST another daemon has this device,
 * SHD_ENOTSUP no such device here, SHD_EIO, SHD_ENOMEM. */
int daemon_new(const struct daemon_config *config, struct daemon **ret_daemon, struct shd_err *e);

/* Tell the service manager, and serve until SIGTERM or SIGINT: SHD_OK; or until the device failed:
 * SHD_EIO. Then the process is to end at once, by _exit(): nothing it holds can be given back in
 * order, and the keeper has what counts. */
int daemon_run(struct daemon *d);

void daemon_free(struct daemon *d); /* NULL is a no-op */

#endif
