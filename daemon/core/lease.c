/* See lease.h. */
#include "daemon/core/lease.h"

#include <string.h>

#include "daemon/core/step.h"
#include "daemon/core/verify.h"
#include "proto/base/check.h"

#define SAMPLES 15u /* the median of so many is the usual time */

struct group {
    uint64_t session[2]; /* 0: nobody; [1] only with [0] */
    uint64_t since_ns[2];
    uint32_t place[2]; /* of struct worker: where the session was when it got it */
    bool handed;       /* by this owner, in this step */
};

struct worker {          /* a session that has asked */
    uint64_t session;    /* 0: none */
    uint64_t seen_ns;    /* when it asked last */
    uint64_t took_ns[2]; /* for its last groups; 0: unknown */
    bool busy;           /* it has not asked since it got `group` of `step`, or that is not in */
    uint32_t group;
    uint64_t step, since_ns;
    uint64_t refused_step;  /* the last one in which it got nothing because it is slow */
    uint32_t refused_steps; /* since it had a group */
};

struct checker {      /* who has the verified group beside those who hold it */
    uint64_t session; /* 0: nobody */
    uint64_t since_ns;
};

struct lease {
    uint32_t count;
    bool cautious;   /* in this step */
    bool was_warned; /* cautious where others may have handed groups out */
    bool began;      /* `step` means something */
    uint64_t step;
    uint64_t first_asked_ns; /* for this step */
    struct verify *verify;   /* borrowed; NULL: nothing is verified */
    struct checker checker;
    uint64_t all_in_ns; /* since when only copies to be verified are missing; 0: it is not so */
    uint64_t due_ns;    /* the earliest at which one that waits may get something */
    uint64_t sample_ns[SAMPLES];
    uint64_t samples;  /* ever taken */
    uint64_t usual_ns; /* their median */
    struct worker worker[LEASE_WORKERS];
    struct group group[];
};

struct asking { /* one question */
    const struct step *core;
    struct worker *worker;
    uint64_t now_ns;
    uint32_t verified; /* the group that is; the number of groups: none */
};

size_t lease_bytes(uint32_t groups)
{
    CHECK(groups > 0);
    return sizeof(struct lease) + groups * sizeof(struct group);
}

struct lease *lease_init(void *memory, uint32_t groups, bool cautious)
{
    struct lease *l = memory;
    memset(l, 0, lease_bytes(groups));
    l->count = groups;
    l->cautious = l->was_warned = cautious;
    l->usual_ns = LEASE_UNKNOWN_NS;
    return l;
}

/* -- Time -------------------------------------------------------------------------------------- */

static uint64_t min_ns(uint64_t a_ns, uint64_t b_ns)
{
    return a_ns < b_ns ? a_ns : b_ns;
}

static uint64_t max_ns(uint64_t a_ns, uint64_t b_ns)
{
    return a_ns > b_ns ? a_ns : b_ns;
}

/* A time in the future counts as now: clocks may be set. */
static uint64_t age_ns(uint64_t since_ns, uint64_t now_ns)
{
    return now_ns > since_ns ? now_ns - since_ns : 0;
}

static uint64_t usual_ns(const struct lease *l)
{
    return l->usual_ns;
}

static void take_sample(struct lease *l, uint64_t took_ns)
{
    uint64_t sorted[SAMPLES] = { 0 };
    l->sample_ns[l->samples++ % SAMPLES] = took_ns;
    const uint32_t count = l->samples < SAMPLES ? (uint32_t)l->samples : SAMPLES;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = i;
        for (; at > 0 && sorted[at - 1] > l->sample_ns[i]; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = l->sample_ns[i];
    }
    l->usual_ns = sorted[count / 2];
}

/* The time a session is expected to take for a group; w NULL: it is not known. It is never much
 * less than usual: a session that once had next to nothing to compute is not that fast. */
static uint64_t takes_ns(const struct lease *l, const struct worker *w)
{
    const uint64_t usual = usual_ns(l);
    if (w == NULL || w->took_ns[0] == 0)
        return usual;
    const uint64_t took = w->took_ns[1] == 0 ? w->took_ns[0] : min_ns(w->took_ns[0], w->took_ns[1]);
    return max_ns(took, usual / 2);
}

/* The time after which a session is not counted on any more. */
static uint64_t late_ns(const struct lease *l, const struct worker *w)
{
    return takes_ns(l, w) + usual_ns(l) + LEASE_OVERDUE_NS;
}

static uint64_t grace_ends_ns(const struct lease *l)
{
    const uint64_t grace = l->samples == 0 ? 0 : 2 * usual_ns(l);
    return l->first_asked_ns + max_ns(grace, LEASE_GRACE_NS);
}

/* Requests that wait are to be asked again at at_ns. */
static void note_due(struct lease *l, uint64_t at_ns, uint64_t now_ns)
{
    if (at_ns > now_ns && (l->due_ns <= now_ns || at_ns < l->due_ns))
        l->due_ns = at_ns;
}

/* -- Workers ----------------------------------------------------------------------------------- */

static const struct worker *find_worker(const struct lease *l, uint64_t session)
{
    for (uint32_t i = 0; i < LEASE_WORKERS; i++)
        if (l->worker[i].session == session)
            return &l->worker[i];
    return NULL;
}

/* The one that holds a group: [0] first, [1] the backup. It may have another place by now. */
static const struct worker *find_holder(const struct lease *l, const struct group *g, uint32_t i)
{
    const struct worker *w = &l->worker[g->place[i]];
    return w->session == g->session[i] ? w : find_worker(l, g->session[i]);
}

/* A new session takes the place of the one that has not asked for longest, when all are taken. */
static struct worker *know_worker(struct lease *l, uint64_t session)
{
    struct worker *place = &l->worker[0];
    for (uint32_t i = 0; i < LEASE_WORKERS; i++) {
        struct worker *w = &l->worker[i];
        if (w->session == session)
            return w;
        if (place->session != 0 && (w->session == 0 || w->seen_ns < place->seen_ns))
            place = w;
    }
    *place = (struct worker){ .session = session };
    return place;
}

/* A session that asks has done the group it had, or has dropped it because the step is over. */
static void note_done(struct lease *l, const struct asking *q)
{
    struct worker *w = q->worker;
    const bool over = w->step != step_collecting(q->core);
    if (!w->busy || (!over && !step_micro_came(q->core, w->group)))
        return;
    const uint64_t took = max_ns(age_ns(w->since_ns, q->now_ns), 1);
    w->busy = false;
    if (!over) {
        w->took_ns[1] = w->took_ns[0];
        w->took_ns[0] = took;
        take_sample(l, took);
    } else { /* at least that long */
        w->took_ns[0] = max_ns(w->took_ns[0], took);
        w->took_ns[1] = max_ns(w->took_ns[1], took);
    }
}

/* The other session is clearly faster, and was heard of so lately that it can be counted on. */
static bool is_ahead(const struct lease *l, const struct worker *other, const struct asking *q)
{
    return other != q->worker && other->session != 0 &&
           takes_ns(l, other) < takes_ns(l, q->worker) / 3 * 2 &&
           age_ns(other->seen_ns, q->now_ns) <= late_ns(l, other);
}

/* The time a session still takes for the group it got at since_ns. */
static uint64_t left_ns(const struct lease *l, const struct worker *w, uint64_t since_ns,
                        uint64_t now_ns)
{
    const uint64_t takes = takes_ns(l, w), age = age_ns(since_ns, now_ns);
    return takes > age ? takes - age : 0;
}

/* The number of groups that a session will have done within ns from now. */
static uint64_t will_do(const struct lease *l, const struct worker *w, uint64_t ns, uint64_t now_ns)
{
    const bool busy = w->busy && w->step == l->step;
    const uint64_t left = busy ? left_ns(l, w, w->since_ns, now_ns) : 0;
    return left < ns ? (ns - left) / max_ns(takes_ns(l, w), 1) : 0;
}

/* -- Groups ------------------------------------------------------------------------------------ */

/* A step begins with the first question about it: nobody holds anything of it. */
static void begin_step(struct lease *l, const struct step *core, uint64_t now_ns)
{
    const bool nothing_in = step_cells_in(core) == 0 && step_cells_waiting(core) == 0;
    l->cautious = l->was_warned && (!l->began || !nothing_in);
    l->began = true;
    l->step = step_collecting(core);
    l->first_asked_ns = now_ns;
    l->due_ns = l->all_in_ns = 0;
    l->checker = (struct checker){ 0 };
    memset(l->group, 0, l->count * sizeof l->group[0]);
}

/* How long its session takes for it is measured from now on. */
static void note_handed(const struct lease *l, uint32_t group, const struct asking *q)
{
    struct worker *w = q->worker;
    w->refused_steps = 0;
    if (w->busy && w->step == l->step && !step_micro_came(q->core, w->group))
        return; /* it has that one still */
    w->busy = true;
    w->group = group;
    w->step = l->step;
    w->since_ns = q->now_ns;
}

static void hand_out(struct lease *l, uint32_t group, const struct asking *q)
{
    struct group *g = &l->group[group];
    const uint32_t holder = g->session[0] == 0 ? 0 : 1;
    g->session[holder] = q->worker->session;
    g->since_ns[holder] = q->now_ns;
    g->place[holder] = (uint32_t)(q->worker - l->worker);
    g->handed = true;
    note_handed(l, group, q);
}

static bool has(const struct group *g, uint64_t session)
{
    return g->session[0] == session || g->session[1] == session;
}

static bool held_back(const struct lease *l, const struct group *g, uint64_t now_ns)
{
    return l->cautious && !g->handed && now_ns < grace_ends_ns(l);
}

/* The groups that can be handed out and were not. lowest, highest: l->count when there is none. */
struct left {
    uint32_t count, lowest, highest;
};

static struct left find_left(struct lease *l, const struct asking *q, uint32_t *ret_missing)
{
    struct left left = { 0, l->count, l->count };
    const uint32_t groups = step_returns(q->core);
    CHECK(groups <= l->count);
    *ret_missing = 0;
    for (uint32_t i = 0; i < groups; i++) {
        const struct group *g = &l->group[i];
        if (step_micro_in(q->core, i))
            continue;
        ++*ret_missing;
        if (g->session[0] != 0 || i == q->verified)
            continue;
        if (held_back(l, g, q->now_ns)) {
            note_due(l, grace_ends_ns(l), q->now_ns);
            continue;
        }
        if (left.count++ == 0)
            left.lowest = i;
        left.highest = i;
    }
    return left;
}

/* The group to hand out, or l->count when the step is over sooner without this session. */
static uint32_t choose_left(struct lease *l, const struct asking *q, const struct left *left)
{
    struct worker *w = q->worker;
    const uint64_t takes = takes_ns(l, w);
    uint64_t others = 0, until_ns = UINT64_MAX;
    for (uint32_t i = 0; i < LEASE_WORKERS; i++) {
        const struct worker *other = &l->worker[i];
        if (!is_ahead(l, other, q))
            continue;
        others += will_do(l, other, takes, q->now_ns);
        until_ns = min_ns(until_ns, other->seen_ns + late_ns(l, other) + 1);
    }
    if (until_ns == UINT64_MAX)
        return left->lowest;
    if (others < left->count)
        return left->highest;
    if (w->refused_steps == 0 || w->refused_step != l->step)
        w->refused_steps++;
    w->refused_step = l->step;
    if (w->refused_steps > LEASE_TRIAL)
        return left->highest;
    note_due(l, until_ns, q->now_ns);
    return l->count;
}

/* The time of the last hand-out of a group. */
static uint64_t last_handed_ns(const struct group *g)
{
    return g->session[1] != 0 ? g->since_ns[1] : g->since_ns[0];
}

/* The time from which a group counts as late for this session. A session that would have it much
 * later than another one does not begin it: the other is asked as well. */
static uint64_t late_at_ns(const struct lease *l, const struct group *g, const struct worker *w)
{
    const struct worker *holder = find_holder(l, g, g->session[1] != 0);
    return last_handed_ns(g) + takes_ns(l, holder) + max_ns(usual_ns(l), takes_ns(l, w)) +
           LEASE_OVERDUE_NS + 1;
}

/* The time in which a group is expected from its only holder; 0: it has two. */
static uint64_t expected_ns(const struct lease *l, const struct group *g, uint64_t now_ns)
{
    return g->session[1] != 0 ? 0 : left_ns(l, find_holder(l, g, 0), g->since_ns[0], now_ns);
}

/* -- The group that is verified -----------------------------------------------------------------
 */

/* It has the group, or its copy is here. */
static bool takes_part(const struct lease *l, uint32_t group, uint64_t session)
{
    return has(&l->group[group], session) || l->checker.session == session ||
           verify_is_whole(l->verify, session);
}

/* Copies that are here or on their way, each of another session. */
static uint32_t copies_of(const struct lease *l, uint32_t group)
{
    const struct group *g = &l->group[group];
    const uint64_t sessions[] = { g->session[0], g->session[1], l->checker.session };
    uint32_t copies = verify_whole(l->verify);
    for (size_t i = 0; i < sizeof sessions / sizeof sessions[0]; i++)
        copies += sessions[i] != 0 && !verify_is_whole(l->verify, sessions[i]);
    return copies;
}

static bool checker_is_busy(const struct lease *l)
{
    return l->checker.session != 0 && !verify_is_whole(l->verify, l->checker.session);
}

/* A session that has no part in it, and has asked so lately that it may yet. */
static bool may_come(const struct lease *l, const struct worker *w, const struct asking *q)
{
    return w != q->worker && w->session != 0 && !takes_part(l, q->verified, w->session) &&
           age_ns(w->seen_ns, q->now_ns) <= late_ns(l, w);
}

/* Fewer others than are still needed were looked at a longer time ago than this session. */
static bool has_its_turn(const struct lease *l, const struct asking *q, uint32_t needed)
{
    const uint64_t last = verify_last_step(l->verify, q->worker->session);
    uint32_t before = 0;
    for (uint32_t i = 0; i < LEASE_WORKERS; i++) {
        const struct worker *w = &l->worker[i];
        before += may_come(l, w, q) && verify_last_step(l->verify, w->session) < last;
    }
    return before < needed;
}

/* Is the session to compute the group that is verified? left: of the others, not handed out. A copy
 * that is not looked at is never whole: where workers that died half way have left no room for one,
 * whoever came would be waited for, and would not be what was waited for. */
static bool is_to_verify(struct lease *l, const struct asking *q, uint32_t left)
{
    if (q->verified == l->count || takes_part(l, q->verified, q->worker->session))
        return false;
    const struct group *g = &l->group[q->verified];
    const bool first = g->session[0] == 0 && !step_micro_in(q->core, q->verified);
    if (first && held_back(l, g, q->now_ns)) {
        note_due(l, grace_ends_ns(l), q->now_ns);
        return false;
    }
    const uint32_t copies = copies_of(l, q->verified), wanted = verify_wanted(l->verify);
    const uint32_t needed = wanted > copies ? wanted - copies : first;
    if (needed == 0 || (!first && (checker_is_busy(l) || !verify_has_room(l->verify))))
        return false;
    return left == 0 || has_its_turn(l, q, needed);
}

/* Beside who holds it, unless nobody does. */
static void hand_out_verified(struct lease *l, const struct asking *q)
{
    const bool held = l->group[q->verified].session[0] != 0;
    if (!held && !step_micro_in(q->core, q->verified)) {
        hand_out(l, q->verified, q);
        return;
    }
    l->checker = (struct checker){ q->worker->session, q->now_ns };
    note_handed(l, q->verified, q);
}

/* All that is to be summed is in. Is there a copy to come that is to be waited for? */
static bool awaits_copy(struct lease *l, const struct asking *q)
{
    if (q->verified == l->count)
        return false;
    if (l->all_in_ns == 0)
        l->all_in_ns = q->now_ns;
    const bool busy = checker_is_busy(l);
    const struct worker *checker = busy ? find_worker(l, l->checker.session) : NULL;
    const uint64_t from_ns = busy ? max_ns(l->all_in_ns, l->checker.since_ns) : l->all_in_ns;
    const uint64_t until_ns = from_ns + 2 * takes_ns(l, checker) + LEASE_VERIFY_NS;
    bool awaits = busy || verify_partial(l->verify);
    for (uint32_t i = 0; !awaits && i < LEASE_WORKERS; i++)
        awaits = copies_of(l, q->verified) < verify_wanted(l->verify) &&
                 may_come(l, &l->worker[i], q);
    if (!awaits || q->now_ns >= until_ns)
        return false;
    note_due(l, q->now_ns + LEASE_OVERDUE_NS, q->now_ns);
    note_due(l, until_ns, q->now_ns);
    return true;
}

/* The group to compute twice when none is left: the oldest that is late, or else the one expected
 * last, where this session would have it much earlier. l->count: there is none. */
static uint32_t choose_backup(struct lease *l, const struct asking *q)
{
    const uint64_t takes = max_ns(takes_ns(l, q->worker), usual_ns(l));
    uint64_t last_ns = takes + takes / 2;
    const uint32_t groups = step_returns(q->core);
    uint32_t late = l->count, last = l->count;
    for (uint32_t i = 0; i < groups; i++) {
        const struct group *g = &l->group[i];
        if (g->session[0] == 0 || has(g, q->worker->session) || step_micro_came(q->core, i) ||
            (i == q->verified && takes_part(l, i, q->worker->session)))
            continue;
        const uint64_t late_at = late_at_ns(l, g, q->worker);
        const uint64_t expected = expected_ns(l, g, q->now_ns);
        note_due(l, late_at, q->now_ns);
        if (late_at <= q->now_ns &&
            (late == l->count || last_handed_ns(g) < last_handed_ns(&l->group[late])))
            late = i;
        if (expected > last_ns) {
            last_ns = expected;
            last = i;
        }
    }
    return late != l->count ? late : last;
}

enum lease_answer lease_ask(struct lease *l, const struct step *core, uint64_t step,
                            uint64_t session, uint64_t now_ns, uint32_t *ret_group)
{
    CHECK(session > 0);
    struct asking q = { core, know_worker(l, session), now_ns, l->count };
    note_done(l, &q);
    q.worker->seen_ns = now_ns;
    if (step != step_collecting(core))
        return step < step_collecting(core) ? LEASE_OVER : LEASE_WAIT;
    if (!l->began || l->step != step)
        begin_step(l, core, now_ns);
    if (l->verify != NULL && !verify_now(l->verify, core, &q.verified))
        q.verified = l->count;
    uint32_t missing;
    const struct left left = find_left(l, &q, &missing);
    if (is_to_verify(l, &q, left.count)) {
        hand_out_verified(l, &q);
        *ret_group = q.verified;
        return LEASE_GROUP;
    }
    if (missing == 0)
        return awaits_copy(l, &q) ? LEASE_WAIT : LEASE_ALL_IN;
    const uint32_t found = left.count > 0 ? choose_left(l, &q, &left) : choose_backup(l, &q);
    if (found == l->count)
        return LEASE_WAIT;
    hand_out(l, found, &q);
    *ret_group = found;
    return LEASE_GROUP;
}

void lease_begin_again(struct lease *l)
{
    l->checker = (struct checker){ 0 };
    l->all_in_ns = 0;
    memset(l->group, 0, l->count * sizeof l->group[0]);
    l->due_ns = 0;
    for (uint32_t i = 0; i < LEASE_WORKERS; i++)
        l->worker[i].busy = false;
}

void lease_set_verify(struct lease *l, struct verify *verify)
{
    l->verify = verify;
}

struct verify *lease_verify(const struct lease *l)
{
    return l->verify;
}

static void drop_checker(struct lease *l, uint64_t session)
{
    if (l->checker.session == session)
        l->checker = (struct checker){ 0 };
}

static void drop_holder(struct group *g, uint64_t session)
{
    if (g->session[1] == session)
        g->session[1] = 0;
    if (g->session[0] == session) {
        g->session[0] = g->session[1];
        g->since_ns[0] = g->since_ns[1];
        g->place[0] = g->place[1];
        g->session[1] = 0;
    }
}

void lease_give_back(struct lease *l, uint64_t session, uint32_t group)
{
    CHECK(group < l->count);
    uint32_t verified;
    drop_holder(&l->group[group], session);
    if (l->verify != NULL && verify_at_hand(l->verify, &verified) && verified == group)
        drop_checker(l, session);
    for (uint32_t i = 0; i < LEASE_WORKERS; i++) {
        struct worker *w = &l->worker[i];
        if (w->session == session && w->group == group)
            w->busy = false;
    }
}

void lease_forget(struct lease *l, uint64_t session)
{
    for (uint32_t i = 0; i < LEASE_WORKERS; i++)
        if (l->worker[i].session == session)
            l->worker[i] = (struct worker){ .session = 0 };
    for (uint32_t i = 0; i < l->count; i++)
        drop_holder(&l->group[i], session);
    drop_checker(l, session);
    if (l->verify != NULL)
        verify_forget(l->verify, session);
}

uint64_t lease_next_ns(const struct lease *l, const struct step *core, uint64_t now_ns)
{
    const bool known = l->began && l->step == step_collecting(core);
    return known && l->due_ns > now_ns ? l->due_ns : UINT64_MAX;
}

void lease_holders(const struct lease *l, uint32_t group, uint64_t ret_session[2],
                   uint64_t ret_since_ns[2])
{
    CHECK(group < l->count);
    memcpy(ret_session, l->group[group].session, sizeof l->group[group].session);
    memcpy(ret_since_ns, l->group[group].since_ns, sizeof l->group[group].since_ns);
}
