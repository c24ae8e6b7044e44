/* See putmap.h. */
#include "proto/share/putmap.h"

#include <inttypes.h>

#include "proto/base/check.h"
#include "proto/base/status.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec.h"

int putmap_check(const struct spec *spec, const uint8_t *arrays, uint64_t count, struct shd_err *e)
{
    bool any = false;
    if (count != spec->unit_count)
        return err_set(e, SHD_ERANGE, "a put says of %" PRIu64 " units, model '%s' has %" PRIu32,
                       count, spec->name, spec->unit_count);
    for (uint32_t u = 0; u < spec->unit_count; u++) {
        const struct spec_unit *unit = &spec->units[u];
        if (arrays[u] >> spec_unit_arrays(spec, u) != 0)
            return err_set(e, SHD_EINVAL,
                           "a put has arrays %#x of unit '%s', which has parameters and %" PRIu32
                           " moments%s%s",
                           arrays[u], unit->name, spec_unit_moments(spec, u),
                           spec_unit_ema(spec, u) ? " and their average" : "",
                           unit->frozen ? ": it is frozen"
                           : unit->mean ? ": it is a mean"
                                        : "");
        any = any || arrays[u] != 0;
    }
    return any ? SHD_OK : err_set(e, SHD_EINVAL, "a put of nothing");
}

static uint64_t head_bytes(const struct shardmap *map)
{
    return layout_align(sizeof(struct putmap_head) + map->units, SHD_PAGE_BYTES);
}

/* Up to the array of the unit, or of everything. */
static uint64_t walk(const struct shardmap *map, const uint8_t *arrays, uint32_t array,
                     uint32_t unit)
{
    uint64_t at = head_bytes(map);
    for (uint32_t a = 0; a < PUTMAP_ARRAYS; a++)
        for (uint32_t u = 0; u < map->units; u++) {
            if (a == array && u == unit)
                return at;
            if ((arrays[u] >> a & 1) != 0)
                at += map->slice[u].elems * sizeof(float);
        }
    return at;
}

uint64_t putmap_updates_at(const struct shardmap *map, const uint8_t *arrays)
{
    return walk(map, arrays, PUTMAP_ARRAYS, 0);
}

uint64_t putmap_bytes(const struct shardmap *map, const uint8_t *arrays, bool updates)
{
    const uint64_t count = updates ? map->units : 0;
    return putmap_updates_at(map, arrays) + layout_align(count * sizeof(uint64_t), SHD_PAGE_BYTES);
}

uint64_t putmap_offset_bytes(const struct shardmap *map, const uint8_t *arrays, uint32_t array,
                             uint32_t unit)
{
    CHECK(array < PUTMAP_ARRAYS && unit < map->units && (arrays[unit] >> array & 1) != 0);
    return walk(map, arrays, array, unit);
}
