/* Owners one step apart; see path_map.h.
 *
 * A worker commits a step to one owner after the other. Whoever attaches in between, or after that
 * worker died in it, finds some owners a step ahead. Those have the decision on record, and
 * anybody may pass it on: a commit that arrives twice is acknowledged. The blob goes with it. */
#include <inttypes.h>
#include <stdlib.h>

#include "client/path_map.h"
#include "proto/check.h"
#include "proto/sys.h"

static uint64_t step_min(const struct map_model *map)
{
    uint64_t step = map->owners[0].step;
    for (uint32_t i = 1; i < map->owner_count; i++)
        if (map->owners[i].step < step)
            step = map->owners[i].step;
    return step;
}

/* The first owner with the highest step. */
static uint32_t owner_ahead(const struct map_model *map)
{
    uint32_t ahead = 0;
    for (uint32_t i = 1; i < map->owner_count; i++)
        if (map->owners[i].step > map->owners[ahead].step)
            ahead = i;
    return ahead;
}

static int pass_on(struct shd_model *m, uint32_t ahead, void *blob, struct shd_err *e)
{
    struct shd_update update = { .size = sizeof update, .blob = blob };
    struct decided ignored;
    int r = map_owner_blob(m, ahead, blob, SHD_BLOB_BYTES_MAX, &update.blob_bytes, e);
    if (r == SHD_OK)
        r = map_prepare(m, e);
    if (r == SHD_OK && !m->map->prepared[ahead].has_decision)
        r = link_err(&m->session->hub->links[ahead], SHD_EPROTO, e,
                     "is past step %" PRIu64 " and has no decision for it", m->step);
    return r == SHD_OK ? map_decide_and_commit(m, &update, &ignored, e) : r;
}

int map_settle(struct shd_model *m, struct shd_err *e)
{
    const struct map_model *map = m->map;
    const uint32_t ahead = owner_ahead(map);
    const uint64_t behind_step = step_min(map), ahead_step = map->owners[ahead].step;
    m->step = ahead_step;
    if (map->owners[ahead].decided)
        model_decided(m, &map->owners[ahead].decision);
    if (behind_step == ahead_step)
        return SHD_OK;
    if (behind_step + 1 != ahead_step)
        return link_err(&m->session->hub->links[ahead], SHD_EINTERNAL, e,
                        "is at step %" PRIu64 ", another owner at %" PRIu64
                        ": they were not run together",
                        ahead_step, behind_step);
    void *blob = sys_malloc(SHD_BLOB_BYTES_MAX);
    if (blob == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a blob");
    m->step = behind_step;
    const int r = pass_on(m, ahead, blob, e);
    m->step = ahead_step;
    free(blob);
    return r;
}
