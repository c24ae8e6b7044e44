/* See lease.h. */
#include "daemon/lease.h"

#include <string.h>

#include "proto/check.h"

#define SAMPLES 15u /* the median of so many is the usual time */

struct group {
    uint64_t session[2]; /* 0: nobody; [1] only with [0] */
    uint64_t since_ns[2];
    bool handed;  /* by this owner, in this step */
    bool sampled; /* its time was counted, or must not be */
};

struct lease {
    uint32_t count;
    bool cautious;   /* in this step */
    bool was_warned; /* cautious where others may have handed groups out */
    bool began;      /* `step` means something */
    uint64_t step;
    uint64_t first_asked_ns; /* for this step */
    uint64_t sample_ns[SAMPLES];
    uint64_t samples; /* ever taken */
    struct group group[];
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
    return l;
}

static uint64_t usual_ns(const struct lease *l)
{
    const uint32_t count = l->samples < SAMPLES ? (uint32_t)l->samples : SAMPLES;
    uint64_t sorted[SAMPLES];
    if (count == 0)
        return LEASE_UNKNOWN_NS;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = i;
        for (; at > 0 && sorted[at - 1] > l->sample_ns[i]; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = l->sample_ns[i];
    }
    return sorted[count / 2];
}

static uint64_t overdue_ns(const struct lease *l)
{
    return 2 * usual_ns(l) + LEASE_OVERDUE_NS;
}

static uint64_t grace_ends_ns(const struct lease *l)
{
    const uint64_t grace = l->samples == 0 ? 0 : 2 * usual_ns(l);
    return l->first_asked_ns + (grace > LEASE_GRACE_NS ? grace : LEASE_GRACE_NS);
}

/* Clocks may be set: what seems to lie in the future began now. */
static uint64_t age_ns(uint64_t since_ns, uint64_t now_ns)
{
    return now_ns > since_ns ? now_ns - since_ns : 0;
}

/* The first question about a step: nobody holds anything of it. */
static void begin_step(struct lease *l, const struct step *core, uint64_t now_ns)
{
    const bool nothing_in = step_cells_in(core) == 0 && step_cells_waiting(core) == 0;
    l->cautious = l->was_warned && (!l->began || !nothing_in);
    l->began = true;
    l->step = step_collecting(core);
    l->first_asked_ns = now_ns;
    memset(l->group, 0, l->count * sizeof l->group[0]);
}

/* How long did it take? With two holders nobody knows whose it was. */
static void take_sample(struct lease *l, struct group *g, uint64_t now_ns)
{
    if (g->sampled || g->session[0] == 0)
        return;
    g->sampled = true;
    if (g->session[1] == 0)
        l->sample_ns[l->samples++ % SAMPLES] = age_ns(g->since_ns[0], now_ns);
}

static void hand_out(struct group *g, uint32_t holder, uint64_t session, uint64_t now_ns)
{
    g->session[holder] = session;
    g->since_ns[holder] = now_ns;
    g->handed = true;
}

static bool has(const struct group *g, uint64_t session)
{
    return g->session[0] == session || g->session[1] == session;
}

/* Since when nobody else was asked to compute it. */
static uint64_t last_handed_ns(const struct group *g)
{
    return g->session[1] != 0 ? g->since_ns[1] : g->since_ns[0];
}

/* A group that is late with whoever has it, oldest first; l->count: none. */
static uint32_t find_overdue(const struct lease *l, const struct step *core, uint64_t session,
                             uint64_t now_ns)
{
    uint32_t found = l->count;
    for (uint32_t i = 0; i < l->count; i++) {
        const struct group *g = &l->group[i];
        if (g->session[0] == 0 || has(g, session) || step_micro_came(core, i) ||
            age_ns(last_handed_ns(g), now_ns) <= overdue_ns(l))
            continue;
        if (found == l->count || last_handed_ns(g) < last_handed_ns(&l->group[found]))
            found = i;
    }
    return found;
}

static bool held_back(const struct lease *l, const struct group *g, uint64_t now_ns)
{
    return l->cautious && !g->handed && now_ns < grace_ends_ns(l);
}

enum lease_answer lease_ask(struct lease *l, const struct step *core, uint64_t step,
                            uint64_t session, uint64_t now_ns, uint32_t *ret_group)
{
    CHECK(session > 0);
    if (step != step_collecting(core))
        return step < step_collecting(core) ? LEASE_OVER : LEASE_WAIT;
    if (!l->began || l->step != step)
        begin_step(l, core, now_ns);
    uint32_t missing = 0, found = l->count;
    for (uint32_t i = 0; i < l->count; i++) {
        struct group *g = &l->group[i];
        if (step_micro_came(core, i))
            take_sample(l, g, now_ns);
        if (step_micro_in(core, i))
            continue;
        missing++;
        if (found == l->count && g->session[0] == 0 && !held_back(l, g, now_ns))
            found = i;
    }
    if (missing == 0)
        return LEASE_ALL_IN;
    if (found == l->count)
        found = find_overdue(l, core, session, now_ns);
    if (found == l->count)
        return LEASE_WAIT;
    hand_out(&l->group[found], l->group[found].session[0] == 0 ? 0 : 1, session, now_ns);
    *ret_group = found;
    return LEASE_GROUP;
}

void lease_forget(struct lease *l, uint64_t session)
{
    for (uint32_t i = 0; i < l->count; i++) {
        struct group *g = &l->group[i];
        if (g->session[1] == session)
            g->session[1] = 0;
        if (g->session[0] == session) {
            g->session[0] = g->session[1];
            g->since_ns[0] = g->since_ns[1];
            g->session[1] = 0;
        }
    }
}

uint64_t lease_next_ns(const struct lease *l, const struct step *core, uint64_t now_ns)
{
    uint64_t next = UINT64_MAX;
    if (!l->began || l->step != step_collecting(core))
        return next;
    const uint64_t overdue = overdue_ns(l);
    for (uint32_t i = 0; i < l->count; i++) {
        const struct group *g = &l->group[i];
        uint64_t at = UINT64_MAX;
        if (step_micro_in(core, i) || (g->session[0] != 0 && step_micro_came(core, i)))
            continue;
        if (g->session[0] != 0)
            at = last_handed_ns(g) + overdue + 1;
        else if (held_back(l, g, now_ns))
            at = grace_ends_ns(l);
        if (at > now_ns && at < next)
            next = at;
    }
    return next;
}

void lease_holders(const struct lease *l, uint32_t group, uint64_t ret_session[2],
                   uint64_t ret_since_ns[2])
{
    CHECK(group < l->count);
    memcpy(ret_session, l->group[group].session, sizeof l->group[group].session);
    memcpy(ret_since_ns, l->group[group].since_ns, sizeof l->group[group].since_ns);
}
