/* Opening and mapping a model on daemons; see path_map.h.
 *
 * Happy path: OpenModel to every daemon, check each answer against our own arithmetic, claim the
 * segments on the side channels, place them side by side. Any failure unmaps everything. */
#include "client/path_map.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/check.h"
#include "proto/sys.h"

/* -- Asking ------------------------------------------------------------------------------------ */

/* The daemon's spec becomes ours (attach), or must be ours. */
static int take_spec(struct shd_model *m, const struct link *link, const struct wire_layout *layout,
                     struct shd_err *e)
{
    struct spec *spec;
    int r = spec_parse((const char *)layout->spec.data, layout->spec.bytes, &spec, e);
    if (r == SHD_OK && m->spec == NULL) {
        r = model_set_spec(m, spec, e);
        if (r == SHD_OK)
            return SHD_OK;
        spec_free(spec);
    } else if (r == SHD_OK) {
        r = spec_compare(spec, m->spec, e);
        spec_free(spec);
    }
    if (r != SHD_OK) {
        const struct shd_err why = e != NULL ? *e : (struct shd_err){ 0 };
        link_err(link, r, e, "has another model: %s", why.text);
    }
    return r;
}

static int take_layout(struct round *round, struct link *link, uint64_t slots,
                       const struct wire_reply *reply, struct shd_err *e)
{
    struct shd_model *m = round->ctx;
    const struct wire_layout *layout = &reply->layout;
    struct map_owner *owner = &m->map->owners[link->index];
    if (layout->owner != link->index || layout->owners != m->map->owner_count)
        return link_err(link, SHD_EPROTO, e,
                        "is owner %" PRIu32 " of %" PRIu32 ", not %" PRIu32 " of %" PRIu32,
                        layout->owner, layout->owners, link->index, m->map->owner_count);
    if (layout->slots != slots)
        return link_err(link, SHD_EPROTO, e, "made %" PRIu32 " gradient slots, not %" PRIu64,
                        layout->slots, slots);
    const int r = take_spec(m, link, layout, e);
    if (r != SHD_OK)
        return r;
    owner->handle = layout->model;
    owner->step = layout->step;
    owner->slots = layout->slots;
    owner->slot_bytes = layout->slot_bytes;
    owner->decided = layout->has_decision;
    owner->decision = layout->decision;
    memcpy(owner->segments, layout->segments, sizeof owner->segments);
    owner->segment_count = layout->segment_count;
    return SHD_OK;
}

/* OpenModel to every daemon; json "" attaches to name ("": the only one). */
static int ask_layouts(struct shd_model *m, const char *json, const char *name, uint32_t slots,
                       struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    struct round round = {
        .what = "OpenModel", .type = WIRE_LAYOUT, .take = take_layout, .ctx = m
    };
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < hub->link_count; i++) {
        struct wire_request request = {
            .type = WIRE_OPEN_MODEL,
            .open_model = { .spec = { (const uint8_t *)json, strlen(json) },
                            .name = name,
                            .owner = i,
                            .owners = hub->link_count,
                            .slots = slots },
        };
        r = round_ask(&round, &hub->links[i], &request, slots, e);
    }
    return round_finish(&round, hub, r, e);
}

/* -- Placing ----------------------------------------------------------------------------------- */

/* This owner's slice of every unit, read-only. */
static int place_publish(struct shd_model *m, const struct map_owner *owner, int fd,
                         struct shd_err *e)
{
    const struct shardmap *s = owner->shards;
    const uint64_t elem_bytes = dtype_bytes(m->spec->publish);
    for (uint32_t u = 0; u < m->spec->unit_count; u++) {
        const uint64_t bytes = shardmap_publish_slice_bytes(s, u);
        if (bytes == 0)
            continue;
        uint8_t *at = (uint8_t *)m->map->params[u] + s->slice[u].first_elem * elem_bytes;
        const int r = segment_place(at, fd, shardmap_publish_offset_bytes(s, u), bytes,
                                    /* writable= */ false, e);
        if (r != SHD_OK)
            return r;
        m->session->bytes_mapped += bytes;
    }
    return SHD_OK;
}

/* This owner's slice in every slot and view, writable. */
static int place_inbox(struct shd_model *m, const struct map_owner *owner, int fd,
                       struct shd_err *e)
{
    struct map_model *map = m->map;
    const struct shardmap *s = owner->shards;
    for (uint32_t slot = 0; slot < map->view_slots; slot++)
        for (uint32_t v = 0; v < map->view_count; v++) {
            const struct slice slice = s->slice[map->view_unit[v]];
            if (slice.elems == 0)
                continue;
            const uint64_t bytes = slice.elems * sizeof(float);
            float *view = map->views[slot * map->view_count + v];
            const int r = segment_place(view + slice.first_elem, fd,
                                        shardmap_slot_offset_bytes(s, slot), bytes,
                                        /* writable= */ true, e);
            if (r != SHD_OK)
                return r;
            m->session->bytes_mapped += bytes;
        }
    return SHD_OK;
}

static int map_board(struct shd_model *m, struct map_owner *owner, int *fd,
                     const struct wire_segment *segment, struct shd_err *e)
{
    const int r = segment_map(*fd, SEGMENT_BOARD, segment->bytes, &owner->board, e);
    if (r != SHD_OK)
        return r;
    *fd = -1; /* the segment's now */
    return board_check(owner->board.base, owner->board.bytes, m->spec->unit_count, e);
}

static uint64_t expected_bytes(const struct shd_model *m, const struct map_owner *owner,
                               enum segment_kind kind)
{
    switch (kind) {
    case SEGMENT_PUBLISH:
        return shardmap_publish_bytes(owner->shards);
    case SEGMENT_INBOX:
        return owner->slots > 0 ? shardmap_inbox_bytes(owner->shards, owner->slots) : 0;
    case SEGMENT_BOARD:
        return layout_align(board_bytes(m->spec->unit_count), SHD_PAGE_BYTES);
    case SEGMENT_STATE:
        break;
    }
    return 0; /* nothing we would map */
}

static int take_segment(struct shd_model *m, struct link *link, const struct wire_segment *segment,
                        unsigned wanted, struct shd_err *e)
{
    struct map_owner *owner = &m->map->owners[link->index];
    const uint64_t bytes = expected_bytes(m, owner, segment->kind);
    if (segment->bytes != bytes)
        return link_err(link, SHD_ESEGMENT, e,
                        "offers a %s segment of %" PRIu64 " bytes, the spec "
                        "makes it %" PRIu64,
                        segment_kind_name(segment->kind), segment->bytes, bytes);
    int fd;
    int r = hub_claim(link, segment, &fd, e);
    if (r != SHD_OK)
        return r;
    struct shd_err why = { 0 };
    if ((wanted & 1u << segment->kind) == 0)
        r = SHD_OK; /* mapped earlier: only let go of the ticket */
    else if (segment->kind == SEGMENT_PUBLISH)
        r = place_publish(m, owner, fd, &why);
    else if (segment->kind == SEGMENT_INBOX)
        r = place_inbox(m, owner, fd, &why);
    else
        r = map_board(m, owner, &fd, segment, &why);
    if (fd >= 0)
        close(fd); /* mappings keep the memory */
    if (r != SHD_OK)
        link_err(link, r, e, "has a %s segment that cannot be mapped here: %s",
                 segment_kind_name(segment->kind), why.text);
    return r;
}

/* Claim an owner's segments, each kind once; map those of the wanted kinds (bits). */
static int take_segments(struct shd_model *m, struct link *link, unsigned wanted, struct shd_err *e)
{
    const struct map_owner *owner = &m->map->owners[link->index];
    if (owner->slots > 0 && owner->slot_bytes != owner->shards->slot_bytes)
        return link_err(link, SHD_ESEGMENT, e,
                        "has slots of %" PRIu64 " bytes, the spec makes "
                        "them %" PRIu64,
                        owner->slot_bytes, owner->shards->slot_bytes);
    unsigned seen = 0;
    for (uint32_t i = 0; i < owner->segment_count; i++) {
        const struct wire_segment *segment = &owner->segments[i];
        if (seen & 1u << segment->kind)
            return link_err(link, SHD_EPROTO, e, "offers two %s segments",
                            segment_kind_name(segment->kind));
        seen |= 1u << segment->kind;
        const int r = take_segment(m, link, segment, wanted, e);
        if (r != SHD_OK)
            return r;
    }
    if ((seen & wanted) != wanted)
        return link_err(link, SHD_EPROTO, e, "offers segments %#x, needed are %#x", seen, wanted);
    return SHD_OK;
}

static int take_all_segments(struct shd_model *m, unsigned wanted, struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < hub->link_count; i++)
        r = take_segments(m, &hub->links[i], wanted, e);
    return r;
}

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
    if (map->views == NULL)
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
    map->views = NULL;
    map->view_slots = 0;
}

/* -- Opening ----------------------------------------------------------------------------------- */

static int new_map(struct shd_model *m, struct shd_err *e)
{
    const uint32_t owners = m->session->hub->link_count;
    struct map_model *map = sys_calloc(1, sizeof *map);
    m->map = map;
    if (map != NULL) {
        map->owners = sys_calloc(owners, sizeof *map->owners);
        map->prepared = sys_calloc(owners, sizeof *map->prepared);
        map->counts = sys_calloc(owners, sizeof *map->counts);
    }
    if (map == NULL || map->owners == NULL || map->prepared == NULL || map->counts == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a model with %" PRIu32 " owners", owners);
    map->owner_count = owners;
    for (uint32_t i = 0; i < owners; i++)
        map->owners[i].board = SEGMENT_CLOSED;
    return SHD_OK;
}

static int open_layouts(struct shd_model *m, const char *name, struct shd_err *e)
{
    if (m->spec == NULL)
        return ask_layouts(m, "", name, /* slots= */ 0, e);
    char *json;
    uint32_t slots = 0;
    int r = model_slots_needed(m, &slots, e);
    if (r == SHD_OK)
        r = spec_dump(m->spec, &json, e);
    if (r != SHD_OK)
        return r;
    r = ask_layouts(m, json, "", slots, e);
    free(json);
    m->slot_count = slots;
    return r;
}

int map_open(struct shd_model *m, const char *name, struct shd_err *e)
{
    int r = new_map(m, e);
    if (r == SHD_OK)
        r = open_layouts(m, name, e);
    if (r == SHD_OK)
        r = map_settle(m, e);
    if (r == SHD_OK)
        r = make_shardmaps(m, e);
    if (r == SHD_OK)
        r = reserve_params(m, e);
    if (r == SHD_OK)
        r = find_views(m, e);
    if (r == SHD_OK && m->slot_count > 0)
        r = reserve_views(m, m->slot_count, e);
    unsigned wanted = 1u << SEGMENT_PUBLISH | 1u << SEGMENT_BOARD;
    if (m->slot_count > 0)
        wanted |= 1u << SEGMENT_INBOX;
    return r == SHD_OK ? take_all_segments(m, wanted, e) : r;
}

/* Attached without slots (tools only look): get them now. */
int map_open_slots(struct shd_model *m, struct shd_err *e)
{
    int r = ask_layouts(m, "", m->spec->name, m->slot_count, e);
    if (r == SHD_OK)
        r = reserve_views(m, m->slot_count, e);
    if (r == SHD_OK)
        r = take_all_segments(m, 1u << SEGMENT_INBOX, e);
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
    release_views(map);
    for (uint32_t u = 0; map->params != NULL && u < m->spec->unit_count; u++)
        if (map->params[u] != NULL)
            segment_unreserve(map->params[u],
                              m->spec->units[u].elems * dtype_bytes(m->spec->publish));
    for (uint32_t i = 0; i < map->owner_count; i++) {
        segment_close(&map->owners[i].board);
        shardmap_free(map->owners[i].shards);
    }
    free(map->owners);
    free(map->params);
    free(map->view_of);
    free(map->view_elems);
    free(map->view_unit);
    free(map->prepared);
    free(map->counts);
    free(map);
    m->map = NULL;
}
