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

struct quant_values {
    _Alignas(64) float x[QUANT_BLOCK_ELEMS];
};

/* x[QUANT_BLOCK_ELEMS] becomes the block. */
KERN_FN void encode_block(struct quant_block b, const float *x, bool sign)
{
    vec_u32 most = vec_bits(vec_set1(0));
    float r;
    for (unsigned j = 0; j < QUANT_BLOCK_ELEMS; j += VEC_LANES)
        most = bits_max(most, quant_size(vec_load(x + j), sign));
    *b.scale = quant_scale(bits_most(most), &r);
    if (r == 0) {
        memset(b.codes, 0, QUANT_BLOCK_ELEMS);
        return;
    }
    for (unsigned j = 0; j < QUANT_BLOCK_ELEMS; j += VEC_LANES)
        codes_store(b.codes + j, quant_encode(vec_load(x + j), vec_set1(r), sign), sign);
}

KERN_FN void decode_block(struct quant_block b, float *x, bool sign)
{
    const vec scale = vec_set1(*b.scale);
    for (unsigned j = 0; j < QUANT_BLOCK_ELEMS; j += VEC_LANES)
        vec_store(x + j, quant_decode(codes_load(b.codes + j, sign), scale, sign));
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

/* All of the block is in the run. */
KERN_FN void step_block(const struct kern_update *a, uint64_t i, struct quant_moments at,
                        const struct kern_rates *c, enum spec_optimizer kind,
                        struct quant_values *new_m, struct quant_values *new_v)
{
    const vec scale_m = vec_set1(*at.m.scale), scale_v = vec_set1(*at.v.scale);
    for (unsigned j = 0; j < QUANT_BLOCK_ELEMS; j += VEC_LANES) {
        vec p = vec_load(a->param + i + j);
        vec m = quant_decode(codes_load(at.m.codes + j, true), scale_m, true);
        vec v = has_v(kind) ? quant_decode(codes_load(at.v.codes + j, false), scale_v, false) : m;
        optimizer_step(kind, c, vec_load(a->grad + i + j), &p, &m, &v);
        vec_store(a->param + i + j, p);
        vec_store(new_m->x + j, m);
        if (has_v(kind))
            vec_store(new_v->x + j, v);
    }
}

/* Its first n elements are; behind them is a gap, whose moments are zeros. */
KERN_FN void step_block_part(const struct kern_update *a, uint64_t i, unsigned n,
                             struct quant_moments at, const struct kern_rates *c,
                             enum spec_optimizer kind, struct quant_values *new_m,
                             struct quant_values *new_v)
{
    struct quant_values old_m, old_v;
    decode_block(at.m, old_m.x, true);
    if (has_v(kind))
        decode_block(at.v, old_v.x, false);
    memset(new_m, 0, sizeof *new_m);
    memset(new_v, 0, sizeof *new_v);
    for (unsigned j = 0; j < n; j += VEC_LANES) {
        const unsigned some = n - j < VEC_LANES ? n - j : VEC_LANES;
        vec p = vec_load_n(a->param + i + j, some);
        vec m = vec_load_n(old_m.x + j, some);
        vec v = has_v(kind) ? vec_load_n(old_v.x + j, some) : m;
        optimizer_step(kind, c, vec_load_n(a->grad + i + j, some), &p, &m, &v);
        vec_store_n(a->param + i + j, p, some);
        vec_store_n(new_m->x + j, m, some);
        if (has_v(kind))
            vec_store_n(new_v->x + j, v, some);
    }
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

/* The new parameters of a block, which are in a cache: not compiled once more for each dtype. */
KERN_FN void publish_block(const struct kern_update *a, uint64_t i, unsigned n, bool stream)
{
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
    if (n == QUANT_BLOCK_ELEMS)
        step_block(a, i, at, c, kind, &m, &v);
    else
        step_block_part(a, i, n, at, c, kind, &m, &v);
    encode_block(at.m, m.x, true);
    if (has_v(kind))
        encode_block(at.v, v.x, false);
    publish_block(a, i, n, stream);
    if (rec != NULL)
        trail_mark(rec, i + QUANT_BLOCK_ELEMS, 0);
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
            quant_block_update(&here, i, (unsigned)(end - i), &c, kind, stream, rec);
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
        break;
    }
}

/* -- Whole arrays ------------------------------------------------------------------------------ */

static void quantize_range(const struct kern_quantize *a, struct cpu_range r)
{
    const bool sign = a->to.quant == QUANT_SIGNED;
    for (uint64_t i = r.first; i < r.first + r.count; i += QUANT_BLOCK_ELEMS)
        encode_block(quant_block_at(a->to.base, a->first_elem + i), a->in + i, sign);
}

/* Any elements of the array: blocks may be cut. */
static void dequantize_range(const struct kern_dequantize *a, struct cpu_range r)
{
    const bool sign = a->from.quant == QUANT_SIGNED;
    struct quant_values x;
    for (uint64_t i = r.first, end = r.first + r.count, n; i < end; i += n) {
        const uint64_t elem = a->first_elem + i, skip = elem % QUANT_BLOCK_ELEMS;
        n = QUANT_BLOCK_ELEMS - skip < end - i ? QUANT_BLOCK_ELEMS - skip : end - i;
        const struct quant_block b = quant_block_at(a->from.base, elem - skip);
        if (n == QUANT_BLOCK_ELEMS) {
            decode_block(b, a->out + i, sign);
            continue;
        }
        decode_block(b, x.x, sign);
        memcpy(a->out + i, x.x + skip, n * sizeof *x.x);
    }
}

#endif
