/* See coded.h. */
#include "client/paths/coded.h"

#include <string.h>

#include "client/paths/kern_run.h"
#include "client/paths/map.h"
#include "kernels/cpu/decode.h"
#include "kernels/fill.h"
#include "proto/spec/layout.h"

/* Of a slice, [elems] of it: the last tile may be cut, as `to` is. */
static void read_slice(const struct shd_model *m, const void *from, uint64_t elems, uint8_t *to)
{
    const uint64_t elem_bytes = dtype_bytes(m->spec->publish);
    const uint64_t whole = elems / CODEC_TILE_ELEMS * CODEC_TILE_ELEMS;
    struct kern_decode decode = { .out = to,
                                  .in = from,
                                  .codec = m->spec->codec,
                                  .out_dtype = m->spec->publish,
                                  .elems = whole };
    _Alignas(64) uint8_t tile[CODEC_TILE_ELEMS * sizeof(float)];
    cpu_decode(&decode);
    if (whole == elems)
        return;
    decode.out = tile;
    decode.in = (const uint8_t *)from + codec_bytes(m->spec->codec, whole);
    decode.elems = CODEC_TILE_ELEMS;
    cpu_decode(&decode);
    memcpy(to + whole * elem_bytes, tile, (elems - whole) * elem_bytes);
}

void coded_read(const struct shd_model *m, uint32_t unit, void *const *units, uint64_t elems,
                void *to)
{
    const uint64_t elem_bytes = dtype_bytes(m->spec->publish);
    for (uint32_t i = 0; i < m->map->owner_count; i++) {
        const struct slice slice = m->map->owners[i].shards->slice[unit];
        const uint64_t at = slice.first_elem * elem_bytes;
        const uint64_t left = slice.first_elem < elems ? elems - slice.first_elem : 0;
        const uint64_t count = slice.elems < left ? slice.elems : left;
        if (count > 0)
            read_slice(m, (const uint8_t *)units[unit] + at, count, (uint8_t *)to + at);
    }
}

static uint64_t key_of(uint64_t key, uint64_t block)
{
    uint32_t words[4];
    philox_words(key, block, words);
    return (uint64_t)words[1] << 32 | words[0];
}

int coded_write(struct shd_model *m, uint32_t slot, uint32_t unit, struct slice slice,
                const float *grad, void *to, struct shd_err *e)
{
    static const uint64_t first = 0;
    const uint64_t of_step = key_of(m->spec->seed, m->step);
    const uint64_t key = key_of(of_step, (uint64_t)unit << 32 | m->slots[slot].group);
    const struct kern_noise noise = { key, slice.first_elem };
    const struct kern_encode encode = { .in = grad + slice.first_elem,
                                        .out = to,
                                        .codec = CODEC_INT8,
                                        .elems = slice.elems,
                                        .first_of = &first,
                                        .bytes_of = &first,
                                        .slices = 1,
                                        .noise = &noise };
    m->session->bytes_copied += codec_bytes(CODEC_INT8, slice.elems);
    return kern_run_op(m->session->kern, &(struct kern_op){ KERN_ENCODE, { .encode = encode } }, e);
}

uint64_t coded_bytes(const struct shd_model *m, uint64_t elems)
{
    return m->spec->codec != CODEC_NONE ? codec_bytes(m->spec->codec, elems)
                                        : elems * dtype_bytes(m->spec->publish);
}
