/* See activity.h. */
#include "client/session/activity.h"

#include <sys/mman.h>

#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

#define SPAN_NS_MIN UINT64_C(2000) /* shorter waits were none */

struct activity *activity_map(int fd, uint64_t offset_bytes)
{
    /* Not by sys.h: a failure here is no failure of the caller's. */
    void *page = mmap(NULL, ACTIVITY_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                      (off_t)offset_bytes);
    if (page == MAP_FAILED)
        return NULL;
    activity_set_slot_wait(page, 0);
    return page;
}

void activity_unmap(struct activity *page)
{
    if (page != NULL)
        munmap(page, ACTIVITY_BYTES);
}

void activity_detach(struct activity_writer *w)
{
    activity_unmap(w->page);
    w->page = NULL;
}

void activity_attach(struct activity_writer *w, int fd, uint64_t offset_bytes,
                     enum activity_path path)
{
    activity_detach(w);
    w->page = activity_map(fd, offset_bytes);
    if (w->page == NULL)
        return;
    w->shown = ACTIVITY_SILENT; /* a page that is new, in the middle of something perhaps */
    activity_init(w->page, path);
}

void activity_set_path(struct activity_writer *w, enum activity_path path)
{
    if (w->page != NULL)
        activity_init(w->page, path);
}

static void show(struct activity_writer *w, const struct activity_span *now)
{
    w->shown = now->what;
    activity_set_now(w->page, now);
}

void activity_begin(struct shd_model *m, enum activity_what what, uint32_t unit, uint32_t micro)
{
    struct activity_writer *w = &m->activity;
    CHECK(w->depth < ACTIVITY_DEPTH_MAX);
    struct activity_span *s = &w->stack[w->depth++];
    *s = (struct activity_span){ .what = what, .unit = unit, .micro = micro, .step = m->step };
    if (w->page == NULL)
        return;
    s->begin_ns = clock_now_ns();
    show(w, s);
}

static bool is_wait(enum activity_what what)
{
    return what == ACTIVITY_WAIT_UNIT || what == ACTIVITY_WAIT_SLOT;
}

void activity_end(struct shd_model *m)
{
    struct activity_writer *w = &m->activity;
    CHECK(w->depth > 0);
    struct activity_span s = w->stack[--w->depth];
    if (w->page == NULL || s.begin_ns == 0) /* it was attached meanwhile */
        return;
    const uint64_t now_ns = clock_now_ns();
    s.duration_ns = now_ns - s.begin_ns;
    if (s.what == ACTIVITY_WAIT_UNIT)
        activity_add_wait(w->page, s.duration_ns);
    if (!is_wait(s.what) || s.duration_ns >= SPAN_NS_MIN)
        activity_add_span(w->page, &s);
    const struct activity_span idle = { .what = ACTIVITY_IDLE,
                                        .unit = ACTIVITY_NONE,
                                        .micro = ACTIVITY_NONE,
                                        .step = m->step,
                                        .begin_ns = now_ns };
    const bool nested = w->depth > 0 && w->stack[w->depth - 1].begin_ns != 0;
    show(w, nested ? &w->stack[w->depth - 1] : &idle);
}

void activity_look(struct shd_model *m)
{
    struct activity_writer *w = &m->activity;
    const bool away = m->session->hub != NULL && m->session->hub->down_count > 0;
    if (w->page == NULL || w->depth == 0)
        return;
    struct activity_span now = w->stack[w->depth - 1];
    if (away)
        now.what = ACTIVITY_RECONNECT;
    if (now.what == w->shown || now.begin_ns == 0)
        return;
    if (away)
        now.begin_ns = clock_now_ns();
    show(w, &now);
}
