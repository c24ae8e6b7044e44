/* See metrics.h. */
#include "daemon/model/metrics.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/base/notify.h"
#include "daemon/base/state.h"
#include "daemon/base/trace.h"
#include "daemon/core/lease.h"
#include "daemon/core/step.h"
#include "daemon/model/inbox.h"
#include "daemon/model/model.h"
#include "daemon/model/model_unit.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec.h"
#include "proto/wire/wire.h"

static void hist_add(struct metrics_hist *h, uint64_t duration_ns)
{
    h->bucket[activity_bucket(duration_ns)]++;
    h->sum_ns += duration_ns;
}

void metrics_model_deinit(struct metrics_model *m)
{
    free(m->senders);
    m->senders = NULL;
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

/* -- Gradients ----------------------------------------------------------------------------------
 */

static uint32_t session_index(const struct session *s)
{
    return s != NULL ? (uint32_t)(s - s->daemon->sessions->items) : TRACE_NOBODY;
}

static void remember_sender(struct model *m, uint32_t group, const struct session *s)
{
    struct metrics_model *mm = m->metrics;
    if (mm->senders == NULL) /* without it nobody is named: no harm to the data path */
        mm->senders = sys_calloc(spec_returns(m->spec), sizeof *mm->senders);
    if (mm->senders == NULL || mm->senders[group].session == s->id)
        return;
    struct metrics_sender *sender = &mm->senders[group];
    sender->session = s->id;
    sender->pid = s->pid;
    sender->start_time = s->start_time;
    snprintf(sender->name, sizeof sender->name, "%.*s", (int)sizeof sender->name - 1, s->name);
}

static void trace_gradient(const struct op *op, enum trace_what what, uint64_t now_ns)
{
    const struct wire_return *req = &op->req.return_grad;
    const struct trace_event event = {
        .what = what,
        .model = op->model->handle,
        .unit = req->unit,
        .group = req->micro,
        .session = session_index(op->session),
        .step = req->step,
        .begin_ns = now_ns,
    };
    trace_add(op->daemon->trace, &event);
}

void metrics_return_arrived(const struct op *op)
{
    const struct wire_return *req = &op->req.return_grad;
    struct model *m = op->model;
    const uint64_t bytes = req->none ? 0 : m->map->slice[req->unit].elems * dtype_bytes(req->dtype);
    struct metrics_flow *flow = flow_now(m->metrics, op->arrived_ns);
    m->metrics->returns++;
    m->metrics->return_bytes += bytes;
    flow->returns++;
    flow->bytes += bytes;
    remember_sender(m, req->micro, op->session);
    trace_gradient(op, TRACE_ARRIVED, op->arrived_ns);
}

void metrics_credited(const struct op *op, bool stale)
{
    struct metrics_model *mm = op->model->metrics;
    const uint64_t now_ns = uv_hrtime();
    mm->stale_returns += stale;
    hist_add(&mm->returned, now_ns - op->arrived_ns);
    trace_gradient(op, stale ? TRACE_STALE : TRACE_CREDIT, now_ns);
}

void metrics_prepare_asked(const struct op *op)
{
    op->session->prepared_model = op->model->handle;
    op->session->prepared_step = op->req.prepare.step;
}

void metrics_leased(const struct op *op, uint32_t group)
{
    uint64_t session[2], since_ns[2];
    lease_holders(op->model->lease, group, session, since_ns);
    op->model->metrics->backup_leases += session[1] == op->session->id;
}

/* -- Kernels ------------------------------------------------------------------------------------
 */

static enum trace_what what_of(enum model_work_kind kind)
{
    switch (kind) {
    case MODEL_ACCUMULATE:
        return TRACE_SUM;
    case MODEL_SUM:
    case MODEL_ZERO:
        return TRACE_SUMSQ;
    case MODEL_APPLY:
    case MODEL_PUBLISH:
        break;
    }
    return TRACE_APPLY;
}

/* Kernel work runs in queueing order: a piece begins when the one before it has ended. */
void metrics_work_done(const struct model_unit *mu)
{
    struct model *m = mu->model;
    struct daemon *d = m->daemon;
    const uint64_t now_ns = uv_hrtime(), free_ns = d->metrics->kernels_free_ns;
    const uint64_t begin_ns = mu->submitted_ns > free_ns ? mu->submitted_ns : free_ns;
    const struct op *op = mu->kind == MODEL_ACCUMULATE && mu->action.ref != 0
                              ? &d->ops->items[mu->action.ref - 1]
                              : NULL;
    const enum trace_what what = what_of(mu->kind);
    const struct trace_event event = {
        .what = what,
        .model = m->handle,
        .unit = mu->unit,
        .group = mu->kind == MODEL_ACCUMULATE ? mu->action.micro : TRACE_NONE,
        .session = session_index(op != NULL ? op->session : NULL),
        .step = what == TRACE_APPLY ? step_now(m->core) : step_collecting(m->core),
        .begin_ns = begin_ns,
        .duration_ns = now_ns > begin_ns ? now_ns - begin_ns : 1,
    };
    trace_add(d->trace, &event);
    d->metrics->kernels_free_ns = now_ns;
    if (mu->kind == MODEL_APPLY && !mu->action.skip)
        hist_add(&m->metrics->applied, event.duration_ns);
}

void metrics_published(const struct model *m, uint32_t unit, uint64_t version)
{
    const struct trace_event event = { .what = TRACE_PUBLISH,
                                       .model = m->handle,
                                       .unit = unit,
                                       .group = TRACE_NONE,
                                       .session = TRACE_NOBODY,
                                       .step = version,
                                       .begin_ns = uv_hrtime() };
    trace_add(m->daemon->trace, &event);
}

/* -- Steps --------------------------------------------------------------------------------------
 */

static void trace_phase(const struct model *m, enum trace_what what, uint64_t step,
                        uint64_t begin_ns, uint64_t duration_ns)
{
    const struct trace_event event = { .what = what,
                                       .model = m->handle,
                                       .unit = TRACE_NONE,
                                       .group = TRACE_NONE,
                                       .session = TRACE_NOBODY,
                                       .step = step,
                                       .begin_ns = begin_ns,
                                       .duration_ns = duration_ns };
    trace_add(m->daemon->trace, &event);
}

void metrics_sealed(struct model *m)
{
    struct metrics_model *mm = m->metrics;
    mm->sealed_ns = uv_hrtime();
    if (mm->opened_ns == 0)
        return; /* it began before us, or before this process */
    mm->collect_ns = mm->sealed_ns - mm->opened_ns;
    mm->has_collect = true;
    hist_add(&mm->collect, mm->collect_ns);
    trace_phase(m, TRACE_COLLECT, step_now(m->core), mm->opened_ns, mm->collect_ns);
}

void metrics_committed(struct model *m, uint64_t step, bool skip)
{
    struct metrics_model *mm = m->metrics;
    mm->committed_ns = uv_hrtime();
    mm->steps++;
    mm->skipped_steps += skip;
    flow_now(mm, mm->committed_ns)->steps++;
    if (mm->sealed_ns == 0)
        return;
    mm->decide_ns = mm->committed_ns - mm->sealed_ns;
    mm->has_decide = true;
    hist_add(&mm->decide, mm->decide_ns);
    trace_phase(m, TRACE_DECIDE, step, mm->sealed_ns, mm->decide_ns);
}

void metrics_opened(struct model *m, uint64_t step)
{
    struct metrics_model *mm = m->metrics;
    const uint64_t now_ns = uv_hrtime();
    if (mm->committed_ns != 0) {
        mm->apply_ns = now_ns - mm->committed_ns;
        mm->has_apply = true;
        trace_phase(m, TRACE_UPDATE, step - 1, mm->committed_ns, mm->apply_ns);
    }
    if (mm->opened_ns != 0)
        hist_add(&mm->step, now_ns - mm->opened_ns);
    mm->opened_ns = now_ns;
    mm->sealed_ns = mm->committed_ns = 0;
    notify_step(m->daemon->notify, m->daemon->drain_session != 0, "%.100s: step %" PRIu64 ", %s",
                m->spec->name, step_now(m->core), step_phase_name(step_phase(m->core)));
}

/* -- Sessions -----------------------------------------------------------------------------------
 */

static void trace_session(const struct session *s, enum trace_what what)
{
    const struct trace_event event = { .what = what,
                                       .unit = TRACE_NONE,
                                       .group = TRACE_NONE,
                                       .session = session_index(s),
                                       .begin_ns = uv_hrtime() };
    trace_add(s->daemon->trace, &event);
}

void metrics_session_open(const struct session *s)
{
    s->daemon->metrics->sessions++;
    trace_session(s, TRACE_SESSION);
}

void metrics_session_ended(const struct session *s)
{
    for (uint32_t i = 0; i < s->inbox_count; i++)
        metrics_take_waits(s->inboxes[i]);
    s->daemon->metrics->session_deaths += !s->detached && !s->daemon->stopping;
    trace_session(s, TRACE_SESSION_END);
}

/* The page can be written by anybody: counts that go backwards are not believed. */
void metrics_take_waits(struct inbox *inbox)
{
    struct activity_waits now;
    struct activity_waits *seen = &inbox->waits_seen;
    struct metrics_hist *h = &inbox->model->metrics->fetch_wait;
    if (!activity_waits(inbox_activity(inbox), &now) || now.sum_ns < seen->sum_ns)
        return;
    for (uint32_t i = 0; i <= METRICS_BUCKETS; i++)
        if (now.bucket[i] < seen->bucket[i])
            return;
    for (uint32_t i = 0; i <= METRICS_BUCKETS; i++)
        h->bucket[i] += now.bucket[i] - seen->bucket[i];
    h->sum_ns += now.sum_ns - seen->sum_ns;
    *seen = now;
}
