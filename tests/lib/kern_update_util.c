#include "tests/lib/kern_update_util.h"

struct state state_new(uint64_t elems, enum shd_dtype dtype, bool wild, uint64_t skew,
                       uint64_t seed)
{
    struct state s = { .elems = elems, .dtype = dtype };
    s.p = guarded_new(elems * 4, 4 * skew);
    s.m = guarded_new(elems * 4, 8 * skew);
    s.v = guarded_new(elems * 4, 12 * skew);
    s.g = guarded_new(elems * 4, 20 * skew);
    s.out = guarded_new(elems * dtype_bytes(dtype), skew * dtype_bytes(dtype));
    fill_awkward(s.p.base, elems, wild, seed);
    fill_awkward(s.m.base, elems, wild, seed + 1);
    fill_awkward(s.v.base, elems, wild, seed + 2);
    fill_awkward(s.g.base, elems, wild, seed + 3);
    for (uint64_t i = 0; i < elems; i++) /* a second moment is not negative */
        ((float *)s.v.base)[i] = fabsf(((float *)s.v.base)[i]);
    memset(s.out.base, 0x5a, s.out.bytes);
    return s;
}

void state_free(struct state *s)
{
    struct guarded *all[] = { &s->p, &s->m, &s->v, &s->g, &s->out };
    for (size_t i = 0; i < ARRAY_SIZE(all); i++) {
        EXPECT(guarded_intact(all[i]));
        guarded_free(all[i]);
    }
}

void state_update(struct kern *k, enum spec_optimizer o, struct state *s,
                  const struct kern_run *runs, uint32_t run_count)
{
    const struct kern_update a = {
        .kind = o,
        .param = s->p.base,
        .m = s->m.base,
        .v = o == SPEC_ADAMW ? s->v.base : NULL,
        .grad = s->g.base,
        .grad_scale = 0.37f,
        .publish = s->out.base,
        .publish_dtype = s->dtype,
        .elems = s->elems,
        .runs = runs,
        .run_count = run_count,
        .hypers = update_hypers,
        .hyper_count = ARRAY_SIZE(update_hypers),
    };
    struct kern_waiter w;
    struct shd_err e = { 0 };
    kern_waiter_init(&w);
    EXPECT_OK(kern_update(k, &a, &w.done, &e), &e);
    EXPECT_STATUS(kern_wait(&w), SHD_OK);
}

uint32_t make_runs(uint64_t elems, struct kern_run *runs, uint32_t runs_max, uint64_t seed)
{
    static const uint64_t sizes[] = { 0,  1,  2,  3,    4,    5,    16,    31,
                                      32, 33, 64, 2047, 2048, 5000, 20001, 70001 };
    uint64_t state = seed, at = test_random(&state) % 40;
    uint32_t count = 0;
    while (count < runs_max) {
        const uint64_t n = sizes[test_random(&state) % ARRAY_SIZE(sizes)];
        if (n > elems - at)
            break;
        runs[count++] = (struct kern_run){ at, n, (uint32_t)(test_random(&state) % 3) };
        at += n;
        const uint64_t gap = test_random(&state) % 3 == 0 ? test_random(&state) % 100 : 0;
        at = gap < elems - at ? at + gap : elems;
    }
    return count;
}
