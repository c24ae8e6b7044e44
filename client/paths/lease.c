/* See lease.h. */
#include "client/paths/lease.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "client/paths/map.h"
#include "client/session/activity.h"
#include "client/session/hub.h"
#include "client/session/round.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"

struct leasing {
    struct shd_model *m; /* borrowed */
    struct round round;  /* borrowed by the hub while round.waiting > 0 */
    char what[48];
    uint32_t owner; /* who was asked */
    uint64_t step, attempt;
    bool now;
    uint32_t meet; /* > 0: so many workers wait for each other */
    struct wire_leased leased;
};

/* -- Asking ------------------------------------------------------------------------------------ */

static void make_lease(const struct round *round, const struct link *link,
                       struct wire_request *ret_request)
{
    const struct leasing *l = round->ctx;
    ret_request->lease = (struct wire_lease){ .model = l->m->map->owners[link->index].layout.handle,
                                              .step = round->arg,
                                              .attempt = l->attempt,
                                              .now = l->now,
                                              .meet = l->meet };
}

static int take_leased(const struct round *round, const struct link *link,
                       const struct wire_reply *reply, struct shd_err *e)
{
    struct leasing *l = round->ctx;
    const uint32_t groups = model_returns(l->m);
    l->leased = reply->leased;
    if (l->leased.step != round->arg)
        return link_err(link, SHD_EPROTO, e,
                        "leased work of step %" PRIu64 ", asked for was step %" PRIu64,
                        l->leased.step, round->arg);
    if (l->leased.what == WIRE_LEASED_GROUP && l->leased.group >= groups)
        return link_err(link, SHD_EPROTO, e, "leased group %" PRIu32 " of %" PRIu32,
                        l->leased.group, groups);
    return SHD_OK;
}

static int get_leasing(struct shd_model *m, struct leasing **ret_leasing, struct shd_err *e)
{
    if (m->map->leasing == NULL)
        m->map->leasing = sys_calloc(1, sizeof *m->map->leasing);
    if (m->map->leasing == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a lease");
    *ret_leasing = m->map->leasing;
    return SHD_OK;
}

struct question {
    uint32_t owner;
    bool now;
    uint32_t meet;
};

static int ask(struct leasing *l, const struct question *q, struct shd_err *e)
{
    struct shd_model *m = l->m;
    l->owner = q->owner;
    l->step = m->step;
    l->attempt = m->in.attempt;
    l->now = q->now;
    l->meet = q->meet;
    snprintf(l->what, sizeof l->what, "%s of step %" PRIu64, q->meet > 0 ? "Meeting" : "Lease",
             l->step);
    l->round = (struct round){ .what = l->what,
                               .hint = q->meet > 0
                                           ? "other workers have not come to the same point"
                                           : "other workers hold all that is left of the step",
                               .asks = WIRE_LEASE,
                               .type = WIRE_LEASED,
                               .make = make_lease,
                               .take = take_leased,
                               .ctx = l };
    return round_ask(&l->round, &m->session->hub->links[q->owner], l->step, e);
}

static int await(struct leasing *l, struct shd_err *e)
{
    const uint64_t start_ns = clock_now_ns();
    int r = SHD_OK;
    while (r == SHD_OK && l->round.waiting > 0 && l->round.err.code == SHD_OK) {
        r = round_wait(&l->round, l->m->session->hub, start_ns, e);
        activity_look(l->m);
    }
    return r;
}

/* A question of before that is still open: what it brings is of this step, or of none. */
static int ask_or_go_on(struct leasing *l, const struct question *q, struct shd_err *e)
{
    int r = l->round.waiting > 0 ? await(l, e) : SHD_OK;
    if (r != SHD_OK)
        return r;
    const bool fits = l->what[0] != '\0' && l->owner == q->owner && l->meet == q->meet &&
                      l->step == l->m->step && l->attempt == l->m->in.attempt;
    l->what[0] = fits ? l->what[0] : '\0';
    if (l->what[0] == '\0')
        r = ask(l, q, e);
    return r == SHD_OK ? await(l, e) : r;
}

static int answer_to(struct shd_model *m, const struct question *q, struct wire_leased *ret_leased,
                     struct shd_err *e)
{
    struct leasing *l = NULL;
    int r = get_leasing(m, &l, e);
    if (r != SHD_OK)
        return r;
    CHECK(l != NULL);
    l->m = m;
    activity_begin(m, ACTIVITY_LEASE, ACTIVITY_NONE, ACTIVITY_NONE);
    r = ask_or_go_on(l, q, e);
    activity_end(m);
    if (r != SHD_OK)
        return r;
    l->what[0] = '\0'; /* answered */
    if (l->round.err.code != SHD_OK)
        return err_copy(&l->round.err, e);
    *ret_leased = l->leased;
    return SHD_OK;
}

int lease_ask_owner(struct shd_model *m, uint32_t owner, bool now, struct wire_leased *ret_leased,
                    struct shd_err *e)
{
    const struct question q = { .owner = owner, .now = now };
    if (m->session->hub->links[owner].state != LINK_GONE)
        return answer_to(m, &q, ret_leased, e);
    *ret_leased = (struct wire_leased){ .step = m->step, .what = WIRE_LEASED_ALL_IN };
    return SHD_OK;
}

int lease_meet(struct shd_model *m, uint32_t workers, struct shd_err *e)
{
    const struct link *link = &m->session->hub->links[0];
    const struct question q = { .meet = workers };
    struct wire_leased leased;
    if (link->known && link->peer.level < WIRE_LEVEL_MEETS)
        return link_err(link, SHD_ENOTSUP, e,
                        "does not let workers wait for each other: it is of an older version");
    return answer_to(m, &q, &leased, e);
}

void lease_close(struct shd_model *m)
{
    if (m->map->leasing == NULL)
        return;
    hub_forget(m->session->hub, &m->map->leasing->round);
    free(m->map->leasing);
    m->map->leasing = NULL;
}

/* -- Giving back ------------------------------------------------------------------------------- */

static int make_back(struct link *link, const struct call *call, struct wire_request *ret_request,
                     struct shd_err *e)
{
    const struct shd_model *m = call->ctx;
    (void)e;
    ret_request->type = WIRE_LEASE;
    ret_request->lease = (struct wire_lease){ .model = m->map->owners[link->index].layout.handle,
                                              .step = call->step,
                                              .back = true,
                                              .group = (uint32_t)call->arg };
    return SHD_OK;
}

/* An owner that did not take it back hands it to another when it is late. */
static void taken_back(struct link *link, const struct call *call, const struct wire_reply *reply)
{
    (void)link;
    (void)call;
    (void)reply;
}

int lease_to_owners(struct shd_model *m, uint32_t group, struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    const struct call call = {
        .make = make_back, .fn = taken_back, .stays = true, .ctx = m, .arg = group, .step = m->step
    };
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < hub->link_count; i++)
        r = hub_ask(&hub->links[i], &call, e);
    return r == SHD_OK ? hub_poll(hub, /* timeout_ns= */ 0, e) : r;
}
