/* Sums of squares, and the gradient accumulator that can form one on the way. Included once per
 * instruction set, after vec.h.
 *
 * Sum of one block of 2,048 elements: lane j of 32 adds, in fp64 and in ascending order, the
 * squares of elements j, j + 32, j + 64, ... (the square of an fp32 value is exact in fp64, so a
 * fused add is the same). Then lanes j and j + 16 are added, then j and j + 8, ... down to one.
 * Block sums are added exactly (proto/base/fixsum.h), so their order is free.
 *
 * Accumulate: acc = first ? grad : acc + grad in fp32, one rounding. `first` copies the bits
 * (bf16 and f16 widen exactly): denormals and the sign of zero stay. The sum is of the new acc;
 * its denormals count as 0, as in all arithmetic here. The payload of a NaN in acc is not
 * specified; that the block's sum is not finite is.
 */
#ifndef SHD_KERNELS_CPU_OP_SUM_H
#define SHD_KERNELS_CPU_OP_SUM_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "kernels/cpu/trail.h"
#include "proto/base/check.h"
#include "proto/spec/layout.h"

/* A block's lanes to one number, and that into the thread's sum. */
KERN_FN void block_add(struct kern_sum *to, const struct lanes *l)
{
    double s[SUM_LANES];
    lanes_get(l, s);
    for (unsigned width = SUM_LANES / 2; width > 0; width /= 2)
        for (unsigned j = 0; j < width; j++)
            s[j] += s[j + width];
    if (isfinite(s[0]))
        fixsum_add(&to->sum, s[0]);
    else
        to->finite = false;
}

static void sumsq_range(const struct kern_sumsq *a, struct cpu_range r, struct kern_sum *part)
{
    for (uint64_t at = r.first; at < r.first + r.count; at += SHD_BLOCK_ELEMS) {
        struct lanes l;
        memset(&l, 0, sizeof l);
        for (uint64_t i = at; i < at + SHD_BLOCK_ELEMS; i += SUM_LANES)
            for (unsigned j = 0; j < SUM_LANES / VEC_LANES; j++)
                lanes_add(&l, j, vec_load(a->x + i + (size_t)j * VEC_LANES));
        block_add(part, &l);
    }
}

/* What the update of a block comes to: squares of the changes and of the new values, in one pass
 * over both. */
static void change_block(const float *old, const float *new, struct kern_change *part)
{
    struct lanes update, weight;
    memset(&update, 0, sizeof update);
    memset(&weight, 0, sizeof weight);
    for (uint64_t i = 0; i < SHD_BLOCK_ELEMS; i += SUM_LANES)
        for (unsigned j = 0; j < SUM_LANES / VEC_LANES; j++) {
            const uint64_t at = i + (uint64_t)j * VEC_LANES;
            const vec x = vec_load(new + at);
            lanes_add(&update, j, vec_sub(x, vec_load(old + at)));
            lanes_add(&weight, j, x);
        }
    block_add(&part->update, &update);
    block_add(&part->weight, &weight);
}

/* Those of tiles of int8 (proto/base/dtype.h), decoded. */
KERN_FN vec load_codes(const void *tiles, uint64_t i)
{
    const uint8_t *tile = (const uint8_t *)tiles +
                          i / CODEC_TILE_ELEMS * codec_tile_bytes(CODEC_INT8);
    const uint64_t at = i % CODEC_TILE_ELEMS;
    uint16_t scale;
    memcpy(&scale, tile + CODEC_TILE_ELEMS + at / CODEC_BLOCK_ELEMS * sizeof scale, sizeof scale);
    return vec_mul(codes_load(tile + at, true), vec_set1(f32_of_bits((uint32_t)scale << 16)));
}

/* grad[i, i + VEC_LANES) as fp32. dtype 0: in codes. */
KERN_FN vec load_grad(const void *grad, uint64_t i, enum shd_dtype dtype)
{
    if (dtype == 0)
        return load_codes(grad, i);
    if (dtype == SHD_F32)
        return vec_load((const float *)grad + i);
    const half h = half_load((const uint16_t *)grad + i);
    return dtype == SHD_BF16 ? vec_from_bf16(h) : vec_from_f16(h);
}

/* The variants of an accumulate: one loop is compiled for each. */
struct accumulate_how {
    enum shd_dtype dtype;
    bool first, sum;
};

/* Elements [i, i + SUM_LANES). old: NULL, or acc's values there. */
KERN_FN void accumulate_group(const struct kern_accumulate *a, uint64_t i, struct lanes *l,
                              struct accumulate_how how, const vec *old)
{
    for (unsigned j = 0; j < SUM_LANES / VEC_LANES; j++) {
        float *acc = a->acc + i + (size_t)j * VEC_LANES;
        const vec g = load_grad(a->grad, i + (uint64_t)j * VEC_LANES, how.dtype);
        const vec x = how.first ? g : vec_add(old != NULL ? old[j] : vec_load(acc), g);
        vec_store(acc, x);
        if (how.sum)
            lanes_add(l, j, x);
    }
}

KERN_FN void accumulate_blocks(const struct kern_accumulate *a, struct cpu_range r,
                               struct kern_sum *part, struct accumulate_how how)
{
    for (uint64_t at = r.first; at < r.first + r.count; at += SHD_BLOCK_ELEMS) {
        struct lanes l;
        memset(&l, 0, sizeof l);
        for (uint64_t i = at; i < at + SHD_BLOCK_ELEMS; i += SUM_LANES)
            accumulate_group(a, i, &l, how, NULL);
        if (how.sum)
            block_add(part, &l);
    }
}

/* The same, old values kept. Without a sum r may begin inside a block: where a dead one stopped. */
KERN_FN void accumulate_kept(const struct kern_accumulate *a, struct cpu_range r,
                             struct kern_sum *part, struct accumulate_how how,
                             struct trail_record *rec)
{
    const struct kern_accumulate here = *a; /* so that no store can change a pointer */
    const uint64_t end = r.first + r.count;
    for (uint64_t i = r.first; i < end;) {
        struct lanes l = { 0 }; /* in registers: its address is taken once it is whole */
        for (const uint64_t stop = i - i % SHD_BLOCK_ELEMS + SHD_BLOCK_ELEMS; i < stop;) {
            vec old[TRAIL_GROUP_ELEMS / VEC_LANES]; /* in registers: loaded once */
            for (unsigned j = 0; j < ARRAY_SIZE(old); j++) {
                old[j] = vec_load(here.acc + i + (size_t)j * VEC_LANES);
                vec_store(rec->old[0] + (size_t)j * VEC_LANES, old[j]);
            }
            trail_mark(rec, i, TRAIL_GROUP_ELEMS);
            for (unsigned j = 0; j < TRAIL_GROUP_ELEMS; j += SUM_LANES)
                accumulate_group(&here, i + j, &l, how, old + j / VEC_LANES);
            i += TRAIL_GROUP_ELEMS;
            trail_mark(rec, i, 0);
        }
        if (how.sum) {
            const struct lanes whole = l;
            block_add(part, &whole);
        }
    }
}

KERN_FN void accumulate_dtype(const struct kern_accumulate *a, struct cpu_range r,
                              struct kern_sum *part, enum shd_dtype dtype, struct trail_record *rec)
{
    if (a->first && a->sum != NULL)
        accumulate_blocks(a, r, part, (struct accumulate_how){ dtype, true, true });
    else if (a->first)
        accumulate_blocks(a, r, part, (struct accumulate_how){ dtype, true, false });
    else if (rec != NULL && a->sum != NULL)
        accumulate_kept(a, r, part, (struct accumulate_how){ dtype, false, true }, rec);
    else if (rec != NULL)
        accumulate_kept(a, r, part, (struct accumulate_how){ dtype, false, false }, rec);
    else if (a->sum != NULL)
        accumulate_blocks(a, r, part, (struct accumulate_how){ dtype, false, true });
    else
        accumulate_blocks(a, r, part, (struct accumulate_how){ dtype, false, false });
}

static void accumulate_range(const struct kern_accumulate *a, struct cpu_range r,
                             struct kern_sum *part, struct trail_record *rec)
{
    if (a->grad_codec != CODEC_NONE) {
        accumulate_dtype(a, r, part, 0, rec);
        return;
    }
    switch (a->grad_dtype) {
    case SHD_F32:
        accumulate_dtype(a, r, part, SHD_F32, rec);
        break;
    case SHD_BF16:
        accumulate_dtype(a, r, part, SHD_BF16, rec);
        break;
    case SHD_F16:
        accumulate_dtype(a, r, part, SHD_F16, rec);
        break;
    }
}

#endif
