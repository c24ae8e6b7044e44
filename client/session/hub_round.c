/* Rounds and claims; see hub.h. */
#include "client/session/hub.h"

#include <inttypes.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"

#define POLL_SLICE_NS (100 * NS_PER_MS)

/* -- Segments --------------------------------------------------------------------------------- */

static int receive_segment(struct link *link, const struct wire_segment *segment, int *ret_fd,
                           struct shd_err *e)
{
    struct side_msg msg;
    int fd;
    const uint64_t timeout_ms = link->hub->timeout_ns / NS_PER_MS;
    int r = side_recv(link->side_fd, timeout_ms < INT32_MAX ? (int)timeout_ms : INT32_MAX, &msg,
                      &fd, e);
    if (r != SHD_OK)
        return r;
    if (msg.type == SIDE_ERROR)
        r = err_set(e, msg.status, "%s", msg.text);
    else if (msg.type != SIDE_SEGMENT || fd < 0)
        r = err_set(e, SHD_EPROTO, "side message of type %" PRIu32 " instead of a segment",
                    msg.type);
    else if (msg.ticket != segment->ticket || msg.kind != segment->kind ||
             msg.bytes != segment->bytes)
        r = err_set(e, SHD_EPROTO,
                    "got segment kind %" PRIu32 " of %" PRIu64 " bytes, asked for "
                    "kind %d of %" PRIu64,
                    msg.kind, msg.bytes, (int)segment->kind, segment->bytes);
    else if (segment->place == SEGMENT_HOST) /* a GPU's is checked by its driver */
        r = segment_check(fd, segment->kind, segment->bytes, e);
    if (r == SHD_OK)
        *ret_fd = fd;
    else if (fd >= 0)
        close(fd);
    return r;
}

int hub_claim(struct link *link, const struct wire_segment *segment, int *ret_fd, struct shd_err *e)
{
    if (link->fault.code != SHD_OK) {
        if (e != NULL)
            *e = link->fault;
        return link->fault.code;
    }
    if (link->side_fd < 0)
        return link_err(link, SHD_EGONE, e, "is gone");
    struct shd_err why = { 0 };
    const struct side_msg claim = {
        .magic = SIDE_MAGIC, .protocol = SHD_PROTOCOL, .type = SIDE_CLAIM, .ticket = segment->ticket
    };
    int r = side_send(link->side_fd, &claim, /* pass_fd= */ -1, &why);
    if (r == SHD_OK)
        r = receive_segment(link, segment, ret_fd, &why);
    if (r == SHD_OK)
        return SHD_OK;
    if (r == SHD_EGONE && link->state == LINK_UP)
        link_down(link, &why);
    return link_err(link, r, e, "does not pass its %s segment: %s",
                    segment_kind_name(segment->kind), why.text);
}

/* -- Rounds ----------------------------------------------------------------------------------- */

static int take_answer(struct round *round, struct link *link, uint64_t arg,
                       const struct wire_reply *reply, struct shd_err *e)
{
    if (reply->status != SHD_OK)
        return link_err(link, reply->status, e, "refused %s: %s", round->what, reply->text);
    if (reply->type != round->type)
        return link_err(link, SHD_EPROTO, e, "answered %s with a reply of type %d", round->what,
                        (int)reply->type);
    return round->take != NULL ? round->take(round, link, arg, reply, e) : SHD_OK;
}

static void round_answered(struct link *link, const struct call *call,
                           const struct wire_reply *reply)
{
    struct round *round = call->ctx;
    struct shd_err e = { 0 };
    CHECK(round->waiting > 0);
    round->waiting--;
    const int r = take_answer(round, link, call->arg, reply, &e);
    if (r != SHD_OK && round->err.code == SHD_OK) {
        round->err = e;
        round->err.code = r;
    }
}

static int round_make(struct link *link, const struct call *call, struct wire_request *ret_request,
                      struct shd_err *e)
{
    struct round *round = call->ctx;
    return round->make(round, link, call->arg, ret_request, e);
}

int round_ask(struct round *round, struct link *link, uint64_t arg, struct shd_err *e)
{
    const struct call call = { .make = round_make, .fn = round_answered, .ctx = round, .arg = arg };
    CHECK(round->make != NULL);
    const int r = hub_ask(link, &call, e);
    if (r == SHD_OK)
        round->waiting++;
    return r;
}

static int timed_out(const struct round *round, const struct hub *hub, struct shd_err *e)
{
    for (uint32_t l = 0; l < hub->link_count; l++)
        for (uint32_t i = 0; i < HUB_CALLS_MAX; i++)
            if (hub->links[l].calls[i].ctx == round)
                return link_err(&hub->links[l], SHD_ETIMEDOUT, e,
                                "did not answer %s within %" PRIu64 " ms%s%s", round->what,
                                hub->timeout_ns / NS_PER_MS, round->hint != NULL ? ": " : "",
                                round->hint != NULL ? round->hint : "");
    return err_set(e, SHD_ETIMEDOUT, "%s was not answered", round->what);
}

int round_wait(struct round *round, struct hub *hub, uint64_t start_ns, struct shd_err *e)
{
    const uint32_t waiting = round->waiting;
    int r = SHD_OK;
    while (r == SHD_OK && round->waiting > 0 && round->waiting == waiting &&
           round->err.code == SHD_OK) {
        const uint64_t now_ns = clock_now_ns(), deadline_ns = hub_deadline_ns(hub, start_ns);
        if (now_ns >= deadline_ns)
            return timed_out(round, hub, e);
        const uint64_t left_ns = deadline_ns - now_ns;
        r = hub_poll(hub, left_ns < POLL_SLICE_NS ? left_ns : POLL_SLICE_NS, e);
        if (r != SHD_OK && round->waiting == 0 && round->err.code == SHD_OK)
            r = SHD_OK; /* everything was answered before the daemon went */
    }
    return r;
}

int round_finish(struct round *round, struct hub *hub, int asked, struct shd_err *e)
{
    const uint64_t start_ns = clock_now_ns();
    int r = asked;
    while (r == SHD_OK && round->waiting > 0 && round->err.code == SHD_OK)
        r = round_wait(round, hub, start_ns, e);
    hub_forget(hub, round);
    if (r == SHD_OK && round->err.code != SHD_OK) {
        r = round->err.code;
        if (e != NULL)
            *e = round->err;
    }
    return r;
}
