/* options.c: see options.h. One table drives parsing, limits and the help text. */
#include "examples/gpt/options.h"

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "examples/gpt/data.h"
#include "examples/gpt/merge.h"
#include "examples/gpt/pool.h"
#include "examples/gpt/shape.h"
#include "proto/base/check.h"
#include "proto/base/dtype.h"
#include "proto/base/flags.h"
#include "proto/base/status.h"
#include "proto/base/sys.h"

#define INTEGER_MAX       9007199254740992.0 /* 2^53: exact in a double, and in JSON */
#define UNSET             UINT64_MAX         /* an integer whose default depends on others */
#define SEQUENCES         "32"               /* of a step, with --batch auto */
#define STATIC_LOSS_SCALE 1024.0             /* of --loss-scale static */

static const struct options defaults = {
    .layers = 4,
    .dim = 128,
    .heads = 4,
    .seq = 128,
    .batch_as = "8",
    .micro_batches = UNSET,
    .steps = 500,
    .optimizer = { "adamw", "fp32" },
    .lr = NAN,
    .min_lr = NAN,
    .warmup = UNSET,
    .weight_decay = 0.1,
    .clip = 1,
    .seed = 1,
    .eval = { 100, 64 },
    .log_every = UNSET,
    .sample = { 400, 0.8 },
    .threads = UNSET,
    .device = "host",
    .math = "fp32",
    .strategy = "zero3",
    .prefetch = "pre",
    .forward_prefetch = 1,
    .path = "auto",
    .types.precision = "fp32",
    .types.codec = "none",
    .types.grad_precision = "fp32",
    .types.grad_codec = "none",
    .bf16_gemm = "auto",
    .accumulate = "owner",
    .slow = { 1, UNSET },
    .stop.rank = UNSET,
    .flip.rank = UNSET,
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
    { "batch", 0, FLAG_STRING, "N",
      "sequences of a micro-batch; auto:S: of S in a step (auto: 32) as memory has room for (8)",
      &parsed.batch_as, 0, 0 },
    { "micro-batches", 0, FLAG_U64, "N", "of a step, shared out over the workers (4)",
      &parsed.micro_batches, 1, 4096 },
    { "steps", 0, FLAG_U64, "N", "train until the model has had this many updates (500)",
      &parsed.steps, 1, INTEGER_MAX },
    { "optimizer", 0, FLAG_STRING, "NAME", "adamw, sgd, lion, muon, lamb or adafactor (adamw)",
      &parsed.optimizer.kind, 0, 0 },
    { "moments", 0, FLAG_STRING, "TYPE",
      "of the optimizer: fp32, or int8, which is a quarter of the memory (fp32)",
      &parsed.optimizer.moments, 0, 0 },
    { "lr", 0, FLAG_REAL, "X",
      "peak learning rate (default 0.005 adamw, muon, lamb, 0.1 sgd, 0.0003 lion, 0.05 adafactor)",
      &parsed.lr, 0, 100 },
    { "min-lr", 0, FLAG_REAL, "X", "learning rate at the end (default a tenth of --lr)",
      &parsed.min_lr, 0, 100 },
    { "warmup", 0, FLAG_U64, "N",
      "steps of linear warm-up (default a tenth of --steps, at least 20)", &parsed.warmup, 0,
      INTEGER_MAX },
    { "weight-decay", 0, FLAG_REAL, "X", "of matrices; biases and norms have none (0.1)",
      &parsed.weight_decay, 0, 100 },
    { "ema", 0, FLAG_REAL, "D",
      "decay of the moving average of parameters that owners keep, and with --evaluate its losses; "
      "0: none (0)",
      &parsed.ema, 0, 0.9999999 },
    { "clip", 0, FLAG_REAL, "X", "global gradient norm; 0: no clipping (1)", &parsed.clip, 0, 1e9 },
    { "seed", 0, FLAG_U64, "N", "of the initial parameters, the batches and the sample (1)",
      &parsed.seed, 0, INTEGER_MAX },
    { "eval-every", 0, FLAG_U64, "N", "steps between held-out losses; 0: at the end only (100)",
      &parsed.eval.every, 0, INTEGER_MAX },
    { "eval-windows", 0, FLAG_U64, "N",
      "a held-out loss is that of so many windows, of --seq bytes each; 0: none is computed (64)",
      &parsed.eval.windows, 0, INTEGER_MAX },
    { "evaluate", 0, FLAG_BOOL, NULL, "train nothing: print the held-out loss of the latest step",
      &parsed.evaluate, 0, 0 },
    { "follow", 0, FLAG_BOOL, NULL,
      "then of each --eval-every'th up to --steps, while others train", &parsed.follow, 0, 0 },
    { "log-every", 0, FLAG_U64, "N", "steps between lines (default a twentieth of --steps)",
      &parsed.log_every, 1, INTEGER_MAX },
    { "sample", 0, FLAG_U64, "N", "bytes of text to print at the end; 0: none (400)",
      &parsed.sample.bytes, 0, 1 << 20 },
    { "temperature", 0, FLAG_REAL, "X", "of the sample; 0: always the likeliest byte (0.8)",
      &parsed.sample.temperature, 0, 100 },
    { "threads", 0, FLAG_U64, "N", "compute threads (default CPUs / LOCAL_WORLD_SIZE)",
      &parsed.threads, 1, POOL_THREADS_MAX },
    { "device", 0, FLAG_STRING, "WHERE", "where to compute: host, or cuda:N, the Nth GPU (host)",
      &parsed.device, 0, 0 },
    { "math", 0, FLAG_STRING, "NAME",
      "fp32, or tf32: fp32 products on a GPU with factors of 10 bits (fp32)", &parsed.math, 0, 0 },
    { "standalone", 0, FLAG_BOOL, NULL, "no daemons: the same training in this process, same bits",
      &parsed.standalone, 0, 0 },
    { "address", 0, FLAG_STRING, "DIR", "where the daemons are (else as shardctl finds them)",
      &parsed.address, 0, 0 },
    { "elastic", 0, FLAG_BOOL, NULL, "micro-batches go to whoever asks; workers may come and go",
      &parsed.elastic, 0, 0 },
    { "verify-every", 0, FLAG_U64, "N",
      "with --elastic: in each Nth step two workers compute one micro-batch; 0: never (0)",
      &parsed.verify_every, 0, INTEGER_MAX },
    { "json", 0, FLAG_STRING, "FILE", "one JSON object per step with its timings (rank 0)",
      &parsed.json, 0, 0 },
    { "strategy", 0, FLAG_STRING, "NAME", "what a worker holds: ddp, zero1, zero2 or zero3 (zero3)",
      &parsed.strategy, 0, 0 },
    { "prefetch", 0, FLAG_STRING, "NAME",
      "fetch for backward ahead: pre (before the unit's backward), post, none (pre)",
      &parsed.prefetch, 0, 0 },
    { "forward-prefetch", 0, FLAG_U64, "N", "units fetched ahead in forward (1)",
      &parsed.forward_prefetch, 0, GPT_UNITS_MAX },
    { "plan", 0, FLAG_STRING, "FILE",
      "run what `shardctl plan --ops` prints, or try the best of what --tune --json does",
      &parsed.plan, 0, 0 },
    { "path", 0, FLAG_STRING, "NAME",
      "how parameters come: map (the owners' memory), copy, nccl or auto (auto)", &parsed.path, 0,
      0 },
    { "slots", 0, FLAG_U64, "N",
      "gradients on their way to each owner; 0: as the plan needs, on a GPU one for each layer (0)",
      &parsed.slots, 0, 64 },
    { "max-live-units", 0, FLAG_U64, "N", "bound on units held at once; 0: none (0)",
      &parsed.max_live_units, 0, GPT_UNITS_MAX },
    { "max-live-bytes", 0, FLAG_U64, "N", "bound on their bytes; 0: none (0)",
      &parsed.max_live_bytes, 0, INTEGER_MAX },
    { "precision", 0, FLAG_STRING, "NAME",
      "fp32, bf16 or fp16: of parameters as workers read them, and of products (fp32)",
      &parsed.types.precision, 0, 0 },
    { "codec", 0, FLAG_STRING, "NAME",
      "how parameters travel to workers: none, as --precision says, or in codes of 8 or 4 bits, "
      "int8, fp8 or int4 (none)",
      &parsed.types.codec, 0, 0 },
    { "grad-precision", 0, FLAG_STRING, "NAME",
      "fp32, bf16 or fp16: of gradients on their way to the owners (fp32)",
      &parsed.types.grad_precision, 0, 0 },
    { "grad-codec", 0, FLAG_STRING, "NAME",
      "how gradients travel to the owners: none, as --grad-precision says, or in codes of 8 bits, "
      "int8 (none)",
      &parsed.types.grad_codec, 0, 0 },
    { "bf16-gemm", 0, FLAG_STRING, "NAME",
      "auto, native (the CPU's bf16 instructions) or emulated (auto)", &parsed.bf16_gemm, 0, 0 },
    { "loss-scale", 0, FLAG_STRING, "S",
      "dynamic, static (1024) or a number (default dynamic with fp16)", &parsed.loss_scale, 0, 0 },
    { "accumulate", 0, FLAG_STRING, "HOW",
      "owner: return every micro-batch; local:A: sum A of them first; host:A: the workers of a "
      "host "
      "do, together (owner)",
      &parsed.accumulate, 0, 0 },
    { "experts", 0, FLAG_U64, "N", "MLPs per block, one for each token, each a unit; 0: dense (0)",
      &parsed.experts, 0, GPT_EXPERTS_MAX },
    { "adapters", 0, FLAG_U64, "R",
      "train low-rank adapters of rank R on a frozen model; 0: all (0)", &parsed.adapters, 0,
      GPT_DIM_MAX },
    { "tiles", 0, FLAG_U64, "N",
      "cut each matrix into N units, held one by one: layers larger than --max-live-bytes; its "
      "output matrix is not the embedding's; no sample; 0: whole blocks (0)",
      &parsed.layer.tiles, 0, GPT_TILES_MAX },
    { "recompute", 0, FLAG_BOOL, NULL,
      "hold one layer's activations, not all: compute them again in backward; same bits",
      &parsed.layer.recompute, 0, 0 },
    { "local-steps", 0, FLAG_U64, "K",
      "train K steps by itself, then merge with the other groups; 0: never (0)",
      &parsed.local.steps, 0, INTEGER_MAX },
    { "group", 0, FLAG_STRING, "I/N", "with --local-steps: these workers are group I of 0 to N - 1",
      &parsed.local.group, 0, 0 },
    { "outer", 0, FLAG_STRING, "DIR",
      "with --local-steps: where the daemons of the outer model are, for all groups",
      &parsed.local.outer, 0, 0 },
    { "outer-name", 0, FLAG_STRING, "NAME", "of the outer model (gpt.outer)",
      &parsed.local.outer_name, 0, 0 },
    { "outer-lr", 0, FLAG_REAL, "X", "of its SGD (0.7)", &parsed.local.lr, 0, 100 },
    { "outer-momentum", 0, FLAG_REAL, "X", "Nesterov's, of its SGD (0.9)", &parsed.local.momentum,
      0, 0.9999 },
    { "average", 0, FLAG_BOOL, NULL, "instead: merge to the mean of the groups' parameters",
      &parsed.local.average, 0, 0 },
    { "joined", 0, FLAG_U64, "N",
      "a group that came later: merges that the outer model had had by then (0)",
      &parsed.local.joined, 0, INTEGER_MAX },
    { "fetch-delay-ms", 0, FLAG_REAL, "X",
      "added to each fetch of --path copy: a slow link, for benchmarks (0)", &parsed.fetch_delay_ms,
      0, 10000 },
    { "slow", 0, FLAG_REAL, "X", "test aid: compute takes X times as long (1)", &parsed.slow.times,
      1, 1000 },
    { "slow-rank", 0, FLAG_U64, "N", "of this worker only; given together with --slow",
      &parsed.slow.rank, 0, UINT32_MAX },
    { "inject-overflow", 0, FLAG_U64, "STEP",
      "test aid: make one gradient of that step infinite; 0: never (0)", &parsed.inject_overflow, 0,
      INTEGER_MAX },
    { "flip-bit", 0, FLAG_U64, "STEP",
      "test aid: from that step on a bit of each micro-batch's gradient is wrong; 0: never (0)",
      &parsed.flip.bit, 0, INTEGER_MAX },
    { "flip-rank", 0, FLAG_U64, "N", "of this worker; given together with --flip-bit",
      &parsed.flip.rank, 0, UINT32_MAX },
    { "stop-rank", 0, FLAG_U64, "N", "test aid: this worker leaves early, the others take over",
      &parsed.stop.rank, 1, UINT32_MAX },
    { "stop-at", 0, FLAG_U64, "STEP", "after this step; given together with --stop-rank (0)",
      &parsed.stop.at, 0, INTEGER_MAX },
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
    .count = ARRAY_SIZE(table),
};

/* An environment variable as a number; *value as it is when it is not set. */
static int environment_number(const char *name, uint64_t max, uint64_t *value, struct shd_err *e)
{
    char *end;
    const char *text = getenv(name);
    if (text == NULL)
        return SHD_OK;
    errno = 0;
    *value = strtoull(text, &end, 10);
    if (!isdigit((unsigned char)text[0]) || *end != '\0' || errno != 0)
        return err_set(e, SHD_EINVAL, "%s: '%s' is not a whole number", name, text);
    if (*value > max)
        return err_set(e, SHD_ERANGE, "%s=%s is above its limit %ju", name, text, (uintmax_t)max);
    return SHD_OK;
}

static int options_environment(struct options *o, uint64_t *ret_local_world, struct shd_err *e)
{
    uint64_t rank = 0, world = 1, elastic = 0;
    int r = environment_number("RANK", UINT32_MAX, &rank, e);
    if (r == SHD_OK)
        r = environment_number("WORLD_SIZE", UINT32_MAX, &world, e);
    uint64_t local = world;
    if (r == SHD_OK)
        r = environment_number("LOCAL_WORLD_SIZE", UINT32_MAX, &local, e);
    if (r == SHD_OK)
        r = environment_number("SHARDD_ELASTIC", 1, &elastic, e);
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
    if (strcmp(optimizer, "adafactor") == 0) /* relative to the tensor's size */
        return 0.05;
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
        o->lr = optimizer_lr(o->optimizer.kind);
    if (isnan(o->min_lr))
        o->min_lr = o->lr / 10;
    if (o->warmup == UNSET)
        o->warmup = default_warmup(o->steps);
    if (o->log_every == UNSET)
        o->log_every = at_least_one(o->steps / 20);
    if (o->threads == UNSET) {
        const uint64_t share = at_least_one(sys_processors() / local_world);
        o->threads = share < POOL_THREADS_MAX ? share : POOL_THREADS_MAX;
    }
}

/* -- What the options mean together ------------------------------------------------------------ */

/* The options that take one of a few words; `words` in the order of what they stand for. */
enum {
    OPTIMIZER,
    MOMENTS,
    STRATEGY,
    PREFETCH,
    PATH,
    PRECISION,
    CODEC,
    GRAD_CODEC,
    GRAD_PRECISION,
    BF16_GEMM,
    MATH,
    CHOICES
};
enum { OPTIMIZER_ADAMW, OPTIMIZER_SGD, OPTIMIZER_LION, OPTIMIZER_MUON, OPTIMIZER_LAMB };
enum { MOMENTS_FP32, MOMENTS_INT8 };
enum { BF16_AUTO, BF16_NATIVE, BF16_EMULATED };
static_assert(SHD_ZERO3 == 0 && SHD_DDP == 3 && SHD_PREFETCH_NONE == 2 && SHD_PATH_NCCL == 3,
              "as in the table");
static_assert(SHD_BF16 == SHD_F32 + 1 && SHD_F16 == SHD_F32 + 2, "as in the table");
#define AT(member) offsetof(struct options, member)
#define DTYPES     "fp32, bf16 or fp16"
static const struct {
    const char *option, *words, *known;
    size_t at; /* of the member */
} choices[CHOICES] = {
    [OPTIMIZER] = { "optimizer", "adamw sgd lion muon lamb adafactor",
                    "adamw, sgd, lion, muon, lamb or adafactor", AT(optimizer.kind) },
    [MOMENTS] = { "moments", "fp32 int8", "fp32 or int8", AT(optimizer.moments) },
    [STRATEGY] = { "strategy", "zero3 zero2 zero1 ddp", "ddp, zero1, zero2 or zero3",
                   AT(strategy) },
    [PREFETCH] = { "prefetch", "pre post none", "pre, post or none", AT(prefetch) },
    [PATH] = { "path", "auto map copy nccl", "map, copy, nccl or auto", AT(path) },
    [PRECISION] = { "precision", "fp32 bf16 fp16", DTYPES, AT(types.precision) },
    [CODEC] = { "codec", "none int8 fp8 int4", "none, int8, fp8 or int4", AT(types.codec) },
    [GRAD_CODEC] = { "grad-codec", "none int8", "none or int8", AT(types.grad_codec) },
    [GRAD_PRECISION] = { "grad-precision", "fp32 bf16 fp16", DTYPES, AT(types.grad_precision) },
    [BF16_GEMM] = { "bf16-gemm", "auto native emulated", "auto, native or emulated",
                    AT(bf16_gemm) },
    [MATH] = { "math", "fp32 tf32", "fp32 or tf32", AT(math) },
};

static int find_word(const struct options *o, int choice, int *ret_word, struct shd_err *e)
{
    const char *text = *(const char *const *)((const char *)o + choices[choice].at);
    const char *word = choices[choice].words;
    if (choice == PRECISION || choice == GRAD_PRECISION) { /* also by dtypes' other names */
        *ret_word = (int)dtype_parse(text) - SHD_F32;
        if (*ret_word >= 0)
            return SHD_OK;
    }
    for (*ret_word = 0; *word != '\0'; (*ret_word)++) {
        const size_t bytes = strcspn(word, " ");
        if (strlen(text) == bytes && strncmp(word, text, bytes) == 0)
            return SHD_OK;
        word += bytes + (word[bytes] == ' ');
    }
    return err_set(e, SHD_EINVAL, "--%s '%s' is not %s", choices[choice].option, text,
                   choices[choice].known);
}

static int check_words(const struct options *o, int words[CHOICES], struct shd_err *e)
{
    if (strcmp(o->strategy, "hybrid") == 0)
        return err_set(e, SHD_ENOTSUP,
                       "--strategy hybrid: replica groups are the daemons' (shardctl host "
                       "--replicas 2), and no worker's strategy: use zero3 beside them, or zero2 "
                       "to fetch once");
    int r = SHD_OK;
    for (int choice = 0; choice < CHOICES && r == SHD_OK; choice++)
        r = find_word(o, choice, &words[choice], e);
    return r;
}

/* -- Model ----------------------------------------------------------------------------------- */

/* Tiles are rows of one size, of everything that is cut. */
static int check_tiles(struct options *o, const int *words, struct shd_err *e)
{
    const struct {
        const char *flag;
        bool given;
    } rows[] = {
        { "--experts", o->experts > 0 },
        { "--adapters", o->adapters > 0 },
        { "--recompute", o->layer.recompute },
        { "--device", strcmp(o->device, "host") != 0 },
    };
    if (o->layer.tiles <= 1)
        return SHD_OK;
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
        if (rows[i].given)
            return err_set(e, SHD_EINVAL,
                           "--tiles %ju with %s: tiles are of dense blocks, computed on the host "
                           "and kept; leave one of them out",
                           (uintmax_t)o->layer.tiles, rows[i].flag);
    if (words[OPTIMIZER] >= OPTIMIZER_MUON)
        return err_set(e, SHD_EINVAL,
                       "--tiles %ju with --optimizer %s: it updates whole tensors; tiles are for "
                       "adamw, sgd and lion",
                       (uintmax_t)o->layer.tiles, o->optimizer.kind);
    if (o->dim % o->layer.tiles != 0 || o->seq % o->layer.tiles != 0 ||
        GPT_VOCAB % o->layer.tiles != 0)
        return err_set(e, SHD_ERANGE,
                       "--tiles %ju must divide --dim %ju, --seq %ju and the %d bytes of the "
                       "vocabulary",
                       (uintmax_t)o->layer.tiles, (uintmax_t)o->dim, (uintmax_t)o->seq, GPT_VOCAB);
    o->sample.bytes = 0; /* it would need all of the model at once */
    return SHD_OK;
}

static int check_model(struct options *o, const int *words, struct shd_err *e)
{
    const struct gpt_shape shape = options_shape(o);
    if (words[MOMENTS] == MOMENTS_INT8 && words[OPTIMIZER] >= OPTIMIZER_MUON)
        return err_set(e, SHD_EINVAL,
                       "--moments int8 with --optimizer %s: its moments are fp32; int8 is of "
                       "adamw, sgd and lion",
                       o->optimizer.kind);
    if (o->dim % o->heads != 0)
        return err_set(e, SHD_ERANGE, "--dim %ju is not a multiple of --heads %ju",
                       (uintmax_t)o->dim, (uintmax_t)o->heads);
    if (o->experts > 0 && o->adapters > 0)
        return err_set(
            e, SHD_EINVAL,
            "--experts %ju with --adapters %ju: adapters are for dense blocks; leave one "
            "of them out",
            (uintmax_t)o->experts, (uintmax_t)o->adapters);
    if (o->adapters > o->dim)
        return err_set(e, SHD_ERANGE,
                       "--adapters %ju is above --dim %ju: a rank that high saves nothing",
                       (uintmax_t)o->adapters, (uintmax_t)o->dim);
    const int r = check_tiles(o, words, e);
    if (r != SHD_OK)
        return r;
    if (gpt_units(&shape) > GPT_UNITS_MAX && shape.tiles > 0)
        return err_set(e, SHD_ERANGE, "%ju layers in %ju tiles are %u units, the limit is %d",
                       (uintmax_t)o->layers, (uintmax_t)o->layer.tiles, gpt_units(&shape),
                       GPT_UNITS_MAX);
    if (gpt_units(&shape) > GPT_UNITS_MAX)
        return err_set(e, SHD_ERANGE, "%ju layers of %ju experts are %u units, the limit is %d",
                       (uintmax_t)o->layers, (uintmax_t)o->experts, gpt_units(&shape),
                       GPT_UNITS_MAX);
    if (o->min_lr > o->lr)
        return err_set(e, SHD_ERANGE, "--min-lr %g is above --lr %g", o->min_lr, o->lr);
    return SHD_OK;
}

/* -- A step ---------------------------------------------------------------------------------- */

/* Until batch_choose() there are as many micro-batches as can be. */
static int check_batch_auto(struct options *o, const char *text, struct shd_err *e)
{
    char *end = NULL;
    const unsigned long long s = isdigit((unsigned char)*text) ? strtoull(text, &end, 10) : 0;
    const uint64_t groups = o->elastic ? 1 : o->world;
    if (s < 1 || *end != '\0' || s > GPT_BATCH_MAX || s % groups != 0)
        return err_set(e, SHD_ERANGE,
                       "--batch %s: S of auto:S is the sequences of a step, from 1 to %d, shared "
                       "out over %ju worker%s in equal parts",
                       o->batch_as, GPT_BATCH_MAX, (uintmax_t)groups, groups == 1 ? "" : "s");
    if (o->micro_batches != UNSET)
        return err_set(e, SHD_EINVAL,
                       "--batch %s with --micro-batches %ju: how many a step has is what is "
                       "chosen; leave one of them out",
                       o->batch_as, (uintmax_t)o->micro_batches);
    if (o->print_spec || strcmp(o->device, "host") != 0)
        return err_set(e, SHD_EINVAL,
                       "--batch %s with %s: what memory has room for is looked at when a model is "
                       "made, on the host; give a number",
                       o->batch_as, o->print_spec ? "--print-spec" : "--device");
    o->chosen.sequences = (uint32_t)s;
    o->micro_batches = s;
    o->batch = 1;
    return SHD_OK;
}

/* "N", "auto" or "auto:S". */
static int check_batch(struct options *o, const int *words, struct shd_err *e)
{
    (void)words;
    char *end = NULL;
    const char *text = o->batch_as;
    if (strcmp(text, "auto") == 0)
        return check_batch_auto(o, SEQUENCES, e);
    if (strncmp(text, "auto:", strlen("auto:")) == 0)
        return check_batch_auto(o, text + strlen("auto:"), e);
    const bool digit = isdigit((unsigned char)*text);
    const unsigned long long n = digit ? strtoull(text, &end, 10) : 0;
    if (!digit || *end != '\0')
        return err_set(e, SHD_EINVAL, "--batch '%s' is not a number, auto or auto:S", text);
    if (n < 1 || n > GPT_BATCH_MAX)
        return err_set(e, SHD_ERANGE, "--batch %s is out of range: 1 to %d", text, GPT_BATCH_MAX);
    o->batch = n;
    if (o->micro_batches == UNSET)
        o->micro_batches = 4;
    return SHD_OK;
}

/* -- Schedule -------------------------------------------------------------------------------- */

/* A plan says all of this by itself. */
static int check_plan(const struct options *o, struct shd_err *e)
{
    const struct {
        const char *flag;
        bool given;
    } rows[] = {
        { "--strategy", strcmp(o->strategy, defaults.strategy) != 0 },
        { "--prefetch", strcmp(o->prefetch, defaults.prefetch) != 0 },
        { "--forward-prefetch", o->forward_prefetch != defaults.forward_prefetch },
        { "--max-live-units", o->max_live_units > 0 },
        { "--max-live-bytes", o->max_live_bytes > 0 },
    };
    for (size_t i = 0; o->plan != NULL && i < ARRAY_SIZE(rows); i++)
        if (rows[i].given)
            return err_set(e, SHD_EINVAL,
                           "%s with --plan %s: the plan's \"policy\" has it; leave one of them out",
                           rows[i].flag, o->plan);
    if (o->plan != NULL && o->evaluate)
        return err_set(e, SHD_EINVAL, "--plan %s with --evaluate: nothing is trained by it",
                       o->plan);
    return SHD_OK;
}

static int check_schedule(struct options *o, const int *words, struct shd_err *e)
{
    const enum shd_strategy strategy = (enum shd_strategy)words[STRATEGY];
    const enum shd_path path = (enum shd_path)words[PATH];
    const struct gpt_shape shape = options_shape(o);
    const uint32_t units = gpt_units(&shape);
    const bool holds_all = strategy == SHD_DDP || strategy == SHD_ZERO1;
    if (o->standalone && o->address != NULL)
        return err_set(e, SHD_EINVAL,
                       "--standalone uses no daemons, so --address %s makes no sense", o->address);
    if (o->standalone && path == SHD_PATH_COPY)
        return err_set(
            e, SHD_EINVAL,
            "--standalone with --path copy: owners inside this process are always read in "
            "place; use --path auto, or daemons");
    if (o->fetch_delay_ms > 0 && path != SHD_PATH_COPY)
        return err_set(e, SHD_EINVAL,
                       "--fetch-delay-ms %g with --path %s: only the copy path fetches; add --path "
                       "copy",
                       o->fetch_delay_ms, o->path);
    if (holds_all && o->max_live_units > 0 && o->max_live_units < units)
        return err_set(e, SHD_ERANGE,
                       "--strategy %s holds all %u units, so --max-live-units %ju cannot be kept: "
                       "use zero3, or at least %u",
                       o->strategy, units, (uintmax_t)o->max_live_units, units);
    o->chosen.policy = (struct shd_policy){
        .size = sizeof(struct shd_policy),
        .strategy = strategy,
        .forward_prefetch = (uint32_t)o->forward_prefetch,
        .backward_prefetch = (enum shd_backward_prefetch)words[PREFETCH],
        .max_live_units = (uint32_t)o->max_live_units,
        .max_live_bytes = o->max_live_bytes,
        .path = path,
        .grad_dtype = SHD_F32 + (enum shd_dtype)words[GRAD_PRECISION],
    };
    return check_plan(o, e);
}

static int check_host_workers(const struct options *o, uint32_t a, struct shd_err *e)
{
    const uint32_t here = o->chosen.host_workers;
    if (o->elastic)
        return err_set(e, SHD_ENOTSUP,
                       "--accumulate %s with --elastic: what is handed out is a group, to one "
                       "worker; take local:%" PRIu32,
                       o->accumulate, a);
    if (o->plan != NULL || o->stop.at > 0)
        return err_set(e, SHD_EINVAL, "--accumulate %s with %s: take local:%" PRIu32, o->accumulate,
                       o->plan != NULL ? "--plan" : "--stop-rank", a);
    if (o->world % here != 0)
        return err_set(e, SHD_EINVAL,
                       "--accumulate %s: WORLD_SIZE=%" PRIu32
                       " must be a multiple of LOCAL_WORLD_SIZE=%" PRIu32 ", as many on each host",
                       o->accumulate, o->world, here);
    if (here > a)
        return err_set(e, SHD_ERANGE,
                       "--accumulate %s: %" PRIu32 " workers are on this host (LOCAL_WORLD_SIZE), "
                       "and share %" PRIu32 " micro-batches: A must be at least as many",
                       o->accumulate, here, a);
    return SHD_OK;
}

/* "owner", "local:A" or "host:A". */
static int check_accumulate(struct options *o, const int *words, struct shd_err *e)
{
    (void)words;
    char *end;
    const bool together = strncmp(o->accumulate, "host:", strlen("host:")) == 0;
    o->chosen.accumulate = 1;
    if (strcmp(o->accumulate, "owner") == 0) {
        o->chosen.host_workers = 1;
        return SHD_OK;
    }
    const char *text = o->accumulate + strlen(together ? "host:" : "local:");
    if ((!together && strncmp(o->accumulate, "local:", strlen("local:")) != 0) ||
        !isdigit((unsigned char)*text))
        return err_set(e, SHD_EINVAL,
                       "--accumulate '%s' is not owner, local:A or host:A, A a number",
                       o->accumulate);
    const unsigned long long a = strtoull(text, &end, 10);
    if (*end != '\0' || a < 1 || a > o->micro_batches || o->micro_batches % a != 0)
        return err_set(e, SHD_ERANGE,
                       "--accumulate %s: A must divide --micro-batches %ju, which A micro-batches "
                       "at a time make up",
                       o->accumulate, (uintmax_t)o->micro_batches);
    o->chosen.accumulate = (uint32_t)a;
    if (!together) {
        o->chosen.host_workers = 1;
        return SHD_OK;
    }
    o->chosen.policy.sums = a > 1 ? SHD_SUMS_HOST : SHD_SUMS_OWN;
    return check_host_workers(o, (uint32_t)a, e);
}

static int check_stop(struct options *o, const int *words, struct shd_err *e)
{
    (void)words;
    if (o->follow && !o->evaluate)
        return err_set(e, SHD_EINVAL, "--follow without --evaluate: it is about what to evaluate");
    if (o->evaluate && o->eval.windows == 0)
        return err_set(
            e, SHD_EINVAL,
            "--evaluate with --eval-windows 0: a held-out loss is that of at least one window");
    if (o->evaluate && o->standalone)
        return err_set(e, SHD_EINVAL,
                       "--evaluate with --standalone: nobody else trains in this process");
    if ((o->stop.at > 0) != (o->stop.rank != UINT64_MAX))
        return err_set(e, SHD_EINVAL,
                       "--stop-rank and --stop-at go together: who leaves, and when");
    if (o->stop.at > 0 && o->elastic)
        return err_set(e, SHD_EINVAL,
                       "--stop-rank with --elastic: work is not shared out beforehand, so a worker "
                       "may just be ended; leave one of them out");
    if (o->slow.rank != UINT64_MAX && o->slow.times <= 1)
        return err_set(e, SHD_EINVAL, "--slow-rank without --slow: say how slow");
    if (o->stop.at > 0 && o->stop.rank >= o->world)
        return err_set(e, SHD_ERANGE, "--stop-rank %ju: there are %u workers, 0 to %u",
                       (uintmax_t)o->stop.rank, o->world, o->world - 1);
    return SHD_OK;
}

static int check_verify(struct options *o, const int *words, struct shd_err *e)
{
    (void)words;
    if (o->verify_every > 0 && o->standalone)
        return err_set(e, SHD_EINVAL,
                       "--verify-every with --standalone: there is one worker, and nobody to "
                       "compare it with");
    if (o->verify_every > 0 && !o->elastic && !o->evaluate && !o->print_spec)
        return err_set(e, SHD_EINVAL,
                       "--verify-every without --elastic: a fixed share is computed by nobody "
                       "else; add --elastic");
    if ((o->flip.bit > 0) != (o->flip.rank != UINT64_MAX))
        return err_set(e, SHD_EINVAL,
                       "--flip-bit and --flip-rank go together: from which step on, and who");
    if (o->flip.bit > 0 && strcmp(o->device, "host") != 0)
        return err_set(e, SHD_EINVAL, "--flip-bit is for --device host: a GPU's array is not ours");
    return SHD_OK;
}

/* -- Precision ------------------------------------------------------------------------------- */

static int check_gemm(struct options *o, enum shd_dtype publish, int bf16, struct shd_err *e)
{
    if (bf16 != BF16_AUTO && publish != SHD_BF16)
        return err_set(e, SHD_EINVAL,
                       "--bf16-gemm %s with --precision %s: add --precision bf16, or leave it out",
                       o->bf16_gemm, o->types.precision);
    o->chosen.gemm = publish == SHD_F16      ? GEMM_F16_EMULATED
                     : publish != SHD_BF16   ? GEMM_FULL
                     : bf16 == BF16_EMULATED ? GEMM_BF16_EMULATED
                                             : GEMM_BF16_NATIVE;
    o->chosen.gemm_auto = publish == SHD_BF16 && bf16 == BF16_AUTO;
    return SHD_OK;
}

static int check_loss_scale(struct options *o, bool any_f16, struct shd_err *e)
{
    const char *text = o->loss_scale != NULL ? o->loss_scale : "dynamic";
    o->chosen.loss_scale = 1;
    if (!any_f16) {
        if (o->loss_scale != NULL)
            return err_set(
                e, SHD_EINVAL,
                "--loss-scale %s without fp16: fp32 and bf16 gradients do not underflow; "
                "leave it out, or add --precision fp16",
                o->loss_scale);
        return SHD_OK;
    }
    char *end;
    if (strcmp(text, "dynamic") == 0) {
        o->chosen.loss_scale = 0;
    } else if (strcmp(text, "static") == 0) {
        o->chosen.loss_scale = STATIC_LOSS_SCALE;
    } else {
        const double scale = strtod(text, &end);
        if (end == text || *end != '\0' || !(scale >= 1 && scale <= 16777216))
            return err_set(
                e, SHD_EINVAL,
                "--loss-scale '%s' is not dynamic, static or a number from 1 to 16777216", text);
        o->chosen.loss_scale = scale;
    }
    return SHD_OK;
}

static int check_precision(struct options *o, const int *words, struct shd_err *e)
{
    const enum shd_dtype publish = SHD_F32 + (enum shd_dtype)words[PRECISION];
    o->chosen.publish = publish;
    const int r = check_gemm(o, publish, words[BF16_GEMM], e);
    if (r != SHD_OK)
        return r;
    return check_loss_scale(o, publish == SHD_F16 || o->chosen.policy.grad_dtype == SHD_F16, e);
}

/* -- Device ---------------------------------------------------------------------------------- */

/* The GPU's kernels read rows as whole vectors of 16 bytes, and leave some options out. */
static int check_cuda(const struct options *o, struct shd_err *e)
{
    if (strcmp(o->bf16_gemm, "auto") != 0)
        return err_set(
            e, SHD_EINVAL,
            "--bf16-gemm %s with --device %s: that is about the host's products; leave it "
            "out",
            o->bf16_gemm, o->device);
    if (o->dim / o->heads % 8 != 0)
        return err_set(e, SHD_ERANGE,
                       "--dim %ju --heads %ju with --device %s: on a GPU a head's width, here %ju, "
                       "must be a multiple of 8",
                       (uintmax_t)o->dim, (uintmax_t)o->heads, o->device,
                       (uintmax_t)(o->dim / o->heads));
    if (o->adapters % 8 != 0)
        return err_set(e, SHD_ERANGE,
                       "--adapters %ju with --device %s: on a GPU it must be a multiple of 8",
                       (uintmax_t)o->adapters, o->device);
    return SHD_OK;
}

/* After the precision, which it may refuse. */
static int check_device(struct options *o, const int *words, struct shd_err *e)
{
    char *end;
    const bool tf32 = words[MATH] == 1;
    if (strcmp(o->device, "host") == 0) {
        if (tf32)
            return err_set(e, SHD_EINVAL,
                           "--math tf32 with --device host: TF32 is a format of GPUs; add --device "
                           "cuda:0, or leave it out");
        return SHD_OK;
    }
    const char *number = o->device + strlen("cuda:");
    if (strncmp(o->device, "cuda:", strlen("cuda:")) != 0 || !isdigit((unsigned char)*number))
        return err_set(e, SHD_EINVAL, "--device '%s' is not host or cuda:N, N the number of a GPU",
                       o->device);
    const unsigned long ordinal = strtoul(number, &end, 10);
    if (*end != '\0' || ordinal >= 1024)
        return err_set(e, SHD_ERANGE, "--device %s: N is a whole number below 1024", o->device);
    if (tf32 && o->chosen.publish != SHD_F32)
        return err_set(
            e, SHD_EINVAL,
            "--math tf32 with --precision %s: it is about fp32 products; leave one of them "
            "out",
            o->types.precision);
    o->chosen.cuda = true;
    o->chosen.device = (uint32_t)ordinal;
    o->chosen.tf32 = tf32;
    o->chosen.gemm = GEMM_FULL; /* of the sample, which the host computes */
    o->chosen.gemm_auto = false;
    return check_cuda(o, e);
}

/* Fill o->chosen. Each combination that makes no sense is refused with the reason and what would be
 * right. */
static int options_check(struct options *o, struct shd_err *e)
{
    static int (*const checks[])(struct options *, const int *words, struct shd_err *) = {
        check_model,  check_batch,     check_schedule, check_accumulate, check_stop,
        check_verify, check_precision, check_device,   merge_check,
    };
    int words[CHOICES] = { 0 };
    int r = check_words(o, words, e);
    for (size_t i = 0; i < ARRAY_SIZE(checks) && r == SHD_OK; i++)
        r = checks[i](o, words, e);
    return r;
}

/* -- Interface -------------------------------------------------------------------------------- */

int options_parse(int argc, char **argv, struct options *ret_options, struct shd_err *e)
{
    int rest = argc;
    uint64_t local_world = 1;
    parsed = defaults;
    const enum flags_result result = flags_parse(&flags, argc, argv, &rest, e);
    struct options o = parsed;
    o.help = result == FLAGS_HELP;
    if (result == FLAGS_ERROR)
        return e != NULL ? e->code : SHD_EINVAL;
    if (result == FLAGS_OK && rest < argc)
        return err_set(e, SHD_EINVAL, "'%s' is not a flag; see --help", argv[rest]);
    int r = SHD_OK;
    if (!o.help && !o.version) {
        r = options_environment(&o, &local_world, e);
        if (r != SHD_OK)
            return r;
        options_derive(&o, local_world);
        o.chosen.host_workers = o.chosen.local_world = (uint32_t)local_world;
        r = options_check(&o, e);
    }
    if (r == SHD_OK)
        *ret_options = o;
    return r;
}

struct gpt_shape options_shape(const struct options *o)
{
    return (struct gpt_shape){ .layers = (uint32_t)o->layers,
                               .dim = (uint32_t)o->dim,
                               .heads = (uint32_t)o->heads,
                               .seq = (uint32_t)o->seq,
                               .experts = (uint32_t)o->experts,
                               .rank = (uint32_t)o->adapters,
                               .tiles = o->layer.tiles > 1 ? (uint32_t)o->layer.tiles : 0 };
}

void options_help(FILE *out)
{
    flags_help(&flags, out);
}
