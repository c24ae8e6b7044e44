/* Committing a step on daemons, and asking for work; see commit.h.
 *
 * What is asked of whom, and what follows from the answers, is the turn's business (turn.h); here
 * it is packed, sent and waited for. A daemon that dies meanwhile is asked again by the hub. */
#include "client/paths/commit.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "client/paths/map.h"
#include "client/paths/turn.h"
#include "client/session/activity.h"
#include "client/session/hub.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

#define HINT "micro-batches of the step are missing, or it is stopped"

/* -- A turn ------------------------------------------------------------------------------------ */

struct turning { /* ctx of a turn's round */
    struct shd_model *m;
    const struct wire_bytes *blob; /* borrowed; NULL: none */
};

static int turn_err(const struct link *link, int code, struct shd_err *e)
{
    const struct shd_err why = e != NULL ? *e : (struct shd_err){ 0 };
    return code == SHD_OK ? code : link_err(link, code, e, "ends the step: %s", why.text);
}

static int make_prepare(struct round *round, struct link *link, uint64_t step,
                        struct wire_request *ret_request, struct shd_err *e)
{
    const struct turning *t = round->ctx;
    (void)e;
    ret_request->type = WIRE_PREPARE;
    ret_request->prepare = (struct wire_prepare){
        .model = t->m->map->owners[link->index].layout.handle, .step = step
    };
    return SHD_OK;
}

static int take_prepared(struct round *round, struct link *link, uint64_t step,
                         const struct wire_reply *reply, struct shd_err *e)
{
    const struct turning *t = round->ctx;
    (void)step;
    return turn_err(link, turn_prepared(t->m->map->turn, link->index, &reply->prepared, e), e);
}

static int make_commit(struct round *round, struct link *link, uint64_t step,
                       struct wire_request *ret_request, struct shd_err *e)
{
    const struct turning *t = round->ctx;
    (void)e;
    ret_request->type = WIRE_COMMIT;
    ret_request->commit = (struct wire_commit){
        .model = t->m->map->owners[link->index].layout.handle,
        .step = step,
        .decision = *turn_decision(t->m->map->turn),
        .has_blob = t->blob != NULL,
    };
    if (t->blob != NULL)
        ret_request->commit.blob = *t->blob;
    return SHD_OK;
}

static int take_committed(struct round *round, struct link *link, uint64_t step,
                          const struct wire_reply *reply, struct shd_err *e)
{
    const struct turning *t = round->ctx;
    (void)step;
    return turn_err(link, turn_committed(t->m->map->turn, link->index, &reply->committed, e), e);
}

/* Ask all owners what the turn's state asks of them, until it is in another one. */
static int turn_round(struct turning *t, enum turn_state state, struct shd_err *e)
{
    struct hub *hub = t->m->session->hub;
    struct turn *turn = t->m->map->turn;
    const bool prepare = state == TURN_PREPARING;
    const uint64_t start_ns = clock_now_ns();
    char what[48];
    uint32_t owner;
    enum turn_kind kind;
    snprintf(what, sizeof what, "%s of step %" PRIu64, prepare ? "Prepare" : "Commit",
             turn_step(turn));
    struct round round = { .what = what,
                           .hint = prepare ? HINT : NULL,
                           .type = prepare ? WIRE_PREPARED : WIRE_COMMITTED,
                           .make = prepare ? make_prepare : make_commit,
                           .take = prepare ? take_prepared : take_committed,
                           .ctx = t };
    int r = SHD_OK;
    while (r == SHD_OK && turn_state(turn) == state && turn_next(turn, &owner, &kind)) {
        r = round_ask(&round, &hub->links[owner], turn_step(turn), e);
        if (r == SHD_OK)
            turn_asked(turn, owner, kind);
    }
    while (r == SHD_OK && turn_state(turn) == state && round.waiting > 0 &&
           round.err.code == SHD_OK) {
        r = round_wait(&round, hub, start_ns, e);
        activity_look(t->m);
    }
    if (round.err.code == SHD_OK && turn_state(turn) != state) {
        hub_forget(hub, &round); /* OVER: the others need not answer */
        return r;
    }
    return round_finish(&round, hub, r, e);
}

int commit_turn(struct shd_model *m, const struct wire_bytes *blob, struct shd_err *e)
{
    struct turning t = { m, blob };
    activity_begin(m, ACTIVITY_PREPARE, ACTIVITY_NONE, ACTIVITY_NONE);
    int r = turn_round(&t, TURN_PREPARING, e);
    activity_end(m);
    if (r != SHD_OK || turn_state(m->map->turn) != TURN_COMMITTING)
        return r;
    activity_begin(m, ACTIVITY_COMMIT, ACTIVITY_NONE, ACTIVITY_NONE);
    r = turn_round(&t, TURN_COMMITTING, e);
    activity_end(m);
    return r;
}

int commit_step(struct shd_model *m, const struct decide_args *args, const struct wire_bytes *blob,
                struct decided *ret_decided, struct shd_err *e)
{
    const struct turn_update decide = { .args = *args };
    turn_begin(m->map->turn, m->step, &decide);
    const int r = commit_turn(m, blob, e);
    m->sealed = m->sealed || turn_state(m->map->turn) != TURN_PREPARING;
    if (r == SHD_OK)
        *ret_decided = turn_decided(m->map->turn);
    return r;
}

/* -- Work -------------------------------------------------------------------------------------- */

struct leasing { /* ctx of the round */
    const struct shd_model *m;
    struct wire_leased leased;
};

static int make_lease(struct round *round, struct link *link, uint64_t step,
                      struct wire_request *ret_request, struct shd_err *e)
{
    const struct leasing *l = round->ctx;
    (void)e;
    ret_request->type = WIRE_LEASE;
    ret_request->lease = (struct wire_lease){ .model = l->m->map->owners[link->index].layout.handle,
                                              .step = step };
    return SHD_OK;
}

static int take_leased(struct round *round, struct link *link, uint64_t step,
                       const struct wire_reply *reply, struct shd_err *e)
{
    struct leasing *l = round->ctx;
    const uint32_t groups = spec_returns(l->m->spec);
    l->leased = reply->leased;
    if (l->leased.step != step)
        return link_err(link, SHD_EPROTO, e,
                        "leased work of step %" PRIu64 ", asked for was step %" PRIu64,
                        l->leased.step, step);
    if (l->leased.what == WIRE_LEASED_GROUP && l->leased.group >= groups)
        return link_err(link, SHD_EPROTO, e, "leased group %" PRIu32 " of %" PRIu32,
                        l->leased.group, groups);
    return SHD_OK;
}

int commit_lease(struct shd_model *m, uint32_t owner, struct wire_leased *ret_leased,
                 struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    struct leasing leasing = { .m = m };
    char what[48];
    snprintf(what, sizeof what, "Lease of step %" PRIu64, m->step);
    struct round round = { .what = what,
                           .hint = "other workers hold all that is left of the step",
                           .type = WIRE_LEASED,
                           .make = make_lease,
                           .take = take_leased,
                           .ctx = &leasing };
    activity_begin(m, ACTIVITY_LEASE, ACTIVITY_NONE, ACTIVITY_NONE);
    int r = round_ask(&round, &hub->links[owner], m->step, e);
    r = round_finish(&round, hub, r, e);
    activity_end(m);
    if (r == SHD_OK)
        *ret_leased = leasing.leased;
    return r;
}
