/* SHA-256 leaves of this owner's part of one state array of one tensor. The work is queued behind
 * whatever runs, so the leaves are those of the step that is there when it is queued. */
#ifndef SHD_DAEMON_DIGEST_H
#define SHD_DAEMON_DIGEST_H

#include <stdint.h>

struct model;
struct op;

/* The part of tensor t in this owner's slice, and its first leaf's length. */
struct digest_part {
    uint64_t first_elem; /* in the slice */
    uint64_t elems;
    uint64_t head_elems;
    uint64_t leaves;
};

struct digest_part digest_part(const struct model *m, uint32_t tensor);

/* Hash what op, a DIGEST, asks for of the part. SHD_PENDING: op is finished later. */
int digest_begin(struct op *op, const struct digest_part *part);

#endif
