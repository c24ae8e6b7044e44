/* See daemon.h. */
#include "daemon/daemon.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/homes.h"
#include "daemon/base/keeper.h"
#include "daemon/base/log.h"
#include "daemon/base/notify.h"
#include "daemon/base/state.h"
#include "daemon/base/task.h"
#include "daemon/model/adopt.h"
#include "daemon/model/apply.h"
#include "daemon/model/capture.h"
#include "daemon/model/create.h"
#include "daemon/model/drain.h"
#include "daemon/model/drop.h"
#include "daemon/model/inbox.h"
#include "daemon/model/lease_wait.h"
#include "daemon/model/metrics.h"
#include "daemon/model/model.h"
#include "daemon/model/moved.h"
#include "daemon/model/open.h"
#include "daemon/model/put.h"
#include "daemon/model/restore.h"
#include "daemon/model/spill.h"
#include "daemon/model/stage.h"
#include "daemon/net/links.h"
#include "daemon/net/mailbox.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "daemon/net/side.h"
#include "daemon/op/requests.h"
#include "daemon/view/http.h"
#include "daemon/view/view.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cuda/cuda.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"

#define KIND_CHARS     3u
#define GPU_DIGITS_MAX 4u
#define RETRY_US       1000u

struct house {             /* everything a process owns */
    struct daemon d;       /* first: what the parts see of it */
    int lock_fd;           /* flock on DEVICE.lock; -1: none */
    uint32_t choices_told; /* of the device's, to the log */
    uv_loop_t loop;
    struct op_pool ops;
    struct mailbox mailbox;
    struct side side;
    struct session_table sessions;
    struct open_queue open;
    struct homes *homes; /* owned */
    struct keeper keeper;
    struct adopt adopt;
    struct metrics_daemon metrics;
    struct view view;
    struct http http;
    uv_timer_t spill_timer, lease_timer;
    uv_signal_t sigterm, sigint;
};

static struct house *house_of(struct daemon *d)
{
    return (struct house *)d;
}

static bool is_gpu(const char *device)
{
    return strncmp(device, "gpu", KIND_CHARS) == 0;
}

static int check_device(const char *device, struct shd_err *e)
{
    const size_t letters = strspn(device, "abcdefghijklmnopqrstuvwxyz");
    const size_t digits = strspn(device + letters, "0123456789");
    if (letters == 0 || digits == 0 || device[letters + digits] != '\0' ||
        letters + digits >= DAEMON_DEVICE_BYTES_MAX)
        return err_set(e, SHD_EINVAL,
                       "device '%s' is not a kind and a number of at most %u characters, as 'cpu0'",
                       device, DAEMON_DEVICE_BYTES_MAX - 1);
    if (letters != KIND_CHARS || (strncmp(device, "cpu", 3) != 0 && !is_gpu(device)))
        return err_set(e, SHD_ENOTSUP, "device '%s': there are 'cpu' and 'gpu' devices only",
                       device);
    if (is_gpu(device) && digits > GPU_DIGITS_MAX)
        return err_set(e, SHD_ENOTSUP, "device '%s': there is no GPU of such a number", device);
    return SHD_OK;
}

static int start_device(struct daemon *d, const struct daemon_config *config, struct shd_err *e)
{
    const unsigned long ordinal = strtoul(d->device + KIND_CHARS, NULL, 10);
    /* cpu0, cpu1, ... on one host are given as many threads each, or masks of their own. */
    const struct kern_config host = { .threads = d->threads,
                                      .pin = config->pin,
                                      .pin_first = (uint32_t)ordinal * d->threads,
                                      .isa = config->isa };
    if (!is_gpu(d->device))
        return kern_cpu_new(&host, &d->kern, e);
    if (config->isa != NULL)
        return err_set(e, SHD_EINVAL, "--isa %s is of host devices, not of %s", config->isa,
                       d->device);
    return kern_cuda_new((uint32_t)ordinal, &d->kern, e);
}

/* The directory must be ours and closed to others: whoever can write to it can pose as a daemon. */
static int check_runtime_dir(const char *dir, struct shd_err *e)
{
    if (dir[0] != '/')
        return err_set(e, SHD_EINVAL, "runtime directory '%s' is not an absolute path", dir);
    if (mkdir(dir, 0700) != 0 && errno != EEXIST)
        return err_sys(e, SHD_EIO, "make runtime directory '%s'", dir);
    struct stat st;
    if (stat(dir, &st) != 0)
        return err_sys(e, SHD_EIO, "look at runtime directory '%s'", dir);
    if (!S_ISDIR(st.st_mode))
        return err_set(e, SHD_EINVAL, "runtime directory '%s' is not a directory", dir);
    if (st.st_uid != geteuid() && st.st_uid != 0)
        return err_set(e, SHD_EAUTH,
                       "runtime directory '%s' belongs to uid %u, this daemon is uid %u", dir,
                       (unsigned)st.st_uid, (unsigned)geteuid());
    if ((st.st_mode & S_IWOTH) != 0)
        return err_set(e, SHD_EAUTH,
                       "runtime directory '%s' is writable by everyone (mode %04o): "
                       "chmod 0750 it",
                       dir, (unsigned)st.st_mode & 07777);
    return SHD_OK;
}

/* One daemon per device: the lock goes with the process, so it is never stale. */
static int lock_device(struct daemon *d, struct shd_err *e)
{
    char path[600];
    snprintf(path, sizeof path, "%s/%s.lock", d->runtime_dir, d->device);
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return err_sys(e, SHD_EIO, "open lock '%s'", path);
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        const int r = errno == EWOULDBLOCK
                          ? err_set(e, SHD_EEXIST, "another shardd has device %s in '%s'",
                                    d->device, d->runtime_dir)
                          : err_sys(e, SHD_EIO, "lock '%s'", path);
        close(fd);
        return r;
    }
    house_of(d)->lock_fd = fd;
    return SHD_OK;
}

static void stop_signal(uv_signal_t *signal, int number)
{
    struct daemon *d = signal->data;
    log_info("op=stop device=%s signal=%s", d->device, strsignal(number));
    drain_stop(d);
    uv_stop(d->loop);
}

static int start_loop(struct daemon *d, struct shd_err *e)
{
    struct house *h = house_of(d);
    const int r = uv_loop_init(&h->loop);
    if (r < 0)
        return err_set(e, SHD_EIO, "start the event loop: %s", uv_strerror(r));
    d->loop = &h->loop;
    uv_signal_init(d->loop, &h->sigterm);
    uv_signal_init(d->loop, &h->sigint);
    h->sigterm.data = h->sigint.data = d;
    spill_init(d);
    lease_wait_init(d);
    signal(SIGXFSZ, SIG_IGN); /* a limit on file sizes is a checkpoint's error */
    uv_signal_start(&h->sigterm, stop_signal, SIGTERM);
    uv_signal_start(&h->sigint, stop_signal, SIGINT);
    return SHD_OK;
}

/* Wait for all queued work: work runs in order, so the last piece is done last. */
static void wait_idle(struct kern *kern)
{
    const struct kern_copy nothing = { .bytes = 0 };
    struct kern_waiter w;
    struct shd_err e;
    int r;
    kern_waiter_init(&w);
    while ((r = kern_copy(kern, &nothing, &w.done, &e)) == SHD_EBUSY)
        usleep(RETRY_US);
    if (r == SHD_OK)
        kern_wait(&w);
}

static int check_homes(struct daemon *d, struct shd_err *e)
{
    return homes_check(house_of(d)->homes, d->kern->ops->place != SEGMENT_HOST ? d->device : NULL,
                       /* successor= */ d->keeper->group_count > 0, e);
}

static int start_parts(struct daemon *d, const struct daemon_config *config, struct shd_err *e)
{
    struct house *h = house_of(d);
    int r = lock_device(d, e);
    if (r == SHD_OK)
        r = start_loop(d, e);
    if (r == SHD_OK)
        r = task_queue_new(d, &d->tasks, e);
    if (r == SHD_OK)
        r = op_pool_init(d->ops, e);
    if (r == SHD_OK)
        r = session_table_init(d->sessions, e);
    if (r == SHD_OK)
        r = start_device(d, config, e);
    if (r == SHD_OK)
        r = homes_new(&config->homes, &h->homes, e);
    if (r == SHD_OK)
        r = keeper_init(d->keeper, d->loop, h->homes, e);
    if (r == SHD_OK)
        r = check_homes(d, e);
    d->kept = r == SHD_OK && d->keeper->notify;
    if (r == SHD_OK)
        r = trace_new(&d->metrics->trace, e);
    if (r == SHD_OK)
        adopt_all(d); /* before anybody can see what is not in order yet */
    if (r == SHD_OK)
        r = d->kern->ops->health(d->kern, e); /* before a model is refused for good: start again */
    if (r == SHD_OK)
        r = mailbox_init(d, e);
    if (r == SHD_OK)
        r = view_init(d, e);
    if (r == SHD_OK)
        r = http_init(&h->http, d, config->status_address, e);
    if (r == SHD_OK)
        r = notify_new(d, &d->notify, e);
    if (r == SHD_OK)
        r = side_init(&h->side, d, e); /* last: who can connect here finds the mailbox bound */
    return r;
}

/* The loop ends, and the process with a code that its keeper starts it again after. */
static void end_for_successor(struct daemon *d)
{
    d->failed = true;
    uv_stop(d->loop);
}

/* A device that does nothing for this process any more (kern.h, health) may do so for a successor:
 * the loop ends. If the device is well the failure is of one model, which knows it. */
static void device_failed(struct daemon *d)
{
    struct shd_err e;
    if (d->failed || d->stopping || d->kern->ops->health(d->kern, &e) == SHD_OK)
        return;
    log_error(
        "op=device device=%s status=%s why=\"%s\" next=\"ending so that a successor can adopt "
        "the models\" do=\"if it comes again look at the kernel log (dmesg) and nvidia-smi -q\"",
        d->device, status_name(e.code), e.text);
    end_for_successor(d);
}

/* The kernel queue has room again. Whatever took it, all may try. */
static void kernel_room(struct daemon *d)
{
    for (uint32_t i = 0; i < d->model_count; i++) {
        struct model *m = d->models[i];
        model_retry(m);
        apply_retry(m);
        capture_retry(m);
    }
    if (d->open->filling != NULL)
        model_retry(d->open->filling);
    restore_retry(d);
}

/* The instruction sets that were found to be the quicker ones since the last look. */
static void tell_choices(struct daemon *d)
{
    uint32_t *told = &house_of(d)->choices_told, count;
    const struct kern_choice *made = d->kern->ops->choices(d->kern, &count);
    for (; *told < count; ++*told) {
        const struct kern_choice *c = &made[*told];
        log_info("op=kernels device=%s work=\"%s\" isa=%s ns=%.3f beside=%s beside_ns=%.3f "
                 "ratio=%.3f",
                 d->device, c->work, c->isa, c->isa_ns, c->other, c->other_ns, c->ratio);
    }
}

/* Gradients of a model are in, or its phase has changed: who waits for that goes on. */
static void model_moved(struct model *m, bool phase_changed)
{
    if (!phase_changed) {
        lease_wait_soon(m);
        return;
    }
    capture_moved(m); /* before somebody commits the next step */
    tell_choices(m->daemon);
    model_wake(m);
    drain_look(m->daemon);
    lease_wait_wake(m);
}

/* A session's leases go back, and the requests that wait for them are asked again. Its inboxes stay
 * while gradients are read from them. */
static void session_ended(struct session *s, bool was_open)
{
    struct daemon *d = s->daemon;
    for (uint32_t i = 0; i < s->inbox_count; i++)
        metrics_take_waits(s->inboxes[i]->model->metrics, inbox_activity(s->inboxes[i]),
                           &s->inboxes[i]->waits_seen);
    if (was_open)
        note_session(d->metrics, TRACE_SESSION_END, s->id,
                     /* died= */ !s->detached && !d->stopping);
    if (was_open)
        mailbox_session_ended(s);
    links_end(s); /* what they bring goes into the inboxes */
    inbox_end(s);
    stage_end(s);
    for (uint32_t i = 0; i < d->model_count; i++) {
        model_forget_session(d->models[i], s);
        capture_forget_session(d->models[i], s);
        lease_wait_forget_session(d->models[i], s);
    }
    restore_forget_session(d, s);
    create_forget_session(d, s);
    put_forget_session(d, s);
    drop_forget_session(d, s);
    moved_forget_session(d, s);
    drain_forget_session(s);
}

static const struct daemon_hooks hooks = {
    .frame = op_serve_frame,
    .woken = mailbox_woken,
    .published = mailbox_published,
    .requests = requests,
    .session_ended = session_ended,
    .kernel_room = kernel_room,
    .model_moved = model_moved,
    .device_failed = device_failed,
    .succeed = end_for_successor,
};

/* Nothing has been started yet, so that everything can be freed from here on. */
static void share_parts(struct house *h)
{
    struct daemon *d = &h->d;
    d->hooks = &hooks;
    d->ops = &h->ops;
    d->mailbox = &h->mailbox;
    d->sessions = &h->sessions;
    d->open = &h->open;
    d->keeper = &h->keeper;
    d->adopt = &h->adopt;
    d->metrics = &h->metrics;
    d->view = &h->view;
    d->timers.spill = &h->spill_timer;
    d->timers.lease = &h->lease_timer;
    h->lock_fd = h->view.event_fd = -1;
    for (int i = 0; i < HTTP_KINDS; i++)
        h->http.servers[i] = (struct http_server){ .listen_fd = -1, .epoll_fd = -1 };
    h->open.last = &h->open.first;
}

int daemon_new(const struct daemon_config *config, struct daemon **ret_daemon, struct shd_err *e)
{
    int r = check_device(config->device, e);
    if (r == SHD_OK)
        r = check_runtime_dir(config->runtime_dir, e);
    if (r != SHD_OK)
        return r;
    struct house *h = sys_calloc(1, sizeof *h);
    if (h == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the daemon");
    struct daemon *d = &h->d;
    share_parts(h);
    snprintf(d->device, sizeof d->device, "%s", config->device);
    snprintf(d->runtime_dir, sizeof d->runtime_dir, "%s", config->runtime_dir);
    d->started_ns = uv_hrtime();
    d->threads = config->threads > 0 ? config->threads : sys_processors();
    r = quota_new(&config->quota, &d->quota, e);
    if (r == SHD_OK)
        r = start_parts(d, config, e);
    if (r != SHD_OK) {
        daemon_free(d);
        return r;
    }
    *ret_daemon = d;
    return SHD_OK;
}

int daemon_run(struct daemon *d)
{
    const struct kern_ops *ops = d->kern->ops;
    if (ops->place == SEGMENT_HOST)
        log_info("op=start device=%s runtime_dir=%s threads=%" PRIu32 " isa=%s", d->device,
                 d->runtime_dir, d->threads, ops->name);
    else
        log_info("op=start device=%s runtime_dir=%s isa=%s gpu=\"%s\"", d->device, d->runtime_dir,
                 ops->name, ops->product);
    notify_ready(d->notify);
    uv_run(d->loop, UV_RUN_DEFAULT);
    return d->failed ? SHD_EIO : SHD_OK;
}

static void close_leftover(uv_handle_t *handle, void *arg)
{
    (void)arg;
    if (!uv_is_closing(handle))
        uv_close(handle, NULL);
}

static void end_sessions(struct daemon *d)
{
    for (uint32_t i = 0; i < d->sessions->made; i++) {
        struct session *s = &d->sessions->items[i];
        if (s->state == SESSION_NEW || s->state == SESSION_OPEN)
            session_end(s, "the daemon stops");
    }
}

/* Requests in flight have nothing left to give back but their inboxes. */
static void drop_requests(struct daemon *d)
{
    for (uint32_t i = 0; i < d->ops->made; i++)
        if (d->ops->items[i].inbox != NULL)
            inbox_unref(d->ops->items[i].inbox);
    op_pool_deinit(d->ops);
}

void daemon_free(struct daemon *d)
{
    if (d == NULL)
        return;
    struct house *h = house_of(d);
    d->stopping = true;
    http_deinit(&h->http); /* its thread looks at models, and wakes the loop */
    if (d->kern != NULL)
        wait_idle(d->kern); /* no kernel may run on what goes away below */
    homes_stop(h->homes);   /* and nobody may be at its pages */
    if (d->loop != NULL) {
        links_stop(d); /* and no transfer */
        keeper_stop(d->keeper);
        task_queue_close(d->tasks); /* nor may its completions start more */
        side_deinit(&h->side);
        end_sessions(d);
        mailbox_deinit(d);
        uv_walk(d->loop, close_leftover, NULL);
        uv_run(d->loop, UV_RUN_DEFAULT); /* closing handles, libuv's own workers */
        CHECK(uv_loop_close(d->loop) == 0);
    }
    if (d->kern != NULL)
        wait_idle(d->kern); /* nor what the end of a session has begun */
    open_model_abandon(d);
    restore_abandon(d);
    create_abandon(d);
    drop_requests(d);
    drop_abandon(d);
    moved_free(d);
    for (uint32_t i = 0; i < d->model_count; i++) {
        capture_free(d->models[i]);
        put_free(d->models[i]);
        spill_deinit(d->models[i]);
        model_free(d->models[i]);
    }
    quota_free(d->quota);
    view_deinit(d);
    notify_free(d, d->notify);
    if (d->kern != NULL)
        d->kern->ops->free(d->kern); /* after all of its memory */
    trace_free(d->metrics->trace);
    keeper_deinit(d->keeper);
    homes_free(h->homes);
    session_table_deinit(d->sessions);
    task_queue_free(d->tasks);
    if (h->lock_fd >= 0)
        close(h->lock_fd); /* the file stays: unlinking it would race with the next daemon */
    free(h);
}
