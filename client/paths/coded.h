/* Parameters that owners publish in codes (a spec's "codec"), as a worker reads them: decoded from
 * where each owner's slice is mapped. A slice's codes lie where its parameters would, in the same
 * reservations (place.h): they are never more. */
#ifndef SHD_CODED_H
#define SHD_CODED_H

#include <stdint.h>

#include "kernels/kern.h"

struct shd_model;

/* The first elems elements of unit, which the owners publish at `units`, into `to`, in the model's
 * dtype. */
void coded_read(const struct shd_model *m, uint32_t unit, void *const *units, uint64_t elems,
                void *to);

/* How gradients in codes are rounded: by numbers of the model, step, unit and group of
 * micro-batches alone, so whoever computes one returns the same. first_elem: of the slice, in the
 * unit. */
struct kern_noise coded_noise(const struct shd_model *m, uint32_t unit, uint32_t group,
                              uint64_t first_elem);

/* Of elems elements, whole tiles, the bytes that are read: of codes, or in the model's dtype. */
uint64_t coded_bytes(const struct shd_model *m, uint64_t elems);

#endif
