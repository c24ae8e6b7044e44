/* shardctl plan: what a policy will do to a model, and cost, before it is run. Reads the model,
 * builds the plan with the code that workers run, prints it. */
#include "client/ctl/plan/plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/text.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/plan/calibrate.h"
#include "client/ctl/plan/peers.h"
#include "client/ctl/plan/plan_clock.h"
#include "client/ctl/plan/plan_show.h"
#include "client/ctl/plan/plan_source.h"
#include "client/ctl/plan/rates.h"
#include "client/plan/plan.h"
#include "client/plan/plan_check.h"
#include "client/plan/plan_cost.h"
#include "proto/base/check.h"
#include "proto/spec/layout.h"

static const char plan_about[] =
    "Show what a worker will do in one step under a policy, and what it costs: which units it\n"
    "fetches, computes, returns and holds when, bytes held at most, bytes moved, memory of the\n"
    "owners. The plan is built by the code that workers run. Nothing is changed anywhere.\n"
    "\n"
    "The model comes from open daemons (--address, --model), a spec (--spec), or the header of\n"
    "a safetensors file (--safetensors), whose tensors are grouped into units by layer.\n"
    "\n"
    "Once --calibrate has measured this machine, plans say how long a step takes, too. The\n"
    "workers' compute is an open model's, while it trains, or --compute.";

static const char plan_more[] = VERB_WHERE
    "\n"
    "strategies: what a worker holds (owners hold optimizer state in any case)\n"
    "  ddp     all parameters for the step; gradients are returned after the last backward\n"
    "  zero1   all parameters for the step; each gradient is returned as its backward ends\n"
    "  zero2   parameters from forward to backward of each micro-batch (SHARD_GRAD_OP)\n"
    "  zero3   parameters of a unit while it computes, fetched again for backward (FULL_SHARD)\n"
    "\n"
    "examples:\n"
    "  shardctl plan --address /run/shardd --strategy zero3 --prefetch post\n"
    "  shardctl plan --spec gpt.json --compare --workers 2\n"
    "  shardctl plan --safetensors model.safetensors --tie lm_head.weight=wte.weight\n"
    "  shardctl plan --safetensors model.safetensors --auto --device-memory 24GiB --workers 4\n"
    "  shardctl plan --calibrate && shardctl plan --compare --workers 2\n"
    "  shardctl plan --spec gpt.json --json | jq .cost.live_bytes_max\n"
    "  shardctl plan --deepspeed ds_config.json\n"
    "  shardctl plan --fsdp 'full_shard auto_wrap offload' --spec gpt.json\n"
    "\n"
    "--deepspeed and --fsdp say of each knob what it sets here, or that it is refused; with a "
    "model\n"
    "and none refused the plan follows. Flags win over what a configuration sets.\n"
    "\n"
    "docs/schedules.md has every policy drawn by this command, and the JSON schema.\n"
    "exit code 1: the model or --rates cannot be read, or the policy is refused (the text has "
    "the\nnumbers)\n";

/* -- The choice of a strategy for a given memory ---------------------------------------------- */

/* --auto: the decision tree of the field, asked in order with the figures of this
 * model. The first yes decides: each further step holds less in a worker and moves more bytes.
 *
 *   1. everything on one device             a single owner and a whole copy: zero1
 *   2. optimizer state shared out           the worker holds parameters and all gradients: zero1
 *   3. gradients handed over as they come   the worker holds parameters and one gradient: zero1
 *   4. parameters freed as they come        as backward goes on, gradients replace them: zero2
 *   5. parameters shared out as well        zero3 with one unit ahead, then without
 *   6. not one unit                         refused, with what would do
 *
 * ddp is never the answer: with optimizer state at the owners in any case, zero1 moves as much and
 * holds no more.
 */

static const struct question {
    const char *text;
    enum plan_strategy held; /* what a worker would hold is taken from a plan of this */
    bool one_owner;
    enum plan_strategy strategy; /* chosen when the answer is yes, with so many units ahead */
    uint32_t ahead;
} questions[] = {
    { "everything on one device: state, parameters, gradients", PLAN_DDP, true, PLAN_ZERO1, 1 },
    { "optimizer state shared out, parameters and gradients whole", PLAN_DDP, false, PLAN_ZERO1,
      1 },
    { "gradients handed over unit by unit, parameters whole", PLAN_ZERO1, false, PLAN_ZERO1, 1 },
    { "each unit's parameters freed after its backward", PLAN_ZERO2, false, PLAN_ZERO2, 1 },
    { "parameters shared out as well, one unit ahead", PLAN_ZERO3, false, PLAN_ZERO3, 1 },
    { "the same without prefetch", PLAN_ZERO3, false, PLAN_ZERO3, 0 },
};

static enum plan_backward_prefetch prefetch_of(const struct question *q)
{
    return q->ahead > 0 ? PLAN_PREFETCH_PRE : PLAN_PREFETCH_NONE;
}

struct answer {
    uint64_t worker_bytes, owner_bytes, need_bytes;
    uint32_t slots; /* that each worker has at each owner */
    bool fits;
};

static int try_question(const struct spec *spec, const struct plan_ask *ask,
                        const struct question *q, struct answer *ret_answer, struct shd_err *e)
{
    const struct plan_policy held = { .strategy = q->held,
                                      .forward_prefetch = q->ahead,
                                      .backward_prefetch = prefetch_of(q) };
    struct plan_owners owners = { .total_bytes = 0 };
    struct plan plan;
    int r = plan_build(spec, &held, /* trace= */ NULL, ask->micros, &plan, e);
    if (r != SHD_OK)
        return r;
    struct answer a = { .worker_bytes = plan.cost.live_bytes_max,
                        .slots = plan_slots(spec, &held, &plan) };
    plan_free(&plan);
    if (!ask->offload || q->one_owner)
        r = plan_owners(spec, q->one_owner ? 1 : ask->daemons, ask->workers, a.slots, &owners, e);
    if (r != SHD_OK)
        return r;
    a.owner_bytes = owners.max.all;
    a.need_bytes = a.worker_bytes + a.owner_bytes + ask->activation_bytes;
    a.fits = a.need_bytes <= ask->device_bytes;
    *ret_answer = a;
    return SHD_OK;
}

static void say(const struct plan_ask *ask, const struct question *q, const struct answer *a,
                FILE *out)
{
    char worker[TEXT_BYTES], owner[TEXT_BYTES], rest[TEXT_BYTES];
    char need[TEXT_BYTES];
    if (out == NULL)
        return;
    fprintf(out, "  %-4s %s?\n       worker %s + owner %s", a->fits ? "yes" : "no", q->text,
            text_size(a->worker_bytes, worker), text_size(a->owner_bytes, owner));
    if (ask->activation_bytes > 0)
        fprintf(out, " + activations %s", text_size(ask->activation_bytes, rest));
    fprintf(out, " = %s\n", text_size(a->need_bytes, need));
}

static json_t *json_answer(const struct question *q, const struct answer *a)
{
    return json_pack("{s:s, s:I, s:I, s:I, s:b}", "question", q->text, "worker_bytes",
                     (json_int_t)a->worker_bytes, "owner_bytes", (json_int_t)a->owner_bytes,
                     "need_bytes", (json_int_t)a->need_bytes, "fits", (int)a->fits);
}

/* What the last question would need with so many daemons. */
static int need_with(const struct spec *spec, const struct plan_ask *ask, const struct answer *last,
                     uint32_t daemons, uint64_t *ret_bytes, struct shd_err *e)
{
    struct plan_owners o = { .total_bytes = 0 };
    const int r = ask->offload ? SHD_OK
                               : plan_owners(spec, daemons, ask->workers, last->slots, &o, e);
    *ret_bytes = last->worker_bytes + ask->activation_bytes + o.max.all;
    return r;
}

/* The fewest daemons with which the last question gets a yes; 0: no number will do, and *ret_floor
 * is what it needs with the most there may be. */
static int enough_daemons(const struct spec *spec, const struct plan_ask *ask,
                          const struct answer *last, uint32_t *ret_daemons, uint64_t *ret_floor,
                          struct shd_err *e)
{
    uint32_t low = ask->daemons, high = SHD_OWNERS_MAX;
    *ret_daemons = 0;
    int r = need_with(spec, ask, last, high, ret_floor, e);
    if (r != SHD_OK || *ret_floor > ask->device_bytes)
        return r;
    while (low <= high) { /* an owner's share shrinks as daemons are added */
        const uint32_t middle = low + (high - low) / 2;
        uint64_t need;
        r = need_with(spec, ask, last, middle, &need, e);
        if (r != SHD_OK)
            return r;
        const bool fits = need <= ask->device_bytes;
        *ret_daemons = fits ? middle : *ret_daemons;
        low = fits ? low : middle + 1;
        high = fits ? middle - 1 : high;
    }
    return SHD_OK;
}

/* Of the unit that needs most by itself. */
static uint32_t largest_unit(const struct spec *spec)
{
    uint32_t largest = 0;
    for (uint32_t u = 1; u < spec->unit_count; u++)
        if (plan_unit_param_bytes(spec, u) > plan_unit_param_bytes(spec, largest))
            largest = u;
    return largest;
}

static int refuse(const struct spec *spec, const struct plan_ask *ask, const struct answer *last,
                  struct shd_err *e)
{
    char need[TEXT_BYTES], have[TEXT_BYTES], unit[TEXT_BYTES], least[TEXT_BYTES];
    uint32_t daemons;
    uint64_t floor_bytes;
    const int r = enough_daemons(spec, ask, last, &daemons, &floor_bytes, e);
    if (r != SHD_OK)
        return r;
    const uint32_t largest = largest_unit(spec);
    text_size(last->need_bytes, need);
    text_size(ask->device_bytes, have);
    if (daemons > 0)
        return err_set(e, SHD_ERANGE,
                       "a device of %s is too small: zero3 without prefetch needs %s; %" PRIu32
                       " daemons instead of %" PRIu32 " would do, or --offload (owners in host "
                       "memory)",
                       have, need, daemons, ask->daemons);
    return err_set(e, SHD_ERANGE,
                   "a device of %s is too small: zero3 without prefetch needs %s, and %s with %u "
                   "daemons; the largest unit, %" PRIu32 " '%.40s', has %s: cut it into smaller "
                   "ones",
                   have, need, text_size(floor_bytes, least), SHD_OWNERS_MAX, largest,
                   spec->units[largest].name,
                   text_size(plan_unit_param_bytes(spec, largest), unit));
}

static void adopt(struct plan_ask *ask, const struct question *q, FILE *out)
{
    ask->policy.strategy = q->strategy;
    ask->policy.forward_prefetch = q->ahead;
    ask->policy.backward_prefetch = prefetch_of(q);
    if (out != NULL)
        fprintf(out, "\n  so: --strategy %s --prefetch %s --forward-prefetch %" PRIu32 "\n\n",
                plan_strategy_name(q->strategy), plan_prefetch_name(prefetch_of(q)), q->ahead);
}

/* Choose ask->policy for ask->device_bytes and say why on out (NULL: do not). *ret_json tells the
 * same. SHD_ERANGE: nothing fits; the text has the numbers. */
static int plan_auto(const struct spec *spec, struct plan_ask *ask, FILE *out, json_t **ret_json,
                     struct shd_err *e)
{
    char have[TEXT_BYTES];
    json_t *steps = json_array();
    struct answer a = { 0 };
    int r = SHD_OK;
    size_t i = 0;
    if (out != NULL)
        fprintf(out,
                "which strategy fits %s a device, %" PRIu32 " worker%s, %" PRIu32 " daemon%s%s?\n",
                text_size(ask->device_bytes, have), ask->workers, ask->workers == 1 ? "" : "s",
                ask->daemons, ask->daemons == 1 ? "" : "s",
                ask->offload ? " in host memory" : " on the same devices");
    for (; i < ARRAY_SIZE(questions); i++) {
        r = try_question(spec, ask, &questions[i], &a, e);
        if (r != SHD_OK)
            break;
        say(ask, &questions[i], &a, out);
        json_array_append_new(steps, json_answer(&questions[i], &a));
        if (a.fits)
            break;
    }
    if (r == SHD_OK && !a.fits)
        r = refuse(spec, ask, &a, e);
    if (r != SHD_OK) {
        json_decref(steps);
        return r;
    }
    if (out != NULL && ask->activation_bytes == 0)
        fprintf(out,
                "       activations are not counted: --activations; nor are a GPU's contexts\n");
    adopt(ask, &questions[i], out);
    *ret_json = json_pack("{s:I, s:I, s:o}", "device_bytes", (json_int_t)ask->device_bytes,
                          "activation_bytes", (json_int_t)ask->activation_bytes, "steps", steps);
    return SHD_OK;
}

/* -- The verb --------------------------------------------------------------------------------- */

struct words { /* flags that are parsed further */
    const char *strategy, *prefetch, *grad_dtype, *path;
    const char *deepspeed, *fsdp; /* a peer's configuration, or NULL */
    bool as_json, compare, automatic, calibrate;
};

static int parse_words(const struct words *w, struct plan_ask *ask, struct shd_err *e)
{
    if (w->strategy != NULL) {
        const int strategy = plan_strategy_parse(w->strategy);
        if (strategy < 0)
            return err_set(e, SHD_EINVAL, "--strategy is '%s', must be ddp, zero1, zero2 or zero3",
                           w->strategy);
        ask->policy.strategy = (enum plan_strategy)strategy;
    }
    if (w->prefetch != NULL) {
        const int prefetch = plan_prefetch_parse(w->prefetch);
        if (prefetch < 0)
            return err_set(e, SHD_EINVAL, "--prefetch is '%s', must be pre, post or none",
                           w->prefetch);
        ask->policy.backward_prefetch = (enum plan_backward_prefetch)prefetch;
    }
    if (w->grad_dtype != NULL)
        ask->policy.grad_dtype = dtype_parse(w->grad_dtype);
    if (w->grad_dtype != NULL && !dtype_valid(ask->policy.grad_dtype))
        return err_set(e, SHD_EINVAL, "--grad-dtype is '%s', must be f32, bf16 or f16",
                       w->grad_dtype);
    ask->copies = strcmp(w->path, "copy") == 0;
    if (!ask->copies && strcmp(w->path, "map") != 0)
        return err_set(e, SHD_EINVAL, "--path is '%s', must be map or copy", w->path);
    if (w->compare && w->automatic)
        return err_set(e, SHD_EINVAL, "--compare and --auto: one at a time");
    if (w->automatic && ask->device_bytes == 0)
        return err_set(e, SHD_EINVAL, "--auto needs --device-memory BYTES, as 24GiB");
    if (!w->automatic && (ask->device_bytes > 0 || ask->activation_bytes > 0 || ask->offload))
        return err_set(e, SHD_EINVAL,
                       "--device-memory, --activations and --offload are questions to --auto");
    return SHD_OK;
}

static int show_one(const struct spec *spec, struct plan_ask *ask, const struct words *w,
                    const struct plan_clock *clock, struct shd_err *e)
{
    json_t *automatic = NULL;
    struct plan plan;
    int r = SHD_OK;
    if (w->automatic)
        r = plan_auto(spec, ask, w->as_json ? NULL : stdout, &automatic, e);
    if (r == SHD_OK)
        r = plan_build(spec, &ask->policy, /* trace= */ NULL, ask->micros, &plan, e);
    if (r != SHD_OK) {
        json_decref(automatic);
        return r;
    }
    r = plan_check(&plan, spec, &ask->policy, /* trace= */ NULL, e);
    if (r != SHD_OK)
        json_decref(automatic);
    else if (w->as_json)
        r = plan_print_json(spec, ask, &plan, clock, automatic, stdout, e);
    else {
        json_decref(automatic);
        r = plan_print(spec, ask, &plan, clock, stdout, e);
    }
    plan_free(&plan);
    return r;
}

static int run_plan(struct plan_ask *ask, const struct words *w, struct shd_err *e)
{
    struct spec *spec;
    int r = plan_source(ask, &spec, e);
    if (r != SHD_OK)
        return r;
    if (ask->daemons == 0)
        ask->daemons = ask->workers;
    if (ask->policy.grad_dtype == 0)
        ask->policy.grad_dtype = spec->grad_dtype;
    struct plan_clock clock;
    r = plan_clock_open(ask, spec, &clock, e);
    if (r == SHD_OK)
        r = w->compare ? plan_compare(spec, ask, &clock, w->as_json, stdout, e)
                       : show_one(spec, ask, w, &clock, e);
    plan_clock_close(&clock);
    spec_free(spec);
    return r;
}

/* --deepspeed, --fsdp: answer each knob and set the policy. Returns the exit code, -1 to go on with
 * the plan: a model is named, and nothing is refused. */
static int answer_peer(struct plan_ask *ask, const struct words *w)
{
    struct shd_err e = { 0 };
    struct peer_config c;
    if (w->deepspeed != NULL && w->fsdp != NULL)
        return ctl_usage("--deepspeed and --fsdp: one at a time");
    const int r = w->deepspeed != NULL ? peer_read(&peer_deepspeed, w->deepspeed, ask, &c, &e)
                                       : peer_read(&peer_fsdp, w->fsdp, ask, &c, &e);
    const bool has_model = ask->spec != NULL || ask->safetensors != NULL || ask->address != NULL ||
                           ask->model != NULL;
    const bool goes_on = r == SHD_OK && c.refused == 0 && has_model;
    if (r == SHD_OK && !w->as_json)
        peer_print(&c, stdout);
    else if (r == SHD_OK && !goes_on)
        verb_json(peer_json(&c), JSON_INDENT(2), stdout);
    const size_t refused = c.refused;
    peer_free(&c);
    if (r != SHD_OK)
        return ctl_fail("%s", e.text);
    if (refused > 0)
        return ctl_fail("%s: %zu knob%s refused, as marked above", c.from, refused,
                        refused == 1 ? " is" : "s are");
    return goes_on ? -1 : CTL_OK;
}

/* Measure this machine, and keep what came of it. */
static int run_calibrate(const struct plan_ask *ask, struct shd_err *e)
{
    char path[RATES_PATH_BYTES];
    struct plan_rates rates;
    int r = rates_path(ask->rates, path, e);
    if (r == SHD_OK)
        r = calibrate(&rates, e);
    if (r == SHD_OK)
        r = rates_save(path, &rates, e);
    if (r == SHD_OK)
        ctl_say("the rates of this machine are in '%s'", path);
    return r;
}

static int answer(struct plan_ask *ask, const struct words *w)
{
    struct shd_err e = { 0 };
    if (parse_words(w, ask, &e) != SHD_OK) {
        ctl_say("%s", e.text);
        return ctl_usage("`shardctl plan --help` explains");
    }
    const bool asks = ask->address != NULL || ask->model != NULL || ask->spec != NULL ||
                      ask->safetensors != NULL;
    int r = w->calibrate ? run_calibrate(ask, &e) : SHD_OK;
    if (r == SHD_OK && (asks || !w->calibrate))
        r = run_plan(ask, w, &e);
    if (r == SHD_OK)
        return CTL_OK;
    return ctl_fail("%s", e.text);
}

int verb_plan(int argc, char **argv)
{
    struct plan_ask ask = { .workers = 1, .policy = PLAN_POLICY_DEFAULT };
    struct words w = { .path = "map" };
    struct plan_policy *p = &ask.policy;
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(ask.address),
        { "model", 'm', FLAG_STRING, "NAME", "which of their models (the only one there)",
          &ask.model, 0, 0 },
        { "spec", 0, FLAG_STRING, "FILE", "a model spec in JSON", &ask.spec, 0, 0 },
        { "safetensors", 0, FLAG_STRING, "FILE", "a safetensors file; only its header is read",
          &ask.safetensors, 0, 0 },
        { "units", 0, FLAG_STRING, "REGEX", "a unit is what this matches in tensor names (layers)",
          &ask.wrap, 0, 0 },
        { "unit-elems-min", 0, FLAG_U32, "N", "join units below this many parameters",
          &ask.unit_elems_min, 0, UINT32_MAX },
        { "tie", 0, FLAG_STRING, "A=T", "tensor A, not in the file, is T a second time", &ask.tie,
          0, 0 },
        { "frozen", 0, FLAG_STRING, "REGEX", "tensors that are not trained", &ask.frozen, 0, 0 },
        { "deepspeed", 0, FLAG_STRING, "FILE", "the policy of this DeepSpeed JSON, knob by knob",
          &w.deepspeed, 0, 0 },
        { "fsdp", 0, FLAG_STRING, "WORDS|FILE", "of FSDP's words or JSON, likewise", &w.fsdp, 0,
          0 },
        { "strategy", 's', FLAG_STRING, "S", "ddp, zero1, zero2, zero3 (zero3)", &w.strategy, 0,
          0 },
        { "prefetch", 'p', FLAG_STRING, "P", "in backward: pre, post, none (pre)", &w.prefetch, 0,
          0 },
        { "forward-prefetch", 0, FLAG_U32, "N", "units ahead in forward (1)", &p->forward_prefetch,
          0, SHD_UNITS_MAX },
        { "max-live-units", 0, FLAG_U32, "N", "hold at most so many units at once",
          &p->max_live_units, 1, UINT32_MAX },
        { "max-live-bytes", 0, FLAG_BYTES, "B", "hold at most so many bytes of parameters",
          &p->max_live_bytes, 0, 0 },
        { "grad-dtype", 0, FLAG_STRING, "D", "gradients are returned as (what the model says)",
          &w.grad_dtype, 0, 0 },
        { "param-dtype", 0, FLAG_STRING, "D", "parameters are read as (what the model says)",
          &ask.param_dtype, 0, 0 },
        { "accumulate", 0, FLAG_U32, "A", "micro-batches per return (what the model says)",
          &ask.accumulate, 1, SHD_MICROS_MAX },
        { "micro-batches-per-worker", 0, FLAG_U32, "K", "in a step (the model's, shared out)",
          &ask.micros, 1, SHD_MICROS_MAX },
        { "workers", 'w', FLAG_U32, "W", "that share the step (1)", &ask.workers, 1,
          SHD_MICROS_MAX },
        { "daemons", 'n', FLAG_U32, "N", "that hold the model (as do now, or as many as workers)",
          &ask.daemons, 1, SHD_OWNERS_MAX },
        { "compare", 'c', FLAG_BOOL, NULL, "all strategies side by side", &w.compare, 0, 0 },
        { "auto", 0, FLAG_BOOL, NULL, "choose a strategy for --device-memory and say why",
          &w.automatic, 0, 0 },
        { "device-memory", 0, FLAG_BYTES, "B", "of one device, as 24GiB", &ask.device_bytes, 0, 0 },
        { "activations", 0, FLAG_BYTES, "B", "of it, kept for activations (0)",
          &ask.activation_bytes, 0, 0 },
        { "offload", 0, FLAG_BOOL, NULL, "daemons are in host memory, not on the devices",
          &ask.offload, 0, 0 },
        { "calibrate", 0, FLAG_BOOL, NULL, "measure this machine, for seconds", &w.calibrate, 0,
          0 },
        { "rates", 0, FLAG_STRING, "FILE", "what it measured (shardd/rates.json in ~/.cache)",
          &ask.rates, 0, 0 },
        { "compute", 0, FLAG_REAL, "SECONDS", "of a micro-batch (an open model's as it trains)",
          &ask.compute_s, 1e-9, 1e6 },
        { "path", 0, FLAG_STRING, "P", "seconds are for path map or copy (map)", &w.path, 0, 0 },
        { "threads-per-daemon", 0, FLAG_U32, "T", "seconds are for so many (processors / N)",
          &ask.threads, 1, 256 },
        { "timeline", 't', FLAG_BOOL, NULL, "the timeline alone", &ask.timeline_only, 0, 0 },
        { "json", 'j', FLAG_BOOL, NULL, "one JSON document", &w.as_json, 0, 0 },
    };
    const struct flags flags = VERB_FLAGS(plan, "shardctl plan [FLAGS]", table);
    int code = verb_start(&flags, argc, argv, /* ret_rest= */ NULL);
    if (code < 0 && (w.deepspeed != NULL || w.fsdp != NULL)) {
        code = answer_peer(&ask, &w);
        if (code < 0) /* flags of the command line win */
            code = verb_start(&flags, argc, argv, /* ret_rest= */ NULL);
    }
    return code >= 0 ? code : answer(&ask, &w);
}
