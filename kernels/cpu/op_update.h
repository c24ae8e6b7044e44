/* The loop that all optimizers share: read param, moments and gradient once, step, write them and
 * the published copy, in one pass. Included once per instruction set, after vec.h.
 *
 * Elements are independent, so neither lanes nor ranges nor the way a run's ends are handled can
 * show in a result. Elements between runs are not touched.
 *
 * With a record (rec not NULL) each group's old values are copied there before the very same steps
 * change them: read twice, but from the cache the second time. The compiler makes the code without
 * one as if rec were not there.
 */
#ifndef SHD_KERNELS_CPU_OP_UPDATE_H
#define SHD_KERNELS_CPU_OP_UPDATE_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/trail.h"
#include "kernels/optimizers.h"

/* Updates of at least this many elements (4 MiB of state, more than the L2 of one core) write the
 * published copy past the caches: it is not read here, and a plain store would first fetch the
 * line it overwrites. Smaller ones leave it in the cache for the workers. */
#define UPDATE_STREAM_ELEMS_MIN (UINT64_C(256) * 1024)

struct publish {
    enum shd_dtype dtype; /* 0: not at all */
    bool stream;
};

/* Elements [i, i + VEC_LANES); returns the new parameters. */
KERN_FN vec step_vec(const struct kern_update *a, uint64_t i, const struct kern_rates *c,
                     enum spec_optimizer kind)
{
    vec p = vec_load(a->param + i);
    vec m = has_m(kind) ? vec_load(a->m + i) : p;
    vec v = has_v(kind) ? vec_load(a->v + i) : m;
    optimizer_step(kind, c, vec_load(a->grad + i), &p, &m, &v);
    if (has_m(kind))
        vec_store(a->m + i, m);
    if (has_v(kind))
        vec_store(a->v + i, v);
    vec_store(a->param + i, p);
    return p;
}

/* x[0, n) into the record; n <= VEC_LANES, or a multiple of it. */
KERN_FN void keep_array(float *old, const float *x, unsigned n)
{
    if (VEC_LANES == 1) { /* by whatever the compiler copies with */
        memcpy(old, x, n * sizeof *x);
        return;
    }
    if (n < VEC_LANES)
        vec_store(old, vec_load_n(x, n));
    for (unsigned j = 0; j + VEC_LANES <= n; j += VEC_LANES)
        vec_store(old + j, vec_load(x + j));
}

/* Elements [i, i + n) are about to change. */
KERN_FN void keep_old(struct trail_record *rec, const struct kern_update *a, uint64_t i, unsigned n,
                      enum spec_optimizer kind)
{
    keep_array(rec->old[0], a->param + i, n);
    if (has_m(kind))
        keep_array(rec->old[1], a->m + i, n);
    if (has_v(kind))
        keep_array(rec->old[2], a->v + i, n);
    trail_mark(rec, i, n);
}

/* Elements [i, i + n), n <= VEC_LANES, published too. */
KERN_FN void step_part(const struct kern_update *a, uint64_t i, unsigned n,
                       const struct kern_rates *c, enum spec_optimizer kind, struct publish to)
{
    vec p = vec_load_n(a->param + i, n);
    vec m = has_m(kind) ? vec_load_n(a->m + i, n) : p;
    vec v = has_v(kind) ? vec_load_n(a->v + i, n) : m;
    optimizer_step(kind, c, vec_load_n(a->grad + i, n), &p, &m, &v);
    if (has_m(kind))
        vec_store_n(a->m + i, m, n);
    if (has_v(kind))
        vec_store_n(a->v + i, v, n);
    vec_store_n(a->param + i, p, n);
    if (to.dtype == 0)
        return;
    if (to.dtype == SHD_F32)
        vec_store_n((float *)a->publish + i, p, n);
    else
        half_store_n((uint16_t *)a->publish + i,
                     to.dtype == SHD_BF16 ? vec_to_bf16(p) : vec_to_f16(p), n);
}

/* Publish two neighbouring vectors at element i. */
KERN_FN void publish_pair(void *out, uint64_t i, vec p0, vec p1, struct publish to)
{
    if (to.dtype == 0)
        return;
    if (to.dtype == SHD_F32) {
        float *f = (float *)out + i;
        to.stream ? vec_stream(f, p0) : vec_store(f, p0);
        to.stream ? vec_stream(f + VEC_LANES, p1) : vec_store(f + VEC_LANES, p1);
        return;
    }
    uint16_t *h = (uint16_t *)out + i;
    const half h0 = to.dtype == SHD_BF16 ? vec_to_bf16(p0) : vec_to_f16(p0);
    const half h1 = to.dtype == SHD_BF16 ? vec_to_bf16(p1) : vec_to_f16(p1);
    if (to.stream) {
        half_stream_pair(h, h0, h1);
    } else {
        half_store(h, h0);
        half_store(h + VEC_LANES, h1);
    }
}

/* Elements from i to the next whose published copy begins a cache line. */
KERN_FN uint64_t elems_to_line(const struct kern_update *a, uint64_t i, struct publish to)
{
    const uint64_t elem_bytes = to.dtype == SHD_F32 ? 4 : 2;
    const uint64_t past = ((uintptr_t)a->publish + i * elem_bytes) % 64;
    return past == 0 ? 0 : (64 - past) / elem_bytes;
}

/* The ends of a run, called: compiled into each loop they would be most of its code. */
KERN_CALL uint64_t step_parts(const struct kern_update *a, uint64_t i, uint64_t end,
                              const struct kern_rates *c, enum spec_optimizer kind,
                              struct publish to, struct trail_record *rec)
{
    while (i < end) {
        const unsigned n = end - i < VEC_LANES ? (unsigned)(end - i) : VEC_LANES;
        if (rec != NULL)
            keep_old(rec, a, i, n, kind);
        step_part(a, i, n, c, kind, to);
        i += n;
        if (rec != NULL)
            trail_mark(rec, i, 0);
    }
    return end;
}

/* As many pairs of vectors as there are before end; returns where they end. */
KERN_FN uint64_t step_pairs(const struct kern_update *a, uint64_t i, uint64_t end,
                            const struct kern_rates *c, enum spec_optimizer kind, struct publish to)
{
    for (; end - i >= 2 * VEC_LANES; i += 2 * VEC_LANES) {
        const vec p0 = step_vec(a, i, c, kind);
        const vec p1 = step_vec(a, i + VEC_LANES, c, kind);
        publish_pair(a->publish, i, p0, p1, to);
    }
    return i;
}

/* As many groups as there are before end; returns where they end. */
KERN_FN uint64_t step_groups(const struct kern_update *a, uint64_t i, uint64_t end,
                             const struct kern_rates *c, enum spec_optimizer kind,
                             struct publish to, struct trail_record *rec)
{
    const struct kern_update here = *a; /* so that no store can change a pointer */
    for (; end - i >= TRAIL_GROUP_ELEMS; i += TRAIL_GROUP_ELEMS) {
        keep_old(rec, &here, i, TRAIL_GROUP_ELEMS, kind);
        step_pairs(&here, i, i + TRAIL_GROUP_ELEMS, c, kind, to);
        trail_mark(rec, i + TRAIL_GROUP_ELEMS, 0);
    }
    return i;
}

/* One run, or the part of it in this thread's range. */
KERN_FN void update_span(const struct kern_update *a, struct cpu_range r,
                         const struct kern_rates *c, enum spec_optimizer kind, struct publish to,
                         struct trail_record *rec)
{
    uint64_t i = r.first;
    const uint64_t end = r.first + r.count;
    if (to.stream) {
        const uint64_t head = elems_to_line(a, i, to);
        i = step_parts(a, i, head < r.count ? i + head : end, c, kind, to, rec);
    }
    if (rec == NULL)
        i = step_pairs(a, i, end, c, kind, to);
    else
        i = step_groups(a, i, end, c, kind, to, rec);
    step_parts(a, i, end, c, kind, to, rec);
}

KERN_FN void update_span_to(const struct kern_update *a, struct cpu_range r,
                            const struct kern_rates *c, enum spec_optimizer kind, bool stream,
                            struct trail_record *rec)
{
    if (a->publish_dtype == 0) {
        update_span(a, r, c, kind, (struct publish){ 0, false }, rec);
        return;
    }
    switch (a->publish_dtype) {
    case SHD_F32:
        update_span(a, r, c, kind, (struct publish){ SHD_F32, stream }, rec);
        break;
    case SHD_BF16:
        update_span(a, r, c, kind, (struct publish){ SHD_BF16, stream }, rec);
        break;
    case SHD_F16:
        update_span(a, r, c, kind, (struct publish){ SHD_F16, stream }, rec);
        break;
    }
}

KERN_FN struct kern_rates rates_of(const struct kern_update *a, uint32_t index,
                                   enum spec_optimizer kind)
{
    if (a->whole.rates != NULL) /* the last pass over whole tensors, whose runs these are */
        return a->whole.rates[index];
    return kern_rates_of(kind, &a->hypers[a->runs[index].hyper], a->grad_scale);
}

/* The parts of all runs that lie in r. */
KERN_FN void update_runs(const struct kern_update *a, struct cpu_range r, enum spec_optimizer kind,
                         struct trail_record *rec)
{
    const uint64_t range_end = r.first + r.count;
    for (uint32_t j = run_find(a->runs, a->run_count, r.first); j < a->run_count; j++) {
        const struct kern_run *run = &a->runs[j];
        if (run->first_elem >= range_end)
            break;
        const uint64_t run_end = run->first_elem + run->elems;
        const uint64_t first = run->first_elem > r.first ? run->first_elem : r.first;
        const uint64_t end = run_end < range_end ? run_end : range_end;
        if (first >= end)
            continue; /* an empty run */
        if (a->whole.only != 0 && a->whole.matrices[j].kind != a->whole.only)
            continue;
        const struct cpu_range part = { first, end - first };
        const struct kern_rates c = rates_of(a, j, kind);
        if (a->elems >= UPDATE_STREAM_ELEMS_MIN)
            update_span_to(a, part, &c, kind, true, rec);
        else
            update_span_to(a, part, &c, kind, false, rec);
    }
    vec_fence();
}

KERN_FN void update_kind(const struct kern_update *a, struct cpu_range r, enum spec_optimizer kind,
                         struct trail_record *rec)
{
    if (rec == NULL)
        update_runs(a, r, kind, NULL);
    else
        update_runs(a, r, kind, rec);
}

static void update_range(const struct kern_update *a, struct cpu_range r, struct trail_record *rec)
{
    switch (a->kind) {
    case SPEC_ADAMW:
        update_kind(a, r, SPEC_ADAMW, rec);
        break;
    case SPEC_SGD:
        update_kind(a, r, SPEC_SGD, rec);
        break;
    case SPEC_LION:
        update_kind(a, r, SPEC_LION, rec);
        break;
    case SPEC_ADAMW_TORCH:
        update_kind(a, r, SPEC_ADAMW_TORCH, rec);
        break;
    case SPEC_SGD_TORCH:
        update_kind(a, r, SPEC_SGD_TORCH, rec);
        break;
    case SPEC_MEAN:
        update_kind(a, r, SPEC_MEAN, rec);
        break;
    case SPEC_MUON:
        update_kind(a, r, SPEC_MUON, rec);
        break;
    case SPEC_LAMB:
        update_kind(a, r, SPEC_LAMB, rec);
        break;
    case SPEC_ADAFACTOR: /* of passes, which are Muon's: whole.h */
        break;
    }
}

#endif
