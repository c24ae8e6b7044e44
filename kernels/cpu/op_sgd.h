/* SGD with momentum (PyTorch's form: no dampening, no Nesterov) and decoupled weight decay.
 *
 * Per element, fp32, each line one rounding:
 *
 *     g = grad * scale
 *     m = fma(beta1, m, g)                beta1 = momentum; m starts at 0, so the first m is g
 *     u = lr * m
 *     p = fma(keep, p, -u)                keep = 1 - lr * weight_decay
 */
#ifndef SHD_KERNELS_CPU_OP_SGD_H
#define SHD_KERNELS_CPU_OP_SGD_H

#include "kernels/rates.h"

/* NOLINTNEXTLINE(readability-non-const-parameter): the type of all steps */
VEC_FN void sgd_step(const struct rates *c, vec grad, vec *p, vec *m, vec *v)
{
    (void)v;
    const vec g = vec_mul(grad, vec_set1(c->scale));
    *m = vec_fma(vec_set1(c->beta1), *m, g);
    *p = vec_fms(vec_set1(c->keep), *p, vec_mul(vec_set1(c->rate), *m));
}

#endif
