/* See notify.h. */
#include "daemon/base/notify.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <systemd/sd-daemon.h>
#include <uv.h>

#include "daemon/base/keeper.h"
#include "daemon/base/log.h"
#include "daemon/base/manager.h"
#include "daemon/base/state.h"
#include "daemon/base/task.h"
#include "kernels/kern.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"

#define SCRATCH_ELEMS 16u
#define READY_MS      100u /* until a manager that had no room is told again */

struct notify {
    uv_timer_t timer; /* of the watchdog; runs where one is wanted */
    uv_timer_t ready; /* runs until the manager has been told */
    struct task probe;
    float *scratch;     /* owned, the device's: written by the probe, read by nobody */
    bool probing;       /* the last one has not come back */
    uint64_t served;    /* completions of the device, at the last look */
    uint64_t moved;     /* blocks of files, likewise */
    uint64_t status_ns; /* when STATUS= was sent last */
    int fd;             /* owned socket, there also when descriptors are short; -1: no manager */
};

/* False: it has no room now. */
static bool tell(const struct notify *n, const char *text)
{
    if (n->fd < 0)
        return true;
    const int why = manager_tell_by(n->fd, text, /* fd= */ -1, /* wait_us= */ 0);
    if (why != 0 && why != EAGAIN)
        log_warn("op=notify why=\"%s: %s\" do=\"look after the service manager\"",
                 getenv("NOTIFY_SOCKET"), strerror(why));
    return why != EAGAIN;
}

static void probed(struct task *task)
{
    struct notify *n = (struct notify *)((char *)task - offsetof(struct notify, probe));
    n->probing = false;
    if (task->status == SHD_OK)
        tell(n, "WATCHDOG=1");
}

/* Blocks that this process has read, and has changed in files: a copy of a whole state to or from a
 * disk is one operation, and may take longer than the watchdog waits. Where nothing of a model is
 * on files there is no such operation, and what moves says nothing of the device. */
static uint64_t blocks_moved(const struct daemon *d)
{
    struct rusage usage;
    if (!keeper_on_file(d->keeper, KEEPER_STATE) && !keeper_on_file(d->keeper, KEEPER_NEXT) &&
        !keeper_on_file(d->keeper, KEEPER_SNAPSHOT))
        return 0;
    return getrusage(RUSAGE_SELF, &usage) == 0
               ? (uint64_t)usage.ru_inblock + (uint64_t)usage.ru_oublock
               : 0;
}

/* The probe passes the kernel queue behind what is in it. So the watchdog ends a daemon whose
 * compute threads are stuck as well as one whose loop is. A long queue is no stuck one: while the
 * probe is in it, each operation that ends counts as well, and what moves to and from files. */
static void probe(uv_timer_t *timer)
{
    struct daemon *d = timer->data;
    struct notify *n = d->notify;
    const struct kern_fill fill = { .out = n->scratch,
                                    .elems = SCRATCH_ELEMS,
                                    .kind = KERN_FILL_CONST };
    struct shd_err e;
    log_flush(/* all= */ false);
    if (d->stopping)
        return;
    const uint64_t served = task_queue_served(d->tasks), moved = blocks_moved(d);
    if (n->probing && (served != n->served || moved != n->moved))
        tell(n, "WATCHDOG=1");
    n->served = served;
    n->moved = moved;
    if (n->probing)
        return;
    task_init(&n->probe, d->tasks, probed);
    const int r = kern_fill(d->kern, &fill, &n->probe.done, &e);
    n->probing = r == SHD_OK;
    if (r != SHD_OK && r != SHD_EBUSY) /* a full queue: the next time */
        log_error(
            "op=watchdog status=%s why=\"%s\" do=\"nothing: the service manager restarts us, the "
            "state stays\"",
            status_name(r), e.text);
}

int notify_new(struct daemon *d, struct notify **ret_notify, struct shd_err *e)
{
    uint64_t watchdog_us = 0;
    struct notify *n = sys_calloc(1, sizeof *n);
    if (n == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the watchdog");
    n->fd = manager_is_there() ? socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0) : -1;
    if (manager_is_there() && n->fd < 0) {
        const int r = err_sys(e, SHD_EIO, "make a socket");
        free(n);
        return r;
    }
    uv_timer_init(d->loop, &n->timer);
    uv_timer_init(d->loop, &n->ready);
    *ret_notify = n; /* from here on the loop knows it */
    n->timer.data = n->ready.data = d;
    if (sd_watchdog_enabled(/* unset_environment= */ 0, &watchdog_us) > 0) {
        n->scratch = d->kern->ops->alloc(d->kern, SCRATCH_ELEMS * sizeof *n->scratch);
        if (n->scratch == NULL)
            return err_set(e, SHD_ENOMEM, "no memory of device %s for the watchdog", d->device);
        const uint64_t ms = watchdog_us / US_PER_MS / 2;
        uv_timer_start(&n->timer, probe, 0, ms > 0 ? ms : 1);
    }
    return SHD_OK;
}

void notify_free(struct daemon *d, struct notify *n)
{
    if (n == NULL)
        return;
    if (n->fd >= 0)
        close(n->fd);
    if (d->kern != NULL)
        d->kern->ops->release(d->kern, n->scratch, SCRATCH_ELEMS * sizeof(float));
    free(n);
}

/* A manager waits for this one: other words may be lost, this is told until it has it. */
static void say_ready(uv_timer_t *timer)
{
    const struct daemon *d = timer->data;
    const bool draining = d->drain_session != 0;
    if (d->stopping ||
        tell(d->notify, draining ? "READY=1\nSTATUS=Draining" : "READY=1\nSTATUS=Serving"))
        uv_timer_stop(timer);
}

void notify_ready(struct notify *n)
{
    uv_timer_start(&n->ready, say_ready, 0, READY_MS);
}

void notify_step(struct notify *n, bool draining, const char *fmt, ...)
{
    const uint64_t now_ns = uv_hrtime();
    char text[256];
    if (n == NULL || n->fd < 0 || now_ns - n->status_ns < NS_PER_S)
        return;
    n->status_ns = now_ns;
    const int used = snprintf(text, sizeof text, "STATUS=%s", draining ? "Draining; " : "");
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text + used, sizeof text - (size_t)used, fmt, ap);
    va_end(ap);
    tell(n, text);
}

void notify_drain(const struct notify *n, bool draining)
{
    if (n != NULL)
        tell(n, draining ? "STATUS=Draining" : "STATUS=Serving");
}
