/* See round.h. */
#include "client/session/round.h"

#include <inttypes.h>
#include <stdio.h>

#include "client/session/spec_out.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/spec/layout.h"

#define POLL_SLICE_NS (100 * NS_PER_MS)
#define SILENT_NS     NS_PER_S /* to_the_end: after an error */

static int take_answer(const struct round *round, const struct link *link,
                       const struct wire_reply *reply, struct shd_err *e)
{
    if (reply->status != SHD_OK)
        return link_err(link, reply->status, e, "refused %s: %s", round->what, reply->text);
    if (reply->type != round->type)
        return link_err(link, SHD_EPROTO, e, "answered %s with a reply of type %d", round->what,
                        (int)reply->type);
    return round->take != NULL ? round->take(round, link, reply, e) : SHD_OK;
}

/* Without a replica's answer there is that of its owner; the other way round nobody has taken what
 * the replica said. */
static int lost_one(const struct round *round, const struct link *link, struct shd_err *e)
{
    if (link_is_replica(link) || round->follows)
        return SHD_OK;
    return link_err(link, SHD_EGONE, e,
                    "was lost before it answered %s, and its replica takes over: do it again",
                    round->what);
}

static void round_answered(struct link *link, const struct call *call,
                           const struct wire_reply *reply)
{
    struct round *round = call->ctx;
    struct shd_err e = { 0 };
    CHECK(round->waiting > 0);
    round->waiting--;
    round->arg = call->arg;
    const int r = link->state == LINK_GONE ? lost_one(round, link, &e)
                                           : take_answer(round, link, reply, &e);
    if (r != SHD_OK && round->err.code == SHD_OK) {
        round->err = e;
        round->err.code = r;
        round->err_ns = clock_now_ns();
    }
}

static int round_make(struct link *link, const struct call *call, struct wire_request *ret_request,
                      struct shd_err *e)
{
    struct round *round = call->ctx;
    round->arg = call->arg;
    ret_request->type = round->asks;
    if (round->make != NULL)
        round->make(round, link, ret_request);
    return round->spec != NULL ? spec_out_pass(round->spec, link, e) : SHD_OK;
}

int round_ask(struct round *round, struct link *link, uint64_t arg, struct shd_err *e)
{
    const struct call call = { .make = round_make,
                               .fn = round_answered,
                               .stays = round->replicated,
                               .ctx = round,
                               .arg = arg };
    if (link->state != LINK_GONE && link->known && (uint32_t)round->asks >= link->peer.requests)
        return link_err(link, SHD_ENOTSUP, e, "does not know %s: it is of an older version",
                        round->what);
    round->waiting++; /* it may be answered before it returns */
    const int r = hub_ask(link, &call, e);
    round->waiting -= r != SHD_OK;
    return r;
}

int round_one(struct round *round, struct link *link, uint64_t arg, struct shd_err *e)
{
    const int r = round_ask(round, link, arg, e);
    return round_finish(round, link->hub, r, e);
}

int round_all(struct round *round, struct hub *hub, uint64_t arg, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < hub->link_count; i++)
        r = round_ask(round, &hub->links[i], arg, e);
    return round_finish(round, hub, r, e);
}

static int timed_out(const struct round *round, const struct hub *hub, struct shd_err *e)
{
    const char *hint = round->hint != NULL ? round->hint : "";
    for (uint32_t l = 0; l < hub->link_count; l++)
        if (hub->links[l].busy.pause_ns > 0)
            hint = "it has no place for more requests";
    const char *why = hub->held_up[0] != '\0' ? hub->held_up : hint;
    for (uint32_t l = 0; l < hub->link_count; l++)
        for (uint32_t i = 0; i < HUB_CALLS_MAX; i++)
            if (hub->links[l].calls[i].ctx == round)
                return link_err(&hub->links[l], SHD_ETIMEDOUT, e,
                                "did not answer %s within %" PRIu64 " ms%s%s", round->what,
                                hub->timeout_ns / NS_PER_MS, why[0] != '\0' ? ": " : "", why);
    return err_set(e, SHD_ETIMEDOUT, "%s was not answered", round->what);
}

/* A daemon has a request of the round, or may have. One that was too busy has none, which will do
 * where it would make something. */
static bool link_in_flight(const struct round *round, const struct link *link)
{
    const bool unsent = round->lets_go && link->state == LINK_UP;
    for (uint32_t i = 0; i < HUB_CALLS_MAX; i++) {
        const struct call *call = &link->calls[i];
        if (call->used && call->ctx == round && (call->seq != 0 || unsent))
            return true;
    }
    return false;
}

static bool round_in_flight(const struct round *round, const struct hub *hub)
{
    for (uint32_t l = 0; l < hub->link_count; l++)
        if (link_in_flight(round, &hub->links[l]))
            return true;
    return false;
}

/* What silent daemons have of the round is taken back by hanging up on them, for what was refused
 * by others must not be done by one that reads it late. They are attached to anew. */
static void withdraw(struct round *round, struct hub *hub)
{
    char told[SHD_ERR_TEXT_BYTES];
    bool silent[SHD_OWNERS_MAX] = { false };
    const struct link *first = NULL;
    for (uint32_t l = 0; l < hub->link_count; l++) {
        silent[l] = link_in_flight(round, &hub->links[l]);
        if (silent[l] && first == NULL)
            first = &hub->links[l];
    }
    hub_forget(hub, round);
    for (uint32_t l = 0; l < hub->link_count; l++) {
        struct shd_err why = { 0 };
        if (!silent[l])
            continue;
        err_set(&why, SHD_EGONE, "it did not answer %s, which was given up: hung up on",
                round->what);
        link_down(&hub->links[l], &why);
    }
    if (first == NULL)
        return;
    snprintf(told, sizeof told, "%s", round->err.text);
    err_set(&round->err, round->err.code,
            "%.*s (daemon %.32s is silent: what was asked of it is withdrawn)",
            (int)(sizeof told - 100), told, first->device);
}

/* Nobody is asked anything any more, and who was has had the time to answer. */
static bool round_is_over(const struct round *round, uint64_t left_ns)
{
    return round->err.code != SHD_OK &&
           (left_ns == 0 || clock_now_ns() - round->err_ns >= SILENT_NS);
}

static bool round_goes_on(const struct round *round, const struct hub *hub)
{
    if (round->err.code != SHD_OK)
        return round->to_the_end && round_in_flight(round, hub);
    return round->waiting > 0;
}

int round_wait(struct round *round, struct hub *hub, uint64_t start_ns, struct shd_err *e)
{
    const uint32_t waiting = round->waiting;
    int r = SHD_OK;
    while (r == SHD_OK && round_goes_on(round, hub) && round->waiting == waiting) {
        const uint64_t left_ns = hub_left_ns(hub, start_ns, POLL_SLICE_NS);
        if (round_is_over(round, left_ns)) {
            withdraw(round, hub);
            return SHD_OK;
        }
        if (left_ns == 0)
            return timed_out(round, hub, e);
        r = hub_poll(hub, left_ns, e);
        if (r != SHD_OK && round->waiting == 0 && round->err.code == SHD_OK)
            r = SHD_OK; /* everything was answered before the daemon went */
        if (r == SHD_OK && round->fault != NULL)
            r = err_copy(round->fault, e);
        if (r == SHD_OK && round->look != NULL)
            r = round->look(round, e);
    }
    return r;
}

void round_forget(struct round *round, struct hub *hub)
{
    hub_forget(hub, round);
    round->waiting = 0;
}

int round_finish(struct round *round, struct hub *hub, int asked, struct shd_err *e)
{
    const uint64_t start_ns = clock_now_ns();
    int r = asked;
    while (r == SHD_OK && round_goes_on(round, hub))
        r = round_wait(round, hub, start_ns, e);
    round_forget(round, hub);
    return r == SHD_OK ? err_copy(&round->err, e) : r;
}

void round_let_go(struct round *round, struct hub *hub)
{
    struct shd_err ignored;
    round->to_the_end = round->lets_go = true;
    round->err = (struct shd_err){ .code = SHD_ECANCELED };
    round->err_ns = clock_now_ns();
    round_all(round, hub, 0, &ignored);
}
