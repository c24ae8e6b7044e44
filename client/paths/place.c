/* See place.h. A successor's segments are placed over its predecessor's: map.h says how. */
#include "client/paths/place.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "client/paths/map.h"
#include "client/paths/rewind.h"
#include "client/session/activity.h"
#include "client/session/hub.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/share/deal.h"
#include "proto/share/segment_file.h"

#define SLICE_NS (5 * NS_PER_MS)   /* between two looks at the daemons' lives */
#define POLL_NS  (100 * NS_PER_MS) /* the same where they end the sleep */

/* -- Reserving --------------------------------------------------------------------------------- */

static uint64_t params_bytes(const struct shd_model *m)
{
    uint64_t elems = 0;
    for (uint32_t u = 0; u < m->spec->unit_count; u++)
        elems += m->spec->units[u].elems;
    return elems * dtype_bytes(m->spec->publish);
}

int place_reserve_units(const struct shd_model *m, void ***ret_units, struct shd_err *e)
{
    void *base, **units = sys_calloc(m->spec->unit_count, sizeof *units);
    if (units == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " units", m->spec->unit_count);
    const int r = segment_reserve(params_bytes(m), &base, e);
    if (r != SHD_OK) {
        free(units);
        return r;
    }
    uint8_t *at = base;
    for (uint32_t u = 0; u < m->spec->unit_count; u++) {
        units[u] = at;
        at += m->spec->units[u].elems * dtype_bytes(m->spec->publish);
    }
    *ret_units = units;
    return SHD_OK;
}

int place_memory_units(const struct shd_model *m, void ***ret_units, struct shd_err *e)
{
    void **units;
    int r = place_reserve_units(m, &units, e);
    if (r != SHD_OK)
        return r;
    if (mprotect(units[0], params_bytes(m), PROT_READ | PROT_WRITE) < 0) {
        r = err_sys(e, SHD_ENOMEM, "have %" PRIu64 " bytes for decoded parameters",
                    params_bytes(m));
        place_release_units(m, units);
        return r;
    }
    *ret_units = units;
    return SHD_OK;
}

void place_release_units(const struct shd_model *m, void **units)
{
    if (units != NULL)
        segment_unreserve(units[0], params_bytes(m));
    free(units);
}

struct unit_size {
    uint64_t elems;
    uint32_t owner; /* that has all of it, or DEAL_SPREAD */
    uint32_t unit;
};

static int compare_sizes(const void *a, const void *b)
{
    const struct unit_size *s = a, *t = b;
    if (s->elems != t->elems)
        return s->elems < t->elems ? -1 : 1;
    if (s->owner != t->owner)
        return s->owner < t->owner ? -1 : 1;
    return (s->unit > t->unit) - (s->unit < t->unit);
}

static bool same_slices(const struct unit_size *a, const struct unit_size *b)
{
    return a->elems == b->elems && a->owner == b->owner;
}

/* Units of one size have the same slices, if one owner has all of each or none has, so one view of
 * a slot serves them all. Frozen units have none: no slot is large enough for them. */
static int find_views(struct shd_model *m, struct shd_err *e)
{
    struct map_model *map = m->map;
    const uint32_t units = m->spec->unit_count;
    map->view_of = sys_calloc(units, sizeof *map->view_of);
    map->view_elems = sys_calloc(units, sizeof *map->view_elems);
    map->view_unit = sys_calloc(units, sizeof *map->view_unit);
    struct unit_size *sizes = sys_calloc(units, sizeof *sizes);
    uint32_t *owner_of = NULL;
    const int dealt = deal_units(m->spec, map->owner_count, &owner_of, e);
    if (map->view_of == NULL || map->view_elems == NULL || map->view_unit == NULL ||
        sizes == NULL || dealt != SHD_OK) {
        free(sizes);
        free(owner_of);
        return dealt != SHD_OK
                   ? dealt
                   : err_set(e, SHD_ENOMEM, "no memory for the views of %" PRIu32 " units", units);
    }
    uint32_t count = 0;
    for (uint32_t u = 0; u < units; u++)
        if (!m->spec->units[u].frozen)
            sizes[count++] = (struct unit_size){ m->spec->units[u].elems, owner_of[u], u };
    qsort(sizes, count, sizeof *sizes, compare_sizes);
    for (uint32_t i = 0; i < count; i++) {
        if (i == 0 || !same_slices(&sizes[i], &sizes[i - 1])) {
            map->view_elems[map->view_count] = sizes[i].elems;
            map->view_unit[map->view_count++] = sizes[i].unit;
        }
        map->view_of[sizes[i].unit] = map->view_count - 1;
    }
    free(sizes);
    free(owner_of);
    return SHD_OK;
}

int place_reserve(struct shd_model *m, struct shd_err *e)
{
    int r = place_reserve_units(m, &m->map->params, e);
    if (r == SHD_OK)
        r = find_views(m, e);
    if (r == SHD_OK && m->slot_count > 0)
        r = place_reserve_slots(m, m->slot_count, e);
    return r;
}

int place_reserve_slots(struct shd_model *m, uint32_t slots, struct shd_err *e)
{
    struct map_model *map = m->map;
    const uint32_t count = slots * map->view_count;
    map->views = sys_calloc(count, sizeof *map->views);
    map->stale = sys_calloc((size_t)slots * map->member_count, sizeof *map->stale);
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

void place_release_slots(struct map_model *map)
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

void place_release(struct shd_model *m)
{
    struct map_model *map = m->map;
    place_release_slots(map);
    place_release_units(m, map->params);
    free(map->view_of);
    free(map->view_elems);
    free(map->view_unit);
}

/* -- Placing ----------------------------------------------------------------------------------- */

int place_units(struct shd_model *m, void *const *units, const struct map_owner *owner, int fd,
                struct shd_err *e)
{
    const struct shardmap *s = owner->shards;
    const uint64_t elem_bytes = dtype_bytes(m->spec->publish);
    m->map->on_disk = m->map->on_disk || segment_file_is(fd);
    for (uint32_t u = 0; u < m->spec->unit_count; u++) {
        const uint64_t bytes = shardmap_publish_slice_bytes(s, u);
        if (bytes == 0)
            continue;
        uint8_t *at = (uint8_t *)units[u] + s->slice[u].first_elem * elem_bytes;
        const int r = segment_place(at, fd, shardmap_publish_offset_bytes(s, u), bytes,
                                    /* writable= */ false, e);
        if (r != SHD_OK)
            return r;
        m->session->bytes_mapped += bytes;
    }
    return SHD_OK;
}

/* Pages move one slice at a time, and leave nothing: what is unmapped there may be somebody else's
 * at once. */
static int move_units(const struct shd_model *n, void *const *to, struct shd_err *e)
{
    const uint64_t elem_bytes = dtype_bytes(n->spec->publish);
    uint64_t moved = 0;
    for (uint32_t i = 0; i < n->map->owner_count; i++) {
        const struct shardmap *s = n->map->owners[i].shards;
        for (uint32_t u = 0; u < n->spec->unit_count; u++) {
            const uint64_t at = s->slice[u].first_elem * elem_bytes;
            const uint64_t bytes = shardmap_publish_slice_bytes(s, u);
            const uint64_t room = s->slice[u].elems * elem_bytes; /* codes leave some of it free */
            if (bytes > 0 &&
                mremap((uint8_t *)n->map->params[u] + at, bytes, bytes,
                       MREMAP_MAYMOVE | MREMAP_FIXED, (uint8_t *)to[u] + at) == MAP_FAILED)
                return err_sys(e, SHD_ENOMEM, "move the parameters of unit '%s'",
                               n->spec->units[u].name);
            if (bytes < room)
                segment_unreserve((uint8_t *)n->map->params[u] + at + bytes, room - bytes);
            moved += room;
        }
    }
    CHECK(moved == params_bytes(n)); /* the owners have all of it, each a part */
    return SHD_OK;
}

int place_take_over(struct shd_model *m, struct shd_model *n, struct shd_err *e)
{
    const int r = move_units(n, m->map->params, e);
    if (r != SHD_OK)
        return r;
    free(n->map->params); /* nothing is left there */
    n->map->params = m->map->params;
    m->map->params = NULL;
    return SHD_OK;
}

/* Map this owner's slice in every view of a slot, writable. */
static int place_slot(struct shd_model *m, const struct map_owner *owner, uint32_t slot, int fd,
                      struct shd_err *e)
{
    const struct map_model *map = m->map;
    const struct shardmap *s = owner->shards;
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

/* An owner's first inbox is mapped in the views at once. */
static int place_inbox(struct shd_model *m, const struct map_owner *owner, int fd,
                       struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t slot = 0; r == SHD_OK && slot < m->map->view_slots; slot++)
        r = place_slot(m, owner, slot, fd, e);
    return r;
}

/* A successor's inbox is mapped in one piece. No view shows it before its slot is handed out anew.
 */
static int replace_inbox(struct shd_model *m, struct map_owner *owner, int *fd, uint64_t bytes,
                         struct shd_err *e)
{
    struct segment inbox;
    const uint32_t index = (uint32_t)(owner - m->map->owners);
    const int r = segment_map(*fd, SEGMENT_INBOX, bytes, &inbox, e);
    if (r != SHD_OK)
        return r;
    *fd = -1; /* the segment's now */
    segment_close(&owner->inbox);
    owner->inbox = inbox;
    for (uint32_t slot = 0; slot < m->map->view_slots; slot++)
        m->map->stale[slot * m->map->member_count + index] = true;
    return SHD_OK;
}

static int place_take(struct shd_model *m, struct map_owner *owner,
                      const struct wire_segment *segment, int *fd, struct shd_err *e)
{
    if (segment->kind == SEGMENT_PUBLISH)
        return place_units(m, m->map->params, owner, *fd, e);
    if (owner->has_inbox)
        return replace_inbox(m, owner, fd, segment->bytes, e);
    return place_inbox(m, owner, *fd, e);
}

int place_ready(struct shd_model *m, struct map_owner *owner, struct shd_err *e)
{
    (void)m;
    (void)owner;
    (void)e;
    return SHD_OK;
}

static const uint8_t *place_published(const struct shd_model *m, const struct map_owner *owner,
                                      uint32_t unit)
{
    return (const uint8_t *)m->map->params[unit] +
           owner->shards->slice[unit].first_elem * dtype_bytes(m->spec->publish);
}

float *place_slot_array(const struct shd_model *m, uint32_t slot, uint32_t unit)
{
    return m->map->views[slot * m->map->view_count + m->map->view_of[unit]];
}

/* -- Slots, after a succession too ------------------------------------------------------------- */

static bool *find_stale(const struct shd_model *m, const struct map_owner *owner, uint32_t slot)
{
    return &m->map->stale[slot * m->map->member_count + (uint32_t)(owner - m->map->owners)];
}

static int place_ready_slot(struct shd_model *m, struct map_owner *owner, uint32_t slot,
                            struct shd_err *e)
{
    bool *stale = find_stale(m, owner, slot);
    if (!*stale)
        return SHD_OK;
    const int r = place_slot(m, owner, slot, owner->inbox.fd, e);
    *stale = r != SHD_OK;
    return r;
}

/* The views are placed for fp32. An owner's part of a view starts where its slot starts, and that
 * is where its part of the gradient goes, in whichever dtype. */
static int place_slice_at(struct shd_model *m, const struct map_owner *owner, uint32_t slot,
                          uint32_t unit, enum shd_dtype dtype, void **ret_at, struct shd_err *e)
{
    (void)dtype;
    (void)e;
    *ret_at = place_slot_array(m, slot, unit) + owner->shards->slice[unit].first_elem;
    return SHD_OK;
}

static int place_bring(struct shd_model *m, struct map_owner *owner, uint32_t slot, bool first,
                       uint64_t *ret_turn, struct shd_err *e)
{
    const struct grad_slot *s = &m->slots[slot];
    const struct slice slice = owner->shards->slice[s->unit];
    (void)e;
    *ret_turn = 0;
    if (!first || !*find_stale(m, owner, slot) || slice.elems == 0)
        return SHD_OK;
    uint8_t *inbox = (uint8_t *)owner->inbox.base + shardmap_slot_offset_bytes(owner->shards, slot);
    memcpy(inbox, place_slot_array(m, slot, s->unit) + slice.first_elem,
           shardmap_grad_bytes(owner->shards, s->unit, s->dtype));
    return SHD_OK;
}

const struct mover_ops mover_place = {
    .take = place_take,
    .ready = place_ready,
    .published = place_published,
    .ready_slot = place_ready_slot,
    .slice_at = place_slice_at,
    .bring = place_bring,
};

/* -- Reading: waits are for the owners' boards (proto/share/board.h) --------------------------- */

int mapped_nothing(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    (void)m;
    (void)unit;
    (void)e;
    return SHD_OK;
}

void mapped_let_go(struct shd_model *m, uint32_t unit)
{
    (void)m;
    (void)unit;
}

int mapped_sleep(struct shd_model *m, struct link *link, uint32_t unit, uint64_t version,
                 uint64_t start_ns, bool *ret_late, struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    const struct map_owner *owner = &m->map->owners[link->index];
    const bool rings = clock_now_ns() - start_ns >= SLICE_NS &&
                       link_ring_await(&link->ring, board_awaited(owner->layout.handle, unit));
    const uint64_t slice_ns = hub_left_ns(hub, start_ns, rings ? POLL_NS : SLICE_NS);
    *ret_late = slice_ns == 0;
    int r = board_wait(owner->board.base, unit, version, rings ? 0 : slice_ns);
    if (r != SHD_OK) {
        r = hub_poll(hub, rings ? slice_ns : 0, e);
        activity_look(m);
        r = r == SHD_OK ? SHD_PENDING : r;
    }
    if (rings)
        link_ring_await(&link->ring, 0);
    return r;
}

int mapped_wait_owner(struct shd_model *m, struct link *link, uint32_t unit, uint64_t start_ns,
                      struct shd_err *e)
{
    bool late = false;
    int r = SHD_PENDING;
    while (r == SHD_PENDING && !late)
        if ((r = rewind_seen(m, e)) == SHD_OK) /* else it does not come */
            r = mapped_sleep(m, link, unit, m->step, start_ns, &late, e);
    if (r == SHD_PENDING)
        return model_err_unpublished(m, link, unit, e);
    if (r != SHD_OK)
        return r;
    const uint64_t version = board_version(m->map->owners[link->index].board.base, unit);
    return version == m->step ? SHD_OK : model_err_past(m, link, unit, version, e);
}

/* What is mapped is there, unless it lies on a disk: the kernel begins to read it, and who computes
 * meanwhile waits less for it. Memory takes no harm from being asked for, too. */
static int mapped_fetch(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    (void)e;
    const struct map_model *map = m->map;
    for (uint32_t i = 0; map->on_disk && map->params != NULL && i < map->owner_count; i++) {
        const uint64_t bytes = shardmap_publish_slice_bytes(map->owners[i].shards, unit);
        if (bytes > 0)
            madvise((void *)place_published(m, &map->owners[i], unit), bytes, MADV_WILLNEED);
    }
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
    for (uint32_t i = 0; r == SHD_OK && i < hub->owner_count; i++)
        if (m->map->owners[i].shards->slice[unit].elems > 0)
            r = mapped_wait_owner(m, &hub->links[i], unit, start_ns, e);
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
