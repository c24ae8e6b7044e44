/* Putting a dead process's trail on a GPU in order: heads and chunk words are read, old values
 * copied back on the device, and then the records forgotten. What is to be copied is trail.c's to
 * say.
 *
 * Killed at any point, the same again does no harm: copies only restore what the records hold, and
 * no record is forgotten before all copies have been waited for.
 */
#include "kernels/cuda/trail.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"

/* What a repair reads, and makes of it. */
struct repair {
    CUdeviceptr area, base;
    uint8_t *image; /* of the area, all of it: one copy is faster than one of each head; owned, as
                     * is what follows */
    struct cuda_trail_head *heads; /* [CUDA_RECORDS_MAX] */
    uint64_t chunk_count;
    struct cuda_trail_copy *copies; /* [CUDA_TRAIL_COPIES_MAX] */
    uint32_t copy_count;
};

uint64_t cuda_kern_trail_bytes(const struct kern *kern, uint64_t chunks)
{
    (void)kern;
    return cuda_trail_bytes(chunks);
}

/* Under memory_lock, as all below. */
static int copy(struct cuda_kern *k, CUdeviceptr to, CUdeviceptr from, uint64_t bytes,
                struct shd_err *e)
{
    return cuda_call(k, k->cuda->cuMemcpyAsync(to, from, bytes, k->memory_stream), e,
                     "copy %" PRIu64 " bytes of the trail on %s", bytes, k->name);
}

static int read_trail(struct cuda_kern *k, const struct repair *r, struct shd_err *e)
{
    int status = copy(k, cuda_address(r->image), r->area, cuda_trail_bytes(r->chunk_count), e);
    const int waited = cuda_wait(k, k->memory_stream, status == SHD_OK ? e : NULL);
    if (status == SHD_OK)
        status = waited;
    for (uint32_t i = 0; i < CUDA_RECORDS_MAX && status == SHD_OK; i++)
        memcpy(&r->heads[i], r->image + i * sizeof(struct cuda_trail_record), sizeof r->heads[i]);
    return status;
}

static int put_back(struct cuda_kern *k, const struct repair *r, struct shd_err *e)
{
    int status = SHD_OK;
    for (uint32_t i = 0; i < r->copy_count && status == SHD_OK; i++) {
        const struct cuda_trail_copy *c = &r->copies[i];
        status = copy(k, r->base + c->to_bytes, r->area + c->from_bytes, c->bytes, e);
        FAIL_POINT("cuda:repair:copy");
    }
    const int waited = cuda_wait(k, k->memory_stream, status == SHD_OK ? e : NULL);
    return status != SHD_OK ? status : waited;
}

static int forget(struct cuda_kern *k, const struct repair *r, struct shd_err *e)
{
    int status = SHD_OK;
    for (uint32_t i = 0; i < CUDA_RECORDS_MAX && status == SHD_OK; i++) {
        if (r->heads[i].busy == 0)
            continue;
        status = cuda_call(k,
                           k->cuda->cuMemsetD8Async(r->area + i * sizeof(struct cuda_trail_record),
                                                    0, sizeof r->heads[i].busy, k->memory_stream),
                           e, "free a trail record on %s", k->name);
        FAIL_POINT("cuda:repair:free");
    }
    const int waited = cuda_wait(k, k->memory_stream, status == SHD_OK ? e : NULL);
    return status != SHD_OK ? status : waited;
}

int cuda_trail_repair(struct kern *kern, struct kern_trail_area *area, void *base, uint64_t bytes,
                      _Atomic uint64_t *chunks, uint64_t count, struct shd_err *e)
{
    (void)chunks; /* they are in the area */
    struct cuda_kern *k = cuda_kern_of(kern);
    struct repair r = {
        .area = cuda_address(area),
        .base = cuda_address(base),
        .image = sys_malloc(cuda_trail_bytes(count)),
        .heads = sys_calloc(CUDA_RECORDS_MAX, sizeof *r.heads),
        .chunk_count = count,
        .copies = sys_calloc(CUDA_TRAIL_COPIES_MAX, sizeof *r.copies),
    };
    int status = SHD_OK;
    if (r.image == NULL || r.heads == NULL || r.copies == NULL)
        status = err_set(e, SHD_ENOMEM, "no memory for the repair of %" PRIu64 " chunks", count);
    if (status == SHD_OK)
        status = cuda_enter(k, e);
    if (status == SHD_OK) {
        if (r.area >= r.base && bytes > r.area - r.base)
            bytes = r.area - r.base; /* old values do not belong into the trail itself */
        pthread_mutex_lock(&k->memory_lock);
        status = read_trail(k, &r, e);
        if (status == SHD_OK)
            status = cuda_trail_plan_repair(
                r.heads, (const struct cuda_chunk *)(const void *)(r.image + CUDA_TRAIL_CHUNKS_AT),
                count, bytes, r.copies, &r.copy_count, e);
        if (status == SHD_OK)
            status = put_back(k, &r, e);
        if (status == SHD_OK)
            status = forget(k, &r, e);
        pthread_mutex_unlock(&k->memory_lock);
    }
    free(r.image);
    free(r.heads);
    free(r.copies);
    return status;
}
