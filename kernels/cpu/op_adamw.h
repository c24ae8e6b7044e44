/* AdamW with decoupled weight decay: I. Loshchilov, F. Hutter, "Decoupled Weight Decay
 * Regularization", ICLR 2019, algorithm 2 (https://arxiv.org/abs/1711.05101), as PyTorch reads it
 * (decay by lr * weight_decay, eps outside the bias-corrected root).
 *
 * Per element, fp32, each line one rounding, fma() where it says so and nowhere else:
 *
 *     g  = grad * scale                   line 6 of the algorithm
 *     d  = g - m
 *     m  = fma(rest1, d, m)               line 7: beta1 m + (1 - beta1) g
 *     h  = rest2 * g
 *     w  = beta2 * v
 *     v  = fma(h, g, w)                   line 8; no g * g, which would overflow or flush early
 *     r  = sqrt(v)
 *     s  = fma(r, unbias, eps)            sqrt(v^) + eps of line 12, unbias = 1 / sqrt(bias2)
 *     q  = m / s
 *     u  = rate * q                       lr m^, rate = lr / bias1: lines 9 and 12
 *     p  = fma(keep, p, -u)               line 12, keep = 1 - lr * weight_decay
 *
 * One division and one root. rest1, rest2, keep, rate and unbias are computed in fp64 and rounded
 * once, see rates_of().
 */
#ifndef SHD_KERNELS_CPU_OP_ADAMW_H
#define SHD_KERNELS_CPU_OP_ADAMW_H

#include "kernels/rates.h"

VEC_FN void adamw_step(const struct rates *c, vec grad, vec *p, vec *m, vec *v)
{
    const vec g = vec_mul(grad, vec_set1(c->scale));
    *m = vec_fma(vec_set1(c->rest1), vec_sub(g, *m), *m);
    const vec h = vec_mul(vec_set1(c->rest2), g);
    *v = vec_fma(h, g, vec_mul(vec_set1(c->beta2), *v));
    const vec s = vec_fma(vec_sqrt(*v), vec_set1(c->unbias), vec_set1(c->eps));
    const vec u = vec_mul(vec_set1(c->rate), vec_div(*m, s));
    *p = vec_fms(vec_set1(c->keep), *p, u);
}

#endif
