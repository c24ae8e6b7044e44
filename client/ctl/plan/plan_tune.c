/* See plan_tune.h. Each strategy with each prefetch that it has, further and further ahead for as
 * long as the plan is another one; each simulated. */
#include "client/ctl/plan/plan_tune.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "client/ctl/base/text.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/plan/plan_clock.h"
#include "client/ctl/plan/plan_show.h"
#include "client/plan/plan.h"
#include "proto/base/check.h"

#define CELL TABLE_CELL_BYTES_MAX

static const struct family { /* what differs in the distance alone */
    enum plan_strategy strategy;
    enum plan_backward_prefetch prefetch;
    bool fetches_backward; /* else the prefetch makes no difference */
} families[] = {
    { PLAN_DDP, PLAN_PREFETCH_PRE, false },   { PLAN_ZERO1, PLAN_PREFETCH_PRE, false },
    { PLAN_ZERO2, PLAN_PREFETCH_PRE, false }, { PLAN_ZERO3, PLAN_PREFETCH_NONE, true },
    { PLAN_ZERO3, PLAN_PREFETCH_POST, true }, { PLAN_ZERO3, PLAN_PREFETCH_PRE, true },
};

static const uint32_t distances[] = { 0, 1, 2, 3, 4, 8 };

struct candidate {
    uint32_t at; /* in the order in which they were tried */
    const struct family *family;
    struct plan_policy policy;
    struct plan_cost cost;
    struct plan_time time;
    json_t *shown; /* owned: the time, as plans show it */
};

struct tune {
    const struct spec *spec; /* borrowed, with the next two */
    const struct plan_ask *ask;
    const struct plan_clock *clock;
    struct candidate all[ARRAY_SIZE(families) * ARRAY_SIZE(distances)];
    uint32_t count, refused;
    struct shd_err why; /* one was refused */
};

/* *before is the plan of the distance before; it becomes this one's. */
static int try_one(struct tune *t, const struct family *family, uint32_t ahead, struct plan *before,
                   struct shd_err *e)
{
    struct candidate *c = &t->all[t->count];
    struct plan plan;
    *c = (struct candidate){ .at = t->count, .family = family, .policy = t->ask->policy };
    c->policy.strategy = family->strategy;
    c->policy.backward_prefetch = family->prefetch;
    c->policy.forward_prefetch = ahead;
    int r = plan_build(t->spec, &c->policy, /* trace= */ NULL, t->ask->micros, &plan, &t->why);
    if (r != SHD_OK) {
        t->refused++;
        return r == SHD_ENOMEM ? err_copy(&t->why, e) : SHD_OK;
    }
    const bool same = before->ops != NULL && before->op_count == plan.op_count &&
                      memcmp(before->ops, plan.ops, plan.op_count * sizeof *plan.ops) == 0;
    if (!same) {
        c->cost = plan.cost;
        r = plan_clock_time(t->clock, t->spec, t->ask, &c->policy, &plan, &c->time, e);
        c->shown = plan_clock_json(t->clock, t->spec, t->ask, &c->policy, &plan);
        t->count++;
    }
    plan_free(before);
    *before = plan;
    return r;
}

static int try_all(struct tune *t, struct shd_err *e)
{
    int r = SHD_OK;
    for (size_t f = 0; r == SHD_OK && f < ARRAY_SIZE(families); f++) {
        struct plan before = { 0 };
        for (size_t d = 0; r == SHD_OK && d < ARRAY_SIZE(distances); d++)
            r = try_one(t, &families[f], distances[d], &before, e);
        plan_free(&before);
    }
    if (r == SHD_OK && t->count == 0)
        return err_copy(&t->why, e);
    return r;
}

/* -- The order --------------------------------------------------------------------------------- */

static double best_ns; /* of those that are sorted */

static uint64_t thousandths(const struct candidate *c)
{
    return (uint64_t)(c->time.step_ns / best_ns * 1000);
}

static int quicker(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    const uint64_t time_x = thousandths(x), time_y = thousandths(y);
    if (time_x != time_y)
        return time_x < time_y ? -1 : 1;
    if (x->cost.live_bytes_max != y->cost.live_bytes_max)
        return x->cost.live_bytes_max < y->cost.live_bytes_max ? -1 : 1;
    return x->at < y->at ? -1 : 1;
}

static void sort(struct tune *t)
{
    best_ns = t->all[0].time.step_ns;
    for (uint32_t i = 1; i < t->count; i++)
        best_ns = t->all[i].time.step_ns < best_ns ? t->all[i].time.step_ns : best_ns;
    qsort(t->all, t->count, sizeof *t->all, quicker);
}

/* -- Telling ----------------------------------------------------------------------------------- */

static void print_row(struct table *table, const struct candidate *c)
{
    char ahead[CELL], units[CELL], live[CELL], fetched[CELL], step[CELL];
    snprintf(ahead, sizeof ahead, "%" PRIu32, c->policy.forward_prefetch);
    snprintf(units, sizeof units, "%" PRIu32, c->cost.live_units_max);
    snprintf(step, sizeof step, "%.4g ms", c->time.step_ns * 1e-6);
    table_row(table, (const char *[]){ plan_strategy_name(c->policy.strategy),
                                       c->family->fetches_backward
                                           ? plan_prefetch_name(c->policy.backward_prefetch)
                                           : "-",
                                       ahead, units, text_size(c->cost.live_bytes_max, live),
                                       text_size(c->cost.fetched_bytes, fetched), step,
                                       plan_time_bound(&c->time) });
}

/* The rows are sorted: the first one of a family is its best. */
static bool is_first(const struct tune *t, uint32_t at)
{
    uint32_t i = 0;
    while (t->all[i].family != t->all[at].family)
        i++;
    return i == at;
}

static void print_text(const struct tune *t, FILE *out)
{
    static const char *const headings[] = { "STRATEGY", "PREFETCH", "AHEAD", "UNITS",
                                            "HELD",     "FETCHED",  "STEP",  "MOST" };
    struct table table;
    table_init(&table, headings, ARRAY_SIZE(headings));
    for (uint32_t i = 0; i < t->count; i++)
        if (is_first(t, i))
            print_row(&table, &t->all[i]);
    table_print(&table, "  ", out);
    table_deinit(&table);
    fprintf(out,
            "\nof %" PRIu32 " plans each strategy's and prefetch's quickest, as predicted by rates "
            "of %s",
            t->count, t->clock->date);
    if (t->refused > 0)
        fprintf(out, "; %" PRIu32 " refused: %s", t->refused, t->why.text);
    fprintf(out,
            "\nAHEAD: --forward-prefetch. With --json to a file, `shd-gpt --plan FILE` takes some "
            "steps\nby each of the first four, and goes on by the quickest.\n");
}

static int print_json(const struct tune *t, FILE *out, struct shd_err *e)
{
    json_t *rows = json_array();
    for (uint32_t i = 0; i < t->count; i++) {
        const struct candidate *c = &t->all[i];
        json_array_append_new(rows,
                              json_pack("{s:o, s:o, s:O}", "policy", plan_json_policy(&c->policy),
                                        "cost", plan_json_cost(&c->cost), "time", c->shown));
    }
    json_t *root = json_pack("{s:i, s:o, s:I, s:o}", "schema", 1, "model", plan_json_model(t->spec),
                             "micro_batches_per_worker", (json_int_t)t->ask->micros, "tuned", rows);
    if (root == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for JSON");
    verb_json(root, JSON_COMPACT, out);
    return SHD_OK;
}

int plan_tune(const struct spec *spec, struct plan_ask *ask, const struct plan_clock *clock,
              bool as_json, FILE *out, struct shd_err *e)
{
    struct tune t = { .spec = spec, .ask = ask, .clock = clock };
    if (!clock->has_rates)
        return err_set(e, SHD_ENOENT,
                       "--tune goes by predicted seconds: measure this machine first, by `shardctl "
                       "plan --calibrate`");
    if (clock->compute_from == NULL)
        return err_set(e, SHD_ENOENT,
                       "--tune has to know what compute takes: give --compute SECONDS, or ask "
                       "while the model trains (%s)",
                       clock->why.text);
    int r = try_all(&t, e);
    if (r == SHD_OK) {
        sort(&t);
        ask->policy = t.all[0].policy;
        if (out != NULL && as_json)
            r = print_json(&t, out, e);
        else if (out != NULL)
            print_text(&t, out);
    }
    for (uint32_t i = 0; i < t.count; i++)
        json_decref(t.all[i].shown);
    return r;
}
