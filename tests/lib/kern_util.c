#include "tests/lib/kern_util.h"

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/isa.h"

static const uint32_t device_threads[] = { 1, 2, 3 };

/* In programs linked with tests/cuda/mirror.c: a device that is not the host's, but takes the
 * host's arrays. It is then the best one here, and the last of all. */
struct kern *device_extra_new(void) __attribute__((weak));

struct kern *device_new(const char *isa, uint32_t threads)
{
    if (device_extra_new != NULL && (isa == NULL || strcmp(isa, "cuda") == 0))
        return device_extra_new();
    const struct kern_config config = { .threads = threads, .isa = isa };
    struct shd_err e = { 0 };
    struct kern *k = NULL;
    EXPECT_OK(kern_cpu_new(&config, &k, &e), &e);
    return k;
}

const char *const *device_names(void)
{
    static const char *const with_extra[] = { "scalar", "cuda", NULL };
    return device_extra_new != NULL ? with_extra : kern_cpu_isas();
}

/* Each, but where it is threads that are looked for: then the one that has most of them. */
void devices_each(void (*fn)(struct kern *k, const char *label, void *arg), void *arg)
{
    for (const char *const *isa = device_names(); *isa != NULL; isa++) {
        for (size_t t = 0; t < (device_extra_new != NULL ? 1 : ARRAY_SIZE(device_threads)); t++) {
            char label[32];
            if (SANITIZE_THREAD && (isa[1] != NULL || t + 1 < ARRAY_SIZE(device_threads)))
                continue;
            snprintf(label, sizeof label, "%s x %" PRIu32, *isa, device_threads[t]);
            struct kern *k = device_new(*isa, device_threads[t]);
            fn(k, label, arg);
            k->ops->free(k);
        }
    }
}

_Atomic uint32_t record_count;

void record_done(struct kern_done *done, int status)
{
    struct record *r = (struct record *)(void *)done; /* first member */
    r->fired++;
    r->status = status;
    r->order = record_count++;
}

/* An array at base, `skew` elements into its allocation, between guards of known bytes. */
#define GUARD_BYTES 256u

struct guarded guarded_new(uint64_t bytes, uint64_t skew_bytes)
{
    struct guarded g = { .bytes = bytes, .skew_bytes = skew_bytes };
    g.memory = aligned_alloc(64, (bytes + skew_bytes + 2 * GUARD_BYTES + 63) / 64 * 64);
    EXPECT(g.memory != NULL);
    memset(g.memory, 0xa5, bytes + skew_bytes + 2 * GUARD_BYTES);
    g.base = g.memory + GUARD_BYTES + skew_bytes;
    return g;
}

bool guarded_intact(const struct guarded *g)
{
    for (uint64_t i = 0; i < GUARD_BYTES + g->skew_bytes; i++)
        if (g->memory[i] != 0xa5)
            return false;
    const uint8_t *end = (const uint8_t *)g->base + g->bytes;
    for (uint64_t i = 0; i < GUARD_BYTES; i++)
        if (end[i] != 0xa5)
            return false;
    return true;
}

void guarded_free(struct guarded *g)
{
    free(g->memory);
    *g = (struct guarded){ 0 };
}

uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

float daz(float x)
{
    return fpclassify(x) == FP_SUBNORMAL ? copysignf(0, x) : x;
}

bool same_float(float a, float b)
{
    return bits_of(a) == bits_of(b) || (isnan(a) && isnan(b));
}

static bool half_is_nan(uint16_t h, enum shd_dtype dtype)
{
    return dtype == SHD_BF16 ? (h & 0x7fff) > 0x7f80 : (h & 0x7fff) > 0x7c00;
}

void expect_same_array(const void *got, const void *want, enum shd_dtype dtype, uint64_t count,
                       const char *label)
{
    if (dtype == SHD_F32) {
        EXPECT_SAME_FLOATS((const float *)got, (const float *)want, count, label);
        return;
    }
    const uint16_t *g = got, *w = want;
    for (uint64_t i = 0; i < count; i++)
        if (g[i] != w[i] && !(half_is_nan(g[i], dtype) && half_is_nan(w[i], dtype)))
            FAIL("%s: %s [%" PRIu64 "] is %04x, expected %04x", label, dtype_name(dtype), i, g[i],
                 w[i]);
}

/* Uniform in [low, high). */
static float random_float(uint64_t *state, float low, float high)
{
    return low + (high - low) * ((float)(test_random(state) >> 40) * 0x1p-24f);
}

void fill_awkward(float *x, uint64_t elems, bool wild, uint64_t seed)
{
    static const uint32_t odd[] = { 0x00000001, 0x807fffff, 0x00000000, 0x80000000,
                                    0x7f800000, 0xff800000, 0x7fc00001, 0x7f7fffff,
                                    0xff7fffff, 0x00800000, 0x80800001, 0x33000000 };
    uint64_t state = test_seed(seed);
    for (uint64_t i = 0; i < elems; i++) {
        const uint64_t r = test_random(&state);
        if (wild && r % 8 == 0)
            x[i] = float_of(odd[r / 8 % ARRAY_SIZE(odd)]);
        else
            x[i] = ldexpf(random_float(&state, -2, 2), (int)(r / 8 % 24) - 16);
    }
}

struct state state_new(uint64_t elems, enum shd_dtype dtype, bool wild, uint64_t skew,
                       uint64_t seed)
{
    struct state s = { .elems = elems, .dtype = dtype };
    s.p = guarded_new(elems * 4, 4 * skew);
    s.m = guarded_new(elems * 4, 8 * skew);
    s.v = guarded_new(elems * 4, 12 * skew);
    s.g = guarded_new(elems * 4, 20 * skew);
    s.e = guarded_new(elems * 4, 16 * skew);
    s.out = guarded_new(elems * dtype_bytes(dtype), skew * dtype_bytes(dtype));
    fill_awkward(s.p.base, elems, wild, seed);
    fill_awkward(s.m.base, elems, wild, seed + 1);
    fill_awkward(s.v.base, elems, wild, seed + 2);
    fill_awkward(s.g.base, elems, wild, seed + 3);
    fill_awkward(s.e.base, elems, wild, seed + 4);
    for (uint64_t i = 0; i < elems; i++) /* a second moment is not negative */
        ((float *)s.v.base)[i] = fabsf(((float *)s.v.base)[i]);
    memset(s.out.base, 0x5a, s.out.bytes);
    return s;
}

void state_free(struct state *s)
{
    struct guarded *all[] = { &s->p, &s->m, &s->v, &s->g, &s->e, &s->out };
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
        .m = spec_optimizer_rows[o].moments > 0 ? s->m.base : NULL,
        .v = spec_optimizer_rows[o].moments > 1 ? s->v.base : NULL,
        .grad = s->g.base,
        .grad_scale = update_scale(o),
        .publish = s->out.base,
        .publish_dtype = s->dtype,
        .elems = s->elems,
        .runs = runs,
        .run_count = run_count,
        .hypers = update_hypers,
        .hyper_count = ARRAY_SIZE(update_hypers),
        .ema = { .average = s->rest > 0 ? s->e.base : NULL, .rest = s->rest },
        .change = s->change,
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
    uint64_t state = test_seed(seed), at = test_random(&state) % 40;
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
