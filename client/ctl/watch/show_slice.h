/* A slice of a tensor, as "0:2,16:24" has it: of each dimension the elements from one index up to
 * another, all of what is not said. */
#ifndef SHD_CTL_SHOW_SLICE_H
#define SHD_CTL_SHOW_SLICE_H

#include <stdint.h>
#include <stdio.h>

#include <jansson.h>

#include "proto/spec/spec.h"

struct show_slice {
    const struct spec_tensor *tensor;                /* borrowed */
    uint64_t from[SPEC_RANK_MAX], to[SPEC_RANK_MAX]; /* of each dimension; from < to */
    uint64_t first, elems; /* of the tensor, row by row: the range that has all of it */
};

/* Errors: SHD_EINVAL, SHD_ERANGE; they name the dimension. */
int slice_parse(const char *text, const struct spec_tensor *t, struct show_slice *ret_slice,
                struct shd_err *e);

/* The slice's of values[slice->elems]: a line for each row (of the last dimension), with its
 * indices before it; an array of such rows. */
void slice_print(const struct show_slice *slice, const float *values, FILE *out);
json_t *slice_json(const struct show_slice *slice, const float *values);

#endif
