/* Hyperparameters as the optimizers' steps use them, and which run has an element: one place, so
 * that devices cannot differ. */
#ifndef SHD_KERNELS_RATES_H
#define SHD_KERNELS_RATES_H

#include <math.h>

#include "kernels/kern.h"

#define RATES_FN static inline __attribute__((always_inline, unused))

/* Hyperparameters of a run. */
struct rates {
    float scale;        /* gradient: 1/M, clip factor and loss unscale in one */
    float keep;         /* 1 - lr * weight_decay */
    float rate;         /* lr; AdamW: lr / bias1 */
    float beta1, rest1; /* rest = 1 - beta */
    float beta2, rest2;
    float unbias, eps; /* AdamW: 1 / sqrt(bias2) */
};

/* All in fp64, rounded once. 1 - beta is exact for beta in [0.5, 1]. */
RATES_FN struct rates rates_of(enum spec_optimizer kind, const struct kern_hyper *h,
                               float grad_scale)
{
    struct rates c = {
        .scale = grad_scale,
        .keep = (float)(1 - (double)h->lr * (double)h->weight_decay),
        .rate = h->lr,
        .beta1 = h->beta1,
        .rest1 = (float)(1 - (double)h->beta1),
        .beta2 = h->beta2,
        .rest2 = (float)(1 - (double)h->beta2),
        .eps = h->eps,
    };
    if (kind == SPEC_ADAMW) {
        c.rate = (float)((double)h->lr / (double)h->bias1);
        c.unbias = (float)(1 / sqrt((double)h->bias2));
    }
    return c;
}

/* Index of the first run that ends beyond elem. */
RATES_FN uint32_t run_find(const struct kern_update *a, uint64_t elem)
{
    uint32_t low = 0, high = a->run_count;
    while (low < high) {
        const uint32_t mid = low + (high - low) / 2;
        if (a->runs[mid].first_elem + a->runs[mid].elems <= elem)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

#endif
