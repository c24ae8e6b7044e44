/* See metrics_text.h.
 *
 * One family after the other, as the format wants it: each is a name, a help text, a type and a
 * function that writes its samples. */
#include "daemon/view/metrics_text.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/model/adopt.h"
#include "daemon/view/snapshot.h"
#include "daemon/view/waits.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/version.h"

struct page { /* being written */
    FILE *out;
    const struct view_snapshot *s;
    const char *device;
    double longest_s[VIEW_WAIT_KINDS];
};

/* -- Numbers of the daemon ----------------------------------------------------------------------
 */

static uint64_t daemon_requests(const struct view_snapshot *s)
{
    return s->requests;
}
static uint64_t daemon_sessions_ever(const struct view_snapshot *s)
{
    return s->metrics.sessions;
}
static uint64_t daemon_deaths(const struct view_snapshot *s)
{
    return s->metrics.session_deaths;
}
static uint64_t daemon_bad_frames(const struct view_snapshot *s)
{
    return s->bad_frames;
}
static uint64_t daemon_dropped(const struct view_snapshot *s)
{
    (void)s;
    return log_suppressed();
}
static uint64_t daemon_adopted(const struct view_snapshot *s)
{
    return s->daemon->adopt->models;
}
static uint64_t daemon_sessions(const struct view_snapshot *s)
{
    return s->session_count;
}
static uint64_t daemon_up(const struct view_snapshot *s)
{
    (void)s;
    return 1;
}

/* -- Numbers of a model -------------------------------------------------------------------------
 */

static uint64_t model_returns(const struct view_model *m)
{
    return m->metrics.returns;
}
static uint64_t model_return_bytes(const struct view_model *m)
{
    return m->metrics.return_bytes;
}
static uint64_t model_stale(const struct view_model *m)
{
    return m->metrics.stale_returns;
}
static uint64_t model_steps(const struct view_model *m)
{
    return m->metrics.steps;
}
static uint64_t model_skipped(const struct view_model *m)
{
    return m->metrics.skipped_steps;
}
static uint64_t model_spilled(const struct view_model *m)
{
    return m->bytes.spilled;
}
static uint64_t model_backups(const struct view_model *m)
{
    return m->metrics.backup_leases;
}
static uint64_t model_checkpoints(const struct view_model *m)
{
    return m->metrics.checkpoints;
}
static uint64_t model_step(const struct view_model *m)
{
    return m->step;
}
static uint64_t model_waiting(const struct view_model *m)
{
    return m->waiting;
}

/* -- Families -----------------------------------------------------------------------------------
 */

struct family {
    const char *name, *type, *help;
    uint64_t (*daemon)(const struct view_snapshot *s); /* or: */
    uint64_t (*model)(const struct view_model *m);
};

static const struct family families[] = {
    { "up", "gauge", "Whether the daemon answers.", .daemon = daemon_up },
    { "requests_total", "counter", "Requests taken in.", .daemon = daemon_requests },
    { "sessions", "gauge", "Workers and tools attached now.", .daemon = daemon_sessions },
    { "sessions_total", "counter", "Sessions ever opened.", .daemon = daemon_sessions_ever },
    { "session_deaths_total", "counter", "Sessions that ended without a goodbye.",
      .daemon = daemon_deaths },
    { "bad_frames_total", "counter", "Messages that could not be decoded.",
      .daemon = daemon_bad_frames },
    { "dropped_events_total", "counter", "Log lines held back by the rate limit.",
      .daemon = daemon_dropped },
    { "adopted_models_total", "counter", "Models taken over from a predecessor.",
      .daemon = daemon_adopted },
    { "returns_total", "counter", "Gradients that arrived, or word that there is none.",
      .model = model_returns },
    { "return_bytes_total", "counter", "Bytes of the gradients that arrived.",
      .model = model_return_bytes },
    { "stale_returns_total", "counter", "Gradients that came twice or too late.",
      .model = model_stale },
    { "steps_total", "counter", "Steps committed by this process.", .model = model_steps },
    { "skipped_steps_total", "counter", "Steps committed without an update.",
      .model = model_skipped },
    { "spilled_bytes_total", "counter", "Bytes of gradients moved out of their slots to wait.",
      .model = model_spilled },
    { "backup_leases_total", "counter", "Micro-batches given to a second worker as well.",
      .model = model_backups },
    { "checkpoints_total", "counter", "Checkpoints written.", .model = model_checkpoints },
    { "step", "gauge", "The open step.", .model = model_step },
    { "waiting_returns", "gauge", "Gradients that wait for earlier micro-batches.",
      .model = model_waiting },
};

static void begin_family(const struct page *p, const char *name, const char *type, const char *help)
{
    fprintf(p->out, "# HELP shardd_%s %s\n# TYPE shardd_%s %s\n", name, help, name, type);
}

static void write_family(const struct page *p, const struct family *f)
{
    begin_family(p, f->name, f->type, f->help);
    if (f->daemon != NULL)
        fprintf(p->out, "shardd_%s{device=\"%s\"} %" PRIu64 "\n", f->name, p->device,
                f->daemon(p->s));
    for (uint32_t i = 0; f->model != NULL && i < p->s->model_count; i++)
        fprintf(p->out, "shardd_%s{device=\"%s\",model=\"%s\"} %" PRIu64 "\n", f->name, p->device,
                p->s->models[i].spec->name, f->model(&p->s->models[i]));
}

/* -- With labels of their own -------------------------------------------------------------------
 */

static void write_build(const struct page *p)
{
    begin_family(p, "build_info", "gauge", "Version and kernels of this daemon.");
    fprintf(p->out, "shardd_build_info{device=\"%s\",version=\"%s\",isa=\"%s\"} 1\n", p->device,
            SHARDD_VERSION, p->s->daemon->kern->ops->name);
}

static void write_memory(const struct page *p)
{
    begin_family(p, "memory_bytes", "gauge", "Memory of a model's segments.");
    for (uint32_t i = 0; i < p->s->model_count; i++) {
        const struct view_model *m = &p->s->models[i];
        const struct {
            const char *kind;
            uint64_t bytes;
        } kinds[] = { { "state", m->bytes.state },   { "publish", m->bytes.publish },
                      { "inbox", m->bytes.inbox },   { "board", m->bytes.board },
                      { "ledger", m->bytes.ledger }, { "spill", m->bytes.spill } };
        for (size_t k = 0; k < ARRAY_SIZE(kinds); k++)
            fprintf(p->out,
                    "shardd_memory_bytes{device=\"%s\",model=\"%s\",kind=\"%s\"} %" PRIu64 "\n",
                    p->device, m->spec->name, kinds[k].kind, kinds[k].bytes);
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

int metrics_text(const struct view_snapshot *s, char **ret_text, size_t *ret_bytes,
                 struct shd_err *e)
{
    char *text = NULL;
    size_t bytes = 0;
    struct page p = { .s = s, .device = s->daemon->device };
    p.out = open_memstream(&text, &bytes);
    if (p.out == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the metrics");
    json_decref(view_waits(s, p.longest_s));
    for (size_t i = 0; i < ARRAY_SIZE(families); i++)
        write_family(&p, &families[i]);
    write_build(&p);
    write_memory(&p);
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
