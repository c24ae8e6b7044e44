/* vec.c: see vec.h. */
#include "examples/gpt/vec.h"

#include <stddef.h>

#if defined(__x86_64__) && !defined(GPT_F64)
extern const struct vec_ops vec_avx512, vec_avx2;
#endif
extern const struct vec_ops vec_base;

const struct vec_ops *vec_variant(uint32_t index)
{
#if defined(__x86_64__) && !defined(GPT_F64)
    if (index == 0)
        return __builtin_cpu_supports("avx512f") ? &vec_avx512 : NULL;
    if (index == 1)
        return __builtin_cpu_supports("avx2") ? &vec_avx2 : NULL;
#endif
    return index == 2 ? &vec_base : NULL;
}

const struct vec_ops *vec_pick(void)
{
    for (uint32_t i = 0; i + 1 < VEC_VARIANTS; i++)
        if (vec_variant(i) != NULL)
            return vec_variant(i);
    return &vec_base;
}
