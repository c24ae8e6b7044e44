/* See nccl.h. */
#include "client/paths/nccl.h"

#include <inttypes.h>
#include <stdlib.h>

#include "client/paths/copy.h"
#include "client/paths/map.h"
#include "client/paths/nccl_join.h"
#include "client/paths/place.h"
#include "client/paths/whole.h"
#include "client/session/gpu.h"
#include "client/session/hub.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"

#define SLICE_NS (2 * NS_PER_MS) /* between two looks at the daemons' lives */

/* -- Asking for a unit ------------------------------------------------------------------------- */

static struct nccl_piece *piece_of(const struct nccl_model *n, uint32_t slot, uint32_t owner)
{
    return &n->slots[slot].pieces[owner];
}

static bool piece_done(struct nccl_model *n, const struct nccl_piece *p)
{
    return !p->used || (!p->asked && nccl_wait(n, &p->in, /* timeout_ns= */ 0));
}

static bool slot_done(struct nccl_model *n, uint32_t slot)
{
    bool done = true;
    for (uint32_t i = 0; i < n->owner_count; i++)
        done = done && piece_done(n, piece_of(n, slot, i));
    return done;
}

/* The receive is queued with the first making of the request on this connection: it has the
 * request's turn. */
static int make_fetch(struct link *link, const struct call *call, struct wire_request *ret_request,
                      struct shd_err *e)
{
    struct nccl_model *n = call->ctx;
    struct shd_model *m = n->model;
    struct nccl_owner *owner = &n->owners[link->index];
    const struct map_owner *mapped = &m->map->owners[link->index];
    const uint32_t slot = (uint32_t)call->arg;
    struct nccl_piece *p = piece_of(n, slot, link->index);
    const uint64_t elem_bytes = dtype_bytes(m->spec->publish);
    const struct slice slice = mapped->shards->slice[p->unit];
    (void)e;
    if (p->in.epoch != owner->epoch) {
        p->in.epoch = owner->epoch;
        p->in.job = (struct comm_job){
            .way = COMM_RECV,
            .memory = (uint8_t *)m->copy->slots[slot].base + slice.first_elem * elem_bytes,
            .bytes = slice.elems * elem_bytes,
            .turn = ++owner->down_turn,
            .gate = { mapped->board.base, p->unit, p->step },
        };
        nccl_queue(owner, owner->down, &p->in);
    }
    ret_request->type = WIRE_FETCH;
    ret_request->fetch = (struct wire_fetch){
        .model = mapped->layout.handle, .unit = p->unit, .step = p->step, .turn = p->in.job.turn
    };
    return SHD_OK;
}

static void fetched(struct link *link, const struct call *call, const struct wire_reply *reply)
{
    struct nccl_model *n = call->ctx;
    struct shd_model *m = n->model;
    struct nccl_piece *p = piece_of(n, (uint32_t)call->arg, link->index);
    p->asked = false;
    p->status = reply->status;
    p->version = reply->fetched.step;
    if (reply->status != SHD_OK)
        link_err(link, reply->status, &p->why, "does not send unit %" PRIu32 " '%s': %s", p->unit,
                 m->spec->units[p->unit].name, reply->text);
    else if (reply->type != WIRE_FETCHED)
        p->status = link_err(link, SHD_EPROTO, &p->why, "answered Fetch with a reply of type %d",
                             (int)reply->type);
    if (p->status != SHD_OK && m->fault.code == SHD_OK)
        m->fault = p->why; /* the next turns of this link would never come */
}

static int ask(struct shd_model *m, uint32_t slot, uint32_t owner, struct shd_err *e)
{
    struct nccl_piece *p = piece_of(m->nccl, slot, owner);
    const struct call call = {
        .make = make_fetch, .fn = fetched, .ctx = m->nccl, .arg = slot, .step = p->step
    };
    CHECK(!p->asked);
    p->asked = true;
    const int r = hub_ask(&m->session->hub->links[owner], &call, e);
    p->asked = r == SHD_OK;
    return r;
}

/* -- Slots ------------------------------------------------------------------------------------- */

static int grow(struct nccl_model *n, uint32_t count, struct shd_err *e)
{
    if (count <= n->slot_count)
        return SHD_OK;
    struct nccl_slot *slots = sys_realloc(n->slots, count * sizeof *slots);
    if (slots == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " slots", count);
    n->slots = slots;
    while (n->slot_count < count) {
        struct nccl_piece *pieces = sys_calloc(n->owner_count, sizeof *pieces);
        if (pieces == NULL)
            return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " slots", count);
        n->slots[n->slot_count++] = (struct nccl_slot){ .pieces = pieces };
    }
    return SHD_OK;
}

/* Slots that were let go of too early, and into which nothing comes any more, are free again. True:
 * there are others. */
static bool reap(struct shd_model *m)
{
    struct nccl_model *n = m->nccl;
    bool left = false;
    for (uint32_t i = 0; i < n->slot_count; i++) {
        if (!n->slots[i].leaving)
            continue;
        if (!slot_done(n, i)) {
            left = true;
            continue;
        }
        n->slots[i].leaving = false;
        m->copy->slots[i].busy = false;
    }
    return left;
}

/* A moment's wait for one more to be free. */
static int await_slot(struct shd_model *m, uint64_t start_ns, struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    const int r = hub_poll(hub, SLICE_NS, e);
    if (r != SHD_OK || clock_now_ns() < hub_deadline_ns(hub, start_ns))
        return r;
    return err_set(e, SHD_ETIMEDOUT,
                   "units that were released are still on their way after %" PRIu64 " ms",
                   m->session->timeout_ns / NS_PER_MS);
}

int nccl_settle(struct shd_model *m, struct shd_err *e)
{
    const uint64_t start_ns = clock_now_ns();
    int r = SHD_OK;
    while (r == SHD_OK && reap(m))
        r = await_slot(m, start_ns, e);
    return r;
}

static void nccl_let_go(struct shd_model *m, uint32_t unit)
{
    const uint32_t slot = m->copy->slot_of[unit];
    copy_let_go(m, unit);
    if (slot_done(m->nccl, slot))
        return;
    m->nccl->slots[slot].leaving = true;
    m->copy->slots[slot].busy = true; /* not to be written to by anything else yet */
}

static int nccl_fetch(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    struct nccl_model *n = m->nccl;
    const uint64_t start_ns = clock_now_ns();
    int r = grow(n, m->copy->slot_count, e);
    if (r != SHD_OK)
        return r;
    bool left = reap(m);
    while ((r = copy_fetch(m, unit, e)) == SHD_EBUSY && left) {
        r = await_slot(m, start_ns, e);
        if (r != SHD_OK)
            return r;
        left = reap(m);
    }
    if (r != SHD_OK)
        return r;
    const uint32_t slot = m->copy->slot_of[unit];
    copy_settle(m->copy, slot); /* what is received does not wait for it */
    for (uint32_t i = 0; i < n->owner_count; i++) {
        struct nccl_piece *p = piece_of(n, slot, i);
        *p = (struct nccl_piece){
            .in = { .of = n },
            .unit = unit,
            .step = m->step,
            .used = n->owners[i].far && m->map->owners[i].shards->slice[unit].elems > 0,
        };
    }
    for (uint32_t i = 0; r == SHD_OK && i < n->owner_count; i++)
        if (piece_of(n, slot, i)->used)
            r = ask(m, slot, i, e);
    if (r != SHD_OK)
        nccl_let_go(m, unit);
    return r;
}

/* -- Waiting ----------------------------------------------------------------------------------- */

static int timed_out(const struct shd_model *m, const struct link *link, const struct nccl_piece *p,
                     struct shd_err *e)
{
    return link_err(link, SHD_ETIMEDOUT, e,
                    "did not send unit %" PRIu32 " '%s' of step %" PRIu64 " within %" PRIu64 " ms",
                    p->unit, m->spec->units[p->unit].name, p->step,
                    m->session->timeout_ns / NS_PER_MS);
}

/* The piece was asked for: wait until that is answered, and its transfer has ended either way. */
static int await_piece(struct shd_model *m, const struct link *link, const struct nccl_piece *p,
                       uint64_t start_ns, struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    for (;;) {
        const bool here = !p->asked && nccl_wait(m->nccl, &p->in, SLICE_NS);
        const int r = hub_poll(hub, p->asked ? SLICE_NS : 0, e);
        activity_look(m);
        if (r != SHD_OK || (here && !p->asked))
            return r;
        if (clock_now_ns() >= hub_deadline_ns(hub, start_ns))
            return timed_out(m, link, p, e);
    }
}

/* The transfer broke. If the owner died, its link goes down and comes up again with a new join, and
 * the piece can be asked for there. A link that stays up with nothing new on it will not send it.
 */
static int piece_broke(struct shd_model *m, const struct link *link, const struct nccl_piece *p,
                       struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    const struct nccl_owner *owner = &m->nccl->owners[link->index];
    const uint64_t start_ns = clock_now_ns();
    const struct shd_err why = p->in.job.why;
    while (p->in.epoch == owner->epoch) {
        const int r = hub_poll(hub, SLICE_NS, e);
        if (r != SHD_OK)
            return r;
        if (link->state == LINK_UP && p->in.epoch == owner->epoch &&
            clock_now_ns() >= hub_deadline_ns(hub, start_ns))
            return link_err(link, SHD_EIO, e, "is there, but not by NCCL: %s", why.text);
    }
    return SHD_OK;
}

static int wait_piece(struct shd_model *m, uint32_t slot, uint32_t i, struct shd_err *e)
{
    const struct link *link = &m->session->hub->links[i];
    struct nccl_piece *p = piece_of(m->nccl, slot, i);
    const uint64_t start_ns = clock_now_ns();
    for (;;) {
        int r = await_piece(m, link, p, start_ns, e);
        if (r != SHD_OK)
            return r;
        if (p->status != SHD_OK)
            return err_copy(&p->why, e);
        if (p->in.job.status == SHD_OK)
            break;
        r = piece_broke(m, link, p, e);
        if (r == SHD_OK && !p->asked)
            r = ask(m, slot, i, e);
        if (r != SHD_OK)
            return r;
    }
    if (!p->counted)
        m->session->bytes_copied += p->in.job.bytes;
    p->counted = true;
    return p->version == p->step ? SHD_OK : model_err_past(m, link, p->unit, p->version, e);
}

static int nccl_wait_unit(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    const uint32_t slot = m->copy->slot_of[unit];
    int r = copy_wait_unit(m, unit, e); /* what is near; and that it is of the open step */
    for (uint32_t i = 0; r == SHD_OK && i < m->nccl->owner_count; i++)
        if (piece_of(m->nccl, slot, i)->used)
            r = wait_piece(m, slot, i, e);
    return r;
}

/* -- Gradients --------------------------------------------------------------------------------- */

static struct nccl_transfer *send_of(const struct nccl_model *n, uint32_t slot, uint32_t owner)
{
    return &n->sends[(size_t)slot * n->owner_count + owner];
}

/* The owner has credited the slot's last gradient, so the transfer has ended there; the
 * communicator thread here sees it in a moment. */
static int nccl_ready_slot(struct shd_model *m, struct map_owner *owner, uint32_t slot,
                           struct shd_err *e)
{
    const uint32_t i = (uint32_t)(owner - m->map->owners);
    struct nccl_transfer *t = send_of(m->nccl, slot, i);
    if (!nccl_wait(m->nccl, t, m->session->timeout_ns))
        return link_err(&m->session->hub->links[i], SHD_ETIMEDOUT, e,
                        "has credited a gradient that is still being sent");
    t->epoch = 0;
    return SHD_OK;
}

static int nccl_slice_at(struct shd_model *m, const struct map_owner *owner, uint32_t slot,
                         uint32_t unit, enum shd_dtype dtype, void **ret_at, struct shd_err *e)
{
    struct nccl_model *n = m->nccl;
    const uint64_t elem_bytes = dtype_bytes(dtype);
    struct buffer *out = &n->out[slot];
    const int r = buffer_hold(&n->in, out, m->spec->units[unit].elems * elem_bytes, e);
    if (r == SHD_OK)
        *ret_at = (uint8_t *)out->base + owner->shards->slice[unit].first_elem * elem_bytes;
    return r;
}

/* The gradient is sent as part of the Return, unless it is on its way already. */
static int nccl_bring(struct shd_model *m, struct map_owner *owner, uint32_t slot, bool first,
                      uint64_t *ret_turn, struct shd_err *e)
{
    struct nccl_model *n = m->nccl;
    const uint32_t i = (uint32_t)(owner - m->map->owners);
    struct nccl_owner *o = &n->owners[i];
    struct nccl_transfer *t = send_of(n, slot, i);
    const struct grad_slot *s = &m->slots[slot];
    const struct slice slice = owner->shards->slice[s->unit];
    const uint64_t elem_bytes = dtype_bytes(s->dtype);
    (void)first;
    (void)e;
    if (slice.elems > 0 && t->epoch != o->epoch) {
        t->epoch = o->epoch;
        t->of = n;
        t->job = (struct comm_job){
            .way = COMM_SEND,
            .memory = (uint8_t *)n->out[slot].base + slice.first_elem * elem_bytes,
            .bytes = slice.elems * elem_bytes,
            .turn = ++o->up_turn,
        };
        nccl_queue(o, o->up, t);
    }
    *ret_turn = slice.elems > 0 ? t->job.turn : 0;
    return SHD_OK;
}

/* -- The tables -------------------------------------------------------------------------------- */

static const uint8_t *nccl_published(const struct shd_model *m, const struct map_owner *owner,
                                     uint32_t unit)
{
    (void)m;
    (void)owner;
    (void)unit;
    return NULL;
}

const struct mover_ops mover_nccl = {
    .take = whole_take,
    .ready = place_ready, /* its segments stay unmapped */
    .published = nccl_published,
    .ready_slot = nccl_ready_slot,
    .slice_at = nccl_slice_at,
    .bring = nccl_bring,
};

const struct reader_ops reader_nccl = {
    .kind = SHD_PATH_NCCL,
    .shown = ACTIVITY_PATH_NCCL,
    .fetch = nccl_fetch,
    .readable = copy_readable,
    .wait_unit = nccl_wait_unit,
    .let_go = nccl_let_go,
    .params = copy_params,
};

struct nccl_model *nccl_use(struct shd_model *m, struct nccl_model *n)
{
    struct nccl_model *before = m->nccl;
    for (uint32_t i = 0; m->map != NULL && i < m->map->owner_count; i++) {
        if (n != NULL && n->owners[i].far)
            m->map->owners[i].mover = &mover_nccl;
        else if (before != NULL && before->owners[i].far)
            m->map->owners[i].mover = &mover_whole;
    }
    m->nccl = n;
    return before;
}
