/* See log.h. Rows of the history come from owner 0, in order and each once; --follow asks again for
 * those after the last one. A step is counted as shd-gpt counts it: the first one is 1. */
#include "client/ctl/watch/log.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <jansson.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/text.h"
#include "client/ctl/base/verb.h"
#include "client/shd.h"
#include "proto/base/clock.h"
#include "proto/spec/guard.h"

#define ROWS_AT_ONCE 256u
#define FOLLOW_NS    (UINT64_C(300) * NS_PER_MS)
#define LAST_MAX     1000000u
#define SKIP_BYTES   (GUARD_SKIP_BYTES + 16)
#define TIME_BYTES   32u

static const char log_about[] =
    "Print what each committed step came to: loss, norm of the gradient, learning rate, when. The\n"
    "daemons keep the last 65,536 steps, whoever committed them, also while they are restarted. "
    "The\n"
    "loss is the first number that workers report, as a mean over the micro-batches that\n"
    "have it.";

static const char log_more[] =
    "examples:\n"
    "  shardctl log --last 20\n"
    "  shardctl log --csv >run.csv     columns: step, time (seconds since 1970), loss, norm, lr,\n"
    "                                  loss_scale, skipped\n"
    "  shardctl log --follow --json    one object a line, as steps are committed\n"
    "\nexit code 1: no daemon or no such model; with --follow when the daemons do not come back\n";

struct options {
    const char *address, *model;
    uint32_t last; /* 0: all */
    bool json, csv, follow;
};

static double loss_of(const shd_model *m, const struct shd_step_row *row)
{
    const uint32_t micros = row->reported > 0 ? row->reported : shd_micro_batches(m);
    return row->metric_count > 0 ? row->metrics[0] / micros : NAN;
}

static json_t *real_or_null(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

/* The unit that it was skipped for; NULL: not known. */
static const char *cause_name(const shd_model *m, const struct shd_step_row *row)
{
    return row->cause_unit > 0 ? shd_unit_name(m, row->cause_unit - 1) : NULL;
}

/* The micro-batch that brought most of it, and who sent that. */
static json_t *micro_json(const struct shd_step_row *row)
{
    char worker[2 * sizeof row->cause_worker];
    if (row->cause_micro == 0)
        return json_null();
    json_t *o = json_pack("{s:I, s:o}", "number", (json_int_t)row->cause_micro - 1, "share",
                          real_or_null(row->cause_share));
    if (o != NULL && row->cause_pid > 0)
        json_object_set_new(
            o, "worker",
            json_pack(
                "{s:s, s:I, s:o}", "name", text_clean(row->cause_worker, worker, sizeof worker),
                "pid", (json_int_t)row->cause_pid, "rank",
                row->cause_rank > 0 ? json_integer((json_int_t)row->cause_rank - 1) : json_null()));
    return o;
}

static void print_json(const shd_model *m, const struct shd_step_row *row)
{
    json_t *metrics = json_array();
    for (uint32_t i = 0; i < row->metric_count; i++)
        json_array_append_new(metrics, real_or_null(row->metrics[i]));
    json_t *o = json_pack(
        "{s:I, s:f, s:o, s:o, s:o, s:o, s:b, s:o}", "step", (json_int_t)row->step + 1, "time",
        (double)row->time_ns * S_PER_NS, "loss", real_or_null(loss_of(m, row)), "norm",
        real_or_null(row->grad_norm), "lr", real_or_null(row->lr), "loss_scale",
        real_or_null(row->loss_scale), "skipped", (int)row->skipped, "metrics", metrics);
    if (o != NULL && row->guard != SHD_GUARD_NONE)
        json_object_set_new(
            o, "guard",
            json_pack("{s:s, s:f}", "rule", guard_name(row->guard), "bound", row->guard_bound));
    const char *unit = cause_name(m, row);
    if (o != NULL && unit != NULL)
        json_object_set_new(o, "cause",
                            json_pack("{s:s, s:o, s:o}", "unit", unit, "norm",
                                      real_or_null(row->cause_norm), "micro", micro_json(row)));
    verb_json(o, JSON_COMPACT, stdout);
}

static void print_csv(const shd_model *m, const struct shd_step_row *row)
{
    printf("%" PRIu64 ",%.6f,%.9g,%.9g,%.9g,%g,%d\n", row->step + 1,
           (double)row->time_ns * S_PER_NS, loss_of(m, row), row->grad_norm, row->lr,
           row->loss_scale, (int)row->skipped);
}

/* " SKIPPED: norm 31000 is above 10 (norm_above), most of it in unit h.3 (30990)" */
static const char *skip_text(const shd_model *m, const struct shd_step_row *row,
                             char text[SKIP_BYTES])
{
    char why[GUARD_SKIP_BYTES];
    const struct decision_guard by = { .what = row->guard,
                                       .value = row->guard == SHD_GUARD_LOSS_ZSCORE
                                                    ? loss_of(m, row)
                                                : guard_of_units(row->guard) ? row->cause_norm
                                                                             : row->grad_norm,
                                       .bound = row->guard_bound };
    char worker[2 * sizeof row->cause_worker];
    const struct guard_cause cause = {
        .unit = cause_name(m, row),
        .norm = row->cause_norm,
        .audited = row->cause_micro > 0, /* else the log does not know */
        .has_micro = row->cause_micro > 0,
        .micro = row->cause_micro - 1,
        .share = row->cause_share,
        .worker = row->cause_pid > 0 ? text_clean(row->cause_worker, worker, sizeof worker) : NULL,
        .pid = row->cause_pid,
        .rank = row->cause_rank,
    };
    guard_skip_text(&by, &cause, why);
    snprintf(text, SKIP_BYTES, "%s%s", row->skipped ? " SKIPPED: " : "", row->skipped ? why : "");
    return text;
}

static void print_line(const shd_model *m, const struct shd_step_row *row)
{
    char text[SKIP_BYTES];
    const struct timespec at = clock_timespec(row->time_ns);
    struct tm local;
    char when[TIME_BYTES] = "-";
    if (localtime_r(&at.tv_sec, &local) != NULL)
        strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S", &local);
    printf("%s  step %" PRIu64 " loss %.4f norm %.3f lr %.2e", when, row->step + 1, loss_of(m, row),
           row->grad_norm, row->lr);
    if (row->loss_scale > 1)
        printf(" scale %.0f", row->loss_scale);
    printf("%s\n", skip_text(m, row, text));
}

/* What is set since this step. */
static void print_set(const json_t *settings, uint64_t step)
{
    const char *key;
    json_t *v;
    char name[200];
    json_object_foreach(json_object_get(settings, "now"), key, v)
    {
        if (json_integer_value(json_object_get(v, "from")) == (json_int_t)step)
            printf("set from here on: %s=%.9g\n", text_clean(key, name, sizeof name),
                   json_number_value(json_object_get(v, "value")));
    }
}

/* Of the daemons, now; NULL: they know none. */
static json_t *settings_of(shd_model *m)
{
    char *text = NULL;
    if (shd_settings(m, &text, /* e= */ NULL) != SHD_OK)
        return NULL;
    json_t *settings = json_loads(text, 0, NULL);
    free(text);
    return settings;
}

static void print_row(const struct options *o, const shd_model *m, const struct shd_step_row *row)
{
    if (o->json)
        print_json(m, row);
    else if (o->csv)
        print_csv(m, row);
    else
        print_line(m, row);
}

/* All rows from *from on. */
static int print_rows(const struct options *o, shd_model *m, uint64_t *from, struct shd_err *e)
{
    static struct shd_step_row rows[ROWS_AT_ONCE] = { { .size = sizeof *rows } };
    uint32_t count = 0;
    int r;
    do {
        r = shd_history(m, from, rows, ROWS_AT_ONCE, &count, e);
        json_t *settings = r == SHD_OK && count > 0 && !o->json && !o->csv ? settings_of(m) : NULL;
        for (uint32_t i = 0; r == SHD_OK && i < count; i++) {
            print_set(settings, rows[i].step);
            print_row(o, m, &rows[i]);
        }
        json_decref(settings);
    } while (r == SHD_OK && count == ROWS_AT_ONCE);
    if (r != SHD_OK)
        return r;
    return fflush(stdout) == 0 ? SHD_OK : err_sys(e, SHD_EIO, "write the log");
}

static int follow(const struct options *o, shd_model *m, uint64_t from, struct shd_err *e)
{
    const struct timespec pause = clock_timespec(FOLLOW_NS);
    int r = SHD_OK;
    while (r == SHD_OK) {
        nanosleep(&pause, NULL);
        r = print_rows(o, m, &from, e);
    }
    return r;
}

static int print_log(const struct options *o, struct shd_err *e)
{
    const struct shd_options options = { .size = sizeof options,
                                         .address = o->address,
                                         .name = "shardctl log" };
    shd_session *s;
    shd_model *m = NULL;
    int r = shd_connect(&options, &s, e);
    if (r != SHD_OK)
        return r;
    r = shd_model_attach(s, o->model, &m, e);
    if (r == SHD_OK) {
        const uint64_t steps = shd_step(m);
        uint64_t from = o->last > 0 && steps > o->last ? steps - o->last : 0;
        if (o->csv)
            printf("step,time,loss,norm,lr,loss_scale,skipped\n");
        r = print_rows(o, m, &from, e);
        if (r == SHD_OK && o->follow)
            r = follow(o, m, from, e);
    }
    shd_close(s);
    return r;
}

int verb_log(int argc, char **argv)
{
    struct options o = { .address = NULL };
    const struct flag table[] = {
        { "address", 'a', FLAG_STRING, "A", "where the daemons are ($SHARDD_ADDRESS, /run/shardd)",
          &o.address, 0, 0 },
        { "runtime-dir", 'd', FLAG_STRING, "DIR", "the same", &o.address, 0, 0 },
        { "model", 'm', FLAG_STRING, "NAME", "which model (the only one there)", &o.model, 0, 0 },
        { "last", 'n', FLAG_U32, "N", "the last N steps only (all that are kept)", &o.last, 1,
          LAST_MAX },
        { "follow", 'f', FLAG_BOOL, NULL, "go on as steps are committed, until Ctrl-C", &o.follow,
          0, 0 },
        { "json", 'j', FLAG_BOOL, NULL, "one JSON object a line", &o.json, 0, 0 },
        { "csv", 'c', FLAG_BOOL, NULL, "comma-separated, with a heading", &o.csv, 0, 0 },
    };
    const struct flags flags = VERB_FLAGS(log, "shardctl log [FLAGS]", table);
    const int code = verb_start(&flags, argc, argv, /* ret_rest= */ NULL);
    struct shd_err e = { 0 };
    if (code >= 0)
        return code;
    if (o.json && o.csv)
        return ctl_usage("--json and --csv: one of them");
    if (print_log(&o, &e) == SHD_OK)
        return CTL_OK;
    return ctl_fail("%s", e.text);
}
