/* Widening and scaling on the calling thread, on every instruction set: the bits of plain C. */
#include <immintrin.h>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/widen.h"
#include "tests/lib/kern_util.h"

#define ELEMS_MAX ((UINT64_C(1) << 20) + 77) /* past caches, with a tail */

/* f16 to f32 from its definition. */
static float f16_value(uint16_t h)
{
    const int exponent = h >> 10 & 31;
    const double fraction = h & 1023, sign = h >> 15 ? -1 : 1;
    if (exponent == 31)
        return fraction != 0 ? NAN : (float)(sign * INFINITY);
    const double value = exponent == 0 ? ldexp(fraction, -24)
                                       : ldexp(fraction + 1024, exponent - 25);
    return (float)(sign * value);
}

static float value_at(const void *in, enum shd_dtype dtype, uint64_t i)
{
    float x;
    if (dtype == SHD_F32)
        memcpy(&x, (const float *)in + i, sizeof x);
    else if (dtype == SHD_BF16)
        x = float_of((uint32_t)((const uint16_t *)in)[i] << 16);
    else
        x = f16_value(((const uint16_t *)in)[i]);
    return x;
}

static void expect_widened(const char *isa, enum shd_dtype dtype, float scale, uint64_t elems,
                           uint64_t skew)
{
    const uint64_t in_bytes = elems * (dtype == SHD_F32 ? 4 : 2);
    struct guarded in = guarded_new(in_bytes + 8, skew * (dtype == SHD_F32 ? 4 : 2));
    struct guarded out = guarded_new((elems + 1) * sizeof(float), skew * 4);
    uint64_t seed = 11;
    for (uint64_t i = 0; i < in_bytes / 2; i++)
        ((uint16_t *)in.base)[i] = (uint16_t)(test_random(&seed) >> 48);
    const struct kern_widen w = { out.base, in.base, dtype, elems, scale };
    float *got = out.base;
    memset(&got[elems], 0x5a, sizeof *got);
    const unsigned csr = _mm_getcsr();
    cpu_widen_by(isa, &w);
    EXPECT_EQ(_mm_getcsr() & ~0x3fu, csr & ~0x3fu); /* but for what happened */
    for (uint64_t i = 0; i < elems; i++) {
        const float x = value_at(in.base, dtype, i);
        const float want = scale == 1 ? x : daz(daz(x) * scale);
        const bool same = scale == 1 && dtype == SHD_F32 ? bits_of(got[i]) == bits_of(x)
                                                         : same_float(got[i], want);
        if (!same)
            FAIL("%s dtype %d scale %g elems %" PRIu64 ": [%" PRIu64 "] is %a, not %a", isa,
                 (int)dtype, (double)scale, elems, i, (double)got[i], (double)want);
    }
    uint32_t guard;
    memcpy(&guard, &got[elems], sizeof guard);
    EXPECT_EQ(guard, 0x5a5a5a5a);
    EXPECT(guarded_intact(&in) && guarded_intact(&out));
    guarded_free(&in);
    guarded_free(&out);
}

TEST(bits_are_those_of_plain_c_on_every_instruction_set)
{
    static const uint64_t sizes[] = { 0, 1, 7, 8, 15, 16, 17, 33, 1000 };
    static const enum shd_dtype dtypes[] = { SHD_F32, SHD_BF16, SHD_F16 };
    static const float scales[] = { 1, 0, 0.25f, -3, 1e-30f, 1e30f };
    for (const char *const *isa = kern_cpu_isas(); *isa != NULL; isa++)
        for (size_t d = 0; d < ARRAY_SIZE(dtypes); d++)
            for (size_t s = 0; s < ARRAY_SIZE(scales); s++)
                for (size_t n = 0; n < ARRAY_SIZE(sizes); n++)
                    expect_widened(*isa, dtypes[d], scales[s], sizes[n], /* skew= */ n % 3);
}

TEST(large_arrays_go_past_the_caches_with_the_same_bits)
{
    for (const char *const *isa = kern_cpu_isas(); *isa != NULL; isa++) {
        expect_widened(*isa, SHD_BF16, 1, ELEMS_MAX, 0);
        expect_widened(*isa, SHD_F32, 0.5f, ELEMS_MAX, 0);
    }
}

TEST_MAIN()
