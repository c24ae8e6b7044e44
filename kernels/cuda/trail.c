/* See trail.h. */
#include "kernels/cuda/trail.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/device.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/share/owner_bytes.h"
#include "proto/spec/layout.h"

#define TILE_BYTES (CUDA_TILE_ELEMS * sizeof(float))

/* The layout outlives the program that made it. */
_Static_assert(sizeof(struct cuda_trail_head) == 128, "old values fill lines of their own");
_Static_assert(sizeof(struct cuda_trail_record) == 128 + 12 * CUDA_TILE_ELEMS, "record size");
_Static_assert(sizeof(struct cuda_chunk) == 16, "chunk word size");
_Static_assert(CUDA_CHUNK_ELEMS == KERN_CHUNK_ELEMS, "chunks are those of kern.h");
_Static_assert(CUDA_CHUNK_TILES <= 64, "a bit per tile");
_Static_assert(CUDA_BLOCK_ELEMS == SHD_BLOCK_ELEMS, "blocks are those of the layout");
_Static_assert(CUDA_BLOCK_ELEMS == CUDA_TILE_ELEMS, "accumulate sums a tile as a block");
_Static_assert(CUDA_TILE_ELEMS == QUANT_TILE_ELEMS, "a tile is one in 8 bits");
_Static_assert(QUANT_TILE_BYTES <= TILE_BYTES, "and fits where one in fp32 is kept");
_Static_assert(sizeof(struct kern_run) == 24, "runs on either side of the driver");

/* What others predict by (proto/share/owner_bytes.h). */
_Static_assert(CUDA_TRAIL_CHUNKS_AT == GPU_TRAIL_BYTES, "the trail's size is foreseen");
_Static_assert(sizeof(struct cuda_chunk) == GPU_TRAIL_CHUNK_BYTES, "a chunk's size is foreseen");
_Static_assert(CUDA_FLIGHT *CUDA_STAGE_BYTES == GPU_STAGING_BYTES, "staging is foreseen");

uint64_t cuda_trail_bytes(const struct kern *kern, uint64_t chunks)
{
    (void)kern; /* the same of all */
    return (CUDA_TRAIL_CHUNKS_AT + chunks * sizeof(struct cuda_chunk) + 127) / 128 * 128;
}

/* A head speaks while its tile is not marked and its chunk still belongs to its operation. */
static bool speaks(const struct cuda_trail_head *h, const struct cuda_chunk *chunks)
{
    const uint64_t tile = h->busy - 1;
    const struct cuda_chunk *chunk = &chunks[tile / CUDA_CHUNK_TILES];
    return chunk->op == h->op && (chunk->mask >> tile % CUDA_CHUNK_TILES & 1) == 0;
}

static uint64_t offset_of(const struct cuda_trail_head *h, uint64_t array)
{
    return h->offset_bytes[array] & ~(uint64_t)CUDA_TRAIL_INT8;
}

/* Of an array in 8 bits the record has codes and scales as they lie in the array. */
static uint64_t tile_bytes(const struct cuda_trail_head *h, uint64_t array)
{
    return (h->offset_bytes[array] & CUDA_TRAIL_INT8) != 0 ? QUANT_TILE_BYTES : TILE_BYTES;
}

/* A head that speaks names a tile of its slice and arrays of the segment, or it is an error. busy
 * is below 2^37, so that no sum here can wrap. */
static int check_head(const struct cuda_trail_head *h, uint32_t index, uint64_t bytes,
                      struct shd_err *e)
{
    const uint64_t chunk = (h->busy - 1) / CUDA_CHUNK_TILES;
    if (h->op < 1 || h->op > KERN_OP_MAX)
        return err_set(e, SHD_ESEGMENT,
                       "trail record %" PRIu32 ": op %" PRIu64 ", it is 1 to %" PRIu64, index,
                       h->op, KERN_OP_MAX);
    if (h->first_chunk > chunk)
        return err_set(e, SHD_ESEGMENT,
                       "trail record %" PRIu32 ": chunk %" PRIu64 " of an operation from %" PRIu64,
                       index, chunk, h->first_chunk);
    if (h->array_count < 1 || h->array_count > CUDA_ARRAYS_MAX)
        return err_set(e, SHD_ESEGMENT,
                       "trail record %" PRIu32 ": %" PRIu64 " arrays, it is 1 to %u", index,
                       h->array_count, CUDA_ARRAYS_MAX);
    const uint64_t tile = h->busy - 1 - h->first_chunk * CUDA_CHUNK_TILES;
    for (uint64_t i = 0; i < h->array_count; i++) {
        const uint64_t offset = offset_of(h, i), end_bytes = (tile + 1) * tile_bytes(h, i);
        if (offset % sizeof(float) != 0 || offset > bytes || end_bytes > bytes - offset)
            return err_set(e, SHD_ESEGMENT,
                           "trail record %" PRIu32 ": array %" PRIu64 " at byte %" PRIu64
                           " with tile %" PRIu64 ", the segment has %" PRIu64 " bytes",
                           index, i, offset, tile, bytes);
    }
    return SHD_OK;
}

static void add_copies(const struct cuda_trail_head *h, uint32_t index,
                       struct cuda_trail_copy *copies, uint32_t *count)
{
    const uint64_t tile = h->busy - 1 - h->first_chunk * CUDA_CHUNK_TILES;
    for (uint64_t i = 0; i < h->array_count; i++)
        copies[(*count)++] = (struct cuda_trail_copy){
            .from_bytes = index * sizeof(struct cuda_trail_record) +
                          offsetof(struct cuda_trail_record, old) + i * TILE_BYTES,
            .to_bytes = offset_of(h, i) + tile * tile_bytes(h, i),
            .bytes = tile_bytes(h, i),
        };
}

int cuda_trail_plan_repair(const struct cuda_trail_head *heads, const struct cuda_chunk *chunks,
                           uint64_t chunk_count, uint64_t bytes, struct cuda_trail_copy *ret_copies,
                           uint32_t *ret_count, struct shd_err *e)
{
    CHECK(chunk_count < UINT64_C(1) << 32);
    uint32_t count = 0;
    for (uint32_t i = 0; i < CUDA_RECORDS_MAX; i++) {
        const struct cuda_trail_head *h = &heads[i];
        if (h->busy == 0)
            continue;
        if (h->busy > chunk_count * CUDA_CHUNK_TILES)
            return err_set(e, SHD_ESEGMENT,
                           "trail record %" PRIu32 ": tile %" PRIu64 ", there are %" PRIu64, i,
                           h->busy - 1, chunk_count * CUDA_CHUNK_TILES);
        if (!speaks(h, chunks))
            continue;
        const int r = check_head(h, i, bytes, e);
        if (r != SHD_OK)
            return r;
        add_copies(h, i, ret_copies, &count);
    }
    *ret_count = count;
    return SHD_OK;
}

/* -- The device's part ---------------------------------------------------------------------------
 *
 * Heads and chunk words are read, old values copied back on the device, and then the records
 * forgotten. Killed at any point, the same again does no harm: copies only restore what the records
 * hold, and no record is forgotten before all copies have been waited for. */

/* A repair: the trail as it was read, and the copies that follow. */
struct repair {
    CUdeviceptr area, base;
    uint8_t *image; /* of the area, all of it: one copy is faster than one of each head; owned, as
                     * is what follows */
    struct cuda_trail_head *heads; /* [CUDA_RECORDS_MAX] */
    uint64_t chunk_count;
    struct cuda_trail_copy *copies; /* [CUDA_TRAIL_COPIES_MAX] */
    uint32_t copy_count;
};

/* Under memory_lock, as all below. */
static int copy_back(struct cuda_kern *k, CUdeviceptr to, CUdeviceptr from, uint64_t bytes,
                     struct shd_err *e)
{
    return cuda_call(k, k->cuda->cuMemcpyAsync(to, from, bytes, k->memory_stream), e,
                     "copy %" PRIu64 " bytes of the trail on %s", bytes, k->name);
}

static int read_trail(struct cuda_kern *k, const struct repair *r, struct shd_err *e)
{
    int status = copy_back(k, cuda_address(r->image), r->area,
                           cuda_trail_bytes(&k->base, r->chunk_count), e);
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
        status = copy_back(k, r->base + c->to_bytes, r->area + c->from_bytes, c->bytes, e);
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
        .image = sys_malloc(cuda_trail_bytes(kern, count)),
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
        CHECK(r.image != NULL && r.heads != NULL);
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
