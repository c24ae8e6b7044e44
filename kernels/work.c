/* See work.h. */
#include "kernels/work.h"

#include <inttypes.h>
#include <math.h>

#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/spec/layout.h"

#define SCRATCH_ALIGN 64u
#define TRAIL_ALIGN   128u /* of struct kern_trail_area, on every device */

static int check_elems(const char *op, uint64_t elems, uint64_t multiple, struct shd_err *e)
{
    if (elems > SHD_MODEL_ELEMS_MAX)
        return err_set(e, SHD_ERANGE, "%s: %" PRIu64 " elements, the limit is %" PRIu64, op, elems,
                       (uint64_t)SHD_MODEL_ELEMS_MAX);
    if (elems % multiple != 0)
        return err_set(e, SHD_ERANGE, "%s: %" PRIu64 " elements are no multiple of %" PRIu64, op,
                       elems, multiple);
    return SHD_OK;
}

/* An array of at least one element of dtype. */
static int check_array(const char *op, const char *name, const void *array, enum shd_dtype dtype,
                       struct shd_err *e)
{
    if (dtype < SHD_F32 || dtype > SHD_F16)
        return err_set(e, SHD_EINVAL, "%s: %s has unknown dtype %d", op, name, (int)dtype);
    if (array == NULL)
        return err_set(e, SHD_EINVAL, "%s: %s is NULL", op, name);
    if ((uintptr_t)array % dtype_sizes[dtype] != 0)
        return err_set(e, SHD_EINVAL, "%s: %s at %p is not aligned to %s", op, name, array,
                       dtype_name(dtype));
    return SHD_OK;
}

/* An array of a slice. */
static int check_slice(const char *op, const char *name, const void *array, enum shd_dtype dtype,
                       const struct work_rules *rules, struct shd_err *e)
{
    const int r = check_array(op, name, array, dtype, e);
    if (r == SHD_OK && rules->slice_align > 0 && (uintptr_t)array % rules->slice_align != 0)
        return err_set(e, SHD_EINVAL, "%s: %s at %p is not aligned to %zu bytes", op, name, array,
                       rules->slice_align);
    return r;
}

static int check_fill(const struct kern_fill *a, struct shd_err *e)
{
    int r = check_elems("fill", a->elems, 1, e);
    if (r == SHD_OK && a->elems > 0)
        r = check_array("fill", "out", a->out, SHD_F32, e);
    if (r != SHD_OK)
        return r;
    if (a->first_index > SHD_MODEL_ELEMS_MAX)
        return err_set(e, SHD_ERANGE, "fill: first index %" PRIu64 ", the limit is %" PRIu64,
                       a->first_index, (uint64_t)SHD_MODEL_ELEMS_MAX);
    switch (a->kind) {
    case KERN_FILL_CONST:
        return SHD_OK;
    case KERN_FILL_NORMAL:
        if (!isfinite(a->a) || !(a->b >= 0) || !isfinite(a->b))
            return err_set(e, SHD_ERANGE, "fill: normal of mean %g and standard deviation %g",
                           (double)a->a, (double)a->b);
        return SHD_OK;
    case KERN_FILL_UNIFORM:
        if (!isfinite(a->a) || !isfinite(a->b) || !(a->a < a->b))
            return err_set(e, SHD_ERANGE, "fill: uniform in [%g, %g)", (double)a->a, (double)a->b);
        return SHD_OK;
    }
    return err_set(e, SHD_EINVAL, "fill: unknown kind %d", (int)a->kind);
}

static int check_cast(const struct kern_cast *a, struct shd_err *e)
{
    int r = check_elems("cast", a->elems, 1, e);
    if (r == SHD_OK && a->elems > 0)
        r = check_array("cast", "out", a->out, a->out_dtype, e);
    if (r == SHD_OK && a->elems > 0)
        r = check_array("cast", "in", a->in, SHD_F32, e);
    return r;
}

/* Arrays that an operation changes in place. */
struct changed {
    const float *array[4];
    uint32_t count;
};

/* A trail for arrays of elems elements in its segment; what the segment's size would tell is
 * unknown here. */
static int check_trail(const char *op, const struct kern_trail *t, const struct changed *changed,
                       uint64_t elems, const struct work_rules *rules, struct shd_err *e)
{
    if (t->area == NULL)
        return SHD_OK;
    if ((uintptr_t)t->area % TRAIL_ALIGN != 0)
        return err_set(e, SHD_EINVAL, "%s: trail area at %p is not aligned to %u", op,
                       (void *)t->area, TRAIL_ALIGN);
    if (t->op < 1 || t->op > KERN_OP_MAX)
        return err_set(e, SHD_ERANGE, "%s: op %" PRIu64 " of a trail, it is 1 to %" PRIu64, op,
                       t->op, KERN_OP_MAX);
    if (elems == 0)
        return SHD_OK;
    if ((rules->chunk_words && t->chunks == NULL) || t->first_chunk > SHD_MODEL_ELEMS_MAX)
        return err_set(e, SHD_EINVAL, "%s: chunk words of a trail at %p, from %" PRIu64, op,
                       (void *)t->chunks, t->first_chunk);
    const int r = check_array(op, "base of the trail", t->base, SHD_F32, e);
    if (r != SHD_OK)
        return r;
    for (uint32_t i = 0; i < changed->count; i++)
        if ((uintptr_t)changed->array[i] < (uintptr_t)t->base)
            return err_set(e, SHD_EINVAL, "%s: array %" PRIu32 " at %p lies before its base %p", op,
                           i, (const void *)changed->array[i], t->base);
    return SHD_OK;
}

static int check_accumulate(const struct kern_accumulate *a, const struct work_rules *rules,
                            struct shd_err *e)
{
    int r = check_elems("accumulate", a->elems, SHD_BLOCK_ELEMS, e);
    if (r == SHD_OK && a->elems > 0)
        r = check_slice("accumulate", "acc", a->acc, SHD_F32, rules, e);
    if (r == SHD_OK && a->elems > 0)
        r = check_slice("accumulate", "grad", a->grad, a->grad_dtype, rules, e);
    if (r == SHD_OK && a->grad_codec != CODEC_NONE &&
        (a->grad_codec != CODEC_INT8 || !rules->codecs))
        return err_set(e, SHD_ENOTSUP, "accumulate: of gradients in codes %d", (int)a->grad_codec);
    if (r == SHD_OK)
        r = check_trail("accumulate", &a->trail, &(struct changed){ { a->acc }, 1 }, a->elems,
                        rules, e);
    return r;
}

static int check_sumsq(const struct kern_sumsq *a, const struct work_rules *rules,
                       struct shd_err *e)
{
    int r = check_elems("sumsq", a->elems, SHD_BLOCK_ELEMS, e);
    if (r == SHD_OK && a->elems > 0)
        r = check_slice("sumsq", "x", a->x, SHD_F32, rules, e);
    if (r == SHD_OK && a->sum == NULL)
        return err_set(e, SHD_EINVAL, "sumsq: sum is NULL");
    return r;
}

/* Runs ascending, apart, inside the slice, each with a group that exists. */
static int check_runs(const char *op, const struct kern_update *a, struct shd_err *e)
{
    if (a->run_count > 0 && (a->runs == NULL || a->hypers == NULL))
        return err_set(e, SHD_EINVAL, "%s: %" PRIu32 " runs, but %s is NULL", op, a->run_count,
                       a->runs == NULL ? "runs" : "hypers");
    uint64_t end = 0;
    for (uint32_t i = 0; i < a->run_count; i++) {
        const struct kern_run *run = &a->runs[i];
        if (run->first_elem > a->elems || run->elems > a->elems - run->first_elem)
            return err_set(e, SHD_ERANGE,
                           "%s: run %" PRIu32 " is %" PRIu64 "+%" PRIu64 ", the slice has %" PRIu64
                           " elements",
                           op, i, run->first_elem, run->elems, a->elems);
        if (run->first_elem < end)
            return err_set(e, SHD_ERANGE,
                           "%s: run %" PRIu32 " begins at %" PRIu64 ", before %" PRIu64
                           ", where the last one ends",
                           op, i, run->first_elem, end);
        if (run->hyper >= a->hyper_count)
            return err_set(e, SHD_ERANGE, "%s: run %" PRIu32 " has group %" PRIu32 " of %" PRIu32,
                           op, i, run->hyper, a->hyper_count);
        end = run->first_elem + run->elems;
    }
    return SHD_OK;
}

static int no_int8(const char *op, struct shd_err *e)
{
    return err_set(e, SHD_ENOTSUP, "%s: this device does not have moments in 8 bits", op);
}

/* Elements [first, + elems) of an array of the state. */
static int check_state(const char *op, const struct kern_array *a, uint64_t first, uint64_t elems,
                       const struct work_rules *rules, struct shd_err *e)
{
    if ((unsigned)a->quant > QUANT_UNSIGNED)
        return err_set(e, SHD_EINVAL, "%s: an array with unknown codes %d", op, (int)a->quant);
    if (a->quant != QUANT_NONE && !rules->int8)
        return no_int8(op, e);
    if (first > SHD_MODEL_ELEMS_MAX)
        return err_set(e, SHD_ERANGE, "%s: from element %" PRIu64 " on, the limit is %" PRIu64, op,
                       first, (uint64_t)SHD_MODEL_ELEMS_MAX);
    return elems > 0 ? check_array(op, "the array", a->base, SHD_F32, e) : SHD_OK;
}

static int check_quantize(const struct kern_quantize *a, const struct work_rules *rules,
                          struct shd_err *e)
{
    int r = check_elems("quantize", a->elems, QUANT_BLOCK_ELEMS, e);
    if (r == SHD_OK)
        r = check_state("quantize", &a->to, a->first_elem, a->elems, rules, e);
    if (r == SHD_OK && (a->to.quant == QUANT_NONE || a->first_elem % QUANT_BLOCK_ELEMS != 0))
        return err_set(e, SHD_EINVAL,
                       "quantize: from element %" PRIu64 " on of an array with codes %d: blocks of "
                       "%u in 8 bits are written",
                       a->first_elem, (int)a->to.quant, QUANT_BLOCK_ELEMS);
    return r == SHD_OK && a->elems > 0 ? check_array("quantize", "in", a->in, SHD_F32, e) : r;
}

static int check_dequantize(const struct kern_dequantize *a, const struct work_rules *rules,
                            struct shd_err *e)
{
    int r = check_elems("dequantize", a->elems, 1, e);
    if (r == SHD_OK)
        r = check_state("dequantize", &a->from, a->first_elem, a->elems, rules, e);
    if (r == SHD_OK && a->from.quant == QUANT_NONE)
        return err_set(e, SHD_EINVAL, "dequantize: of an array in fp32");
    return r == SHD_OK && a->elems > 0 ? check_array("dequantize", "out", a->out, SHD_F32, e) : r;
}

/* Blocks of moments in 8 bits have a scale each: no run begins within one. */
static int check_int8(const char *op, const struct kern_update *a, const struct work_rules *rules,
                      struct shd_err *e)
{
    if (!a->int8)
        return SHD_OK;
    if (!rules->int8)
        return no_int8(op, e);
    if (spec_optimizer_rows[a->kind].moments == 0)
        return err_set(e, SHD_EINVAL, "%s: in 8 bits, and it has no moments", op);
    for (uint32_t i = 0; i < a->run_count; i++)
        if (a->runs[i].first_elem % QUANT_BLOCK_ELEMS != 0)
            return err_set(e, SHD_ERANGE,
                           "%s: run %" PRIu32 " begins at %" PRIu64
                           ", with moments in 8 bits it is multiples of %u",
                           op, i, a->runs[i].first_elem, QUANT_BLOCK_ELEMS);
    return SHD_OK;
}

/* Everything but the hyperparameters. */
static int check_update_arrays(const char *op, const struct kern_update *a,
                               const struct work_rules *rules, struct shd_err *e)
{
    const uint32_t moments = spec_optimizer_rows[a->kind].moments;
    const bool unpublished = a->publish_dtype == 0 && rules->codecs;
    struct changed changed = { { a->param, a->m, a->v }, 1 + moments };
    if (a->ema.average != NULL)
        changed.array[changed.count++] = a->ema.average;
    int r = check_elems(op, a->elems, SHD_BLOCK_ELEMS, e);
    if (r == SHD_OK)
        r = check_trail(op, &a->trail, &changed, a->elems, rules, e);
    if (r == SHD_OK && rules->hypers_max > 0 && a->hyper_count > rules->hypers_max)
        return err_set(e, SHD_ERANGE, "%s: %" PRIu32 " groups, the limit is %" PRIu32, op,
                       a->hyper_count, rules->hypers_max);
    if (r != SHD_OK || a->elems == 0)
        return r != SHD_OK ? r : check_runs(op, a, e);
    const struct {
        const char *name;
        const void *array;
        enum shd_dtype dtype;
    } arrays[] = {
        { "param", a->param, SHD_F32 },
        { "m", moments > 0 ? a->m : a->param, SHD_F32 },
        { "grad", a->grad, SHD_F32 },
        { "publish", unpublished ? a->param : a->publish,
          unpublished ? SHD_F32 : a->publish_dtype },
        { "v", moments > 1 ? a->v : a->param, SHD_F32 },
        { "average", a->ema.average != NULL ? a->ema.average : a->param, SHD_F32 },
    };
    for (size_t i = 0; i < ARRAY_SIZE(arrays) && r == SHD_OK; i++)
        r = check_slice(op, arrays[i].name, arrays[i].array, arrays[i].dtype, rules, e);
    return r == SHD_OK ? check_runs(op, a, e) : r;
}

/* Of an average, if there is one, what is not of its array. */
static int check_ema(const struct kern_ema *a, struct shd_err *e)
{
    if (a->average == NULL)
        return SHD_OK;
    if (!(a->rest > 0 && a->rest <= 1))
        return err_set(e, SHD_ERANGE, "average: 1 - decay is %g, not in (0, 1]", (double)a->rest);
    if (a->first_chunk > SHD_MODEL_ELEMS_MAX)
        return err_set(e, SHD_EINVAL, "average: chunk words of a trail from %" PRIu64,
                       a->first_chunk);
    return SHD_OK;
}

/* AdamW and LAMB divide by the bias corrections. */
static int check_group_bias(const char *op, const struct kern_update *a, uint32_t group,
                            struct shd_err *e)
{
    const struct kern_hyper *h = &a->hypers[group];
    if ((h->bias1 > 0 && h->bias1 <= 1) && (h->bias2 > 0 && h->bias2 <= 1))
        return SHD_OK;
    return err_set(e, SHD_ERANGE,
                   "%s: group %" PRIu32 " has bias corrections %g and %g, not in (0, 1]", op, group,
                   (double)h->bias1, (double)h->bias2);
}

static int check_bias(const struct kern_update *a, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < a->run_count; i++)
        r = check_group_bias("adamw", a, a->runs[i].hyper, e);
    return r;
}

/* Adafactor's tensor `i`, and that its statistics lie behind all tensors. */
static int check_adafactor(const struct kern_update *a, uint32_t i, struct shd_err *e)
{
    const struct kern_matrix *matrix = &a->whole.matrices[i];
    const struct kern_run *run = &a->whole.runs[i], *last = &a->whole.runs[a->whole.count - 1];
    if (a->run_count > 0 || a->whole.statistics == NULL || a->ema.average != NULL)
        return err_set(e, SHD_EINVAL, "adafactor: with %" PRIu32 " runs of others, %s, %s average",
                       a->run_count, a->whole.statistics == NULL ? "no statistics" : "statistics",
                       a->ema.average != NULL ? "an" : "no");
    const struct kern_run *kept = &a->whole.statistics[i];
    const uint64_t rows = matrix->rows > 0 ? matrix->rows : 1, cols = matrix->cols;
    if (matrix->batch == 0 || cols == 0 || run->elems % cols != 0 ||
        run->elems / cols % rows != 0 || run->elems / cols / rows != matrix->batch ||
        kept->elems != matrix->batch * (matrix->rows + cols))
        return err_set(e, SHD_ERANGE,
                       "adafactor: tensor %" PRIu32 " has %" PRIu64 " elements and %" PRIu64
                       " statistics, and is %" PRIu64 " x %" PRIu64 " x %" PRIu64,
                       i, run->elems, kept->elems, matrix->batch, matrix->rows, cols);
    const struct kern_run *first = &a->whole.statistics[0];
    const uint64_t end = i > 0 ? kept[-1].first_elem + kept[-1].elems
                               : last->first_elem + last->elems;
    if (first->first_elem % SHD_BLOCK_ELEMS != 0 || kept->first_elem < end ||
        kept->first_elem > a->elems || kept->elems > a->elems - kept->first_elem ||
        kept->hyper != run->hyper)
        return err_set(e, SHD_ERANGE,
                       "adafactor: statistics of tensor %" PRIu32 " are %" PRIu64 "+%" PRIu64
                       ", the slice has %" PRIu64
                       " elements, and what is before them ends at %" PRIu64,
                       i, kept->first_elem, kept->elems, a->elems, end);
    return SHD_OK;
}

/* Matrix `i`, which begins at `end` or behind it. */
static int check_matrix(const struct kern_update *a, uint32_t i, uint64_t end, struct shd_err *e)
{
    const struct kern_run *run = &a->whole.runs[i];
    const struct kern_matrix *matrix = &a->whole.matrices[i];
    if (matrix->kind != SPEC_MUON && matrix->kind != SPEC_LAMB && matrix->kind != SPEC_ADAFACTOR)
        return err_set(e, SHD_EINVAL, "whole tensor %" PRIu32 ": unknown optimizer %d", i,
                       (int)matrix->kind);
    if (matrix->kind == SPEC_LAMB && a->v == NULL)
        return err_set(e, SHD_EINVAL, "lamb: v is NULL, and tensor %" PRIu32 " needs it", i);
    if (run->first_elem < end || run->first_elem > a->elems ||
        run->elems > a->elems - run->first_elem)
        return err_set(e, SHD_ERANGE,
                       "muon: matrix %" PRIu32 " is %" PRIu64 "+%" PRIu64 ", the slice has %" PRIu64
                       " elements, and the last one ends at %" PRIu64,
                       i, run->first_elem, run->elems, a->elems, end);
    if ((matrix->kind == SPEC_ADAFACTOR) != (a->kind == SPEC_ADAFACTOR))
        return err_set(e, SHD_EINVAL, "whole tensor %" PRIu32 " is of %s, and the slice of %s", i,
                       spec_optimizer_rows[matrix->kind].kind, spec_optimizer_rows[a->kind].kind);
    if (matrix->kind != SPEC_ADAFACTOR &&
        (matrix->rows == 0 || run->elems % matrix->rows != 0 ||
         run->elems / matrix->rows != matrix->cols || run->elems == 0))
        return err_set(e, SHD_ERANGE,
                       "muon: matrix %" PRIu32 " has %" PRIu64 " elements, and is %" PRIu64
                       " x %" PRIu64,
                       i, run->elems, matrix->rows, matrix->cols);
    if (run->hyper >= a->hyper_count)
        return err_set(e, SHD_ERANGE, "muon: matrix %" PRIu32 " has group %" PRIu32 " of %" PRIu32,
                       i, run->hyper, a->hyper_count);
    if (matrix->kind == SPEC_ADAFACTOR)
        return check_adafactor(a, i, e);
    return matrix->kind == SPEC_LAMB ? check_group_bias("lamb", a, run->hyper, e) : SHD_OK;
}

static int check_whole(const struct kern_update *a, const struct work_rules *rules,
                       struct shd_err *e)
{
    const struct kern_whole *w = &a->whole;
    if (w->count == 0)
        return SHD_OK;
    if (!rules->whole)
        return err_set(e, SHD_ENOTSUP, "muon: %" PRIu32 " matrices, which this device does not do",
                       w->count);
    if (a->int8)
        return err_set(e, SHD_EINVAL,
                       "muon: %" PRIu32 " matrices, with moments in 8 bits: theirs are fp32",
                       w->count);
    const bool needs_m = a->kind != SPEC_ADAFACTOR;
    if (w->runs == NULL || w->matrices == NULL || a->hypers == NULL || (needs_m && a->m == NULL))
        return err_set(e, SHD_EINVAL, "muon: %" PRIu32 " matrices, but %s is NULL", w->count,
                       w->runs == NULL       ? "runs"
                       : w->matrices == NULL ? "matrices"
                       : a->hypers == NULL   ? "hypers"
                                             : "m");
    if (w->scratch == NULL || (uintptr_t)w->scratch % SCRATCH_ALIGN != 0)
        return err_set(e, SHD_EINVAL, "muon: scratch at %p is not aligned to %u",
                       (void *)w->scratch, SCRATCH_ALIGN);
    int r = SHD_OK;
    uint64_t end = 0;
    for (uint32_t i = 0; r == SHD_OK && i < w->count; i++) {
        r = check_matrix(a, i, end, e);
        end = w->runs[i].first_elem + w->runs[i].elems;
    }
    return r;
}

static int check_update(const struct kern_update *a, const struct work_rules *rules,
                        struct shd_err *e)
{
    const bool whole = a->kind == SPEC_ADAFACTOR && a->whole.count > 0;
    if ((a->kind < 1 || a->kind > SPEC_MEAN) && !whole)
        return err_set(e, SHD_EINVAL, "update: unknown optimizer %d", (int)a->kind);
    const char *op = spec_optimizer_rows[a->kind].kind;
    int r = check_update_arrays(op, a, rules, e);
    if (r == SHD_OK)
        r = check_int8(op, a, rules, e);
    if (r == SHD_OK)
        r = check_ema(&a->ema, e);
    if (r == SHD_OK)
        r = check_whole(a, rules, e);
    if (r == SHD_OK && a->kind == SPEC_MEAN && !(a->grad_scale >= 1))
        return err_set(e, SHD_ERANGE, "mean: of %g values", (double)a->grad_scale);
    return r == SHD_OK && a->kind == SPEC_ADAMW ? check_bias(a, e) : r;
}

static int check_hash(const struct kern_hash *a, const struct work_rules *rules, struct shd_err *e)
{
    int r = check_elems("hash", a->elems, 1, e);
    if (r != SHD_OK)
        return r;
    if (a->elems == 0)
        return err_set(e, SHD_ERANGE, "hash: of no elements");
    if (a->head_elems < 1 || a->head_elems > SHD_BLOCK_ELEMS)
        return err_set(e, SHD_ERANGE, "hash: a first piece of %" PRIu64 " elements, not of 1 to %u",
                       a->head_elems, SHD_BLOCK_ELEMS);
    if (a->x == NULL && a->of.quant != QUANT_NONE)
        r = check_state("hash", &a->of, a->first_elem, a->elems, rules, e);
    else
        r = check_array("hash", "x", a->x, SHD_F32, e);
    if (r == SHD_OK && a->out == NULL)
        return err_set(e, SHD_EINVAL, "hash: out is NULL");
    return r;
}

static int check_encode(const struct kern_encode *a, const struct work_rules *rules,
                        struct shd_err *e)
{
    int r = check_elems("encode", a->elems, CODEC_TILE_ELEMS, e);
    if (r == SHD_OK)
        r = check_elems("encode", a->first_elem, CODEC_TILE_ELEMS, e);
    if (r == SHD_OK && !rules->codecs)
        return err_set(e, SHD_ENOTSUP, "encode: this device does not encode what it publishes");
    if (r == SHD_OK && (a->codec == CODEC_NONE || (unsigned)a->codec > CODECS))
        return err_set(e, SHD_EINVAL, "encode: unknown codec %d", (int)a->codec);
    if (r != SHD_OK || a->elems == 0)
        return r;
    if (a->noise != NULL &&
        (a->codec != CODEC_INT8 || a->noise->first_index % CODEC_BLOCK_ELEMS != 0))
        return err_set(e, SHD_EINVAL, "encode: codec %d with noise from %" PRIu64 " on",
                       (int)a->codec, a->noise->first_index);
    if (a->out == NULL || (uintptr_t)a->out % SCRATCH_ALIGN != 0)
        return err_set(e, SHD_EINVAL, "encode: out at %p is not aligned to %u", a->out,
                       SCRATCH_ALIGN);
    if (a->first_of == NULL || a->bytes_of == NULL || a->slices == 0 || a->first_of[0] != 0)
        return err_set(e, SHD_EINVAL, "encode: of %" PRIu32 " slices, the first of which is %s",
                       a->slices, a->slices == 0 || a->first_of == NULL ? "none" : "not at 0");
    return check_array("encode", "in", a->in, SHD_F32, e);
}

static int check_copy(const struct kern_copy *a, struct shd_err *e)
{
    if (a->bytes > 0 && (a->to == NULL || a->from == NULL))
        return err_set(e, SHD_EINVAL, "copy: %s is NULL", a->to == NULL ? "to" : "from");
    return SHD_OK;
}

int work_init(struct work *w, const struct kern_op *op, const struct work_rules *rules,
              struct kern_done *done, struct shd_err *e)
{
    const struct kern_trail *trail = NULL;
    struct kern_sum *sum = NULL;
    struct kern_change *change = NULL;
    uint64_t count = 0;
    int r = SHD_EINVAL;
    switch (op->kind) {
    case KERN_FILL:
        r = check_fill(&op->fill, e);
        count = op->fill.elems;
        break;
    case KERN_CAST:
        r = check_cast(&op->cast, e);
        count = op->cast.elems;
        break;
    case KERN_ACCUMULATE:
        r = check_accumulate(&op->accumulate, rules, e);
        count = op->accumulate.elems;
        sum = op->accumulate.sum;
        trail = &op->accumulate.trail;
        break;
    case KERN_SUMSQ:
        r = check_sumsq(&op->sumsq, rules, e);
        count = op->sumsq.elems;
        sum = op->sumsq.sum;
        break;
    case KERN_UPDATE:
        r = check_update(&op->update, rules, e);
        count = op->update.elems;
        trail = &op->update.trail;
        change = op->update.change;
        break;
    case KERN_HASH:
        r = check_hash(&op->hash, rules, e);
        count = r == SHD_OK ? kern_hash_leaves(op->hash.head_elems, op->hash.elems) : 0;
        break;
    case KERN_COPY:
        r = check_copy(&op->copy, e);
        count = op->copy.bytes;
        break;
    case KERN_QUANTIZE:
        r = check_quantize(&op->quantize, rules, e);
        count = op->quantize.elems;
        break;
    case KERN_DEQUANTIZE:
        r = check_dequantize(&op->dequantize, rules, e);
        count = op->dequantize.elems;
        break;
    case KERN_ENCODE:
        r = check_encode(&op->encode, rules, e);
        count = op->encode.elems;
        break;
    case KERN_OP_KINDS:
        break;
    }
    if (r != SHD_OK)
        return r;
    *w = (struct work){ .op = *op, .count = count, .sum = sum, .change = change, .done = done };
    if (trail != NULL && trail->area != NULL) {
        w->trail = true;
        w->done_word = trail->done;
        w->done_value = trail->done_value;
    }
    return SHD_OK;
}

void work_end(const struct work *w, int status)
{
    if (w->sum != NULL)
        fixsum_carry(&w->sum->sum); /* equal sums are then equal bytes */
    if (w->change != NULL) {
        fixsum_carry(&w->change->update.sum);
        fixsum_carry(&w->change->weight.sum);
    }
    if (status != SHD_OK || w->done_word == NULL)
        return;
    FAIL_POINT("kern:done:before");
    atomic_store_explicit(w->done_word, w->done_value, memory_order_release);
    FAIL_POINT("kern:done:after");
}

uint64_t hash_leaf_first(const struct kern_hash *a, uint64_t leaf)
{
    const uint64_t first = leaf == 0 ? 0 : a->head_elems + (leaf - 1) * SHD_BLOCK_ELEMS;
    return first < a->elems ? first : a->elems;
}
