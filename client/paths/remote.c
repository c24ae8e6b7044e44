/* See remote.h. A model is opened on daemons here, and again on their successors; the rest of the
 * table is in files of its own.
 *
 * Happy path: OpenModel to every daemon, claim the segments on the side channels, map them, bring
 * the owners to one step. A daemon that dies meanwhile is asked again. Any failure unmaps
 * everything.
 *
 * A successor: OpenModel by name, the same checks as at first, the new segments over the old ones.
 * The hub asks anew for returns that were not credited, and slots.c brings their gradients along. A
 * daemon that goes again is tried again. One that comes back without the model, with another one,
 * or at an earlier step has lost its state: no more waiting helps. */
#include "client/paths/remote.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client/paths/commit.h"
#include "client/paths/copy.h"
#include "client/paths/create.h"
#include "client/paths/get.h"
#include "client/paths/layout.h"
#include "client/paths/lease.h"
#include "client/paths/look.h"
#include "client/paths/map.h"
#include "client/paths/nccl_join.h"
#include "client/paths/place.h"
#include "client/paths/put.h"
#include "client/paths/rejoin.h"
#include "client/paths/replica.h"
#include "client/paths/reset.h"
#include "client/paths/set.h"
#include "client/paths/show.h"
#include "client/paths/slots.h"
#include "client/paths/turn.h"
#include "client/paths/units.h"
#include "client/paths/whole.h"
#include "client/session/blame.h"
#include "client/session/hub.h"
#include "client/session/membership.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/spec/spec_json.h"

#define ROOM_PAUSE_NS UINT64_C(50000000)

static int new_map(struct shd_model *m, struct shd_err *e)
{
    const uint32_t owners = m->session->hub->owner_count, members = m->session->hub->link_count;
    struct map_model *map = sys_calloc(1, sizeof *map);
    void *turn = NULL;
    m->map = map;
    if (map != NULL) {
        map->owners = sys_calloc(members, sizeof *map->owners);
        turn = sys_malloc(turn_bytes(members));
    }
    if (turn != NULL)
        map->turn = turn_init(turn, owners, members);
    if (map == NULL || map->owners == NULL || turn == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a model with %" PRIu32 " owners", owners);
    map->owner_count = owners;
    map->member_count = members;
    for (uint32_t i = 0; i < members; i++)
        map->owners[i].board = map->owners[i].inbox = map->owners[i].whole.publish.segment =
            map->owners[i].whole.held = SEGMENT_CLOSED;
    for (uint32_t i = owners; i < members; i++)
        if (hub_lost(m->session->hub, i))
            turn_lose(map->turn, i);
    return SHD_OK;
}

#define SPEC_ALONE (1u << SEGMENT_SPEC) /* wanted: before it is known how large the others are */

static int take_offered(struct shd_model *m, struct link *link, unsigned wanted, struct shd_err *e)
{
    struct map_layout *layout = &m->map->owners[link->index].layout;
    return wanted == SPEC_ALONE ? layout_take_spec(m, link, layout, e)
                                : segments_take(m, link, layout, wanted, e);
}

/* A daemon that died since it was asked, or dies in this, is asked again. */
static int take_link(struct layout_opening *o, struct link *link, unsigned wanted,
                     struct shd_err *e)
{
    const uint64_t start_ns = clock_now_ns();
    int r = take_offered(o->m, link, wanted, e);
    while (r == SHD_EGONE && hub_check(link->hub, NULL) == SHD_OK &&
           clock_now_ns() < hub_deadline_ns(link->hub, start_ns)) {
        r = layout_ask(o, link, e);
        if (r == SHD_OK)
            r = take_offered(o->m, link, wanted, e);
    }
    return r;
}

static int take_links(struct layout_opening *o, unsigned wanted, struct shd_err *e)
{
    struct hub *hub = o->m->session->hub;
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < hub->link_count; i++)
        if (hub->links[i].state != LINK_GONE)
            r = take_link(o, &hub->links[i], wanted, e);
    return r;
}

static int make_shardmaps(struct shd_model *m, struct shd_err *e)
{
    struct map_model *map = m->map;
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < map->member_count; i++)
        r = shardmap_new(m->spec, i % map->owner_count, map->owner_count, &map->owners[i].shards,
                         e);
    return r;
}

static int reserve(struct shd_model *m, struct shd_err *e)
{
    struct map_model *map = m->map;
    const int r = make_shardmaps(m, e);
    if (r != SHD_OK)
        return r;
    map->whole = whole_decide(m);
    if (map->whole && map->member_count > map->owner_count)
        return err_set(e, SHD_ENOTSUP,
                       "model '%s' has a GPU at one of its ends: replicas are of "
                       "daemons in host memory alone",
                       m->spec->name);
    for (uint32_t i = 0; i < map->owner_count; i++)
        map->owners[i].mover = map->whole ? &mover_whole : &mover_place;
    for (uint32_t i = map->owner_count; i < map->member_count; i++)
        map->owners[i].mover = &mover_replica;
    if (!map->whole)
        return place_reserve(m, e);
    map->view_slots = m->slot_count;
    return SHD_OK;
}

static bool skips_idle(const struct spec *spec)
{
    for (uint32_t u = 0; u < spec->unit_count; u++)
        if (spec->units[u].skips_idle)
            return true;
    return false;
}

/* What one owner counts otherwise than another it also updates otherwise. Each was told how when it
 * made its part, and another worker that opened the model first may have met other builds. */
static int check_counts(const struct shd_model *m, struct shd_err *e)
{
    const struct map_owner *owners = m->map->owners;
    const struct link *links = m->session->hub->links, *first = NULL;
    for (uint32_t i = 0; skips_idle(m->spec) && i < m->map->member_count; i++) {
        if (links[i].state == LINK_GONE || links[i].peer.level < WIRE_LEVEL_SAID)
            continue;
        if (first == NULL)
            first = &links[i];
        if (owners[i].layout.one_count != owners[first->index].layout.one_count)
            return link_err(&links[i], SHD_ESPEC, e,
                            "counts the updates of model '%s' %s, daemon %s %s: it was made while "
                            "daemons were upgraded; give the model another name, or restore a "
                            "checkpoint of it with --replace",
                            m->spec->name, owners[i].layout.one_count ? "as one" : "by unit",
                            first->device, owners[i].layout.one_count ? "by unit" : "as one");
    }
    return SHD_OK;
}

static int open_as(struct layout_opening *o, struct shd_err *e)
{
    struct shd_model *m = o->m;
    unsigned wanted = 1u << SEGMENT_PUBLISH | 1u << SEGMENT_BOARD;
    bool again = false;
    int r = layout_ask_all(o, e);
    m->slot_count = o->slots;
    if (r == SHD_OK)
        r = take_links(o, SPEC_ALONE, e);
    if (r == SHD_OK)
        r = check_counts(m, e);
    if (r == SHD_OK)
        r = replica_check(m, e);
    if (r == SHD_OK)
        r = reserve(m, e);
    if (m->slot_count > 0)
        wanted |= 1u << SEGMENT_INBOX;
    if (r == SHD_OK)
        r = take_links(o, wanted, e);
    if (r == SHD_OK)
        r = rejoin_look(m, o, &again, e);
    if (r != SHD_OK)
        return r;
    return again ? settle_catch_up(m, e) : settle_steps(m, e);
}

/* Owner 0 says it for all. */
static void tell_of_twin(const struct shd_model *m)
{
    const uint32_t pid = m->map->owners[0].layout.twin_pid;
    char line[300];
    if (pid == 0 || m->session->hub->rank == 0)
        return;
    snprintf(line, sizeof line,
             "shd: WARNING: process %" PRIu32 " trains model '%.100s' with RANK=%" PRIu32
             ", too: both do the same work, and another rank's may be done by nobody; give each "
             "worker a RANK of its own",
             pid, m->spec->name, m->session->hub->rank - 1);
    blame_say(m->session->blame, line);
}

static void remote_close(struct shd_model *m);

static int open_once(struct shd_model *m, const char *name, uint32_t slots, bool has_spec,
                     struct shd_err *e)
{
    struct spec_out json = { .segment = SEGMENT_CLOSED };
    int r = new_map(m, e);
    if (r == SHD_OK)
        m->session->opening = m;
    if (r == SHD_OK && has_spec && m->spec_json == NULL)
        r = spec_dump(m->spec, &m->spec_json, e);
    if (r == SHD_OK && has_spec)
        r = spec_out_init(&json, m->spec_json, e);
    if (r == SHD_OK && has_spec && m->session->starts != NULL)
        r = create_model(m, &json, m->session->starts, e);
    if (r == SHD_ECANCELED) /* nor was it waited for that they drop what was begun */
        hub_renew(m->session->hub);
    if (r != SHD_OK) {
        m->session->opening = NULL;
        spec_out_deinit(&json);
        return r;
    }
    struct layout_opening o = {
        .m = m,
        .json = has_spec ? &json : NULL,
        .name = name,
        .slots = slots,
        .one_count = hub_has_older(m->session->hub, WIRE_LEVEL_COUNTS),
    };
    r = open_as(&o, e);
    m->session->opening = NULL;
    if (r == SHD_ECANCELED)
        hub_renew(m->session->hub);
    spec_out_deinit(&json);
    if (r == SHD_OK)
        tell_of_twin(m);
    return r;
}

/* An owner that is lost in the middle of it has a replica, which is opened as the owner, or which
 * is to be taken in first: all anew, in new sessions, for what was taken in may be of either. */
static int remote_open(struct shd_model *m, const char *name, uint32_t slots, struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    struct starts *starts = m->session->starts;
    const bool has_spec = m->spec != NULL;
    bool created = false;
    uint32_t successions = hub->members.successions;
    int r = open_once(m, name, slots, has_spec, e);
    while (r != SHD_ECANCELED &&
           (hub->members.successions != successions || hub->members.returned) &&
           hub_check(hub, NULL) == SHD_OK) {
        successions = hub->members.successions;
        created = created || (starts != NULL && starts->created);
        remote_close(m);
        hub_renew(hub);
        r = rejoin_due(m->session, e);
        if (r == SHD_OK)
            r = open_once(m, name, slots, has_spec, e);
    }
    if (created)
        starts->created = true;
    return r;
}

/* A model that was attached to without slots (tools only look) gets them now. */
static int remote_open_slots(struct shd_model *m, struct shd_err *e)
{
    struct layout_opening o = { .m = m, .name = m->spec->name, .slots = m->slot_count };
    int r = layout_ask_all(&o, e);
    if (r == SHD_OK && m->map->whole)
        m->map->view_slots = m->slot_count;
    else if (r == SHD_OK)
        r = place_reserve_slots(m, m->slot_count, e);
    if (r == SHD_OK)
        r = take_links(&o, 1u << SEGMENT_INBOX, e);
    for (uint32_t i = 0; r != SHD_OK && i < m->map->member_count; i++) {
        segment_close(&m->map->owners[i].inbox);
        m->map->owners[i].has_inbox = false;
    }
    if (r == SHD_ECANCELED)
        hub_renew(m->session->hub);
    if (r != SHD_OK)
        place_release_slots(m->map);
    return r;
}

static void remote_close(struct shd_model *m)
{
    struct map_model *map = m->map;
    if (map == NULL)
        return;
    nccl_free(m->nccl); /* first: it writes to the copy path's slots */
    copy_free(m->copy);
    m->nccl = NULL;
    m->copy = NULL;
    hub_forget(m->session->hub, m);
    lease_close(m);
    activity_detach(&m->activity);
    place_release(m);
    for (uint32_t i = 0; i < map->member_count; i++) {
        whole_close(&map->owners[i]);
        activity_unmap(map->owners[i].says);
        segment_close(&map->owners[i].board);
        segment_close(&map->owners[i].inbox);
        shardmap_free(map->owners[i].shards);
    }
    free(map->owners);
    free(map->turn);
    free(map->unit_norms);
    free(map);
    m->map = NULL;
}

static int remote_poll(struct shd_model *m, struct shd_err *e)
{
    return hub_poll(m->session->hub, /* timeout_ns= */ 0, e);
}

const struct control_ops control_remote = {
    .status = look_status,
    .open = remote_open,
    .close = remote_close,
    .open_slots = remote_open_slots,
    .wait_slot = slots_wait,
    .ready_slot = slots_ready,
    .slot_array = slots_array,
    .fill_slot = slots_fill,
    .give = slots_give,
    .poll = remote_poll,
    .commit = commit_step,
    .attempt = reset_attempt,
    .reset = reset_owners,
    .catch_up = settle_catch_up,
    .lease = lease_ask_owner,
    .meet = lease_meet,
    .unlease = lease_to_owners,
    .blob = look_blob,
    .history = look_history,
    .units = units_ask,
    .get = get_unit,
    .show = show_range,
    .put = put_values,
    .set = set_owner,
    .leaves = look_leaves,
    .range_units = look_range_units,
};

/* -- After a succession ------------------------------------------------------------------------ */

static int check_step(const struct shd_model *m, const struct link *link,
                      const struct map_layout *layout, struct shd_err *e)
{
    /* Where it went back, steps do; attempts do not. */
    if (layout->step >= m->step || (m->in.attempt > 0 && layout->attempt > m->in.attempt))
        return SHD_OK;
    return link_err(link, SHD_ESTEP, e,
                    "came back with model '%s' at step %" PRIu64 ", this worker is at step %" PRIu64
                    ": committed state is lost; restore a checkpoint",
                    m->spec->name, layout->step, m->step);
}

/* Where a worker is in its data, and what it holds, is of the state that was replaced. */
static int check_restore(const struct shd_model *m, const struct map_layout *before,
                         const struct link *link, const struct map_layout *layout,
                         struct shd_err *e)
{
    if (layout->restore_id == before->restore_id)
        return SHD_OK;
    return link_err(link, SHD_ESTEP, e,
                    "came back with model '%s' at step %" PRIu64
                    " of a checkpoint, restored in place of what this session has open: open it "
                    "again",
                    m->spec->name, layout->step);
}

/* As above: it was dropped, or is lost, and another one was made under its name. Also where that is
 * at the worker's own step, the first one: the gradients that the worker computes may be of what
 * the other owners have made of that step since, and those would drop them. */
static int check_instance(const struct shd_model *m, const struct map_layout *before,
                          const struct link *link, const struct map_layout *layout,
                          struct shd_err *e)
{
    if (layout->instance == before->instance || layout->instance == 0 || before->instance == 0)
        return SHD_OK;
    return link_err(link, SHD_ENOENT, e,
                    "came back with another model '%s', at step %" PRIu64
                    ": the one that this session has open was dropped, or is lost; open it again",
                    m->spec->name, layout->step);
}

/* The segments of a model are mapped by one device's driver, so a successor must be on the same. */
static int check_device(const struct map_layout *before, const struct link *link,
                        const struct map_layout *layout, struct shd_err *e)
{
    if (layout->on_gpu == before->on_gpu &&
        memcmp(layout->uuid, before->uuid, sizeof layout->uuid) == 0)
        return SHD_OK;
    return link_err(link, SHD_ESEGMENT, e, "came back on another device");
}

static int reopen_failed(const struct shd_model *m, const struct link *link, int code,
                         struct shd_err *e)
{
    const struct shd_err why = e != NULL ? *e : (struct shd_err){ 0 };
    const struct hub *hub = link->hub;
    /* A host that begins anew: it is missed, and out when the patience is over. */
    if (code == SHD_ENOENT && hub->members.membership != NULL &&
        !hub_lost(hub, (link->index + hub->owner_count) % hub->link_count))
        return link_err(link, SHD_EGONE, e, "came back without model '%s'", m->spec->name);
    if (code == SHD_ENOENT)
        return link_err(
            link, code, e,
            "came back without model '%s': its state is lost; restore a checkpoint, unless it "
            "was dropped",
            m->spec->name);
    return link_err(link, code, e, "came back, but model '%s' cannot be opened: %s", m->spec->name,
                    why.text);
}

/* A successor may find no room for an inbox until other workers have let go of its predecessor's
 * memory. */
static int ask_again(struct shd_model *m, struct link *link, uint32_t slots,
                     struct map_layout *ret_layout, struct shd_err *e)
{
    const uint64_t start_ns = clock_now_ns();
    int r;
    while ((r = layout_exchange(m, link, slots, ret_layout, e)) == SHD_ENOMEM &&
           clock_now_ns() - start_ns < m->session->timeout_ns && !idle_stops(&link->hub->idle)) {
        const struct timespec pause = clock_timespec(ROOM_PAUSE_NS);
        nanosleep(&pause, NULL);
    }
    return r;
}

/* A host that is out may have begun anew, with a state of its own, before this session has let go
 * of it: that one is lost, and what it says is no reason to end. */
static int check_successor(const struct shd_model *m, const struct map_layout *before,
                           const struct link *link, const struct map_layout *layout,
                           struct shd_err *e)
{
    int r = check_restore(m, before, link, layout, e);
    if (r == SHD_OK)
        r = check_step(m, link, layout, e);
    if (r == SHD_OK)
        r = check_instance(m, before, link, layout, e);
    if (r == SHD_OK)
        r = check_device(before, link, layout, e);
    if (r == SHD_OK || !membership_lost(link->hub, link))
        return r;
    if (e != NULL)
        e->code = SHD_EGONE;
    return SHD_EGONE;
}

static int reopen_model(struct shd_model *m, struct link *link, struct shd_err *e)
{
    struct map_owner *owner = &m->map->owners[link->index];
    struct map_layout layout;
    unsigned wanted = 1u << SEGMENT_PUBLISH | 1u << SEGMENT_BOARD;
    if (!owner->mapped)
        return SHD_OK; /* whoever is opening it will ask again */
    if (owner->has_inbox)
        wanted |= 1u << SEGMENT_INBOX;
    int r = ask_again(m, link, owner->has_inbox ? m->map->view_slots : 0, &layout, e);
    if (r != SHD_OK)
        return reopen_failed(m, link, r, e);
    r = check_successor(m, &owner->layout, link, &layout, e);
    if (r != SHD_OK)
        return r;
    struct transfer *transfer = m->copy != NULL ? m->copy->transfer : NULL;
    if (transfer != NULL) /* no GPU copies from memory while it is mapped anew */
        transfer_hold(transfer);
    r = segments_take(m, link, &layout, wanted, e);
    if (transfer != NULL)
        transfer_go(transfer);
    if (r != SHD_OK)
        return r;
    owner->layout = layout;
    return nccl_reopen(m, link, e);
}

void reopen_look(void *ctx)
{
    const struct shd_session *s = ctx;
    if (s->opening != NULL)
        nccl_look(s->opening);
    for (struct shd_model *m = s->models; m != NULL; m = m->next) {
        nccl_look(m);
        if (m->map != NULL && m->map->look != NULL)
            m->map->look(m);
    }
}

int reopen_models(void *ctx, struct link *link, struct shd_err *e)
{
    struct shd_session *s = ctx;
    int r = SHD_OK;
    if (s->opening != NULL && s->opening->map != NULL)
        r = reopen_model(s->opening, link, e);
    for (struct shd_model *m = s->models; r == SHD_OK && m != NULL; m = m->next)
        r = reopen_model(m, link, e);
    return r;
}

int remote_attach(struct shd_session *s, struct blame_sink sink, struct shd_err *e)
{
    s->hub->reopen = reopen_models;
    s->hub->look = reopen_look;
    s->hub->members.succeed = replica_succeed;
    s->hub->reopen_ctx = s;
    return blame_new(s->hub, sink, &s->blame, e);
}
