/* The digest of a model: one SHA-256 over parameters and optimizer state that depends on their
 * values alone, not on who holds which part.
 *
 * Each tensor's elements are cut at the borders of 2,048-element blocks of its unit, where every
 * split among owners cuts as well. A leaf is the SHA-256 of one piece, fp32 little-endian. The
 * digest is
 *
 *   SHA-256("shardd digest 1\n" | step u64 | updates u64
 *           | for each tensor in spec order: name, NUL, rank u32, each dimension u64,
 *             for each array (parameters; then, of trainable tensors, the moments the
 *            optimizer has): its leaves)
 *
 * with all numbers little-endian. Pure: leaves come from a function of the path's.
 */
#ifndef SHD_DIGEST_H
#define SHD_DIGEST_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"
#include "proto/spec/spec.h"

#define DIGEST_LEAF_BYTES    32u
#define DIGEST_HEX_BYTES     65u    /* with NUL */
#define DIGEST_WINDOW_LEAVES 65536u /* asked for at once: 2 MiB of leaves, 512 MiB of elements */

struct digest_part {
    uint32_t tensor;
    uint32_t tensors; /* 0: one array of one; else all arrays of so many, in the digest's order:
                       * tensor after tensor, its arrays one after the other */
    uint32_t array;   /* of those that spec_arrays() counts */
    uint64_t first_leaf;
    uint64_t leaves; /* 1 .. DIGEST_WINDOW_LEAVES */
};

/* All leaves of a digest must be of one step. */
struct digest_stamp {
    bool set;
    uint64_t step, updates;
};

/* Take a source's stamp: the first sets it, any other must be equal, else SHD_ESTEP. */
int digest_stamp_take(struct digest_stamp *stamp, uint64_t step, uint64_t updates,
                      struct shd_err *e);

/* Fill ret_leaves[part->leaves] and take the source's stamp. */
typedef int (*digest_leaves_fn)(void *ctx, const struct digest_part *part,
                                uint8_t (*ret_leaves)[32], struct digest_stamp *stamp,
                                struct shd_err *e);

struct digest_source {
    digest_leaves_fn leaves;
    void *ctx;
    uint32_t units_max; /* it takes parts of several tensors, of so many units: from the first to
                         * the last of each unit at most WIRE_RANGE_ELEMS_MAX elements, all of them
                         * together, and WIRE_LEAVES_MAX leaves; 0: only of one tensor */
};

/* Errors: those of leaves(); SHD_ENOMEM; SHD_EINTERNAL libcrypto failed. */
int digest_run(const struct spec *spec, const struct digest_source *source,
               char ret_hex[DIGEST_HEX_BYTES], uint64_t *ret_step, struct shd_err *e);

#endif
