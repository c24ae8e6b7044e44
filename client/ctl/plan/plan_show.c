/* See plan_show.h. The JSON's schema: docs/schedules.md. */
#include "client/ctl/plan/plan_show.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/base/text.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/plan/plan_clock.h"
#include "client/ctl/plan/plan_draw.h"
#include "client/ctl/plan/plan_hosts.h"
#include "client/ctl/plan/plan_scale.h"
#include "client/plan/plan.h"
#include "client/plan/plan_cost.h"
#include "proto/base/check.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec_json.h"

#define UNITS_SHOWN_MAX 16u /* more: the middle is left out */

int plan_owners(const struct spec *spec, const struct plan_ask *ask, uint32_t daemons,
                uint32_t slots, struct plan_owners *ret_owners, struct shd_err *e)
{
    struct plan_owners o = { .total_bytes = 0 };
    char *json;
    int r = spec_dump(spec, &json, e);
    if (r != SHD_OK)
        return r;
    const struct owner_ask each = { .spec_bytes = strlen(json),
                                    .returns = spec_returns(spec),
                                    .sessions = ask->workers,
                                    .slots = slots,
                                    .keeper = true,
                                    .on_file = ask->state_on_file,
                                    .publish_on_file = ask->publish_on_file };
    const uint32_t owners = daemons > 0 ? daemons : ask->daemons;
    free(json);
    for (uint32_t owner = 0; owner < owners; owner++) {
        struct shardmap *map;
        r = shardmap_new(spec, owner, owners, &map, e);
        if (r != SHD_OK)
            return r;
        const struct owner_bytes b = owner_bytes(map, &each);
        const struct owner_gpu_bytes on_gpu = owner_gpu_bytes(map, &each);
        shardmap_free(map);
        o.total_bytes += b.all * ask->replicas;
        o.total_file_bytes += (b.file + b.publish_file) * ask->replicas;
        if (b.all > o.max.all)
            o.max = b;
        if (on_gpu.all > o.gpu_max.all)
            o.gpu_max = on_gpu;
    }
    *ret_owners = o;
    return SHD_OK;
}

/* -- Text ------------------------------------------------------------------------------------ */

static uint64_t unit_params(const struct spec *spec, uint32_t unit)
{
    return plan_unit_param_bytes(spec, unit) / dtype_bytes(spec->publish);
}

static void print_head(const struct spec *spec, const struct plan_ask *ask, FILE *out)
{
    const struct plan_policy *p = &ask->policy;
    char bytes[TEXT_BYTES];
    fprintf(out,
            "model %s: %" PRIu32 " unit%s, %" PRIu64 " parameters, read as %s%s%s\n"
            "policy: %s, backward prefetch %s, forward prefetch %" PRIu32 ", gradients as %s",
            spec->name, spec->unit_count, spec->unit_count == 1 ? "" : "s", spec->elems,
            dtype_name(spec->publish), spec->codec != CODEC_NONE ? ", which travel as " : "",
            spec->codec != CODEC_NONE ? codec_name(spec->codec) : "",
            plan_strategy_name(p->strategy), plan_prefetch_name(p->backward_prefetch),
            p->forward_prefetch, dtype_name(p->grad_dtype != 0 ? p->grad_dtype : SHD_F32));
    if (p->max_live_units > 0)
        fprintf(out, ", at most %" PRIu32 " units", p->max_live_units);
    if (p->max_live_bytes > 0)
        fprintf(out, ", at most %s of parameters", text_size(p->max_live_bytes, bytes));
    fprintf(out, "\nstep: %" PRIu32 " micro-batch%s for this worker", ask->micros,
            ask->micros == 1 ? "" : "es");
    if (spec->accumulate > 1)
        fprintf(out, ", gradients summed over %" PRIu32 " before they are returned",
                spec->accumulate);
    fprintf(out, "\n\n");
}

static void print_unit(const struct spec *spec, uint32_t unit, struct table *t)
{
    const struct spec_unit *su = &spec->units[unit];
    char index[TEXT_BYTES], params[TEXT_BYTES], bytes[TEXT_BYTES];
    char note[TEXT_BYTES] = "-";
    snprintf(index, sizeof index, "%" PRIu32, unit);
    snprintf(params, sizeof params, "%" PRIu64, unit_params(spec, unit));
    const char *kind = su->frozen ? ", frozen" : su->mean ? ", mean" : su->whole ? ", whole" : "";
    if (su->uses_count == 1)
        snprintf(note, sizeof note, "uses %" PRIu32 "%s", su->uses[0], kind);
    else if (su->uses_count > 1)
        snprintf(note, sizeof note, "uses %" PRIu32 " and %" PRIu32 " more%s", su->uses[0],
                 su->uses_count - 1, kind);
    else if (*kind != '\0')
        snprintf(note, sizeof note, "%s", kind + strlen(", "));
    table_row(t, (const char *[]){ index, su->name, params,
                                   text_size(plan_unit_param_bytes(spec, unit), bytes), note });
}

static void print_units(const struct spec *spec, FILE *out)
{
    static const char *const headings[] = { "", "UNIT", "PARAMETERS", "BYTES", "NOTE" };
    struct table t;
    table_init(&t, headings, ARRAY_SIZE(headings));
    for (uint32_t u = 0; u < spec->unit_count; u++) {
        print_unit(spec, u, &t);
        if (spec->unit_count > UNITS_SHOWN_MAX && u + 1 == UNITS_SHOWN_MAX / 2) {
            u = spec->unit_count - UNITS_SHOWN_MAX / 2 - 1;
            table_row(&t, (const char *[]){ "..", "..", "..", "..", ".." });
        }
    }
    table_print(&t, "  ", out);
    table_deinit(&t);
    fputc('\n', out);
}

static void cost_row(struct table *t, const char *what, uint32_t count, uint64_t bytes)
{
    char counted[TEXT_BYTES], sized[TEXT_BYTES];
    snprintf(counted, sizeof counted, "%" PRIu32, count);
    table_row(
        t, (const char *[]){ what, count != UINT32_MAX ? counted : "", text_size(bytes, sized) });
}

/* The smallest bound, and what it comes from. */
static void print_floor(const struct spec *spec, const struct plan_ask *ask,
                        const struct plan_floor *floor, FILE *out)
{
    const struct spec_unit *unit = &spec->units[floor->bytes_unit];
    if (floor->bytes == 0)
        return;
    fprintf(out, "  The smallest --max-live-bytes is %" PRIu64 ": ", floor->bytes);
    if (ask->policy.strategy == PLAN_ZERO3)
        fprintf(out, "unit %" PRIu32 " '%s'%s.\n\n", floor->bytes_unit, unit->name,
                unit->uses_count > 0 ? " and what it uses" : "");
    else
        fprintf(out, "%s holds all units at once.\n\n", plan_strategy_name(ask->policy.strategy));
}

static void print_cost(const struct plan_cost *c, FILE *out)
{
    static const char *const live[] = { "HELD AT ONCE, AT MOST", "UNITS", "BYTES" };
    static const char *const moved[] = { "MOVED A STEP, THIS WORKER", "UNITS", "BYTES" };
    struct table t;
    table_init(&t, live, ARRAY_SIZE(live));
    cost_row(&t, "parameters", c->live_units_max, c->live_param_bytes_max);
    cost_row(&t, "gradients (f32)", c->live_grads_max, c->live_grad_bytes_max);
    cost_row(&t, "both together", UINT32_MAX, c->live_bytes_max);
    table_print(&t, "  ", out);
    table_deinit(&t);
    fputc('\n', out);
    table_init(&t, moved, ARRAY_SIZE(moved));
    cost_row(&t, "parameters fetched", c->fetches, c->fetched_bytes);
    cost_row(&t, "gradients returned", c->returns, c->returned_bytes);
    table_print(&t, "  ", out);
    table_deinit(&t);
    fputc('\n', out);
}

static void print_files(const struct plan_ask *ask, const struct plan_owners *o, FILE *out)
{
    char state[TEXT_BYTES], publish[TEXT_BYTES], total[TEXT_BYTES];
    if (!ask->state_on_file && !ask->publish_on_file)
        return;
    fputs("  On files: ", out);
    if (ask->state_on_file)
        fprintf(out, "%s state", text_size(o->max.file, state));
    if (ask->publish_on_file)
        fprintf(out, "%s%s published, a successor's too,", ask->state_on_file ? " + " : "",
                text_size(o->max.publish_file, publish));
    fprintf(out, " each at most, %s in all.\n", text_size(o->total_file_bytes, total));
}

static int print_owners(const struct spec *spec, const struct plan_ask *ask,
                        const struct plan *plan, FILE *out, struct shd_err *e)
{
    const uint32_t slots = plan_slots(spec, &ask->policy, plan);
    struct plan_owners o;
    char state[TEXT_BYTES], published[TEXT_BYTES], inbox[TEXT_BYTES], rest[TEXT_BYTES];
    char pinned[TEXT_BYTES], spare[TEXT_BYTES], all[TEXT_BYTES], total[TEXT_BYTES],
        spill[TEXT_BYTES];
    const int r = plan_owners(spec, ask, /* daemons= */ 0, slots, &o, e);
    if (r != SHD_OK)
        return r;
    fprintf(out,
            "  Owner memory, %" PRIu32 " daemon%s%s: %s %s + %s published + %s inboxes (%" PRIu32
            " worker%s, %" PRIu32
            " slots)\n  + %s ledger, board and spec + %s spare for a successor = "
            "%s each at most, %s in all.\n"
            "  While gradients wait for a slow worker up to %s more each, in host memory;\n"
            "  for each step that readers have pinned (two at most) %s.\n",
            ask->daemons * ask->replicas, ask->daemons * ask->replicas == 1 ? "" : "s",
            ask->replicas > 1 ? ", two for each slice" : "",
            text_size(ask->state_on_file ? o.max.window : o.max.state, state),
            ask->state_on_file ? "of the state" : "state",
            text_size(ask->publish_on_file ? 0 : o.max.publish, published),
            text_size(o.max.inbox, inbox), ask->workers, ask->workers == 1 ? "" : "s", slots,
            text_size(o.max.ledger + o.max.board + o.max.spec, rest), text_size(o.max.spare, spare),
            text_size(o.max.all, all), text_size(o.total_bytes, total),
            text_size(o.max.spill_max, spill), text_size(o.max.publish, pinned));
    const uint32_t tile_bytes = QUANT_TILE_BYTES;
    if (spec->int8)
        fprintf(out,
                "  Of the state, moments in 8 bits: %g bytes a parameter; in fp32 it were %u.\n",
                (double)spec_moments(spec) * tile_bytes / QUANT_TILE_ELEMS,
                spec_moments(spec) * (unsigned)sizeof(float));
    if (spec_has_whole(spec))
        fprintf(out, "  Units that Muon, LAMB or Adafactor updates are whole, at one owner each; "
                     "the state has room\n"
                     "  for an update beside. The times of updates leave out Muon's iteration.\n");
    print_files(ask, &o, out);
    return SHD_OK;
}

int plan_print(const struct spec *spec, const struct plan_ask *ask, const struct plan *plan,
               const struct plan_clock *clock, FILE *out, struct shd_err *e)
{
    struct timeline t;
    int r = timeline_new(plan, spec, &t, e);
    if (r != SHD_OK)
        return r;
    if (ask->timeline_only) {
        timeline_draw(&t, plan, spec, out);
        timeline_deinit(&t);
        return SHD_OK;
    }
    print_head(spec, ask, out);
    print_units(spec, out);
    timeline_draw(&t, plan, spec, out);
    timeline_deinit(&t);
    fprintf(
        out,
        "F forward, B backward, C commit; units, grads: held in that column. Drawn as if every\n"
        "fetch, return and forward took one column, a backward two, on one link.\n\n");
    print_cost(&plan->cost, out);
    print_floor(spec, ask, &plan->floor, out);
    r = print_owners(spec, ask, plan, out, e);
    if (r == SHD_OK && ask->across != NULL)
        r = plan_hosts_print(spec, ask, ask->across, out, e);
    if (r == SHD_OK)
        r = plan_scale_print(spec, ask, plan, out, e);
    if (r == SHD_OK)
        plan_clock_print(clock, spec, ask, plan, out);
    return r;
}

/* -- JSON ------------------------------------------------------------------------------------ */

static json_t *integer(uint64_t n)
{
    return json_integer((json_int_t)n);
}

json_t *plan_json_policy(const struct plan_policy *p)
{
    return json_pack("{s:s, s:s, s:o, s:o, s:o, s:s}", "strategy", plan_strategy_name(p->strategy),
                     "backward_prefetch", plan_prefetch_name(p->backward_prefetch),
                     "forward_prefetch", integer(p->forward_prefetch), "max_live_units",
                     integer(p->max_live_units), "max_live_bytes", integer(p->max_live_bytes),
                     "grad_dtype", dtype_name(p->grad_dtype != 0 ? p->grad_dtype : SHD_F32));
}

json_t *plan_json_cost(const struct plan_cost *c)
{
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "live_units_max",
                     integer(c->live_units_max), "live_grads_max", integer(c->live_grads_max),
                     "live_param_bytes_max", integer(c->live_param_bytes_max),
                     "live_grad_bytes_max", integer(c->live_grad_bytes_max), "live_bytes_max",
                     integer(c->live_bytes_max), "fetched_bytes", integer(c->fetched_bytes),
                     "returned_bytes", integer(c->returned_bytes), "fetches", integer(c->fetches),
                     "returns", integer(c->returns));
}

static json_t *json_unit(const struct spec *spec, uint32_t unit)
{
    const struct spec_unit *su = &spec->units[unit];
    json_t *uses = json_array();
    for (uint32_t i = 0; i < su->uses_count; i++)
        json_array_append_new(uses, integer(su->uses[i]));
    return json_pack("{s:s, s:o, s:o, s:o, s:b, s:b, s:o}", "name", su->name, "parameters",
                     integer(unit_params(spec, unit)), "param_bytes",
                     integer(plan_unit_param_bytes(spec, unit)), "grad_bytes",
                     integer(plan_unit_grad_bytes(spec, unit, SHD_F32)), "frozen", (int)su->frozen,
                     "mean", (int)su->mean, "uses", uses);
}

json_t *plan_json_model(const struct spec *spec)
{
    json_t *units = json_array();
    for (uint32_t u = 0; u < spec->unit_count; u++)
        json_array_append_new(units, json_unit(spec, u));
    return json_pack("{s:s, s:o, s:s, s:s, s:o, s:o, s:o}", "name", spec->name, "parameters",
                     integer(spec->elems), "publish", dtype_name(spec->publish), "codec",
                     codec_name(spec->codec), "micro_batches", integer(spec->micro_batches),
                     "accumulate", integer(spec->accumulate), "units", units);
}

static json_t *json_ops(const struct plan *plan)
{
    json_t *ops = json_array();
    for (uint32_t i = 0; i < plan->op_count; i++) {
        const struct plan_op *op = &plan->ops[i];
        json_array_append_new(ops, op->kind < PLAN_PREPARE
                                       ? json_pack("[s, o, o]", plan_op_name(op->kind),
                                                   integer(op->unit), integer(op->micro))
                                       : json_pack("[s]", plan_op_name(op->kind)));
    }
    return ops;
}

static json_t *json_owners(const struct plan_ask *ask, const struct plan_owners *o)
{
    return json_pack(
        "{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}",
        "daemons", integer((uint64_t)ask->daemons * ask->replicas), "state_bytes_max",
        integer(o->max.state), "window_bytes_max", integer(o->max.window), "file_bytes_max",
        integer(o->max.file), "publish_file_bytes_max", integer(o->max.publish_file),
        "total_file_bytes", integer(o->total_file_bytes), "publish_bytes_max",
        integer(o->max.publish), "inbox_bytes_max", integer(o->max.inbox), "ledger_bytes_max",
        integer(o->max.ledger), "board_bytes_max", integer(o->max.board), "spec_bytes_max",
        integer(o->max.spec), "spare_bytes_max", integer(o->max.spare), "bytes_max",
        integer(o->max.all), "spill_bytes_max", integer(o->max.spill_max), "pin_bytes_max",
        integer(o->max.publish), "total_bytes", integer(o->total_bytes));
}

int plan_print_json(const struct spec *spec, const struct plan_ask *ask, const struct plan *plan,
                    const struct plan_clock *clock, json_t *automatic, FILE *out, struct shd_err *e)
{
    struct timeline t;
    struct plan_owners owners;
    json_t *crossing = NULL, *scale = NULL;
    int r = plan_owners(spec, ask, /* daemons= */ 0, plan_slots(spec, &ask->policy, plan), &owners,
                        e);
    if (r == SHD_OK && ask->across != NULL)
        r = plan_hosts_json(spec, ask, ask->across, &crossing, e);
    if (r == SHD_OK)
        r = plan_scale_json(spec, ask, plan, &scale, e);
    if (r == SHD_OK)
        r = timeline_new(plan, spec, &t, e);
    if (r != SHD_OK) {
        json_decref(automatic);
        json_decref(crossing);
        json_decref(scale);
        return r;
    }
    json_t *root = json_pack(
        "{s:i, s:o, s:o, s:o, s:o, s:{s:o, s:o}, s:o, s:o*, s:o*, s:o*, s:o*, s:o}", "schema", 1,
        "model", plan_json_model(spec), "policy", plan_json_policy(&ask->policy),
        "micro_batches_per_worker", integer(plan->micros), "cost", plan_json_cost(&plan->cost),
        "timeline", "columns", integer(t.columns), "idle", integer(t.idle), "owners",
        json_owners(ask, &owners), "crossing", crossing, "scale", scale, "auto", automatic, "time",
        plan_clock_json(clock, spec, ask, &ask->policy, plan), "ops", json_ops(plan));
    timeline_deinit(&t);
    if (root == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for JSON");
    verb_json(root, JSON_COMPACT, out);
    return SHD_OK;
}

/* -- All strategies side by side -------------------------------------------------------------- */

#define CELL TABLE_CELL_BYTES_MAX

static const struct compared_policy {
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
    json_t *time;           /* owned; NULL: no rates */
    struct shd_err refused; /* code SHD_OK: it was planned */
};

/* Refusals are an answer here; only running out of memory is an error. */
static int compare_one(const struct spec *spec, const struct plan_ask *ask,
                       const struct plan_clock *clock, const struct compared_policy *row,
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
    c->time = plan_clock_json(clock, spec, ask, &c->policy, &plan);
    r = timeline_new(&plan, spec, &t, e);
    plan_free(&plan);
    if (r != SHD_OK)
        return r;
    c->columns = t.columns;
    c->idle = t.idle;
    timeline_deinit(&t);
    return SHD_OK;
}

static void print_row(struct table *t, const struct compared_policy *row, const struct compared *c)
{
    const char *const prefetch = row->fetches_backward ? plan_prefetch_name(row->prefetch) : "-";
    char units[CELL], grads[CELL], waits[CELL];
    char live[CELL], fetched[CELL], returned[CELL], step[CELL];
    if (c->refused.code != SHD_OK) {
        table_row(t, (const char *[]){ plan_strategy_name(row->strategy), prefetch, "refused", "-",
                                       "-", "-", "-", "-", "-", "-" });
        return;
    }
    snprintf(units, sizeof units, "%" PRIu32, c->cost.live_units_max);
    snprintf(grads, sizeof grads, "%" PRIu32, c->cost.live_grads_max);
    snprintf(waits, sizeof waits, "%" PRIu32 " of %" PRIu32, c->idle, c->columns);
    snprintf(step, sizeof step, "%.4g ms",
             json_number_value(json_object_get(c->time, "step_s")) * 1e3);
    const char *bound = json_string_value(json_object_get(c->time, "bound"));
    table_row(t, (const char *[]){ plan_strategy_name(row->strategy), prefetch, units, grads,
                                   text_size(c->cost.live_bytes_max, live),
                                   text_size(c->cost.fetched_bytes, fetched),
                                   text_size(c->cost.returned_bytes, returned), waits,
                                   bound != NULL ? step : "-", bound != NULL ? bound : "-" });
}

static int compare_text(const struct spec *spec, const struct plan_ask *ask,
                        const struct plan_clock *clock, const struct compared *all, FILE *out,
                        struct shd_err *e)
{
    static const char *const headings[] = { "STRATEGY", "PREFETCH", "UNITS", "GRADS", "HELD",
                                            "FETCHED",  "RETURNED", "WAITS", "STEP",  "MOST" };
    const unsigned columns = ARRAY_SIZE(headings) - (clock->has_rates ? 0 : 2);
    char state[TEXT_BYTES], publish[TEXT_BYTES];
    struct plan_owners o;
    struct table t;
    const int r = plan_owners(spec, ask, /* daemons= */ 0, /* slots= */ 0, &o, e);
    if (r != SHD_OK)
        return r;
    fprintf(out,
            "model %s: %" PRIu32 " units, %" PRIu64 " parameters; %" PRIu32
            " micro-batch%s for this worker; %" PRIu32 " ahead\n\n",
            spec->name, spec->unit_count, spec->elems, ask->micros, ask->micros == 1 ? "" : "es",
            ask->policy.forward_prefetch);
    table_init(&t, headings, columns);
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
        print_row(&t, &rows[i], &all[i]);
    table_print(&t, "  ", out);
    table_deinit(&t);
    fprintf(out,
            "\nUNITS, GRADS, HELD: in this worker at once, at most. FETCHED, RETURNED: a step.\n"
            "WAITS: columns of the timeline in which compute waits for a fetch.\n"
            "Each of %" PRIu32 " daemon%s holds %s state + %s published at most, whatever the "
            "strategy.\n",
            ask->daemons * ask->replicas, ask->daemons * ask->replicas == 1 ? "" : "s",
            text_size(o.max.state, state), text_size(o.max.publish, publish));
    if (clock->has_rates)
        fprintf(out,
                "STEP: predicted, %s workers' compute, MOST: what most of it is; by rates of "
                "%s.\n",
                clock->compute_from != NULL ? "with the" : "without the", clock->date);
    if (ask->across != NULL && plan_hosts_print(spec, ask, ask->across, out, e) != SHD_OK)
        return e->code;
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
        if (all[i].refused.code != SHD_OK)
            fprintf(out, "refused: %s\n", all[i].refused.text);
    return SHD_OK;
}

static int compare_json(const struct spec *spec, const struct plan_ask *ask,
                        const struct compared *all, FILE *out, struct shd_err *e)
{
    json_t *plans = json_array(), *crossing = NULL;
    if (ask->across != NULL && plan_hosts_json(spec, ask, ask->across, &crossing, e) != SHD_OK) {
        json_decref(plans);
        return e->code;
    }
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
            if (c->time != NULL)
                json_object_set(plan, "time", c->time);
        }
        json_array_append_new(plans, plan);
    }
    json_t *root = json_pack("{s:i, s:o, s:I, s:o*, s:o}", "schema", 1, "model",
                             plan_json_model(spec), "micro_batches_per_worker",
                             (json_int_t)ask->micros, "crossing", crossing, "plans", plans);
    verb_json(root, JSON_COMPACT, out);
    return SHD_OK;
}

int plan_compare(const struct spec *spec, const struct plan_ask *ask,
                 const struct plan_clock *clock, bool as_json, FILE *out, struct shd_err *e)
{
    struct compared all[ARRAY_SIZE(rows)] = { 0 };
    int r = SHD_OK;
    for (size_t i = 0; r == SHD_OK && i < ARRAY_SIZE(rows); i++)
        r = compare_one(spec, ask, clock, &rows[i], &all[i], e);
    if (r == SHD_OK && as_json)
        r = compare_json(spec, ask, all, out, e);
    else if (r == SHD_OK)
        r = compare_text(spec, ask, clock, all, out, e);
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
        json_decref(all[i].time);
    return r;
}
