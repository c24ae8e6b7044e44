/* The optimizers' steps, one source for the host's instruction sets and for GPUs: included after
 * what defines vec (kernels/cpu/vec.h, kernels/vec_float.h). */
#ifndef SHD_KERNELS_OPTIMIZERS_H
#define SHD_KERNELS_OPTIMIZERS_H

#include <stdbool.h>

#include "kernels/shared.h"

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
 * once, see kern_rates_of().
 */
KERN_FN void adamw_step(const struct kern_rates *c, vec grad, vec *p, vec *m, vec *v)
{
    const vec g = vec_mul(grad, vec_set1(c->scale));
    *m = vec_fma(vec_set1(c->rest1), vec_sub(g, *m), *m);
    const vec h = vec_mul(vec_set1(c->rest2), g);
    *v = vec_fma(h, g, vec_mul(vec_set1(c->beta2), *v));
    const vec s = vec_fma(vec_sqrt(*v), vec_set1(c->unbias), vec_set1(c->eps));
    const vec u = vec_mul(vec_set1(c->rate), vec_div(*m, s));
    *p = vec_fms(vec_set1(c->keep), *p, u);
}

/* SGD with momentum (PyTorch's form: no dampening, no Nesterov) and decoupled weight decay.
 *
 * Per element, fp32, each line one rounding:
 *
 *     g = grad * scale
 *     m = fma(beta1, m, g)                beta1 = momentum; m starts at 0, so the first m is g
 *     u = lr * m
 *     p = fma(keep, p, -u)                keep = 1 - lr * weight_decay
 */
/* NOLINTNEXTLINE(readability-non-const-parameter): the type of all steps */
KERN_FN void sgd_step(const struct kern_rates *c, vec grad, vec *p, vec *m, vec *v)
{
    (void)v;
    const vec g = vec_mul(grad, vec_set1(c->scale));
    *m = vec_fma(vec_set1(c->beta1), *m, g);
    *p = vec_fms(vec_set1(c->keep), *p, vec_mul(vec_set1(c->rate), *m));
}

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
/* NOLINTNEXTLINE(readability-non-const-parameter): the type of all steps */
KERN_FN void lion_step(const struct kern_rates *c, vec grad, vec *p, vec *m, vec *v)
{
    (void)v;
    const vec g = vec_mul(grad, vec_set1(c->scale));
    const vec mix = vec_fma(vec_set1(c->beta1), *m, vec_mul(vec_set1(c->rest1), g));
    *p = vec_fms(vec_set1(c->keep), *p, vec_sign_times(mix, vec_set1(c->rate)));
    *m = vec_fma(vec_set1(c->beta2), *m, vec_mul(vec_set1(c->rest2), g));
}

/* The steps of PyTorch 2's CPU implementation (torch/optim/adam.py, sgd.py: _single_tensor_adam,
 * _single_tensor_sgd), operation by operation as its kernels round: one that multiplies and adds is
 * one fma (ATen/native/cpu/{LerpKernel,PointwiseOpsKernel,BinaryOpsKernel}.cpp, compiled for AVX2
 * and up). Rates are computed in fp64 and rounded once, as Python's are; see runs.c. Bits are those
 * of torch.optim.SGD, and of torch.optim.AdamW where its sqrt rounds correctly, as fused=True has
 * it.
 *
 * AdamW, and Adam (coupled decay):
 *
 *     g  = grad * scale
 *     g  = fma(decay, p, g)               coupled: grad.add(param, alpha=weight_decay)
 *     p  = keep * p                       decoupled: param.mul_(1 - lr * weight_decay)
 *     d  = g - m
 *     m  = fma(rest1, d, m)               exp_avg.lerp_(grad, 1 - beta1)
 *        = fma(rest1 - 1, d, g)           where rest1 >= 0.5
 *     h  = rest2 * g
 *     w  = beta2 * v
 *     v  = fma(h, g, w)                   exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 -
 * beta2) r  = sqrt(v) q  = r / unbias                     unbias = sqrt(1 - beta2^t) s  = q + eps
 *     a  = rate * m                       rate = -lr / (1 - beta1^t)
 *     u  = a / s
 *     p  = p + u                          param.addcdiv_(exp_avg, denom, value=-step_size)
 */
KERN_FN void adamw_torch_step(const struct kern_rates *c, vec grad, vec *p, vec *m, vec *v)
{
    vec g = vec_mul(grad, vec_set1(c->scale));
    if (c->decay != 0)
        g = vec_fma(vec_set1(c->decay), *p, g);
    *p = vec_mul(vec_set1(c->keep), *p);
    const vec d = vec_sub(g, *m);
    if (c->rest1 < 0.5f)
        *m = vec_fma(vec_set1(c->rest1), d, *m);
    else
        *m = vec_fma(vec_set1(c->rest1 - 1), d, g);
    const vec h = vec_mul(vec_set1(c->rest2), g);
    *v = vec_fma(h, g, vec_mul(vec_set1(c->beta2), *v));
    const vec s = vec_add(vec_div(vec_sqrt(*v), vec_set1(c->unbias)), vec_set1(c->eps));
    *p = vec_add(*p, vec_div(vec_mul(vec_set1(c->rate), *m), s));
}

/* SGD:
 *
 *     g = grad * scale
 *     g = fma(decay, p, g)                coupled
 *     p = keep * p                        decoupled; torch has it not
 *     m = g                               with a momentum: at first,
 *     b = beta1 * m                       then buf.mul_(momentum)
 *     m = fma(rest1, g, b)                     .add_(grad, alpha=1 - dampening)
 *     g = m                               or
 *       = fma(beta1, m, g)                nesterov: grad.add(buf, alpha=momentum)
 *     p = fma(rate, g, p)                 rate = -lr
 */
/* NOLINTNEXTLINE(readability-non-const-parameter): the type of all steps */
KERN_FN void sgd_torch_step(const struct kern_rates *c, vec grad, vec *p, vec *m, vec *v)
{
    (void)v;
    vec g = vec_mul(grad, vec_set1(c->scale));
    if (c->decay != 0)
        g = vec_fma(vec_set1(c->decay), *p, g);
    *p = vec_mul(vec_set1(c->keep), *p);
    if ((c->flags & KERN_MOMENTUM) != 0) {
        if ((c->flags & KERN_FIRST) != 0)
            *m = g;
        else
            *m = vec_fma(vec_set1(c->rest1), g, vec_mul(vec_set1(c->beta1), *m));
        g = (c->flags & KERN_NESTEROV) != 0 ? vec_fma(vec_set1(c->beta1), *m, g) : *m;
    }
    *p = vec_fma(vec_set1(c->rate), g, *p);
}

/* The mean of `scale` values, whose sum grad is. Of one value it is that, bit by bit.
 *
 *     p = grad / scale
 */
/* NOLINTNEXTLINE(readability-non-const-parameter): the type of all steps */
KERN_FN void mean_step(const struct kern_rates *c, vec grad, vec *p, vec *m, vec *v)
{
    (void)m;
    (void)v;
    *p = grad;
    if (c->scale != 1)
        *p = vec_div(grad, vec_set1(c->scale));
}

/* Muon's two passes over elements, as torch.optim.Muon has them (kernels/cpu/op_muon.h has what is
 * between them). The momentum of a matrix, in p's place, where the flags say so:
 *
 *     g = grad * scale
 *     d = g - p
 *     p = fma(rest1, d, p)                buf.lerp_(grad, 1 - momentum)
 *       = fma(rest1 - 1, d, g)            where rest1 >= 0.5
 *
 * and its parameters, by what is in the gradient's place, the orthogonalized matrix:
 *
 *     p = keep * p                        param.mul_(1 - lr * weight_decay)
 *     p = fma(rate, grad, p)              param.add_(update, alpha=-adjusted_lr)
 */
/* NOLINTNEXTLINE(readability-non-const-parameter): the type of all steps */
KERN_FN void muon_step(const struct kern_rates *c, vec grad, vec *p, vec *m, vec *v)
{
    (void)m;
    (void)v;
    if ((c->flags & KERN_MOMENTUM) == 0) {
        *p = vec_fma(vec_set1(c->rate), grad, vec_mul(vec_set1(c->keep), *p));
        return;
    }
    const vec g = vec_mul(grad, vec_set1(c->scale)), d = vec_sub(g, *p);
    if (c->rest1 < 0.5f)
        *p = vec_fma(vec_set1(c->rest1), d, *p);
    else
        *p = vec_fma(vec_set1(c->rest1 - 1), d, g);
}

/* LAMB's two moments, the first in p's place and the second in m's: adamw_step()'s lines 7 and 8.
 * Y. You et al., "Large Batch Optimization for Deep Learning", ICLR 2020, algorithm 2
 * (https://arxiv.org/abs/1904.00962). What the parameters change by (kernels/cpu/op_lamb.h):
 *
 *     a = rate * m                        m^, rate = 1 / bias1
 *     s = fma(r, unbias, eps)             r = sqrt(v), unbias = 1 / sqrt(bias2)
 *     q = a / s
 *     u = fma(decay, p, q)                + lambda x
 *
 * and then p = fma(-lr * |p| / |u|, u, p), norms of the whole tensor, in fp64 (muon_step()).
 */
/* NOLINTNEXTLINE(readability-non-const-parameter): the type of all steps */
KERN_FN void lamb_step(const struct kern_rates *c, vec grad, vec *p, vec *m, vec *v)
{
    (void)v;
    const vec g = vec_mul(grad, vec_set1(c->scale));
    *p = vec_fma(vec_set1(c->rest1), vec_sub(g, *p), *p);
    *m = vec_fma(vec_mul(vec_set1(c->rest2), g), g, vec_mul(vec_set1(c->beta2), *m));
}

KERN_FN vec lamb_direction(const struct kern_rates *c, vec p, vec m, vec v)
{
    const vec s = vec_fma(vec_sqrt(v), vec_set1(c->unbias), vec_set1(c->eps));
    const vec q = vec_div(vec_mul(vec_set1(c->rate), m), s);
    return vec_fma(vec_set1(c->decay), p, q);
}

/* Adafactor's update of an element before it is clipped, as torch.optim.Adafactor has it
 * (kernels/cpu/op_adafactor.h has the rest). row, col: the means of squares of its row and column,
 * after this step's; divisor: the mean of all rows', at least eps1:
 *
 *     g = grad * scale
 *     v = row * col / divisor
 *     s = sqrt(max(v, eps1^2))
 *     r = 1 / s
 *     u = r * g
 *
 * A vector's v is kept for each element. Statistics and parameters then change as muon_step() has
 * it: fma(rest1, mean - p, p), where rest1 = t^beta2_decay, and fma(rate, u, keep * p).
 */
KERN_FN vec adafactor_direction(float eps1_square, vec g, vec v)
{
    const vec s = vec_sqrt(vec_max(vec_set1(eps1_square), v));
    return vec_mul(vec_div(vec_set1(1), s), g);
}

/* An exponential moving average of parameters: average = decay * average + rest * p, in the order
 * of torch.lerp, which torch.optim.swa_utils.get_ema_multi_avg_fn() goes by (rest = 1 - decay).
 * With FMA its CPU kernels (ATen/native/cpu/LerpKernel.cpp) round as this does.
 *
 * Per element, fp32, each line one rounding:
 *
 *     d = p - e
 *     e = fma(rest, d, e)
 *       = fma(rest - 1, d, p)             where rest >= 0.5; of rest = 1 it is p
 */
KERN_FN vec ema_step(float rest, vec p, vec e)
{
    const vec d = vec_sub(p, e);
    if (rest < 0.5f)
        return vec_fma(vec_set1(rest), d, e);
    return vec_fma(vec_set1(rest - 1), d, p);
}

/* One vector of an update: p, m and v (where the optimizer has them) in place. Each loop is
 * compiled once per optimizer, its kind being a constant there. */
KERN_FN void optimizer_step(enum spec_optimizer kind, const struct kern_rates *c, vec grad, vec *p,
                            vec *m, vec *v)
{
    switch (kind) {
    case SPEC_ADAMW:
        adamw_step(c, grad, p, m, v);
        break;
    case SPEC_SGD:
        sgd_step(c, grad, p, m, v);
        break;
    case SPEC_LION:
        lion_step(c, grad, p, m, v);
        break;
    case SPEC_ADAMW_TORCH:
        adamw_torch_step(c, grad, p, m, v);
        break;
    case SPEC_SGD_TORCH:
        sgd_torch_step(c, grad, p, m, v);
        break;
    case SPEC_MEAN:
        mean_step(c, grad, p, m, v);
        break;
    case SPEC_MUON:
        muon_step(c, grad, p, m, v);
        break;
    case SPEC_LAMB:
        lamb_step(c, grad, p, m, v);
        break;
    case SPEC_ADAFACTOR: /* its passes are muon_step()'s */
        break;
    }
}

KERN_FN bool has_m(enum spec_optimizer kind)
{
    return kind != SPEC_MEAN && kind != SPEC_MUON; /* of a pass of Muon's: muon_step() */
}

KERN_FN bool has_v(enum spec_optimizer kind)
{
    return kind == SPEC_ADAMW || kind == SPEC_ADAMW_TORCH;
}

#endif
