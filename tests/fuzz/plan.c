/* Plans of any units under any policy and any trace: refused, or what plan_check() agrees with.
 * Input: units with sizes, uses and frozenness, then the policy, then the trace. */
#include "tests/fuzz/fuzz.h"

#include "client/plan/plan.h"
#include "client/plan/plan_check.h"

#define UNITS_MAX 9u
#define TRACE_MAX 12u

struct model {
    struct spec spec;
    struct spec_unit units[UNITS_MAX];
    struct spec_tensor tensors[UNITS_MAX];
    uint32_t order[TRACE_MAX];
};

static void model_read(struct model *m, struct fuzz_in *in)
{
    static char name[] = "u";
    *m = (struct model){ 0 };
    m->spec = (struct spec){ .name = name,
                             .unit_count = fuzz_below(in, UNITS_MAX) + 1,
                             .accumulate = fuzz_below(in, 5),
                             .publish = (enum shd_dtype)(fuzz_below(in, 3) + SHD_F32),
                             .units = m->units,
                             .tensors = m->tensors };
    m->spec.tensor_count = m->spec.unit_count;
    for (uint32_t u = 0; u < m->spec.unit_count; u++) {
        const uint8_t how = fuzz_u8(in), uses = fuzz_u8(in);
        m->units[u] = (struct spec_unit){
            .name = name, .first_tensor = u, .tensor_count = 1, .frozen = (how & 3) == 3
        };
        m->tensors[u] = (struct spec_tensor){ .unit = u, .elems = (uint64_t)(how >> 2) * 100 + 1 };
        for (uint32_t used = 0; used < u && used < 8; used++) /* earlier units, each once */
            if ((uses >> used & 1) != 0)
                m->units[u].uses[m->units[u].uses_count++] = used;
    }
}

static struct plan_policy policy_read(struct fuzz_in *in)
{
    const uint8_t how = fuzz_u8(in);
    return (struct plan_policy){ .strategy = (enum plan_strategy)(how % 8),
                                 .backward_prefetch = (enum plan_backward_prefetch)(how >> 3 & 3),
                                 .grad_dtype = (enum shd_dtype)(how >> 5),
                                 .forward_prefetch = fuzz_u8(in),
                                 .max_live_units = fuzz_u8(in) % 16,
                                 .max_live_bytes = fuzz_bytes(in, 2) };
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_in in = { data, size };
    struct shd_err e = { 0 };
    struct model m;
    struct plan plan;
    model_read(&m, &in);
    const struct plan_policy policy = policy_read(&in);
    const uint32_t micros = fuzz_below(&in, 9);
    const bool traced = (fuzz_u8(&in) & 1) != 0;
    struct plan_trace trace = { .forward = m.order };
    while (in.left > 0 && trace.count < TRACE_MAX)
        m.order[trace.count++] = fuzz_u8(&in) % (UNITS_MAX + 1); /* doubled and unknown ones too */
    const int r = plan_build(&m.spec, &policy, traced ? &trace : NULL, micros, &plan, &e);
    if (r != SHD_OK) {
        fuzz_check_refusal(r, &e);
        return 0;
    }
    const int checked = plan_check(&plan, &m.spec, &policy, traced ? &trace : NULL, &e);
    if (checked != SHD_OK)
        fprintf(stderr, "%s\n", e.text);
    CHECK(checked == SHD_OK);
    plan_free(&plan);
    return 0;
}

size_t fuzz_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    const size_t units = index % UNITS_MAX + 1;
    if (index >= 48 || bytes_max < 64)
        return 0;
    memset(buf, 0, 64);
    buf[0] = (uint8_t)(units - 1);
    buf[1] = (uint8_t)(index % 3);
    for (size_t u = 0; u < units; u++) {
        buf[3 + 2 * u] = (uint8_t)(index * 13 + u * 40);
        buf[4 + 2 * u] = (uint8_t)(index % 2 != 0 ? 1u << u % 8 : 0);
    }
    uint8_t *p = buf + 3 + 2 * units;
    p[0] = (uint8_t)(index % 4 | (index / 4 % 3) << 3);
    p[1] = (uint8_t)(index % 5);
    p[2] = index % 7 == 6 ? 3 : 0;
    p[5] = (uint8_t)(index % 3 == 0 ? 1 : index % 3 * 2);
    p[6] = index % 4 == 1;
    for (size_t u = 0; u < units; u++)
        p[7 + u] = (uint8_t)(units - 1 - u);
    return (size_t)(p - buf) + 7 + units;
}
