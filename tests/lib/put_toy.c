#include "tests/lib/put_toy.h"

const struct pt_model put_pt = { .name = "put", .publish = "bf16", .frozen = true };

/* Parameters of embed, of the frozen tower and of the head; moments of embed and h0. */
const uint8_t some_arrays[PT_UNITS] = { [0] = SHD_PUT_PARAMS | SHD_PUT_MOMENT1 | SHD_PUT_MOMENT2,
                                        [1] = SHD_PUT_MOMENT2,
                                        [2] = SHD_PUT_PARAMS,
                                        [6] = SHD_PUT_PARAMS };

const uint64_t put_updates[PT_UNITS] = {
    3, 0, 77, PUT_UPDATES, PUT_UPDATES, PUT_UPDATES, PUT_UPDATES,
};

float value_of(uint64_t salt, uint32_t unit, uint32_t array, uint64_t i)
{
    const float x = toy_noise(salt, array, unit, i);
    return array == SHD_MOMENT2 ? x * x * 0.01f : x;
}

int fill_values(void *ctx, uint32_t unit, enum shd_array array, float *values)
{
    struct values *v = ctx;
    const int call = v->calls++;
    if (call == v->fail_at)
        return 7;
    if (call == v->lose_at) {
        v->lose_at = -1;
        fixture_restart(&daemons, v->daemon);
    }
    for (uint64_t i = 0; i < shd_unit_elems(v->m, unit); i++)
        values[i] = value_of(v->salt, unit, array, i);
    return 0;
}

struct values values_of(const shd_model *m, uint64_t salt)
{
    return (struct values){ .m = m, .salt = salt, .fail_at = -1, .lose_at = -1 };
}

int put_some(shd_model *m, struct values *v, bool *ret_counts, struct shd_err *e)
{
    const struct shd_put_options options = { .size = sizeof options,
                                             .arrays = some_arrays,
                                             .fill = fill_values,
                                             .ctx = v,
                                             .set_updates = true,
                                             .updates = PUT_UPDATES,
                                             .unit_updates = put_updates };
    return shd_put(m, &options, ret_counts, e);
}

void put_ok(shd_model *m, uint64_t salt)
{
    struct shd_err e = { 0 };
    struct values v = values_of(m, salt);
    bool counts = false;
    EXPECT_OK(put_some(m, &v, &counts, &e), &e);
    EXPECT(counts);
}

shd_model *open_pt(shd_session *s)
{
    return open_pt_of(s, &put_pt);
}

void expect_put(shd_model *m, uint64_t salt)
{
    struct shd_err e = { 0 };
    for (uint32_t u = 0; u < PT_UNITS; u++)
        for (uint32_t a = 0; a < 3; a++) {
            uint64_t step, updates;
            if ((some_arrays[u] >> a & 1) == 0)
                continue;
            float *got = malloc(shd_unit_elems(m, u) * sizeof *got);
            EXPECT_OK(shd_get(m, u, (enum shd_array)a, got, &step, &updates, &e), &e);
            EXPECT_EQ(step, shd_step(m));
            EXPECT_EQ(updates, shd_unit_frozen(m, u) ? PUT_UPDATES : put_updates[u]);
            uint64_t at = 0, differ = 0;
            for (uint32_t t = 0; t < shd_tensors(m); t++) {
                struct shd_tensor tensor = { .size = sizeof tensor };
                shd_tensor_get(m, t, &tensor, NULL);
                if (tensor.unit != u)
                    continue;
                for (; at < tensor.offset_elems; at++)
                    differ += got[at] != 0;
                for (; at < tensor.offset_elems + tensor.elems; at++)
                    differ += got[at] != value_of(salt, u, a, at);
            }
            EXPECT_EQ(differ, 0);
            free(got);
        }
}

void put_reference(uint32_t before, bool put, uint32_t rest, char hex[65])
{
    struct shd_err e = { 0 };
    shd_session *s;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_pt(s);
    train_pt(m, before);
    if (put)
        put_ok(m, 9);
    train_pt(m, rest);
    digest_of(m, hex);
    shd_close(s);
}

void return_all(shd_model *m, uint32_t micro)
{
    struct shd_err e = { 0 };
    for (uint32_t u = PT_UNITS; u-- > 0;) {
        float *grad;
        if (shd_unit_frozen(m, u))
            continue;
        EXPECT_OK(shd_grad(m, micro, u, &grad, &e), &e);
        for (uint64_t i = 0; i < shd_unit_elems(m, u); i++)
            grad[i] = 1;
        EXPECT_OK(shd_return(m, micro, u, &e), &e);
    }
}
