/* STATUS: what this daemon holds and who is attached, as JSON (schema 1: docs/protocol.md). Holds
 * no tensor data and no token. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "daemon/base/state.h"
#include "daemon/model/inbox.h"
#include "daemon/model/model.h"
#include "daemon/net/mailbox.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "daemon/op/requests.h"
#include "daemon/view/json.h"
#include "proto/base/version.h"

#define CONTROL_SCHEMA 1 /* of this document; /status is another, larger one (docs/status.md) */

static json_t *real_or_null(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

/* Who computes what of the step, where work is handed out. */
static json_t *leases_json(const struct model *m)
{
    const uint64_t now_ns = uv_now(m->daemon->loop) * 1000000;
    json_t *leases = json_array();
    for (uint32_t group = 0; group < spec_returns(m->spec); group++) {
        uint64_t session[2], since_ns[2];
        lease_holders(m->lease, group, session, since_ns);
        for (int i = 0; i < 2 && session[i] != 0 && !step_micro_in(m->core, group); i++)
            json_array_append_new(
                leases,
                json_pack("{s:I, s:I, s:f, s:b}", "group", (json_int_t)group, "session",
                          (json_int_t)session[i], "age_s",
                          now_ns > since_ns[i] ? (double)(now_ns - since_ns[i]) * 1e-9 : 0.0,
                          "backup", i));
    }
    return leases;
}

static uint32_t count_ops(const struct op *op)
{
    uint32_t count = 0;
    for (; op != NULL; op = op->next)
        count++;
    return count;
}

static json_t *bytes_json(const struct model *m)
{
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "state", (json_int_t)m->state.bytes,
                     "publish", (json_int_t)m->publish.bytes, "inbox", (json_int_t)m->inbox_bytes,
                     "board", (json_int_t)m->board_segment.bytes, "ledger",
                     (json_int_t)m->ledger_segment.bytes, "spill", (json_int_t)m->spill.bytes,
                     "spilled", (json_int_t)m->spill.bytes_total);
}

static json_t *model_json(const struct model *m)
{
    const struct step *core = m->core;
    const struct step_prepared *record = step_record(core);
    const bool sealed = record->step != UINT64_MAX;
    json_t *metrics = json_array();
    for (uint32_t i = 0; sealed && i < record->metric_count; i++)
        json_array_append_new(metrics, real_or_null(record->metrics[i]));
    const double norm = sealed && record->finite ? sqrt(fixsum_value(&record->sum)) : NAN;
    return json_pack(
        "{s:s, s:b, s:b, s:I, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:b, "
        "s:o, s:o, s:I, s:I, s:o}",
        "name", m->spec->name, "ready", (int)m->ready, "adopted", (int)m->adopted, "step",
        (json_int_t)step_now(core), "phase", step_phase_name(step_phase(core)), "updates",
        (json_int_t)step_updates(core), "owner", (json_int_t)m->map->owner, "owners",
        (json_int_t)m->map->owners, "units", (json_int_t)m->spec->unit_count, "micro_batches",
        (json_int_t)m->spec->micro_batches, "expected", (json_int_t)step_cells(core), "returned",
        (json_int_t)step_cells_in(core), "waiting", (json_int_t)step_cells_waiting(core), "elems",
        (json_int_t)m->map->elems, "bytes", bytes_json(m), "last_sum_norm", real_or_null(norm),
        "last_skipped", (int)(record->has_decision && record->decision.skip), "metrics", metrics,
        "leases", leases_json(m), "requests_waiting", (json_int_t)count_ops(m->waiting),
        "leases_waiting", (json_int_t)count_ops(m->lease_waiting), "hold_step",
        m->daemon->drain_session != 0 ? json_integer((json_int_t)m->hold_step) : json_null());
}

static json_t *session_json(const struct session *s)
{
    uint32_t slots = 0, waiting = 0;
    for (uint32_t i = 0; i < s->inbox_count; i++) {
        slots += s->inboxes[i]->slots;
        waiting += (uint32_t)__builtin_popcountll(s->inboxes[i]->busy);
    }
    return json_pack("{s:I, s:s, s:I, s:I, s:s, s:f, s:I, s:I, s:I, s:I}", "id",
                     (json_int_t)(s->id), "name", s->name, "pid", (json_int_t)s->peer.pid, "uid",
                     (json_int_t)s->peer.uid, "role", session_role_name(s->role), "age_s",
                     (double)(uv_hrtime() - s->since_ns) * 1e-9, "models",
                     (json_int_t)s->inbox_count, "slots", (json_int_t)slots, "slots_waiting",
                     (json_int_t)waiting, "requests_pending", (json_int_t)s->ops);
}

static json_t *status_json(struct daemon *d)
{
    json_t *models = json_array(), *sessions = json_array();
    for (uint32_t i = 0; i < d->model_count; i++)
        json_array_append_new(models, model_json(d->models[i]));
    for (uint32_t i = 0; i < SESSIONS_MAX; i++)
        if (d->sessions->items[i].state == SESSION_OPEN)
            json_array_append_new(sessions, session_json(&d->sessions->items[i]));
    return json_pack(
        "{s:i, s:s, s:s, s:s, s:I, s:f, s:I, s:s, s:s, s:o, s:b, s:I, s:I, s:I, s:I, s:o, s:o}",
        "schema", CONTROL_SCHEMA, "version", SHARDD_VERSION, "device", d->device, "place",
        segment_place_name(d->kern->ops->place), "pid", (json_int_t)getpid(), "uptime_s",
        (double)(uv_hrtime() - d->started_ns) * 1e-9, "threads", (json_int_t)d->threads, "isa",
        d->kern->ops->name, "keeper", keeper_name(d->keeper), "adopted", view_adopted(d->adopt),
        "draining", (int)(d->drain_session != 0), "requests", (json_int_t)d->requests, "bad_frames",
        (json_int_t)d->mailbox->bad_frames, "dropped_replies",
        (json_int_t)d->mailbox->dropped_replies, "repeated_replies",
        (json_int_t)d->mailbox->repeated_replies, "models", models, "sessions", sessions);
}

static int op_status(struct op *op)
{
    json_t *root = status_json(op->daemon);
    op->text = root != NULL ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    if (op->text == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for the status text");
    op->reply.type = WIRE_STATUS_TEXT;
    op->reply.status_text = (struct wire_status_text){
        .json = { (const uint8_t *)op->text, strlen(op->text) },
    };
    return SHD_OK;
}

const struct request request_status = { op_status, ANY_ROLE };
