/* See gaps.h. */
#include "client/run/gaps.h"

#include <string.h>

#include "client/paths/kern_run.h"
#include "client/session/session.h"

/* Elements from *at on that no gradient is of: the gap before tensor t of unit u (before its end,
 * for t == tensor_count). *at moves on behind that tensor. */
static uint64_t next_gap(const struct shd_model *m, const struct spec_unit *u, uint32_t t,
                         uint64_t *at)
{
    const struct spec_tensor *tensor = &m->spec->tensors[u->first_tensor + t];
    const uint64_t end = t < u->tensor_count ? tensor->offset_elems : u->elems;
    const uint64_t elems = end - *at;
    *at = t < u->tensor_count && !tensor->statistics ? end + tensor->elems : end;
    return elems;
}

static int zero_gaps_on_gpu(struct shd_model *m, const struct spec_unit *u, float *grad,
                            struct shd_err *e)
{
    struct kern_batch batch;
    uint64_t at = 0;
    int r = SHD_OK;
    kern_batch_init(&batch);
    for (uint32_t t = 0; r == SHD_OK && t <= u->tensor_count; t++) {
        float *gap = grad + at;
        const uint64_t elems = next_gap(m, u, t, &at);
        const struct kern_op zero = kern_zero(gap, elems);
        if (elems > 0)
            r = kern_batch_add(&batch, m->session->kern, &zero, e);
    }
    const int waited = kern_batch_wait(&batch, r == SHD_OK ? e : NULL);
    return r == SHD_OK ? waited : r;
}

int gaps_zero(struct shd_model *m, uint32_t unit, float *grad, struct shd_err *e)
{
    const struct spec_unit *u = &m->spec->units[unit];
    uint64_t at = 0;
    if (m->session->on_gpu)
        return zero_gaps_on_gpu(m, u, grad, e);
    for (uint32_t t = 0; t <= u->tensor_count; t++) {
        float *gap = grad + at;
        memset(gap, 0, next_gap(m, u, t, &at) * sizeof *grad);
    }
    return SHD_OK;
}
