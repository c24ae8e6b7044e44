/* Opening and mapping a model on daemons; see path_map.h.
 *
 * Happy path: OpenModel to every daemon, claim the segments on the side channels, place them side
 * by side, bring the owners to one step. A daemon that dies meanwhile is asked again. Any failure
 * unmaps everything. */
#include "client/paths/path_map.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"

/* -- Reserving --------------------------------------------------------------------------------- */

static int make_shardmaps(struct shd_model *m, struct shd_err *e)
{
    struct map_model *map = m->map;
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < map->owner_count; i++)
        r = shardmap_new(m->spec, i, map->owner_count, &map->owners[i].shards, e);
    return r;
}

static int reserve_params(struct shd_model *m, struct shd_err *e)
{
    struct map_model *map = m->map;
    const uint64_t elem_bytes = dtype_bytes(m->spec->publish);
    map->params = sys_calloc(m->spec->unit_count, sizeof *map->params);
    if (map->params == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " units", m->spec->unit_count);
    int r = SHD_OK;
    for (uint32_t u = 0; r == SHD_OK && u < m->spec->unit_count; u++)
        r = segment_reserve(m->spec->units[u].elems * elem_bytes, &map->params[u], e);
    return r;
}

/* Units of one size have the same slices, so one view of a slot serves them all. Frozen units have
 * none: no slot is large enough for them. */
static int find_views(struct shd_model *m, struct shd_err *e)
{
    struct map_model *map = m->map;
    const uint32_t units = m->spec->unit_count;
    map->view_of = sys_calloc(units, sizeof *map->view_of);
    map->view_elems = sys_calloc(units, sizeof *map->view_elems);
    map->view_unit = sys_calloc(units, sizeof *map->view_unit);
    if (map->view_of == NULL || map->view_elems == NULL || map->view_unit == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the views of %" PRIu32 " units", units);
    for (uint32_t u = 0; u < units; u++) {
        uint32_t v = 0;
        if (m->spec->units[u].frozen)
            continue;
        while (v < map->view_count && map->view_elems[v] != m->spec->units[u].elems)
            v++;
        map->view_of[u] = v;
        if (v < map->view_count)
            continue;
        map->view_elems[v] = m->spec->units[u].elems;
        map->view_unit[v] = u;
        map->view_count++;
    }
    return SHD_OK;
}

static int reserve_views(struct shd_model *m, uint32_t slots, struct shd_err *e)
{
    struct map_model *map = m->map;
    const uint32_t count = slots * map->view_count;
    map->views = sys_calloc(count, sizeof *map->views);
    map->stale = sys_calloc((size_t)slots * map->owner_count, sizeof *map->stale);
    if (map->views == NULL || map->stale == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " views", count);
    map->view_slots = slots;
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < count; i++) {
        void *base;
        r = segment_reserve(map->view_elems[i % map->view_count] * sizeof(float), &base, e);
        if (r == SHD_OK)
            map->views[i] = base;
    }
    return r;
}

static void release_views(struct map_model *map)
{
    for (uint32_t i = 0; map->views != NULL && i < map->view_slots * map->view_count; i++)
        if (map->views[i] != NULL)
            segment_unreserve(map->views[i], map->view_elems[i % map->view_count] * sizeof(float));
    free(map->views);
    free(map->stale);
    map->views = NULL;
    map->stale = NULL;
    map->view_slots = 0;
}

/* -- Opening ----------------------------------------------------------------------------------- */

static int new_map(struct shd_model *m, struct shd_err *e)
{
    const uint32_t owners = m->session->hub->link_count;
    struct map_model *map = sys_calloc(1, sizeof *map);
    void *turn = NULL;
    m->map = map;
    if (map != NULL) {
        map->owners = sys_calloc(owners, sizeof *map->owners);
        turn = sys_malloc(turn_bytes(owners));
    }
    if (turn != NULL)
        map->turn = turn_init(turn, owners);
    if (map == NULL || map->owners == NULL || turn == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a model with %" PRIu32 " owners", owners);
    map->owner_count = owners;
    for (uint32_t i = 0; i < owners; i++)
        map->owners[i].board = map->owners[i].inbox = map->owners[i].whole.publish.segment =
            map->owners[i].whole.held = SEGMENT_CLOSED;
    return SHD_OK;
}

/* A daemon that died since it was asked, or dies in this, is asked again. */
static int take_link(struct map_opening *o, struct link *link, unsigned wanted, struct shd_err *e)
{
    const uint64_t start_ns = clock_now_ns();
    const struct map_layout *layout = &o->m->map->owners[link->index].layout;
    int r = map_take_segments(o->m, link, layout, wanted, e);
    while (r == SHD_EGONE && hub_check(link->hub, NULL) == SHD_OK &&
           clock_now_ns() - start_ns < o->m->session->timeout_ns) {
        r = map_ask_layout(o, link, e);
        if (r == SHD_OK)
            r = map_take_segments(o->m, link, layout, wanted, e);
    }
    return r;
}

static int take_links(struct map_opening *o, unsigned wanted, struct shd_err *e)
{
    struct hub *hub = o->m->session->hub;
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < hub->link_count; i++)
        r = take_link(o, &hub->links[i], wanted, e);
    return r;
}

static int reserve(struct shd_model *m, struct shd_err *e)
{
    int r = make_shardmaps(m, e);
    if (r != SHD_OK)
        return r;
    whole_decide(m, &m->map->whole);
    if (m->map->whole) {
        m->map->view_slots = m->slot_count;
        if (whole_check_map(m, /* e= */ NULL) != SHD_OK)
            m->path = &path_copy;
        return SHD_OK;
    }
    r = reserve_params(m, e);
    if (r == SHD_OK)
        r = find_views(m, e);
    if (r == SHD_OK && m->slot_count > 0)
        r = reserve_views(m, m->slot_count, e);
    return r;
}

static int open_as(struct map_opening *o, struct shd_err *e)
{
    struct shd_model *m = o->m;
    unsigned wanted = 1u << SEGMENT_PUBLISH | 1u << SEGMENT_BOARD;
    int r = map_ask_layouts(o, e);
    m->slot_count = o->slots;
    if (r == SHD_OK)
        r = reserve(m, e);
    if (m->slot_count > 0)
        wanted |= 1u << SEGMENT_INBOX;
    if (r == SHD_OK)
        r = take_links(o, wanted, e);
    return r == SHD_OK ? map_settle(m, e) : r;
}

static int open_spec(struct shd_model *m, struct shd_err *e)
{
    char *json;
    uint32_t slots = 0;
    int r = model_slots_needed(m, &slots, e);
    if (r == SHD_OK)
        r = spec_dump(m->spec, &json, e);
    if (r != SHD_OK)
        return r;
    struct map_opening o = { m, json, "", slots };
    r = open_as(&o, e);
    free(json);
    return r;
}

int map_open(struct shd_model *m, const char *name, struct shd_err *e)
{
    struct map_opening attach = { m, "", name, /* slots= */ 0 };
    int r = new_map(m, e);
    m->session->opening = m;
    if (r == SHD_OK)
        r = m->spec != NULL ? open_spec(m, e) : open_as(&attach, e);
    m->session->opening = NULL;
    return r;
}

/* Attached without slots (tools only look): get them now. */
int map_open_slots(struct shd_model *m, struct shd_err *e)
{
    struct map_opening o = { m, "", m->spec->name, m->slot_count };
    int r = map_ask_layouts(&o, e);
    if (r == SHD_OK && m->map->whole)
        m->map->view_slots = m->slot_count;
    else if (r == SHD_OK)
        r = reserve_views(m, m->slot_count, e);
    if (r == SHD_OK)
        r = take_links(&o, 1u << SEGMENT_INBOX, e);
    if (r != SHD_OK)
        release_views(m->map);
    return r;
}

void map_close(struct shd_model *m)
{
    struct map_model *map = m->map;
    if (map == NULL)
        return;
    hub_forget(m->session->hub, m);
    activity_detach(&m->activity);
    release_views(map);
    for (uint32_t u = 0; map->params != NULL && u < m->spec->unit_count; u++)
        if (map->params[u] != NULL)
            segment_unreserve(map->params[u],
                              m->spec->units[u].elems * dtype_bytes(m->spec->publish));
    for (uint32_t i = 0; i < map->owner_count; i++) {
        whole_close(&map->owners[i]);
        segment_close(&map->owners[i].board);
        segment_close(&map->owners[i].inbox);
        shardmap_free(map->owners[i].shards);
    }
    free(map->owners);
    free(map->params);
    free(map->view_of);
    free(map->view_elems);
    free(map->view_unit);
    free(map->turn);
    free(map);
    m->map = NULL;
}
