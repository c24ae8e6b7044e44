/* Gradients in this process's own memory, of the host or of the worker's GPU, where they cannot be
 * written straight into the owners' inbox: on the copy path, when several micro-batches are summed
 * before they are returned, when they are returned in another dtype, or when more are held at once
 * than there are slots.
 *
 * Happy path: grads_open() hands out an array for one micro-batch, grads_close() adds it to the
 * sum of its group (in ascending order of micro-batches, first writes), and once the group is
 * complete the caller hands the sum over and calls grads_done().
 *
 * Buffers (client/paths/buffer.h) are made when first needed, and a unit gets the one that fits it
 * best.
 */
#ifndef SHD_GRADS_H
#define SHD_GRADS_H

#include <stdbool.h>
#include <stdint.h>

#include "client/paths/buffer.h"
#include "proto/base/status.h"

struct hostsum;
struct shd_model;

struct grad_entry {          /* one unit's gradient of one group */
    struct grad_entry *next; /* of the same unit, or of those that are not used */
    bool used;
    bool open; /* an array is handed out, for micro-batch `taken` of the group */
    uint32_t group, unit;
    uint32_t taken; /* micro-batches that are in: 0..accumulate */
    float *sum;     /* a buffer: of those in (or, while open, of the first one); NULL: none */
    float *scratch; /* a buffer: of the open micro-batch when sum is taken; else NULL */
    struct buffer *sum_in, *scratch_in; /* borrowed: those buffers */
};

struct grads_unit {
    struct grad_entry *first; /* NULL: it has none */
    struct buffer *last;      /* borrowed: which it had last; NULL: none yet */
};

struct grads {
    struct grad_entry *entries; /* owned, [entry_count] */
    uint32_t entry_count;
    struct grad_entry *unused; /* the first */
    struct grads_unit *units;  /* owned, [units] */
    struct buffer *buffers;    /* owned, [2 * entry_count]; the first buffer_count are in use */
    uint32_t buffer_count;
    struct buffers in; /* of the largest trainable unit, at most */
    struct hostsum
        *hostsum; /* of hostsum.c: summed with other workers of the host; NULL: by this one */
};

/* For a model with a spec. Errors: SHD_ENOMEM. */
int grads_new(const struct shd_model *m, struct grads **ret_grads, struct shd_err *e);
void grads_free(struct grads *g); /* NULL is a no-op */

struct grad_entry *grads_find(struct grads *g, uint32_t group, uint32_t unit);

/* The array for micro-batch micro of unit; *ret_fresh: it was not handed out before, contents are
 * undefined. Errors: SHD_EINVAL an earlier micro-batch of the group is missing, or this one is in;
 * SHD_EBUSY too many at once; SHD_ENOMEM. */
int grads_open(struct shd_model *m, uint32_t micro, uint32_t unit, float **ret_array,
               bool *ret_fresh, struct shd_err *e);

/* The open array of the entry is complete: take it in. Errors: the kernels'. */
int grads_close(struct shd_model *m, struct grad_entry *entry, struct shd_err *e);

/* The unit took no part in micro-batch micro; what was handed out for it is dropped.
 * *ret_entry: the entry, which exists from now on. Errors as grads_open(). */
int grads_none(struct shd_model *m, uint32_t micro, uint32_t unit, struct grad_entry **ret_entry,
               struct shd_err *e);

/* An entry for a sum that is formed elsewhere: into entry->sum (none: there is none), and then
 * entry->taken is accumulate. The one there is, where that broke off. Errors: SHD_EBUSY,
 * SHD_ENOMEM. */
int grads_whole(struct shd_model *m, uint32_t group, uint32_t unit, bool none,
                struct grad_entry **ret_entry, struct shd_err *e);

/* The entry's sum was handed over (or is not wanted): give its memory back. */
void grads_done(struct shd_model *m, struct grad_entry *entry);

#define GRADS_ALL UINT32_MAX /* all groups, where one is asked for */
bool grads_meant(uint32_t group, uint32_t of);

/* Drop what there is of a group. */
void grads_reset(struct shd_model *m, uint32_t group);

#endif
