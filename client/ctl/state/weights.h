/* The step of a model that this process has pinned, as the bytes of one safetensors file: all of
 * its tensors, in the order of the spec, in the type that workers read.
 *
 * It is a copy, also in memory. A safetensors file is one range of bytes that its header covers
 * without a hole; a pin is a segment for each owner, in whole pages, in which the unused end of a
 * unit's slice is such a hole. Two files of tmpfs cannot have pages in common either. */
#ifndef SHD_CTL_WEIGHTS_H
#define SHD_CTL_WEIGHTS_H

#include <stdint.h>

#include "client/shd.h"
#include "proto/files/safetensors.h"

struct weights {
    const shd_model *model;             /* borrowed */
    struct safetensors_tensor *tensors; /* owned, [tensors of the spec] */
    struct safetensors_header header;   /* owned */
};

/* Where everything lies in the file. Needs no pin. Errors: SHD_ENOMEM, SHD_ERANGE. */
int weights_new(const shd_model *m, struct weights *ret_weights, struct shd_err *e);
void weights_free(struct weights *w);

/* Write header and pinned tensors to fd, `name` in errors. Errors: SHD_EIO. */
int weights_write(const struct weights *w, int fd, const char *name, struct shd_err *e);

/* The same as a file in memory that has no name and that nobody can change any more: a sealed
 * memfd, the caller's to close. What it takes is looked for before it is taken
 * (proto/share/reserve.h). Errors: SHD_ENOMEM with the numbers, SHD_EIO. */
int weights_memory(const struct weights *w, const char *name, int *ret_fd, struct shd_err *e);

#endif
