/* options.c: see options.h. One table drives parsing, limits and the help text. */
#include "examples/gpt/options.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "examples/gpt/data.h"
#include "examples/gpt/options_check.h"
#include "examples/gpt/pool.h"
#include "examples/gpt/shape.h"
#include "proto/base/flags.h"
#include "proto/base/status.h"

#define INTEGER_MAX 9007199254740992.0 /* 2^53: exact in a double, and in JSON */
#define UNSET       UINT64_MAX         /* an integer whose default depends on others */

static const struct options defaults = {
    .layers = 4,
    .dim = 128,
    .heads = 4,
    .seq = 128,
    .batch = 8,
    .micro_batches = 4,
    .steps = 500,
    .optimizer = "adamw",
    .lr = NAN,
    .min_lr = NAN,
    .warmup = UNSET,
    .weight_decay = 0.1,
    .clip = 1,
    .seed = 1,
    .eval_every = 100,
    .log_every = UNSET,
    .sample = 400,
    .temperature = 0.8,
    .threads = UNSET,
    .device = "host",
    .math = "fp32",
    .strategy = "zero3",
    .prefetch = "pre",
    .forward_prefetch = 1,
    .path = "auto",
    .max_live_units = 0,
    .max_live_bytes = 0,
    .precision = "fp32",
    .grad_precision = "fp32",
    .bf16_gemm = "auto",
    .accumulate = "owner",
    .experts = 0,
    .adapters = 0,
    .fetch_delay_ms = 0,
    .slow = 1,
    .slow_rank = UNSET,
    .inject_overflow = 0,
    .stop_rank = UNSET,
    .stop_at = 0,
};

static struct options parsed; /* what the table stores into */

static const struct flag table[] = {
    { "data", 0, FLAG_LIST, "PATH",
      "text file or folder; may be given again (default " DATA_DEFAULT_PATH ")", &parsed.data, 0,
      0 },
    { "layers", 0, FLAG_U64, "N", "transformer blocks (4)", &parsed.layers, 1, GPT_LAYERS_MAX },
    { "dim", 0, FLAG_U64, "N", "width of the model (128)", &parsed.dim, 1, GPT_DIM_MAX },
    { "heads", 0, FLAG_U64, "N", "attention heads; divides --dim (4)", &parsed.heads, 1,
      GPT_DIM_MAX },
    { "seq", 0, FLAG_U64, "N", "bytes of context (128)", &parsed.seq, 1, GPT_SEQ_MAX },
    { "batch", 0, FLAG_U64, "N", "sequences of a micro-batch (8)", &parsed.batch, 1,
      GPT_BATCH_MAX },
    { "micro-batches", 0, FLAG_U64, "N", "of a step, shared out over the workers (4)",
      &parsed.micro_batches, 1, 4096 },
    { "steps", 0, FLAG_U64, "N", "train until the model has had this many updates (500)",
      &parsed.steps, 1, INTEGER_MAX },
    { "optimizer", 0, FLAG_STRING, "NAME", "adamw, sgd or lion (adamw)", &parsed.optimizer, 0, 0 },
    { "lr", 0, FLAG_REAL, "X", "peak learning rate (default 0.005 adamw, 0.1 sgd, 0.0003 lion)",
      &parsed.lr, 0, 100 },
    { "min-lr", 0, FLAG_REAL, "X", "learning rate at the end (default a tenth of --lr)",
      &parsed.min_lr, 0, 100 },
    { "warmup", 0, FLAG_U64, "N",
      "steps of linear warm-up (default a tenth of --steps, at least 20)", &parsed.warmup, 0,
      INTEGER_MAX },
    { "weight-decay", 0, FLAG_REAL, "X", "of matrices; biases and norms have none (0.1)",
      &parsed.weight_decay, 0, 100 },
    { "clip", 0, FLAG_REAL, "X", "global gradient norm; 0: no clipping (1)", &parsed.clip, 0, 1e9 },
    { "seed", 0, FLAG_U64, "N", "of the initial parameters, the batches and the sample (1)",
      &parsed.seed, 0, INTEGER_MAX },
    { "eval-every", 0, FLAG_U64, "N", "steps between held-out losses; 0: at the end only (100)",
      &parsed.eval_every, 0, INTEGER_MAX },
    { "log-every", 0, FLAG_U64, "N", "steps between lines (default a twentieth of --steps)",
      &parsed.log_every, 1, INTEGER_MAX },
    { "sample", 0, FLAG_U64, "N", "bytes of text to print at the end; 0: none (400)",
      &parsed.sample, 0, 1 << 20 },
    { "temperature", 0, FLAG_REAL, "X", "of the sample; 0: always the likeliest byte (0.8)",
      &parsed.temperature, 0, 100 },
    { "threads", 0, FLAG_U64, "N", "compute threads (default CPUs / LOCAL_WORLD_SIZE)",
      &parsed.threads, 1, POOL_THREADS_MAX },
    { "device", 0, FLAG_STRING, "WHERE", "where to compute: host, or cuda:N, the Nth GPU (host)",
      &parsed.device, 0, 0 },
    { "math", 0, FLAG_STRING, "NAME",
      "fp32, or tf32: fp32 products on a GPU with factors of 10 bits (fp32)", &parsed.math, 0, 0 },
    { "standalone", 0, FLAG_BOOL, NULL, "no daemons: the same training in this process, same bits",
      &parsed.standalone, 0, 0 },
    { "address", 0, FLAG_STRING, "DIR",
      "where the daemons are (default $SHARDD_ADDRESS, /run/shardd)", &parsed.address, 0, 0 },
    { "elastic", 0, FLAG_BOOL, NULL, "micro-batches go to whoever asks; workers may come and go",
      &parsed.elastic, 0, 0 },
    { "json", 0, FLAG_STRING, "FILE", "one JSON object per step with its timings (rank 0)",
      &parsed.json, 0, 0 },
    { "strategy", 0, FLAG_STRING, "NAME", "what a worker holds: ddp, zero1, zero2 or zero3 (zero3)",
      &parsed.strategy, 0, 0 },
    { "prefetch", 0, FLAG_STRING, "NAME",
      "fetch for backward ahead: pre (before the unit's backward), post, none (pre)",
      &parsed.prefetch, 0, 0 },
    { "forward-prefetch", 0, FLAG_U64, "N", "units fetched ahead in forward (1)",
      &parsed.forward_prefetch, 0, GPT_UNITS_MAX },
    { "path", 0, FLAG_STRING, "NAME",
      "how parameters come: map (the owners' memory), copy, nccl or auto (auto)", &parsed.path, 0,
      0 },
    { "max-live-units", 0, FLAG_U64, "N", "bound on units held at once; 0: none (0)",
      &parsed.max_live_units, 0, GPT_UNITS_MAX },
    { "max-live-bytes", 0, FLAG_U64, "N", "bound on their bytes; 0: none (0)",
      &parsed.max_live_bytes, 0, INTEGER_MAX },
    { "precision", 0, FLAG_STRING, "NAME",
      "fp32, bf16 or fp16: of parameters as workers read them, and of products (fp32)",
      &parsed.precision, 0, 0 },
    { "grad-precision", 0, FLAG_STRING, "NAME",
      "fp32, bf16 or fp16: of gradients on their way to the owners (fp32)", &parsed.grad_precision,
      0, 0 },
    { "bf16-gemm", 0, FLAG_STRING, "NAME",
      "auto, native (the CPU's bf16 instructions) or emulated (auto)", &parsed.bf16_gemm, 0, 0 },
    { "loss-scale", 0, FLAG_STRING, "S",
      "dynamic, static (1024) or a number (default dynamic with fp16)", &parsed.loss_scale, 0, 0 },
    { "accumulate", 0, FLAG_STRING, "HOW",
      "owner: return every micro-batch; local:A: sum A of them first (owner)", &parsed.accumulate,
      0, 0 },
    { "experts", 0, FLAG_U64, "N", "MLPs per block, one for each token, each a unit; 0: dense (0)",
      &parsed.experts, 0, GPT_EXPERTS_MAX },
    { "adapters", 0, FLAG_U64, "R",
      "train low-rank adapters of rank R on a frozen model; 0: all (0)", &parsed.adapters, 0,
      GPT_DIM_MAX },
    { "recompute", 0, FLAG_BOOL, NULL,
      "hold one layer's activations, not all: compute them again in backward; same bits",
      &parsed.recompute, 0, 0 },
    { "fetch-delay-ms", 0, FLAG_REAL, "X",
      "added to each fetch of --path copy: a slow link, for benchmarks (0)", &parsed.fetch_delay_ms,
      0, 10000 },
    { "slow", 0, FLAG_REAL, "X", "test aid: compute takes X times as long (1)", &parsed.slow, 1,
      1000 },
    { "slow-rank", 0, FLAG_U64, "N", "of this worker only; given together with --slow",
      &parsed.slow_rank, 0, UINT32_MAX },
    { "inject-overflow", 0, FLAG_U64, "STEP",
      "test aid: make one gradient of that step infinite; 0: never (0)", &parsed.inject_overflow, 0,
      INTEGER_MAX },
    { "stop-rank", 0, FLAG_U64, "N", "test aid: this worker leaves early, the others take over",
      &parsed.stop_rank, 1, UINT32_MAX },
    { "stop-at", 0, FLAG_U64, "STEP", "after this step; given together with --stop-rank (0)",
      &parsed.stop_at, 0, INTEGER_MAX },
    { "print-spec", 0, FLAG_BOOL, NULL, "print the model's spec and end: for shardctl plan --spec",
      &parsed.print_spec, 0, 0 },
    { "version", 0, FLAG_BOOL, NULL, "print the version", &parsed.version, 0, 0 },
};

static const struct flags flags = {
    .usage = "shd-gpt [FLAGS]",
    .about = "Train a byte-level GPT whose parameters live in shardd daemons.\n\n"
             "  shardctl run --daemons 2 --workers 2 -- shd-gpt\n"
             "        two daemons hold the model, two workers train it, on the fortunes\n"
             "  shd-gpt --standalone --steps 50\n"
             "        the same training without daemons: the same digest at the same step\n"
             "  shd-gpt --data book.txt --layers 6 --dim 384 --heads 6 --seq 256 --steps 2000\n"
             "        with daemons that run already; a model that is at step k goes on from there",
    .more = "Environment: RANK of WORLD_SIZE is this worker's place (default 0 of 1): it computes\n"
            "micro-batches i with i % WORLD_SIZE == RANK. SHARDD_ELASTIC=1: as --elastic.\n"
            "SHARDD_ADDRESS: where the daemons are.\n"
            "NO_COLOR: no colours. Rank 0 prints; its last line is the digest of parameters and\n"
            "optimizer state, which does not depend on how many daemons and workers there are.\n\n"
            "Exit: 0 done, 1 failed, 2 wrong usage, 130 or 143 ended by SIGINT or SIGTERM after a\n"
            "whole step. With --elastic a signal ends this worker alone, with 0, after the\n"
            "micro-batch at hand.\n",
    .table = table,
    .count = sizeof table / sizeof table[0],
};

static int parse_integer(const char *what, const char *text, uint64_t *ret_value, struct shd_err *e)
{
    char *end;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (!isdigit((unsigned char)text[0]) || *end != '\0' || errno != 0)
        return err_set(e, SHD_EINVAL, "%s: '%s' is not a whole number", what, text);
    *ret_value = value;
    return SHD_OK;
}

/* An environment variable as a number; `fallback` when it is not set. */
static int environment_number(const char *name, uint64_t fallback, uint64_t max,
                              uint64_t *ret_value, struct shd_err *e)
{
    const char *text = getenv(name);
    uint64_t value = fallback;
    const int r = text != NULL ? parse_integer(name, text, &value, e) : SHD_OK;
    if (r != SHD_OK)
        return r;
    if (value > max)
        return err_set(e, SHD_ERANGE, "%s=%s is above its limit %ju", name, text, (uintmax_t)max);
    *ret_value = value;
    return SHD_OK;
}

static int options_environment(struct options *o, uint64_t *ret_local_world, struct shd_err *e)
{
    uint64_t rank = 0, world = 1, local = 1, elastic = 0;
    int r = environment_number("RANK", 0, UINT32_MAX, &rank, e);
    if (r == SHD_OK)
        r = environment_number("WORLD_SIZE", 1, UINT32_MAX, &world, e);
    if (r == SHD_OK)
        r = environment_number("LOCAL_WORLD_SIZE", world, UINT32_MAX, &local, e);
    if (r == SHD_OK)
        r = environment_number("SHARDD_ELASTIC", 0, 1, &elastic, e);
    if (r != SHD_OK)
        return r;
    if (rank >= world)
        return err_set(e, SHD_ERANGE, "RANK=%ju is not below WORLD_SIZE=%ju", (uintmax_t)rank,
                       (uintmax_t)world);
    if (o->standalone && world > 1)
        return err_set(e, SHD_EINVAL,
                       "--standalone trains alone, but WORLD_SIZE is %ju: start one process, or "
                       "leave --standalone out",
                       (uintmax_t)world);
    o->elastic = o->elastic || elastic > 0;
    o->rank = (uint32_t)rank;
    o->world = (uint32_t)world;
    *ret_local_world = local > 0 ? local : 1;
    return SHD_OK;
}

static double optimizer_lr(const char *optimizer)
{
    if (strcmp(optimizer, "sgd") == 0)
        return 0.1;
    return strcmp(optimizer, "lion") == 0 ? 0.0003 : 0.005;
}

static uint64_t at_least_one(uint64_t value)
{
    return value > 0 ? value : 1;
}

/* A tenth of the run, but short runs need some too: AdamW's first steps are as long as lr says,
 * whatever the gradient. */
static uint64_t default_warmup(uint64_t steps)
{
    const uint64_t tenth = steps / 10, half = steps / 2, enough = 20;
    const uint64_t wanted = tenth > enough ? tenth : enough;
    return at_least_one(wanted < half ? wanted : half);
}

/* Defaults that depend on other options. */
static void options_derive(struct options *o, uint64_t local_world)
{
    if (o->data.count == 0)
        o->data.items[o->data.count++] = DATA_DEFAULT_PATH;
    if (isnan(o->lr))
        o->lr = optimizer_lr(o->optimizer);
    if (isnan(o->min_lr))
        o->min_lr = o->lr / 10;
    if (o->warmup == UNSET)
        o->warmup = default_warmup(o->steps);
    if (o->log_every == UNSET)
        o->log_every = at_least_one(o->steps / 20);
    if (o->threads == UNSET) {
        const long cpus = sysconf(_SC_NPROCESSORS_ONLN);
        const uint64_t share = at_least_one((uint64_t)(cpus > 0 ? cpus : 1) / local_world);
        o->threads = share < POOL_THREADS_MAX ? share : POOL_THREADS_MAX;
    }
}

static int take_flags(int argc, char **argv, struct options *o, struct shd_err *e)
{
    int rest = argc;
    parsed = defaults;
    const enum flags_result result = flags_parse(&flags, argc, argv, &rest, e);
    *o = parsed;
    o->help = result == FLAGS_HELP;
    if (result == FLAGS_ERROR)
        return e != NULL ? e->code : SHD_EINVAL;
    if (result == FLAGS_OK && rest < argc)
        return err_set(e, SHD_EINVAL, "'%s' is not a flag; see --help", argv[rest]);
    return SHD_OK;
}

int options_parse(int argc, char **argv, struct options *ret_options, struct shd_err *e)
{
    struct options o;
    uint64_t local_world = 1;
    int r = take_flags(argc, argv, &o, e);
    if (r == SHD_OK && !o.help && !o.version) {
        r = options_environment(&o, &local_world, e);
        if (r == SHD_OK) {
            options_derive(&o, local_world);
            r = options_check(&o, e);
        }
    }
    if (r == SHD_OK)
        *ret_options = o;
    return r;
}

void options_help(FILE *out)
{
    flags_help(&flags, out);
}
