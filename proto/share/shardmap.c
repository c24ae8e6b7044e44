/* See shardmap.h. */
#include "proto/share/shardmap.h"

#include <inttypes.h>
#include <stdlib.h>

#include "proto/base/check.h"
#include "proto/base/status.h"
#include "proto/base/sys.h"
#include "proto/share/activity.h"
#include "proto/share/deal.h"
#include "proto/spec/layout.h"
#include "proto/spec/muon.h"
#include "proto/spec/spec.h"

static uint64_t whole_pages(uint64_t bytes)
{
    return bytes == 0 ? SHD_PAGE_BYTES : layout_align(bytes, SHD_PAGE_BYTES);
}

/* Of a slice's moment in 8 bits, with what is left of its last page. */
static uint64_t quant_slice_bytes(const struct shardmap *map, uint32_t unit)
{
    return layout_align(quant_bytes(map->slice[unit].elems), SHD_PAGE_BYTES);
}

/* The same of a slice that is published in codes. */
static uint64_t code_slice_bytes(const struct shardmap *map, uint32_t unit)
{
    return layout_align(codec_bytes(map->codec, map->slice[unit].elems), SHD_PAGE_BYTES);
}

/* The units that gradients come of, those that have moments or others. */
static void place_trained(const struct spec *spec, bool moments, struct shardmap *map)
{
    for (uint32_t u = 0; u < map->units; u++) {
        if (spec->units[u].frozen || (spec_unit_moments(spec, u) > 0) != moments)
            continue;
        map->train_base[u] = map->train_elems;
        map->train_elems += map->slice[u].elems;
    }
}

/* Moments in 8 bits: no page has two units' in it. Of a unit that has none it is unused. */
static uint64_t place_quant(const struct spec *spec, struct shardmap *map)
{
    uint64_t words = 0;
    for (uint32_t u = 0; u < map->units; u++) {
        map->quant_base[u] = words;
        if (spec_unit_moments(spec, u) > 0)
            words += quant_slice_bytes(map, u) / sizeof(float);
    }
    return words;
}

/* Floats that the update of a unit needs beside the state: what is known of each of its whole
 * tensors, what that comes to, and room for one matrix after the other. */
static uint64_t scratch_elems(const struct spec *spec, uint32_t unit)
{
    const struct spec_unit *u = &spec->units[unit];
    uint64_t most = 0;
    uint32_t count = 0;
    for (uint32_t t = u->first_tensor; t < u->first_tensor + u->tensor_count; t++) {
        const struct spec_tensor *tensor = &spec->tensors[t];
        count += spec_is_whole(spec, tensor);
        if (!spec_is_matrix(spec, tensor))
            continue;
        const struct muon_room room = muon_room(tensor->shape[0], tensor->shape[1]);
        const uint64_t elems = muon_room_elems(&room);
        most = elems > most ? elems : most;
    }
    return whole_head_elems(count) + u->elems + most;
}

static void place_units(const struct spec *spec, const uint32_t *whole_owners, struct shardmap *map)
{
    uint64_t slice_elems_max = 0;
    for (uint32_t u = 0; u < map->units; u++) {
        map->slice[u] = deal_slice(spec->units[u].elems, whole_owners[u], map->owner, map->owners);
        if (spec->units[u].wholes && map->slice[u].elems > 0 &&
            scratch_elems(spec, u) > map->scratch_elems)
            map->scratch_elems = scratch_elems(spec, u);
        map->base_elem[u] = map->elems;
        map->elems += map->slice[u].elems;
        if (map->coded_grads != NULL)
            map->coded_grads[u] = spec_unit_grad_codec(spec, u) != CODEC_NONE;
        if (map->code_base != NULL) {
            map->code_base[u] = map->code_bytes;
            map->code_bytes += code_slice_bytes(map, u);
        }
        if (!spec->units[u].frozen && map->slice[u].elems > slice_elems_max)
            slice_elems_max = map->slice[u].elems;
    }
    place_trained(spec, /* moments= */ true, map);
    map->moment_elems = map->train_elems;
    map->moment_words = map->int8 ? place_quant(spec, map) : map->moment_elems;
    place_trained(spec, /* moments= */ false, map);
    map->slot_bytes = whole_pages(slice_elems_max * sizeof(float));
}

int shardmap_new(const struct spec *spec, uint32_t owner, uint32_t owners,
                 struct shardmap **ret_map, struct shd_err *e)
{
    if (owners == 0 || owners > SHD_OWNERS_MAX || owner >= owners)
        return err_set(e, SHD_ERANGE, "owner %" PRIu32 " of %" PRIu32 ": at most %u owners", owner,
                       owners, SHD_OWNERS_MAX);
    CHECK(spec->unit_count > 0 && spec->unit_count <= SHD_UNITS_MAX);
    struct shardmap *map = sys_calloc(1, sizeof *map);
    if (map != NULL) {
        *map = (struct shardmap){
            .owner = owner,
            .owners = owners,
            .units = spec->unit_count,
            .arrays = spec_arrays(spec),
            .moments = spec_moments(spec),
            .int8 = spec->int8,
            .trails = 1u + (spec->ema > 0 ? 1 : 0) + (spec_has_whole(spec) ? 3 : 0),
            .publish = spec->publish,
            .codec = spec->codec,
            .slice = sys_calloc(spec->unit_count, sizeof *map->slice),
            .base_elem = sys_calloc(spec->unit_count, sizeof *map->base_elem),
            .train_base = sys_calloc(spec->unit_count, sizeof *map->train_base),
            .quant_base = spec->int8 ? sys_calloc(spec->unit_count, sizeof *map->quant_base) : NULL,
            .code_base = spec->codec != CODEC_NONE
                             ? sys_calloc(spec->unit_count, sizeof *map->code_base)
                             : NULL,
            .coded_grads = spec->grad_codec != CODEC_NONE
                               ? sys_calloc(spec->unit_count, sizeof *map->coded_grads)
                               : NULL,
        };
    }
    if (map == NULL || map->slice == NULL || map->base_elem == NULL || map->train_base == NULL ||
        (spec->int8 && map->quant_base == NULL) ||
        (spec->codec != CODEC_NONE && map->code_base == NULL) ||
        (spec->grad_codec != CODEC_NONE && map->coded_grads == NULL)) {
        shardmap_free(map);
        return err_set(e, SHD_ENOMEM, "no memory for the map of %" PRIu32 " units",
                       spec->unit_count);
    }
    uint32_t *whole_owners;
    const int r = deal_units(spec, owners, &whole_owners, e);
    if (r != SHD_OK) {
        shardmap_free(map);
        return r;
    }
    place_units(spec, whole_owners, map);
    free(whole_owners);
    *ret_map = map;
    return SHD_OK;
}

void shardmap_free(struct shardmap *map)
{
    if (map == NULL)
        return;
    free(map->slice);
    free(map->base_elem);
    free(map->train_base);
    free(map->quant_base);
    free(map->code_base);
    free(map->coded_grads);
    free(map);
}

uint64_t shardmap_publish_bytes(const struct shardmap *map)
{
    return whole_pages(map->code_base != NULL ? map->code_bytes
                                              : map->elems * dtype_bytes(map->publish));
}

/* Words of the first `arrays` arrays. */
static uint64_t words_of(const struct shardmap *map, uint32_t arrays)
{
    const uint32_t moments = arrays - 1 < map->moments ? arrays - 1 : map->moments;
    return map->elems + moments * map->moment_words + (arrays - 1 - moments) * map->moment_elems;
}

uint64_t shardmap_state_bytes(const struct shardmap *map)
{
    const uint64_t elems = shardmap_scratch_elem(map) + map->scratch_elems;
    return whole_pages(elems * sizeof(float));
}

uint64_t shardmap_scratch_elem(const struct shardmap *map)
{
    return words_of(map, map->arrays) + map->train_elems;
}

bool shardmap_has_ema(const struct shardmap *map)
{
    return map->arrays > 1 + map->moments;
}

uint64_t shardmap_kept_bytes(const struct shardmap *map)
{
    return words_of(map, map->arrays) * sizeof(float);
}

uint64_t shardmap_value_bytes(const struct shardmap *map)
{
    return (map->elems + (map->arrays - 1) * map->moment_elems) * sizeof(float);
}

uint64_t shardmap_inbox_bytes(const struct shardmap *map, uint32_t slots)
{
    CHECK(slots > 0 && slots <= SHD_SLOTS_MAX);
    return slots * map->slot_bytes + ACTIVITY_BYTES;
}

uint64_t shardmap_activity_offset_bytes(const struct shardmap *map, uint32_t slots)
{
    CHECK(slots > 0 && slots <= SHD_SLOTS_MAX);
    return slots * map->slot_bytes;
}

uint64_t shardmap_publish_offset_bytes(const struct shardmap *map, uint32_t unit)
{
    CHECK(unit < map->units);
    return map->code_base != NULL ? map->code_base[unit]
                                  : map->base_elem[unit] * dtype_bytes(map->publish);
}

uint64_t shardmap_publish_slice_bytes(const struct shardmap *map, uint32_t unit)
{
    CHECK(unit < map->units);
    return map->code_base != NULL ? code_slice_bytes(map, unit)
                                  : map->slice[unit].elems * dtype_bytes(map->publish);
}

uint64_t shardmap_publish_sent_bytes(const struct shardmap *map, uint32_t unit)
{
    CHECK(unit < map->units);
    return map->code_base != NULL ? codec_bytes(map->codec, map->slice[unit].elems)
                                  : shardmap_publish_slice_bytes(map, unit);
}

static bool is_quant(const struct shardmap *map, uint32_t array)
{
    return map->int8 && array > SHARDMAP_PARAM && array <= map->moments;
}

uint64_t shardmap_array_elem(const struct shardmap *map, uint32_t array, uint32_t unit)
{
    CHECK(unit < map->units && (array == SHARDMAP_ACC || array < map->arrays));
    if (array == SHARDMAP_PARAM)
        return map->base_elem[unit];
    return words_of(map, array == SHARDMAP_ACC ? map->arrays : array) +
           (is_quant(map, array) ? map->quant_base[unit] : map->train_base[unit]);
}

uint64_t shardmap_array_bytes(const struct shardmap *map, uint32_t array, uint32_t unit)
{
    CHECK(unit < map->units);
    return is_quant(map, array) ? quant_slice_bytes(map, unit)
                                : map->slice[unit].elems * sizeof(float);
}

uint64_t shardmap_grad_bytes(const struct shardmap *map, uint32_t unit, enum shd_dtype dtype)
{
    CHECK(unit < map->units);
    return map->coded_grads != NULL && map->coded_grads[unit]
               ? codec_bytes(CODEC_INT8, map->slice[unit].elems)
               : map->slice[unit].elems * dtype_bytes(dtype);
}

uint64_t shardmap_slot_offset_bytes(const struct shardmap *map, uint32_t slot)
{
    CHECK(slot < SHD_SLOTS_MAX);
    return slot * map->slot_bytes;
}
