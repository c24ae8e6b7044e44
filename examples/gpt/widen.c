/* widen.c: see widen.h. */
#include "examples/gpt/widen.h"

#include <stdlib.h>
#include <string.h>

#include "examples/gpt/vec.h"
#include "proto/base/status.h"

#define WIDEN_ELEMS 16384 /* of a task */

int widen_init(struct widen *w, enum shd_dtype dtype, uint64_t elems_max, struct pool *pool,
               struct shd_err *e)
{
    *w = (struct widen){ .dtype = dtype, .pool = pool, .elems_max = elems_max };
    for (int i = 0; i < WIDEN_SLOTS && dtype != SHD_F32; i++) {
        w->buffer[i] = malloc(elems_max * sizeof(float));
        if (w->buffer[i] == NULL)
            return err_set(e, SHD_ENOMEM, "no memory for a unit of %ju parameters in fp32",
                           (uintmax_t)elems_max);
    }
    return SHD_OK;
}

void widen_deinit(struct widen *w)
{
    for (int i = 0; i < WIDEN_SLOTS; i++) {
        free(w->buffer[i]);
        w->buffer[i] = NULL;
    }
}

struct widen_job {
    const struct vec_ops *vec;
    enum shd_dtype dtype;
    const void *params;
    uint64_t elems;
    float *out;
};

static void widen_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct widen_job *job = ctx;
    const uint64_t at = (uint64_t)task * WIDEN_ELEMS;
    const uint64_t count = job->elems - at < WIDEN_ELEMS ? job->elems - at : WIDEN_ELEMS;
    if (job->dtype == SHD_F32)
        memcpy(job->out + at, (const float *)job->params + at, count * sizeof(float));
    else if (job->dtype == SHD_BF16)
        job->vec->widen_bf16(job->out + at, (const uint16_t *)job->params + at, count);
    else
        job->vec->widen_f16(job->out + at, (const uint16_t *)job->params + at, count);
}

void widen_into(const struct widen *w, const void *params, uint64_t elems, float *out)
{
    struct widen_job job = {
        .vec = vec_pick(), .dtype = w->dtype, .params = params, .elems = elems, .out = out
    };
    pool_run(w->pool, (uint32_t)((elems + WIDEN_ELEMS - 1) / WIDEN_ELEMS), widen_task, &job);
}

const float *widen(struct widen *w, enum widen_slot slot, const void *params, uint64_t elems)
{
    if (w->dtype == SHD_F32 || params == NULL)
        return params;
    widen_into(w, params, elems, w->buffer[slot]);
    return w->buffer[slot];
}
