/* A step on daemons: waiting on boards, returning gradients. See path_map.h.
 *
 * Returns are pipelined: nothing waits for their replies, which free the slot when every owner has
 * credited it. A refused return becomes the model's fault and is reported by its next call. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "client/paths/kern_run.h"
#include "client/paths/path_map.h"
#include "client/paths/path_nccl.h"
#include "client/session/activity.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

#define SLICE_NS (5 * NS_PER_MS) /* between two looks at the daemons' lives */

/* What a Return's call is about: its slot, or unit and group that took no part. */
#define NO_SLOT    (UINT64_C(1) << 63)
#define GROUP_BITS 32

const void *map_params(const struct shd_model *m, uint32_t unit)
{
    if (m->map->whole) /* it has one owner then */
        return whole_published(&m->map->owners[0], unit);
    return m->map->params[unit];
}

float *map_slot_array(const struct shd_model *m, uint32_t slot, uint32_t unit)
{
    CHECK(slot < m->map->view_slots);
    if (m->map->whole)
        return whole_slot_array(m, slot);
    return m->map->views[slot * m->map->view_count + m->map->view_of[unit]];
}

int map_poll(struct shd_model *m, struct shd_err *e)
{
    return hub_poll(m->session->hub, /* timeout_ns= */ 0, e);
}

static uint64_t slice_left(uint64_t deadline_ns)
{
    const uint64_t now_ns = clock_now_ns();
    const uint64_t left_ns = now_ns < deadline_ns ? deadline_ns - now_ns : 0;
    return left_ns < SLICE_NS ? left_ns : SLICE_NS;
}

/* -- Parameters -------------------------------------------------------------------------------- */

static int wait_board(struct shd_model *m, struct link *link, uint32_t unit, uint64_t start_ns,
                      struct shd_err *e)
{
    const struct board *board = m->map->owners[link->index].board.base;
    for (;;) {
        const uint64_t slice_ns = slice_left(hub_deadline_ns(m->session->hub, start_ns));
        if (board_wait(board, unit, m->step, slice_ns) == SHD_OK)
            break;
        const int r = map_poll(m, e);
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

int map_fetch(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    (void)m;
    (void)unit;
    (void)e;
    return SHD_OK; /* mapped once, at open: nothing to ask for */
}

void map_let_go(struct shd_model *m, uint32_t unit)
{
    (void)m;
    (void)unit;
}

/* Owners with no part of the unit have nothing to wait for. */
int map_wait_unit(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    const uint64_t start_ns = clock_now_ns();
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < hub->link_count; i++)
        if (m->map->owners[i].shards->slice[unit].elems > 0)
            r = wait_board(m, &hub->links[i], unit, start_ns, e);
    return r;
}

/* -- Gradients --------------------------------------------------------------------------------- */

static int slot_timed_out(struct shd_model *m, struct shd_err *e)
{
    const struct hub *hub = m->session->hub;
    for (uint32_t l = 0; l < hub->link_count; l++)
        for (uint32_t i = 0; i < HUB_CALLS_MAX; i++) {
            const struct call *call = &hub->links[l].calls[i];
            if (call->ctx != m || (call->arg & NO_SLOT) != 0)
                continue;
            const struct grad_slot *slot = &m->slots[call->arg];
            return link_err(&hub->links[l], SHD_ETIMEDOUT, e,
                            "still holds unit %" PRIu32 ", micro-batch %" PRIu32 " after %" PRIu64
                            " ms: is an earlier micro-batch missing?",
                            slot->unit, slot->group * m->spec->accumulate,
                            m->session->timeout_ns / NS_PER_MS);
        }
    return err_set(e, SHD_ETIMEDOUT, "no gradient slot became free");
}

static bool any_slot_free(const struct shd_model *m)
{
    for (uint32_t i = 0; i < m->slot_count; i++)
        if (m->slots[i].state == SLOT_FREE)
            return true;
    return false;
}

int map_wait_slot(struct shd_model *m, struct shd_err *e)
{
    const uint64_t start_ns = clock_now_ns();
    while (!any_slot_free(m)) {
        const uint64_t slice_ns = slice_left(hub_deadline_ns(m->session->hub, start_ns));
        if (slice_ns == 0)
            return slot_timed_out(m, e);
        const int r = hub_poll(m->session->hub, slice_ns, e);
        activity_look(m);
        if (r != SHD_OK)
            return r;
    }
    return SHD_OK;
}

static void slot_credited(struct grad_slot *slot)
{
    CHECK(slot->credits_left > 0);
    if (--slot->credits_left == 0 && slot->state == SLOT_SENT)
        slot->state = SLOT_FREE;
}

static void return_answered(struct link *link, const struct call *call,
                            const struct wire_reply *reply)
{
    struct shd_model *m = call->ctx;
    if ((call->arg & NO_SLOT) == 0)
        slot_credited(&m->slots[call->arg]);
    if (m->fault.code != SHD_OK)
        return;
    if (reply->status != SHD_OK)
        err_set(&m->fault, reply->status, "daemon %s refused a gradient: %s", link->device,
                reply->text);
    else if (reply->type != WIRE_CREDIT)
        link_err(link, SHD_EPROTO, &m->fault, "answered Return with a reply of type %d",
                 (int)reply->type);
}

/* Also for a successor of who was asked before, and for a step that is over by now. */
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
                                 .dtype = SHD_F32,
                                 .none = none };
    msg->micro = none ? (uint32_t)((call->arg & ~NO_SLOT) >> GROUP_BITS) : slot->group;
    msg->unit = none ? (uint32_t)call->arg : slot->unit;
    if (!none) {
        msg->slot = (uint32_t)call->arg;
        msg->dtype = slot->dtype;
    }
    if (call->step == m->step) {
        const struct report report = model_report(m, msg->micro);
        msg->metric_count = report.count;
        memcpy(msg->metrics, report.metrics, sizeof msg->metrics);
    }
    return SHD_OK;
}

/* The first time on this connection the gradient may have to be brought along. */
static int make_return_slot(struct link *link, const struct call *call,
                            struct wire_request *ret_request, struct shd_err *e)
{
    struct shd_model *m = call->ctx;
    const uint32_t slot = (uint32_t)call->arg;
    uint64_t turn = 0;
    int r = SHD_OK;
    if (nccl_far(m, link->index))
        r = nccl_send(m, link->index, slot, &turn, e);
    else if (call->seq == 0)
        r = map_bring_slice(m, link->index, slot, e);
    if (r == SHD_OK)
        r = make_return(link, call, ret_request, e);
    ret_request->return_grad.turn = turn;
    return r;
}

/* The views are placed for fp32. An owner's part of a view starts where its slot starts, and that
 * is where its part of the gradient goes, in whichever dtype. */
int map_fill_slot(struct shd_model *m, uint32_t slot, uint32_t unit, const float *grad,
                  enum shd_dtype dtype, struct shd_err *e)
{
    if (m->map->whole)
        return whole_fill_slot(m, slot, unit, grad, dtype, e);
    float *view = map_slot_array(m, slot, unit);
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < m->map->owner_count; i++) {
        const struct slice slice = m->map->owners[i].shards->slice[unit];
        const struct kern_cast cast = {
            .out = view + slice.first_elem,
            .out_dtype = dtype,
            .in = grad + slice.first_elem,
            .elems = slice.elems,
        };
        if (slice.elems == 0)
            continue;
        r = kern_run_cast(m->session->kern, &cast, e);
        m->session->bytes_copied += slice.elems * dtype_bytes(dtype);
    }
    return r;
}

/* A return broken off by an error goes on, when repeated, with the first owner not yet told. */
int map_give(struct shd_model *m, const struct path_return *ret, struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    struct grad_slot *slot = ret->slot;
    const uint64_t none = NO_SLOT | (uint64_t)ret->group << GROUP_BITS | ret->unit;
    const struct call call = {
        .make = slot != NULL ? make_return_slot : make_return,
        .fn = return_answered,
        .ctx = m,
        .arg = slot != NULL ? (uint64_t)(slot - m->slots) : none,
        .step = m->step,
    };
    for (uint32_t i = slot != NULL ? slot->sent : 0; i < hub->link_count; i++) {
        const int r = hub_ask(&hub->links[i], &call, e);
        if (r != SHD_OK)
            return r;
        if (slot == NULL)
            continue;
        slot->sent++;
        slot->credits_left++;
    }
    if (slot != NULL)
        slot->state = slot->credits_left > 0 ? SLOT_SENT : SLOT_FREE;
    return SHD_OK;
}
