/* Moments in 8 bits (kernels/quant.h): the update of a block, and whole arrays to fp32 and back.
 * Included once per instruction set, after vec.h.
 *
 * A block's scale is known when all of its new values are, so an update is block by block: decoded,
 * stepped as op_update.h steps fp32 moments, kept in fp32 on the stack, encoded. A block is a group
 * of the trail, too: its record has the old codes and scales beside the old parameters.
 */
#ifndef SHD_KERNELS_CPU_OP_QUANT_H
#define SHD_KERNELS_CPU_OP_QUANT_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/op_update.h"
#include "kernels/cpu/trail.h"
#include "kernels/optimizers.h"
#include "kernels/quant.h"

_Static_assert(QUANT_BLOCK_ELEMS == TRAIL_GROUP_ELEMS, "a block is a group of the trail");
_Static_assert(QUANT_BLOCK_ELEMS % VEC_LANES == 0, "blocks are whole vectors");

#define QUANT_VECS (QUANT_BLOCK_ELEMS / VEC_LANES)

/* In plain C all of a block is called: its loops are of 64, which the compiler would unroll
 * everywhere. */
#if KERN_LANES == 1
#define QUANT_FN KERN_CALL
#else
#define QUANT_FN KERN_FN
#endif

/* A block's values: in registers, where there are as many. */
struct quant_values {
    vec x[QUANT_VECS];
};

KERN_FN struct quant_values values_load(const float *x)
{
    struct quant_values v;
    for (unsigned j = 0; j < QUANT_VECS; j++)
        v.x[j] = vec_load(x + (size_t)j * VEC_LANES);
    return v;
}

KERN_FN void values_store(float *x, const struct quant_values *v)
{
    for (unsigned j = 0; j < QUANT_VECS; j++)
        vec_store(x + (size_t)j * VEC_LANES, v->x[j]);
}

QUANT_FN void encode_block(struct quant_block b, const struct quant_values *v, bool sign)
{
    vec_u32 most = vec_bits(vec_set1(0));
    float r;
    for (unsigned j = 0; j < QUANT_VECS; j++)
        most = bits_max(most, quant_size(v->x[j], sign));
    *b.scale = quant_scale(bits_most(most), &r);
    if (r == 0) {
        memset(b.codes, 0, QUANT_BLOCK_ELEMS);
        return;
    }
    for (unsigned j = 0; j < QUANT_VECS; j++)
        codes_store(b.codes + (size_t)j * VEC_LANES, quant_encode(v->x[j], vec_set1(r), sign),
                    sign);
}

QUANT_FN struct quant_values decode_block(struct quant_block b, bool sign)
{
    const vec scale = vec_set1(*b.scale);
    struct quant_values v;
    for (unsigned j = 0; j < QUANT_VECS; j++)
        v.x[j] = quant_decode(codes_load(b.codes + (size_t)j * VEC_LANES, sign), scale, sign);
    return v;
}

/* -- Update ------------------------------------------------------------------------------------ */

/* The blocks of an update that begin at element i. */
struct quant_moments {
    struct quant_block m, v;
};

KERN_FN struct quant_moments moments_at(const struct kern_update *a, uint64_t i,
                                        enum spec_optimizer kind)
{
    const struct quant_block m = quant_block_at(a->m, i);
    return (struct quant_moments){ m, has_v(kind) ? quant_block_at(a->v, i) : m };
}

KERN_FN void keep_block(float *old, struct quant_block b)
{
    memcpy(old, b.codes, QUANT_BLOCK_ELEMS);
    old[QUANT_BLOCK_ELEMS / sizeof *old] = *b.scale;
}

/* All of the block is in the run. The new moments. */
QUANT_FN void step_block(const struct kern_update *a, uint64_t i, struct quant_moments at,
                         const struct kern_rates *c, enum spec_optimizer kind,
                         struct quant_values *m, struct quant_values *v)
{
    const vec scale_m = vec_set1(*at.m.scale), scale_v = vec_set1(*at.v.scale);
    for (unsigned j = 0; j < QUANT_VECS; j++) {
        const uint64_t k = (uint64_t)j * VEC_LANES;
        vec p = vec_load(a->param + i + k);
        m->x[j] = quant_decode(codes_load(at.m.codes + k, true), scale_m, true);
        v->x[j] = has_v(kind) ? quant_decode(codes_load(at.v.codes + k, false), scale_v, false)
                              : m->x[j];
        optimizer_step(kind, c, vec_load(a->grad + i + k), &p, &m->x[j], &v->x[j]);
        vec_store(a->param + i + k, p);
    }
}

/* Its first n elements are; behind them is a gap, whose moments are zeros. */
KERN_CALL void step_block_part(const struct kern_update *a, uint64_t i, unsigned n,
                               const struct kern_rates *c, enum spec_optimizer kind,
                               struct quant_values *m, struct quant_values *v)
{
    float part_m[QUANT_BLOCK_ELEMS], part_v[QUANT_BLOCK_ELEMS];
    values_store(part_m, m);
    values_store(part_v, v);
    for (unsigned j = 0; j < n; j += VEC_LANES) {
        const unsigned some = n - j < VEC_LANES ? n - j : VEC_LANES;
        vec p = vec_load_n(a->param + i + j, some);
        vec new_m = vec_load(part_m + j), new_v = vec_load(part_v + j);
        optimizer_step(kind, c, vec_load_n(a->grad + i + j, some), &p, &new_m, &new_v);
        vec_store_n(a->param + i + j, p, some);
        vec_store(part_m + j, new_m);
        vec_store(part_v + j, new_v);
    }
    memset(part_m + n, 0, (QUANT_BLOCK_ELEMS - n) * sizeof *part_m);
    memset(part_v + n, 0, (QUANT_BLOCK_ELEMS - n) * sizeof *part_v);
    *m = values_load(part_m);
    *v = values_load(part_v);
}

KERN_FN void publish_part(const struct kern_update *a, uint64_t i, unsigned n, struct publish to)
{
    for (unsigned j = 0; j < n; j += VEC_LANES) {
        const unsigned some = n - j < VEC_LANES ? n - j : VEC_LANES;
        const vec p = vec_load_n(a->param + i + j, some);
        if (to.dtype == SHD_F32)
            vec_store_n((float *)a->publish + i + j, p, some);
        else
            half_store_n((uint16_t *)a->publish + i + j,
                         to.dtype == SHD_BF16 ? vec_to_bf16(p) : vec_to_f16(p), some);
    }
}

KERN_FN void publish_pairs(const struct kern_update *a, uint64_t i, struct publish to)
{
    for (unsigned j = 0; j < QUANT_BLOCK_ELEMS; j += 2 * VEC_LANES)
        publish_pair(a->publish, i + j, vec_load(a->param + i + j),
                     vec_load(a->param + i + j + VEC_LANES), to);
}

/* The new parameters of a block, which are in a cache. */
KERN_CALL void publish_block(const struct kern_update *a, uint64_t i, unsigned n, bool stream)
{
    if (a->publish_dtype == 0)
        return;
    if (n < QUANT_BLOCK_ELEMS)
        publish_part(a, i, n, (struct publish){ a->publish_dtype, false });
    else if (a->publish_dtype == SHD_F32)
        publish_pairs(a, i, (struct publish){ SHD_F32, stream });
    else if (a->publish_dtype == SHD_BF16)
        publish_pairs(a, i, (struct publish){ SHD_BF16, stream });
    else
        publish_pairs(a, i, (struct publish){ SHD_F16, stream });
}

/* Elements [i, i + n) of the block that begins at i. */
KERN_FN void quant_block_update(const struct kern_update *a, uint64_t i, unsigned n,
                                const struct kern_rates *c, enum spec_optimizer kind, bool stream,
                                struct trail_record *rec)
{
    const struct quant_moments at = moments_at(a, i, kind);
    struct quant_values m, v;
    if (rec != NULL) {
        memcpy(rec->old[0], a->param + i, n * sizeof(float));
        keep_block(rec->old[1], at.m);
        if (has_v(kind))
            keep_block(rec->old[2], at.v);
        trail_mark(rec, i, n);
    }
    if (n == QUANT_BLOCK_ELEMS) {
        step_block(a, i, at, c, kind, &m, &v);
    } else {
        m = decode_block(at.m, true);
        v = has_v(kind) ? decode_block(at.v, false) : m;
        step_block_part(a, i, n, c, kind, &m, &v);
    }
    encode_block(at.m, &m, true);
    if (has_v(kind))
        encode_block(at.v, &v, false);
    publish_block(a, i, n, stream);
    if (rec != NULL)
        trail_mark(rec, i + QUANT_BLOCK_ELEMS, 0);
}

/* The end of a run that cuts a block: called, as step_parts() is. */
KERN_CALL void quant_part_update(const struct kern_update *a, uint64_t i, unsigned n,
                                 const struct kern_rates *c, enum spec_optimizer kind,
                                 struct trail_record *rec)
{
    quant_block_update(a, i, n, c, kind, /* stream= */ false, rec);
}

/* The parts of all runs that lie in r, both of which begin at blocks. Published lines begin at
 * blocks, too, where the array is aligned to them. */
KERN_FN void quant_runs(const struct kern_update *a, struct cpu_range r, enum spec_optimizer kind,
                        struct trail_record *rec)
{
    const struct kern_update here = *a; /* so that no store can change a pointer */
    const bool stream = a->elems >= UPDATE_STREAM_ELEMS_MIN && (uintptr_t)a->publish % 64 == 0;
    const uint64_t range_end = r.first + r.count;
    for (uint32_t j = run_find(a->runs, a->run_count, r.first); j < a->run_count; j++) {
        const struct kern_run *run = &a->runs[j];
        const uint64_t run_end = run->first_elem + run->elems;
        const uint64_t end = run_end < range_end ? run_end : range_end;
        const struct kern_rates c = kern_rates_of(kind, &a->hypers[run->hyper], a->grad_scale);
        uint64_t i = run->first_elem > r.first ? run->first_elem : r.first;
        for (; i < end && end - i >= QUANT_BLOCK_ELEMS; i += QUANT_BLOCK_ELEMS)
            quant_block_update(&here, i, QUANT_BLOCK_ELEMS, &c, kind, stream, rec);
        if (i < end)
            quant_part_update(&here, i, (unsigned)(end - i), &c, kind, rec);
    }
    vec_fence();
}

KERN_FN void quant_kind(const struct kern_update *a, struct cpu_range r, enum spec_optimizer kind,
                        struct trail_record *rec)
{
    if (rec == NULL)
        quant_runs(a, r, kind, NULL);
    else
        quant_runs(a, r, kind, rec);
}

static void quant_update_range(const struct kern_update *a, struct cpu_range r,
                               struct trail_record *rec)
{
    switch (a->kind) {
    case SPEC_ADAMW:
        quant_kind(a, r, SPEC_ADAMW, rec);
        break;
    case SPEC_SGD:
        quant_kind(a, r, SPEC_SGD, rec);
        break;
    case SPEC_LION:
        quant_kind(a, r, SPEC_LION, rec);
        break;
    case SPEC_ADAMW_TORCH:
        quant_kind(a, r, SPEC_ADAMW_TORCH, rec);
        break;
    case SPEC_SGD_TORCH:
        quant_kind(a, r, SPEC_SGD_TORCH, rec);
        break;
    case SPEC_MEAN: /* has none: work_init() */
    case SPEC_MUON: /* these are in fp32: likewise */
    case SPEC_LAMB:
    case SPEC_ADAFACTOR:
        break;
    }
}

/* -- Whole arrays ------------------------------------------------------------------------------ */

static void quantize_range(const struct kern_quantize *a, struct cpu_range r)
{
    const bool sign = a->to.quant == QUANT_SIGNED;
    for (uint64_t i = r.first; i < r.first + r.count; i += QUANT_BLOCK_ELEMS) {
        const struct quant_values v = values_load(a->in + i);
        encode_block(quant_block_at(a->to.base, a->first_elem + i), &v, sign);
    }
}

/* Any elements of the array: blocks may be cut. */
static void dequantize_range(const struct kern_dequantize *a, struct cpu_range r)
{
    const bool sign = a->from.quant == QUANT_SIGNED;
    float x[QUANT_BLOCK_ELEMS];
    for (uint64_t i = r.first, end = r.first + r.count, n; i < end; i += n) {
        const uint64_t elem = a->first_elem + i, skip = elem % QUANT_BLOCK_ELEMS;
        n = QUANT_BLOCK_ELEMS - skip < end - i ? QUANT_BLOCK_ELEMS - skip : end - i;
        const struct quant_block b = quant_block_at(a->from.base, elem - skip);
        const struct quant_values v = decode_block(b, sign);
        values_store(n == QUANT_BLOCK_ELEMS ? a->out + i : x, &v);
        if (n < QUANT_BLOCK_ELEMS)
            memcpy(a->out + i, x + skip, n * sizeof *x);
    }
}

#endif
