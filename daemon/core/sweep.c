/* See sweep.h. */
#include "daemon/core/sweep.h"

#include <stdlib.h>
#include <string.h>

#include "daemon/core/step.h"
#include "proto/base/check.h"
#include "proto/base/status.h"
#include "proto/base/sys.h"
#include "proto/share/shardmap.h"

enum sweep_when sweep_when(const struct step *core, uint64_t step)
{
    if (step < step_collecting(core))
        return SWEEP_OVER;
    return step == step_now(core) && step_phase(core) != STEP_APPLYING ? SWEEP_NOW : SWEEP_TO_COME;
}

int sweep_init(struct sweep *s, const struct shardmap *map, struct shd_err *e)
{
    uint8_t *apart = sys_calloc(map->units, 1);
    if (apart == NULL)
        return err_set(e, SHD_ENOMEM, "no memory to copy a step");
    *s = (struct sweep){ .map = map, .apart = apart };
    return SHD_OK;
}

void sweep_deinit(struct sweep *s)
{
    free(s->apart);
    *s = (struct sweep){ 0 };
}

void sweep_begin(struct sweep *s)
{
    memset(s->apart, 0, s->map->units);
    s->unit = 0;
    s->unit_bytes = 0;
}

static uint64_t slice_bytes(const struct sweep *s, uint32_t unit)
{
    return shardmap_publish_slice_bytes(s->map, unit);
}

bool sweep_next(struct sweep *s, uint64_t bytes_max, struct sweep_range *ret_range)
{
    CHECK(bytes_max > 0);
    while (s->unit < s->map->units &&
           (s->apart[s->unit] != 0 || s->unit_bytes == slice_bytes(s, s->unit))) {
        s->unit++;
        s->unit_bytes = 0;
    }
    if (s->unit == s->map->units)
        return false;
    uint64_t bytes = 0, before = s->unit_bytes;
    for (uint32_t u = s->unit; u < s->map->units && s->apart[u] == 0 && bytes < bytes_max; u++) {
        const uint64_t left = slice_bytes(s, u) - before;
        bytes += left < bytes_max - bytes ? left : bytes_max - bytes;
        before = 0;
    }
    *ret_range = (struct sweep_range){
        shardmap_publish_offset_bytes(s->map, s->unit) + s->unit_bytes, bytes
    };
    return true;
}

void sweep_took(struct sweep *s, uint64_t bytes)
{
    while (bytes > 0) {
        const uint64_t left = slice_bytes(s, s->unit) - s->unit_bytes;
        if (bytes < left) {
            s->unit_bytes += bytes;
            return;
        }
        bytes -= left;
        s->unit++;
        s->unit_bytes = 0;
    }
}

struct sweep_range sweep_rest(const struct sweep *s, uint32_t unit)
{
    const uint64_t all = slice_bytes(s, unit);
    const uint64_t done = unit < s->unit ? all : unit == s->unit ? s->unit_bytes : 0;
    return (struct sweep_range){ shardmap_publish_offset_bytes(s->map, unit) + done,
                                 s->apart[unit] == 0 ? all - done : 0 };
}

void sweep_took_rest(struct sweep *s, uint32_t unit)
{
    s->apart[unit] = 1;
}
