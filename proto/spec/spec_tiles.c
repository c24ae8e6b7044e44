/* See spec_tiles.h. */
#include "proto/spec/spec_tiles.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/spec/layout.h"
#include "proto/spec/optimizer.h"
#include "proto/spec/spec.h"
#include "proto/spec/spec_muon.h"
#include "proto/spec/spec_node.h"

int spec_tiles_parse(const struct spec *s, const struct node *n, uint32_t *ret_tiles,
                     struct shd_err *e)
{
    const struct node tiles = node_field(n, "tiles"), place = node_field(n, "place");
    uint64_t count = 1;
    const char *how = "spread";
    int r = tiles.json != NULL ? node_u64(&tiles, 1, SHD_UNITS_MAX, &count, e) : SHD_OK;
    if (r == SHD_OK && count > 1 && place.json != NULL)
        r = node_text(&place, &how, e);
    if (r != SHD_OK)
        return r;
    if (count > 1 && strcmp(how, "whole") == 0)
        return err_set(e, SHD_EINVAL,
                       "%s is %" PRIu64 ", and the unit's place is whole: a unit is cut, or one "
                       "owner has all of it",
                       node_path(&tiles).text, count);
    if (count > 1 && spec_adafactor_has(s, n))
        return err_set(e, SHD_EINVAL,
                       "%s is %" PRIu64 ", and the unit's optimizer is adafactor, which is of "
                       "whole tensors: leave one out",
                       node_path(&tiles).text, count);
    *ret_tiles = count > 1 ? (uint32_t)count : 0;
    return SHD_OK;
}

int spec_tile_name(const char *name, uint32_t tile, const struct node *n, char **ret_name,
                   struct shd_err *e)
{
    char text[SPEC_NAME_BYTES_MAX + 16];
    const int bytes = snprintf(text, sizeof text, "%s/%" PRIu32, name, tile);
    CHECK(bytes > 0 && (size_t)bytes < sizeof text);
    if ((size_t)bytes >= SPEC_NAME_BYTES_MAX)
        return err_set(e, SHD_ERANGE,
                       "%s has %zu bytes, and with the number of a tile behind it, '/%" PRIu32
                       "', %d: it may have %u",
                       node_path(n).text, strlen(name), tile, bytes, SPEC_NAME_BYTES_MAX - 1);
    char *copy = sys_strdup(text);
    if (copy == NULL)
        return node_no_memory(e);
    *ret_name = copy;
    return SHD_OK;
}

/* The first row of a tile, of so many; the number of rows where tile is `tiles`. No product of the
 * two is formed: they may be 2^48 and 2^16. */
static uint64_t first_row(uint64_t rows, uint32_t tile, uint32_t tiles)
{
    return rows / tiles * tile + rows % tiles * tile / tiles;
}

int spec_tile_cut(const struct spec *s, const struct spec_unit *unit, const struct node *n,
                  struct spec_tensor *t, struct shd_err *e)
{
    if (spec_is_whole(s, t))
        return err_set(e, SHD_EINVAL,
                       "%s: '%.60s' is of group '%.40s', whose optimizer, %s, is of whole tensors, "
                       "and its unit is cut into %" PRIu32 " tiles: leave one out",
                       node_path(n).text, t->name, s->groups[t->group].name,
                       spec_optimizer_rows[spec_group_optimizer(s, t->group)].kind, unit->tiles);
    const uint64_t rows = t->rank > 0 ? t->shape[0] : 1;
    if (t->rank == 0 || rows < unit->tiles)
        return err_set(e, SHD_ERANGE,
                       "%s: '%.60s' has %" PRIu64 " row%s, and its unit is cut into %" PRIu32
                       " tiles of whole rows: say fewer, or give it another unit",
                       node_path(n).text, t->name, rows, rows == 1 ? "" : "s", unit->tiles);
    const struct node name = node_field(n, "name");
    char *own = NULL;
    const int r = spec_tile_name(t->name, unit->tile, &name, &own, e);
    if (r != SHD_OK)
        return r;
    t->of = t->name;
    t->name = own;
    t->of_rows = rows;
    t->first_row = first_row(rows, unit->tile, unit->tiles);
    t->shape[0] = first_row(rows, unit->tile + 1, unit->tiles) - t->first_row;
    t->elems = t->elems / rows * t->shape[0];
    return SHD_OK;
}
