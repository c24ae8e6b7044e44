/* shardctl plan: what a policy will do to a model, and cost, before it is run. Reads the model,
 * builds the plan with the code that workers run, prints it. */
#include "client/ctl/plan/plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/text.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/plan/calibrate.h"
#include "client/ctl/plan/peers.h"
#include "client/ctl/plan/plan_auto.h"
#include "client/ctl/plan/plan_clock.h"
#include "client/ctl/plan/plan_hosts.h"
#include "client/ctl/plan/plan_scale.h"
#include "client/ctl/plan/plan_show.h"
#include "client/ctl/plan/plan_source.h"
#include "client/ctl/plan/plan_tune.h"
#include "client/ctl/plan/rates.h"
#include "client/plan/plan.h"
#include "client/plan/plan_check.h"
#include "client/plan/plan_cost.h"
#include "client/plan/plan_own.h"
#include "client/plan/plan_text.h"
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
    "  shardctl plan --spec gpt.json --host a:2:1 --host b:0:4\n"
    "  shardctl plan --spec gpt.json --hosts 8 --gpus 8 --bandwidth 400 --compute 0.7\n"
    "  shardctl plan --safetensors model.safetensors --tie lm_head.weight=wte.weight\n"
    "  shardctl plan --safetensors model.safetensors --auto --device-memory 24GiB --workers 4\n"
    "  shardctl plan --calibrate && shardctl plan --compare --workers 2\n"
    "  shardctl plan --spec gpt.json --json | jq .cost.live_bytes_max\n"
    "  shardctl plan --spec gpt.json --workers 2 --compute 0.03 --tune\n"
    "  shardctl plan --spec gpt.json --ops >plan.json\n"
    "  shardctl plan --spec gpt.json --check plan.json\n"
    "  shardctl plan --deepspeed ds_config.json\n"
    "  shardctl plan --fsdp 'full_shard auto_wrap offload' --spec gpt.json\n"
    "\n"
    "--host a:2:1 --host b:0:4: two daemons and a worker on a, four workers on b, through relays\n"
    "(docs/hosts.md): what crosses between them in a step. Owners and ranks are in this order.\n"
    "With --replicas 2 each slice is on two hosts, which `shardctl host --replicas` pairs.\n"
    "\n"
    "--hosts 8 --gpus 8: eight hosts, with eight daemons and workers each: bytes and messages of "
    "the\n"
    "busiest host, its relay's memory and, of --bandwidth, seconds; beside the same without "
    "relays.\n"
    "\n"
    "--ops prints the operations alone, for an editor: --check says whether they still make a\n"
    "step, and what it costs; shd-gpt --plan and shd_set_plan() run them.\n"
    "\n"
    "--deepspeed and --fsdp say of each knob what it sets here, or that it is refused; with a "
    "model\n"
    "and none refused the plan follows. Flags win over what a configuration sets.\n"
    "\n"
    "docs/schedules.md has every policy drawn by this command, and the JSON schema.\n"
    "exit code 1: the model or --rates cannot be read, or the policy is refused (the text has "
    "the\nnumbers)\n";

/* -- The verb --------------------------------------------------------------------------------- */

struct words { /* flags that are parsed further */
    const char *strategy, *prefetch, *grad_dtype, *path, *device;
    const char *state, *publish;  /* memory or file */
    const char *deepspeed, *fsdp; /* a peer's configuration, or NULL */
    const char *check;            /* a file of operations; NULL: they are built */
    bool as_json, as_ops, compare, automatic, tune, calibrate;
};

/* A plan that is given says by itself what these would. */
static int check_given(const struct words *w, const struct plan_ask *ask, struct shd_err *e)
{
    static const struct plan_policy usual = PLAN_POLICY_DEFAULT;
    const struct plan_policy *p = &ask->policy;
    const struct {
        const char *flag;
        bool given;
    } rows[] = {
        { "--strategy", w->strategy != NULL },
        { "--prefetch", w->prefetch != NULL },
        { "--forward-prefetch", p->forward_prefetch != usual.forward_prefetch },
        { "--max-live-units", p->max_live_units > 0 },
        { "--max-live-bytes", p->max_live_bytes > 0 },
        { "--grad-dtype", w->grad_dtype != NULL },
        { "--micro-batches-per-worker", ask->micros > 0 },
        { "--host-sums", p->shares_sums },
        { "--deepspeed", w->deepspeed != NULL },
        { "--fsdp", w->fsdp != NULL },
        { "--compare", w->compare },
        { "--auto", w->automatic },
        { "--tune", w->tune },
    };
    for (size_t i = 0; w->check != NULL && i < ARRAY_SIZE(rows); i++)
        if (rows[i].given)
            return err_set(e, SHD_EINVAL, "%s with --check %s: the file has the plan", rows[i].flag,
                           w->check);
    const bool several = w->compare || w->automatic || w->strategy != NULL || w->prefetch != NULL ||
                         p->forward_prefetch != usual.forward_prefetch || ask->timeline_only;
    if (ask->scale.hosts > 0 && (w->compare || w->tune || w->as_ops || ask->timeline_only))
        return err_set(e, SHD_EINVAL,
                       "--hosts is of one plan: not with --compare, --tune, --ops or --timeline");
    if (w->tune && several)
        return err_set(e, SHD_EINVAL,
                       "--tune looks for --strategy, --prefetch and "
                       "--forward-prefetch itself: not with these, --compare, "
                       "--auto or --timeline");
    if (w->as_ops && (w->as_json || w->compare || w->automatic || ask->timeline_only))
        return err_set(e, SHD_EINVAL,
                       "--ops is an answer of its own: not with --json, --timeline, "
                       "--compare or --auto");
    return SHD_OK;
}

static int take_home(const char *flag, const char *word, bool *ret_on_file, struct shd_err *e)
{
    *ret_on_file = strcmp(word, "file") == 0;
    if (*ret_on_file || strcmp(word, "memory") == 0)
        return SHD_OK;
    return err_set(e, SHD_EINVAL, "%s is '%s', must be memory or file", flag, word);
}

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
    int r = take_home("--state", w->state, &ask->state_on_file, e);
    if (r == SHD_OK)
        r = take_home("--publish", w->publish, &ask->publish_on_file, e);
    if (r != SHD_OK)
        return r;
    ask->copies = strcmp(w->path, "copy") == 0;
    if (!ask->copies && strcmp(w->path, "map") != 0)
        return err_set(e, SHD_EINVAL, "--path is '%s', must be map or copy", w->path);
    if (w->compare && w->automatic)
        return err_set(e, SHD_EINVAL, "--compare and --auto: one at a time");
    if (w->automatic && ask->replicas > 1)
        return err_set(e, SHD_EINVAL, "--auto is of one device at a time: not with --replicas");
    if (w->automatic && ask->device_bytes == 0)
        return err_set(e, SHD_EINVAL, "--auto needs --device-memory BYTES, as 24GiB");
    if (!w->automatic && (ask->device_bytes > 0 || ask->activation_bytes > 0 || ask->offload ||
                          w->device != NULL || ask->context_bytes > 0))
        return err_set(e, SHD_EINVAL,
                       "--device-memory, --device, --context, --activations and --offload are "
                       "questions to --auto");
    ask->on_gpu = w->device == NULL || strcmp(w->device, "gpu") == 0;
    if (!ask->on_gpu && strcmp(w->device, "host") != 0)
        return err_set(e, SHD_EINVAL, "--device is '%s', must be gpu or host", w->device);
    if (!ask->on_gpu && ask->context_bytes > 0)
        return err_set(e, SHD_EINVAL, "--context is of a GPU: not with --device host");
    if (ask->context_bytes == 0)
        ask->context_bytes = GPU_CONTEXT_BYTES;
    return check_given(w, ask, e);
}

/* --check FILE: its plan is the plan, and its policy is asked for. */
static int read_plan(const struct spec *spec, struct plan_ask *ask, const char *path,
                     struct plan *ret_plan, struct shd_err *e)
{
    struct plan_own *own;
    char *text = NULL;
    size_t bytes = 0;
    int r = verb_file(path, PLAN_TEXT_BYTES_MAX, &text, &bytes, e);
    if (r != SHD_OK)
        return r;
    r = plan_own_new(spec, text, bytes, &own, e);
    free(text);
    if (r != SHD_OK)
        return err_prefix(e, "%s", path);
    ask->policy = own->policy;
    ask->micros = own->plan.micros;
    *ret_plan = own->plan;
    own->plan = (struct plan){ 0 };
    plan_own_free(own);
    return SHD_OK;
}

static int print_ops(const struct spec *spec, const struct plan_ask *ask, const struct plan *plan,
                     struct shd_err *e)
{
    char *text;
    const int r = plan_text_write(spec, &ask->policy, plan, &text, e);
    if (r != SHD_OK)
        return r;
    fputs(text, stdout);
    free(text);
    return SHD_OK;
}

static int make_plan(const struct spec *spec, struct plan_ask *ask, const struct words *w,
                     struct plan *ret_plan, struct shd_err *e)
{
    if (w->check != NULL)
        return read_plan(spec, ask, w->check, ret_plan, e);
    int r = plan_build(spec, &ask->policy, /* trace= */ NULL, ask->micros, ret_plan, e);
    if (r != SHD_OK)
        return r;
    r = plan_check(ret_plan, spec, &ask->policy, /* trace= */ NULL, e);
    if (r != SHD_OK)
        plan_free(ret_plan);
    return r;
}

static int show_one(const struct spec *spec, struct plan_ask *ask, const struct words *w,
                    const struct plan_clock *clock, struct shd_err *e)
{
    json_t *automatic = NULL;
    struct plan plan;
    int r = SHD_OK;
    if (w->automatic)
        r = plan_auto(spec, ask, w->as_json ? NULL : stdout, &automatic, e);
    if (w->tune) /* with --ops: the best one's */
        r = plan_tune(spec, ask, clock, /* as_json= */ false, /* out= */ NULL, e);
    if (r == SHD_OK)
        r = make_plan(spec, ask, w, &plan, e);
    if (r != SHD_OK || !w->as_json)
        json_decref(automatic);
    if (r != SHD_OK)
        return r;
    if (w->as_ops)
        r = print_ops(spec, ask, &plan, e);
    else if (ask->policy.grad_dtype == 0) /* of a file that leaves it to the model */
        ask->policy.grad_dtype = spec->grad_dtype;
    if (w->as_json)
        r = plan_print_json(spec, ask, &plan, clock, automatic, stdout, e);
    else if (!w->as_ops)
        r = plan_print(spec, ask, &plan, clock, stdout, e);
    plan_free(&plan);
    return r;
}

static int run_plan(struct plan_ask *ask, const struct words *w, struct shd_err *e)
{
    struct plan_hosts hosts = { .count = 0 };
    struct spec *spec;
    int r = plan_scale_parse(ask, e);
    if (r == SHD_OK)
        r = plan_hosts_parse(ask, &hosts, e);
    if (r == SHD_OK)
        r = plan_source(ask, &spec, e);
    if (r != SHD_OK) {
        plan_hosts_free(&hosts);
        return r;
    }
    ask->across = hosts.count > 0 ? &hosts : NULL;
    if (ask->daemons == 0)
        ask->daemons = ask->workers;
    if (ask->policy.grad_dtype == 0)
        ask->policy.grad_dtype = spec->grad_dtype;
    struct plan_clock clock;
    r = plan_clock_open(ask, spec, &clock, e);
    if (r == SHD_OK)
        r = w->compare              ? plan_compare(spec, ask, &clock, w->as_json, stdout, e)
            : w->tune && !w->as_ops ? plan_tune(spec, ask, &clock, w->as_json, stdout, e)
                                    : show_one(spec, ask, w, &clock, e);
    plan_clock_close(&clock);
    ask->across = NULL;
    plan_hosts_free(&hosts);
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
    fflush(stdout); /* else errors come in the middle of it where both go to one file */
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

/* The flags, in the order of the help. Which model: */
static void add_model_flags(struct flag_table *table, struct plan_ask *ask)
{
    const struct flag rows[] = {
        VERB_ADDRESS_FLAGS(ask->address),
        { "model", 'm', FLAG_STRING, "NAME", "which of their models (the only one there)",
          &ask->model, 0, 0 },
        { "spec", 0, FLAG_STRING, "FILE", "a model spec in JSON", &ask->spec, 0, 0 },
        { "safetensors", 0, FLAG_STRING, "FILE", "a safetensors file; only its header is read",
          &ask->safetensors, 0, 0 },
        { "units", 0, FLAG_STRING, "REGEX", "a unit is what this matches in tensor names (layers)",
          &ask->wrap, 0, 0 },
        { "unit-elems-min", 0, FLAG_U32, "N", "join units below this many parameters",
          &ask->unit_elems_min, 0, UINT32_MAX },
        { "tie", 0, FLAG_STRING, "A=T", "tensor A, not in the file, is T a second time", &ask->tie,
          0, 0 },
        { "frozen", 0, FLAG_STRING, "REGEX", "tensors that are not trained", &ask->frozen, 0, 0 },
    };
    FLAGS_ADD(table, rows);
}

static void add_policy_flags(struct flag_table *table, struct plan_ask *ask, struct words *w)
{
    struct plan_policy *p = &ask->policy;
    const struct flag rows[] = {
        { "deepspeed", 0, FLAG_STRING, "FILE", "the policy of this DeepSpeed JSON, knob by knob",
          &w->deepspeed, 0, 0 },
        { "fsdp", 0, FLAG_STRING, "WORDS|FILE", "of FSDP's words or JSON, likewise", &w->fsdp, 0,
          0 },
        { "strategy", 's', FLAG_STRING, "S", "ddp, zero1, zero2, zero3 (zero3)", &w->strategy, 0,
          0 },
        { "prefetch", 'p', FLAG_STRING, "P", "in backward: pre, post, none (pre)", &w->prefetch, 0,
          0 },
        { "forward-prefetch", 0, FLAG_U32, "N", "units ahead in forward (1)", &p->forward_prefetch,
          0, SHD_UNITS_MAX },
        { "max-live-units", 0, FLAG_U32, "N", "hold at most so many units at once",
          &p->max_live_units, 1, UINT32_MAX },
        { "max-live-bytes", 0, FLAG_BYTES, "B", "hold at most so many bytes of parameters",
          &p->max_live_bytes, 0, 0 },
        { "grad-dtype", 0, FLAG_STRING, "D", "gradients are returned as (what the model says)",
          &w->grad_dtype, 0, 0 },
        { "param-dtype", 0, FLAG_STRING, "D", "parameters are read as (what the model says)",
          &ask->param_dtype, 0, 0 },
        { "accumulate", 0, FLAG_U32, "A", "micro-batches per return (what the model says)",
          &ask->accumulate, 1, SHD_MICROS_MAX },
        { "host-sums", 0, FLAG_BOOL, NULL, "of all workers of a host together (shd_policy.sums)",
          &p->shares_sums, 0, 0 },
    };
    FLAGS_ADD(table, rows);
}

/* Who shares the step, and on what. */
static void add_machine_flags(struct flag_table *table, struct plan_ask *ask, struct words *w)
{
    const struct flag rows[] = {
        { "micro-batches-per-worker", 0, FLAG_U32, "K", "in a step (the model's, shared out)",
          &ask->micros, 1, SHD_MICROS_MAX },
        { "workers", 'w', FLAG_U32, "W", "that share the step (1)", &ask->workers, 1,
          SHD_MICROS_MAX },
        { "daemons", 'n', FLAG_U32, "N", "that hold the model (as do now, or as many as workers)",
          &ask->daemons, 1, SHD_OWNERS_MAX },
        { "host", 0, FLAG_LIST, "NAME:N:W",
          "once for each of several hosts: its daemons and workers", &ask->hosts, 0, 0 },
        { "hosts", 0, FLAG_U32, "H", "so many hosts that are alike, with a relay each",
          &ask->scale.hosts, 2, SHD_OWNERS_MAX },
        { "gpus", 0, FLAG_U32, "G", "daemons and workers on each of them", &ask->scale.gpus, 1,
          SHD_OWNERS_MAX },
        { "replicas", 0, FLAG_U32, "R", "of each slice, on R hosts: 1 or 2 (1)", &ask->replicas, 1,
          2 },
        { "bandwidth", 0, FLAG_REAL, "GBIT", "a second between hosts, in each direction",
          &ask->scale.gbit, 1e-3, 1e5 },
        { "latency", 0, FLAG_REAL, "US", "microseconds from host to host (0)",
          &ask->scale.latency_us, 0, 1e7 },
        { "compare", 'c', FLAG_BOOL, NULL, "all strategies side by side", &w->compare, 0, 0 },
        { "auto", 0, FLAG_BOOL, NULL, "choose a strategy for --device-memory and say why",
          &w->automatic, 0, 0 },
        { "tune", 0, FLAG_BOOL, NULL, "policies and prefetch distances, the quickest first",
          &w->tune, 0, 0 },
        { "device-memory", 0, FLAG_BYTES, "B", "of one device, as 24GiB", &ask->device_bytes, 0,
          0 },
        { "device", 0, FLAG_STRING, "D", "that this is of: gpu or host (gpu)", &w->device, 0, 0 },
        { "context", 0, FLAG_BYTES, "B", "of a GPU's, for each process on it (512MiB)",
          &ask->context_bytes, 0, 0 },
        { "activations", 0, FLAG_BYTES, "B", "of it, kept for activations (0)",
          &ask->activation_bytes, 0, 0 },
        { "offload", 0, FLAG_BOOL, NULL, "daemons are in host memory, not on the devices",
          &ask->offload, 0, 0 },
        { "calibrate", 0, FLAG_BOOL, NULL, "measure this machine, for seconds", &w->calibrate, 0,
          0 },
        { "rates", 0, FLAG_STRING, "FILE", "what it measured (shardd/rates.json in ~/.cache)",
          &ask->rates, 0, 0 },
        { "compute", 0, FLAG_REAL, "SECONDS", "of a micro-batch (an open model's as it trains)",
          &ask->compute_s, 1e-9, 1e6 },
        { "state", 0, FLAG_STRING, "WHERE", "the daemons' state is in memory or file (memory)",
          &w->state, 0, 0 },
        { "publish", 0, FLAG_STRING, "WHERE", "likewise what workers read (memory)", &w->publish, 0,
          0 },
        { "path", 0, FLAG_STRING, "P", "seconds are for path map or copy (map)", &w->path, 0, 0 },
        { "threads-per-daemon", 0, FLAG_U32, "T", "seconds are for so many (processors / N)",
          &ask->threads, 1, 256 },
        { "check", 0, FLAG_STRING, "FILE", "the plan in this file, not one of a strategy",
          &w->check, 0, 0 },
        { "ops", 0, FLAG_BOOL, NULL, "its operations as JSON, one a line", &w->as_ops, 0, 0 },
        { "timeline", 't', FLAG_BOOL, NULL, "the timeline alone", &ask->timeline_only, 0, 0 },
        { "json", 'j', FLAG_BOOL, NULL, "one JSON document", &w->as_json, 0, 0 },
    };
    FLAGS_ADD(table, rows);
}

int verb_plan(int argc, char **argv)
{
    struct plan_ask ask = { .workers = 1, .replicas = 1, .policy = PLAN_POLICY_DEFAULT };
    struct words w = { .path = "map", .state = "memory", .publish = "memory" };
    struct flag_table table = { .count = 0 };
    add_model_flags(&table, &ask);
    add_policy_flags(&table, &ask, &w);
    add_machine_flags(&table, &ask, &w);
    const struct flags flags = VERB_FLAGS_OF(plan, "shardctl plan [FLAGS]", table);
    int code = verb_start(&flags, argc, argv, /* ret_rest= */ NULL);
    if (code < 0 && (w.deepspeed != NULL || w.fsdp != NULL)) {
        code = answer_peer(&ask, &w);
        if (code < 0) /* flags of the command line win */
            code = verb_start(&flags, argc, argv, /* ret_rest= */ NULL);
    }
    return code >= 0 ? code : answer(&ask, &w);
}
