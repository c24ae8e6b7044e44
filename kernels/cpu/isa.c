/* See isa.h. */
#include "kernels/cpu/isa.h"

#include <cpuid.h>
#include <pthread.h>
#include <string.h>

#include "proto/base/check.h"

/* The instruction sets, worst first. */
static const struct cpu_isa *const isas[] = { &cpu_isa_scalar, &cpu_isa_avx2, &cpu_isa_avx512 };

/* Not in every compiler's __builtin_cpu_supports(). */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

static bool isa_here(const struct cpu_isa *isa)
{
    __builtin_cpu_init();
    if (isa == &cpu_isa_scalar)
        return true;
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    if (isa == &cpu_isa_avx2)
        return avx2;
    CHECK(isa == &cpu_isa_avx512);
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

int cpu_isa_find(const char *name, const struct cpu_isa **ret_isa, struct shd_err *e)
{
    for (size_t i = ARRAY_SIZE(isas); i-- > 0;) {
        const bool here = isa_here(isas[i]);
        if (name == NULL ? !here : strcmp(name, isas[i]->name) != 0)
            continue;
        if (!here)
            return err_set(e, SHD_ENOTSUP, "this CPU does not have all that isa '%s' needs", name);
        *ret_isa = isas[i];
        return SHD_OK;
    }
    return err_set(e, SHD_EINVAL, "no isa '%s': it is scalar, avx2 or avx512", name);
}

static const char *isa_names[ARRAY_SIZE(isas) + 1];

static void isa_names_init(void)
{
    size_t count = 0;
    for (size_t i = 0; i < ARRAY_SIZE(isas); i++)
        if (isa_here(isas[i]))
            isa_names[count++] = isas[i]->name;
}

const char *const *kern_cpu_isas(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, isa_names_init);
    return isa_names;
}
