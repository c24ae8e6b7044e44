/* One shardd: a device, its models, its sessions, and the event loop that ties them together.
 *
 *   socket → mailbox → wire → dispatch → op_*.c → step (pure) → apply → kernel, and back.
 *
 * The loop thread owns every struct here and never blocks: optimizer work runs on the kernel
 * device's threads, spec parsing and model creation on libuv's pool; both report back by an
 * async handle. Everything is freed in reverse order by daemon_free().
 */
#ifndef SHD_DAEMON_H
#define SHD_DAEMON_H

#include <stdbool.h>
#include <stdint.h>

#include <uv.h>

#include "daemon/base/keeper.h"
#include "daemon/base/trace.h"
#include "daemon/model/adopt.h"
#include "daemon/model/metrics.h"
#include "daemon/net/mailbox.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "daemon/net/side.h"
#include "daemon/view/http.h"
#include "daemon/view/view.h"
#include "kernels/kern.h"
#include "proto/base/status.h"
#include "proto/wire/wire.h"

#define DAEMON_MODELS_MAX       64u
#define DAEMON_DEVICE_BYTES_MAX 32u

struct daemon_config {
    const char *device;      /* "cpu0", or "gpu0": CUDA's device of that number */
    const char *runtime_dir; /* absolute; made with mode 0700 when missing */
    uint32_t threads;        /* compute threads of a host device; 0: one per CPU */
    bool pin;
    const char *isa;            /* NULL: the best one */
    const char *status_address; /* NULL: none; else HOST:PORT for HTTP over TCP as well */
};

struct daemon {
    char device[DAEMON_DEVICE_BYTES_MAX];
    char runtime_dir[512];
    uint32_t threads;
    uint64_t started_ns; /* uv_hrtime() */
    int lock_fd;         /* owned: flock on DEVICE.lock */
    uv_loop_t loop;
    bool loop_ready;
    struct kern *kern; /* owned: all models' memory and work */
    struct op_pool ops;
    struct mailbox mailbox;
    struct side side;
    struct session_table sessions;
    struct model *models[DAEMON_MODELS_MAX]; /* owned; handle = index + 1 */
    uint32_t model_count;
    struct op *open_first, **open_last; /* OpenModel requests, served one at a time */
    struct restore *restore;            /* owned; NULL when idle */
    struct open_work *opening;          /* owned; NULL when idle */
    struct task_queue *tasks;           /* owned: completions from other threads */
    struct comm *comm;                  /* owned: NCCL's thread; NULL: nobody has asked for it */
    struct keeper keeper;
    struct adopt adopt;
    struct metrics_daemon metrics;
    struct trace *trace; /* owned */
    struct view view;
    struct view_notify notify;
    struct http http;
    uv_timer_t spill_timer, lease_timer; /* running while somebody waits */
    uv_signal_t sigterm, sigint;
    uint64_t drain_session;   /* who drains this device; 0: nobody */
    struct op *drain_waiting; /* its DRAIN, until we are between two steps */
    uint64_t requests;        /* since start */
    bool stopping;            /* daemon_free() is under way: begin nothing new */
    bool failed;              /* the device did: daemon_look_after_device() */
};

/* Start everything: lock, sockets, compute threads. On SHD_OK the daemon is reachable as soon as
 * daemon_run() is called. Errors: SHD_EINVAL, SHD_EEXIST another daemon has this device,
 * SHD_ENOTSUP no such device here, SHD_EIO, SHD_ENOMEM. */
int daemon_new(const struct daemon_config *config, struct daemon **ret_daemon, struct shd_err *e);

/* Serve until SIGTERM, SIGINT or daemon_stop(): SHD_OK; or until the device failed: SHD_EIO. Then
 * the process is to end at once, by _exit(): nothing it holds can be given back in order, and the
 * keeper has what counts. */
int daemon_run(struct daemon *d);

/* Work came back with SHD_EIO. Where that is because the device does nothing for this process any
 * more (kern.h, health), it may for a successor: ends daemon_run(). Else it is of the one model.
 * Loop thread. */
void daemon_look_after_device(struct daemon *d);

/* Ask the loop to end. Loop thread only. */
void daemon_stop(struct daemon *d);

void daemon_free(struct daemon *d); /* NULL is a no-op */

#endif
