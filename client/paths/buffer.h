/* Memory of this worker for arrays it reads or writes: the host's, or its GPU's.
 *
 * A buffer is as large as the largest array it has held; it grows when it is to hold a larger one,
 * and then loses its contents. The host's is address space for the largest there is, whose pages
 * cost nothing before they are touched, so it never moves; the GPU's is made anew. Buffers are
 * kept: steps of the same shape make nothing new.
 */
#ifndef SHD_BUFFER_H
#define SHD_BUFFER_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

struct kern;
struct shd_model;

struct buffer { /* zeroed at first */
    void *base; /* owned; NULL: none yet */
    uint64_t bytes;
    bool busy; /* its user's */
};

/* The memory in which buffers are made, and the largest of them. */
struct buffers {
    struct kern *gpu;   /* borrowed; NULL: the host's memory */
    uint64_t bytes_max; /* no array is larger */
};

/* For arrays of any unit of this model, of so many bytes an element. */
struct buffers buffers_for(const struct shd_model *m, uint64_t elem_bytes);

/* Have room for so many bytes (at most bytes_max). Errors: SHD_ENOMEM; what there was is kept on
 * the host, gone on a GPU. */
int buffer_hold(const struct buffers *in, struct buffer *b, uint64_t bytes, struct shd_err *e);
void buffer_free(const struct buffers *in, struct buffer *b); /* one without memory is a no-op */

/* The one that is not busy and holds so many bytes with the least new memory: the smallest that is
 * large enough, else the largest. NULL: all are busy. */
struct buffer *buffer_find(struct buffer *buffers, uint32_t count, uint64_t bytes);

#endif
