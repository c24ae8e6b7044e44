/* See parts.h. Runs of elements are widened in place (kernels/cpu/widen.h). Where the innermost
 * dimension of a part is not dense (a transposed weight's, say), its elements are gathered tile by
 * tile, so that each line of the cache is read once. */
#include "client/run/parts.h"

#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "client/session/session.h"
#include "kernels/cpu/widen.h"
#include "proto/base/check.h"

#define TILE_ELEMS 128u /* of the innermost dimension: so many lines fit in L1 */

/* -- Checking ---------------------------------------------------------------------------------- */

static const struct shd_part *part_at(const struct parts *parts, uint32_t i)
{
    return (const void *)((const uint8_t *)parts->first + i * parts->first->size);
}

static int check_part(const struct shd_model *m, uint32_t unit, const struct parts *parts,
                      uint32_t i, struct shd_err *e)
{
    const struct shd_part *p = part_at(parts, i);
    const struct spec_unit *u = &m->spec->units[unit];
    if (p->size < sizeof *p || p->size != parts->first->size || p->size % _Alignof(struct shd_part))
        return err_set(e, SHD_EINVAL,
                       "shd_part.size of part %" PRIu32 " is %zu, this library (%s) "
                       "has %zu",
                       i, p->size, SHD_VERSION, sizeof *p);
    if (p->tensor < u->first_tensor || p->tensor - u->first_tensor >= u->tensor_count)
        return err_set(e, SHD_ERANGE,
                       "part %" PRIu32 " is of tensor %" PRIu32 ", unit %" PRIu32
                       " '%s' has %" PRIu32 " to %" PRIu32,
                       i, p->tensor, unit, u->name, u->first_tensor,
                       u->first_tensor + u->tensor_count - 1);
    if (p->data != NULL && !dtype_valid((uint64_t)p->dtype))
        return err_set(e, SHD_EINVAL, "part %" PRIu32 ", tensor '%s': dtype %d is none of ours", i,
                       m->spec->tensors[p->tensor].name, (int)p->dtype);
    for (uint32_t k = 0; k < i; k++)
        if (part_at(parts, k)->tensor == p->tensor)
            return err_set(e, SHD_EINVAL,
                           "parts %" PRIu32 " and %" PRIu32 " are both of tensor '%s'", k, i,
                           m->spec->tensors[p->tensor].name);
    return SHD_OK;
}

int parts_check(const struct shd_model *m, uint32_t unit, const struct parts *parts,
                struct shd_err *e)
{
    int r = SHD_OK;
    if (!isfinite(parts->scale))
        return err_set(e, SHD_EINVAL, "scale is %g", parts->scale);
    if (parts->count > 0 && parts->first == NULL)
        return err_set(e, SHD_EINVAL, "parts is NULL, and there are %" PRIu32, parts->count);
    for (uint32_t i = 0; r == SHD_OK && i < parts->count; i++)
        r = check_part(m, unit, parts, i, e);
    return r;
}

/* -- Copying ----------------------------------------------------------------------------------- */

struct view { /* of a part: dimensions of one element left out, dense ones joined */
    uint32_t rank;
    uint64_t shape[SPEC_RANK_MAX];
    int64_t strides[SPEC_RANK_MAX];
    uint64_t elem_bytes;
    struct kern_widen how; /* without place and number */
};

static struct view view_of(const struct spec_tensor *t, const struct shd_part *part, double scale)
{
    struct view v = { .elem_bytes = dtype_bytes(part->dtype),
                      .how = { .in_dtype = part->dtype, .scale = (float)scale } };
    if (part->strides == NULL) {
        v.rank = 1;
        v.shape[0] = t->elems;
        v.strides[0] = 1;
        return v;
    }
    for (uint32_t d = 0; d < t->rank; d++) {
        const uint32_t last = v.rank - 1;
        if (t->shape[d] == 1)
            continue;
        if (v.rank > 0 && v.strides[last] == (int64_t)t->shape[d] * part->strides[d]) {
            v.shape[last] *= t->shape[d];
            v.strides[last] = part->strides[d];
            continue;
        }
        v.shape[v.rank] = t->shape[d];
        v.strides[v.rank++] = part->strides[d];
    }
    if (v.rank == 0) {
        v.rank = 1;
        v.shape[0] = 1;
        v.strides[0] = 1;
    }
    return v;
}

static void widen(const struct view *v, const void *in, uint64_t elems, float *out)
{
    struct kern_widen w = v->how;
    w.in = in;
    w.out = out;
    w.elems = elems;
    cpu_widen(&w);
}

static void gather(const uint8_t *in, int64_t stride, uint64_t elem_bytes, uint64_t elems,
                   void *ret_tile)
{
    if (elem_bytes == sizeof(uint32_t)) {
        uint32_t *tile = ret_tile;
        const uint32_t *from = (const void *)in;
        for (uint64_t i = 0; i < elems; i++)
            tile[i] = from[(int64_t)i * stride];
    } else {
        uint16_t *tile = ret_tile;
        const uint16_t *from = (const void *)in;
        CHECK(elem_bytes == sizeof *tile);
        for (uint64_t i = 0; i < elems; i++)
            tile[i] = from[(int64_t)i * stride];
    }
}

static const uint8_t *in_at(const struct view *v, const uint8_t *in, uint32_t d, uint64_t i)
{
    return in + (int64_t)i * v->strides[d] * (int64_t)v->elem_bytes;
}

/* The last two dimensions (or the only one). */
static void copy_plane(const struct view *v, const uint8_t *in, float *out)
{
    const uint32_t d = v->rank - 1;
    const uint64_t rows = v->rank > 1 ? v->shape[d - 1] : 1, row_elems = v->shape[d];
    const uint64_t width = v->strides[d] == 1 ? row_elems : TILE_ELEMS;
    uint32_t tile[TILE_ELEMS];
    for (uint64_t at = 0; at < row_elems; at += width)
        for (uint64_t row = 0; row < rows; row++) {
            const uint64_t elems = row_elems - at < width ? row_elems - at : width;
            const uint8_t *from = in_at(v, v->rank > 1 ? in_at(v, in, d - 1, row) : in, d, at);
            if (v->strides[d] != 1) {
                gather(from, v->strides[d], v->elem_bytes, elems, tile);
                from = (const void *)tile;
            }
            widen(v, from, elems, out + row * row_elems + at);
        }
}

static void copy_part(const struct view *v, const uint8_t *in, float *out)
{
    uint64_t planes = 1, plane_elems = 1;
    for (uint32_t d = 0; d < v->rank; d++)
        *(d + 2 < v->rank ? &planes : &plane_elems) *= v->shape[d];
    for (uint64_t plane = 0; plane < planes; plane++) {
        const uint8_t *from = in;
        uint64_t rest = plane;
        for (uint32_t d = v->rank > 2 ? v->rank - 2 : 0; d-- > 0; rest /= v->shape[d])
            from = in_at(v, from, d, rest % v->shape[d]);
        copy_plane(v, from, out + plane * plane_elems);
    }
}

static const struct shd_part *part_of(const struct parts *parts, uint32_t tensor)
{
    for (uint32_t i = 0; i < parts->count; i++)
        if (part_at(parts, i)->tensor == tensor)
            return part_at(parts, i);
    return NULL;
}

uint64_t parts_copy(const struct shd_model *m, uint32_t unit, const struct parts *parts,
                    float *grad)
{
    const struct spec_unit *u = &m->spec->units[unit];
    uint64_t elems = 0;
    for (uint32_t i = u->first_tensor; i < u->first_tensor + u->tensor_count; i++) {
        const struct spec_tensor *t = &m->spec->tensors[i];
        const struct shd_part *part = part_of(parts, i);
        float *out = grad + t->offset_elems;
        elems += t->elems;
        if (part == NULL || part->data == NULL) {
            memset(out, 0, t->elems * sizeof *out);
            continue;
        }
        const struct view v = view_of(t, part, parts->scale);
        copy_part(&v, part->data, out);
    }
    return elems * sizeof *grad;
}
