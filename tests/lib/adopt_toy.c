#include "tests/lib/adopt_toy.h"

const char *kind_spec(const struct kind *k)
{
    static char json[4096];
    const char *plain = pt_spec(&(struct pt_model){ .name = "kept",
                                                    .publish = k->publish,
                                                    .frozen = k->frozen,
                                                    .ema = k->ema,
                                                    .whole = k->whole });
    const char *at = strstr(plain, "\"kind\": \"adamw\"");
    CHECK(at != NULL);
    snprintf(json, sizeof json, "%.*s%s%s", (int)(at - plain), plain, k->optimizer,
             at + strlen("\"kind\": \"adamw\""));
    return json;
}

long compute_ms;
_Atomic uint32_t adopt_steps;

struct pt_run run_of(const struct kind *k)
{
    return (struct pt_run){ .routed = k->routed,
                            .t = { .overflow_step = k->overflow_step, .compute_ms = compute_ms } };
}

int train_step(shd_model *m, struct pt_run *run, struct past *past, struct shd_err *e)
{
    char blob[32];
    struct shd_result result = { .size = sizeof result };
    const uint64_t step = shd_step(m);
    run->update = toy_update(step);
    run->update.blob = blob;
    run->update.blob_bytes = (size_t)snprintf(blob, sizeof blob, "after %d", (int)step);
    const int r = pt_step(m, run, toy_all_micros, TOY_MICROS, &result, e);
    run->update.blob = NULL;
    run->update.blob_bytes = 0;
    adopt_steps++;
    if (r == SHD_OK && result.step < STEPS) {
        past->result[result.step] = result;
        past->known[result.step] = true;
    }
    return r;
}

static int finish(shd_model *m, struct past *past, struct shd_err *e)
{
    char blob[32] = "", want[32];
    size_t bytes = 0;
    int r = shd_digest(m, past->hex, NULL, e);
    if (r == SHD_OK)
        r = shd_blob(m, blob, sizeof blob, &bytes, e);
    if (r != SHD_OK)
        return r;
    snprintf(want, sizeof want, "after %d", (int)STEPS - 1);
    EXPECT_EQ(bytes, strlen(want));
    EXPECT(memcmp(blob, want, bytes) == 0);
    return SHD_OK;
}

bool adopt_train(const char *address, const struct kind *k, struct past *past, struct shd_err *e)
{
    shd_session *s = NULL;
    shd_model *m = NULL;
    struct pt_run run = run_of(k);
    int r = try_connect(address, TIMEOUT_MS, &s, e);
    if (r == SHD_OK)
        r = shd_model_open(s, kind_spec(k), &m, e);
    while (r == SHD_OK && shd_step(m) < STEPS)
        r = train_step(m, &run, past, e);
    if (r == SHD_OK)
        r = finish(m, past, e);
    shd_close(s);
    return r == SHD_OK;
}

void reference(const struct kind *k, struct past *ret)
{
    struct shd_err e = { 0 };
    *ret = (struct past){ .known = { false } };
    if (!adopt_train("local:", k, ret, &e))
        FAIL("reference: %s", e.text);
}

void adopt_expect_same(const struct past *got, const struct past *want)
{
    EXPECT_STR(got->hex, want->hex);
    for (uint32_t i = 0; i < STEPS; i++) {
        if (!got->known[i])
            continue; /* whoever would have been told was not there any more */
        EXPECT_EQ(got->result[i].skipped, want->result[i].skipped);
        for (int n = 0; n < 2; n++)
            EXPECT(got->result[i].metrics[n] == want->result[i].metrics[n]);
        EXPECT(got->result[i].skipped || got->result[i].grad_norm == want->result[i].grad_norm);
    }
}
