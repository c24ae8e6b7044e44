/* Codecs: codes and scales that are those of an oracle in fp64, on every device; values that come
 * back as near as a code can be; slices that begin anywhere; and updates that leave publishing to
 * them. */
#include <immintrin.h>

#include "kernels/cpu/decode.h"
#include "kernels/cpu/isa.h"
#include "kernels/fill.h"
#include "tests/lib/kern_util.h"

#define FIRST_CODEC CODEC_INT8
#define LAST_CODEC  CODEC_INT4

static const double largest[] = { 0, 127, 448, 7 };

static void *array_new(uint64_t bytes)
{
    void *x = aligned_alloc(64, (bytes + 63) / 64 * 64);
    EXPECT(x != NULL);
    memset(x, 0x77, bytes);
    return x;
}

static void encode(struct kern *k, enum codec codec, const float *in, uint64_t elems, void *out)
{
    static const uint64_t zero[] = { 0 };
    const struct kern_encode a = { .in = in,
                                   .out = out,
                                   .codec = codec,
                                   .elems = elems,
                                   .first_of = zero,
                                   .bytes_of = zero,
                                   .slices = 1 };
    EXPECT_RUNS(encode, k, &a);
}

static void decode(const char *isa, enum codec codec, const void *in, uint64_t elems,
                   enum shd_dtype dtype, void *out)
{
    const struct kern_decode a = { out, in, codec, dtype, elems };
    const unsigned csr = _mm_getcsr();
    cpu_decode_by(isa, &a);
    EXPECT_EQ(_mm_getcsr() & ~0x3fu, csr & ~0x3fu); /* but for what happened */
}

/* -- The oracle: tiles as proto/base/dtype.h lays them out, values as kernels/codec.h has them,
 * each code found by looking at all of them -----------------------------------------------------
 */

static double value_of(enum codec codec, unsigned code)
{
    if (codec == CODEC_INT8)
        return (double)(int8_t)code;
    if (codec == CODEC_INT4)
        return (double)code - 8;
    const double sign = code & 0x80 ? -1 : 1, fraction = code & 7;
    const int exponent = (int)(code >> 3 & 15);
    return sign * (exponent == 0 ? ldexp(fraction, -9) : ldexp(fraction + 8, exponent - 10));
}

/* Is this a code that encoding gives? */
static bool is_code(enum codec codec, unsigned code)
{
    if (codec == CODEC_INT8)
        return code < 256 && code != 0x80;
    return codec == CODEC_INT4 ? code > 0 && code < 16 : code < 256 && (code & 0x7f) != 0x7f;
}

static unsigned nearest(enum codec codec, float y)
{
    double least = INFINITY;
    unsigned found = 0;
    for (unsigned code = 0; code < 256; code++) {
        if (!is_code(codec, code))
            continue;
        if (codec == CODEC_FP8 && (code >> 7) != (signbit(y) != 0))
            continue;
        const double error = fabs((double)y - value_of(codec, code));
        /* Of two as near the even one, whose last bit is 0. */
        if (error < least || (error == least && (code & 1) == 0)) {
            least = error;
            found = code;
        }
    }
    return found;
}

static uint16_t scale_of(const float *x, enum codec codec)
{
    double most = 0;
    bool none = false;
    for (unsigned i = 0; i < CODEC_BLOCK_ELEMS; i++) {
        most = fmax(most, fabs((double)x[i]));
        none = none || isnan(x[i]) || fabs((double)x[i]) > 0x1p126;
    }
    if (none)
        return 0x7fc0;
    if (most < 0x1p-96)
        return 0;
    const float inverse = (float)(1 / largest[codec]), t = (float)most * inverse;
    uint32_t bits = bits_of(t);
    if ((bits & 0xffff) > 15)
        bits += 0x10000;
    return (uint16_t)(bits >> 16);
}

static uint8_t *tile_of(void *tiles, enum codec codec, uint64_t block)
{
    return (uint8_t *)tiles + block / 32 * codec_tile_bytes(codec);
}

static uint16_t *scale_at(void *tiles, enum codec codec, uint64_t block)
{
    const uint64_t codes = codec == CODEC_INT4 ? 1024 : 2048;
    return (uint16_t *)(void *)(tile_of(tiles, codec, block) + codes) + block % 32;
}

static unsigned code_at(void *tiles, enum codec codec, uint64_t block, unsigned i)
{
    if (codec != CODEC_INT4)
        return tile_of(tiles, codec, block)[block % 32 * 64 + i];
    const unsigned pair = tile_of(tiles, codec, block)[block % 32 * 32 + i % 32];
    return i < 32 ? pair & 15 : pair >> 4;
}

static unsigned want_code(enum codec codec, float x, uint16_t scale)
{
    if (scale == 0 || scale == 0x7fc0)
        return codec == CODEC_INT4 ? 8 : 0;
    const float r = 1 / float_of((uint32_t)scale << 16);
    return nearest(codec, daz(x) * r);
}

static void expect_encoded(const float *x, void *tiles, enum codec codec, uint64_t elems)
{
    for (uint64_t b = 0; b < elems / 64; b++) {
        const uint16_t scale = scale_of(x + b * 64, codec), got = *scale_at(tiles, codec, b);
        if (scale != got)
            FAIL("%s: block %" PRIu64 " has scale %04x, expected %04x", codec_name(codec), b, got,
                 scale);
        for (unsigned i = 0; i < 64; i++) {
            const unsigned want = want_code(codec, x[b * 64 + i], scale);
            if (code_at(tiles, codec, b, i) != want)
                FAIL("%s: %a of scale %04x is code %02x, expected %02x", codec_name(codec),
                     (double)x[b * 64 + i], scale, code_at(tiles, codec, b, i), want);
        }
    }
}

/* -- Encoding -----------------------------------------------------------------------------------
 */

static void fill_values(float *x, uint64_t elems, uint64_t seed)
{
    uint64_t state = test_seed(seed);
    for (uint64_t i = 0; i < elems; i++) {
        const int range = (int)(i / 64 * 37 % 210) - 90; /* of the block */
        const uint64_t r = test_random(&state);
        x[i] = ldexpf((float)(int32_t)(r >> 32) * 0x1p-31f, range - (int)(r % 12));
        if (r / 16 % 19 == 0) /* right between two codes, perhaps */
            x[i] = ldexpf((float)((int)(r % 254) - 127) * 0.5f, range - 7);
    }
}

static void check_oracle(struct kern *k, const char *label, void *arg)
{
    enum { ELEMS = 36 * BLOCK }; /* more than a chunk */
    (void)label;
    (void)arg;
    float *x = array_new(ELEMS * sizeof *x);
    for (enum codec codec = FIRST_CODEC; codec <= LAST_CODEC; codec++)
        for (uint64_t seed = 1; seed <= 2; seed++) {
            uint8_t *tiles = array_new(codec_bytes(codec, ELEMS));
            if (seed == 1)
                fill_values(x, ELEMS, seed);
            else
                fill_awkward(x, ELEMS, /* wild= */ true, seed);
            encode(k, codec, x, ELEMS, tiles);
            expect_encoded(x, tiles, codec, ELEMS);
            free(tiles);
        }
    free(x);
}

TEST(codes_and_scales_are_those_of_the_oracle)
{
    devices_each(check_oracle, NULL);
}

static void encode_one(struct kern *k, enum codec codec, float first, float other, float *ret_first,
                       float *ret_other, uint16_t *ret_scale)
{
    uint8_t *tiles = array_new(codec_bytes(codec, BLOCK));
    float *x = array_new(BLOCK * sizeof *x);
    memset(x, 0, BLOCK * sizeof *x);
    x[70] = first;
    x[100] = other;
    encode(k, codec, x, BLOCK, tiles);
    decode("scalar", codec, tiles, BLOCK, SHD_F32, x);
    *ret_first = x[70];
    *ret_other = x[100];
    *ret_scale = *scale_at(tiles, codec, 1);
    EXPECT(x[0] == 0 && x[128] == 0); /* other blocks are not of it */
    free(tiles);
    free(x);
}

TEST(a_block_without_numbers_is_none_and_a_tiny_one_is_zero)
{
    static const float none[] = { NAN, INFINITY, -INFINITY, 0x1.000002p126f };
    for (const char *const *isa = kern_cpu_isas(); *isa != NULL; isa++) {
        struct kern *k = device_new(*isa, 1);
        for (enum codec codec = FIRST_CODEC; codec <= LAST_CODEC; codec++) {
            float x, y;
            uint16_t scale;
            for (size_t i = 0; i < ARRAY_SIZE(none); i++) {
                encode_one(k, codec, none[i], 1, &x, &y, &scale);
                EXPECT(isnan(x) && isnan(y) && scale == 0x7fc0);
            }
            encode_one(k, codec, 0x1p126f, 0, &x, &y, &scale);
            EXPECT_NEAR(x, 0x1p126, 0x1p119);
            EXPECT(y == 0);
            encode_one(k, codec, -0x1p-96f, 0x1p-149f, &x, &y, &scale);
            EXPECT_NEAR(x, -0x1p-96, 0x1p-103);
            EXPECT(y == 0);
            encode_one(k, codec, 0x1.fffffep-97f, 0x1p-149f, &x, &y, &scale);
            EXPECT(x == 0 && y == 0 && scale == 0);
            encode_one(k, codec, (float)largest[codec], -0.0f, &x, &y, &scale);
            EXPECT((double)x == largest[codec] && y == 0 && scale == 0x3f80);
        }
        k->ops->free(k);
    }
}

/* -- Decoding -----------------------------------------------------------------------------------
 */

/* Each code, of scales at the limits, the largest magnitude in each block. */
static void fill_tiles(void *tiles, enum codec codec, uint64_t elems)
{
    static const uint16_t scales[] = { 0x3f80, 0x3f81, 0x1001, 0x7701, 0x3a7f, 0x0000, 0x7fc0 };
    const unsigned top[] = { 0, 127, 0x7e, 15 };
    for (uint64_t b = 0; b < elems / 64; b++) {
        *scale_at(tiles, codec, b) = scales[b / 5 % ARRAY_SIZE(scales)];
        for (unsigned i = 0; i < 64; i++) {
            unsigned code = (unsigned)(b * 61 + i) % (codec == CODEC_INT4 ? 16 : 256);
            code = i == b % 64 ? top[codec] : is_code(codec, code) ? code : top[codec];
            uint8_t *tile = tile_of(tiles, codec, b);
            if (codec != CODEC_INT4) {
                tile[b % 32 * 64 + i] = (uint8_t)code;
                continue;
            }
            uint8_t *pair = &tile[b % 32 * 32 + i % 32];
            *pair = (uint8_t)(i < 32 ? (*pair & 0xf0) | code : (*pair & 15) | code << 4);
        }
    }
}

TEST(each_code_has_its_value_in_each_dtype)
{
    enum { ELEMS = 64 * BLOCK };
    float *want = array_new(ELEMS * sizeof *want), *got = array_new(ELEMS * sizeof *got);
    uint16_t *cast = array_new(ELEMS * sizeof *cast);
    struct kern *k = device_new("scalar", 1);
    for (enum codec codec = FIRST_CODEC; codec <= LAST_CODEC; codec++) {
        uint8_t *tiles = array_new(codec_bytes(codec, ELEMS));
        fill_tiles(tiles, codec, ELEMS);
        for (uint64_t i = 0; i < ELEMS; i++) {
            const float scale = float_of((uint32_t)*scale_at(tiles, codec, i / 64) << 16);
            want[i] = (float)(value_of(codec, code_at(tiles, codec, i / 64, i % 64)) *
                              (double)scale); /* exact */
        }
        for (const char *const *isa = kern_cpu_isas(); *isa != NULL; isa++) {
            decode(*isa, codec, tiles, ELEMS, SHD_F32, got);
            EXPECT_SAME_FLOATS(got, want, ELEMS, *isa);
            for (enum shd_dtype dtype = SHD_BF16; dtype <= SHD_F16; dtype++) {
                EXPECT_RUNS(cast, k, (&(struct kern_cast){ cast, dtype, want, ELEMS }));
                decode(*isa, codec, tiles, ELEMS, dtype, got);
                expect_same_array(got, cast, dtype, ELEMS, *isa);
            }
        }
        free(tiles);
    }
    k->ops->free(k);
    free(want);
    free(got);
    free(cast);
}

static void check_again(struct kern *k, const char *label, void *arg)
{
    enum { ELEMS = 64 * BLOCK };
    float *x = array_new(ELEMS * sizeof *x);
    (void)arg;
    for (enum codec codec = FIRST_CODEC; codec <= LAST_CODEC; codec++) {
        uint8_t *tiles = array_new(codec_bytes(codec, ELEMS));
        uint8_t *again = array_new(codec_bytes(codec, ELEMS));
        fill_tiles(tiles, codec, ELEMS);
        decode("scalar", codec, tiles, ELEMS, SHD_F32, x);
        encode(k, codec, x, ELEMS, again);
        for (uint64_t b = 0; b < ELEMS / 64; b++) {
            const uint16_t scale = *scale_at(tiles, codec, b);
            if (*scale_at(again, codec, b) != scale)
                FAIL("%s: %s: scale %04x is %04x again", label, codec_name(codec), scale,
                     *scale_at(again, codec, b));
            for (unsigned i = 0; scale != 0 && scale != 0x7fc0 && i < 64; i++)
                EXPECT_EQ(code_at(again, codec, b, i), code_at(tiles, codec, b, i));
        }
        free(tiles);
        free(again);
    }
    free(x);
}

TEST(codes_of_a_block_with_the_largest_one_are_encoded_again_to_the_same)
{
    devices_each(check_again, NULL);
}

/* -- Slices -------------------------------------------------------------------------------------
 */

static void check_slices(struct kern *k, const char *label, void *arg)
{
    enum { ELEMS = 75 * BLOCK, ROOM = ELEMS * 2 };
    /* Two that have nothing, one of a tile, one across chunks. */
    static const uint64_t first_of[] = { 0, 0, BLOCK, 3 * BLOCK, 3 * BLOCK, 70 * BLOCK };
    static const uint64_t bytes_of[] = { 0, 0, 4096, 12288, 12288, 159744 };
    (void)arg;
    float *x = array_new(ELEMS * sizeof *x);
    uint8_t *out = array_new(ROOM), *want = array_new(ROOM);
    fill_awkward(x, ELEMS, /* wild= */ true, 9);
    for (enum codec codec = FIRST_CODEC; codec <= LAST_CODEC; codec++) {
        struct kern_encode a = { x, out, codec, 0, ELEMS, first_of, bytes_of, 6, NULL };
        memset(want, 0x77, ROOM);
        memset(out, 0x77, ROOM);
        for (unsigned s = 0; s < 6; s++)
            encode(k, codec, x + first_of[s], (s < 5 ? first_of[s + 1] : ELEMS) - first_of[s],
                   want + bytes_of[s]);
        EXPECT_RUNS(encode, k, &a);
        if (memcmp(out, want, ROOM) != 0)
            FAIL("%s: %s: not as slice by slice", label, codec_name(codec));
        memset(out, 0x77, ROOM); /* a range of them, then the rest */
        a.first_elem = 2 * BLOCK;
        a.elems = 69 * BLOCK;
        EXPECT_RUNS(encode, k, &a);
        a.first_elem = 0;
        a.elems = 2 * BLOCK;
        EXPECT_RUNS(encode, k, &a);
        a.first_elem = 71 * BLOCK;
        a.elems = 4 * BLOCK;
        EXPECT_RUNS(encode, k, &a);
        EXPECT(memcmp(out, want, ROOM) == 0);
    }
    free(x);
    free(out);
    free(want);
}

TEST(slices_begin_where_they_are_said_to)
{
    devices_each(check_slices, NULL);
}

TEST(sizes_are_whole_lines)
{
    EXPECT_EQ(codec_bytes(CODEC_INT8, 2 * BLOCK), 4224);
    EXPECT_EQ(codec_bytes(CODEC_FP8, 2 * BLOCK), 4224);
    EXPECT_EQ(codec_bytes(CODEC_INT4, 2 * BLOCK), 2176);
    for (unsigned codec = 0; codec <= CODECS; codec++)
        EXPECT_EQ(codec_parse(codec_name((enum codec)codec)), (int)codec);
    EXPECT_EQ(codec_parse("int2"), -1);
}

/* -- Rounded at random ----------------------------------------------------------------------------
 */

static void encode_noisy(struct kern *k, const float *in, uint64_t elems, struct kern_noise noise,
                         void *out)
{
    static const uint64_t zero[] = { 0 };
    const struct kern_encode a = { in, out, CODEC_INT8, 0, elems, zero, zero, 1, &noise };
    EXPECT_RUNS(encode, k, &a);
}

struct noisy {
    uint8_t *want; /* of the first device */
    float *x;
};

/* The same bits on every device; of a part alone those of the whole; between the two codes next to
 * each value. */
static void check_noisy(struct kern *k, const char *label, void *arg)
{
    enum { ELEMS = 36 * BLOCK, PART = 5 * BLOCK };
    struct noisy *n = arg;
    const struct kern_noise all = { UINT64_C(0x1234567890), 7 * BLOCK };
    const struct kern_noise part = { all.key, all.first_index + PART };
    const uint64_t bytes = codec_bytes(CODEC_INT8, ELEMS);
    const uint64_t first_bytes = codec_bytes(CODEC_INT8, PART);
    uint8_t *got = array_new(bytes);
    encode_noisy(k, n->x, ELEMS, all, got);
    if (n->want == NULL) {
        n->want = array_new(bytes);
        memcpy(n->want, got, bytes);
    }
    if (memcmp(got, n->want, bytes) != 0)
        FAIL("%s: other codes", label);
    encode_noisy(k, n->x + PART, ELEMS - PART, part, got);
    EXPECT(memcmp(got, n->want + first_bytes, bytes - first_bytes) == 0);
    free(got);
}

TEST(noise_is_of_the_element_alone)
{
    enum { ELEMS = 36 * BLOCK };
    struct noisy n = { .x = array_new(ELEMS * sizeof(float)) };
    float *y = array_new(ELEMS * sizeof *y);
    unsigned down = 0, up = 0;
    fill_values(n.x, ELEMS, 4);
    devices_each(check_noisy, &n);
    decode("scalar", CODEC_INT8, n.want, ELEMS, SHD_F32, y);
    for (uint64_t i = 0; i < ELEMS; i++) {
        const uint16_t scale = *scale_at(n.want, CODEC_INT8, i / 64);
        const float r = 1 / float_of((uint32_t)scale << 16);
        const uint64_t at = 7 * BLOCK + i; /* first_index of check_noisy() */
        uint32_t words[4];
        philox_words(UINT64_C(0x1234567890), at / 64 * 8 + at % 8, words);
        const uint32_t k = words[at % 64 / 16] >> (at / 8 % 2 * 16) & 0xffff;
        const float by = ((float)k + 0.5f) * 0x1p-16f - 0.5f;
        if (scale != 0 && scale != 0x7fc0)
            EXPECT_EQ((int8_t)code_at(n.want, CODEC_INT8, i / 64, i % 64),
                      (int)fmaxf(-127, fminf(127, rintf(daz(n.x[i]) * r + by))));
        const float s = float_of((uint32_t)scale << 16);
        EXPECT_EQ(scale, scale_of(n.x + i / 64 * 64, CODEC_INT8));
        if (scale == 0 || isnan(s))
            continue;
        EXPECT(fabs((double)y[i] - (double)n.x[i]) <= 1.0001 * (double)s);
        down += y[i] < n.x[i];
        up += y[i] > n.x[i];
    }
    EXPECT(down > ELEMS / 4 && up > ELEMS / 4);
    free(n.want);
    free(n.x);
    free(y);
}

/* Of 4,096 draws the mean is within 5 deviations of the value, and a whole code is never another.
 */
TEST(the_mean_of_codes_is_the_value)
{
    enum { DRAWS = 4096 };
    struct kern *k = device_new(NULL, 1);
    float *x = array_new(BLOCK * sizeof *x), *y = array_new(BLOCK * sizeof *y);
    uint8_t *tiles = array_new(codec_bytes(CODEC_INT8, BLOCK));
    double sums[64] = { 0 };
    memset(x, 0, BLOCK * sizeof *x);
    for (unsigned i = 0; i < 63; i++)
        x[i] = (float)i * 1.37f - 40;
    x[3] = 11;
    x[63] = 127;
    for (uint64_t draw = 0; draw < DRAWS; draw++) {
        encode_noisy(k, x, BLOCK, (struct kern_noise){ draw, 0 }, tiles);
        decode("scalar", CODEC_INT8, tiles, BLOCK, SHD_F32, y);
        EXPECT(y[3] == 11 && y[63] == 127);
        for (unsigned i = 0; i < 64; i++)
            sums[i] += (double)y[i];
    }
    for (unsigned i = 0; i < 64; i++)
        EXPECT_NEAR(sums[i] / DRAWS, (double)x[i], 5 * 0.5 / sqrt(DRAWS));
    k->ops->free(k);
    free(x);
    free(y);
    free(tiles);
}

/* Sums of codes are sums of what they decode to. */
static void check_sums(struct kern *k, const char *label, void *arg)
{
    enum { ELEMS = 36 * BLOCK };
    float *x = array_new(ELEMS * sizeof *x), *got = array_new(ELEMS * sizeof *got);
    float *want = array_new(ELEMS * sizeof *want);
    uint8_t *tiles = array_new(codec_bytes(CODEC_INT8, ELEMS));
    (void)arg;
    for (uint64_t step = 0; step < 3; step++) {
        struct kern_sum one, other;
        fill_awkward(x, ELEMS, /* wild= */ step == 2, step);
        encode_noisy(k, x, ELEMS, (struct kern_noise){ step, 0 }, tiles);
        decode("scalar", CODEC_INT8, tiles, ELEMS, SHD_F32, x);
        const struct kern_accumulate coded = { .acc = got,
                                               .grad = tiles,
                                               .grad_dtype = SHD_F32,
                                               .grad_codec = CODEC_INT8,
                                               .elems = ELEMS,
                                               .first = step == 0,
                                               .sum = &one };
        const struct kern_accumulate plain = { .acc = want,
                                               .grad = x,
                                               .grad_dtype = SHD_F32,
                                               .elems = ELEMS,
                                               .first = step == 0,
                                               .sum = &other };
        one.finite = other.finite = true;
        fixsum_init(&one.sum);
        fixsum_init(&other.sum);
        EXPECT_RUNS(accumulate, k, &coded);
        EXPECT_RUNS(accumulate, k, &plain);
        EXPECT_SAME_FLOATS(got, want, ELEMS, label);
        EXPECT_EQ(one.finite, other.finite);
        EXPECT(!one.finite || memcmp(&one.sum, &other.sum, sizeof one.sum) == 0);
    }
    free(x);
    free(got);
    free(want);
    free(tiles);
}

TEST(sums_are_of_what_codes_decode_to)
{
    devices_each(check_sums, NULL);
}

/* -- Updates that publish nothing ---------------------------------------------------------------
 */

struct update_case {
    enum spec_optimizer o;
    const struct kern_run *runs;
    uint32_t run_count;
    uint64_t elems;
};

static void check_unpublished(struct kern *k, const char *label, void *arg)
{
    const struct update_case *c = arg;
    struct state want = state_new(c->elems, SHD_BF16, /* wild= */ false, /* skew= */ 0, 3);
    struct state got = state_new(c->elems, SHD_BF16, /* wild= */ false, /* skew= */ 0, 3);
    state_update(k, c->o, &want, c->runs, c->run_count);
    memset(got.out.base, 0x5a, got.out.bytes);
    got.dtype = (enum shd_dtype)0;
    state_update(k, c->o, &got, c->runs, c->run_count);
    for (uint64_t i = 0; i < got.out.bytes; i++)
        EXPECT_EQ(((uint8_t *)got.out.base)[i], 0x5a);
    EXPECT_SAME_FLOATS((float *)got.p.base, (float *)want.p.base, c->elems, label);
    EXPECT_SAME_FLOATS((float *)got.m.base, (float *)want.m.base, c->elems, label);
    state_free(&want);
    state_free(&got);
}

TEST(an_update_may_leave_publishing_to_a_codec)
{
    static const uint64_t sizes[] = { BLOCK, 130 * BLOCK }; /* one that would be streamed */
    for (unsigned i = 0; i < 2 * SPEC_OPTIMIZERS; i++) {
        struct kern_run runs[64];
        struct update_case c = { .o = (enum spec_optimizer)(SPEC_ADAMW + i % SPEC_OPTIMIZERS),
                                 .runs = runs,
                                 .elems = sizes[i / SPEC_OPTIMIZERS] };
        c.run_count = make_runs(c.elems, runs, 64, i);
        devices_each(check_unpublished, &c);
    }
}

/* -- Bad input ----------------------------------------------------------------------------------
 */

#define EXPECT_REFUSED(args, status, part)                               \
    do {                                                                 \
        struct shd_err refused = { 0 };                                  \
        EXPECT_STATUS(kern_encode(k, (args), NULL, &refused), (status)); \
        EXPECT_HAS(refused.text, (part));                                \
    } while (0)

TEST(tiles_are_not_cut)
{
    static _Alignas(64) float x[BLOCK];
    static _Alignas(64) uint8_t out[4096];
    static const uint64_t zero[] = { 0 }, one[] = { BLOCK };
    const struct kern_encode good = { x, out, CODEC_INT8, 0, BLOCK, zero, zero, 1, NULL };
    struct kern_encode a = good;
    struct kern *k = device_new(NULL, 1);
    a.elems = 64;
    EXPECT_REFUSED(&a, SHD_ERANGE, "64 elements");
    a = good;
    a.first_elem = 64;
    EXPECT_REFUSED(&a, SHD_ERANGE, "64 elements");
    a = good;
    a.codec = CODEC_NONE;
    EXPECT_REFUSED(&a, SHD_EINVAL, "codec 0");
    a.codec = (enum codec)4;
    EXPECT_REFUSED(&a, SHD_EINVAL, "codec 4");
    a = good;
    a.out = out + 2;
    EXPECT_REFUSED(&a, SHD_EINVAL, "not aligned to 64");
    a = good;
    a.first_of = one;
    EXPECT_REFUSED(&a, SHD_EINVAL, "not at 0");
    a = good;
    a.slices = 0;
    EXPECT_REFUSED(&a, SHD_EINVAL, "0 slices");
    a = good;
    a.noise = &(const struct kern_noise){ 1, 32 };
    EXPECT_REFUSED(&a, SHD_EINVAL, "noise from 32");
    a.noise = &(const struct kern_noise){ 1, 64 };
    a.codec = CODEC_FP8;
    EXPECT_REFUSED(&a, SHD_EINVAL, "codec 2 with noise");
    a = good;
    a.in = NULL;
    EXPECT_REFUSED(&a, SHD_EINVAL, "in is NULL");
    k->ops->free(k);
}

TEST_MAIN()
