/* An operation as a device's queue keeps it, and the checks that it passed before: the same on
 * every device. */
#ifndef SHD_KERNELS_WORK_H
#define SHD_KERNELS_WORK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kern.h"

/* The rules that differ between devices. */
struct work_rules {
    size_t slice_align;  /* of the arrays of accumulate, sumsq and updates; 0: their dtype's */
    bool whole;          /* matrices are updated */
    bool chunk_words;    /* a trail's chunk words are the caller's */
    uint32_t hypers_max; /* 0: any number */
    bool int8;           /* arrays in 8 bits are known */
    bool codecs;         /* what is published can be encoded, and updates leave it to that */
};

struct work {
    struct kern_op op;           /* a copy; what it points to is borrowed until done */
    uint64_t count;              /* elements; leaves of a hash, bytes of a copy; may be 0 */
    struct kern_sum *sum;        /* NULL, or where the sum of squares goes */
    struct kern_change *change;  /* NULL, or where what an update comes to goes */
    struct kern_done *done;      /* or NULL */
    bool trail;                  /* one is kept */
    _Atomic uint64_t *done_word; /* the trail's: NULL, or stored when all of the work succeeded */
    uint64_t done_value;
};

/* Check an operation's arguments and fill in the rest. Pure; errors name the operation, the
 * argument and its value: SHD_EINVAL what is NULL, misaligned or unknown, SHD_ERANGE what is
 * outside its limits. */
int work_init(struct work *w, const struct kern_op *op, const struct work_rules *rules,
              struct kern_done *done, struct shd_err *e);

/* All of the work is done, with status: its sum is carried, and the trail's word stored if status
 * is SHD_OK. A successor need not give this operation again. */
void work_end(const struct work *w, int status);

/* The first element of a leaf, or the end of the array behind the last one. */
uint64_t hash_leaf_first(const struct kern_hash *a, uint64_t leaf);

#endif
