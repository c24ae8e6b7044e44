/* See trace.h. */
#include "daemon/base/trace.h"

#include <stdlib.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"

#define FIELD 16
#define BYTE  8

_Static_assert((TRACE_EVENTS & (TRACE_EVENTS - 1)) == 0, "indices wrap with the counter");

int trace_new(struct trace **ret_trace, struct shd_err *e)
{
    struct trace *t = sys_calloc(1, sizeof *t);
    if (t == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a trace of %u events", TRACE_EVENTS);
    *ret_trace = t;
    return SHD_OK;
}

void trace_free(struct trace *t)
{
    free(t);
}

/* Release: behind the head that says that this place is being written. */
static void put(_Atomic uint64_t *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
}

static uint64_t get(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_acquire);
}

void trace_add(struct trace *t, const struct trace_event *event)
{
    CHECK(event->what < TRACE_WHATS && event->model <= UINT8_MAX);
    const uint64_t head = atomic_load_explicit(&t->head, memory_order_relaxed);
    struct trace_words *w = &t->ring[head % TRACE_EVENTS];
    put(&w->begin_ns, event->begin_ns);
    put(&w->duration_ns, event->duration_ns);
    put(&w->what,
        (uint64_t)event->what << (3 * FIELD + BYTE) | (uint64_t)event->model << (3 * FIELD) |
            (uint64_t)(event->unit & TRACE_NONE) << (2 * FIELD) |
            (uint64_t)(event->group & TRACE_NONE) << FIELD | (event->session & TRACE_NOBODY));
    put(&w->step, event->step);
    put(&t->head, head + 1);
}

static struct trace_event unpack(const struct trace_words *w)
{
    const uint64_t what = get(&w->what);
    return (struct trace_event){
        .what = (enum trace_what)(what >> (3 * FIELD + BYTE)),
        .model = (uint32_t)(what >> (3 * FIELD) & UINT8_MAX),
        .unit = (uint32_t)(what >> (2 * FIELD) & TRACE_NONE),
        .group = (uint32_t)(what >> FIELD & TRACE_NONE),
        .session = (uint32_t)(what & TRACE_NOBODY),
        .step = get(&w->step),
        .begin_ns = get(&w->begin_ns),
        .duration_ns = get(&w->duration_ns),
    };
}

uint32_t trace_copy(const struct trace *t, uint64_t since_ns, struct trace_event *ret_events)
{
    const uint64_t end = get(&t->head);
    const uint64_t first = end > TRACE_EVENTS ? end - TRACE_EVENTS : 0;
    for (uint64_t i = first; i < end; i++)
        ret_events[i - first] = unpack(&t->ring[i % TRACE_EVENTS]);
    const uint64_t later = get(&t->head) + 1; /* that one may be half written */
    const uint64_t kept_from = later > TRACE_EVENTS ? later - TRACE_EVENTS : 0;
    uint32_t count = 0;
    for (uint64_t i = first > kept_from ? first : kept_from; i < end; i++) {
        const struct trace_event event = ret_events[i - first];
        if (event.begin_ns + event.duration_ns >= since_ns)
            ret_events[count++] = event;
    }
    return count;
}
