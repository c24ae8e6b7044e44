/* The elements of a unit that are of no tensor. */
#ifndef SHD_GAPS_H
#define SHD_GAPS_H

#include <stdint.h>

struct shd_err;
struct shd_model;

/* Zero them in a gradient of the unit, for owners sum whole slices. Errors: the kernels'. */
int gaps_zero(struct shd_model *m, uint32_t unit, float *grad, struct shd_err *e);

#endif
