/* Plans as anybody may write them: refused, or there and back the same, and run to the end with the
 * right result, on numbers and on the simulator's clock, whole or cut to any number of
 * micro-batches. Input: which model (2 bytes), then the plan's JSON. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

#include "client/plan/plan_check.h"
#include "client/plan/plan_own.h"
#include "client/plan/plan_text.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/json.h"
#include "tests/lib/plan_run.h"

#define UNITS_MAX  4u
#define HEAD_BYTES 2u

struct model {
    struct spec spec;
    struct spec_unit units[UNITS_MAX];
    struct spec_tensor tensors[UNITS_MAX];
};

/* Bits of how: a head that uses the first unit, one before it that does, a frozen one, gradients
 * in groups, parameters in bf16. */
static void model_make(struct model *m, uint8_t size, uint8_t how)
{
    static char names[UNITS_MAX][4] = { "a", "b", "c", "d" };
    *m = (struct model){ .spec = { .unit_count = 1 + size % UNITS_MAX,
                                   .accumulate = (how & 8) != 0 ? 2 : 1,
                                   .publish = (how & 16) != 0 ? SHD_BF16 : SHD_F32,
                                   .grad_dtype = SHD_F32 } };
    m->spec.name = names[0];
    m->spec.units = m->units;
    m->spec.tensors = m->tensors;
    m->spec.tensor_count = m->spec.unit_count;
    for (uint32_t u = 0; u < m->spec.unit_count; u++) {
        const uint32_t back = m->spec.unit_count - u;
        m->units[u] = (struct spec_unit){ .name = names[u], .first_tensor = u, .tensor_count = 1 };
        m->units[u].frozen = (how & 4) != 0 && u == 1;
        m->tensors[u] = (struct spec_tensor){ .unit = u, .elems = 1000 * (u + 1) };
        if (u > 0 && ((back == 1 && (how & 1) != 0) || (back == 2 && (how & 2) != 0)))
            m->units[u].uses[m->units[u].uses_count++] = 0;
    }
}

/* -- What holds of a plan that is taken -------------------------------------------------------- */

static void check(int r, const struct shd_err *e)
{
    if (r != SHD_OK)
        fprintf(stderr, "%s\n", e->text);
    CHECK(r == SHD_OK);
}

static void there_and_back(const struct plan_own *own, const struct spec *spec)
{
    struct shd_err e = { 0 };
    struct plan_own *again;
    char *text, *text_again;
    check(plan_text_write(spec, &own->policy, &own->plan, &text, &e), &e);
    check(plan_own_new(spec, text, strlen(text), &again, &e), &e);
    CHECK(again->plan.op_count == own->plan.op_count && again->plan.micros == own->plan.micros);
    CHECK(memcmp(again->plan.ops, own->plan.ops, own->plan.op_count * sizeof *own->plan.ops) == 0);
    check(plan_text_write(spec, &again->policy, &again->plan, &text_again, &e), &e);
    CHECK(strcmp(text, text_again) == 0);
    plan_own_free(again);
    free(text);
    free(text_again);
}

static void cut(const struct plan_own *own, struct spec *spec, uint32_t micros)
{
    struct shd_err e = { 0 };
    struct plan plan;
    struct plan_policy policy = own->policy;
    policy.strategy = PLAN_OWN;
    check(plan_own_fit(own, spec, micros, &plan, &e), &e);
    CHECK(plan.cost.live_units_max <= own->plan.cost.live_units_max);
    CHECK(plan.cost.live_grads_max <= own->plan.cost.live_grads_max);
    check(plan_check(&plan, spec, &policy, /* trace= */ NULL, &e), &e);
    check(plan_run(&plan, spec, &policy, &e), &e);
    plan_free(&plan);
}

/* Where units run in another order, this is what plans are built by. */
static void departs(const struct plan_own *own, const struct spec *spec)
{
    struct shd_err e = { 0 };
    struct plan plan;
    const struct plan_policy policy = plan_own_policy(own);
    check(plan_build(spec, &policy, /* trace= */ NULL, own->plan.micros, &plan, &e), &e);
    plan_free(&plan);
}

static int planfile_input(const uint8_t *data, size_t size)
{
    struct fuzz_in in = { data, size };
    struct shd_err e = { 0 };
    struct model m;
    struct plan_own *own;
    const uint8_t units = fuzz_u8(&in), how = fuzz_u8(&in);
    model_make(&m, units, how);
    const int r = plan_own_new(&m.spec, (const char *)in.at, in.left, &own, &e);
    if (r != SHD_OK) {
        fuzz_check_refusal(r, &e);
        return 0;
    }
    const uint32_t a = m.spec.accumulate, all = own->plan.micros;
    there_and_back(own, &m.spec);
    departs(own, &m.spec);
    check(plan_run(&own->plan, &m.spec, &own->policy, &e), &e);
    if (all <= 8) {
        check(plan_run_times(&own->plan, &m.spec, &e), &e);
        cut(own, &m.spec, 0);
        cut(own, &m.spec, a);
        cut(own, &m.spec, all);
        cut(own, &m.spec, all + a);
        cut(own, &m.spec, 2 * all + a);
    }
    plan_own_free(own);
    return 0;
}

/* -- Seeds and edits --------------------------------------------------------------------------- */

/* Each strategy's plans of each model. */
static size_t planfile_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    struct shd_err e = { 0 };
    struct plan plan;
    struct model m;
    char *text;
    const uint8_t units = (uint8_t)(index / 2 % UNITS_MAX), how = (uint8_t)(index * 7 % 32);
    const struct plan_policy policy = {
        .strategy = (enum plan_strategy)(index % 4),
        .backward_prefetch = (enum plan_backward_prefetch)(index / 4 % 3),
        .forward_prefetch = index / 3 % 4,
    };
    if (index >= 48)
        return 0;
    model_make(&m, units, how);
    check(plan_build(&m.spec, &policy, NULL, (1 + index % 2) * m.spec.accumulate, &plan, &e), &e);
    struct plan_policy said = policy;
    if (index % 5 != 0)
        said.strategy = PLAN_OWN; /* so that edits are taken */
    if (index % 3 == 0)
        said.max_live_units = plan.cost.live_units_max;
    if (index % 3 == 1)
        said.max_live_bytes = plan.cost.live_param_bytes_max;
    check(plan_text_write(&m.spec, &said, &plan, &text, &e), &e);
    plan_free(&plan);
    const size_t bytes = strlen(text);
    CHECK(HEAD_BYTES + bytes <= bytes_max);
    buf[0] = units;
    buf[1] = how;
    memcpy(buf + HEAD_BYTES, text, bytes); /* NOLINT(bugprone-not-null-terminated-result) */
    free(text);
    return HEAD_BYTES + bytes;
}

/* An edit of the operations where the text is a plan, else one of the JSON. */
static size_t planfile_mutate(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    struct shd_err e = { 0 };
    struct model m;
    struct plan plan;
    struct plan_policy policy;
    char *text = NULL;
    uint64_t rng = seed + 1;
    if (size < HEAD_BYTES || max < HEAD_BYTES + 16 || seed % 16 == 0)
        return fuzz_mutate(data, size, max);
    uint8_t *json = data + HEAD_BYTES;
    model_make(&m, data[0], data[1]);
    if (seed % 4 == 0 || plan_text_parse((const char *)json, size - HEAD_BYTES, &m.spec, &policy,
                                         &plan, &e) != SHD_OK)
        return HEAD_BYTES + mutate_json(json, size - HEAD_BYTES, max - HEAD_BYTES, seed / 16);
    for (unsigned i = seed % 3; plan.op_count > 1 && i < 3; i++)
        plan_edit(&plan, &m.spec, &rng);
    const int r = plan_text_write(&m.spec, &policy, &plan, &text, &e);
    plan_free(&plan);
    const size_t bytes = r == SHD_OK ? strlen(text) : 0;
    if (bytes > 0 && HEAD_BYTES + bytes <= max) {
        memcpy(json, text, bytes); /* NOLINT(bugprone-not-null-terminated-result) */
        size = HEAD_BYTES + bytes;
    }
    free(text);
    return size;
}

const struct fuzz_target fuzz_planfile = { "planfile", planfile_input, planfile_seed,
                                           planfile_mutate };
