/* The service manager: watchdog and STATUS=; see view.h. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <systemd/sd-daemon.h>

#include "daemon/base/log.h"
#include "daemon/daemon.h"
#include "daemon/model/model.h"
#include "daemon/view/view.h"
#include "proto/base/clock.h"

#define SCRATCH_ELEMS 16u

/* sd_notify() would wait for a manager that is stopped, and the loop with it. */
static void tell(const struct view_notify *n, const char *text)
{
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    const size_t bytes = path != NULL ? strlen(path) : 0;
    if (n->fd < 0 || bytes == 0 || bytes >= sizeof address.sun_path)
        return;
    memcpy(address.sun_path, path, bytes);
    if (path[0] == '@')
        address.sun_path[0] = '\0';
    const socklen_t length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + bytes);
    if (sendto(n->fd, text, strlen(text), MSG_DONTWAIT | MSG_NOSIGNAL,
               (const struct sockaddr *)&address, length) < 0 &&
        errno != EAGAIN)
        log_warn("op=notify why=\"%s: %s\" do=\"look after the service manager\"", path,
                 strerror(errno));
}

static void probed(struct task *task)
{
    struct view_notify *n = (struct view_notify *)((char *)task -
                                                   offsetof(struct view_notify, probe));
    n->probing = false;
    if (task->status == SHD_OK)
        tell(n, "WATCHDOG=1");
}

/* Through the kernel queue and back, behind what is in it: not fed, the watchdog ends a daemon
 * whose compute threads are stuck as well as one whose loop is. */
static void probe(uv_timer_t *timer)
{
    struct daemon *d = timer->data;
    struct view_notify *n = &d->notify;
    const struct kern_fill fill = { .out = n->scratch,
                                    .elems = SCRATCH_ELEMS,
                                    .kind = KERN_FILL_CONST };
    struct shd_err e;
    log_flush(/* all= */ false);
    if (n->probing || d->stopping)
        return;
    task_init(&n->probe, d->tasks, probed);
    const int r = d->kern->ops->fill(d->kern, &fill, &n->probe.done, &e);
    n->probing = r == SHD_OK;
    if (r != SHD_OK && r != SHD_EBUSY) /* a full queue: the next time */
        log_error(
            "op=watchdog status=%s why=\"%s\" do=\"nothing: the service manager restarts us, the "
            "state stays\"",
            status_name(r), e.text);
}

int view_notify_init(struct daemon *d, struct shd_err *e)
{
    struct view_notify *n = &d->notify;
    uint64_t watchdog_us = 0;
    n->fd = getenv("NOTIFY_SOCKET") != NULL ? socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0) : -1;
    if (getenv("NOTIFY_SOCKET") != NULL && n->fd < 0)
        return err_sys(e, SHD_EIO, "make a socket");
    uv_timer_init(&d->loop, &n->timer);
    n->timer.data = d;
    if (sd_watchdog_enabled(/* unset_environment= */ 0, &watchdog_us) > 0) {
        n->scratch = d->kern->ops->alloc(d->kern, SCRATCH_ELEMS * sizeof *n->scratch);
        if (n->scratch == NULL)
            return err_set(e, SHD_ENOMEM, "no memory of device %s for the watchdog", d->device);
        const uint64_t ms = watchdog_us / US_PER_MS / 2;
        uv_timer_start(&n->timer, probe, 0, ms > 0 ? ms : 1);
    }
    return SHD_OK;
}

void view_notify_deinit(struct daemon *d)
{
    if (d->notify.fd >= 0)
        close(d->notify.fd);
    d->notify.fd = -1;
    if (d->kern != NULL)
        d->kern->ops->release(d->kern, d->notify.scratch, SCRATCH_ELEMS * sizeof(float));
    d->notify.scratch = NULL;
}

void view_notify_step(struct model *m)
{
    struct view_notify *n = &m->daemon->notify;
    const uint64_t now_ns = uv_hrtime();
    char text[256];
    if (n->fd < 0 || now_ns - n->status_ns < NS_PER_S)
        return;
    n->status_ns = now_ns;
    snprintf(text, sizeof text, "STATUS=%s%.100s: step %" PRIu64 ", %s",
             m->daemon->drain_session != 0 ? "Draining; " : "", m->spec->name, step_now(m->core),
             step_phase_name(step_phase(m->core)));
    tell(n, text);
}

void view_notify_drain(struct daemon *d)
{
    tell(&d->notify, d->drain_session != 0 ? "STATUS=Draining" : "STATUS=Serving");
}
