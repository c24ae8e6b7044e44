/* See json.h. */
#include "daemon/view/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "daemon/base/log.h"
#include "daemon/core/verify.h"
#include "daemon/model/adopt.h"
#include "daemon/view/snapshot.h"
#include "daemon/view/waits.h"
#include "proto/base/clock.h"
#include "proto/base/process.h"
#include "proto/base/version.h"
#include "proto/spec/guard.h"

static json_t *real_or_null(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

static double seconds_between(uint64_t since_ns, uint64_t until_ns)
{
    return until_ns > since_ns ? (double)(until_ns - since_ns) * S_PER_NS : 0.0;
}

/* -- Models -------------------------------------------------------------------------------------
 */

/* Of a model; the list of more is of no use, and takes megabytes. */
#define UNITS_LISTED_MAX 4096u

/* Of the last committed step: not of one that was put, or of a unit without gradient. */
static bool has_norm(const struct view_model *vm, uint32_t unit)
{
    return vm->units[unit].norm_step > 0 && !vm->spec->units[unit].frozen &&
           !vm->spec->units[unit].mean;
}

static json_t *units_json(const struct view_model *vm, bool brief)
{
    if (brief || vm->spec->unit_count > UNITS_LISTED_MAX)
        return json_integer((json_int_t)vm->spec->unit_count);
    json_t *units = json_array();
    for (uint32_t u = 0; u < vm->spec->unit_count; u++) {
        const struct view_unit *unit = &vm->units[u];
        const bool published = unit->version != UINT64_MAX;
        json_array_append_new(
            units,
            json_pack("{s:s, s:b, s:b, s:I, s:o, s:I, s:o}", "name", vm->spec->units[u].name,
                      "frozen", (int)vm->spec->units[u].frozen, "mean",
                      (int)vm->spec->units[u].mean, "elems", (json_int_t)unit->elems, "version",
                      published ? json_integer((json_int_t)unit->version) : json_null(), "returned",
                      (json_int_t)unit->returned, "grad_norm",
                      has_norm(vm, u) ? real_or_null(unit->grad_norm) : json_null()));
    }
    return units;
}

static json_t *leases_json(const struct view_model *vm, uint64_t taken_ns)
{
    json_t *leases = json_array();
    for (uint32_t i = 0; i < vm->lease_count; i++) {
        const struct view_lease *l = &vm->leases[i];
        json_array_append_new(
            leases, json_pack("{s:I, s:I, s:f, s:b}", "group", (json_int_t)l->group, "session",
                              (json_int_t)l->session, "age_s",
                              seconds_between(l->since_ns, taken_ns), "backup", (int)l->backup));
    }
    return leases;
}

static json_t *bytes_json(const struct view_model *vm)
{
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "state",
                     (json_int_t)vm->bytes.state, "publish", (json_int_t)vm->bytes.publish, "inbox",
                     (json_int_t)vm->bytes.inbox, "board", (json_int_t)vm->bytes.board, "ledger",
                     (json_int_t)vm->bytes.ledger, "spec", (json_int_t)vm->bytes.spec, "spill",
                     (json_int_t)vm->bytes.spill, "spilled", (json_int_t)vm->bytes.spilled, "spare",
                     (json_int_t)vm->bytes.spare, "huge", (json_int_t)vm->bytes.huge, "counted",
                     (json_int_t)vm->bytes.counted);
}

static json_t *maker_json(const struct view_model *vm)
{
    if (!vm->bytes.maker.known)
        return json_null();
    return json_pack("{s:I, s:I}", "uid", (json_int_t)vm->bytes.maker.uid, "gid",
                     (json_int_t)vm->bytes.maker.gid);
}

static json_t *quotas_json(const struct view_snapshot *s)
{
    json_t *quotas = json_array();
    for (uint32_t i = 0; i < s->quota_count; i++) {
        const struct view_quota *q = &s->quotas[i];
        json_array_append_new(quotas,
                              json_pack("{s:s, s:I, s:I}", "who", q->who, "used",
                                        (json_int_t)q->used, "limit", (json_int_t)q->limit));
    }
    return quotas;
}

/* What is on files, and snapshots in memory; what other models have as well. */
static void add_files(json_t *bytes, const struct view_model *vm)
{
    json_object_set_new(bytes, "common", json_integer((json_int_t)vm->bytes.common));
    json_object_set_new(bytes, "common_counted",
                        json_integer((json_int_t)vm->bytes.common_counted));
    json_object_set_new(bytes, "snapshots", json_integer((json_int_t)vm->bytes.snapshots));
    json_object_set_new(bytes, "state_on_files", json_integer((json_int_t)vm->bytes.file_state));
    json_object_set_new(bytes, "publish_on_files",
                        json_integer((json_int_t)vm->bytes.file_publish));
    json_object_set_new(bytes, "snapshots_on_files",
                        json_integer((json_int_t)vm->bytes.file_snapshots));
}

static json_t *homes_json(const struct view_daemon *d)
{
    return json_pack("{s:s, s:s, s:s}", "state", d->state_home, "publish", d->publish_home,
                     "snapshots", d->snapshots_home);
}

static json_t *ms_or_null(bool seen, uint64_t ns)
{
    return seen ? json_real((double)ns * MS_PER_NS) : json_null();
}

static json_t *times_json(const struct metrics_model *mm)
{
    return json_pack("{s:o, s:o, s:o}", "collect", ms_or_null(mm->has_collect, mm->collect_ns),
                     "decide", ms_or_null(mm->has_decide, mm->decide_ns), "apply",
                     ms_or_null(mm->has_apply, mm->apply_ns));
}

static json_t *rates_json(const struct metrics_rates *r)
{
    return json_pack("{s:f, s:f, s:f}", "steps_per_s", r->steps_per_s, "returns_per_s",
                     r->returns_per_s, "bytes_per_s", r->bytes_per_s);
}

static json_t *checkpoint_json(const struct view_model *vm)
{
    const struct checkpoint_progress *c = &vm->captures.checkpoint;
    if (!vm->captures.saves)
        return json_null();
    return json_pack("{s:I, s:s, s:I, s:I}", "step", (json_int_t)c->step, "state",
                     c->writing ? "writing" : "armed", "bytes_done", (json_int_t)c->bytes_done,
                     "bytes_total", (json_int_t)c->bytes_total);
}

/* Steps that readers have pinned. */
static json_t *pins_json(const struct view_model *vm)
{
    json_t *pins = json_array();
    for (uint32_t i = 0; i < vm->captures.pin_count; i++) {
        const struct view_pin *pin = &vm->captures.pins[i];
        json_array_append_new(pins, json_pack("{s:I, s:s, s:I, s:I}", "step", (json_int_t)pin->step,
                                              "state", pin->ready ? "ready" : "armed", "bytes",
                                              (json_int_t)pin->bytes, "sessions",
                                              (json_int_t)pin->sessions));
    }
    return pins;
}

/* The last checkpoint that was written here. */
static json_t *saved_json(const struct metrics_model *mm, uint64_t now_ns)
{
    if (mm->saved.ns == 0)
        return json_null();
    const double age_s = now_ns > mm->saved.ns ? (double)(now_ns - mm->saved.ns) * S_PER_NS : 0;
    return json_pack("{s:I, s:f}", "step", (json_int_t)mm->saved.step, "age_s", age_s);
}

/* The sum and the decision of the last sealed step. */
static void add_record(json_t *model, const struct step_prepared *record)
{
    const bool sealed = record->step != UINT64_MAX;
    json_t *metrics = json_array();
    for (uint32_t i = 0; sealed && i < record->metric_count; i++)
        json_array_append_new(metrics, real_or_null(record->metrics[i]));
    const double norm = sealed && record->finite ? sqrt(fixsum_value(&record->sum)) : NAN;
    json_object_set_new(model, "last_sum_norm", real_or_null(norm));
    json_object_set_new(model, "last_skipped",
                        json_boolean(record->has_decision && record->decision.skip));
    json_object_set_new(model, "metrics", metrics);
}

static json_t *guard_json(const struct decision_guard *g)
{
    char text[GUARD_TEXT_BYTES];
    return json_pack("{s:s, s:b, s:o, s:o, s:s}", "rule", guard_name(g->what), "stop", (int)g->stop,
                     "value", real_or_null(g->value), "bound", real_or_null(g->bound), "text",
                     guard_text(g, text));
}

static json_t *sender_json(const struct step_cause *c)
{
    if (c->pid == 0)
        return json_null();
    return json_pack("{s:s, s:I, s:o}", "name", c->worker, "pid", (json_int_t)c->pid, "rank",
                     c->rank > 0 ? json_integer((json_int_t)c->rank - 1) : json_null());
}

/* Where a step that was skipped came from, in words, too. */
static json_t *cause_json(const struct spec *spec, const struct decision_guard *by,
                          const struct step_cause *c)
{
    char text[GUARD_SKIP_BYTES];
    const bool known = c->of.unit > 0, has_micro = c->of.group > 0;
    const struct guard_cause told = {
        .unit = known ? spec->units[c->of.unit - 1].name : NULL,
        .norm = c->of.norm,
        .audited = spec->guard_audit,
        .has_micro = has_micro,
        .micro = has_micro ? (uint64_t)(c->of.group - 1) * spec->accumulate : 0,
        .share = (double)c->of.share,
        .worker = c->pid > 0 ? c->worker : NULL,
        .pid = c->pid,
        .rank = c->rank,
    };
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:s}", "unit",
                     known ? json_string(told.unit) : json_null(), "norm",
                     known ? real_or_null(told.norm) : json_null(), "micro",
                     has_micro ? json_integer((json_int_t)told.micro) : json_null(), "share",
                     has_micro ? real_or_null(told.share) : json_null(), "worker", sender_json(c),
                     "text", guard_skip_text(by, &told, text));
}

/* What a guard did: to the last sealed step, and whether anything is trained. */
static void add_guard(json_t *model, const struct view_model *vm)
{
    const struct step_prepared *record = &vm->last.sealed;
    const struct step_stopped *stopped = &vm->last.stopped;
    const bool by_guard = record->has_decision && record->decision.guard.what != GUARD_NONE;
    json_object_set_new(model, "last_guard",
                        by_guard ? guard_json(&record->decision.guard) : json_null());
    json_object_set_new(model, "stopped",
                        vm->owner == 0 && vm->last.is_stopped
                            ? json_pack("{s:I, s:o, s:o}", "step", (json_int_t)stopped->step,
                                        "guard", guard_json(&stopped->by), "cause",
                                        cause_json(vm->spec, &stopped->by, &vm->last.stopped_cause))
                            : json_null());
    json_object_set_new(model, "last_cause",
                        record->has_decision && record->decision.skip && record->decision.put == 0
                            ? cause_json(vm->spec, &record->decision.guard, &vm->last.sealed_cause)
                            : json_null());
}

/* What the last committed step came to. */
static void add_result(json_t *model, const struct view_model *vm)
{
    json_object_set_new(model, "loss", real_or_null(view_loss(vm)));
    json_object_set_new(model, "grad_norm", real_or_null(vm->last.committed.norm));
    json_object_set_new(model, "lr", real_or_null(vm->last.committed.lr));
}

/* The first step that does not begin while the daemon drains. */
static json_t *hold_json(const struct view_model *vm, bool draining)
{
    return draining ? json_integer((json_int_t)vm->hold_step) : json_null();
}

/* At owner 0; null: nothing is set. */
static json_t *settings_of(const struct view_model *vm)
{
    json_t *o = vm->last.settings != NULL ? json_loads(vm->last.settings, 0, NULL) : NULL;
    return o != NULL ? o : json_null();
}

/* -- What was verified --------------------------------------------------------------------------
 */

static json_t *verified_worker(const struct verify_worker *w)
{
    return json_pack("{s:s, s:I, s:o}", "name", w->name, "pid", (json_int_t)w->pid, "rank",
                     w->rank > 0 ? json_integer((json_int_t)w->rank - 1) : json_null());
}

static json_t *difference_json(const struct view_model *vm, const struct verify_difference *d)
{
    const struct verify_worker *wrong = d->verdict == VERIFY_FIRST    ? &d->worker[0]
                                        : d->verdict == VERIFY_SECOND ? &d->worker[1]
                                                                      : NULL;
    return json_pack("{s:I, s:I, s:s, s:I, s:[o, o], s:o}", "step", (json_int_t)d->step, "micro",
                     (json_int_t)d->group * vm->spec->accumulate, "unit",
                     vm->spec->units[d->unit].name, "units", (json_int_t)d->units, "workers",
                     verified_worker(&d->worker[0]), verified_worker(&d->worker[1]), "wrong_pid",
                     wrong != NULL ? json_integer((json_int_t)wrong->pid) : json_null());
}

static json_t *verified_json(const struct view_model *vm)
{
    const struct verify_state *v = vm->last.verified;
    if (v == NULL)
        return json_null();
    json_t *recent = json_array(), *workers = json_array();
    for (uint32_t i = 0; i < v->recent_count; i++)
        json_array_append_new(recent, difference_json(vm, &v->recent[i]));
    for (uint32_t i = 0; i < v->worker_count; i++) {
        const struct verify_count *c = &v->workers[i];
        json_t *o = verified_worker(&c->worker);
        json_object_set_new(o, "compared", json_integer((json_int_t)c->compared));
        json_object_set_new(o, "differences", json_integer((json_int_t)c->differences));
        json_object_set_new(o, "wrong", json_integer((json_int_t)c->wrong));
        json_object_set_new(o, "suspect", json_boolean(c->suspect));
        json_array_append_new(workers, o);
    }
    return json_pack("{s:I, s:I, s:I, s:I, s:o, s:o}", "every", (json_int_t)v->every, "compared",
                     (json_int_t)v->compared, "differences", (json_int_t)v->differences, "missed",
                     (json_int_t)v->missed, "recent", recent, "workers", workers);
}

static json_t *model_json(const struct view_model *vm, const struct view_snapshot *s, bool brief)
{
    json_t *bytes = bytes_json(vm);
    add_files(bytes, vm);
    json_t *model = json_pack(
        "{s:s, s:b, s:b, s:s, s:I, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:o, "
        "s:o, s:o, s:o, s:o, s:o}",
        "name", vm->spec->name, "ready", (int)vm->ready, "adopted", (int)vm->adopted, "status",
        status_name(vm->status), "step", (json_int_t)vm->step, "phase", step_phase_name(vm->phase),
        "updates", (json_int_t)vm->updates, "owner", (json_int_t)vm->owner, "owners",
        (json_int_t)vm->owners, "elems", (json_int_t)vm->elems, "micro_batches",
        (json_int_t)vm->returns, "expected", (json_int_t)vm->expected, "returned",
        (json_int_t)vm->returned, "waiting", (json_int_t)vm->waiting, "units",
        units_json(vm, brief), "bytes", bytes, "rates", rates_json(&vm->rates), "times_ms",
        times_json(&vm->metrics), "leases",
        brief ? json_integer((json_int_t)vm->lease_count) : leases_json(vm, s->taken_ns),
        "checkpoint", checkpoint_json(vm), "saved", saved_json(&vm->metrics, s->taken_ns),
        "hold_step", hold_json(vm, s->draining));
    if (model != NULL)
        json_object_set_new(model, "pins", pins_json(vm));
    if (model != NULL)
        json_object_set_new(model, "state_on",
                            json_string(vm->bytes.file_state > 0 ? "file" : "memory"));
    if (model != NULL)
        json_object_set_new(model, "made_by", maker_json(vm));
    if (model != NULL)
        add_record(model, &vm->last.sealed);
    if (model != NULL)
        add_guard(model, vm);
    if (model != NULL)
        add_result(model, vm);
    if (model != NULL)
        json_object_set_new(model, "settings", settings_of(vm));
    if (model != NULL)
        json_object_set_new(model, "verify", verified_json(vm));
    return model;
}

/* -- Sessions -----------------------------------------------------------------------------------
 */

static json_t *place_or_null(uint32_t place)
{
    return place != ACTIVITY_NONE ? json_integer((json_int_t)place) : json_null();
}

static json_t *now_json(const struct activity_span *now, uint64_t taken_ns)
{
    const char *what = activity_name(now->what);
    if (what == NULL)
        return json_null();
    return json_pack("{s:s, s:o, s:o, s:I, s:f}", "what", what, "unit", place_or_null(now->unit),
                     "micro", place_or_null(now->micro), "step", (json_int_t)now->step, "since_s",
                     seconds_between(now->begin_ns, taken_ns));
}

static json_t *session_json(const struct view_session *vs, uint64_t taken_ns)
{
    return json_pack("{s:I, s:s, s:o, s:i, s:I, s:s, s:f, s:s, s:I, s:I, s:I, s:o, s:o}", "id",
                     (json_int_t)vs->id, "name", vs->name, "rank",
                     vs->rank > 0 ? json_integer((json_int_t)vs->rank - 1) : json_null(), "pid",
                     (int)vs->pid, "uid", (json_int_t)vs->uid, "role", vs->role, "age_s",
                     seconds_between(vs->since_ns, taken_ns), "state",
                     process_state(vs->pid, vs->start_time), "slots", (json_int_t)vs->slots,
                     "slots_waiting", (json_int_t)vs->slots_waiting, "requests_pending",
                     (json_int_t)vs->requests_pending, "path",
                     vs->path != NULL ? json_string(vs->path) : json_null(), "now",
                     now_json(&vs->now, taken_ns));
}

/* -- The daemon ---------------------------------------------------------------------------------
 */

static json_t *adopted_json(const struct adopt *a)
{
    json_t *refused = json_array();
    for (uint32_t i = 0; i < a->refused_count; i++)
        json_array_append_new(refused, json_pack("{s:s, s:s, s:s}", "name", a->refused[i].name,
                                                 "status", status_name(a->refused[i].why.code),
                                                 "why", a->refused[i].why.text));
    return json_pack("{s:I, s:f, s:f, s:o}", "models", (json_int_t)a->models, "at_s", a->at_s, "ms",
                     a->ms, "refused", refused);
}

static json_t *errors_json(void)
{
    struct log_entry entries[LOG_ENTRIES];
    const uint32_t count = log_recent(entries);
    json_t *errors = json_array();
    for (uint32_t i = 0; i < count; i++)
        json_array_append_new(errors,
                              json_pack("{s:f, s:s, s:s}", "time_s", entries[i].time_s, "level",
                                        log_level_name(entries[i].level), "text", entries[i].text));
    return errors;
}

static json_t *restore_json(const struct view_snapshot *s)
{
    if (s->restore_bytes == 0)
        return json_null();
    return json_pack("{s:I, s:I}", "bytes_done", (json_int_t)s->restored_bytes, "bytes_total",
                     (json_int_t)s->restore_bytes);
}

static json_t *kernels_json(const struct view_snapshot *s)
{
    json_t *kernels = json_array();
    for (uint32_t i = 0; i < s->kernel_count; i++) {
        const struct view_kernel *k = &s->kernels[i];
        json_array_append_new(kernels, json_pack("{s:s, s:s, s:f, s:s, s:f, s:f}", "work", k->work,
                                                 "isa", k->isa, "ns", k->ns, "beside", k->beside,
                                                 "beside_ns", k->beside_ns, "ratio", k->ratio));
    }
    return kernels;
}

static json_t *daemon_json(const struct view_snapshot *s, uint64_t now_ns)
{
    const struct view_daemon *d = &s->daemon;
    return json_pack(
        "{s:i, s:s, s:s, s:s, s:o, s:i, s:f, s:f, s:f, s:I, s:s, s:o, s:s, s:o, s:b, s:o, s:I, "
        "s:I, s:I, s:I, s:I}",
        "schema", VIEW_SCHEMA, "version", SHARDD_VERSION, "device", d->device, "place", d->place,
        "gpu",
        d->gpu != NULL ? json_pack("{s:s, s:s}", "name", d->gpu, "uuid", d->gpu_uuid) : json_null(),
        "pid", (int)getpid(), "uptime_s", s->uptime_s, "time_s", s->time_s, "stale_ms",
        seconds_between(s->taken_ns, now_ns) * 1e3, "threads", (json_int_t)d->threads, "isa",
        d->isa, "kernels", kernels_json(s), "keeper", d->keeper, "adopted", adopted_json(d->adopt),
        "draining", (int)s->draining, "restore", restore_json(s), "requests",
        (json_int_t)s->requests, "bad_frames", (json_int_t)s->bad_frames, "dropped_replies",
        (json_int_t)s->dropped_replies, "repeated_replies", (json_int_t)s->repeated_replies,
        "ring_bytes", (json_int_t)s->ring_bytes);
}

enum length {
    LENGTH_WHOLE,
    LENGTH_BRIEF, /* counts take the place of lists that are as long as a model; waits and errors
                   * are left out */
    LENGTH_LEAST, /* sessions are a count, too */
};

static json_t *document(const struct view_snapshot *s, uint64_t now_ns, enum length length)
{
    const bool brief = length >= LENGTH_BRIEF;
    json_t *root = daemon_json(s, now_ns);
    json_t *models = json_array(), *sessions = json_array();
    double longest_s[VIEW_WAIT_KINDS];
    for (uint32_t i = 0; i < s->model_count; i++)
        json_array_append_new(models, model_json(&s->models[i], s, brief));
    for (uint32_t i = 0; length < LENGTH_LEAST && i < s->session_count; i++)
        json_array_append_new(sessions, session_json(&s->sessions[i], s->taken_ns));
    if (root == NULL) {
        json_decref(models);
        json_decref(sessions);
        return NULL;
    }
    json_object_set_new(root, "homes", homes_json(&s->daemon));
    json_object_set_new(root, "models", models);
    json_object_set_new(root, "quotas", quotas_json(s));
    if (length >= LENGTH_LEAST) {
        json_decref(sessions);
        sessions = json_integer((json_int_t)s->session_count);
    }
    json_object_set_new(root, "sessions", sessions);
    if (brief)
        return root;
    json_t *headline = NULL;
    json_object_set_new(root, "waits", view_waits(s, longest_s, &headline));
    json_object_set_new(root, "headline", headline);
    json_object_set_new(root, "errors", errors_json());
    return root;
}

char *view_json(const struct view_snapshot *s, uint64_t now_ns, size_t bytes_max, size_t *ret_bytes)
{
    for (enum length length = LENGTH_WHOLE;; length++) {
        json_t *root = document(s, now_ns, length);
        char *text = root != NULL ? json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(15)) : NULL;
        json_decref(root);
        if (text == NULL)
            return NULL;
        *ret_bytes = strlen(text);
        if (length == LENGTH_LEAST || *ret_bytes <= bytes_max)
            return text;
        free(text);
    }
}
