/* See mapped.h. Waiting is for the owners' boards (proto/share/board.h). */
#include "client/paths/mapped.h"

#include <inttypes.h>

#include "client/paths/map.h"
#include "client/session/activity.h"
#include "client/session/hub.h"
#include "proto/base/clock.h"

#define SLICE_NS (5 * NS_PER_MS) /* between two looks at the daemons' lives */

static int mapped_fetch(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    (void)m;
    (void)unit;
    (void)e;
    return SHD_OK; /* mapped once, at open: nothing to ask for */
}

static void mapped_let_go(struct shd_model *m, uint32_t unit)
{
    (void)m;
    (void)unit;
}

static int wait_board(struct shd_model *m, struct link *link, uint32_t unit, uint64_t start_ns,
                      struct shd_err *e)
{
    const struct board *board = m->map->owners[link->index].board.base;
    for (;;) {
        const uint64_t slice_ns = hub_left_ns(m->session->hub, start_ns, SLICE_NS);
        if (board_wait(board, unit, m->step, slice_ns) == SHD_OK)
            break;
        const int r = hub_poll(m->session->hub, /* timeout_ns= */ 0, e);
        activity_look(m);
        if (r != SHD_OK)
            return r;
        if (slice_ns == 0)
            return link_err(
                link, SHD_ETIMEDOUT, e,
                "did not publish unit %" PRIu32 " '%s' of step %" PRIu64 " within %" PRIu64 " ms",
                unit, m->spec->units[unit].name, m->step, m->session->timeout_ns / NS_PER_MS);
    }
    const uint64_t version = board_version(board, unit);
    if (version != m->step)
        return link_err(link, SHD_ESTEP, e,
                        "has unit %" PRIu32 " '%s' at step %" PRIu64
                        ", this worker is at step %" PRIu64 ": that step is over",
                        unit, m->spec->units[unit].name, version, m->step);
    return SHD_OK;
}

static bool mapped_readable(const struct shd_model *m, uint32_t unit)
{
    const struct map_model *map = m->map;
    for (uint32_t i = 0; i < map->owner_count; i++)
        if (map->owners[i].shards->slice[unit].elems > 0 &&
            board_version(map->owners[i].board.base, unit) != m->step)
            return false;
    return true;
}

/* Owners with no part of the unit have nothing to wait for. */
static int mapped_wait_unit(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    const uint64_t start_ns = clock_now_ns();
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < hub->link_count; i++)
        if (m->map->owners[i].shards->slice[unit].elems > 0)
            r = wait_board(m, &hub->links[i], unit, start_ns, e);
    return r;
}

static const void *mapped_params(const struct shd_model *m, uint32_t unit)
{
    const struct map_owner *first = &m->map->owners[0];
    return m->map->whole ? first->mover->published(m, first, unit) /* it has one owner then */
                         : m->map->params[unit];
}

const struct reader_ops reader_mapped = {
    .kind = SHD_PATH_MAP,
    .shown = ACTIVITY_PATH_MAP,
    .fetch = mapped_fetch,
    .readable = mapped_readable,
    .wait_unit = mapped_wait_unit,
    .let_go = mapped_let_go,
    .params = mapped_params,
};
