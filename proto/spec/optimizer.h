/* The optimizers: what a spec calls each, which hyperparameters it takes and how many moments it
 * keeps. One table, read by the spec's parser and by every device's kernels. */
#ifndef SHD_SPEC_OPTIMIZER_H
#define SHD_SPEC_OPTIMIZER_H

#include <stdbool.h>
#include <stdint.h>

/* TORCH: the same by the order of operations of PyTorch's CPU implementation. */
enum spec_optimizer {
    SPEC_ADAMW = 1,
    SPEC_SGD = 2,
    SPEC_LION = 3,
    SPEC_ADAMW_TORCH = 4,
    SPEC_SGD_TORCH = 5,
    SPEC_MEAN = 6, /* of a group alone: what is returned are values, and their mean is the next */
};

#define SPEC_OPTIMIZERS 5 /* ids 1..5: a model's */

struct spec_optimizer_row {
    const char *kind;
    enum spec_optimizer torch;                   /* the same in torch's order; 0: there is none */
    bool in_torch_order;                         /* this is that */
    uint32_t moments;                            /* kept per parameter: none, m, or m and v */
    const char *beta1_key, *beta2_key, *eps_key; /* NULL: it has no such field */
    double beta1, beta2, eps;                    /* defaults; 0 where it has no such field */
};

extern const struct spec_optimizer_row spec_optimizer_rows[SPEC_MEAN + 1];

#endif
