/* The files that a model is restored from, and reading its slices from them. For libuv's pool. */
#ifndef SHD_RESTORE_IN_H
#define SHD_RESTORE_IN_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/files/ckpt.h"
#include "proto/files/ckpt_info.h"

struct model;
struct safeset;
struct safeset_place;
struct shd_err;
struct spec;

struct restore_in {
    bool weights; /* parameters alone, of any tool; no leaves */
    struct safeset *sets[CKPT_ARRAYS_MAX];
    int leaves_fd;
    struct spec *saved;           /* owned: a checkpoint's own, of other tiles maybe */
    uint64_t *first_leaf;         /* owned, [tensors of saved] */
    struct safeset_place *places; /* owned, [tensors][CKPT_ARRAYS_MAX] */
    struct ckpt_info info;        /* of a checkpoint */
};

#define RESTORE_IN_CLOSED ((struct restore_in){ .leaves_fd = -1 })

/* Open path for a model of this spec, of which a checkpoint's differs in tiles at most. Errors:
 * SHD_ENOENT, SHD_ESPEC it is another model's; SHD_EINVAL tensors are missing or of other shapes,
 * the first and how many. */
int restore_in_open(struct restore_in *in, const char *path, const struct spec *spec,
                    struct shd_err *e);
void restore_in_close(struct restore_in *in);

/* Read a piece of m's slice, check it, and copy it into m's state. buffer: [piece->elems], the
 * caller's, of the host. Waits for the device. */
int restore_in_read(const struct restore_in *in, struct model *m, const struct ckpt_piece *piece,
                    float *buffer, uint64_t *ret_bytes, struct shd_err *e);

#endif
