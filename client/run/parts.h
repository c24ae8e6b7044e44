/* Gradients that lie in arrays of their own, tensor by tensor, into a unit's: shd_return_parts()
 * without the slot. Pure copying; host memory. */
#ifndef SHD_PARTS_H
#define SHD_PARTS_H

#include <stdint.h>

struct shd_err;
struct shd_model;
struct shd_part;

struct parts {
    const struct shd_part *first; /* borrowed; the next is `size` bytes behind */
    uint32_t count;
    double scale;
};

/* Errors: SHD_EINVAL, SHD_ERANGE name the part and what would be right. */
int parts_check(const struct shd_model *m, uint32_t unit, const struct parts *parts,
                struct shd_err *e);

/* All tensors of the unit, whose array grad is; parts are checked. Returns the bytes written. */
uint64_t parts_copy(const struct shd_model *m, uint32_t unit, const struct parts *parts,
                    float *grad);

#endif
