/* See metrics_text.h.
 *
 * One family after the other, as the format wants it: a name, a help text, a type, samples. */
#include "daemon/view/metrics_text.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/base/log.h"
#include "daemon/core/verify.h"
#include "daemon/model/adopt.h"
#include "daemon/view/snapshot.h"
#include "daemon/view/waits.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/memory.h"
#include "proto/base/version.h"

struct page { /* being written */
    FILE *out;
    const struct view_snapshot *s;
    const char *device;
    double longest_s[VIEW_WAIT_KINDS];
};

/* -- Families -----------------------------------------------------------------------------------
 */

struct family {
    const char *name, *type, *help;
    uint64_t value; /* of the daemon; of a model: where it is in struct view_model */
};

#define OF_MODEL(field) offsetof(struct view_model, field)

static const struct family model_families[] = {
    { "returns_total", "counter", "Gradients that arrived, or word that there is none.",
      OF_MODEL(metrics.returns) },
    { "return_bytes_total", "counter", "Bytes of the gradients that arrived.",
      OF_MODEL(metrics.return_bytes) },
    { "stale_returns_total", "counter", "Gradients that came twice or too late.",
      OF_MODEL(metrics.stale_returns) },
    { "steps_total", "counter", "Steps committed by this process.", OF_MODEL(metrics.steps) },
    { "skipped_steps_total", "counter", "Steps committed without an update.",
      OF_MODEL(metrics.skipped_steps.all) },
    { "guard_skipped_steps_total", "counter", "Of them those that the model's guard skipped.",
      OF_MODEL(metrics.skipped_steps.by_guard) },
    { "stopped", "gauge", "1: a guard has stopped training.", OF_MODEL(last.is_stopped) },
    { "spilled_bytes_total", "counter", "Bytes of gradients moved out of their slots to wait.",
      OF_MODEL(bytes.spilled) },
    { "backup_leases_total", "counter", "Micro-batches given to a second worker as well.",
      OF_MODEL(metrics.backup_leases) },
    { "checkpoints_total", "counter", "Checkpoints written.", OF_MODEL(metrics.checkpoints) },
    { "checkpoint_failures_total", "counter", "Checkpoints that could not be written.",
      OF_MODEL(metrics.failed_checkpoints) },
    { "step", "gauge", "The open step.", OF_MODEL(step) },
    { "waiting_returns", "gauge", "Gradients that wait for earlier micro-batches.",
      OF_MODEL(waiting) },
};

static void begin_family(const struct page *p, const char *name, const char *type, const char *help)
{
    fprintf(p->out, "# HELP shardd_%s %s\n# TYPE shardd_%s %s\n", name, help, name, type);
}

static void write_daemon(const struct page *p)
{
    const struct view_snapshot *s = p->s;
    const struct family families[] = {
        { "up", "gauge", "Whether the daemon answers.", 1 },
        { "requests_total", "counter", "Requests taken in.", s->requests },
        { "sessions", "gauge", "Workers and tools attached now.", s->session_count },
        { "sessions_total", "counter", "Sessions ever opened.", s->metrics.sessions },
        { "session_deaths_total", "counter", "Sessions that ended without a goodbye.",
          s->metrics.session_deaths },
        { "bad_frames_total", "counter", "Messages that could not be decoded.", s->bad_frames },
        { "dropped_events_total", "counter", "Log lines held back by the rate limit.",
          log_suppressed() },
        { "adopted_models_total", "counter", "Models taken over from a predecessor.",
          s->daemon.adopt->models },
    };
    for (size_t i = 0; i < ARRAY_SIZE(families); i++) {
        begin_family(p, families[i].name, families[i].type, families[i].help);
        fprintf(p->out, "shardd_%s{device=\"%s\"} %" PRIu64 "\n", families[i].name, p->device,
                families[i].value);
    }
}

static void write_models(const struct page *p)
{
    for (size_t i = 0; i < ARRAY_SIZE(model_families); i++) {
        const struct family *f = &model_families[i];
        begin_family(p, f->name, f->type, f->help);
        for (uint32_t k = 0; k < p->s->model_count; k++) {
            const struct view_model *m = &p->s->models[k];
            const uint64_t *value = (const void *)((const char *)m + f->value);
            fprintf(p->out, "shardd_%s{device=\"%s\",model=\"%s\"} %" PRIu64 "\n", f->name,
                    p->device, m->spec->name, *value);
        }
    }
}

/* -- With labels of their own -------------------------------------------------------------------
 */

static void write_build(const struct page *p)
{
    begin_family(p, "build_info", "gauge", "Version and kernels of this daemon.");
    fprintf(p->out, "shardd_build_info{device=\"%s\",version=\"%s\",isa=\"%s\"} 1\n", p->device,
            SHARDD_VERSION, p->s->daemon.isa);
}

static void write_memory(const struct page *p)
{
    begin_family(p, "memory_bytes", "gauge", "Memory of a model's segments.");
    for (uint32_t i = 0; i < p->s->model_count; i++) {
        const struct view_model *m = &p->s->models[i];
        const struct {
            const char *kind;
            uint64_t bytes;
        } kinds[] = { { "state", m->bytes.state },         { "publish", m->bytes.publish },
                      { "inbox", m->bytes.inbox },         { "board", m->bytes.board },
                      { "ledger", m->bytes.ledger },       { "spec", m->bytes.spec },
                      { "spill", m->bytes.spill },         { "spare", m->bytes.spare },
                      { "snapshots", m->bytes.snapshots }, { "common", m->bytes.common_counted } };
        for (size_t k = 0; k < ARRAY_SIZE(kinds); k++)
            fprintf(p->out,
                    "shardd_memory_bytes{device=\"%s\",model=\"%s\",kind=\"%s\"} %" PRIu64 "\n",
                    p->device, m->spec->name, kinds[k].kind, kinds[k].bytes);
    }
}

static void write_files(const struct page *p)
{
    begin_family(p, "file_bytes", "gauge", "Of a model's segments on files.");
    for (uint32_t i = 0; i < p->s->model_count; i++) {
        const struct view_model *m = &p->s->models[i];
        fprintf(p->out,
                "shardd_file_bytes{device=\"%s\",model=\"%s\",kind=\"state\"} %" PRIu64
                "\nshardd_file_bytes{device=\"%s\",model=\"%s\",kind=\"publish\"} %" PRIu64
                "\nshardd_file_bytes{device=\"%s\",model=\"%s\",kind=\"snapshots\"} %" PRIu64 "\n",
                p->device, m->spec->name, m->bytes.file_state, p->device, m->spec->name,
                m->bytes.file_publish, p->device, m->spec->name, m->bytes.file_snapshots);
    }
}

static void write_quotas(const struct page *p)
{
    begin_family(p, "quota_bytes", "gauge",
                 "Memory that models of a user or a group take, or the largest model.");
    for (uint32_t i = 0; i < p->s->quota_count; i++)
        fprintf(p->out, "shardd_quota_bytes{device=\"%s\",who=\"%s\"} %" PRIu64 "\n", p->device,
                p->s->quotas[i].who, p->s->quotas[i].used);
    begin_family(p, "quota_limit_bytes", "gauge", "What it may be, by shardd --quota.");
    for (uint32_t i = 0; i < p->s->quota_count; i++)
        fprintf(p->out, "shardd_quota_limit_bytes{device=\"%s\",who=\"%s\"} %" PRIu64 "\n",
                p->device, p->s->quotas[i].who, p->s->quotas[i].limit);
}

static double seconds_since(const struct page *p, uint64_t then_ns)
{
    return p->s->taken_ns > then_ns ? (double)(p->s->taken_ns - then_ns) * S_PER_NS : 0;
}

/* Of steps that readers have pinned. */
static void write_pins(const struct page *p)
{
    static const char *const families[][2] = {
        { "pins", "Steps that readers have pinned." },
        { "pin_bytes", "Memory of steps that readers have pinned." },
        { "pin_seconds", "How long ago the oldest pinned step was copied." },
    };
    for (size_t f = 0; f < ARRAY_SIZE(families); f++) {
        begin_family(p, families[f][0], "gauge", families[f][1]);
        for (uint32_t i = 0; i < p->s->model_count; i++) {
            const struct view_model *m = &p->s->models[i];
            double values[] = { m->captures.pin_count, 0, 0 };
            for (uint32_t k = 0; k < m->captures.pin_count; k++) {
                const struct view_pin *pin = &m->captures.pins[k];
                const double age_s = pin->began_ns > 0 ? seconds_since(p, pin->began_ns) : 0;
                values[1] += (double)pin->bytes;
                values[2] = age_s > values[2] ? age_s : values[2];
            }
            fprintf(p->out, "shardd_%s{device=\"%s\",model=\"%s\"} %.*f\n", families[f][0],
                    p->device, m->spec->name, f == 2 ? 3 : 0, values[f]);
        }
    }
}

/* Of what has not been seen since the process began there is no sample. */
static void write_ages(const struct page *p)
{
    begin_family(p, "step_age_seconds", "gauge", "How long the open step has been open.");
    for (uint32_t i = 0; i < p->s->model_count; i++) {
        const struct view_model *m = &p->s->models[i];
        if (m->metrics.opened_ns != 0)
            fprintf(p->out, "shardd_step_age_seconds{device=\"%s\",model=\"%s\"} %.3f\n", p->device,
                    m->spec->name, seconds_since(p, m->metrics.opened_ns));
    }
    begin_family(p, "checkpoint_time_seconds", "gauge",
                 "When the last checkpoint was written, since 1970.");
    for (uint32_t i = 0; i < p->s->model_count; i++) {
        const struct view_model *m = &p->s->models[i];
        if (m->metrics.saved.ns != 0)
            fprintf(p->out, "shardd_checkpoint_time_seconds{device=\"%s\",model=\"%s\"} %.3f\n",
                    p->device, m->spec->name, p->s->time_s - seconds_since(p, m->metrics.saved.ns));
    }
}

static void write_room(const struct page *p)
{
    const uint64_t bytes = memory_room().bytes;
    begin_family(p, "memory_available_bytes", "gauge",
                 "Memory that can still be taken, within the limits of cgroups.");
    if (bytes != UINT64_MAX)
        fprintf(p->out, "shardd_memory_available_bytes{device=\"%s\"} %" PRIu64 "\n", p->device,
                bytes);
}

static void write_steps(const struct page *p)
{
    static const char *const families[][2] = {
        { "loss", "Of the last committed step: its first metric, a mean over micro-batches." },
        { "grad_norm", "Of the last committed step's mean gradient, before clipping." },
    };
    for (size_t f = 0; f < ARRAY_SIZE(families); f++) {
        begin_family(p, families[f][0], "gauge", families[f][1]);
        for (uint32_t i = 0; i < p->s->model_count; i++) {
            const struct view_model *m = &p->s->models[i];
            const double value = f == 0 ? view_loss(m) : m->last.committed.norm;
            if (!m->last.committed.any)
                continue;
            fprintf(p->out, "shardd_%s{device=\"%s\",model=\"%s\"} ", families[f][0], p->device,
                    m->spec->name);
            if (isfinite(value))
                fprintf(p->out, "%.17g\n", value);
            else
                fprintf(p->out, "%s\n", isnan(value) ? "NaN" : value > 0 ? "+Inf" : "-Inf");
        }
    }
}

/* A label for each unit costs whoever stores it: of models with more units there are none, unless
 * they are asked for. */
#define NORM_UNITS_MAX  256u
#define NORM_UNITS_MOST 4096u

/* Of a unit. False: it has none. */
typedef bool unit_value(const struct view_unit *unit, double *ret_value);

static bool grad_norm(const struct view_unit *unit, double *ret_value)
{
    *ret_value = unit->grad_norm;
    return unit->norm_step != 0;
}

static bool update_norm(const struct view_unit *unit, double *ret_value)
{
    *ret_value = unit->changed.update;
    return unit->changed.step != 0;
}

static bool weight_norm(const struct view_unit *unit, double *ret_value)
{
    *ret_value = unit->changed.weight;
    return unit->changed.step != 0;
}

static void write_unit_values(const struct page *p, const struct view_model *m, const char *name,
                              unit_value *value_of)
{
    for (uint32_t u = 0; u < m->spec->unit_count; u++) {
        double value;
        if (m->spec->units[u].frozen || m->spec->units[u].mean || !value_of(&m->units[u], &value))
            continue;
        fprintf(p->out, "shardd_%s{device=\"%s\",model=\"%s\",unit=\"%s\"} ", name, p->device,
                m->spec->name, m->spec->units[u].name);
        if (isfinite(value))
            fprintf(p->out, "%.9g\n", value);
        else
            fprintf(p->out, "NaN\n");
    }
}

static void write_norms(const struct page *p, bool units)
{
    static const struct {
        const char *name, *help;
        unit_value *value_of;
    } families[] = {
        { "unit_grad_norm",
          "Of a unit's part here of the last step's mean gradient, before clipping; of models "
          "with at most 256 units, or 4096 with ?units=1.",
          grad_norm },
        { "unit_update_norm",
          "Of the change of a unit's part here by the update that was measured last; likewise.",
          update_norm },
        { "unit_weight_norm", "Of a unit's parameters here after that update; likewise.",
          weight_norm },
    };
    for (size_t f = 0; f < ARRAY_SIZE(families); f++) {
        begin_family(p, families[f].name, "gauge", families[f].help);
        for (uint32_t i = 0; i < p->s->model_count; i++) {
            const struct view_model *m = &p->s->models[i];
            if (m->spec->unit_count <= (units ? NORM_UNITS_MOST : NORM_UNITS_MAX))
                write_unit_values(p, m, families[f].name, families[f].value_of);
        }
    }
}

/* Of models that have steps verified. */
static void write_verified(const struct page *p)
{
    static const struct family families[] = {
        { "verify_compared_total", "counter", "Pairs of copies of a gradient group compared.",
          offsetof(struct verify_state, compared) },
        { "verify_differences_total", "counter", "Those of them whose bits differed.",
          offsetof(struct verify_state, differences) },
        { "verify_missed_total", "counter", "Steps to be verified that had no two copies here.",
          offsetof(struct verify_state, missed) },
    };
    for (size_t f = 0; f < ARRAY_SIZE(families); f++) {
        begin_family(p, families[f].name, families[f].type, families[f].help);
        for (uint32_t i = 0; i < p->s->model_count; i++) {
            const struct view_model *m = &p->s->models[i];
            const void *at = (const char *)m->last.verified + families[f].value;
            if (m->last.verified != NULL)
                fprintf(p->out, "shardd_%s{device=\"%s\",model=\"%s\"} %" PRIu64 "\n",
                        families[f].name, p->device, m->spec->name, *(const uint64_t *)at);
        }
    }
    begin_family(p, "verify_worker_differences", "gauge",
                 "Copies of a worker that differed from another's; of those that had any.");
    for (uint32_t i = 0; i < p->s->model_count; i++) {
        const struct view_model *m = &p->s->models[i];
        const struct verify_state *v = m->last.verified;
        for (uint32_t k = 0; v != NULL && k < v->worker_count; k++)
            if (v->workers[k].differences > 0)
                fprintf(p->out,
                        "shardd_verify_worker_differences{device=\"%s\",model=\"%s\",pid=\"%" PRId64
                        "\",suspect=\"%d\"} %" PRIu64 "\n",
                        p->device, m->spec->name, v->workers[k].worker.pid,
                        (int)v->workers[k].suspect, v->workers[k].differences);
    }
}

static void write_waits(const struct page *p)
{
    begin_family(p, "wait_seconds", "gauge", "The longest wait of this kind now; 0 for none.");
    for (int kind = 0; kind < VIEW_WAIT_KINDS; kind++)
        fprintf(p->out, "shardd_wait_seconds{device=\"%s\",kind=\"%s\"} %.6f\n", p->device,
                view_wait_kind_name((enum view_wait_kind)kind), p->longest_s[kind]);
}

/* -- Histograms ---------------------------------------------------------------------------------
 */

static void write_hist(const struct page *p, const char *name, const char *model,
                       const struct metrics_hist *h)
{
    uint64_t count = 0;
    for (uint32_t i = 0; i < METRICS_BUCKETS; i++) {
        count += h->bucket[i];
        fprintf(p->out, "shardd_%s_bucket{device=\"%s\",model=\"%s\",le=\"%g\"} %" PRIu64 "\n",
                name, p->device, model, (double)activity_bounds_ns[i] * S_PER_NS, count);
    }
    count += h->bucket[METRICS_BUCKETS];
    fprintf(p->out, "shardd_%s_bucket{device=\"%s\",model=\"%s\",le=\"+Inf\"} %" PRIu64 "\n", name,
            p->device, model, count);
    fprintf(p->out, "shardd_%s_sum{device=\"%s\",model=\"%s\"} %.9f\n", name, p->device, model,
            (double)h->sum_ns * S_PER_NS);
    fprintf(p->out, "shardd_%s_count{device=\"%s\",model=\"%s\"} %" PRIu64 "\n", name, p->device,
            model, count);
}

static const struct {
    const char *name, *help;
    size_t at; /* of the histogram in struct metrics_model */
} hists[] = {
    { "return_seconds", "From a gradient's arrival to its credit.",
      offsetof(struct metrics_model, returned) },
    { "apply_seconds", "A unit's update.", offsetof(struct metrics_model, applied) },
    { "step_seconds", "From a step's opening to the next one's.",
      offsetof(struct metrics_model, step) },
    { "collect_seconds", "From a step's opening to its last gradient.",
      offsetof(struct metrics_model, collect) },
    { "decide_seconds", "From a step's last gradient to its commit.",
      offsetof(struct metrics_model, decide) },
    { "fetch_wait_seconds", "Workers' waits for parameters, as they say.",
      offsetof(struct metrics_model, fetch_wait) },
};

static void write_hists(const struct page *p)
{
    for (size_t i = 0; i < ARRAY_SIZE(hists); i++) {
        begin_family(p, hists[i].name, "histogram", hists[i].help);
        for (uint32_t m = 0; m < p->s->model_count; m++) {
            const void *h = (const char *)&p->s->models[m].metrics + hists[i].at;
            write_hist(p, hists[i].name, p->s->models[m].spec->name, h);
        }
    }
}

int metrics_text(const struct view_snapshot *s, bool units, char **ret_text, size_t *ret_bytes,
                 struct shd_err *e)
{
    char *text = NULL;
    size_t bytes = 0;
    struct page p = { .s = s, .device = s->daemon.device };
    p.out = open_memstream(&text, &bytes);
    if (p.out == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the metrics");
    json_decref(view_waits(s, p.longest_s, /* ret_headline= */ NULL));
    write_daemon(&p);
    write_models(&p);
    write_build(&p);
    write_memory(&p);
    write_files(&p);
    write_quotas(&p);
    write_pins(&p);
    write_room(&p);
    write_ages(&p);
    write_steps(&p);
    write_norms(&p, units);
    write_verified(&p);
    write_waits(&p);
    write_hists(&p);
    const bool failed = ferror(p.out) != 0;
    if (fclose(p.out) != 0 || failed) {
        free(text);
        return err_set(e, SHD_ENOMEM, "no memory for the metrics");
    }
    *ret_text = text;
    *ret_bytes = bytes;
    return SHD_OK;
}
