/* What travels in codes (a spec's "codec" and "grad_codec"). Parameters are decoded from where each
 * owner's slice is mapped. A slice's codes lie where its parameters would, in the same
 * reservations (place.h): they are never more. */
#ifndef SHD_CODED_H
#define SHD_CODED_H

#include <stdint.h>

#include "proto/spec/layout.h"

struct shd_err;
struct shd_model;

/* The first elems elements of unit, which the owners publish at `units`, into `to`, in the model's
 * dtype. */
void coded_read(const struct shd_model *m, uint32_t unit, void *const *units, uint64_t elems,
                void *to);

/* A slice of the unit's gradient grad, which a slot is filled with, into `to` in codes, rounded by
 * numbers of the model, step, unit and group of micro-batches alone: whoever computes one returns
 * the same. Errors are the kernel's. */
int coded_write(struct shd_model *m, uint32_t slot, uint32_t unit, struct slice slice,
                const float *grad, void *to, struct shd_err *e);

/* Of elems elements, whole tiles, the bytes that are read: of codes, or in the model's dtype. */
uint64_t coded_bytes(const struct shd_model *m, uint64_t elems);

#endif
