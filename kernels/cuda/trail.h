/* Putting a dead process's trail on a GPU in order (kernels/cuda/args.h): what is to be copied back
 * where, which is pure, and doing so. */
#ifndef SHD_KERNELS_CUDA_TRAIL_H
#define SHD_KERNELS_CUDA_TRAIL_H

#include <stdint.h>

#include "kernels/cuda/args.h"
#include "kernels/kern.h"

/* Bytes of the area for so many chunk words: a multiple of 128, and the same of any CUDA device. */
uint64_t cuda_trail_bytes(const struct kern *k, uint64_t chunks);

/* Old values of one array of one tile go back: on the device, from the area to the segment. */
struct cuda_trail_copy {
    uint64_t from_bytes; /* from the area's beginning */
    uint64_t to_bytes;   /* from base */
    uint64_t bytes;
};

#define CUDA_TRAIL_COPIES_MAX (CUDA_RECORDS_MAX * CUDA_ARRAYS_MAX)

/* Plan the copies of a repair. When all is copied, and not before, heads[].busy may be zeroed (or
 * left to shd_trail_begin, which is run before any operation). The chunk words stay as they are:
 * they say which tiles are done. Killed at any point, the same again does no harm.
 *
 *   heads        [CUDA_RECORDS_MAX] of the records, as found: anything may stand there
 *   chunks       [chunk_count] of the area, as found
 *   bytes        of the segment from base up to the area: copies end there
 *   ret_copies   [CUDA_TRAIL_COPIES_MAX], no two to the same place unless the records lie
 *
 * Errors: SHD_ESEGMENT a record that points outside, named; nothing is returned then. Any thread.
 */
int cuda_trail_plan_repair(const struct cuda_trail_head *heads, const struct cuda_chunk *chunks,
                           uint64_t chunk_count, uint64_t bytes, struct cuda_trail_copy *ret_copies,
                           uint32_t *ret_count, struct shd_err *e);

/* Of struct kern_ops. */
int cuda_trail_repair(struct kern *k, struct kern_trail_area *area, void *base, uint64_t bytes,
                      _Atomic uint64_t *chunks, uint64_t count, struct shd_err *e);

#endif
