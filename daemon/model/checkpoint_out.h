/* The files of a checkpoint as one owner writes them: opened and checked by their headers, then
 * written piece by piece from any thread. Everything here runs on libuv's pool. */
#ifndef SHD_CHECKPOINT_OUT_H
#define SHD_CHECKPOINT_OUT_H

#include <stdint.h>

#include "proto/files/ckpt.h"

struct safeset;
struct shd_err;
struct spec;

struct checkpoint_place { /* of an array of a tensor */
    int fd;               /* borrowed from the set */
    const char *name;     /* of the file, likewise */
    uint64_t at_bytes;
};

struct checkpoint_out {
    const struct spec *spec; /* borrowed */
    uint32_t arrays;         /* sets in use */
    struct safeset *sets[CKPT_ARRAYS_MAX];
    int leaves_fd;
    uint64_t *first_leaf;            /* owned, [tensors] */
    struct checkpoint_place *places; /* owned, [tensors][CKPT_ARRAYS_MAX] */
};

#define CHECKPOINT_OUT_CLOSED ((struct checkpoint_out){ .leaves_fd = -1 })

/* Open what the coordinator has made at path. Errors name file and tensor. */
int checkpoint_out_open(struct checkpoint_out *out, const char *path, const struct spec *spec,
                        struct shd_err *e);
void checkpoint_out_close(struct checkpoint_out *out);

/* Write what of tensors is in the piece, and its leaves. */
int checkpoint_out_write(const struct checkpoint_out *out, const struct ckpt_piece *piece,
                         const float *data, uint64_t *ret_bytes, struct shd_err *e);

int checkpoint_out_sync(const struct checkpoint_out *out, struct shd_err *e);

#endif
