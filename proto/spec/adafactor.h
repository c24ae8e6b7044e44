/* Adafactor: what a group that it updates has, and where its statistics lie.
 *
 * N. Shazeer, M. Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", ICML 2018
 * (https://arxiv.org/abs/1804.04235), with the names, the defaults and the order of
 * torch.optim.Adafactor. kernels/cpu/op_adafactor.h has the arithmetic. Pure.
 *
 * Of a tensor of two dimensions and more it keeps a mean of squares for each row and each column of
 * each of its matrices (its last two dimensions), of any other one for each element. They are no
 * moments, which have a number for each parameter: a unit's are one more tensor of it, the last
 * one, which no worker has a gradient of. So all that knows of tensors knows of them: digests,
 * checkpoints, snapshots, trails. */
#ifndef SHD_SPEC_ADAFACTOR_H
#define SHD_SPEC_ADAFACTOR_H

#include <stdint.h>

struct spec;
struct spec_tensor;

struct adafactor_rule {
    double beta2_decay; /* <= 0: of step t, t^beta2_decay of the new squares is taken */
    double eps1;        /* the least root of a mean of squares */
    double eps2;        /* the least size of parameters that a step is relative to */
    double d;           /* >= 1: updates of a larger size are clipped to it */
};

extern const struct adafactor_rule adafactor_default;

#define ADAFACTOR_EPS1_MIN 0x1p-63 /* its square is an fp32 that is no denormal */

/* What a unit's statistics are called: its name and this. */
#define ADAFACTOR_SUFFIX ":adafactor"

/* A tensor as matrices: batch of them, each rows x cols. rows 0: it is none, of cols elements. */
struct adafactor_shape {
    uint64_t batch, rows, cols;
};

struct adafactor_shape adafactor_shape(const struct spec_tensor *tensor);

/* Its statistics: rows of all matrices, then columns of all; or one for each element. */
uint64_t adafactor_elems(const struct adafactor_shape *shape);

/* Where a tensor's begin in the statistics of its unit: those of the ones before it, each aligned
 * to SHD_TENSOR_ALIGN_ELEMS. index: in the unit; of the statistics themselves it is what all have.
 */
uint64_t adafactor_offset_elems(const struct spec *spec, uint32_t unit, uint32_t index);

#endif
