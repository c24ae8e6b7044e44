/* See view.h: asking for snapshots, and handing them over. */
#include "daemon/view/view.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/model/adopt.h"
#include "daemon/view/snapshot.h"
#include "daemon/view/take.h"
#include "daemon/view/tensor.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

#define HEARTBEAT_MS 500

static void publish(struct view *v, struct view_snapshot *s, bool with_spans)
{
    struct view_snapshot **at = with_spans ? &v->last_spans : &v->last;
    pthread_mutex_lock(&v->mutex);
    struct view_snapshot *old = *at;
    *at = s;
    pthread_mutex_unlock(&v->mutex);
    view_unref(old); /* freed here, or by the reader that is still at it */
    const uint64_t one = 1;
    if (write(v->event_fd, &one, sizeof one) != (ssize_t)sizeof one && errno != EAGAIN)
        log_warn("op=view why=\"tell the status thread: %s\" do=\"restart the daemon if /status "
                 "stays old\"",
                 strerror(errno));
}

static void take_if_wanted(struct view *v)
{
    const bool with_spans = atomic_exchange(&v->wanted_spans, false);
    const bool wanted = atomic_exchange(&v->wanted, false);
    if (with_spans) {
        struct view_snapshot *s = view_take(v->daemon, /* with_spans= */ true);
        if (s != NULL)
            publish(v, s, /* with_spans= */ true);
    }
    if (wanted) {
        struct view_snapshot *s = view_take(v->daemon, /* with_spans= */ false);
        if (s != NULL)
            publish(v, s, /* with_spans= */ false);
    }
}

static void later(uv_timer_t *timer)
{
    take_if_wanted(timer->data);
}

/* A snapshot is taken at most ten times a second, however many ask. */
static void asked(uv_async_t *async)
{
    struct view *v = async->data;
    if (v->daemon->stopping)
        return;
    tensor_serve(v->tensor);
    if (uv_is_active((const uv_handle_t *)&v->later))
        return;
    take_if_wanted(v);
    uv_timer_start(&v->later, later, VIEW_INTERVAL_NS / NS_PER_MS, /* repeat= */ 0);
}

static void beat(uv_timer_t *timer)
{
    struct view *v = timer->data;
    atomic_store_explicit(&v->beat_ns, uv_hrtime(), memory_order_relaxed);
}

int view_init(struct daemon *d, struct shd_err *e)
{
    struct view *v = d->view;
    v->daemon = d;
    v->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (v->event_fd < 0)
        return err_sys(e, SHD_EIO, "make an eventfd");
    pthread_mutex_init(&v->mutex, NULL);
    const int r = uv_async_init(d->loop, &v->async, asked);
    if (r < 0)
        return err_set(e, SHD_EIO, "start the view: %s", uv_strerror(r));
    uv_timer_init(d->loop, &v->heartbeat);
    uv_timer_init(d->loop, &v->later);
    v->async.data = v->heartbeat.data = v->later.data = v;
    v->handles_ready = true;
    atomic_store(&v->beat_ns, uv_hrtime());
    const int made = tensor_view_new(d, &v->tensor, e);
    if (made != SHD_OK)
        return made;
    v->last = view_take(d, /* with_spans= */ false); /* what is shown should the loop get stuck */
    if (v->last == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the view");
    uv_timer_start(&v->heartbeat, beat, HEARTBEAT_MS, HEARTBEAT_MS);
    return SHD_OK;
}

void view_deinit(struct daemon *d)
{
    struct view *v = d->view;
    view_unref(v->last);
    view_unref(v->last_spans);
    v->last = v->last_spans = NULL;
    tensor_view_free(v->tensor);
    v->tensor = NULL;
    if (v->event_fd >= 0)
        close(v->event_fd);
    v->event_fd = -1;
}

void view_request(struct view *v, bool with_spans)
{
    atomic_store(with_spans ? &v->wanted_spans : &v->wanted, true);
    const int r = uv_async_send(&v->async);
    CHECK(r == 0);
}

struct view_snapshot *view_get(struct view *v, bool with_spans, uint64_t since_ns, bool *ret_fresh)
{
    pthread_mutex_lock(&v->mutex);
    struct view_snapshot *s = with_spans ? v->last_spans : v->last;
    if (s != NULL)
        atomic_fetch_add_explicit(&s->refs, 1, memory_order_relaxed);
    pthread_mutex_unlock(&v->mutex);
    *ret_fresh = s != NULL && s->taken_ns >= since_ns;
    return s;
}

void view_forget_spans(struct view *v)
{
    pthread_mutex_lock(&v->mutex);
    struct view_snapshot *s = v->last_spans;
    v->last_spans = NULL;
    pthread_mutex_unlock(&v->mutex);
    view_unref(s);
}

uint64_t view_beat_age_ns(const struct view *v)
{
    const uint64_t now_ns = uv_hrtime();
    const uint64_t beat_ns = atomic_load_explicit(&v->beat_ns, memory_order_relaxed);
    return now_ns > beat_ns ? now_ns - beat_ns : 0;
}

bool view_trouble(const struct daemon *d, const struct view_snapshot *s, char *text, size_t bytes)
{
    if (d->adopt->refused_count > 0) {
        snprintf(text, bytes, "model '%s' of a predecessor was refused: %s\n",
                 d->adopt->refused[0].name, d->adopt->refused[0].why.text);
        return true;
    }
    for (uint32_t i = 0; s != NULL && i < s->model_count; i++) {
        if (s->models[i].status == SHD_OK)
            continue;
        snprintf(text, bytes, "model '%s' has failed: %s\n", s->models[i].spec->name,
                 status_meaning(s->models[i].status));
        return true;
    }
    return false;
}
