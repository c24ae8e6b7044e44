/* shardctl plan --compare: every strategy on the same model, side by side. */
#include "client/ctl/plan/plan_compare.h"

#include <inttypes.h>

#include "client/ctl/base/text.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/plan/plan_draw.h"
#include "client/ctl/plan/plan_show.h"
#include "client/plan/plan.h"
#include "proto/base/check.h"

#define CELL TABLE_CELL_BYTES_MAX

static const struct row {
    enum plan_strategy strategy;
    enum plan_backward_prefetch prefetch;
    bool fetches_backward; /* else the prefetch makes no difference */
} rows[] = {
    { PLAN_DDP, PLAN_PREFETCH_PRE, false },    { PLAN_ZERO1, PLAN_PREFETCH_PRE, false },
    { PLAN_ZERO2, PLAN_PREFETCH_PRE, false },  { PLAN_ZERO3, PLAN_PREFETCH_NONE, true },
    { PLAN_ZERO3, PLAN_PREFETCH_POST, true },  { PLAN_ZERO3, PLAN_PREFETCH_PRE, true },
    { PLAN_HYBRID, PLAN_PREFETCH_PRE, false },
};

struct compared {
    struct plan_policy policy;
    struct plan_cost cost;
    uint32_t columns, idle;
    struct shd_err refused; /* code SHD_OK: it was planned */
};

/* Refusals are an answer here; only running out of memory is an error. */
static int compare_one(const struct spec *spec, const struct plan_ask *ask, const struct row *row,
                       struct compared *c, struct shd_err *e)
{
    struct plan plan;
    struct timeline t;
    *c = (struct compared){ .policy = ask->policy };
    c->policy.strategy = row->strategy;
    c->policy.backward_prefetch = row->prefetch;
    int r = plan_build(spec, &c->policy, /* trace= */ NULL, ask->micros, &plan, &c->refused);
    if (r != SHD_OK) {
        if (r != SHD_ENOMEM)
            return SHD_OK;
        *e = c->refused;
        return r;
    }
    c->cost = plan.cost;
    r = timeline_new(&plan, spec, &t, e);
    plan_free(&plan);
    if (r != SHD_OK)
        return r;
    c->columns = t.columns;
    c->idle = t.idle;
    timeline_deinit(&t);
    return SHD_OK;
}

static void print_row(struct table *t, const struct row *row, const struct compared *c)
{
    const char *const prefetch = row->fetches_backward ? plan_prefetch_name(row->prefetch) : "-";
    char units[CELL], grads[CELL], waits[CELL];
    char live[CELL], fetched[CELL], returned[CELL];
    if (c->refused.code != SHD_OK) {
        table_row(t, (const char *[]){ plan_strategy_name(row->strategy), prefetch, "refused", "-",
                                       "-", "-", "-", "-" });
        return;
    }
    snprintf(units, sizeof units, "%" PRIu32, c->cost.live_units_max);
    snprintf(grads, sizeof grads, "%" PRIu32, c->cost.live_grads_max);
    snprintf(waits, sizeof waits, "%" PRIu32 " of %" PRIu32, c->idle, c->columns);
    table_row(t, (const char *[]){ plan_strategy_name(row->strategy), prefetch, units, grads,
                                   text_size(c->cost.live_bytes_max, live),
                                   text_size(c->cost.fetched_bytes, fetched),
                                   text_size(c->cost.returned_bytes, returned), waits });
}

static int print_text(const struct spec *spec, const struct plan_ask *ask,
                      const struct compared *all, FILE *out, struct shd_err *e)
{
    static const char *const headings[] = { "STRATEGY", "PREFETCH", "UNITS",    "GRADS",
                                            "HELD",     "FETCHED",  "RETURNED", "WAITS" };
    char state[TEXT_BYTES], publish[TEXT_BYTES];
    struct plan_owners o;
    struct table t;
    const int r = plan_owners(spec, ask->daemons, &o, e);
    if (r != SHD_OK)
        return r;
    fprintf(out,
            "model %s: %" PRIu32 " units, %" PRIu64 " parameters; %" PRIu32
            " micro-batch%s for this worker; %" PRIu32 " ahead\n\n",
            spec->name, spec->unit_count, spec->elems, ask->micros, ask->micros == 1 ? "" : "es",
            ask->policy.forward_prefetch);
    table_init(&t, headings, ARRAY_SIZE(headings));
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
        print_row(&t, &rows[i], &all[i]);
    table_print(&t, "  ", out);
    table_deinit(&t);
    fprintf(out,
            "\nUNITS, GRADS, HELD: in this worker at once, at most. FETCHED, RETURNED: a step.\n"
            "WAITS: columns of the timeline in which compute waits for a fetch.\n"
            "Each of %" PRIu32 " daemon%s holds %s state + %s published at most, whatever the "
            "strategy.\n",
            ask->daemons, ask->daemons == 1 ? "" : "s", text_size(o.state_bytes_max, state),
            text_size(o.publish_bytes_max, publish));
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
        if (all[i].refused.code != SHD_OK)
            fprintf(out, "refused: %s\n", all[i].refused.text);
    return SHD_OK;
}

static void print_json(const struct spec *spec, const struct plan_ask *ask,
                       const struct compared *all, FILE *out)
{
    json_t *plans = json_array();
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        const struct compared *c = &all[i];
        json_t *plan = json_pack("{s:o}", "policy", plan_json_policy(&c->policy));
        if (c->refused.code != SHD_OK) {
            json_object_set_new(plan, "refused", json_string(c->refused.text));
        } else {
            json_object_set_new(plan, "cost", plan_json_cost(&c->cost));
            json_object_set_new(plan, "timeline",
                                json_pack("{s:I, s:I}", "columns", (json_int_t)c->columns, "idle",
                                          (json_int_t)c->idle));
        }
        json_array_append_new(plans, plan);
    }
    json_t *root = json_pack("{s:i, s:o, s:I, s:o}", "schema", 1, "model", plan_json_model(spec),
                             "micro_batches_per_worker", (json_int_t)ask->micros, "plans", plans);
    verb_json(root, JSON_COMPACT, out);
}

int plan_compare(const struct spec *spec, const struct plan_ask *ask, bool as_json, FILE *out,
                 struct shd_err *e)
{
    struct compared all[ARRAY_SIZE(rows)];
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
        const int r = compare_one(spec, ask, &rows[i], &all[i], e);
        if (r != SHD_OK)
            return r;
    }
    if (!as_json)
        return print_text(spec, ask, all, out, e);
    print_json(spec, ask, all, out);
    return SHD_OK;
}
