/* A CUDA device for tests that were written for the host: it is given the host's arrays, copies
 * them to the device (with guards around them), runs the operation there, copies back what it may
 * have changed and checks the guards. Every operation is over when it returns; done has fired. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "kernels/kern.h"
#include "proto/base/check.h"

#define GUARD_BYTES 256u

struct kern *device_extra_new(void);

#define ARRAYS_MAX 6

struct mirror {
    struct kern base;
    struct kern_ops ops;
    struct kern *cuda; /* owned */
};

struct array {
    void *host;
    uint64_t bytes;
    uint64_t skew; /* where it begins in its allocation, past the guard */
    uint8_t *memory;
};

/* An operation under way, and its arrays. */
struct call {
    struct kern *cuda;
    struct kern_waiter waiter;
    struct array at[ARRAYS_MAX];
    unsigned count;
};

static struct kern *cuda_of(struct kern *k)
{
    return ((struct mirror *)k)->cuda;
}

static struct call call_of(struct kern *k)
{
    struct call c = { .cuda = cuda_of(k) };
    kern_waiter_init(&c.waiter);
    return c;
}

static void copy(struct kern *cuda, void *to, const void *from, uint64_t bytes)
{
    struct kern_waiter w;
    kern_waiter_init(&w);
    CHECK(kern_copy(cuda, &(struct kern_copy){ to, from, bytes }, &w.done, NULL) == SHD_OK);
    CHECK(kern_wait(&w) == SHD_OK);
}

/* Where host's array is on the device. skewed: as badly aligned there as here. */
static void *mirrored(struct call *c, const void *host, uint64_t bytes, bool skewed)
{
    if (host == NULL || bytes == 0)
        return (void *)(uintptr_t)host;
    struct array *a = &c->at[c->count++];
    *a = (struct array){ (void *)(uintptr_t)host, bytes, skewed ? (uintptr_t)host % 64 : 0, NULL };
    const uint64_t whole = bytes + a->skew + 2 * GUARD_BYTES;
    a->memory = c->cuda->ops->alloc(c->cuda, whole);
    CHECK(a->memory != NULL);
    uint8_t *image = malloc(whole);
    CHECK(image != NULL);
    memset(image, 0xa5, whole);
    memcpy(image + GUARD_BYTES + a->skew, host, bytes);
    copy(c->cuda, a->memory, image, whole);
    free(image);
    return a->memory + GUARD_BYTES + a->skew;
}

/* Bring them back. */
static void arrays_end(const struct call *c)
{
    for (unsigned i = 0; i < c->count; i++) {
        const struct array *a = &c->at[i];
        const uint64_t whole = a->bytes + a->skew + 2 * GUARD_BYTES;
        uint8_t *image = malloc(whole);
        CHECK(image != NULL);
        copy(c->cuda, image, a->memory, whole);
        for (uint64_t j = 0; j < GUARD_BYTES + a->skew; j++)
            CHECK(image[j] == 0xa5);
        for (uint64_t j = whole - GUARD_BYTES; j < whole; j++)
            CHECK(image[j] == 0xa5);
        if (memcmp(a->host, image + GUARD_BYTES + a->skew, a->bytes) != 0)
            memcpy(a->host, image + GUARD_BYTES + a->skew, a->bytes);
        free(image);
        c->cuda->ops->release(c->cuda, a->memory, whole);
    }
}

/* Wait for it, if r says that it was queued. */
static int finish(struct call *c, int r, struct kern_done *done)
{
    const int status = r == SHD_OK ? kern_wait(&c->waiter) : r;
    arrays_end(c);
    if (r == SHD_OK && done != NULL)
        done->fn(done, status);
    return r;
}

/* A gradient is the device's and the host's in turn. */
static void mirror_accumulate(struct call *c, struct kern_accumulate *a)
{
    static unsigned way;
    a->acc = mirrored(c, a->acc, a->elems * 4, false);
    if (way++ % 2 == 0 || (uintptr_t)a->grad % 16 != 0)
        a->grad = mirrored(c, a->grad, a->elems * dtype_bytes(a->grad_dtype), false);
}

/* The four ways take turns: both sides on the device, either, neither. */
static void mirror_cast(struct call *c, struct kern_cast *a)
{
    static unsigned way;
    if ((way & 1) == 0)
        a->out = mirrored(c, a->out, a->elems * dtype_bytes(a->out_dtype), true);
    if ((way & 2) == 0)
        a->in = mirrored(c, a->in, a->elems * 4, true);
    way++;
}

/* An array in 8 bits, of so many elements at least. */
static void mirror_array(struct call *c, struct kern_array *a, uint64_t elems)
{
    a->base = mirrored(c, a->base, quant_bytes((elems + 2047) / 2048 * 2048), false);
}

/* An array is the host's and the device's in turn. */
static void mirror_hash(struct call *c, struct kern_hash *a)
{
    static unsigned way;
    if (a->x == NULL)
        mirror_array(c, &a->of, a->first_elem + a->elems);
    else if (way++ % 2 == 0)
        a->x = mirrored(c, a->x, a->elems * 4, true);
}

/* What is fp32 is the host's and the device's in turn. */
static void mirror_quantize(struct call *c, struct kern_quantize *a)
{
    static unsigned way;
    mirror_array(c, &a->to, a->first_elem + a->elems);
    if (way++ % 2 == 0)
        a->in = mirrored(c, a->in, a->elems * 4, true);
}

static void mirror_dequantize(struct call *c, struct kern_dequantize *a)
{
    static unsigned way;
    mirror_array(c, &a->from, a->first_elem + a->elems);
    if (way++ % 2 == 0)
        a->out = mirrored(c, a->out, a->elems * 4, true);
}

static void mirror_update(struct call *c, struct kern_update *a)
{
    a->param = mirrored(c, a->param, a->elems * 4, false);
    const uint64_t moment_bytes = a->int8 ? quant_bytes(a->elems) : a->elems * 4;
    a->m = mirrored(c, a->m, moment_bytes, false);
    a->v = mirrored(c, a->v, moment_bytes, false);
    a->grad = mirrored(c, a->grad, a->elems * 4, false);
    a->ema.average = mirrored(c, a->ema.average, a->elems * 4, false);
    a->publish = mirrored(c, a->publish, a->elems * dtype_bytes(a->publish_dtype), false);
}

static int mirror_submit(struct kern *k, const struct kern_op *op, struct kern_done *done,
                         struct shd_err *e)
{
    struct call c = call_of(k);
    struct kern_op there = *op;
    switch (op->kind) {
    case KERN_FILL:
        there.fill.out = mirrored(&c, op->fill.out, op->fill.elems * 4, true);
        break;
    case KERN_CAST:
        mirror_cast(&c, &there.cast);
        break;
    case KERN_ACCUMULATE:
        mirror_accumulate(&c, &there.accumulate);
        break;
    case KERN_SUMSQ:
        there.sumsq.x = mirrored(&c, op->sumsq.x, op->sumsq.elems * 4, false);
        break;
    case KERN_UPDATE:
        mirror_update(&c, &there.update);
        break;
    case KERN_HASH:
        mirror_hash(&c, &there.hash);
        break;
    case KERN_QUANTIZE:
        mirror_quantize(&c, &there.quantize);
        break;
    case KERN_DEQUANTIZE:
        mirror_dequantize(&c, &there.dequantize);
        break;
    default: /* a copy takes addresses of either side */
        break;
    }
    return finish(&c, c.cuda->ops->submit(c.cuda, &there, &c.waiter.done, e), done);
}

static void mirror_free(struct kern *k)
{
    if (k == NULL)
        return;
    cuda_of(k)->ops->free(cuda_of(k));
    free(k);
}

struct kern *device_extra_new(void)
{
    struct shd_err e = { 0 };
    struct mirror *m = calloc(1, sizeof *m);
    CHECK(m != NULL);
    if (kern_cuda_new(0, &m->cuda, &e) != SHD_OK) {
        fprintf(stderr, "no CUDA device: %s\n", e.text);
        exit(1);
    }
    m->ops = *m->cuda->ops;
    m->ops.submit = mirror_submit;
    m->ops.free = mirror_free;
    m->base.ops = &m->ops;
    return &m->base;
}
