/* See copies.h. */
#include "daemon/relay/copies.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/relay/bulk.h"
#include "daemon/relay/frames.h"
#include "daemon/relay/mirror.h"
#include "daemon/relay/traffic.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec_json.h"
#include "proto/wire/wire.h"

#define SEGMENT_BYTES_MAX (UINT64_C(1) << 48)
#define HELD_MAX          COPIES_MODELS_MAX

struct held {
    struct held *next;
    struct copies_model model; /* to be taken */
    size_t bytes;
    uint8_t body[];
};

static void model_close(struct copies_model *m)
{
    mirror_put(m->mirror);
    shardmap_free(m->map);
    traffic_count(m->traffic, TRAFFIC_SESSIONS, -1);
    *m = (struct copies_model){ .mirror = NULL };
}

void copies_init(struct copies *c)
{
    *c = (struct copies){ .held = NULL };
    for (uint32_t i = 0; i < COPIES_SEGMENTS_MAX; i++)
        c->segments[i].segment = SEGMENT_CLOSED;
}

void copies_free(struct copies *c)
{
    while (c->held != NULL) {
        struct held *held = c->held;
        c->held = held->next;
        model_close(&held->model);
        free(held);
    }
    for (uint32_t i = 0; i < COPIES_MODELS_MAX; i++)
        model_close(&c->models[i]);
    for (uint32_t i = 0; i < COPIES_SEGMENTS_MAX; i++)
        segment_close(&c->segments[i].segment);
    free(c->given);
    c->given = NULL;
}

/* -- Segments ---------------------------------------------------------------------------------- */

static struct copy *by_number(struct copies *c, uint64_t number)
{
    for (uint32_t i = 0; i < COPIES_SEGMENTS_MAX; i++)
        if (c->segments[i].segment.fd >= 0 && c->segments[i].number == number)
            return &c->segments[i];
    return NULL;
}

static const struct copy *by_ticket(const struct copies *c, uint64_t ticket)
{
    for (uint32_t i = 0; ticket != 0 && i < COPIES_SEGMENTS_MAX; i++)
        if (c->segments[i].segment.fd >= 0 && c->segments[i].ticket == ticket)
            return &c->segments[i];
    return NULL;
}

int copies_place(struct copies *c, const struct bulk_head *head, void **ret_to, struct shd_err *e)
{
    if (head->type == FRAME_SEGMENT) {
        if (head->bytes != sizeof c->number_in)
            return err_set(e, SHD_EPROTO, "a segment's number of %" PRIu64 " bytes", head->bytes);
        *ret_to = &c->number_in;
        return SHD_OK;
    }
    const struct copy *at = by_number(c, head->id);
    if (at == NULL || at->kind == SEGMENT_INBOX)
        return err_set(e, SHD_EPROTO, "bytes for segment %" PRIu64, head->id);
    if (head->at > at->segment.bytes || head->bytes > at->segment.bytes - head->at)
        return err_set(e, SHD_ERANGE, "bytes [%" PRIu64 ", + %" PRIu64 ") of a segment of %" PRIu64,
                       head->at, head->bytes, at->segment.bytes);
    *ret_to = (uint8_t *)at->segment.base + head->at;
    return SHD_OK;
}

/* As the other relay does: the oldest that is no inbox goes, unless it is being sent. */
static struct copy *make_place(struct copies *c)
{
    const uint64_t sending = c->send.from != NULL ? c->send.number : 0;
    struct copy *oldest = NULL;
    for (uint32_t i = 0; i < COPIES_SEGMENTS_MAX; i++) {
        struct copy *at = &c->segments[i];
        if (at->segment.fd < 0)
            return at;
        if (at->kind != SEGMENT_INBOX && at->number != sending &&
            (oldest == NULL || at->number < oldest->number))
            oldest = at;
    }
    if (oldest != NULL)
        segment_close(&oldest->segment);
    return oldest;
}

int copies_announce(struct copies *c, const struct bulk_head *head, struct shd_err *e)
{
    const enum segment_kind kind = (enum segment_kind)head->index;
    if ((kind != SEGMENT_INBOX && kind != SEGMENT_STAGE && kind != SEGMENT_SPEC) || head->at == 0 ||
        head->at > SEGMENT_BYTES_MAX || head->at % SHD_PAGE_BYTES != 0)
        return err_set(e, SHD_EPROTO, "a segment of kind %" PRIu32 " and %" PRIu64 " bytes",
                       head->index, head->at);
    struct copy *at = by_number(c, c->number_in);
    if (at != NULL && (at->kind != kind || at->segment.bytes != head->at))
        return err_set(e, SHD_EPROTO, "segment %" PRIu64 " is another one by now", c->number_in);
    if (at == NULL) {
        if (c->number_in <= c->last_number)
            return err_set(e, SHD_EPROTO, "segment %" PRIu64 " behind %" PRIu64, c->number_in,
                           c->last_number);
        at = make_place(c);
        if (at == NULL)
            return err_set(e, SHD_EBUSY, "more than %u inboxes and segments that are being sent",
                           COPIES_SEGMENTS_MAX);
        const int r = segment_new("shardd-copy", kind, head->at, &at->segment, e);
        if (r != SHD_OK)
            return r;
        at->kind = kind;
        at->number = c->last_number = c->number_in;
    }
    at->ticket = head->id;
    return SHD_OK;
}

void copies_created(struct copies *c, uint64_t ticket)
{
    const struct copy *at = by_ticket(c, ticket);
    c->created = at != NULL ? at->number : 0;
}

int copies_claim(const struct copies *c, uint64_t ticket, uint64_t *ret_bytes, uint32_t *ret_kind)
{
    for (uint32_t i = 0; i < COPIES_MODELS_MAX; i++) {
        const struct copies_model *m = &c->models[i];
        if (m->mirror == NULL || (ticket != m->publish_ticket && ticket != m->board_ticket))
            continue;
        const bool publish = ticket == m->publish_ticket;
        const struct segment *segment = publish ? mirror_publish(m->mirror)
                                                : mirror_board(m->mirror);
        *ret_kind = publish ? SEGMENT_PUBLISH : SEGMENT_BOARD;
        *ret_bytes = segment->bytes;
        return segment->fd;
    }
    const struct copy *at = by_ticket(c, ticket);
    if (at == NULL)
        return -1;
    *ret_kind = at->kind;
    *ret_bytes = at->segment.bytes;
    return at->segment.fd;
}

/* -- Models ------------------------------------------------------------------------------------ */

static int parse_map(const struct copies *c, const struct wire_layout *layout,
                     struct copies_model *m, const struct spec **ret_spec, struct shd_err *e)
{
    const char *json = (const char *)layout->spec.data;
    uint64_t bytes = layout->spec.bytes;
    for (uint32_t i = 0; layout->spec_bytes > 0 && i < layout->segment_count; i++) {
        const struct wire_segment *said = &layout->segments[i];
        const struct copy *at = said->kind == SEGMENT_SPEC ? by_ticket(c, said->ticket) : NULL;
        if (at != NULL && at->segment.bytes >= layout->spec_bytes) {
            json = at->segment.base;
            bytes = layout->spec_bytes;
        }
    }
    struct spec *spec = NULL;
    if (bytes == 0)
        return err_set(e, SHD_EPROTO, "a layout without a spec");
    int r = spec_parse(json, bytes, &spec, e);
    if (r == SHD_OK)
        r = shardmap_new(spec, layout->owner, layout->owners, &m->map, e);
    if (r == SHD_OK)
        *ret_spec = spec;
    else
        spec_free(spec);
    return r;
}

static int check_segments(struct copies *c, const struct wire_layout *layout,
                          struct copies_model *m, struct shd_err *e)
{
    for (uint32_t i = 0; i < layout->segment_count; i++) {
        const struct wire_segment *said = &layout->segments[i];
        const struct copy *at;
        if (said->kind == SEGMENT_PUBLISH) {
            m->publish_ticket = said->ticket;
            m->publish_bytes = said->bytes;
        } else if (said->kind == SEGMENT_BOARD) {
            m->board_ticket = said->ticket;
            m->board_bytes = said->bytes;
        } else if (said->kind == SEGMENT_INBOX) {
            at = by_ticket(c, said->ticket);
            if (at == NULL || layout->slots == 0 || layout->slots > SHD_SLOTS_MAX ||
                at->segment.bytes < shardmap_inbox_bytes(m->map, layout->slots))
                return err_set(e, SHD_EPROTO, "an inbox that does not fit the model");
            m->inbox = at->number;
            m->slots = layout->slots;
        } else if (said->kind != SEGMENT_SPEC) {
            return err_set(e, SHD_ENOTSUP, "a %s segment does not pass through a relay",
                           segment_kind_name(said->kind));
        }
    }
    return SHD_OK;
}

int copies_hold(struct copies *c, struct relay *relay, const char *device,
                const struct wire_layout *layout, const uint8_t *body, size_t bytes,
                struct shd_err *e)
{
    uint32_t count = 0;
    for (const struct held *at = c->held; at != NULL; at = at->next)
        count++;
    if (count == HELD_MAX)
        return err_set(e, SHD_EBUSY, "more than %u layouts that wait for their mirrors", HELD_MAX);
    struct held *held = sys_calloc(1, sizeof *held + bytes);
    const struct spec *spec = NULL;
    if (held == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a layout");
    held->bytes = bytes;
    memcpy(held->body, body, bytes);
    held->model.handle = layout->model;
    int r = parse_map(c, layout, &held->model, &spec, e);
    if (r == SHD_OK)
        r = check_segments(c, layout, &held->model, e);
    if (r == SHD_OK && spec != NULL) {
        const struct mirror_key key = { .device = device,
                                        .model = spec->name,
                                        .owner = layout->owner,
                                        .owners = layout->owners,
                                        .instance = layout->instance };
        r = mirror_get(relay, &key, &held->model.mirror, e);
    }
    spec_free((struct spec *)(uintptr_t)spec);
    if (r != SHD_OK) {
        model_close(&held->model);
        free(held);
        return r;
    }
    held->next = c->held;
    c->held = held;
    return SHD_OK;
}

bool copies_holds(const struct copies *c)
{
    return c->held != NULL;
}

static int check_mirror(const struct copies_model *m, struct shd_err *e)
{
    const uint64_t publish = mirror_publish(m->mirror)->bytes;
    const uint64_t board = mirror_board(m->mirror)->bytes;
    if (mirror_units(m->mirror) == m->map->units && publish == m->publish_bytes &&
        publish >= shardmap_publish_bytes(m->map) && board == m->board_bytes)
        return SHD_OK;
    return err_set(e, SHD_EPROTO,
                   "the mirror has %" PRIu32 " units, %" PRIu64 " and %" PRIu64
                   " bytes, the layout %" PRIu32 ", %" PRIu64 " and %" PRIu64,
                   mirror_units(m->mirror), publish, board, m->map->units, m->publish_bytes,
                   m->board_bytes);
}

/* In the place of the same model, of none, or of the one that was opened first. */
static void take_model(struct copies *c, const struct copies_model *m)
{
    struct copies_model *place = &c->models[c->model_last % COPIES_MODELS_MAX];
    for (uint32_t i = 0; i < COPIES_MODELS_MAX; i++)
        if (c->models[i].mirror != NULL && c->models[i].handle == m->handle)
            place = &c->models[i];
    struct copies_model taken = *m;
    if (taken.inbox == 0 && place->mirror != NULL && place->handle == m->handle) {
        taken.inbox = place->inbox; /* asked for the layout alone */
        taken.slots = place->slots;
    }
    taken.traffic = mirror_traffic(taken.mirror);
    traffic_count(taken.traffic, TRAFFIC_SESSIONS, 1);
    c->model_last += place->mirror == NULL || place->handle != m->handle;
    model_close(place);
    *place = taken;
}

int copies_next(struct copies *c, const uint8_t **ret_body, size_t *ret_bytes, struct shd_err *e)
{
    free(c->given);
    c->given = NULL;
    for (struct held **at = &c->held; *at != NULL; at = &(*at)->next) {
        struct held *held = *at;
        const enum mirror_state state = mirror_state(held->model.mirror, e);
        if (state == MIRROR_FILLING)
            continue;
        const int r = state == MIRROR_DEAD ? SHD_EGONE : check_mirror(&held->model, e);
        if (r != SHD_OK)
            return r;
        *at = held->next;
        take_model(c, &held->model);
        c->given = (uint8_t *)held;
        *ret_body = held->body;
        *ret_bytes = held->bytes;
        return SHD_OK;
    }
    return SHD_PENDING;
}

int copies_live(const struct copies *c, struct shd_err *e)
{
    for (uint32_t i = 0; i < COPIES_MODELS_MAX; i++)
        if (c->models[i].mirror != NULL && mirror_state(c->models[i].mirror, e) == MIRROR_DEAD)
            return SHD_EGONE;
    return SHD_OK;
}

void copies_attempt(struct copies *c, uint32_t model, uint64_t attempt, uint64_t tried)
{
    for (uint32_t i = 0; i < COPIES_MODELS_MAX; i++)
        if (c->models[i].mirror != NULL && c->models[i].handle == model)
            mirror_attempt(c->models[i].mirror, attempt, tried);
}

/* -- What requests hand over ------------------------------------------------------------------- */

static int find_gradient(struct copies *c, const struct wire_return *req, struct shd_err *e)
{
    const struct copies_model *m = NULL;
    for (uint32_t i = 0; i < COPIES_MODELS_MAX; i++)
        if (c->models[i].mirror != NULL && c->models[i].handle == req->model)
            m = &c->models[i];
    const struct copy *inbox = m != NULL && m->inbox != 0 ? by_number(c, m->inbox) : NULL;
    if (inbox == NULL)
        return err_set(e, SHD_ENOENT, "no model %" PRIu32 " with an inbox here", req->model);
    if (req->unit >= m->map->units || req->slot >= m->slots)
        return err_set(e, SHD_ERANGE,
                       "unit %" PRIu32 " of %" PRIu32 ", slot %" PRIu32 " of %" PRIu32, req->unit,
                       m->map->units, req->slot, m->slots);
    const uint64_t bytes = shardmap_grad_bytes(m->map, req->unit, req->dtype);
    if (bytes > m->map->slot_bytes) /* slots are made for what is trained */
        return err_set(e, SHD_EINVAL, "unit %" PRIu32 " is frozen: it has no gradient", req->unit);
    c->send.number = inbox->number;
    c->send.at = shardmap_slot_offset_bytes(m->map, req->slot);
    c->send.bytes = bytes;
    c->send.traffic = m->traffic;
    c->send.from = (const uint8_t *)inbox->segment.base + c->send.at;
    return SHD_OK;
}

static int find_created(struct copies *c, struct shd_err *e)
{
    const struct copy *at = by_number(c, c->created);
    if (at == NULL)
        return err_set(e, SHD_ENOENT, "nothing to put from in this session");
    c->send.number = at->number;
    c->send.at = 0;
    c->send.bytes = at->segment.bytes;
    c->send.from = at->segment.base;
    return SHD_OK;
}

int copies_find(struct copies *c, const struct wire_request *request, struct shd_err *e)
{
    c->send.from = NULL;
    c->send.traffic = NULL;
    if (request->type == WIRE_RETURN && !request->return_grad.none)
        return find_gradient(c, &request->return_grad, e);
    if (request->type == WIRE_PUT ||
        (request->type == WIRE_CREATE && request->create.what == WIRE_CREATE_PUT_FULL))
        return find_created(c, e);
    return SHD_OK;
}

int copies_send(struct copies *c, struct bulk *bulk, struct shd_err *e)
{
    const struct bulk_head head = {
        .type = FRAME_BYTES, .id = c->send.number, .at = c->send.at, .bytes = c->send.bytes
    };
    if (c->send.from == NULL || head.bytes == 0)
        return SHD_OK;
    const int r = bulk_send(bulk, &head, c->send.from, e);
    c->send.from = NULL; /* until here its segment stays, whatever was announced meanwhile */
    if (r == SHD_OK)
        traffic_add(c->send.traffic, TRAFFIC_GRADIENTS_OUT, head.bytes);
    return r;
}
