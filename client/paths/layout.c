/* See layout.h. A daemon is not trusted: each answer is checked against our own arithmetic, its
 * spec against ours, and each segment for place, size and kind. */
#include "client/paths/layout.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/paths/copy.h"
#include "client/paths/path.h"
#include "client/session/hub.h"
#include "client/session/link.h"
#include "client/session/round.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/spec/spec_json.h"

static_assert(WIRE_DEVICE_BYTES == GPU_UUID_BYTES, "gpu.h and the messages agree");

/* The text of a spec that we have not seen yet. */
static int take_other_spec(struct shd_model *m, const char *json, size_t bytes, struct shd_err *e)
{
    struct spec *spec = NULL;
    int r = spec_parse(json, bytes, &spec, e);
    if (r == SHD_OK && m->spec != NULL) {
        r = spec_compare(spec, m->spec, e);
        spec_free(spec);
        return r;
    }
    if (r == SHD_OK)
        r = model_set_spec(m, spec, e);
    if (r != SHD_OK) {
        spec_free(spec);
        return r;
    }
    m->spec_json = strndup(json, bytes);
    return m->spec_json != NULL ? SHD_OK : err_set(e, SHD_ENOMEM, "no memory for a spec");
}

/* The daemon's spec becomes ours (attach), or must be ours. */
static int take_spec(struct shd_model *m, const struct link *link, const char *json, size_t bytes,
                     struct shd_err *e)
{
    struct shd_err why = { 0 };
    if (json == NULL || bytes == 0)
        return link_err(link, SHD_EPROTO, e, "answered OpenModel without a spec");
    if (m->spec_json != NULL && strlen(m->spec_json) == bytes &&
        memcmp(m->spec_json, json, bytes) == 0)
        return SHD_OK;
    const int r = take_other_spec(m, json, bytes, &why);
    return r == SHD_OK ? r : link_err(link, r, e, "has another model: %s", why.text);
}

/* A spec in a segment is in one whose size goes with it. */
static int check_spec_segment(const struct link *link, const struct wire_layout *layout,
                              struct shd_err *e)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < layout->segment_count; i++)
        if (layout->segments[i].kind == SEGMENT_SPEC)
            bytes = layout->segments[i].bytes;
    if (bytes == layout_align(layout->spec_bytes, SHD_PAGE_BYTES) &&
        (bytes == 0 || layout->spec.bytes == 0))
        return SHD_OK;
    return link_err(link, SHD_EPROTO, e,
                    "says that a spec of %" PRIu64 " bytes is in a segment of %" PRIu64
                    ", and %zu in its message",
                    layout->spec_bytes, bytes, layout->spec.bytes);
}

static int take_layout(struct layout_opening *o, const struct link *link,
                       const struct wire_reply *reply, struct shd_err *e)
{
    const struct wire_layout *layout = &reply->layout;
    const uint32_t owners = o->m->map->owner_count;
    if (reply->type != WIRE_LAYOUT)
        return link_err(link, SHD_EPROTO, e, "answered OpenModel with a reply of type %d",
                        (int)reply->type);
    if (layout->owner != link_owner(link) || layout->owners != owners)
        return link_err(link, SHD_EPROTO, e,
                        "is owner %" PRIu32 " of %" PRIu32 ", not %" PRIu32 " of %" PRIu32,
                        layout->owner, layout->owners, link_owner(link), owners);
    if (layout->slots != o->slots)
        return link_err(link, SHD_EPROTO, e, "made %" PRIu32 " gradient slots, not %" PRIu32,
                        layout->slots, o->slots);
    int r = check_spec_segment(link, layout, e);
    if (r == SHD_OK && layout->spec_bytes == 0)
        r = take_spec(o->m, link, (const char *)layout->spec.data, layout->spec.bytes, e);
    if (r != SHD_OK)
        return r;
    struct map_layout got = { .epoch = link->epoch,
                              .handle = layout->model,
                              .step = layout->step,
                              .restore_id = layout->restore_id,
                              .twin_pid = layout->twin_pid,
                              .attempt = layout->attempt,
                              .slots = layout->slots,
                              .slot_bytes = layout->slot_bytes,
                              .decided = layout->has_decision,
                              .decision = layout->decision,
                              .segment_count = layout->segment_count,
                              .spec_bytes = layout->spec_bytes,
                              .one_count = layout->one_count,
                              .instance = layout->instance,
                              .origin = layout->origin,
                              .guard_back = layout->guard_back,
                              .room = layout->room };
    memcpy(got.segments, layout->segments, sizeof got.segments);
    got.on_gpu = layout->device.bytes > 0;
    CHECK(!got.on_gpu || layout->device.bytes == sizeof got.uuid);
    if (got.on_gpu)
        memcpy(got.uuid, layout->device.data, sizeof got.uuid);
    CHECK(layout->in.bytes <= sizeof got.in);
    if (layout->in.bytes > 0)
        memcpy(got.in, layout->in.data, layout->in.bytes);
    if (link->index == 0) {
        o->origin = layout->origin;
        o->settled = true;
        o->m->map->first = link_goes_by(link, layout->first, layout->instance);
    }
    *(o->ret_layout != NULL ? o->ret_layout : &o->m->map->owners[link->index].layout) = got;
    return SHD_OK;
}

static void fill_open(const struct layout_opening *o, const struct link *link,
                      struct wire_request *ret_request)
{
    struct wire_open_model *q = &ret_request->open_model;
    *q = (struct wire_open_model){ .name = o->name,
                                   .owner = link_owner(link),
                                   .owners = link->hub->owner_count,
                                   .slots = o->slots,
                                   .origin = o->origin,
                                   .settled = o->settled,
                                   .spec_apart = true,
                                   .one_count = o->one_count,
                                   .first = o->m->map->first,
                                   .twin = link_is_replica(link) };
    if (o->json != NULL)
        spec_out_fill(o->json, &q->spec, &q->spec_at);
}

/* -- By rounds --------------------------------------------------------------------------------- */

static void make_open(const struct round *round, const struct link *link,
                      struct wire_request *ret_request)
{
    fill_open(round->ctx, link, ret_request);
}

static int take_open(const struct round *round, const struct link *link,
                     const struct wire_reply *reply, struct shd_err *e)
{
    return take_layout(round->ctx, link, reply, e);
}

static struct round open_round(struct layout_opening *o)
{
    return (struct round){ .what = "OpenModel",
                           .asks = WIRE_OPEN_MODEL,
                           .type = WIRE_LAYOUT,
                           .make = make_open,
                           .take = take_open,
                           .spec = o->json,
                           .replicated = true,
                           .to_the_end = true, /* who opens after an error finds no half of this */
                           .ctx = o };
}

/* FNV-1a. */
static uint64_t hash_of(const char *text)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (; *text != '\0'; text++)
        hash = (hash ^ (uint8_t)*text) * UINT64_C(0x100000001b3);
    return hash;
}

uint64_t layout_source(const struct shd_model *m, const struct map_layout *layout)
{
    if (layout->restore_id != 0)
        return layout->restore_id;
    return layout->origin != 0 ? layout->origin : hash_of(m->spec->name) | 1;
}

/* What a restore has replaced at some owners and not at others is no model. */
static int check_restores(const struct shd_model *m, struct shd_err *e)
{
    const struct map_owner *owners = m->map->owners;
    const struct link *links = m->session->hub->links;
    for (uint32_t i = 1; i < m->map->member_count; i++) {
        const struct map_layout *l = &owners[i].layout;
        if (hub_lost(m->session->hub, i) || (owners[i].joining && l->segment_count == 0))
            continue; /* nor is one that has not answered yet */
        if (l->restore_id != owners[0].layout.restore_id && m->spec != NULL &&
            layout_source(m, l) != layout_source(m, &owners[0].layout))
            return link_err(&links[i], SHD_ESTEP, e,
                            "has model '%s' at step %" PRIu64
                            ", daemon %s has it of another restore, at step %" PRIu64
                            ": one did not reach all daemons; run `shardctl restore --replace` "
                            "again",
                            m->spec->name, owners[i].layout.step, links[0].device,
                            owners[0].layout.step);
    }
    return SHD_OK;
}

int layout_ask(struct layout_opening *o, struct link *link, struct shd_err *e)
{
    struct round round = open_round(o);
    const int r = round_one(&round, link, 0, e);
    return r == SHD_OK ? check_restores(o->m, e) : r;
}

int layout_ask_all(struct layout_opening *o, struct shd_err *e)
{
    struct round round = open_round(o);
    const int r = round_all(&round, o->m->session->hub, 0, e);
    return r == SHD_OK ? check_restores(o->m, e) : r;
}

/* -- On a link that comes up ------------------------------------------------------------------- */

static int take_exchange(void *ctx, struct link *link, const struct wire_reply *reply,
                         struct shd_err *e)
{
    return take_layout(ctx, link, reply, e);
}

int layout_exchange(struct shd_model *m, struct link *link, uint32_t slots,
                    struct map_layout *ret_layout, struct shd_err *e)
{
    struct layout_opening o = {
        .m = m, .name = m->spec->name, .slots = slots, .ret_layout = ret_layout
    };
    struct wire_request request = { .type = WIRE_OPEN_MODEL };
    fill_open(&o, link, &request);
    const struct link_ask ask = { take_exchange, /* look= */ NULL, &o };
    return link_exchange(link, &request, &ask, e);
}

/* -- A spec in a segment ------------------------------------------------------------------------
 */

static const struct wire_segment *find_segment(const struct map_layout *layout,
                                               enum segment_kind kind)
{
    for (uint32_t i = 0; i < layout->segment_count; i++)
        if (layout->segments[i].kind == kind)
            return &layout->segments[i];
    return NULL;
}

static int succeeded(const struct link *link, struct shd_err *e)
{
    return link_err(link, SHD_EGONE, e, "has been succeeded meanwhile");
}

int layout_take_spec(struct shd_model *m, struct link *link, struct map_layout *layout,
                     struct shd_err *e)
{
    const struct wire_segment *segment = find_segment(layout, SEGMENT_SPEC);
    const uint64_t bytes = layout->spec_bytes;
    int fd = -1;
    if (bytes == 0)
        return SHD_OK;
    if (layout->epoch != link->epoch)
        return succeeded(link, e);
    CHECK(segment != NULL); /* check_spec_segment() */
    int r = link_claim(link, segment, &fd, e);
    if (r != SHD_OK)
        return r;
    layout->spec_bytes = 0;
    struct shd_err why = { 0 };
    char *json = sys_malloc(bytes);
    if (json == NULL)
        r = err_set(&why, SHD_ENOMEM, "no memory for %" PRIu64 " bytes", bytes);
    else if ((r = spec_segment_check(fd, bytes, &why)) == SHD_OK)
        r = spec_segment_read(fd, bytes, json, &why);
    if (r != SHD_OK)
        link_err(link, r, e, "has a spec that cannot be read here: %s", why.text);
    else
        r = take_spec(m, link, json, bytes, e);
    close(fd);
    free(json);
    return r;
}

/* -- Segments ---------------------------------------------------------------------------------- */

/* The board is checked where nobody reads it yet, then placed over its predecessor: a transfer
 * thread that reads there goes on with this one, once it has looked. */
static int map_board(struct shd_model *m, struct map_owner *owner, int *fd, uint64_t bytes,
                     struct shd_err *e)
{
    struct segment board;
    int r = segment_map(*fd, SEGMENT_BOARD, bytes, &board, e);
    if (r != SHD_OK)
        return r;
    *fd = -1; /* the segment's now */
    r = board_check(board.base, board.bytes, m->spec->unit_count, e);
    if (r == SHD_OK && owner->board.base == NULL) {
        owner->board = board;
        return SHD_OK;
    }
    if (r == SHD_OK)
        r = segment_place(owner->board.base, board.fd, 0, bytes, /* writable= */ false, e);
    if (r == SHD_OK) {
        close(owner->board.fd);
        owner->board.fd = board.fd;
        board.fd = -1;
    }
    if (m->copy != NULL)
        transfer_look(m->copy->transfer);
    segment_close(&board);
    return r;
}

static uint64_t expected_bytes(const struct shd_model *m, const struct map_owner *owner,
                               uint32_t slots, enum segment_kind kind)
{
    switch (kind) {
    case SEGMENT_PUBLISH:
        return shardmap_publish_bytes(owner->shards);
    case SEGMENT_INBOX:
        return slots > 0 ? shardmap_inbox_bytes(owner->shards, slots) : 0;
    case SEGMENT_BOARD:
        return layout_align(board_bytes(m->spec->unit_count), SHD_PAGE_BYTES);
    case SEGMENT_ACTIVITY:
        return slots > 0 ? ACTIVITY_BYTES : 0;
    case SEGMENT_STATE:
    case SEGMENT_LEDGER:
    case SEGMENT_SPILL:
    case SEGMENT_STAGE:
    case SEGMENT_SPEC: /* taken by itself, as are the next */
    case SEGMENT_REQUESTS:
    case SEGMENT_REPLIES:
        break;
    }
    return 0; /* nothing we would map */
}

/* Owner 0 sees what this worker does, the others whether it waits for a slot: the page is at the
 * end of the inbox, or, where that is a GPU's memory, in a segment of its own. */
static void show_activity(struct shd_model *m, struct map_owner *owner, int fd,
                          uint64_t segment_bytes)
{
    const uint64_t at = segment_bytes - ACTIVITY_BYTES;
    if (owner == &m->map->owners[0]) {
        activity_attach(&m->activity, fd, at, m->reader->shown);
        return;
    }
    activity_unmap(owner->says);
    owner->says = activity_map(fd, at);
}

/* *fd: taken where it is set to -1. */
static int map_segment(struct shd_model *m, struct map_owner *owner,
                       const struct wire_segment *segment, int *fd, struct shd_err *e)
{
    if (segment->kind == SEGMENT_BOARD)
        return map_board(m, owner, fd, segment->bytes, e);
    const bool inbox = segment->kind == SEGMENT_INBOX && segment->place == SEGMENT_HOST;
    if (inbox || segment->kind == SEGMENT_ACTIVITY)
        show_activity(m, owner, *fd, segment->bytes);
    if (segment->kind == SEGMENT_ACTIVITY)
        return SHD_OK;
    return owner->mover->take(m, owner, segment, fd, e);
}

/* Boards and activity pages are host memory, also of a model on a GPU. */
static int check_place(const struct link *link, const struct map_layout *layout,
                       const struct wire_segment *segment, struct shd_err *e)
{
    const bool gpu = layout->on_gpu && segment->kind != SEGMENT_BOARD &&
                     segment->kind != SEGMENT_ACTIVITY;
    if (segment->place == (gpu ? SEGMENT_CUDA : SEGMENT_HOST))
        return SHD_OK;
    return link_err(link, SHD_ESEGMENT, e,
                    "offers a %s segment in %s memory, and says that it is %s",
                    segment_kind_name(segment->kind), gpu ? "host" : "a GPU's",
                    layout->on_gpu ? "on a GPU" : "on the host");
}

/* A segment of a GPU may be larger than the spec makes it: its pages are larger. */
static int check_bytes(const struct shd_model *m, const struct link *link,
                       const struct map_layout *layout, const struct wire_segment *segment,
                       struct shd_err *e)
{
    const struct map_owner *owner = &m->map->owners[link->index];
    const uint64_t bytes = expected_bytes(m, owner, layout->slots, segment->kind);
    const bool larger = segment->place == SEGMENT_CUDA && bytes > 0 && segment->bytes > bytes;
    if (segment->bytes == bytes || larger)
        return SHD_OK;
    return link_err(link, SHD_ESEGMENT, e,
                    "offers a %s segment of %" PRIu64 " bytes, the spec "
                    "makes it %" PRIu64,
                    segment_kind_name(segment->kind), segment->bytes, bytes);
}

static int take_segment(struct shd_model *m, struct link *link, const struct map_layout *layout,
                        const struct wire_segment *segment, unsigned wanted, struct shd_err *e)
{
    struct map_owner *owner = &m->map->owners[link->index];
    int fd;
    int checked = check_place(link, layout, segment, e);
    if (checked == SHD_OK)
        checked = check_bytes(m, link, layout, segment, e);
    if (checked != SHD_OK)
        return checked;
    int r = link_claim(link, segment, &fd, e);
    if (r != SHD_OK)
        return r;
    struct shd_err why = { 0 };
    const enum segment_kind with = segment->kind == SEGMENT_ACTIVITY ? SEGMENT_INBOX
                                                                     : segment->kind;
    if ((wanted & 1u << with) != 0) /* else mapped earlier: only let go of the ticket */
        r = map_segment(m, owner, segment, &fd, &why);
    if (fd >= 0)
        close(fd); /* mappings keep the memory */
    if (r != SHD_OK)
        link_err(link, r, e, "has a %s segment that cannot be mapped here: %s",
                 segment_kind_name(segment->kind), why.text);
    return r;
}

int segments_take(struct shd_model *m, struct link *link, struct map_layout *layout,
                  unsigned wanted, struct shd_err *e)
{
    struct map_owner *owner = &m->map->owners[link->index];
    /* One that is taken was asked for when the link came up, for what was mapped then. */
    if (layout->epoch != link->epoch || (layout->taken && wanted != 0))
        return succeeded(link, e);
    if (layout->taken)
        return SHD_OK;
    if (layout->slots > 0 && layout->slot_bytes != owner->shards->slot_bytes)
        return link_err(link, SHD_ESEGMENT, e,
                        "has slots of %" PRIu64 " bytes, the spec makes "
                        "them %" PRIu64,
                        layout->slot_bytes, owner->shards->slot_bytes);
    unsigned seen = 0;
    for (uint32_t i = 0; i < layout->segment_count; i++) {
        const struct wire_segment *segment = &layout->segments[i];
        if (seen & 1u << segment->kind)
            return link_err(link, SHD_EPROTO, e, "offers two %s segments",
                            segment_kind_name(segment->kind));
        seen |= 1u << segment->kind;
        const int r = segment->kind == SEGMENT_SPEC
                          ? layout_take_spec(m, link, layout, e)
                          : take_segment(m, link, layout, segment, wanted, e);
        if (r != SHD_OK)
            return r;
    }
    if ((seen & wanted) != wanted)
        return link_err(link, SHD_EPROTO, e, "offers segments %#x, needed are %#x", seen, wanted);
    layout->taken = true;
    owner->mapped = owner->mapped || (wanted & 1u << SEGMENT_BOARD) != 0;
    owner->has_inbox = owner->has_inbox || (wanted & 1u << SEGMENT_INBOX) != 0;
    return SHD_OK;
}
