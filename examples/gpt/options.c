/* options.c: see options.h. One table drives parsing, defaults, limits and the help text. */
#include "examples/gpt/options.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "examples/gpt/data.h"
#include "examples/gpt/fail.h"
#include "examples/gpt/options_check.h"
#include "examples/gpt/pool.h"
#include "examples/gpt/shape.h"

#define INTEGER_MAX 9007199254740992.0 /* 2^53: exact in a double, and in JSON */
#define UNSET       UINT64_MAX         /* an integer whose default depends on others */

enum option_kind { OPTION_INTEGER, OPTION_REAL, OPTION_TEXT, OPTION_FLAG, OPTION_DATA };

struct option_row {
    const char *name;
    const char *arg; /* NULL for a flag */
    enum option_kind kind;
    size_t offset;
    double min, max;
    const char *initial; /* parsed like an argument; NULL: see options_derive() */
    const char *help;
};

#define AT(field) offsetof(struct options, field)

static const struct option_row rows[] = {
    { "data", "PATH", OPTION_DATA, 0, 0, 0, NULL,
      "text file or folder; may be given again (default " DATA_DEFAULT_PATH ")" },
    { "layers", "N", OPTION_INTEGER, AT(layers), 1, GPT_LAYERS_MAX, "4", "transformer blocks" },
    { "dim", "N", OPTION_INTEGER, AT(dim), 1, GPT_DIM_MAX, "128", "width of the model" },
    { "heads", "N", OPTION_INTEGER, AT(heads), 1, GPT_DIM_MAX, "4",
      "attention heads; divides --dim" },
    { "seq", "N", OPTION_INTEGER, AT(seq), 1, GPT_SEQ_MAX, "128", "bytes of context" },
    { "batch", "N", OPTION_INTEGER, AT(batch), 1, GPT_BATCH_MAX, "8",
      "sequences of a micro-batch" },
    { "micro-batches", "N", OPTION_INTEGER, AT(micro_batches), 1, 4096, "4",
      "of a step, shared out over the workers" },
    { "steps", "N", OPTION_INTEGER, AT(steps), 1, INTEGER_MAX, "500",
      "train until the model has had this many updates" },
    { "optimizer", "NAME", OPTION_TEXT, AT(optimizer), 0, 0, "adamw", "adamw, sgd or lion" },
    { "lr", "X", OPTION_REAL, AT(lr), 0, 100, NULL,
      "peak learning rate (default 0.005 adamw, 0.1 sgd, 0.0003 lion)" },
    { "min-lr", "X", OPTION_REAL, AT(min_lr), 0, 100, NULL,
      "learning rate at the end (default a tenth of --lr)" },
    { "warmup", "N", OPTION_INTEGER, AT(warmup), 0, INTEGER_MAX, NULL,
      "steps of linear warm-up (default a tenth of --steps, at least 20)" },
    { "weight-decay", "X", OPTION_REAL, AT(weight_decay), 0, 100, "0.1",
      "of matrices; biases and norms have none" },
    { "clip", "X", OPTION_REAL, AT(clip), 0, 1e9, "1", "global gradient norm; 0: no clipping" },
    { "seed", "N", OPTION_INTEGER, AT(seed), 0, INTEGER_MAX, "1",
      "of the initial parameters, the batches and the sample" },
    { "eval-every", "N", OPTION_INTEGER, AT(eval_every), 0, INTEGER_MAX, "100",
      "steps between held-out losses; 0: at the end only" },
    { "log-every", "N", OPTION_INTEGER, AT(log_every), 1, INTEGER_MAX, NULL,
      "steps between lines (default a twentieth of --steps)" },
    { "sample", "N", OPTION_INTEGER, AT(sample), 0, 1 << 20, "400",
      "bytes of text to print at the end; 0: none" },
    { "temperature", "X", OPTION_REAL, AT(temperature), 0, 100, "0.8",
      "of the sample; 0: always the likeliest byte" },
    { "threads", "N", OPTION_INTEGER, AT(threads), 1, POOL_THREADS_MAX, NULL,
      "compute threads (default CPUs / LOCAL_WORLD_SIZE)" },
    { "device", "WHERE", OPTION_TEXT, AT(device), 0, 0, "host",
      "where to compute: host, or cuda:N, the Nth GPU" },
    { "math", "NAME", OPTION_TEXT, AT(math), 0, 0, "fp32",
      "fp32, or tf32: fp32 products on a GPU with factors of 10 bits" },
    { "standalone", NULL, OPTION_FLAG, AT(standalone), 0, 0, NULL,
      "no daemons: the same training in this process, same bits" },
    { "address", "DIR", OPTION_TEXT, AT(address), 0, 0, NULL,
      "where the daemons are (default $SHARDD_ADDRESS, /run/shardd)" },
    { "elastic", NULL, OPTION_FLAG, AT(elastic), 0, 0, NULL,
      "micro-batches go to whoever asks; workers may come and go" },
    { "json", "FILE", OPTION_TEXT, AT(json), 0, 0, NULL,
      "one JSON object per step with its timings (rank 0)" },
    { "strategy", "NAME", OPTION_TEXT, AT(strategy), 0, 0, "zero3",
      "what a worker holds: ddp, zero1, zero2 or zero3" },
    { "prefetch", "NAME", OPTION_TEXT, AT(prefetch), 0, 0, "pre",
      "fetch for backward ahead: pre (before the unit's backward), post, none" },
    { "forward-prefetch", "N", OPTION_INTEGER, AT(forward_prefetch), 0, GPT_UNITS_MAX, "1",
      "units fetched ahead in forward" },
    { "path", "NAME", OPTION_TEXT, AT(path), 0, 0, "auto",
      "how parameters come: map (the owners' memory), copy, nccl or auto" },
    { "max-live-units", "N", OPTION_INTEGER, AT(max_live_units), 0, GPT_UNITS_MAX, "0",
      "bound on units held at once; 0: none" },
    { "max-live-bytes", "N", OPTION_INTEGER, AT(max_live_bytes), 0, INTEGER_MAX, "0",
      "bound on their bytes; 0: none" },
    { "precision", "NAME", OPTION_TEXT, AT(precision), 0, 0, "fp32",
      "fp32, bf16 or fp16: of parameters as workers read them, and of products" },
    { "grad-precision", "NAME", OPTION_TEXT, AT(grad_precision), 0, 0, "fp32",
      "fp32, bf16 or fp16: of gradients on their way to the owners" },
    { "bf16-gemm", "NAME", OPTION_TEXT, AT(bf16_gemm), 0, 0, "auto",
      "auto, native (the CPU's bf16 instructions) or emulated" },
    { "loss-scale", "S", OPTION_TEXT, AT(loss_scale), 0, 0, NULL,
      "dynamic, static (1024) or a number (default dynamic with fp16)" },
    { "accumulate", "HOW", OPTION_TEXT, AT(accumulate), 0, 0, "owner",
      "owner: return every micro-batch; local:A: sum A of them first" },
    { "experts", "N", OPTION_INTEGER, AT(experts), 0, GPT_EXPERTS_MAX, "0",
      "MLPs per block, one for each token, each a unit; 0: dense" },
    { "adapters", "R", OPTION_INTEGER, AT(adapters), 0, GPT_DIM_MAX, "0",
      "train low-rank adapters of rank R on a frozen model; 0: all" },
    { "recompute", NULL, OPTION_FLAG, AT(recompute), 0, 0, NULL,
      "hold one layer's activations, not all: compute them again in backward; same bits" },
    { "fetch-delay-ms", "X", OPTION_REAL, AT(fetch_delay_ms), 0, 10000, "0",
      "added to each fetch of --path copy: a slow link, for benchmarks" },
    { "slow", "X", OPTION_REAL, AT(slow), 1, 1000, "1", "test aid: compute takes X times as long" },
    { "slow-rank", "N", OPTION_INTEGER, AT(slow_rank), 0, UINT32_MAX, NULL,
      "of this worker only; given together with --slow" },
    { "inject-overflow", "STEP", OPTION_INTEGER, AT(inject_overflow), 0, INTEGER_MAX, "0",
      "test aid: make one gradient of that step infinite; 0: never" },
    { "stop-rank", "N", OPTION_INTEGER, AT(stop_rank), 1, UINT32_MAX, NULL,
      "test aid: this worker leaves early, the others take over" },
    { "stop-at", "STEP", OPTION_INTEGER, AT(stop_at), 0, INTEGER_MAX, "0",
      "after this step; given together with --stop-rank" },
    { "print-spec", NULL, OPTION_FLAG, AT(print_spec), 0, 0, NULL,
      "print the model's spec and end: for shardctl plan --spec" },
    { "help", NULL, OPTION_FLAG, AT(help), 0, 0, NULL, "this text" },
    { "version", NULL, OPTION_FLAG, AT(version), 0, 0, NULL, "print the version" },
};
#define ROWS (sizeof rows / sizeof rows[0])

static int parse_integer(const char *what, const char *text, uint64_t *ret_value, struct shd_err *e)
{
    char *end;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (!isdigit((unsigned char)text[0]) || *end != '\0' || errno != 0)
        return fail(e, SHD_EINVAL, "%s: '%s' is not a whole number", what, text);
    *ret_value = value;
    return SHD_OK;
}

static int parse_real(const char *what, const char *text, double *ret_value, struct shd_err *e)
{
    char *end;
    const double value = strtod(text, &end);
    if (end == text || *end != '\0' || !isfinite(value))
        return fail(e, SHD_EINVAL, "%s: '%s' is not a number", what, text);
    *ret_value = value;
    return SHD_OK;
}

static int row_set_number(const struct option_row *row, const char *text, void *field,
                          struct shd_err *e)
{
    char what[40];
    uint64_t whole = 0;
    double value = 0;
    snprintf(what, sizeof what, "--%s", row->name);
    int r;
    if (row->kind == OPTION_INTEGER) {
        r = parse_integer(what, text, &whole, e);
        value = (double)whole;
    } else {
        r = parse_real(what, text, &value, e);
    }
    if (r != SHD_OK)
        return r;
    if (value < row->min || value > row->max)
        return fail(e, SHD_ERANGE, "--%s %s is outside its limits, %.16g to %.16g", row->name, text,
                    row->min, row->max);
    if (row->kind == OPTION_INTEGER)
        *(uint64_t *)field = whole;
    else
        *(double *)field = value;
    return SHD_OK;
}

static int row_set(const struct option_row *row, const char *text, struct options *o,
                   struct shd_err *e)
{
    void *field = (char *)o + row->offset;
    switch (row->kind) {
    case OPTION_INTEGER:
    case OPTION_REAL:
        return row_set_number(row, text, field, e);
    case OPTION_TEXT:
        *(const char **)field = text;
        return SHD_OK;
    case OPTION_FLAG:
        *(bool *)field = true;
        return SHD_OK;
    case OPTION_DATA:
        break;
    }
    if (o->data_count == OPTIONS_DATA_MAX)
        return fail(e, SHD_ERANGE, "--data given more than %d times", OPTIONS_DATA_MAX);
    o->data[o->data_count++] = text;
    return SHD_OK;
}

static void options_defaults(struct options *o)
{
    memset(o, 0, sizeof *o);
    for (size_t i = 0; i < ROWS; i++) {
        void *field = (char *)o + rows[i].offset;
        if (rows[i].initial != NULL)
            row_set(&rows[i], rows[i].initial, o, NULL); /* literals of ours: within the limits */
        else if (rows[i].kind == OPTION_INTEGER)
            *(uint64_t *)field = UNSET;
        else if (rows[i].kind == OPTION_REAL)
            *(double *)field = NAN;
    }
}

/* "--name value" or "--name=value". Advances *index over the value. */
static int options_take(int argc, char **argv, int *index, struct options *o, struct shd_err *e)
{
    const char *text = argv[*index];
    if (strncmp(text, "--", 2) != 0 || text[2] == '\0')
        return fail(e, SHD_EINVAL, "'%s' is not an option; see --help", text);
    const char *name = text + 2, *value = strchr(name, '=');
    const size_t length = value != NULL ? (size_t)(value - name) : strlen(name);
    for (size_t i = 0; i < ROWS; i++) {
        if (strlen(rows[i].name) != length || strncmp(rows[i].name, name, length) != 0)
            continue;
        if (rows[i].arg == NULL && value != NULL)
            return fail(e, SHD_EINVAL, "--%s takes no value", rows[i].name);
        if (rows[i].arg == NULL)
            return row_set(&rows[i], NULL, o, e);
        if (value != NULL)
            return row_set(&rows[i], value + 1, o, e);
        if (*index + 1 >= argc)
            return fail(e, SHD_EINVAL, "--%s needs a value (%s)", rows[i].name, rows[i].arg);
        return row_set(&rows[i], argv[++*index], o, e);
    }
    return fail(e, SHD_EINVAL, "unknown option '%s'; see --help", text);
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
        return fail(e, SHD_ERANGE, "%s=%s is above its limit %ju", name, text, (uintmax_t)max);
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
        return fail(e, SHD_ERANGE, "RANK=%ju is not below WORLD_SIZE=%ju", (uintmax_t)rank,
                    (uintmax_t)world);
    if (o->standalone && world > 1)
        return fail(e, SHD_EINVAL,
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
    if (o->data_count == 0)
        o->data[o->data_count++] = DATA_DEFAULT_PATH;
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

int options_parse(int argc, char **argv, struct options *ret_options, struct shd_err *e)
{
    struct options o;
    uint64_t local_world = 1;
    options_defaults(&o);
    int r = SHD_OK;
    for (int i = 1; i < argc && r == SHD_OK; i++)
        r = options_take(argc, argv, &i, &o, e);
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
    fputs("shd-gpt: train a byte-level GPT whose parameters live in shardd daemons\n\n"
          "  shardctl run --daemons 2 --workers 2 -- shd-gpt\n"
          "        two daemons hold the model, two workers train it, on the fortunes\n"
          "  shd-gpt --standalone --steps 50\n"
          "        the same training without daemons: the same digest at the same step\n"
          "  shd-gpt --data book.txt --layers 6 --dim 384 --heads 6 --seq 256 --steps 2000\n"
          "        with daemons that run already; a model that is at step k goes on from there\n\n"
          "Options:\n",
          out);
    for (size_t i = 0; i < ROWS; i++) {
        char left[32];
        snprintf(left, sizeof left, "--%s%s%s", rows[i].name, rows[i].arg != NULL ? " " : "",
                 rows[i].arg != NULL ? rows[i].arg : "");
        fprintf(out, "  %-20s %s", left, rows[i].help);
        if (rows[i].initial != NULL)
            fprintf(out, " (%s)", rows[i].initial);
        fputc('\n', out);
    }
    fputs("\nEnvironment: RANK of WORLD_SIZE is this worker's place (default 0 of 1): it computes\n"
          "micro-batches i with i % WORLD_SIZE == RANK. SHARDD_ELASTIC=1: as --elastic.\n"
          "SHARDD_ADDRESS: where the daemons are.\n"
          "NO_COLOR: no colours. Rank 0 prints; its last line is the digest of parameters and\n"
          "optimizer state, which does not depend on how many daemons and workers there are.\n\n"
          "Exit: 0 done, 1 failed, 2 wrong usage, 130 or 143 ended by SIGINT or SIGTERM after a\n"
          "whole step. With --elastic a signal ends this worker alone, with 0, after the\n"
          "micro-batch at hand.\n",
          out);
}
