/* Operations with an end on the host: copy, cast and hash. All on the device thread.
 *
 * The driver tells which side an address is on. Memory of the host that is not pinned works too:
 * the driver then copies through memory of its own, and a copy to the host returns when it is done,
 * so that this thread waits there instead of launching ahead. */
#include <inttypes.h>

#include "kernels/cuda/cuda.h"
#include "proto/base/check.h"
#include "proto/spec/layout.h"

/* Elements that are cast at a time by way of the staging memory: fp32 in its first half, what it
 * becomes (at most as large) in the second. */
#define CAST_ELEMS (CUDA_STAGE_BYTES / 2 / sizeof(float))

/* Leaves that fit in the staging memory. */
#define HASH_LEAVES (CUDA_STAGE_BYTES / sizeof(float) / SHD_BLOCK_ELEMS)

int cuda_find_side(struct cuda_kern *k, const void *p, bool *ret_on_device)
{
    int type = 0;
    const CUresult r = k->cuda->cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                                      cuda_address(p));
    if (r != CUDA_ERROR_INVALID_VALUE && r != CUDA_SUCCESS)
        return cuda_call(k, r, NULL, "ask %s whose memory %p is", k->name, p);
    *ret_on_device = r == CUDA_SUCCESS && type == CU_MEMORYTYPE_DEVICE;
    return SHD_OK;
}

int cuda_copy_launch(struct cuda_kern *k, struct cuda_part *p)
{
    const struct kern_copy *a = &p->op->u.copy;
    return cuda_copy_async(k, cuda_address(a->to), cuda_address(a->from), p->count);
}

/* One piece, through staging memory on the sides that are the host's. */
static int cast_piece(struct cuda_kern *k, struct cuda_part *p, bool out_here, bool in_here)
{
    const struct kern_cast *a = &p->op->u.cast;
    const uint64_t out_bytes = dtype_bytes(a->out_dtype);
    p->count = p->count < CAST_ELEMS ? p->count : CAST_ELEMS;
    uint8_t *out = (uint8_t *)a->out + p->first * out_bytes;
    const float *in = a->in + p->first;
    const CUdeviceptr staged_out = p->device + CUDA_STAGE_BYTES / 2;
    int r = SHD_OK;
    if (!in_here)
        r = cuda_copy_async(k, p->device, cuda_address(in), p->count * sizeof(float));
    if (r == SHD_OK)
        r = cuda_launch_cast(k, out_here ? (void *)out : (void *)(uintptr_t)staged_out,
                             a->out_dtype, in_here ? in : (const float *)(uintptr_t)p->device,
                             p->count);
    if (r == SHD_OK && !out_here)
        r = cuda_copy_async(k, cuda_address(out), staged_out, p->count * out_bytes);
    return r;
}

int cuda_cast_launch(struct cuda_kern *k, struct cuda_part *p)
{
    const struct kern_cast *a = &p->op->u.cast;
    bool out_here = false, in_here = false;
    int r = cuda_find_side(k, a->out, &out_here);
    if (r == SHD_OK)
        r = cuda_find_side(k, a->in, &in_here);
    if (r != SHD_OK)
        return r;
    if (out_here && in_here)
        return cuda_launch_cast(k, a->out, a->out_dtype, a->in, a->elems);
    if (a->out_dtype == SHD_F32)
        return cuda_copy_async(k, cuda_address(a->out), cuda_address(a->in),
                               a->elems * sizeof(float));
    return cast_piece(k, p, out_here, in_here);
}

/* First element of a leaf, or behind the last one. */
static uint64_t leaf_first(const struct kern_hash *a, uint64_t leaf)
{
    const uint64_t first = leaf == 0 ? 0 : a->head_elems + (leaf - 1) * SHD_BLOCK_ELEMS;
    return first < a->elems ? first : a->elems;
}

/* Leaves of an array of the host are all one part. */
int cuda_hash_launch(struct cuda_kern *k, struct cuda_part *p)
{
    const struct kern_hash *a = &p->op->u.hash;
    const int r = cuda_find_side(k, a->x, &p->staged);
    if (r != SHD_OK || !p->staged)
        return r;
    p->count = p->count < HASH_LEAVES ? p->count : HASH_LEAVES;
    const uint64_t first = leaf_first(a, p->first), end = leaf_first(a, p->first + p->count);
    return cuda_copy_async(k, cuda_address(p->host), cuda_address(a->x + first),
                           (end - first) * sizeof(float));
}

int cuda_hash_finish(struct cuda_kern *k, struct cuda_part *p)
{
    const struct kern_hash *a = &p->op->u.hash;
    const uint64_t first = leaf_first(a, p->first), end = leaf_first(a, p->first + p->count);
    const struct kern_hash piece = {
        .x = p->staged ? (const float *)p->host : a->x + first,
        .elems = end - first,
        .head_elems = p->first == 0 ? a->head_elems : SHD_BLOCK_ELEMS,
        .out = a->out + p->first,
    };
    struct kern_waiter w;
    kern_waiter_init(&w);
    const int r = k->host->ops->hash(k->host, &piece, &w.done, NULL);
    return r == SHD_OK ? kern_wait(&w) : r;
}
