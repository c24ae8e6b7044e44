/* See round.h. */
#include "client/session/round.h"

#include <inttypes.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"

#define POLL_SLICE_NS (100 * NS_PER_MS)

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
        const uint64_t left_ns = hub_left_ns(hub, start_ns, POLL_SLICE_NS);
        if (left_ns == 0)
            return timed_out(round, hub, e);
        r = hub_poll(hub, left_ns, e);
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
