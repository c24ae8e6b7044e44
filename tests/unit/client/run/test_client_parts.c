/* Gradients from arrays of their own: any strides, dtypes, order and scale, as if they had been
 * written to shd_grad(); and no limit on how many units are returned late. */
#include <signal.h>

#include "client/session/session.h"
#include "tests/lib/client_remote.h"

/* One unit of tensors of ranks 1 to 4, one of two matrices. */
static const char spec[] =
    "{ \"name\": \"parts\", \"micro_batches\": 2, \"optimizer\": { \"kind\": \"sgd\" },"
    "  \"units\": [ { \"name\": \"a\", \"tensors\": ["
    "    { \"name\": \"vector\", \"shape\": [37] },"
    "    { \"name\": \"matrix\", \"shape\": [33, 300] },"
    "    { \"name\": \"cube\", \"shape\": [3, 1, 5, 7] },"
    "    { \"name\": \"kernel\", \"shape\": [4, 3, 5, 2] } ] },"
    "  { \"name\": \"b\", \"tensors\": [ { \"name\": \"last\", \"shape\": [2, 2] } ] } ] }";

#define RANK_MAX  4
#define ELEMS_MAX 20000u

struct array { /* of a tensor, as torch would have it */
    int64_t shape[RANK_MAX], strides[RANK_MAX];
    uint32_t rank;
    uint64_t elems;
    _Alignas(16) uint8_t data[ELEMS_MAX * sizeof(float)];
};

/* Dense, with the dimensions in memory in this order, the outermost first. */
static void array_init(struct array *a, uint32_t rank, const int64_t *shape, const uint32_t *order)
{
    a->rank = rank;
    a->elems = 1;
    for (uint32_t i = rank; i-- > 0;) {
        const uint32_t d = order != NULL ? order[i] : i;
        a->shape[d] = shape[d];
        a->strides[d] = (int64_t)a->elems;
        a->elems *= (uint64_t)shape[d];
    }
}

/* Values that bf16 and f16 have exactly. */
static float value(uint32_t salt, uint64_t i)
{
    return (float)((int)((i * 7 + salt * 13) % 255) - 127) / 16;
}

static void put(struct array *a, enum shd_dtype dtype, uint64_t at, float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint16_t bf16 = (uint16_t)(bits >> 16);
    const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    const uint16_t f16 = (uint16_t)(sign | (magnitude == 0 ? 0 : (magnitude >> 13) - (112u << 10)));
    if (dtype == SHD_F32)
        memcpy(a->data + at * 4, &x, sizeof x);
    else
        memcpy(a->data + at * 2, dtype == SHD_BF16 ? &bf16 : &f16, sizeof bf16);
}

/* Element i, in row-major order, is value(salt, i). */
static void array_fill(struct array *a, enum shd_dtype dtype, uint32_t salt)
{
    for (uint64_t i = 0; i < a->elems; i++) {
        uint64_t rest = i;
        int64_t at = 0;
        for (uint32_t d = a->rank; d-- > 0; rest /= (uint64_t)a->shape[d])
            at += (int64_t)(rest % (uint64_t)a->shape[d]) * a->strides[d];
        put(a, dtype, (uint64_t)at, value(salt, i));
    }
}

static shd_model *open_parts(shd_session *s)
{
    struct shd_err e = { 0 };
    shd_model *m;
    EXPECT_OK(shd_model_open(s, spec, &m, &e), &e);
    return m;
}

/* The first unit's parameters after one step of SGD with rate 1: what was returned, and all else
 * the same. */
static void expect_gradient(shd_model *m, const uint32_t *salts, double scale)
{
    struct shd_err e = { 0 };
    const struct shd_update update = { .size = sizeof update, .lr = 1 };
    const void *params;
    EXPECT_OK(shd_return_none(m, 0, 1, &e), &e);
    for (uint32_t u = 0; u < 2; u++)
        EXPECT_OK(shd_return_none(m, 1, u, &e), &e);
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
    EXPECT_OK(shd_acquire(m, 0, &params, &e), &e);
    for (uint32_t t = 0; t < 4; t++) {
        struct shd_tensor tensor = { .size = sizeof tensor };
        shd_tensor_get(m, t, &tensor, NULL);
        const float *got = (const float *)params + tensor.offset_elems;
        for (uint64_t i = 0; i < tensor.elems; i++) {
            const float want = salts[t] == 0 ? 0 : -(float)scale * value(salts[t], i) / 2;
            if (got[i] != want)
                FAIL("%s[%" PRIu64 "] is %g, not %g", tensor.name, i, (double)got[i], (double)want);
        }
    }
    shd_release(m, 0);
}

static struct array arrays[4];

static void fill_arrays(enum shd_dtype dtype, bool odd)
{
    static const int64_t vector[] = { 37 }, matrix[] = { 33, 300 }, cube[] = { 3, 1, 5, 7 },
                         kernel[] = { 4, 3, 5, 2 };
    static const uint32_t turned[] = { 1, 0 }, mixed[] = { 2, 0, 3, 1 }, last[] = { 0, 2, 3, 1 };
    array_init(&arrays[0], 1, vector, NULL);
    array_init(&arrays[1], 2, matrix, odd ? turned : NULL);
    array_init(&arrays[2], 4, cube, odd ? mixed : NULL);
    array_init(&arrays[3], 4, kernel, odd ? last : NULL); /* channels_last */
    if (odd) { /* every second element, and of a dimension of one any stride will do */
        arrays[0].strides[0] = 2;
        arrays[2].strides[1] = -1000;
    }
    for (uint32_t t = 0; t < 4; t++)
        array_fill(&arrays[t], dtype, t + 1);
}

static void expect_returned(shd_session *s, enum shd_dtype dtype, bool odd, double scale)
{
    static const uint32_t salts[] = { 1, 2, 3, 4 };
    struct shd_err e = { 0 };
    struct shd_part parts[4];
    shd_model *m = open_parts(s);
    fill_arrays(dtype, odd);
    for (uint32_t t = 0; t < 4; t++) /* in another order than the spec's */
        parts[3 - t] = (struct shd_part){ .size = sizeof *parts,
                                          .tensor = t,
                                          .dtype = dtype,
                                          .data = arrays[t].data,
                                          .strides = odd ? arrays[t].strides : NULL };
    EXPECT_OK(shd_return_parts(m, 0, 0, parts, 4, scale, &e), &e);
    expect_gradient(m, salts, scale);
    shd_model_close(m);
}

static shd_session *connect_local(void)
{
    struct shd_err e = { 0 };
    shd_session *s;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    return s;
}

TEST(any_strides_and_dtypes_are_copied_and_scaled)
{
    static const enum shd_dtype dtypes[] = { SHD_F32, SHD_BF16, SHD_F16 };
    shd_session *s = connect_local();
    for (size_t d = 0; d < ARRAY_SIZE(dtypes); d++)
        for (int odd = 0; odd < 2; odd++) {
            expect_returned(s, dtypes[d], odd != 0, 1);
            expect_returned(s, dtypes[d], odd != 0, 0.5);
        }
    shd_close(s);
}

TEST(tensors_without_a_part_are_zero)
{
    static const uint32_t salts[] = { 1, 0, 0, 0 };
    struct shd_err e = { 0 };
    shd_session *s = connect_local();
    shd_model *m = open_parts(s);
    fill_arrays(SHD_F32, false);
    const struct shd_part parts[] = {
        { .size = sizeof *parts, .tensor = 0, .dtype = SHD_F32, .data = arrays[0].data },
        { .size = sizeof *parts, .tensor = 2, .data = NULL }, /* of what type is all one */
    };
    EXPECT_OK(shd_return_parts(m, 0, 0, parts, 2, 1, &e), &e);
    expect_gradient(m, salts, 1);
    shd_close(s);
}

TEST(wrong_parts_are_named_and_nothing_is_returned)
{
    struct shd_err e = { 0 };
    shd_session *s = connect_local();
    shd_model *m = open_parts(s);
    struct shd_part p[2] = { { .size = sizeof *p, .tensor = 0, .dtype = SHD_F32 },
                             { .size = sizeof *p, .tensor = 4, .dtype = SHD_F32 } };
    EXPECT_STATUS(shd_return_parts(m, 0, 0, p, 2, 1, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "part 1 is of tensor 4, unit 0 'a' has 0 to 3");
    p[1].tensor = 0;
    EXPECT_STATUS(shd_return_parts(m, 0, 0, p, 2, 1, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "parts 0 and 1 are both of tensor 'vector'");
    p[0].dtype = 9;
    p[0].data = p;
    EXPECT_STATUS(shd_return_parts(m, 0, 0, p, 1, 1, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "dtype 9");
    p[0].dtype = SHD_F32;
    p[0].data = NULL;
    EXPECT_STATUS(shd_return_parts(m, 0, 0, p, 1, (double)INFINITY, &e), SHD_EINVAL);
    EXPECT_STATUS(shd_return_parts(m, 0, 0, NULL, 1, 1, &e), SHD_EINVAL);
    p[0].size = 8;
    EXPECT_STATUS(shd_return_parts(m, 0, 0, p, 1, 1, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "shd_part.size of part 0 is 8");
    EXPECT_STATUS(shd_return_parts(m, 0, 2, p, 0, 1, &e), SHD_ERANGE);
    EXPECT_STATUS(shd_return_parts(m, 2, 0, p, 0, 1, &e), SHD_ERANGE);
    const struct shd_update update = { .size = sizeof update, .lr = 1 };
    EXPECT_STATUS(shd_commit(m, &update, NULL, &e), SHD_EINVAL); /* nothing came in */
    EXPECT_HAS(e.text, "micro-batch 0");
    shd_close(s);
}

/* -- With daemons ----------------------------------------------------------------------------- */

#define UNITS 70u /* more than there can be slots */

static const char *many_units(uint32_t accumulate)
{
    static char json[20000];
    int at = snprintf(json, sizeof json,
                      "{ \"name\": \"many%" PRIu32
                      "\", \"micro_batches\": 2, \"accumulate\": %" PRIu32
                      ", \"optimizer\": { \"kind\": \"sgd\" }, \"units\": [",
                      accumulate, accumulate);
    for (uint32_t u = 0; u < UNITS; u++)
        at += snprintf(json + at, sizeof json - (size_t)at,
                       "%s{ \"name\": \"u%" PRIu32 "\", \"tensors\": [ { \"name\": \"t%" PRIu32
                       "\", \"shape\": [%" PRIu32 "] } ] }",
                       u > 0 ? "," : "", u, u, 100 + u);
    snprintf(json + at, sizeof json - (size_t)at, "] }");
    return json;
}

static void return_late(shd_model *m, uint32_t micro)
{
    static float grad[100 + UNITS];
    struct shd_err e = { 0 };
    for (uint32_t u = UNITS; u-- > 0;) {
        for (uint32_t i = 0; i < 100 + u; i++)
            grad[i] = value(u + micro, i);
        const struct shd_part part = {
            .size = sizeof part, .tensor = u, .dtype = SHD_F32, .data = grad
        };
        EXPECT_OK(shd_return_parts(m, micro, u, &part, 1, 1, &e), &e);
    }
}

static void train_late(shd_session *s, uint32_t accumulate, const struct shd_policy *policy,
                       char hex[65])
{
    struct shd_err e = { 0 };
    const struct shd_update update = { .size = sizeof update, .lr = 0.5, .clip_norm = 1 };
    shd_model *m;
    EXPECT_OK(shd_model_open(s, many_units(accumulate), &m, &e), &e);
    if (policy != NULL)
        EXPECT_OK(shd_set_policy(m, policy, &e), &e);
    for (uint32_t step = 0; step < 2; step++) {
        for (uint32_t micro = 0; micro < 2; micro++)
            return_late(m, micro);
        EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
    }
    digest_of(m, hex);
    shd_model_close(m);
}

TEST(any_number_of_units_is_returned_late_with_the_same_bits)
{
    const struct shd_policy copy = { .size = sizeof copy, .path = SHD_PATH_COPY };
    char want[65], got[65];
    fixture_start(&daemons, 2, NULL);
    for (uint32_t accumulate = 1; accumulate <= 2; accumulate++) {
        shd_session *local = connect_local();
        train_late(local, accumulate, NULL, want);
        shd_close(local);
        shd_session *s = attach(PATIENT_MS);
        train_late(s, accumulate, accumulate == 1 ? NULL : &copy, got);
        EXPECT_STR(got, want);
        shd_close(s);
    }
    fixture_stop(&daemons);
}

static uint32_t calls;

static int on_idle(void *ctx)
{
    (void)ctx;
    return calls > 0 && ++calls == 3;
}

/* Broken off while slots are out it has written nothing that it would not write again. */
TEST(return_that_is_broken_off_can_be_repeated)
{
    struct shd_err e = { 0 };
    char want[65], got[65];
    shd_session *local = connect_local(), *s;
    train_late(local, 1, NULL, want);
    shd_close(local);
    fixture_start(&daemons, 2, NULL);
    const struct shd_options options = { .size = sizeof options,
                                         .address = daemons.address,
                                         .slots = 2,
                                         .timeout_ms = PATIENT_MS,
                                         .idle = on_idle };
    const struct shd_update update = { .size = sizeof update, .lr = 0.5, .clip_norm = 1 };
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    shd_model *m;
    EXPECT_OK(shd_model_open(s, many_units(1), &m, &e), &e);
    static float grad[100];
    const struct shd_part part = {
        .size = sizeof part, .tensor = 0, .dtype = SHD_F32, .data = grad
    };
    for (uint32_t i = 0; i < 100; i++)
        grad[i] = value(0, i);
    kill(daemons.pids[1], SIGSTOP);
    calls = 1;
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < 4; i++)
        r = shd_return_parts(m, 0, 0, &part, 1, 1, &e);
    EXPECT_STATUS(r, SHD_ECANCELED);
    calls = 0;
    kill(daemons.pids[1], SIGCONT);
    for (uint32_t step = 0; step < 2; step++) {
        for (uint32_t micro = 0; micro < 2; micro++)
            return_late(m, micro);
        EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
    }
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST_MAIN()
