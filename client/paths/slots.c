/* See slots.h.
 *
 * Returns are pipelined: nothing waits for their replies, which free the slot when every owner has
 * credited it. A refused return becomes the model's fault and is reported by its next call. */
#include "client/paths/slots.h"

#include <inttypes.h>
#include <string.h>

#include "client/paths/coded.h"
#include "client/paths/kern_run.h"
#include "client/paths/map.h"
#include "client/paths/place.h"
#include "client/paths/whole.h"
#include "client/session/activity.h"
#include "client/session/hub.h"
#include "client/session/link_attach.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

#define SLICE_NS (5 * NS_PER_MS) /* between two looks at the daemons' lives */

#define SMALL_ELEMS (UINT64_C(16) * 1024) /* summed in some microseconds */

/* The argument of a Return's call is its slot; NO_SLOT with unit and group, where the unit took no
 * part in the group. */
#define NO_SLOT    (UINT64_C(1) << 63)
#define GROUP_BITS 32

/* -- Waiting ----------------------------------------------------------------------------------- */

static void return_answered(struct link *link, const struct call *call,
                            const struct wire_reply *reply);

static int slot_timed_out(struct shd_model *m, struct shd_err *e)
{
    const struct hub *hub = m->session->hub;
    for (uint32_t l = 0; l < hub->link_count; l++)
        for (uint32_t i = 0; i < HUB_CALLS_MAX; i++) {
            const struct call *call = &hub->links[l].calls[i];
            if (call->fn != return_answered || call->ctx != m || (call->arg & NO_SLOT) != 0)
                continue;
            const struct grad_slot *slot = &m->slots[call->arg];
            return link_err(
                &hub->links[l], SHD_ETIMEDOUT, e,
                "still holds unit %" PRIu32 ", micro-batch %" PRIu32 " after %" PRIu64 " ms: %s",
                slot->unit, slot->group * m->spec->accumulate, m->session->timeout_ns / NS_PER_MS,
                hub->held_up[0] != '\0' ? hub->held_up : "is an earlier micro-batch missing?");
        }
    return err_set(e, SHD_ETIMEDOUT, "no gradient slot became free");
}

/* To each owner: it may be what holds the slot that is missing, and has to make room then. */
static void say_waiting(const struct shd_model *m, uint64_t since_ns)
{
    for (uint32_t i = 0; i < m->map->member_count; i++) {
        struct activity *page = i == 0 ? m->activity.page : m->map->owners[i].says;
        if (page != NULL)
            activity_set_slot_wait(page, since_ns);
    }
}

static uint32_t credits_left(const struct shd_model *m)
{
    uint32_t sum = 0;
    for (uint32_t i = 0; i < m->slot_count; i++)
        sum += m->slots[i].state == SLOT_SENT ? m->slots[i].credits_left : 0;
    return sum;
}

/* As long as credits come it sleeps for several at a time. */
int slots_wait(struct shd_model *m, struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    const uint64_t start_ns = clock_now_ns();
    uint32_t before = 0;
    int r = SHD_OK;
    while (r == SHD_OK && model_find_slot(m, SLOT_FREE) == NULL) {
        const uint64_t slice_ns = hub_left_ns(hub, start_ns, SLICE_NS);
        const uint32_t left = credits_left(m);
        hub->wakes.several = left != before;
        before = left;
        say_waiting(m, start_ns); /* a successor's page is new */
        r = slice_ns > 0 ? hub_poll(hub, slice_ns, e) : slot_timed_out(m, e);
        activity_look(m);
    }
    hub->wakes.several = false;
    say_waiting(m, 0);
    return r;
}

/* -- Filling ----------------------------------------------------------------------------------- */

int slots_ready(struct shd_model *m, uint32_t slot, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < m->map->owner_count; i++) {
        struct map_owner *owner = &m->map->owners[i];
        r = owner->mover->ready_slot(m, owner, slot, e);
    }
    return r;
}

float *slots_array(const struct shd_model *m, uint32_t slot, uint32_t unit)
{
    CHECK(slot < m->map->view_slots);
    return m->map->whole ? whole_slot_array(m, slot) : place_slot_array(m, slot, unit);
}

/* The GPU at either end does it, if there is one. */
static int fill_slice(struct shd_model *m, const struct map_owner *owner, struct kern_batch *batch,
                      const struct kern_cast *cast, struct shd_err *e)
{
    struct kern *gpu = owner->whole.gpu;
    struct kern_op op = { KERN_CAST, { .cast = *cast } };
    if (gpu != NULL && cast->out_dtype == SHD_F32) /* that needs no kernel */
        op = (struct kern_op){ KERN_COPY,
                               { .copy = { cast->out, cast->in, cast->elems * sizeof(float) } } };
    return kern_batch_add(batch, gpu != NULL ? gpu : m->session->kern, &op, e);
}

static int fill_codes(struct shd_model *m, uint32_t slot, uint32_t unit, const float *grad,
                      struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < m->map->owner_count; i++) {
        const struct map_owner *owner = &m->map->owners[i];
        const struct slice slice = owner->shards->slice[unit];
        void *to;
        if (slice.elems == 0)
            continue;
        r = owner->mover->slice_at(m, owner, slot, unit, SHD_F32, &to, e);
        if (r == SHD_OK)
            r = coded_write(m, slot, unit, slice, grad, to, e);
    }
    return r;
}

int slots_fill(struct shd_model *m, uint32_t slot, uint32_t unit, const float *grad,
               enum shd_dtype dtype, struct shd_err *e)
{
    struct kern_batch batch;
    int r = SHD_OK;
    if (spec_unit_grad_codec(m->spec, unit) != CODEC_NONE)
        return fill_codes(m, slot, unit, grad, e);
    kern_batch_init(&batch);
    for (uint32_t i = 0; r == SHD_OK && i < m->map->owner_count; i++) {
        const struct map_owner *owner = &m->map->owners[i];
        const struct slice slice = owner->shards->slice[unit];
        struct kern_cast cast = { NULL, dtype, grad + slice.first_elem, slice.elems };
        if (slice.elems == 0)
            continue;
        r = owner->mover->slice_at(m, owner, slot, unit, dtype, &cast.out, e);
        if (r == SHD_OK)
            r = fill_slice(m, owner, &batch, &cast, e);
        m->session->bytes_copied += slice.elems * dtype_bytes(dtype);
    }
    const int waited = kern_batch_wait(&batch, r == SHD_OK ? e : NULL);
    return r == SHD_OK ? waited : r;
}

/* -- Returning --------------------------------------------------------------------------------- */

static void slot_credited(struct grad_slot *slot)
{
    CHECK(slot->credits_left > 0);
    if (--slot->credits_left == 0 && slot->state == SLOT_SENT)
        slot->state = SLOT_FREE;
}

static void tell_answered(struct shd_model *m, const struct link *link, const struct call *call)
{
    struct map_answer a = { .step = call->step, .attempt = call->attempt, .member = link->index };
    const struct grad_slot *slot = (call->arg & NO_SLOT) == 0 ? &m->slots[call->arg] : NULL;
    a.group = slot != NULL ? slot->group : (uint32_t)((call->arg & ~NO_SLOT) >> GROUP_BITS);
    a.unit = slot != NULL ? slot->unit : (uint32_t)call->arg;
    m->map->answered(m, &a);
}

static void return_answered(struct link *link, const struct call *call,
                            const struct wire_reply *reply)
{
    struct shd_model *m = call->ctx;
    const bool counts = reply->status == SHD_OK;
    if (counts && m->map->answered != NULL)
        tell_answered(m, link, call);
    if ((call->arg & NO_SLOT) == 0)
        slot_credited(&m->slots[call->arg]);
    if (m->fault.code != SHD_OK || link->state == LINK_GONE) /* the other of its slice counts */
        return;
    if (reply->status != SHD_OK)
        err_set(&m->fault, reply->status, "daemon %s refused a gradient: %s", link->device,
                reply->text);
    else if (reply->type != WIRE_CREDIT)
        link_err(link, SHD_EPROTO, &m->fault, "answered Return with a reply of type %d",
                 (int)reply->type);
}

/* The request is made anew for a successor of the daemon that was asked before, and then its step
 * may be over: metrics are those of the open step only. */
static int make_return(struct link *link, const struct call *call, struct wire_request *ret_request,
                       struct shd_err *e)
{
    const struct shd_model *m = call->ctx;
    const bool none = (call->arg & NO_SLOT) != 0;
    const struct grad_slot *slot = none ? NULL : &m->slots[call->arg];
    struct wire_return *msg = &ret_request->return_grad;
    (void)e;
    ret_request->type = WIRE_RETURN;
    *msg = (struct wire_return){ .model = m->map->owners[link->index].layout.handle,
                                 .step = call->step,
                                 .attempt = call->attempt,
                                 .dtype = SHD_F32,
                                 .none = none,
                                 .metric_names = "" };
    msg->micro = none ? (uint32_t)((call->arg & ~NO_SLOT) >> GROUP_BITS) : slot->group;
    msg->unit = none ? (uint32_t)call->arg : slot->unit;
    if (!none) {
        msg->slot = (uint32_t)call->arg;
        msg->dtype = slot->dtype;
    }
    if (call->step == m->step && call->attempt == m->in.attempt) {
        const struct report report = model_report(m, msg->micro);
        msg->metric_count = report.count;
        memcpy(msg->metrics, report.metrics, sizeof msg->metrics);
        msg->metric_names = m->reports[msg->micro * m->spec->accumulate].names;
    }
    return SHD_OK;
}

/* The first time on this connection the gradient may have to be brought along. */
static int make_return_slot(struct link *link, const struct call *call,
                            struct wire_request *ret_request, struct shd_err *e)
{
    struct shd_model *m = call->ctx;
    struct map_owner *owner = &m->map->owners[link->index];
    uint64_t turn = 0;
    int r = owner->mover->bring(m, owner, (uint32_t)call->arg, call->seq == 0, &turn, e);
    if (r == SHD_OK)
        r = make_return(link, call, ret_request, e);
    ret_request->return_grad.turn = turn;
    return r;
}

/* What an owner can do in no time it does with the next ones, unless there are none: others may
 * wait for what is done of the group. */
static bool return_can_wait(const struct shd_model *m, const struct path_return *ret,
                            uint32_t owner)
{
    const struct map_owner *o = &m->map->owners[owner];
    const struct report *report = &m->reports[ret->group * m->spec->accumulate];
    if (m->map->answered != NULL) /* nor does this worker know which is the last */
        return false;
    return report->given + 1 < model_returned_units(m) && !o->layout.on_gpu &&
           o->shards->slice[ret->unit].elems <= SMALL_ELEMS;
}

/* Replicas first: one that takes an owner's place in the middle of this is told, whenever that is.
 */
static struct link *told_as(struct hub *hub, uint32_t at)
{
    const uint32_t replicas = hub->link_count - hub->owner_count;
    return &hub->links[at < replicas ? hub->owner_count + at : at - replicas];
}

/* A return broken off by an error goes on, when repeated, with the first member not yet told. */
int slots_give(struct shd_model *m, const struct path_return *ret, struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    struct grad_slot *slot = ret->slot;
    const uint64_t none = NO_SLOT | (uint64_t)ret->group << GROUP_BITS | ret->unit;
    struct call call = {
        .make = slot != NULL ? make_return_slot : make_return,
        .fn = return_answered,
        .stays = true,
        .ctx = m,
        .arg = slot != NULL ? (uint64_t)(slot - m->slots) : none,
        .step = m->step,
        .attempt = m->in.attempt,
    };
    for (uint32_t i = slot != NULL ? slot->sent : 0; i < hub->link_count; i++) {
        struct link *link = told_as(hub, i);
        link_want_ring(link);
        call.can_wait = return_can_wait(m, ret, link->index);
        if (slot != NULL)
            slot->credits_left++; /* it may be answered before it returns */
        const int r = hub_ask(link, &call, e);
        if (slot != NULL)
            slot->credits_left -= r != SHD_OK;
        if (r != SHD_OK)
            return r;
        if (slot != NULL)
            slot->sent++;
    }
    if (slot != NULL)
        slot->state = slot->credits_left > 0 ? SLOT_SENT : SLOT_FREE;
    return SHD_OK;
}
