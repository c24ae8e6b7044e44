/* See replica.h. */
#include "client/paths/replica.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "client/paths/copy.h"
#include "client/paths/layout.h"
#include "client/paths/place.h"
#include "client/paths/turn.h"
#include "client/session/activity.h"
#include "client/session/hub.h"
#include "proto/base/check.h"

/* -- Moving ------------------------------------------------------------------------------------ */

static int replica_take(struct shd_model *m, struct map_owner *owner,
                        const struct wire_segment *segment, int *fd, struct shd_err *e)
{
    struct segment got = SEGMENT_CLOSED;
    (void)m;
    if (segment->kind == SEGMENT_PUBLISH) { /* mapped when it is read from */
        segment_close(&owner->whole.held);
        owner->whole.held = (struct segment){ .fd = *fd, .bytes = segment->bytes };
        *fd = -1;
        return SHD_OK;
    }
    const int r = segment_map(*fd, SEGMENT_INBOX, segment->bytes, &got, e);
    if (r != SHD_OK)
        return r;
    *fd = -1; /* the segment's now */
    segment_close(&owner->inbox);
    owner->inbox = got;
    return SHD_OK;
}

static const uint8_t *replica_published(const struct shd_model *m, const struct map_owner *owner,
                                        uint32_t unit)
{
    (void)m;
    (void)owner;
    (void)unit;
    return NULL; /* nobody reads there */
}

static int replica_ready_slot(struct shd_model *m, struct map_owner *owner, uint32_t slot,
                              struct shd_err *e)
{
    (void)slot;
    return place_ready(m, owner, e);
}

static int replica_slice_at(struct shd_model *m, const struct map_owner *owner, uint32_t slot,
                            uint32_t unit, enum shd_dtype dtype, void **ret_at, struct shd_err *e)
{
    (void)m;
    (void)unit;
    (void)dtype;
    (void)e;
    *ret_at = (uint8_t *)owner->inbox.base + shardmap_slot_offset_bytes(owner->shards, slot);
    return SHD_OK;
}

static int replica_bring(struct shd_model *m, struct map_owner *owner, uint32_t slot, bool first,
                         uint64_t *ret_turn, struct shd_err *e)
{
    const struct grad_slot *s = &m->slots[slot];
    const struct slice slice = owner->shards->slice[s->unit];
    const uint64_t bytes = shardmap_grad_bytes(owner->shards, s->unit, s->dtype);
    void *to = NULL;
    *ret_turn = 0;
    if (!first || bytes == 0)
        return SHD_OK;
    const int r = replica_slice_at(m, owner, slot, s->unit, s->dtype, &to, e);
    if (r == SHD_OK)
        memcpy(to, place_slot_array(m, slot, s->unit) + slice.first_elem, bytes);
    m->session->bytes_copied += bytes;
    return r;
}

const struct mover_ops mover_replica = {
    .take = replica_take,
    .ready = place_ready,
    .published = replica_published,
    .ready_slot = replica_ready_slot,
    .slice_at = replica_slice_at,
    .bring = replica_bring,
};

/* -- Looking ----------------------------------------------------------------------------------- */

int replica_check(const struct shd_model *m, struct shd_err *e)
{
    const struct map_model *map = m->map;
    const struct link *links = m->session->hub->links;
    for (uint32_t i = map->owner_count; i < map->member_count; i++) {
        const uint32_t owner = i - map->owner_count;
        if (!hub_lost(m->session->hub, i) && layout_source(m, &map->owners[i].layout) !=
                                                 layout_source(m, &map->owners[owner].layout))
            return link_err(&links[i], SHD_ESTEP, e,
                            "has another model '%s' than daemon %s, whose replica it is: drop it "
                            "there (shardctl drop -a 'DIR?%s' %s)",
                            m->spec->name, links[owner].device, links[i].device, m->spec->name);
    }
    return SHD_OK;
}

/* -- An owner that is lost --------------------------------------------------------------------- */

/* Has the replica published what this worker may be reading? Or gone back meanwhile: then this
 * worker does, too, and reads all anew (rewind_seen()). */
static bool has_caught_up(const struct shd_model *m, uint32_t owner)
{
    const struct map_owner *o = &m->map->owners[m->map->owner_count + owner];
    uint64_t to;
    if (board_rewound(o->board.base, &to) > m->map->rewound)
        return true;
    for (uint32_t u = 0; u < m->spec->unit_count; u++)
        if (o->shards->slice[u].elems > 0 && board_version(o->board.base, u) < m->step)
            return false;
    return true;
}

static int place_board(struct map_owner *owner, struct map_owner *replica, struct shd_err *e)
{
    const int r = segment_place(owner->board.base, replica->board.fd, 0, owner->board.bytes,
                                /* writable= */ false, e);
    if (r != SHD_OK)
        return r;
    close(owner->board.fd);
    owner->board.fd = replica->board.fd;
    replica->board.fd = -1;
    return SHD_OK;
}

/* Slots in use lie in the inbox of the one that is lost; views show this one when they are handed
 * out anew. */
static void take_inbox(struct shd_model *m, uint32_t index, struct map_owner *owner,
                       struct map_owner *replica)
{
    segment_close(&owner->inbox);
    owner->inbox = replica->inbox;
    replica->inbox = SEGMENT_CLOSED;
    for (uint32_t slot = 0; slot < m->map->view_slots; slot++)
        m->map->stale[slot * m->map->member_count + index] = true;
    activity_unmap(owner->says);
    owner->says = replica->says;
    replica->says = NULL;
    if (index > 0)
        return;
    activity_unmap(owner->says);
    owner->says = NULL;
    activity_attach(&m->activity, owner->inbox.fd, owner->inbox.bytes - ACTIVITY_BYTES,
                    m->reader->shown);
}

static int take_place(struct shd_model *m, uint32_t index, struct shd_err *e)
{
    struct map_model *map = m->map;
    struct map_owner *owner = &map->owners[index];
    struct map_owner *replica = &map->owners[map->owner_count + index];
    struct transfer *transfer = m->copy != NULL ? m->copy->transfer : NULL;
    if (transfer != NULL)
        transfer_hold(transfer);
    int r = place_units(m, map->params, owner, replica->whole.held.fd, e);
    if (r == SHD_OK)
        r = place_board(owner, replica, e);
    if (r == SHD_OK && owner->has_inbox)
        take_inbox(m, index, owner, replica);
    if (transfer != NULL)
        transfer_go(transfer);
    owner->layout = replica->layout;
    m->leases.owner = 0; /* it may lack what its predecessor had */
    if (r == SHD_OK)
        turn_succeed(map->turn, index);
    return r;
}

/* Of one that is being opened there may be nothing yet: then its owner is opened where it is now.
 */
static bool is_mapped(const struct shd_model *m, uint32_t owner)
{
    return m->map != NULL && m->map->owners[owner].mapped &&
           m->map->owners[m->map->owner_count + owner].mapped;
}

static bool is_joining(const struct shd_model *m, uint32_t owner)
{
    return m->map != NULL && m->map->owners[m->map->owner_count + owner].joining;
}

static void lose_replica(struct shd_session *s, uint32_t owner)
{
    for (struct shd_model *m = session_first(s); m != NULL; m = session_next(s, m))
        if (m->map != NULL)
            turn_lose(m->map->turn, m->map->owner_count + owner);
}

/* Had the one that is lost alone begun the attempt that this worker is at? Those that are left may
 * have ended the step in the one before. */
static bool knows_lost_attempt(const struct shd_model *m, uint32_t owner)
{
    const struct map_model *map = m->map;
    if (map == NULL || m->in.step != m->step || !map->owners[owner].mapped)
        return false;
    for (uint32_t i = 0; i < map->member_count; i++) {
        const struct map_owner *o = &map->owners[i];
        if (i == map->owner_count + owner || hub_lost(m->session->hub, i) || !o->mapped)
            continue;
        if (o->layout.attempt >= m->in.attempt ||
            board_attempt(o->board.base, m->step) >= m->in.attempt)
            return false;
    }
    return true;
}

static int check_attempts(struct shd_session *s, uint32_t owner, struct shd_err *e)
{
    for (struct shd_model *m = session_first(s); m != NULL; m = session_next(s, m))
        if (knows_lost_attempt(m, owner))
            return err_set(e, SHD_EGONE,
                           "step %" PRIu64 " of model '%s' was begun again, as a daemon that is "
                           "lost alone has recorded: connect anew",
                           m->step, m->spec->name);
    return SHD_OK;
}

bool replica_succeed(void *ctx, uint32_t owner, bool gone)
{
    struct shd_session *s = ctx;
    struct link *links = s->hub->links;
    struct shd_err e = { 0 };
    int r = SHD_OK;
    if (gone) {
        lose_replica(s, owner);
    } else {
        for (struct shd_model *m = session_first(s); m != NULL; m = session_next(s, m))
            if (is_joining(m, owner) || (is_mapped(m, owner) && !has_caught_up(m, owner)))
                return false;
        for (struct shd_model *m = session_first(s); r == SHD_OK && m != NULL;
             m = session_next(s, m))
            if (is_mapped(m, owner))
                r = take_place(m, owner, &e);
            else if (m->map != NULL)
                turn_succeed(m->map->turn, owner);
    }
    if (r == SHD_OK)
        r = check_attempts(s, owner, &e);
    if (r != SHD_OK)
        link_fault(&links[s->hub->owner_count + owner], &e);
    return true;
}
