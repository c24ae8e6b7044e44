/* Dropping a model. See client/shd.h, and daemon/model/drop.h for why it is all owners' or none's.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client/paths/rejoin.h"
#include "client/session/hub.h"
#include "client/session/replay.h"
#include "client/session/round.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/failpoint.h"

#define ATTEMPTS_MAX  16u /* daemons that die between the two requests hold nothing any more */
#define BUSY_NS       (3000 * NS_PER_MS) /* workers may be about to end */
#define BUSY_PAUSE_US 50000u

struct dropping {
    struct hub *hub;
    const char *name;
    bool force;
    enum wire_drop_what what;
    uint64_t first;                         /* owner 0's instance; 0: it has none */
    uint32_t counts[WIRE_DROPPED_KEPT + 1]; /* answers of the round, by what they say */
    char near[WIRE_NAME_BYTES_MAX];
    bool forgot; /* it had moved from there, and is looked for there no more */
};

static void make_request(const struct round *round, const struct link *link,
                         struct wire_request *ret_request)
{
    const struct dropping *d = round->ctx;
    ret_request->drop = (struct wire_drop){ .what = d->what,
                                            .name = d->name,
                                            .first = d->first,
                                            .owner = link_owner(link),
                                            .owners = link_owners(link),
                                            .force = d->force,
                                            .twin = link_is_replica(link) };
}

static int take_dropped(const struct round *round, const struct link *link,
                        const struct wire_reply *reply, struct shd_err *e)
{
    struct dropping *d = round->ctx;
    const struct wire_dropped *dropped = &reply->dropped;
    (void)e;
    CHECK(dropped->what <= WIRE_DROPPED_KEPT); /* wire.h */
    d->counts[dropped->what]++;
    if (link->index == 0 && dropped->what == WIRE_DROPPED_HELD)
        d->first = link_goes_by(link, dropped->first, dropped->instance);
    d->forgot = d->forgot || (dropped->what == WIRE_DROPPED_NONE && dropped->instance != 0);
    if (dropped->near[0] != '\0')
        snprintf(d->near, sizeof d->near, "%s", dropped->near);
    return SHD_OK;
}

/* Ask owner 0, then its replica, then the others: what the first answers counts for them, and what
 * the second has in its place (daemon/core/presence.h). */
static int ask(struct dropping *d, enum wire_drop_what what, struct shd_err *e)
{
    struct round round = { .what = "Drop",
                           .hint = "it may be busy with its memory",
                           .asks = WIRE_DROP,
                           .type = WIRE_DROPPED,
                           .make = make_request,
                           .take = take_dropped,
                           .replicated = true,
                           .to_the_end = true,
                           .ctx = d };
    d->what = what;
    memset(d->counts, 0, sizeof d->counts);
    int r = round_one(&round, &d->hub->links[0], 0, e);
    FAIL_POINT("drop:asked");
    for (uint32_t i = 1; r == SHD_OK && i < d->hub->link_count; i++)
        if (link_owner(&d->hub->links[i]) == 0)
            r = round_one(&round, &d->hub->links[i], 0, e);
    FAIL_POINT("drop:asked");
    for (uint32_t i = 1; r == SHD_OK && i < d->hub->link_count; i++)
        if (link_owner(&d->hub->links[i]) > 0)
            r = round_ask(&round, &d->hub->links[i], 0, e);
    r = round_finish(&round, d->hub, r, e);
    FAIL_POINT("drop:asked");
    return r;
}

/* What is held is let go of, where that can be said; it ends with the session, too. */
static void let_go(struct dropping *d)
{
    struct round round = { .what = "Drop (taken back)",
                           .asks = WIRE_DROP,
                           .type = WIRE_DROPPED,
                           .make = make_request,
                           .take = take_dropped,
                           .replicated = true,
                           .ctx = d };
    d->what = WIRE_DROP_UNDO;
    round_let_go(&round, d->hub);
}

static int hold(struct dropping *d, struct shd_err *e)
{
    const uint64_t start_ns = clock_now_ns();
    int r = ask(d, WIRE_DROP_HOLD, e);
    while (r == SHD_EBUSY && clock_now_ns() - start_ns < BUSY_NS) {
        let_go(d);
        usleep(BUSY_PAUSE_US);
        r = ask(d, WIRE_DROP_HOLD, e);
    }
    return r;
}

static int no_such(const struct dropping *d, struct shd_err *e)
{
    return err_set(e, SHD_ENOENT, "no model '%.60s' is open at daemon %s%s%s", d->name,
                   d->hub->links[0].device, d->hub->link_count > 1 ? " or the others" : "",
                   d->near);
}

/* Nothing is broken off from the first store on: some would have dropped it, some not. */
static int go(struct dropping *d, struct shd_err *e)
{
    const struct idle idle = d->hub->idle;
    d->hub->idle.fn = NULL;
    const int r = ask(d, WIRE_DROP_GO, e);
    d->hub->idle = idle;
    return r;
}

/* A daemon that was started again in between holds nothing: it is asked to once more. */
static int run(struct dropping *d, struct shd_err *e)
{
    bool some = false;
    for (uint32_t i = 0; i < ATTEMPTS_MAX; i++) {
        int r = hold(d, e);
        if (r != SHD_OK) {
            let_go(d);
            return r;
        }
        if (d->counts[WIRE_DROPPED_HELD] == 0)
            return some || d->forgot ? SHD_OK : no_such(d, e);
        some = true;
        r = go(d, e);
        if (r != SHD_OK || d->counts[WIRE_DROPPED_KEPT] == 0)
            return r;
    }
    let_go(d);
    return err_set(e, SHD_EGONE, "the daemons do not stay: model '%.60s' is not dropped", d->name);
}

static int check(const shd_session *s, const char *name, struct shd_err *e)
{
    const int r = session_check(s, e);
    if (r != SHD_OK)
        return r;
    if (s->hub == NULL)
        return err_set(e, SHD_ENOTSUP, "\"local:\" drops a model when it is closed");
    if (name == NULL || name[0] == '\0' || strlen(name) >= WIRE_NAME_BYTES_MAX)
        return err_set(e, SHD_EINVAL, "which model? a name of 1 to %u characters",
                       WIRE_NAME_BYTES_MAX - 1);
    return session_check_closed(s, name, e);
}

int shd_model_drop(shd_session *s, const char *name, const struct shd_drop_options *options,
                   struct shd_err *e)
{
    struct shd_drop_options o = { 0 };
    int r = options != NULL
                ? sized_take(&o, sizeof o, options, sizeof o.size, "shd_drop_options", e)
                : SHD_OK;
    if (r == SHD_OK)
        r = check(s, name, e);
    if (r == SHD_OK)
        r = replay_allows("shd_model_drop()", e);
    if (r != SHD_OK)
        return r;
    CHECK(s->hub != NULL); /* check() */
    struct dropping d = { .hub = s->hub, .name = name, .force = o.force };
    r = rejoin_session(s, e); /* a host that is in again would keep it */
    if (r == SHD_OK)
        r = run(&d, e);
    if (r != SHD_OK)
        return r;
    r = ask(&d, WIRE_DROP_WAIT, e);
    return r == SHD_OK ? r : err_prefix(e, "dropped, but its memory is not given back yet");
}
