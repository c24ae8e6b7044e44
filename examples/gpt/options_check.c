/* options_check.c: see options_check.h. */
#include "examples/gpt/options_check.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "examples/gpt/shape.h"
#include "proto/base/status.h"

#define STATIC_LOSS_SCALE 1024.0 /* of --loss-scale static */

/* A word and what it stands for; tables end with a NULL name. */
struct word {
    const char *name;
    int value;
};

static int word_find(const struct word *words, const char *option, const char *text,
                     const char *known, int *ret_value, struct shd_err *e)
{
    for (const struct word *w = words; w->name != NULL; w++)
        if (strcmp(w->name, text) == 0) {
            *ret_value = w->value;
            return SHD_OK;
        }
    return err_set(e, SHD_EINVAL, "--%s '%s' is not %s", option, text, known);
}

static const struct word strategies[] = { { "ddp", SHD_DDP },
                                          { "zero1", SHD_ZERO1 },
                                          { "zero2", SHD_ZERO2 },
                                          { "zero3", SHD_ZERO3 },
                                          { NULL, 0 } };
static const struct word prefetches[] = { { "pre", SHD_PREFETCH_PRE },
                                          { "post", SHD_PREFETCH_POST },
                                          { "none", SHD_PREFETCH_NONE },
                                          { NULL, 0 } };
static const struct word paths[] = { { "auto", SHD_PATH_AUTO },
                                     { "map", SHD_PATH_MAP },
                                     { "copy", SHD_PATH_COPY },
                                     { "nccl", SHD_PATH_NCCL },
                                     { NULL, 0 } };
static const struct word dtypes[] = {
    { "fp32", SHD_F32 }, { "bf16", SHD_BF16 }, { "fp16", SHD_F16 }, { NULL, 0 }
};
enum { BF16_AUTO, BF16_NATIVE, BF16_EMULATED };
static const struct word bf16_gemms[] = {
    { "auto", BF16_AUTO }, { "native", BF16_NATIVE }, { "emulated", BF16_EMULATED }, { NULL, 0 }
};

/* -- Model ----------------------------------------------------------------------------------- */

static int check_model(const struct options *o, struct shd_err *e)
{
    const char *kind = o->optimizer;
    const struct gpt_shape shape = { .layers = (uint32_t)o->layers,
                                     .dim = (uint32_t)o->dim,
                                     .heads = (uint32_t)o->heads,
                                     .seq = (uint32_t)o->seq,
                                     .experts = (uint32_t)o->experts,
                                     .rank = (uint32_t)o->adapters };
    if (strcmp(kind, "adamw") != 0 && strcmp(kind, "sgd") != 0 && strcmp(kind, "lion") != 0)
        return err_set(e, SHD_EINVAL, "--optimizer '%s' is not adamw, sgd or lion", kind);
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
    if (gpt_units(&shape) > GPT_UNITS_MAX)
        return err_set(e, SHD_ERANGE, "%ju layers of %ju experts are %u units, the limit is %d",
                       (uintmax_t)o->layers, (uintmax_t)o->experts, gpt_units(&shape),
                       GPT_UNITS_MAX);
    if (o->min_lr > o->lr)
        return err_set(e, SHD_ERANGE, "--min-lr %g is above --lr %g", o->min_lr, o->lr);
    return SHD_OK;
}

/* -- Schedule -------------------------------------------------------------------------------- */

static int check_path(const struct options *o, enum shd_path path, struct shd_err *e)
{
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
    return SHD_OK;
}

static int check_bounds(const struct options *o, enum shd_strategy strategy, struct shd_err *e)
{
    const uint64_t units = o->layers * (1 + o->experts + (o->adapters > 0 ? 1 : 0)) + 2;
    const bool holds_all = strategy == SHD_DDP || strategy == SHD_ZERO1;
    if (holds_all && o->max_live_units > 0 && o->max_live_units < units)
        return err_set(e, SHD_ERANGE,
                       "--strategy %s holds all %ju units, so --max-live-units %ju cannot be kept: "
                       "use zero3, or at least %ju",
                       o->strategy, (uintmax_t)units, (uintmax_t)o->max_live_units,
                       (uintmax_t)units);
    return SHD_OK;
}

static int check_schedule(struct options *o, struct shd_err *e)
{
    int strategy = 0, prefetch = 0, path = 0;
    if (strcmp(o->strategy, "hybrid") == 0)
        return err_set(e, SHD_ENOTSUP,
                       "--strategy hybrid needs replica groups, which this version has not: use "
                       "zero3, or zero2 to fetch once");
    int r = word_find(strategies, "strategy", o->strategy, "ddp, zero1, zero2 or zero3", &strategy,
                      e);
    if (r == SHD_OK)
        r = word_find(prefetches, "prefetch", o->prefetch, "pre, post or none", &prefetch, e);
    if (r == SHD_OK)
        r = word_find(paths, "path", o->path, "map, copy, nccl or auto", &path, e);
    if (r == SHD_OK)
        r = check_path(o, (enum shd_path)path, e);
    if (r == SHD_OK)
        r = check_bounds(o, (enum shd_strategy)strategy, e);
    if (r != SHD_OK)
        return r;
    o->chosen.policy = (struct shd_policy){
        .size = sizeof(struct shd_policy),
        .strategy = (enum shd_strategy)strategy,
        .forward_prefetch = (uint32_t)o->forward_prefetch,
        .backward_prefetch = (enum shd_backward_prefetch)prefetch,
        .max_live_units = (uint32_t)o->max_live_units,
        .max_live_bytes = o->max_live_bytes,
        .path = (enum shd_path)path
    };
    return SHD_OK;
}

/* "owner" or "local:A". */
static int check_accumulate(struct options *o, struct shd_err *e)
{
    char *end;
    o->chosen.accumulate = 1;
    if (strcmp(o->accumulate, "owner") == 0)
        return SHD_OK;
    const char *text = o->accumulate + strlen("local:");
    if (strncmp(o->accumulate, "local:", strlen("local:")) != 0 || !isdigit((unsigned char)*text))
        return err_set(e, SHD_EINVAL, "--accumulate '%s' is not owner or local:A, A a number",
                       o->accumulate);
    const unsigned long long a = strtoull(text, &end, 10);
    if (*end != '\0' || a < 1 || a > o->micro_batches || o->micro_batches % a != 0)
        return err_set(e, SHD_ERANGE,
                       "--accumulate %s: A must divide --micro-batches %ju, which A micro-batches "
                       "at a time make up",
                       o->accumulate, (uintmax_t)o->micro_batches);
    o->chosen.accumulate = (uint32_t)a;
    return SHD_OK;
}

static int check_stop(struct options *o, struct shd_err *e)
{
    if ((o->stop_at > 0) != (o->stop_rank != UINT64_MAX))
        return err_set(e, SHD_EINVAL,
                       "--stop-rank and --stop-at go together: who leaves, and when");
    if (o->stop_at > 0 && o->elastic)
        return err_set(e, SHD_EINVAL,
                       "--stop-rank with --elastic: work is not shared out beforehand, so a worker "
                       "may just be ended; leave one of them out");
    if (o->slow_rank != UINT64_MAX && o->slow <= 1)
        return err_set(e, SHD_EINVAL, "--slow-rank without --slow: say how slow");
    if (o->stop_at > 0 && o->stop_rank >= o->world)
        return err_set(e, SHD_ERANGE, "--stop-rank %ju: there are %u workers, 0 to %u",
                       (uintmax_t)o->stop_rank, o->world, o->world - 1);
    return SHD_OK;
}

/* -- Precision ------------------------------------------------------------------------------- */

static int check_gemm(struct options *o, enum shd_dtype publish, struct shd_err *e)
{
    int bf16 = 0;
    const int r = word_find(bf16_gemms, "bf16-gemm", o->bf16_gemm, "auto, native or emulated",
                            &bf16, e);
    if (r != SHD_OK)
        return r;
    if (bf16 != BF16_AUTO && publish != SHD_BF16)
        return err_set(e, SHD_EINVAL,
                       "--bf16-gemm %s with --precision %s: add --precision bf16, or leave it out",
                       o->bf16_gemm, o->precision);
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
    o->chosen.static_scale = 1;
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
        o->chosen.dynamic_scale = true;
    } else if (strcmp(text, "static") == 0) {
        o->chosen.static_scale = STATIC_LOSS_SCALE;
    } else {
        const double scale = strtod(text, &end);
        if (end == text || *end != '\0' || !(scale >= 1 && scale <= 16777216))
            return err_set(
                e, SHD_EINVAL,
                "--loss-scale '%s' is not dynamic, static or a number from 1 to 16777216", text);
        o->chosen.static_scale = scale;
    }
    return SHD_OK;
}

static int check_precision(struct options *o, struct shd_err *e)
{
    int publish = 0, grads = 0;
    int r = word_find(dtypes, "precision", o->precision, "fp32, bf16 or fp16", &publish, e);
    if (r == SHD_OK)
        r = word_find(dtypes, "grad-precision", o->grad_precision, "fp32, bf16 or fp16", &grads, e);
    if (r == SHD_OK)
        r = check_gemm(o, (enum shd_dtype)publish, e);
    if (r == SHD_OK)
        r = check_loss_scale(o, publish == SHD_F16 || grads == SHD_F16, e);
    if (r != SHD_OK)
        return r;
    o->chosen.publish = (enum shd_dtype)publish;
    o->chosen.policy.grad_dtype = (enum shd_dtype)grads;
    return SHD_OK;
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
static int check_device(struct options *o, struct shd_err *e)
{
    char *end;
    const bool tf32 = strcmp(o->math, "tf32") == 0;
    if (!tf32 && strcmp(o->math, "fp32") != 0)
        return err_set(e, SHD_EINVAL, "--math '%s' is not fp32 or tf32", o->math);
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
            o->precision);
    o->chosen.cuda = true;
    o->chosen.device = (uint32_t)ordinal;
    o->chosen.tf32 = tf32;
    o->chosen.gemm = GEMM_FULL; /* of the sample, which the host computes */
    o->chosen.gemm_auto = false;
    return check_cuda(o, e);
}

int options_check(struct options *o, struct shd_err *e)
{
    int r = check_model(o, e);
    if (r == SHD_OK)
        r = check_schedule(o, e);
    if (r == SHD_OK)
        r = check_accumulate(o, e);
    if (r == SHD_OK)
        r = check_stop(o, e);
    if (r == SHD_OK)
        r = check_precision(o, e);
    if (r == SHD_OK)
        r = check_device(o, e);
    return r;
}
