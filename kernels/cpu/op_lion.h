/* Lion: X. Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, algorithm 2
 * (https://arxiv.org/abs/2302.06675).
 *
 * Per element, fp32, each line one rounding:
 *
 *     g = grad * scale
 *     a = rest1 * g
 *     c = fma(beta1, m, a)                interpolation, only its sign is used
 *     u = lr, -lr or 0 as c > 0, c < 0, or neither (0, NaN)
 *     p = fma(keep, p, -u)                keep = 1 - lr * weight_decay
 *     b = rest2 * g
 *     m = fma(beta2, m, b)
 */
#ifndef SHD_KERNELS_CPU_OP_LION_H
#define SHD_KERNELS_CPU_OP_LION_H

#include "kernels/rates.h"

/* NOLINTNEXTLINE(readability-non-const-parameter): the type of all steps */
VEC_FN void lion_step(const struct rates *c, vec grad, vec *p, vec *m, vec *v)
{
    (void)v;
    const vec g = vec_mul(grad, vec_set1(c->scale));
    const vec mix = vec_fma(vec_set1(c->beta1), *m, vec_mul(vec_set1(c->rest1), g));
    *p = vec_fms(vec_set1(c->keep), *p, vec_sign_times(mix, vec_set1(c->rate)));
    *m = vec_fma(vec_set1(c->beta2), *m, vec_mul(vec_set1(c->rest2), g));
}

#endif
