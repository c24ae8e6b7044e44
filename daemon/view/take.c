/* See take.h. */
#include "daemon/view/take.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/base/state.h"
#include "daemon/core/lease.h"
#include "daemon/core/verify.h"
#include "daemon/model/checkpoint.h"
#include "daemon/model/common.h"
#include "daemon/model/inbox.h"
#include "daemon/model/model.h"
#include "daemon/model/open.h"
#include "daemon/model/pin.h"
#include "daemon/model/quota.h"
#include "daemon/model/spill.h"
#include "daemon/net/links.h"
#include "daemon/net/mailbox.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "daemon/view/snapshot.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/board.h"
#include "proto/share/shardmap.h"
#include "proto/wire/wire.h"

#define WAITING_MAX 1024u /* requests listed: of a model; by NCCL, of all */

/* -- Models -------------------------------------------------------------------------------------
 */

static void take_units(const struct model *m, struct view_model *vm)
{
    for (uint32_t u = 0; u < m->spec->unit_count; u++) {
        vm->units[u] = (struct view_unit){ .elems = m->map->slice[u].elems,
                                           .version = board_version(m->board, u),
                                           .returned = step_unit_next(m->core, u) };
        vm->units[u].norm_step = model_norm(m, u, &vm->units[u].grad_norm);
        vm->units[u].changed.step = model_change(m, u, &vm->units[u].changed.update,
                                                 &vm->units[u].changed.weight);
    }
}

/* Each group that has not come in: the sessions that have it on lease, and its last sender. */
static void take_groups(const struct model *m, struct view_model *vm)
{
    const uint64_t now_ns = uv_hrtime(), loop_ns = uv_now(m->daemon->loop) * 1000000;
    for (uint32_t g = 0; g < step_returns(m->core); g++) {
        uint64_t session[2] = { 0 }, since_ns[2] = { 0 };
        const bool in = step_micro_in(m->core, g), came = step_micro_came(m->core, g);
        if (!in)
            lease_holders(m->lease, g, session, since_ns);
        for (uint32_t i = 0; i < 2 && session[i] != 0; i++) {
            const uint64_t age_ns = loop_ns > since_ns[i] ? loop_ns - since_ns[i] : 0;
            vm->leases[vm->lease_count++] = (struct view_lease){
                .group = g, .backup = i > 0, .session = session[i], .since_ns = now_ns - age_ns
            };
        }
        if (came)
            continue;
        vm->missing_total++;
        if (vm->missing_count == VIEW_MISSING_MAX)
            continue;
        struct view_missing *missing = &vm->missing[vm->missing_count++];
        *missing = (struct view_missing){ .group = g, .holder = { session[0], session[1] } };
        if (m->metrics->who.senders != NULL)
            missing->sender = m->metrics->who.senders[g];
    }
}

static void add_waiting(struct view_model *vm, const struct op *op, struct view_waiting w)
{
    if (vm->waiting_count == WAITING_MAX)
        return;
    w.session = op->session != NULL ? op->session->id : 0;
    w.since_ns = op->arrived_ns;
    vm->waiting_list[vm->waiting_count++] = w;
}

static void take_requests(const struct model *m, struct view_model *vm)
{
    for (const struct op *op = m->waits.phase; op != NULL; op = op->next)
        if (op->req.type == WIRE_PREPARE)
            add_waiting(
                vm, op,
                (struct view_waiting){ .what = VIEW_WAITS_PREPARE, .step = op->req.prepare.step });
    for (const struct op *op = m->waits.lease; op != NULL; op = op->next)
        add_waiting(vm, op,
                    (struct view_waiting){ .what = VIEW_WAITS_LEASE, .step = op->req.lease.step });
    for (const struct op *op = m->waits.meet; op != NULL; op = op->next)
        add_waiting(vm, op,
                    (struct view_waiting){ .what = VIEW_WAITS_MEET, .step = op->req.lease.step });
}

/* Returned gradients that wait for their turn, of one session. */
static void take_turns(const struct daemon *d, const struct inbox *inbox, struct view_model *vm)
{
    const struct model *m = inbox->model;
    for (uint32_t slot = 0; slot < inbox->slots; slot++) {
        if ((inbox->busy & UINT64_C(1) << slot) == 0)
            continue;
        const struct op *op = &d->ops->items[inbox->op_index[slot]];
        const struct wire_return *req = &op->req.return_grad;
        if (!step_waits(m->core, req->unit, req->micro, op->index + 1))
            continue;
        add_waiting(vm, op,
                    (struct view_waiting){ .what = VIEW_WAITS_TURN,
                                           .step = req->step,
                                           .unit = req->unit,
                                           .group = req->micro,
                                           .needs = step_unit_next(m->core, req->unit) });
    }
}

_Static_assert(VIEW_PINS_MAX == PINS_MAX, "of a model");

static void take_pins(const struct model *m, struct view_model *vm)
{
    struct pin_shown pins[PINS_MAX];
    vm->captures.pin_count = pins_show(m, pins);
    for (uint32_t i = 0; i < vm->captures.pin_count; i++)
        vm->captures.pins[i] = (struct view_pin){ pins[i].step, pins[i].bytes, pins[i].sessions,
                                                  pins[i].ready, pins[i].began_ns };
}

static void take_numbers(const struct model *m, struct view_model *vm, uint64_t now_ns)
{
    vm->spec = spec_ref(m->spec);
    vm->handle = m->handle;
    vm->owner = m->map->owner;
    vm->owners = m->map->owners;
    vm->elems = m->map->elems;
    vm->ready = m->ready;
    vm->adopted = m->kept.adopted;
    vm->status = m->last_status;
    vm->step = step_now(m->core);
    vm->collecting = step_collecting(m->core);
    vm->updates = step_updates(m->core);
    vm->hold_step = m->waits.hold_step;
    vm->phase = step_phase(m->core);
    vm->returns = step_returns(m->core);
    vm->expected = step_cells(m->core);
    vm->returned = step_cells_in(m->core);
    vm->waiting = step_cells_waiting(m->core);
    vm->bytes.state = m->state.file ? m->use.paged_bytes : m->state.bytes - common_bytes(m);
    vm->bytes.common = common_bytes(m);
    vm->bytes.common_counted = common_counts(m) ? common_bytes(m) : 0;
    vm->bytes.file_state = m->state.file ? m->state.bytes : 0;
    vm->bytes.snapshots = m->use.snapshot_bytes;
    vm->bytes.file_snapshots = m->use.snapshot_file_bytes;
    vm->bytes.publish = m->publish.file ? 0 : m->publish.bytes;
    vm->bytes.file_publish = m->publish.file ? m->publish.bytes * (m->kept.next_fd >= 0 ? 2 : 1)
                                             : 0;
    vm->bytes.inbox = m->use.inbox_bytes;
    vm->bytes.board = m->board_segment.bytes;
    vm->bytes.ledger = m->ledger_segment.bytes;
    vm->bytes.spec = m->json.segment.bytes;
    vm->bytes.spill = m->spill->held_bytes;
    vm->bytes.spilled = m->spill->bytes_total;
    vm->bytes.spare = m->kept.spare_bytes;
    vm->bytes.huge = m->state.huge_bytes + m->publish.huge_bytes;
    vm->bytes.counted = quota_used(m->kept.quota);
    const struct quota_maker maker = quota_maker_of(m->kept.quota);
    vm->bytes.maker = (struct view_maker){ maker.known, maker.uid, maker.gid };
    vm->last.sealed = *step_record(m->core);
    vm->last.committed = step_last_result(m->core);
    vm->last.is_stopped = model_stopped(m, &vm->last.stopped);
    vm->last.sealed_cause = vm->last.stopped_cause = (struct step_cause){ 0 };
    model_cause(m, vm->last.sealed.step, &vm->last.sealed_cause);
    if (vm->last.is_stopped)
        model_cause(m, vm->last.stopped.step, &vm->last.stopped_cause);
    metrics_model_copy(m->metrics, &vm->metrics);
    vm->captures.saves = checkpoint_progress(m, &vm->captures.checkpoint);
    vm->rates = metrics_model_rates(m->metrics, now_ns - m->daemon->started_ns, now_ns);
}

/* False: no memory. */
static bool take_verified(const struct model *m, struct view_model *vm)
{
    const struct verify *v = lease_verify(m->lease);
    if (v == NULL)
        return true;
    vm->last.verified = sys_malloc(sizeof *vm->last.verified);
    if (vm->last.verified == NULL)
        return false;
    *vm->last.verified = *verify_look(v);
    return true;
}

static bool take_model(const struct model *m, struct view_model *vm, uint64_t now_ns)
{
    const uint32_t groups = spec_returns(m->spec);
    take_numbers(m, vm, now_ns);
    vm->units = sys_calloc(m->spec->unit_count, sizeof *vm->units);
    vm->leases = sys_calloc(groups, 2 * sizeof *vm->leases);
    vm->missing = sys_calloc(VIEW_MISSING_MAX, sizeof *vm->missing);
    vm->waiting_list = sys_calloc(WAITING_MAX, sizeof *vm->waiting_list);
    if (vm->units == NULL || vm->leases == NULL || vm->missing == NULL || vm->waiting_list == NULL)
        return false;
    if (!take_verified(m, vm))
        return false;
    take_pins(m, vm);
    take_units(m, vm);
    take_groups(m, vm);
    take_requests(m, vm);
    return model_settings(m, vm->collecting, &vm->last.settings, /* e= */ NULL) == SHD_OK;
}

/* -- Sessions -----------------------------------------------------------------------------------
 */

static struct activity_limits limits_of(const struct model *m, uint64_t now_ns)
{
    return (struct activity_limits){ m->spec->unit_count, m->spec->micro_batches, now_ns };
}

/* A worker with several models is shown at the one in which it began something last. */
static void take_now(const struct inbox *inbox, struct view_session *vs)
{
    const struct activity_limits limits = limits_of(inbox->model, uv_hrtime());
    struct activity_span now;
    if (!activity_now(inbox_activity(inbox), &limits, &now))
        return;
    if (vs->now.what != ACTIVITY_SILENT && vs->now.begin_ns > now.begin_ns)
        return;
    vs->now = now;
    vs->model = inbox->model->handle;
}

/* A worker that trains several models shows the spans of the one it is busy with. */
static bool take_spans(const struct session *s, struct view_session *vs)
{
    struct activity_span *spans = sys_calloc(ACTIVITY_SPANS, sizeof *spans);
    if (spans == NULL)
        return false;
    for (uint32_t i = 0; i < s->inbox_count; i++) {
        const struct inbox *inbox = s->inboxes[i];
        const struct activity_limits limits = limits_of(inbox->model, uv_hrtime());
        if (inbox->model->handle == vs->model)
            vs->span_count = activity_spans(inbox_activity(inbox), &limits, 0, spans);
    }
    vs->spans = spans;
    return true;
}

static void take_inboxes(const struct session *s, struct view_session *vs,
                         struct view_snapshot *snapshot)
{
    for (uint32_t i = 0; i < s->inbox_count; i++) {
        struct inbox *inbox = s->inboxes[i];
        vs->slots += inbox->slots;
        vs->slots_waiting += (uint32_t)__builtin_popcountll(inbox->busy);
        if (vs->model == 0)
            vs->model = inbox->model->handle;
        if (vs->path == NULL)
            vs->path = activity_path_name(inbox_activity(inbox));
        take_now(inbox, vs);
        metrics_take_waits(inbox->model->metrics, inbox_activity(inbox), &inbox->waits_seen);
        for (uint32_t k = 0; k < snapshot->model_count; k++)
            if (snapshot->models[k].handle == inbox->model->handle)
                take_turns(s->daemon, inbox, &snapshot->models[k]);
    }
}

static void take_session(const struct session *s, uint32_t index, struct view_session *vs)
{
    vs->id = s->id;
    vs->index = index;
    vs->pid = s->pid;
    vs->uid = s->uid;
    vs->start_time = s->start_time;
    vs->since_ns = s->since_ns;
    vs->role = session_role_name(s->role);
    vs->rank = s->rank;
    vs->trains = s->role == WIRE_TRAINER;
    snprintf(vs->name, sizeof vs->name, "%.*s", (int)sizeof vs->name - 1, s->name);
    vs->requests_pending = s->ops;
    vs->prepared_model = s->prepared.model;
    vs->prepared_step = s->prepared.step;
}

static bool take_sessions(struct daemon *d, struct view_snapshot *snapshot, bool with_spans)
{
    uint32_t with = 0;
    for (uint32_t i = 0; i < d->sessions->made; i++) {
        const struct session *s = &d->sessions->items[i];
        if (s->state != SESSION_OPEN)
            continue;
        CHECK(snapshot->session_count < d->sessions->used);
        struct view_session *vs = &snapshot->sessions[snapshot->session_count++];
        take_session(s, i, vs);
        take_inboxes(s, vs, snapshot);
        if (!with_spans || vs->model == 0)
            continue;
        if (with++ >= VIEW_SPAN_SESSIONS_MAX)
            snapshot->spans_left_out++;
        else if (!take_spans(s, vs))
            return false;
    }
    return true;
}

/* -- By NCCL -------------------------------------------------------------------------------------
 */

static struct view_transfer transfer_of(const struct op *op, uint64_t begun_ns)
{
    const struct links *links = links_find(op->session, op->model);
    struct view_transfer t = {
        .session = op->session->id,
        .since_ns = op->arrived_ns,
        .begun_ns = begun_ns,
        .timeout_ns = links != NULL ? links->timeout_ns : 0,
        .model = op->model->handle,
    };
    if (op->req.type == WIRE_FETCH) {
        t.what = VIEW_FETCH;
        t.step = op->req.fetch.step;
        t.unit = op->req.fetch.unit;
    } else if (op->req.type == WIRE_RETURN) {
        t.what = VIEW_RETURN;
        t.step = op->req.return_grad.step;
        t.unit = op->req.return_grad.unit;
        t.group = op->req.return_grad.micro;
    }
    return t;
}

static void take_transfers(const struct daemon *d, struct view_snapshot *s)
{
    uint32_t left = d->comm != NULL ? d->ops->used : 0;
    for (uint32_t i = 0; i < d->ops->made && left > 0; i++) {
        const struct op *op = &d->ops->items[i];
        uint64_t begun_ns = 0;
        if (op->serial == 0)
            continue;
        left--;
        if (s->transfer_count < WAITING_MAX && op->session != NULL &&
            op->session->state == SESSION_OPEN &&
            (links_waiting(op, &begun_ns) || links_joining(op, &begun_ns)))
            s->transfers[s->transfer_count++] = transfer_of(op, begun_ns);
    }
}

/* -- All ----------------------------------------------------------------------------------------
 */

_Static_assert(sizeof((struct view_quota){ 0 }.who) == QUOTA_WHO_BYTES, "of a quota");

/* Without memory none is shown. */
static void take_quotas(const struct daemon *d, struct view_snapshot *s)
{
    struct quota_shown *shown = sys_calloc(QUOTA_SHOWN_MAX, sizeof *shown);
    const uint32_t count = shown != NULL ? quota_show(d->quota, shown) : 0;
    s->quotas = count > 0 ? sys_calloc(count, sizeof *s->quotas) : NULL;
    s->quota_count = s->quotas != NULL ? count : 0;
    for (uint32_t i = 0; i < s->quota_count; i++) {
        memcpy(s->quotas[i].who, shown[i].who, sizeof s->quotas[i].who);
        s->quotas[i].used = shown[i].used;
        s->quotas[i].limit = shown[i].limit;
    }
    free(shown);
}

static void take_daemon(const struct daemon *d, struct view_snapshot *s)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    s->daemon = view_daemon_of(d);
    s->taken_ns = uv_hrtime();
    s->time_s = (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
    s->uptime_s = (double)(s->taken_ns - d->started_ns) * 1e-9;
    s->draining = d->drain_session != 0;
    s->restored_bytes = atomic_load(&d->restore.bytes_done);
    s->restore_bytes = atomic_load(&d->restore.bytes_total);
    s->requests = d->requests;
    s->bad_frames = d->mailbox->bad_frames;
    s->dropped_replies = d->mailbox->dropped_replies;
    s->repeated_replies = d->mailbox->repeated_replies;
    s->kernel_count = view_kernels_of(d, s->kernels);
    s->ring_bytes = mailbox_ring_bytes(d);
    take_quotas(d, s);
    s->metrics = *d->metrics;
}

void view_unref(struct view_snapshot *s)
{
    if (s == NULL || atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) > 1)
        return;
    for (uint32_t i = 0; s->models != NULL && i < s->model_count; i++) {
        spec_free(s->models[i].spec);
        free(s->models[i].units);
        free(s->models[i].leases);
        free(s->models[i].missing);
        free(s->models[i].waiting_list);
        free(s->models[i].last.settings);
        free(s->models[i].last.verified);
        metrics_model_deinit(&s->models[i].metrics);
    }
    for (uint32_t i = 0; s->sessions != NULL && i < s->session_count; i++)
        free(s->sessions[i].spans);
    free(s->models);
    free(s->sessions);
    free(s->transfers);
    free(s->quotas);
    free(s);
}

struct view_snapshot *view_take(struct daemon *d, bool with_spans)
{
    struct view_snapshot *s = sys_calloc(1, sizeof *s);
    if (s == NULL)
        return NULL;
    atomic_init(&s->refs, 1);
    take_daemon(d, s);
    s->models = sys_calloc(d->model_count + 1, sizeof *s->models); /* and the one that is filled */
    s->sessions = sys_calloc(d->sessions->used + 1, sizeof *s->sessions);
    s->transfers = sys_calloc(d->comm != NULL ? WAITING_MAX : 1, sizeof *s->transfers);
    bool ok = s->models != NULL && s->sessions != NULL && s->transfers != NULL;
    for (uint32_t i = 0; ok && i < d->model_count; i++) {
        s->model_count = i + 1;
        ok = take_model(d->models[i], &s->models[i], s->taken_ns);
    }
    if (ok && d->open->filling != NULL)
        ok = take_model(d->open->filling, &s->models[s->model_count++], s->taken_ns);
    ok = ok && take_sessions(d, s, with_spans);
    if (ok)
        take_transfers(d, s);
    /* Taking the sessions has added what their workers counted. */
    for (uint32_t i = 0; ok && i < d->model_count; i++)
        s->models[i].metrics.fetch_wait = d->models[i]->metrics->fetch_wait;
    if (!ok) {
        view_unref(s);
        return NULL;
    }
    return s;
}
