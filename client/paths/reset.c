/* See reset.h. The owners are asked one after the other until one grants it, which is the first
 * one but where another worker commits at the same time; then all are told. Whoever dies in between
 * has told those that granted: every request of the new attempt tells the others. */
#include "client/paths/reset.h"

#include <inttypes.h>

#include "client/paths/map.h"
#include "client/session/hub.h"
#include "client/session/round.h"
#include "proto/share/board.h"

struct resetting { /* ctx of its rounds */
    const struct shd_model *m;
    uint64_t attempt;          /* the highest heard of */
    bool agreed;               /* by one that is there: */
    uint32_t losses;           /* of the hub, when it was asked */
    enum wire_reset_what what; /* the last answer */
};

uint64_t reset_attempt(const struct shd_model *m)
{
    uint64_t attempt = m->in.attempt;
    for (uint32_t i = 0; i < m->map->owner_count; i++) {
        const struct board *board = m->map->owners[i].board.base;
        const uint64_t at = board != NULL ? board_attempt(board, m->step) : 0;
        attempt = at > attempt ? at : attempt;
    }
    return attempt;
}

static void make_reset(const struct round *round, const struct link *link,
                       struct wire_request *ret_request)
{
    const struct resetting *r = round->ctx;
    const struct hub *hub = link->hub;
    ret_request->reset = (struct wire_reset){ .model = r->m->map->owners[link->index].layout.handle,
                                              .step = r->m->step,
                                              .attempt = round->arg,
                                              .agreed = r->agreed &&
                                                        r->losses == hub->members.losses };
}

static int take_answer(const struct round *round, const struct link *link,
                       const struct wire_reply *reply, struct shd_err *e)
{
    const struct wire_reset_answer *answer = &reply->reset_answer;
    struct resetting *r = round->ctx;
    if (answer->step != r->m->step)
        return link_err(link, SHD_EPROTO, e, "reset step %" PRIu64 ", asked for was step %" PRIu64,
                        answer->step, r->m->step);
    r->what = answer->what;
    if (answer->what == WIRE_RESET_DONE && answer->attempt > r->attempt)
        r->attempt = answer->attempt;
    return SHD_OK;
}

/* Until one grants it. */
static int ask(struct round *round, struct hub *hub, struct shd_err *e)
{
    struct resetting *r = round->ctx;
    uint32_t successions = hub->members.successions;
    int s = SHD_OK;
    r->agreed = false;
    r->what = WIRE_RESET_PROMISED;
    for (uint32_t i = 0; s == SHD_OK && r->what == WIRE_RESET_PROMISED && i < hub->link_count;) {
        s = round_one(round, &hub->links[i], r->m->in.attempt + 1, e);
        i = successions == hub->members.successions ? i + 1
                                                    : 0; /* who took a place was not asked there */
        successions = hub->members.successions;
    }
    if (s == SHD_OK && r->what != WIRE_RESET_DONE)
        return err_set(e, SHD_ESTEP,
                       "step %" PRIu64 " cannot be reset: its commit has %s, and the gradients "
                       "that are in count; go on with shd_commit()",
                       r->m->step, r->what == WIRE_RESET_OVER ? "been made" : "begun");
    return s;
}

int reset_owners(struct shd_model *m, uint64_t *ret_attempt, struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    struct resetting r = { .m = m };
    struct round round = { .what = "Reset",
                           .asks = WIRE_RESET,
                           .type = WIRE_RESET_ANSWER,
                           .make = make_reset,
                           .take = take_answer,
                           .replicated = true,
                           .follows = true,
                           .ctx = &r };
    int s;
    do { /* what a lost one has granted counts no more: the others may have gone on without it */
        r.losses = hub->members.losses;
        s = ask(&round, hub, e);
        r.agreed = true;
        if (s == SHD_OK && r.losses == hub->members.losses)
            s = round_all(&round, hub, r.attempt, e);
    } while (s == SHD_OK && r.losses != hub->members.losses);
    if (s == SHD_OK)
        *ret_attempt = r.attempt;
    return s;
}
