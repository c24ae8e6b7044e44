/* Requests of a step, in the order in which a worker sends them: RETURN, PREPARE, COMMIT. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/state.h"
#include "daemon/core/step.h"
#include "daemon/core/step_commit.h"
#include "daemon/model/apply.h"
#include "daemon/model/drain.h"
#include "daemon/model/inbox.h"
#include "daemon/model/lease_wait.h"
#include "daemon/model/metrics.h"
#include "daemon/model/model.h"
#include "daemon/model/put.h"
#include "daemon/model/reset.h"
#include "daemon/model/skipped.h"
#include "daemon/model/spill.h"
#include "daemon/model/verified.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "daemon/op/receive.h"
#include "daemon/op/requests.h"
#include "kernels/runs.h"
#include "proto/share/board.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec.h"

/* RETURN: a unit's gradient of one micro-batch lies in a slot of the session's inbox. Happy path:
 * checked here, ordered and counted by the core, summed by a kernel, then credited: the reply says
 * that the slot is free. One with a turn is first received into the slot, by the session's link. */

/* Only where it is not the one that all units but means have. */
static int check_dtype(struct op *op)
{
    const struct wire_return *req = &op->req.return_grad;
    const struct spec *spec = op->model->spec;
    const enum shd_dtype dtype = spec_unit_grad_dtype(spec, req->unit);
    if (req->dtype == dtype)
        return SHD_OK;
    return err_set(&op->err, SHD_ESPEC,
                   "gradient of unit %" PRIu32 " '%.40s' is '%s', model '%.60s' has grad_dtype "
                   "'%s'%s",
                   req->unit, spec->units[req->unit].name, dtype_name(req->dtype), spec->name,
                   dtype_name(dtype), dtype != spec->grad_dtype ? " for means" : "");
}

static int check_place(struct op *op)
{
    const struct wire_return *req = &op->req.return_grad;
    const struct spec *spec = op->model->spec;
    if (req->unit >= spec->unit_count)
        return err_set(&op->err, SHD_ERANGE, "unit %" PRIu32 " of a model with %" PRIu32, req->unit,
                       spec->unit_count);
    /* Its first micro-batch; how many this very step has is the core's to check. */
    if ((uint64_t)req->micro * spec->accumulate >= spec->micro_batches)
        return err_set(&op->err, SHD_ERANGE,
                       "micro-batch %" PRIu32 " of a step with %" PRIu32 " (groups of %" PRIu32 ")",
                       req->micro, spec_returns(spec), spec->accumulate);
    if (spec->units[req->unit].frozen)
        return err_set(&op->err, SHD_EINVAL, "unit %" PRIu32 " '%s' is frozen: it has no gradient",
                       req->unit, spec->units[req->unit].name);
    const bool others = req->dtype != spec->grad_dtype || spec->units[req->unit].mean;
    return others && !req->none ? check_dtype(op) : SHD_OK;
}

static void remember_sender(struct model *m, uint32_t group, const struct session *s)
{
    const struct metrics_who *who = &m->metrics->who;
    if (who->senders != NULL && who->senders[group].session == s->id)
        return;
    struct metrics_sender sender = {
        .session = s->id, .pid = s->pid, .start_time = s->start_time, .rank = s->rank
    };
    snprintf(sender.name, sizeof sender.name, "%.*s", (int)sizeof sender.name - 1, s->name);
    metrics_remember_sender(m->metrics, spec_returns(m->spec), group, &sender);
}

/* Numbers are summed by their places, so all of a step must have the same names. */
static int check_names(struct op *op)
{
    const struct wire_return *req = &op->req.return_grad;
    struct metrics_names *names = &op->model->metrics->names;
    _Static_assert(sizeof names->text == WIRE_NAME_BYTES_MAX, "a message's names fit");
    if (req->metric_count == 0 || req->metric_names[0] == '\0' ||
        req->step != step_collecting(op->model->core))
        return SHD_OK;
    if (names->text[0] == '\0' || names->step != req->step || names->attempt != req->attempt) {
        *names = (struct metrics_names){ req->step, req->attempt, req->micro, "" };
        snprintf(names->text, sizeof names->text, "%s", req->metric_names);
    }
    if (names->group == req->micro || strcmp(names->text, req->metric_names) == 0)
        return SHD_OK; /* its own again: the first ones count */
    return err_set(&op->err, SHD_EINVAL,
                   "metrics '%s' of micro-batch %" PRIu32 " in a step in which micro-batch %" PRIu32
                   " has '%s': all workers report the same ones",
                   req->metric_names, req->micro, names->group, names->text);
}

/* The step was begun anew since: what its sender computed before counts for nothing. */
static void credit_unused(const struct op *op)
{
    const struct step_actions actions = {
        .items[0] = { .kind = STEP_DO_CREDIT, .ref = op->index + 1, .stale = true }, .count = 1
    };
    apply_actions(op->model, &actions);
}

static int keep_names(struct op *op)
{
    const char **names = &op->req.return_grad.metric_names;
    const int r = op_keep(op, *names, (*names)[0] != '\0' ? strlen(*names) + 1 : 0);
    *names = op->text != NULL ? op->text : "";
    return r;
}

/* Most gradients count at once. Not one that comes by a link, that a drain may hold, or that is
 * hashed before. */
static bool may_wait(const struct op *op)
{
    return op->req.return_grad.turn > 0 || op->daemon->drain_session != 0 ||
           (op->model->spec->verify_every > 0 && verified_wants(op));
}

static int take_slot(struct op *op, struct inbox *inbox)
{
    return op->req.return_grad.none || op->inbox != NULL ? SHD_OK : inbox_take_slot(op, inbox);
}

/* SHD_PENDING: the handler is called again. */
static int wait_first(struct op *op, struct inbox *inbox)
{
    const struct wire_return *req = &op->req.return_grad;
    int r = keep_names(op);
    if (r == SHD_OK && req->turn > 0 && !op->received)
        return receive_grad(op, inbox);
    if (r == SHD_OK && drain_holds(op, req->step))
        return SHD_PENDING;
    if (r == SHD_OK)
        r = take_slot(op, inbox);
    return r == SHD_OK ? verified_hash(op) : r;
}

/* Most gradients are in fp32 and in no codes: theirs are counted without leaving this file. */
static uint64_t bytes_of(const struct shardmap *map, const struct wire_return *req)
{
    if (req->none)
        return 0;
    if (req->dtype == SHD_F32 && map->coded_grads == NULL)
        return map->slice[req->unit].elems * sizeof(float);
    return shardmap_grad_bytes(map, req->unit, req->dtype);
}

static void note_arrival(const struct op *op)
{
    const struct wire_return *req = &op->req.return_grad;
    remember_sender(op->model, req->micro, op->session);
    note(op->model->metrics, &(struct note){ .what = TRACE_ARRIVED,
                                             .unit = req->unit,
                                             .group = req->micro,
                                             .session = op->req.session,
                                             .step = req->step,
                                             .since_ns = op->arrived_ns,
                                             .bytes = bytes_of(op->model->map, req) });
}

/* It is in its slot, and counts from here on. */
static int take_gradient(struct op *op)
{
    const struct wire_return *req = &op->req.return_grad;
    struct model *m = op->model;
    struct step_actions actions;
    if (step_when(m->core, req->step, req->attempt) != STEP_WHEN_NOW &&
        !reset_follow(m, req->step, req->attempt)) {
        credit_unused(op);
        return SHD_PENDING;
    }
    int r = check_names(op);
    if (r != SHD_OK)
        return r;
    note_arrival(op);
    if (m->spec->verify_every > 0)
        verified_take(op);
    r = step_return(m->core, op->index + 1, req->step, req->unit, req->micro, req->none,
                    req->metrics, req->metric_count, &actions, &op->err);
    if (r != SHD_OK)
        return r;
    if (op->inbox != NULL && (actions.count == 0 || actions.items[0].kind != STEP_DO_ACCUMULATE))
        spill_watch(op->daemon); /* its turn has not come */
    apply_actions(m, &actions);  /* a stale one is finished here */
    if (m->waits.meet != NULL)
        lease_wait_soon(m); /* the step has begun */
    return SHD_PENDING;
}

static int op_return_grad(struct op *op)
{
    const struct wire_return *req = &op->req.return_grad;
    struct inbox *inbox = inbox_named(op, req->model);
    int r = inbox != NULL ? SHD_OK : model_of(op, req->model);
    if (r == SHD_OK)
        r = check_place(op);
    if (r == SHD_OK && may_wait(op))
        r = wait_first(op, inbox);
    if (r == SHD_OK)
        r = take_slot(op, inbox);
    if (r == SHD_OK)
        r = take_gradient(op);
    if (r != SHD_OK && r != SHD_PENDING)
        inbox_release_slot(op);
    return r;
}

const struct request request_return_grad = { op_return_grad, REQUEST_ROLE(WIRE_TRAINER) };

/* PREPARE: the exact sum of squares of a step's gradients, once all of them are in. */

/* The page's own limits; most: of each unit. */
static int add_limits(struct op *op, uint32_t first, uint32_t count, uint32_t most)
{
    if (most == 0) /* it is not owner 0, or there is no guard */
        return SHD_OK;
    double *limits = op_memory(op, (size_t)count * most * sizeof *limits);
    if (limits == NULL)
        return SHD_ENOMEM;
    const uint32_t told = step_prepare_units(op->model->core, first, count, limits);
    free(op->work);
    op->work = limits; /* freed with the op */
    op->reply.prepared.unit_limits = (struct wire_bytes){ (const uint8_t *)limits,
                                                          told * sizeof *limits };
    return SHD_OK;
}

/* Of a step that is to be skipped, or of units that are looked at: what it came from. */
static int add_sums(struct op *op, uint32_t limits)
{
    const struct wire_prepare *req = &op->req.prepare;
    const struct skipped_ask ask = { req->step, req->unit_sums, req->part_sums,
                                     WIRE_UNIT_SUMS_MAX };
    uint8_t *sums;
    uint32_t count;
    const int r = skipped_sums(op->model, &ask, &sums, &count, &op->err);
    if (r != SHD_OK)
        return r;
    free(op->text);
    op->text = (char *)sums; /* freed with the op */
    if (count == 0)
        return SHD_OK;
    op->reply.prepared.unit_sums = (struct wire_bytes){ sums, (size_t)count * FIXSUM_BYTES };
    op->reply.prepared.unit_sums_from = req->unit_sums;
    op->reply.prepared.part_sums_from = req->part_sums;
    return req->part_sums == 0 ? add_limits(op, req->unit_sums - 1, count, limits) : SHD_OK;
}

/* A worker that passes the decision on tells owner 0's replica what the one before has not. */
static int add_norms(struct op *op)
{
    const struct step *core = op->model->core;
    const uint64_t step = op->req.prepare.step;
    const uint32_t most = step_prepare_norms(core, step, /* ret_norms= */ NULL);
    if (op->session->said.view == 0 || most == 0)
        return SHD_OK;
    double *norms = op_memory(op, most * sizeof *norms);
    if (norms == NULL)
        return SHD_ENOMEM;
    free(op->work);
    op->work = norms; /* freed with the op */
    const uint32_t told = step_prepare_norms(core, step, norms);
    op->reply.prepared.unit_norms = (struct wire_bytes){ (const uint8_t *)norms,
                                                         told * sizeof *norms };
    return SHD_OK;
}

/* Who asks again has given up what it asked before: of a session one waits at most. */
static void replace_waiting(struct op *op)
{
    for (struct op **at = &op->model->waits.phase; *at != NULL; at = &(*at)->next) {
        struct op *other = *at;
        if (other->req.type != WIRE_PREPARE || other->session != op->session)
            continue;
        *at = other->next;
        other->next = NULL;
        op_finish(other, err_set(&other->err, SHD_ESTEP, "the session asks once more"));
        break;
    }
}

static int op_prepare(struct op *op)
{
    const struct wire_prepare *req = &op->req.prepare;
    int r = model_of(op, req->model);
    if (r != SHD_OK)
        return r;
    if (!reset_follow(op->model, req->step, req->attempt))
        return err_set(&op->err, SHD_ERESET,
                       "step %" PRIu64 " was reset: its micro-batches are to be computed again",
                       req->step);
    op->session->prepared = (struct session_prepared){ op->model->handle, req->step };
    struct step_prepared p;
    r = step_prepare(op->model->core, req->step, &p, &op->err);
    if (r == SHD_PENDING) {
        replace_waiting(op);
        model_wait(op->model, op);
    }
    if (r != SHD_OK)
        return r;
    verified_prepared(op->model, req->step);
    op->reply.type = WIRE_PREPARED;
    op->reply.prepared = (struct wire_prepared){ .step = p.step,
                                                 .over = p.over,
                                                 .finite = p.finite,
                                                 .sum = p.sum,
                                                 .metric_count = p.metric_count,
                                                 .reported = p.reported,
                                                 .has_decision = p.has_decision,
                                                 .decision = p.decision };
    memcpy(op->reply.prepared.metrics, p.metrics, sizeof p.metrics);
    model_tell_settings(&p, &op->reply.prepared);
    if (p.limit_count > 0)
        op->reply.prepared.guard = (struct wire_bytes){ (const uint8_t *)p.limits,
                                                        p.limit_count * sizeof *p.limits };
    if (p.has_decision)
        return add_norms(op);
    return req->unit_sums > 0 && !p.over ? add_sums(op, p.limit_count) : SHD_OK;
}

const struct request request_prepare = { op_prepare, REQUEST_ROLE(WIRE_TRAINER) };

/* COMMIT: the first decision for a sealed step is recorded with the client's blob and applied;
 * every later one is answered with the recorded one. */

/* For a wait: the blob, and norms of units, lie in the frame, which will be gone. */
static int keep_blob(struct op *op)
{
    struct wire_bytes *blob = &op->req.commit.blob, *norms = &op->req.commit.unit_norms;
    if (op->text != NULL || blob->bytes + norms->bytes == 0)
        return SHD_OK;
    op->text = op_memory(op, blob->bytes + norms->bytes);
    if (op->text == NULL)
        return SHD_ENOMEM;
    uint8_t *kept = (uint8_t *)op->text;
    if (norms->bytes > 0)
        memcpy(kept, norms->data, norms->bytes);
    if (blob->bytes > 0)
        memcpy(kept + norms->bytes, blob->data, blob->bytes);
    norms->data = kept;
    blob->data = kept + norms->bytes;
    return SHD_OK;
}

/* A predecessor of this process has answered Prepare, and the sums are formed anew. */
static int wait_for_sums(struct op *op)
{
    const int r = keep_blob(op);
    if (r != SHD_OK)
        return r;
    model_wait(op->model, op);
    return SHD_PENDING;
}

/* As step_commit(), with what is to be seen of the step beside its decision. */
static int record(struct op *op, struct step_blob blob, struct decision *ret_decision,
                  enum step_committed *ret_how, struct step_actions *ret_actions)
{
    const struct wire_commit *req = &op->req.commit;
    struct step *core = op->model->core;
    step_seen(core, req->norm, metrics_time_ns());
    step_recorded(core, req->recorded);
    const int r = step_seen_units(core, req->unit_norms.data, req->unit_norms.bytes, &op->err);
    if (r != SHD_OK)
        return r;
    skipped_sender(op->model, req->step, &req->decision);
    return step_commit(core, req->step, &req->decision, blob, ret_decision, ret_how, ret_actions,
                       &op->err);
}

static int op_commit(struct op *op)
{
    const struct wire_commit *req = &op->req.commit;
    int r = model_of(op, req->model);
    if (r != SHD_OK)
        return r;
    struct model *m = op->model;
    struct decision counts = { 0 };
    struct step_actions actions;
    enum step_committed how;
    if (step_when(m->core, req->step, req->attempt) == STEP_WHEN_PAST)
        return err_set(&op->err, SHD_ERESET,
                       "step %" PRIu64 " was given up: the model went back to an earlier one",
                       req->step);
    /* Of an empty blob there may be no buffer, but it replaces the last one. */
    const struct step_blob blob = {
        .data = !req->has_blob        ? NULL
                : req->blob.bytes > 0 ? req->blob.data
                                      : (const void *)"",
        .bytes = req->has_blob ? req->blob.bytes : 0,
    };
    r = runs_check_decision(m->spec, &req->decision, &op->err);
    if (r != SHD_OK)
        return r;
    if (req->step == step_collecting(m->core)) {
        r = put_check(op);
        if (r == SHD_OK && req->decision.put != 0 && op->daemon->drain_session != 0) {
            r = keep_blob(op);
            if (r == SHD_OK && drain_holds(op, req->step))
                return SHD_PENDING;
        }
        if (r != SHD_OK)
            return r;
    }
    while ((r = put_commit(op, &actions)) == SHD_PENDING && actions.count > 0)
        apply_actions(m, &actions);
    if (r == SHD_PENDING)
        return wait_for_sums(op);
    if (r != SHD_OK)
        return r;
    r = record(op, blob, &counts, &how, &actions);
    if (r == SHD_PENDING)
        return wait_for_sums(op);
    if (r != SHD_OK)
        return r;
    if (how == STEP_COMMITTED_FIRST) {
        board_set_step(m->board, req->step, STEP_APPLYING);
        note(m->metrics, &(struct note){ .what = TRACE_DECIDE,
                                         .step = req->step,
                                         .skip = counts.skip,
                                         .guarded = counts.guard.what != 0 });
        skipped_say(m, req->step, &counts);
        spill_step_over(m);
        apply_actions(m, &actions);
        lease_wait_wake(m); /* the next step's work can be handed out */
    }
    op->reply.type = WIRE_COMMITTED;
    op->reply.committed = (struct wire_committed){
        .step = req->step,
        .over = how == STEP_COMMITTED_OVER,
        .decision = counts,
    };
    return SHD_OK;
}

const struct request request_commit = { op_commit, REQUEST_ROLE(WIRE_TRAINER) };
