/* Committing a step on daemons; see commit.h.
 *
 * What is asked of whom, and what follows from the answers, is the turn's business (turn.h); here
 * it is packed, sent and waited for. A daemon that dies meanwhile is asked again by the hub.
 *
 * A worker commits a step to one owner after the other. Another one that attaches in between, or
 * after that worker died in it, finds some owners a step ahead. Those have the decision on record,
 * and anybody may pass it on: a commit that arrives twice is acknowledged. The blob goes with it.
 * The owners were asked one after the other, and other workers go on meanwhile: what does not fit
 * together is looked at again, and only what stays so is an error. */
#include "client/paths/commit.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/paths/layout.h"
#include "client/paths/look.h"
#include "client/paths/map.h"
#include "client/paths/rejoin.h"
#include "client/paths/rewind.h"
#include "client/paths/turn.h"
#include "client/session/activity.h"
#include "client/session/hub.h"
#include "client/session/link.h"
#include "client/session/membership.h"
#include "client/session/round.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/spec/guard.h"

#define HINT      "micro-batches of the step are missing, or it is stopped"
#define LOOKS_MAX 50u              /* at owners that move on each time */
#define APART_NS  (20 * NS_PER_MS) /* between two looks of who waits for others to end a step */

/* -- A turn ------------------------------------------------------------------------------------ */

struct said {           /* a member's own attempt */
    const char *device; /* borrowed: its place may change meanwhile */
    uint64_t attempt;
};

struct turning { /* ctx of a turn's round */
    struct shd_model *m;
    const struct wire_bytes *blob; /* borrowed; NULL: none */
    uint64_t attempt;
    const struct said *said; /* borrowed, [members]: instead, of each its own; NULL: none */
};

static uint64_t attempt_of(const struct turning *t, const struct link *link)
{
    for (uint32_t i = 0; t->said != NULL && i < link->hub->link_count; i++)
        if (t->said[i].device == link->device)
            return t->said[i].attempt;
    return t->attempt;
}

static int turn_err(const struct link *link, int code, struct shd_err *e)
{
    const struct shd_err why = e != NULL ? *e : (struct shd_err){ 0 };
    return code == SHD_OK ? code : link_err(link, code, e, "ends the step: %s", why.text);
}

static void make_prepare(const struct round *round, const struct link *link,
                         struct wire_request *ret_request)
{
    const struct turning *t = round->ctx;
    ret_request->prepare = (struct wire_prepare){
        .model = t->m->map->owners[link->index].layout.handle,
        .step = round->arg,
        .attempt = attempt_of(t, link),
        .unit_sums = turn_unit_sums(t->m->map->turn),
        .part_sums = turn_part_sums(t->m->map->turn),
    };
}

static int take_prepared(const struct round *round, const struct link *link,
                         const struct wire_reply *reply, struct shd_err *e)
{
    const struct turning *t = round->ctx;
    return turn_err(link, turn_prepared(t->m->map->turn, link->index, &reply->prepared, e), e);
}

static void make_commit(const struct round *round, const struct link *link,
                        struct wire_request *ret_request)
{
    const struct turning *t = round->ctx;
    const struct decision *d = turn_decision(t->m->map->turn);
    const bool has_blob = t->blob != NULL && d->put == 0; /* a put leaves the last one */
    ret_request->commit = (struct wire_commit){
        .model = t->m->map->owners[link->index].layout.handle,
        .step = round->arg,
        .decision = *d,
        .has_blob = has_blob,
    };
    ret_request->commit.attempt = attempt_of(t, link);
    ret_request->commit.recorded = link->index > 0;
    ret_request->commit.norm = turn_norm(t->m->map->turn);
    if (has_blob)
        ret_request->commit.blob = *t->blob;
    const double *norms = link_owner(link) == 0 ? turn_unit_norms(t->m->map->turn) : NULL;
    if (norms != NULL)
        ret_request->commit.unit_norms = (struct wire_bytes){
            (const uint8_t *)norms, t->m->spec->guard->columns * sizeof *norms
        };
}

static int take_committed(const struct round *round, const struct link *link,
                          const struct wire_reply *reply, struct shd_err *e)
{
    const struct turning *t = round->ctx;
    return turn_err(link, turn_committed(t->m->map->turn, link->index, &reply->committed, e), e);
}

/* Ask owners what the turn asks of them in this state, as it names them, until it is in another. */
static int turn_round(struct turning *t, enum turn_state state, struct shd_err *e)
{
    struct hub *hub = t->m->session->hub;
    struct turn *turn = t->m->map->turn;
    const bool prepare = state == TURN_PREPARING;
    const uint64_t start_ns = clock_now_ns();
    char what[48];
    uint32_t owner, anew = turn_anew(turn);
    enum turn_kind kind;
    snprintf(what, sizeof what, "%s of step %" PRIu64, prepare ? "Prepare" : "Commit",
             turn_step(turn));
    struct round round = { .what = what,
                           .hint = prepare ? HINT : NULL,
                           .asks = prepare ? WIRE_PREPARE : WIRE_COMMIT,
                           .type = prepare ? WIRE_PREPARED : WIRE_COMMITTED,
                           .make = prepare ? make_prepare : make_commit,
                           .take = prepare ? take_prepared : take_committed,
                           .replicated = true,
                           .follows = true,
                           .fault = prepare ? &t->m->fault : NULL,
                           .ctx = t };
    int r = SHD_OK;
    while (r == SHD_OK && turn_state(turn) == state && round.err.code == SHD_OK) {
        if (turn_anew(turn) != anew) {
            round_forget(&round, hub);
            anew = turn_anew(turn);
        } else if (turn_next(turn, &owner, &kind)) {
            r = round_ask(&round, &hub->links[owner], turn_step(turn), e);
            if (r == SHD_OK)
                turn_asked(turn, owner, kind);
        } else if (round.waiting > 0) {
            r = round_wait(&round, hub, start_ns, e);
            activity_look(t->m);
        } else {
            break;
        }
    }
    if (round.err.code == SHD_OK && turn_state(turn) != state) {
        round_forget(&round, hub); /* OVER: the others need not answer */
        return r;
    }
    return round_finish(&round, hub, r, e);
}

/* A host that is lost before the decision is on record has the turn prepare once more. */
static int commit_turn(struct turning *t, struct shd_err *e)
{
    struct shd_model *m = t->m;
    int r;
    do {
        activity_begin(m, ACTIVITY_PREPARE, ACTIVITY_NONE, ACTIVITY_NONE);
        r = turn_round(t, TURN_PREPARING, e);
        activity_end(m);
        if (r != SHD_OK || turn_state(m->map->turn) != TURN_COMMITTING)
            return r;
        activity_begin(m, ACTIVITY_COMMIT, ACTIVITY_NONE, ACTIVITY_NONE);
        r = turn_round(t, TURN_COMMITTING, e);
        activity_end(m);
    } while (r == SHD_OK && turn_state(m->map->turn) == TURN_PREPARING);
    return r;
}

/* Of a model with a guard what rules of units need. */
static int watch_units(struct shd_model *m, struct turn_update *update, struct shd_err *e)
{
    const struct guard *guard = m->spec->guard;
    if (guard == NULL)
        return SHD_OK;
    update->watched = guard->watched;
    if (guard->columns == 0)
        return SHD_OK;
    if (m->map->unit_norms == NULL)
        m->map->unit_norms = sys_calloc(guard->columns, sizeof *m->map->unit_norms);
    if (m->map->unit_norms == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the norms of %" PRIu32 " units",
                       guard->columns);
    update->column = guard->column;
    update->columns = guard->columns;
    update->norms = m->map->unit_norms;
    return SHD_OK;
}

int commit_step(struct shd_model *m, const struct decide_args *args, const struct wire_bytes *blob,
                struct decided *ret_decided, struct shd_err *e)
{
    struct turn_update decide = { .args = *args,
                                  .units = m->spec->unit_count,
                                  .groups = m->spec->guard_audit ? model_returns(m) : 0 };
    struct turning t = { .m = m, .blob = blob, .attempt = m->in.attempt };
    const int watching = watch_units(m, &decide, e);
    if (watching != SHD_OK)
        return watching;
    turn_begin(m->map->turn, m->step, &decide);
    const int r = commit_turn(&t, e);
    m->sealed = m->sealed || turn_state(m->map->turn) != TURN_PREPARING ||
                turn_unit_sums(m->map->turn) > 0;
    /* One that is out contradicts the others. */
    if (r == SHD_EINTERNAL && membership_news(m->session->hub)) {
        *ret_decided = (struct decided){ .over = true };
        return SHD_OK;
    }
    if (r == SHD_OK)
        *ret_decided = turn_decided(m->map->turn);
    return r;
}

/* -- Owners one step apart --------------------------------------------------------------------- */

struct steps {
    uint64_t min, max;
    uint32_t ahead, behind; /* the first owner with the highest, with the lowest step */
};

static struct steps find_steps(const struct shd_model *m)
{
    const struct map_model *map = m->map;
    struct steps s = { map->owners[0].layout.step, map->owners[0].layout.step, 0, 0 };
    for (uint32_t i = 1; i < map->member_count; i++) {
        const uint64_t step = map->owners[i].layout.step;
        if (hub_lost(m->session->hub, i))
            continue;
        if (step < s.min) {
            s.min = step;
            s.behind = i;
        }
        if (step > s.max) {
            s.max = step;
            s.ahead = i;
        }
    }
    return s;
}

/* As the owners have said, and not as they will: one that has begun another attempt since, or went
 * back, is not to take this for a request of that. NULL: no memory. */
static struct said *attempts_of(const struct shd_model *m)
{
    const struct link *links = m->session->hub->links;
    struct said *said = sys_calloc(m->map->member_count, sizeof *said);
    for (uint32_t i = 0; said != NULL && i < m->map->member_count; i++)
        said[i] = (struct said){ links[i].device, m->map->owners[i].layout.attempt };
    return said;
}

static uint32_t count_gone(const struct shd_model *m)
{
    uint32_t gone = 0;
    for (uint32_t i = 0; i < m->map->member_count; i++)
        gone += hub_lost(m->session->hub, i);
    return gone;
}

/* Micro-batches of the step that an owner is at: as its last decision, or the spec, says. */
static uint32_t micros_at(const struct shd_model *m, uint32_t owner)
{
    const struct map_layout *l = &m->map->owners[owner].layout;
    return l->decided && l->decision.micro_batches > 0 ? l->decision.micro_batches
                                                       : spec_micro_batches(m->spec, l->step);
}

/* Commit the step before s.max to all. *ret_over: it is no longer on record, so the owners moved
 * on, or back; or one was lost meanwhile, and its place is that of another one, which said other
 * things. */
static int pass_on(struct shd_model *m, struct steps s, bool *ret_over, struct shd_err *e)
{
    struct turn_update update = { .args = { .micro_batches = micros_at(m, s.behind) },
                                  .recorded_only = true };
    size_t bytes;
    const uint32_t gone = count_gone(m);
    struct said *said = attempts_of(m);
    void *data = sys_malloc(SHD_BLOB_BYTES_MAX);
    int r = data != NULL && said != NULL ? SHD_OK : err_set(e, SHD_ENOMEM, "no memory for a blob");
    if (r == SHD_OK)
        r = watch_units(m, &update, e);
    if (r == SHD_OK)
        r = look_blob(m, s.ahead, data, SHD_BLOB_BYTES_MAX, &bytes, e);
    if (r == SHD_OK && count_gone(m) == gone) {
        const struct wire_bytes blob = { data, bytes };
        struct turning t = { .m = m, .blob = &blob, .said = said };
        m->step = s.min;
        turn_begin(m->map->turn, m->step, &update);
        r = commit_turn(&t, e);
    }
    free(data);
    free(said);
    if (r == SHD_EINTERNAL && membership_news(m->session->hub))
        r = SHD_ERESET;
    *ret_over = r == SHD_ERESET ||
                (r == SHD_OK && (count_gone(m) != gone || turn_state(m->map->turn) == TURN_OVER));
    return r == SHD_ERESET ? SHD_OK : r;
}

/* m->in becomes the groups that are in at every owner, in the last attempt that any has begun. */
static void take_in(struct shd_model *m)
{
    const struct map_model *map = m->map;
    m->in = (struct groups_in){ .step = m->step };
    for (uint32_t i = 0; i < map->member_count; i++)
        if (!hub_lost(m->session->hub, i) && map->owners[i].layout.attempt > m->in.attempt)
            m->in.attempt = map->owners[i].layout.attempt;
    memset(m->in.groups, 0xff, sizeof m->in.groups);
    for (uint32_t i = 0; i < map->member_count; i++) {
        const struct map_layout *l = &map->owners[i].layout;
        if (hub_lost(m->session->hub, i))
            continue;
        const bool counts = l->step == m->step && l->attempt == m->in.attempt;
        for (size_t b = 0; b < sizeof m->in.groups; b++)
            m->in.groups[b] &= counts ? l->in[b] : 0;
    }
}

/* rewound: the rewind that all owners have gone along with. One that came since is not known of. */
static void settled(struct shd_model *m, struct steps s, uint64_t rewound)
{
    const struct map_layout *ahead = &m->map->owners[s.ahead].layout;
    m->step = s.max;
    m->map->rewound = rewound;
    m->decided = false; /* where it went back to its beginning there is none */
    if (ahead->decided)
        model_decided(m, &ahead->decision);
    take_in(m);
}

/* An owner that is passed has all gradients of its step: the commit of the other needed them,
 * unless it was a put. One that lacks some was asked before that commit; or it has lost its state,
 * and begins anew. */
static bool can_follow(const struct shd_model *m, struct steps s)
{
    const struct map_model *map = m->map;
    const uint32_t groups = micros_at(m, s.behind) / m->spec->accumulate;
    const struct map_layout *ahead = &map->owners[s.ahead].layout;
    const bool put = ahead->decided && ahead->decision.put != 0;
    for (uint32_t i = 0; !put && i < map->member_count; i++)
        for (uint32_t g = 0;
             !hub_lost(m->session->hub, i) && map->owners[i].layout.step == s.min && g < groups;
             g++)
            if ((map->owners[i].layout.in[g / 8] & 1u << g % 8) == 0)
                return false;
    return s.min + 1 == s.max;
}

static int err_apart(const struct shd_model *m, struct steps s, struct shd_err *e)
{
    const struct link *links = m->session->hub->links;
    return link_err(&links[s.behind], SHD_ESTEP, e,
                    "has model '%s' at step %" PRIu64 ", daemon %s has it at step %" PRIu64
                    ": %s lost its state, or they were not run together; restore a checkpoint",
                    m->spec->name, s.min, links[s.ahead].device, s.max, links[s.behind].device);
}

/* Who only reads ends no step of others: a worker does, that is at it or that comes. */
static int await_worker(const struct shd_model *m, struct steps s, uint64_t start_ns,
                        struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    const uint64_t left_ns = hub_left_ns(hub, start_ns, APART_NS);
    if (left_ns > 0)
        return hub_poll(hub, left_ns, e);
    return link_err(&hub->links[s.behind], SHD_ETIMEDOUT, e,
                    "has model '%s' at step %" PRIu64 ", which daemon %s has ended: a worker that "
                    "opens the model ends it everywhere, and none did",
                    m->spec->name, s.min, hub->links[s.ahead].device);
}

static bool same_steps(struct steps a, struct steps b)
{
    return a.min == b.min && a.max == b.max;
}

/* Ask once more, and take only what can change: steps and decisions. */
static int refresh(struct shd_model *m, struct shd_err *e)
{
    struct layout_opening o = { .m = m, .name = m->spec->name };
    struct hub *hub = m->session->hub;
    uint32_t successions = hub->members.successions;
    int r = layout_ask_all(&o, e);
    while (r == SHD_EGONE && hub->members.successions != successions &&
           hub_check(hub, NULL) == SHD_OK) {
        successions = hub->members.successions; /* its replica is the owner now */
        r = layout_ask_all(&o, e);
    }
    for (uint32_t i = 0; r == SHD_OK && i < hub->link_count; i++) { /* let go of the tickets */
        if (hub_lost(m->session->hub, i))
            continue;
        r = segments_take(m, &hub->links[i], &m->map->owners[i].layout, /* wanted= */ 0, e);
        r = r == SHD_EGONE ? SHD_OK : r; /* and so they are gone */
    }
    if (r == SHD_ECANCELED)
        hub_renew(hub);
    return r;
}

/* Has an owner answered before it went back, or has one not gone yet? Then they go together.
 * *ret_newest: the last rewind, that all have gone along with where that is not so. */
static int look_back(struct shd_model *m, uint64_t *ret_newest, bool *ret_again, struct shd_err *e)
{
    uint64_t to;
    const int r = rewind_together(m, ret_again, e);
    const uint64_t newest = *ret_newest = rewind_newest(m, &to);
    for (uint32_t i = 0; i < m->map->member_count; i++)
        *ret_again = *ret_again ||
                     (!hub_lost(m->session->hub, i) && m->map->owners[i].layout.attempt < newest);
    return r;
}

/* Else hosts may have come in with that rewind. */
static bool has_viewed(const struct shd_model *m, uint64_t rewound)
{
    return m->session->hub->members.membership == NULL || rewound <= m->map->viewed_rewound;
}

int settle_steps(struct shd_model *m, struct shd_err *e)
{
    struct steps s = find_steps(m), before = { UINT64_MAX, UINT64_MAX, 0, 0 };
    const uint64_t start_ns = clock_now_ns();
    uint64_t rewound = 0;
    for (uint32_t look = 0;; look++) {
        bool over = true, again = false;
        int r = rejoin_look(m, /* opening= */ NULL, &again, e);
        if (r == SHD_OK && !again)
            r = look_back(m, &rewound, &again, e);
        again = again || !has_viewed(m, rewound);
        if (r == SHD_OK && !again && s.min == s.max)
            break;
        if (r == SHD_OK && !again && can_follow(m, s) && m->session->reads) {
            r = await_worker(m, s, start_ns, e);
            again = true;
            look = 0;
        } else if (r == SHD_OK && !again && can_follow(m, s)) {
            r = pass_on(m, s, &over, e);
            again = over; /* whatever it is that they did */
        }
        if (r == SHD_OK && !over)
            break;
        if (r == SHD_OK && ((!again && same_steps(s, before)) || look >= LOOKS_MAX) &&
            !membership_news(m->session->hub)) /* one that is out stays behind */
            r = err_apart(m, s, e);
        if (r == SHD_OK)
            r = refresh(m, e);
        if (r != SHD_OK)
            return r;
        before = s;
        s = find_steps(m);
    }
    settled(m, s, rewound);
    return SHD_OK;
}

int settle_catch_up(struct shd_model *m, struct shd_err *e)
{
    int r;
    do {
        r = rejoin_due(m->session, e);
        if (r == SHD_OK)
            r = refresh(m, e);
        if (r == SHD_OK)
            r = settle_steps(m, e);
    } while (r == SHD_ERESET && rejoin_is_due(m));
    return r;
}
