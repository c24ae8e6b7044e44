/* See metrics.h. */
#include "daemon/model/metrics.h"

#include <inttypes.h>
#include <stdlib.h>

#include <uv.h>

#include "daemon/base/state.h"
#include "daemon/model/norms.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/share/parts.h"

static void hist_add(struct metrics_hist *h, uint64_t duration_ns)
{
    uint32_t i = 0;
    while (i < METRICS_BUCKETS && duration_ns > activity_bounds_ns[i])
        i++;
    h->bucket[i]++;
    h->sum_ns += duration_ns;
}

int metrics_model_init(struct metrics_model *m, uint32_t units, struct shd_err *e)
{
    m->norms = norms_new(units);
    return m->norms != NULL
               ? SHD_OK
               : err_set(e, SHD_ENOMEM, "no memory for the norms of %" PRIu32 " units", units);
}

void metrics_model_copy(const struct metrics_model *m, struct metrics_model *ret_copy)
{
    *ret_copy = *m;
    ret_copy->who = (struct metrics_who){ 0 };
    norms_ref(m->norms);
}

void metrics_model_deinit(struct metrics_model *m)
{
    free(m->who.senders);
    free(m->who.parts);
    m->who = (struct metrics_who){ 0 };
    norms_unref(m->norms);
    m->norms = NULL;
}

/* -- Who brought what ---------------------------------------------------------------------------
 */

void metrics_remember_sender(struct metrics_model *m, uint32_t groups, uint32_t group,
                             const struct metrics_sender *sender)
{
    struct metrics_who *who = &m->who;
    if (who->senders == NULL) {
        who->groups = groups;
        who->senders = sys_calloc(groups, sizeof *who->senders);
    }
    if (who->senders != NULL)
        who->senders[group] = *sender;
}

int metrics_audit(struct metrics_model *m, uint32_t units, uint32_t groups, struct shd_err *e)
{
    void *memory = sys_calloc(1, parts_bytes(units, groups));
    if (memory == NULL)
        return err_set(e, SHD_ENOMEM,
                       "no memory for guard_audit: %" PRIu32 " units x %" PRIu32 " gradients",
                       units, groups);
    m->who.parts = parts_init(memory, units, groups);
    return SHD_OK;
}

void metrics_keep_part(struct metrics_model *m, const struct metrics_part *part,
                       const struct fixsum *sum)
{
    const struct metrics_who *who = &m->who;
    struct part p = { part->round, part->unit, part->group, part->first, part->session };
    if (who->parts == NULL)
        return;
    if (p.session == 0 && who->senders != NULL && part->group < who->groups)
        p.session = who->senders[part->group].session;
    parts_take(who->parts, &p, sum);
}

bool metrics_parts(const struct metrics_model *m, const struct metrics_part *from, uint32_t count,
                   uint8_t *ret_bytes)
{
    return m->who.parts != NULL &&
           parts_read(m->who.parts, from->round, from->unit, from->group, count, ret_bytes);
}

/* A copy of the group that came since may be another worker's, which sent others, too. */
const struct metrics_sender *metrics_part_sender(const struct metrics_model *m,
                                                 const struct metrics_part *part)
{
    const struct metrics_who *who = &m->who;
    const uint64_t session = who->parts != NULL
                                 ? parts_session(who->parts, part->round, part->unit, part->group)
                                 : 0;
    for (uint32_t g = 0; session != 0 && who->senders != NULL && g < who->groups; g++)
        if (who->senders[g].session == session)
            return &who->senders[g];
    return NULL;
}

/* -- Rates --------------------------------------------------------------------------------------
 */

static struct metrics_flow *flow_now(struct metrics_model *m, uint64_t now_ns)
{
    const uint64_t second = now_ns / NS_PER_S;
    struct metrics_flow *flow = &m->flow[second % (METRICS_RATE_S + 2)];
    if (flow->second != second)
        *flow = (struct metrics_flow){ .second = second };
    return flow;
}

/* Of the last full seconds; the one that runs is not counted yet. */
struct metrics_rates metrics_model_rates(const struct metrics_model *m, uint64_t age_ns,
                                         uint64_t now_ns)
{
    const uint64_t now_s = now_ns / NS_PER_S;
    const uint64_t age_s = age_ns / NS_PER_S;
    const double span_s = age_s == 0 ? 1.0
                                     : (double)(age_s < METRICS_RATE_S ? age_s : METRICS_RATE_S);
    struct metrics_flow sum = { 0 };
    for (uint32_t i = 0; i < METRICS_RATE_S + 2; i++) {
        const struct metrics_flow *flow = &m->flow[i];
        if (flow->second + METRICS_RATE_S < now_s || flow->second >= now_s)
            continue;
        sum.steps += flow->steps;
        sum.returns += flow->returns;
        sum.bytes += flow->bytes;
    }
    return (struct metrics_rates){ (double)sum.steps / span_s, (double)sum.returns / span_s,
                                   (double)sum.bytes / span_s };
}

/* -- The trace -------------------------------------------------------------------------------- */

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

static void trace_add(struct trace *t, const struct trace_event *event)
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

/* -- Events ----------------------------------------------------------------------------------- */

static uint32_t index_of(uint64_t session)
{
    return session != 0 ? (uint32_t)(session % SESSIONS_MAX) : TRACE_NOBODY;
}

static void arrived(struct metrics_model *m, const struct note *n)
{
    struct metrics_flow *flow = flow_now(m, n->since_ns);
    m->returns++;
    m->return_bytes += n->bytes;
    flow->returns++;
    flow->bytes += n->bytes;
}

/* Kernel work runs in queueing order: a piece begins when the one before it has ended. */
static uint64_t work_began(struct metrics_daemon *d, const struct note *n, uint64_t now_ns)
{
    const uint64_t free_ns = d->kernels_free_ns;
    d->kernels_free_ns = now_ns;
    return n->since_ns > free_ns ? n->since_ns : free_ns;
}

/* The three phases of a step: each returns when it began; 0: before us, or before this process. */

static uint64_t sealed(struct metrics_model *m, uint64_t now_ns)
{
    m->sealed_ns = now_ns;
    if (m->opened_ns == 0)
        return 0;
    m->has_collect = true;
    m->collect_ns = now_ns - m->opened_ns;
    hist_add(&m->collect, m->collect_ns);
    return m->opened_ns;
}

static uint64_t committed(struct metrics_model *m, const struct note *n, uint64_t now_ns)
{
    m->committed_ns = now_ns;
    m->steps++;
    m->skipped_steps.all += n->skip;
    m->skipped_steps.by_guard += n->guarded;
    flow_now(m, now_ns)->steps++;
    if (m->sealed_ns == 0)
        return 0;
    m->has_decide = true;
    m->decide_ns = now_ns - m->sealed_ns;
    hist_add(&m->decide, m->decide_ns);
    return m->sealed_ns;
}

static uint64_t opened(struct metrics_model *m, uint64_t now_ns)
{
    const uint64_t began_ns = m->committed_ns;
    if (began_ns != 0) {
        m->has_apply = true;
        m->apply_ns = now_ns - began_ns;
    }
    if (m->opened_ns != 0)
        hist_add(&m->step, now_ns - m->opened_ns);
    m->opened_ns = now_ns;
    m->sealed_ns = m->committed_ns = 0;
    return began_ns;
}

static uint64_t phase_over(struct metrics_model *m, const struct note *n, uint64_t now_ns)
{
    if (n->what == TRACE_COLLECT)
        return sealed(m, now_ns);
    return n->what == TRACE_DECIDE ? committed(m, n, now_ns) : opened(m, now_ns);
}

void note(struct metrics_model *m, const struct note *n)
{
    const uint64_t now_ns = uv_hrtime();
    struct trace_event event = { .what = n->what,
                                 .model = m->place,
                                 .unit = n->unit,
                                 .group = n->group,
                                 .session = index_of(n->session),
                                 .step = n->step,
                                 .begin_ns = now_ns };
    switch (n->what) {
    case TRACE_ARRIVED:
        arrived(m, n);
        event.begin_ns = n->since_ns;
        break;
    case TRACE_CREDIT:
    case TRACE_STALE:
        m->stale_returns += n->what == TRACE_STALE;
        hist_add(&m->returned, now_ns - n->since_ns);
        break;
    case TRACE_SUM:
    case TRACE_SUMSQ:
    case TRACE_APPLY:
        event.begin_ns = work_began(m->daemon, n, now_ns);
        event.duration_ns = now_ns > event.begin_ns ? now_ns - event.begin_ns : 1;
        if (n->what == TRACE_APPLY && !n->skip)
            hist_add(&m->applied, event.duration_ns);
        break;
    case TRACE_COLLECT:
    case TRACE_DECIDE:
    case TRACE_UPDATE:
        event.begin_ns = phase_over(m, n, now_ns);
        event.duration_ns = now_ns - event.begin_ns;
        event.unit = event.group = TRACE_NONE;
        break;
    default: /* what is published is seen in the trace alone */
        break;
    }
    if (event.begin_ns != 0)
        trace_add(m->daemon->trace, &event);
}

void note_session(struct metrics_daemon *d, enum trace_what what, uint64_t session, bool died)
{
    const struct trace_event event = { .what = what,
                                       .unit = TRACE_NONE,
                                       .group = TRACE_NONE,
                                       .session = index_of(session),
                                       .begin_ns = uv_hrtime() };
    d->sessions += what == TRACE_SESSION;
    d->session_deaths += died;
    trace_add(d->trace, &event);
}

/* The page can be written by anybody: counts that go backwards are not believed. */
void metrics_take_waits(struct metrics_model *m, const struct activity *a,
                        struct activity_waits *seen)
{
    struct activity_waits now;
    if (!activity_waits(a, &now) || now.sum_ns < seen->sum_ns)
        return;
    for (uint32_t i = 0; i <= METRICS_BUCKETS; i++)
        if (now.bucket[i] < seen->bucket[i])
            return;
    for (uint32_t i = 0; i <= METRICS_BUCKETS; i++)
        m->fetch_wait.bucket[i] += now.bucket[i] - seen->bucket[i];
    m->fetch_wait.sum_ns += now.sum_ns - seen->sum_ns;
    *seen = now;
}

uint64_t metrics_time_ns(void)
{
    return clock_read_ns(CLOCK_REALTIME);
}
