/* The CUDA backend's operations: check the arguments, queue the work; and, on the device thread,
 * launch it by parts.
 *
 * Parts of a slice begin at whole chunks, and each is launched as a slice of its own with the same
 * trail: records and chunk words come out as they would from one launch.
 */
#include "kernels/cuda/ops.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "kernels/cuda/memory.h"
#include "kernels/cuda/trail.h"
#include "proto/base/check.h"
#include "proto/spec/layout.h"

/* Elements whose block sums fill the staging memory. */
#define SUMS_MAX      (CUDA_STAGE_BYTES / sizeof(double))
#define SUM_ELEMS_MAX (SUMS_MAX * SHD_BLOCK_ELEMS)
_Static_assert(SUM_ELEMS_MAX % KERN_CHUNK_ELEMS == 0, "parts are whole chunks");
_Static_assert(CUDA_CHUNK_ELEMS == KERN_CHUNK_ELEMS, "one layout of trails");
_Static_assert(CUDA_BLOCK_ELEMS == SHD_BLOCK_ELEMS, "one kind of block sums");

/* Elements of a gradient of the host for which the staging memory has room, with their block sums
 * behind them. */
#define STAGED_ELEMS ((CUDA_STAGE_BYTES / sizeof(float) - 1) / KERN_CHUNK_ELEMS * KERN_CHUNK_ELEMS)
_Static_assert(STAGED_ELEMS > 0 &&
                   STAGED_ELEMS * sizeof(float) + STAGED_ELEMS / SHD_BLOCK_ELEMS * sizeof(double) <=
                       CUDA_STAGE_BYTES,
               "both fit");

/* Runs that the staging memory has room for. The runs of one chunk always fit: each has an element
 * of it. */
#define RUNS_MAX (CUDA_STAGE_BYTES / sizeof(struct kern_run))
_Static_assert(RUNS_MAX > KERN_CHUNK_ELEMS + 1, "every chunk's runs fit");

/* Launch with enough blocks for `tiles`; args: the kernel's one parameter. */
static int launch(struct cuda_kern *k, enum cuda_fn fn, uint64_t tiles, void *args)
{
    const struct cuda_kernel *kernel = &k->kernels[fn];
    const unsigned blocks = tiles < kernel->blocks_max ? (unsigned)tiles : kernel->blocks_max;
    void *params[] = { args };
    CHECK(blocks > 0);
    return cuda_call(k,
                     k->cuda->cuLaunchKernel(kernel->function, blocks, 1, 1, CUDA_THREADS, 1, 1, 0,
                                             k->stream, params, NULL),
                     NULL, "launch %s on %s", kernel->name, k->name);
}

static uint64_t tiles_of(uint64_t elems)
{
    return (elems + CUDA_TILE_ELEMS - 1) / CUDA_TILE_ELEMS;
}

/* Bytes from one side to any other, on the stream. */
static int copy_async(struct cuda_kern *k, CUdeviceptr to, CUdeviceptr from, uint64_t bytes)
{
    return cuda_call(k, k->cuda->cuMemcpyAsync(to, from, bytes, k->stream), NULL,
                     "copy %" PRIu64 " bytes on %s", bytes, k->name);
}

/* Whether an address is the device's. One that the driver does not know is the host's. */
static int find_side(struct cuda_kern *k, const void *p, bool *ret_on_device)
{
    int type = 0;
    const CUresult r = k->cuda->cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                                      cuda_address(p));
    if (r != CUDA_ERROR_INVALID_VALUE && r != CUDA_SUCCESS)
        return cuda_call(k, r, NULL, "ask %s whose memory %p is", k->name, p);
    *ret_on_device = r == CUDA_SUCCESS && type == CU_MEMORYTYPE_DEVICE;
    return SHD_OK;
}

static int fill_launch(struct cuda_kern *k, struct cuda_part *p)
{
    const struct kern_fill *a = &p->op->work.op.fill;
    struct cuda_fill args = {
        .out = a->out,
        .elems = a->elems,
        .first_index = a->first_index,
        .key = a->key,
        .kind = a->kind,
        .a = a->a,
        .b = a->b,
    };
    return launch(k, CUDA_FILL, tiles_of(a->elems), &args);
}

/* -- Sums of squares -------------------------------------------------------------------------- */

/* Have the part's block sums copied to the host, behind the kernel that makes them. */
static int fetch_sums(struct cuda_kern *k, const struct cuda_part *p, CUdeviceptr sums)
{
    return copy_async(k, cuda_address(p->host), sums, p->count / SHD_BLOCK_ELEMS * sizeof(double));
}

static void add_sum(struct kern_sum *to, double block)
{
    if (isfinite(block))
        fixsum_add(&to->sum, block);
    else
        to->finite = false;
}

static int add_sums(struct cuda_kern *k, struct cuda_part *p)
{
    (void)k;
    const double *sums = p->host;
    struct kern_sum *to = p->op->work.sum;
    for (uint64_t i = 0; to != NULL && i < p->count / SHD_BLOCK_ELEMS; i++)
        add_sum(to, sums[i]);
    return SHD_OK;
}

static int sumsq_launch(struct cuda_kern *k, struct cuda_part *p)
{
    const struct kern_sumsq *a = &p->op->work.op.sumsq;
    p->count = p->count < SUM_ELEMS_MAX ? p->count : SUM_ELEMS_MAX;
    struct cuda_sumsq args = {
        .x = a->x + p->first,
        .elems = p->count,
        .block_sums = (double *)(uintptr_t)p->device,
    };
    const int r = launch(k, CUDA_SUMSQ, tiles_of(p->count), &args);
    return r == SHD_OK ? fetch_sums(k, p, p->device) : r;
}

/* -- Slices with a trail ---------------------------------------------------------------------- */

/* The trail of the part that begins at element `first`, and its chunks given to the op. */
static int begin_trail(struct cuda_kern *k, const struct kern_trail *t, const struct cuda_part *p,
                       struct cuda_trail *ret)
{
    *ret = (struct cuda_trail){ 0 };
    if (t->area == NULL)
        return SHD_OK;
    uint8_t *area = (uint8_t *)t->area;
    const uint64_t first_chunk = t->first_chunk + p->first / KERN_CHUNK_ELEMS;
    *ret = (struct cuda_trail){
        .records = (struct cuda_trail_record *)(void *)area,
        .chunks = (struct cuda_chunk *)(void *)(area + CUDA_TRAIL_CHUNKS_AT) + first_chunk,
        .first_chunk = first_chunk,
        .base = cuda_address(t->base),
        .op = t->op,
    };
    struct cuda_trail_begin args = {
        .records = ret->records,
        .chunks = ret->chunks,
        .count = kern_trail_chunks(p->count),
        .op = t->op,
    };
    return launch(k, CUDA_TRAIL_BEGIN, 1, &args);
}

/* The part's gradient on the device. A gradient of the host (a spilled one) is copied to the part's
 * staging memory; *sums is then behind it. */
static int stage_grad(struct cuda_kern *k, struct cuda_part *p, const void **ret_grad,
                      CUdeviceptr *sums)
{
    const struct kern_accumulate *a = &p->op->work.op.accumulate;
    const uint64_t elem_bytes = dtype_bytes(a->grad_dtype);
    const void *grad = (const uint8_t *)a->grad + p->first * elem_bytes;
    bool here = false;
    const int r = find_side(k, grad, &here);
    *ret_grad = grad;
    if (r != SHD_OK || here)
        return r;
    p->count = p->count < STAGED_ELEMS ? p->count : STAGED_ELEMS;
    *ret_grad = (const void *)(uintptr_t)p->device;
    *sums = p->device + STAGED_ELEMS * sizeof(float);
    return copy_async(k, p->device, cuda_address(grad), p->count * elem_bytes);
}

static int accumulate_launch(struct cuda_kern *k, struct cuda_part *p)
{
    const struct kern_accumulate *a = &p->op->work.op.accumulate;
    CUdeviceptr sums = p->device;
    const void *grad;
    if (a->sum != NULL)
        p->count = p->count < SUM_ELEMS_MAX ? p->count : SUM_ELEMS_MAX;
    int r = stage_grad(k, p, &grad, &sums);
    if (r != SHD_OK)
        return r;
    struct cuda_accumulate args = {
        .acc = a->acc + p->first,
        .grad = grad,
        .elems = p->count,
        .grad_dtype = a->grad_dtype,
        .first = a->first,
        .block_sums = a->sum != NULL ? (double *)(uintptr_t)sums : NULL,
    };
    r = begin_trail(k, &a->trail, p, &args.trail);
    if (r == SHD_OK)
        r = launch(k, CUDA_ACCUMULATE, tiles_of(p->count), &args);
    return r == SHD_OK && a->sum != NULL ? fetch_sums(k, p, sums) : r;
}

/* Runs of the part that begins at p->first, counted from there, into its staging memory; p->count
 * becomes what they are all runs of. Returns how many. */
static uint32_t pack_runs(const struct kern_update *a, struct cuda_part *p)
{
    struct kern_run *to = p->host;
    uint32_t count = 0;
    uint64_t end = p->first + p->count;
    for (uint32_t i = run_find(a->runs, a->run_count, p->first); i < a->run_count; i++) {
        const struct kern_run *run = &a->runs[i];
        if (run->elems == 0)
            continue;
        if (count == RUNS_MAX) { /* no room: end with the chunk before */
            end = run->first_elem / KERN_CHUNK_ELEMS * KERN_CHUNK_ELEMS;
            break;
        }
        const uint64_t first = run->first_elem > p->first ? run->first_elem : p->first;
        to[count++] = (struct kern_run){
            .first_elem = first - p->first,
            .elems = run->first_elem + run->elems - first,
            .hyper = run->hyper,
        };
    }
    CHECK(end > p->first);
    p->count = end - p->first;
    while (count > 0 && to[count - 1].first_elem >= p->count)
        count--;
    if (count > 0 && to[count - 1].elems > p->count - to[count - 1].first_elem)
        to[count - 1].elems = p->count - to[count - 1].first_elem;
    return count;
}

static const enum cuda_fn update_fns[] = {
    [SPEC_ADAMW] = CUDA_ADAMW,         [SPEC_SGD] = CUDA_SGD,
    [SPEC_LION] = CUDA_LION,           [SPEC_ADAMW_TORCH] = CUDA_ADAMW_TORCH,
    [SPEC_SGD_TORCH] = CUDA_SGD_TORCH, [SPEC_MEAN] = CUDA_MEAN,
};

static const enum cuda_fn int8_fns[] = {
    [SPEC_ADAMW] = CUDA_ADAMW_INT8,         [SPEC_SGD] = CUDA_SGD_INT8,
    [SPEC_LION] = CUDA_LION_INT8,           [SPEC_ADAMW_TORCH] = CUDA_ADAMW_TORCH_INT8,
    [SPEC_SGD_TORCH] = CUDA_SGD_TORCH_INT8,
};

/* A part's moment, whole tiles from the slice's beginning. */
static float *moment_at(const struct kern_update *a, float *moment, uint64_t first)
{
    return moment + (a->int8 ? quant_bytes(first) / sizeof *moment : first);
}

static int step_launch(struct cuda_kern *k, struct cuda_part *p, uint32_t runs)
{
    const struct kern_update *a = &p->op->work.op.update;
    struct cuda_update args = {
        .param = a->param + p->first,
        .m = spec_optimizer_rows[a->kind].moments > 0 ? moment_at(a, a->m, p->first) : NULL,
        .v = spec_optimizer_rows[a->kind].moments > 1 ? moment_at(a, a->v, p->first) : NULL,
        .grad = a->grad + p->first,
        .publish = (uint8_t *)a->publish + p->first * dtype_bytes(a->publish_dtype),
        .elems = p->count,
        .runs = (const struct kern_run *)(uintptr_t)p->device,
        .run_count = runs,
        .publish_dtype = a->publish_dtype,
    };
    for (uint32_t i = 0; i < a->hyper_count; i++)
        args.rates[i] = kern_rates_of(a->kind, &a->hypers[i], a->grad_scale);
    int r = copy_async(k, p->device, cuda_address(p->host), runs * sizeof(struct kern_run));
    if (r == SHD_OK)
        r = begin_trail(k, &a->trail, p, &args.trail);
    const enum cuda_fn fn = a->int8 ? int8_fns[a->kind] : update_fns[a->kind];
    return r == SHD_OK ? launch(k, fn, tiles_of(p->count), &args) : r;
}

static int ema_launch(struct cuda_kern *k, const struct cuda_part *p)
{
    const struct kern_update *a = &p->op->work.op.update;
    struct cuda_ema args = {
        .average = a->ema.average + p->first,
        .param = a->param + p->first,
        .elems = p->count,
        .rest = a->ema.rest,
    };
    struct kern_trail trail = a->trail;
    trail.first_chunk = a->ema.first_chunk;
    const int r = begin_trail(k, &trail, p, &args.trail);
    return r == SHD_OK ? launch(k, CUDA_EMA, tiles_of(p->count), &args) : r;
}

/* -- What an update comes to --------------------------------------------------------------------
 *
 * A part's old values are copied aside before it, into the end of its staging memory; behind it the
 * squares are summed, and the sums fetched to the same places on the host, as are the chunks'
 * words from before it: a part of which a predecessor had done something is not whole. So are parts
 * whose runs leave no room. */
#define MEASURED_CHUNKS 6u
#define MEASURED_ELEMS  (MEASURED_CHUNKS * KERN_CHUNK_ELEMS)
#define MEASURED_SUMS   (MEASURED_ELEMS / SHD_BLOCK_ELEMS)

struct measured {
    float old[MEASURED_ELEMS]; /* the device's */
    double update[MEASURED_SUMS], weight[MEASURED_SUMS];
    struct cuda_chunk chunks[MEASURED_CHUNKS]; /* the host's */
};
#define MEASURED_AT ((CUDA_STAGE_BYTES - sizeof(struct measured)) / 256 * 256)
_Static_assert(sizeof(struct measured) < CUDA_STAGE_BYTES * 7 / 8, "runs have some room");

static CUdeviceptr measured_at(const struct cuda_part *p, size_t field)
{
    return p->device + MEASURED_AT + field;
}

/* Before the part. */
static int begin_measured(struct cuda_kern *k, const struct cuda_part *p)
{
    const struct kern_update *a = &p->op->work.op.update;
    struct measured *m = (void *)((uint8_t *)p->host + MEASURED_AT);
    int r = copy_async(k, measured_at(p, offsetof(struct measured, old)),
                       cuda_address(a->param + p->first), p->count * sizeof(float));
    if (a->trail.area == NULL || r != SHD_OK)
        return r;
    const uint64_t chunk = a->trail.first_chunk + p->first / KERN_CHUNK_ELEMS;
    return copy_async(
        k, cuda_address(m->chunks),
        cuda_address((uint8_t *)a->trail.area + CUDA_TRAIL_CHUNKS_AT + chunk * sizeof *m->chunks),
        kern_trail_chunks(p->count) * sizeof *m->chunks);
}

/* Squares of the new values, and of the changes, of the part's. */
static int end_measured(struct cuda_kern *k, const struct cuda_part *p)
{
    struct measured *m = (void *)((uint8_t *)p->host + MEASURED_AT);
    const CUdeviceptr update = measured_at(p, offsetof(struct measured, update)),
                      weight = measured_at(p, offsetof(struct measured, weight));
    const uint64_t bytes = p->count / SHD_BLOCK_ELEMS * sizeof(double);
    struct cuda_sumsq args = {
        .x = p->op->work.op.update.param + p->first,
        .elems = p->count,
        .block_sums = (double *)(uintptr_t)weight,
    };
    int r = launch(k, CUDA_SUMSQ, tiles_of(p->count), &args);
    args.block_sums = (double *)(uintptr_t)update;
    args.old = (const float *)(uintptr_t)measured_at(p, offsetof(struct measured, old));
    if (r == SHD_OK)
        r = launch(k, CUDA_SUMSQ, tiles_of(p->count), &args);
    if (r == SHD_OK)
        r = copy_async(k, cuda_address(m->update), update, bytes);
    return r == SHD_OK ? copy_async(k, cuda_address(m->weight), weight, bytes) : r;
}

static int add_change(struct cuda_kern *k, struct cuda_part *p)
{
    (void)k;
    const struct kern_update *a = &p->op->work.op.update;
    const struct measured *m = (const void *)((const uint8_t *)p->host + MEASURED_AT);
    if (a->change == NULL)
        return SHD_OK;
    if (!p->staged) {
        a->change->whole = false;
        return SHD_OK;
    }
    for (uint64_t i = 0; i < p->count / SHD_BLOCK_ELEMS; i++) {
        add_sum(&a->change->update, m->update[i]);
        add_sum(&a->change->weight, m->weight[i]);
    }
    for (uint64_t c = 0; a->trail.area != NULL && c < kern_trail_chunks(p->count); c++)
        if (m->chunks[c].op == a->trail.op && m->chunks[c].mask != 0)
            a->change->whole = false;
    return SHD_OK;
}

static int update_launch(struct cuda_kern *k, struct cuda_part *p)
{
    const struct kern_update *a = &p->op->work.op.update;
    if (a->change != NULL && p->count > MEASURED_ELEMS)
        p->count = MEASURED_ELEMS;
    const uint32_t runs = pack_runs(a, p);
    int r = SHD_OK;
    p->staged = a->change != NULL && runs * sizeof(struct kern_run) <= MEASURED_AT;
    if (p->staged)
        r = begin_measured(k, p);
    if (r == SHD_OK && runs > 0)
        r = step_launch(k, p, runs);
    if (r == SHD_OK && p->staged)
        r = end_measured(k, p);
    return r == SHD_OK && a->ema.average != NULL ? ema_launch(k, p) : r;
}

/* -- With an end on the host: copy, cast and hash ------------------------------------------------
 *
 * The driver tells which side an address is on. Memory of the host that is not pinned works too:
 * the driver then copies through memory of its own, and a copy to the host returns when it is done,
 * so that the device thread waits there instead of launching ahead. */

/* Elements that are cast at a time by way of the staging memory: fp32 in its first half, what it
 * becomes (at most as large) in the second. */
#define CAST_ELEMS (CUDA_STAGE_BYTES / 2 / sizeof(float))

/* Leaves that fit in the staging memory. */
#define HASH_LEAVES (CUDA_STAGE_BYTES / sizeof(float) / SHD_BLOCK_ELEMS)

static int launch_cast(struct cuda_kern *k, void *out, enum shd_dtype out_dtype, const float *in,
                       uint64_t elems)
{
    struct cuda_cast args = { .out = out, .in = in, .elems = elems, .out_dtype = out_dtype };
    return launch(k, CUDA_CAST, tiles_of(elems), &args);
}

/* One piece, through staging memory on the sides that are the host's. */
static int cast_piece(struct cuda_kern *k, struct cuda_part *p, bool out_here, bool in_here)
{
    const struct kern_cast *a = &p->op->work.op.cast;
    const uint64_t out_bytes = dtype_bytes(a->out_dtype);
    p->count = p->count < CAST_ELEMS ? p->count : CAST_ELEMS;
    uint8_t *out = (uint8_t *)a->out + p->first * out_bytes;
    const float *in = a->in + p->first;
    const CUdeviceptr staged_out = p->device + CUDA_STAGE_BYTES / 2;
    int r = SHD_OK;
    if (!in_here)
        r = copy_async(k, p->device, cuda_address(in), p->count * sizeof(float));
    if (r == SHD_OK)
        r = launch_cast(k, out_here ? (void *)out : (void *)(uintptr_t)staged_out, a->out_dtype,
                        in_here ? in : (const float *)(uintptr_t)p->device, p->count);
    if (r == SHD_OK && !out_here)
        r = copy_async(k, cuda_address(out), staged_out, p->count * out_bytes);
    return r;
}

static int cast_launch(struct cuda_kern *k, struct cuda_part *p)
{
    const struct kern_cast *a = &p->op->work.op.cast;
    bool out_here = false, in_here = false;
    int r = find_side(k, a->out, &out_here);
    if (r == SHD_OK)
        r = find_side(k, a->in, &in_here);
    if (r != SHD_OK)
        return r;
    if (out_here && in_here)
        return launch_cast(k, a->out, a->out_dtype, a->in, a->elems);
    if (a->out_dtype == SHD_F32)
        return copy_async(k, cuda_address(a->out), cuda_address(a->in), a->elems * sizeof(float));
    return cast_piece(k, p, out_here, in_here);
}

/* Elements of an array in 8 bits, in fp32 on the device. */
static int launch_dequantize(struct cuda_kern *k, CUdeviceptr out, const struct kern_array *from,
                             uint64_t first_elem, uint64_t elems)
{
    struct cuda_dequantize args = { .out = (float *)(uintptr_t)out,
                                    .from = from->base,
                                    .first_elem = first_elem,
                                    .elems = elems,
                                    .sign = from->quant == QUANT_SIGNED };
    return launch(k, CUDA_DEQUANTIZE, tiles_of(elems), &args);
}

static int dequantize_launch(struct cuda_kern *k, struct cuda_part *p)
{
    const struct kern_dequantize *a = &p->op->work.op.dequantize;
    float *out = a->out + p->first;
    bool here = false;
    int r = find_side(k, out, &here);
    if (r != SHD_OK)
        return r;
    if (here)
        return launch_dequantize(k, cuda_address(out), &a->from, a->first_elem + p->first,
                                 p->count);
    p->count = p->count < CAST_ELEMS ? p->count : CAST_ELEMS;
    r = launch_dequantize(k, p->device, &a->from, a->first_elem + p->first, p->count);
    return r == SHD_OK ? copy_async(k, cuda_address(out), p->device, p->count * sizeof(float)) : r;
}

static int quantize_launch(struct cuda_kern *k, struct cuda_part *p)
{
    const struct kern_quantize *a = &p->op->work.op.quantize;
    const float *in = a->in + p->first;
    bool here = false;
    int r = find_side(k, in, &here);
    if (r == SHD_OK && !here) {
        p->count = p->count < CAST_ELEMS ? p->count : CAST_ELEMS;
        r = copy_async(k, p->device, cuda_address(in), p->count * sizeof(float));
    }
    struct cuda_quantize args = { .to = a->to.base,
                                  .in = here ? in : (const float *)(uintptr_t)p->device,
                                  .first_elem = a->first_elem + p->first,
                                  .elems = p->count,
                                  .sign = a->to.quant == QUANT_SIGNED };
    return r == SHD_OK ? launch(k, CUDA_QUANTIZE, tiles_of(p->count), &args) : r;
}

/* Leaves of an array of the host are all one part. */
static int hash_launch(struct cuda_kern *k, struct cuda_part *p)
{
    const struct kern_hash *a = &p->op->work.op.hash;
    int r = SHD_OK;
    p->staged = true;
    if (a->x != NULL)
        r = find_side(k, a->x, &p->staged);
    if (r != SHD_OK || !p->staged)
        return r;
    p->count = p->count < HASH_LEAVES ? p->count : HASH_LEAVES;
    const uint64_t first = hash_leaf_first(a, p->first),
                   end = hash_leaf_first(a, p->first + p->count);
    if (a->x == NULL) {
        r = launch_dequantize(k, p->device, &a->of, a->first_elem + first, end - first);
        return r == SHD_OK
                   ? copy_async(k, cuda_address(p->host), p->device, (end - first) * sizeof(float))
                   : r;
    }
    return copy_async(k, cuda_address(p->host), cuda_address(a->x + first),
                      (end - first) * sizeof(float));
}

static int hash_finish(struct cuda_kern *k, struct cuda_part *p)
{
    const struct kern_hash *a = &p->op->work.op.hash;
    const uint64_t first = hash_leaf_first(a, p->first),
                   end = hash_leaf_first(a, p->first + p->count);
    const struct kern_hash piece = {
        .x = p->staged ? (const float *)p->host : a->x + first,
        .elems = end - first,
        .head_elems = p->first == 0 ? a->head_elems : SHD_BLOCK_ELEMS,
        .out = a->out + p->first,
    };
    struct kern_waiter w;
    kern_waiter_init(&w);
    const int r = kern_hash(k->host, &piece, &w.done, NULL);
    return r == SHD_OK ? kern_wait(&w) : r;
}

static int copy_launch(struct cuda_kern *k, struct cuda_part *p)
{
    const struct kern_copy *a = &p->op->work.op.copy;
    return copy_async(k, cuda_address(a->to), cuda_address(a->from), p->count);
}

static int cuda_submit(struct kern *k, const struct kern_op *op, struct kern_done *done,
                       struct shd_err *e)
{
    static const struct work_rules rules = { .slice_align = 16,
                                             .hypers_max = CUDA_GROUPS_MAX,
                                             .int8 = true };
    static const struct cuda_op kinds[KERN_OP_KINDS] = {
        [KERN_FILL] = { .launch = fill_launch },
        [KERN_CAST] = { .launch = cast_launch },
        [KERN_ACCUMULATE] = { .launch = accumulate_launch, .finish = add_sums },
        [KERN_SUMSQ] = { .launch = sumsq_launch, .finish = add_sums },
        [KERN_UPDATE] = { .launch = update_launch, .finish = add_change },
        [KERN_HASH] = { .launch = hash_launch, .finish = hash_finish },
        [KERN_COPY] = { .launch = copy_launch },
        [KERN_QUANTIZE] = { .launch = quantize_launch },
        [KERN_DEQUANTIZE] = { .launch = dequantize_launch },
    };
    struct work work;
    const int r = work_init(&work, op, &rules, done, e);
    if (r != SHD_OK)
        return r;
    struct cuda_op queued = kinds[op->kind];
    queued.work = work;
    return cuda_queue_push(cuda_kern_of(k), &queued, e);
}

/* A kernel takes as long to start as a thread to wake. */
static int cuda_run_here(struct kern *k, const struct kern_op *op, int *ret_status,
                         struct shd_err *e)
{
    (void)k, (void)op, (void)ret_status, (void)e;
    return SHD_PENDING;
}

static const struct kern_choice *cuda_choices(struct kern *k, uint32_t *ret_count)
{
    (void)k;
    *ret_count = 0;
    return NULL;
}

/* UUID and free are the device's: cuda.c sets them. */
const struct kern_ops cuda_ops = {
    .name = "cuda",
    .submit = cuda_submit,
    .run_here = cuda_run_here,
    .place = SEGMENT_CUDA,
    .int8 = true,
    .segment_new = cuda_segment_new,
    .segment_map = cuda_segment_map,
    .segment_close = cuda_segment_close,
    .alloc = cuda_alloc,
    .release = cuda_release,
    .pin = cuda_pin,
    .unpin = cuda_unpin,
    .available = cuda_available,
    .health = cuda_health,
    .failed = cuda_failed,
    .choices = cuda_choices,
    .trail_bytes = cuda_trail_bytes,
    .trail_repair = cuda_trail_repair,
};
