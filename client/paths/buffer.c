/* See buffer.h. */
#include "client/paths/buffer.h"

#include <inttypes.h>

#include "client/session/session.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"

struct buffers buffers_for(const struct shd_model *m, uint64_t elem_bytes)
{
    uint64_t elems = 0;
    for (uint32_t u = 0; u < m->spec->unit_count; u++)
        if (m->spec->units[u].elems > elems)
            elems = m->spec->units[u].elems;
    return (struct buffers){ session_gpu(m->session), elems * elem_bytes };
}

static int hold_on_host(const struct buffers *in, struct buffer *b, struct shd_err *e)
{
    if (b->base != NULL)
        return SHD_OK;
    void *base = sys_pages(in->bytes_max);
    if (base == NULL)
        return err_sys(e, SHD_ENOMEM, "map %" PRIu64 " bytes for a unit", in->bytes_max);
    b->base = base;
    return SHD_OK;
}

static int hold_on_gpu(const struct buffers *in, struct buffer *b, uint64_t bytes,
                       struct shd_err *e)
{
    buffer_free(in, b); /* first: there may not be room for both */
    b->base = in->gpu->ops->alloc(in->gpu, bytes);
    if (b->base == NULL)
        return err_set(e, SHD_ENOMEM, "no GPU memory for a unit of %" PRIu64 " bytes", bytes);
    return SHD_OK;
}

int buffer_hold(const struct buffers *in, struct buffer *b, uint64_t bytes, struct shd_err *e)
{
    CHECK(bytes <= in->bytes_max);
    if (b->base != NULL && b->bytes >= bytes)
        return SHD_OK;
    const int r = in->gpu != NULL ? hold_on_gpu(in, b, bytes, e) : hold_on_host(in, b, e);
    if (r == SHD_OK)
        b->bytes = bytes;
    return r;
}

void buffer_free(const struct buffers *in, struct buffer *b)
{
    if (b->base != NULL && in->gpu != NULL)
        in->gpu->ops->release(in->gpu, b->base, b->bytes);
    else if (b->base != NULL)
        sys_pages_free(b->base, in->bytes_max);
    *b = (struct buffer){ 0 };
}

static bool is_better(const struct buffer *b, const struct buffer *best, uint64_t bytes)
{
    const bool fits = b->bytes >= bytes, best_fits = best->bytes >= bytes;
    return (fits && !best_fits) || (fits == best_fits && (b->bytes < best->bytes) == fits);
}

struct buffer *buffer_find(struct buffer *buffers, uint32_t count, uint64_t bytes)
{
    struct buffer *best = NULL;
    for (struct buffer *b = buffers; b < buffers + count; b++)
        if (!b->busy && (best == NULL || is_better(b, best, bytes)))
            best = b;
    return best;
}
