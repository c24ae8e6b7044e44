/* See rejoin.h. */
#include "client/paths/rejoin.h"

#include <inttypes.h>
#include <stdio.h>

#include "client/paths/rewind.h"
#include "client/paths/turn.h"
#include "client/session/activity.h"
#include "client/session/blame.h"
#include "client/session/hub.h"
#include "client/session/membership.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/failpoint.h"
#include "proto/share/board.h"

#define POLL_NS (20 * NS_PER_MS)

/* -- Members ----------------------------------------------------------------------------------- */

/* What it was mapped from is of a daemon that is lost. */
static void begin_member(struct shd_model *m, uint32_t i)
{
    struct map_owner *owner = &m->map->owners[i];
    segment_close(&owner->board);
    segment_close(&owner->inbox);
    segment_close(&owner->whole.held);
    activity_unmap(owner->says);
    owner->says = NULL;
    owner->mapped = owner->has_inbox = false;
    owner->layout = (struct map_layout){ 0 };
    owner->joining = true;
    turn_join(m->map->turn, i);
}

static void begin_members(struct shd_session *s)
{
    for (struct shd_model *m = session_first(s); m != NULL; m = session_next(s, m))
        for (uint32_t i = 0; m->map != NULL && i < m->map->member_count; i++)
            if (turn_has_lost(m->map->turn, i) && !hub_lost(m->session->hub, i))
                begin_member(m, i);
}

static void end_members(struct shd_session *s)
{
    for (struct shd_model *m = session_first(s); m != NULL; m = session_next(s, m))
        for (uint32_t i = 0; m->map != NULL && i < m->map->member_count; i++)
            m->map->owners[i].joining = false;
}

/* Nobody goes on with a half of it. */
static void let_go(struct shd_session *s, const struct shd_err *why)
{
    struct hub *hub = s->hub;
    for (uint32_t i = hub->owner_count; i < hub->link_count; i++)
        for (struct shd_model *m = session_first(s); m != NULL; m = session_next(s, m))
            if (m->map != NULL && m->map->owners[i].joining && !hub_lost(m->session->hub, i))
                hub_lose(hub, i, why);
}

/* -- Joining ----------------------------------------------------------------------------------- */

static int await_links(struct hub *hub, struct shd_err *e)
{
    const uint64_t start_ns = clock_now_ns();
    for (;;) {
        const struct link *away = NULL;
        for (uint32_t i = hub->owner_count; i < hub->link_count; i++)
            if (hub->links[i].state != LINK_UP && hub->links[i].state != LINK_GONE)
                away = &hub->links[i];
        if (away == NULL)
            return SHD_OK;
        const uint64_t left_ns = hub_left_ns(hub, start_ns, POLL_NS);
        const int r = left_ns > 0 ? hub_poll(hub, left_ns, e)
                                  : link_err(away, SHD_ETIMEDOUT, e, "is in again, and not there");
        if (r != SHD_OK)
            return r;
    }
}

/* A daemon that is gone again, for a moment or for good, is asked again, or not any more. */
static int open_member(struct shd_model *m, uint32_t i, const struct layout_opening *opening,
                       struct shd_err *e)
{
    struct map_owner *owner = &m->map->owners[i];
    struct link *link = &m->session->hub->links[i];
    const uint32_t slots = m->map->owners[0].has_inbox ? m->map->view_slots : 0;
    const uint64_t start_ns = clock_now_ns(), origin = m->map->owners[0].layout.origin;
    const unsigned wanted = 1u << SEGMENT_PUBLISH | 1u << SEGMENT_BOARD |
                            (slots > 0 ? 1u << SEGMENT_INBOX : 0);
    struct layout_opening o = {
        .m = m, .name = m->spec->name, .slots = slots, .origin = origin, .settled = true
    };
    if (opening != NULL && opening->m == m && origin == 0) { /* it may be made there, too */
        o.json = opening->json;
        o.one_count = opening->one_count;
    }
    int r = SHD_EGONE;
    while (r == SHD_EGONE && link->state != LINK_GONE) {
        r = layout_ask(&o, link, e);
        if (r == SHD_OK && link->state != LINK_GONE)
            r = segments_take(m, link, &owner->layout, wanted, e);
        if (r == SHD_EGONE && hub_left_ns(link->hub, start_ns, POLL_NS) == 0)
            return r;
    }
    return link->state == LINK_GONE ? SHD_OK : r;
}

static int open_members(struct shd_session *s, const struct layout_opening *opening,
                        struct shd_err *e)
{
    int r = SHD_OK;
    for (struct shd_model *m = session_first(s); m != NULL; m = session_next(s, m))
        for (uint32_t i = 0; r == SHD_OK && m->map != NULL && i < m->map->member_count; i++)
            if (m->map->owners[i].joining && !hub_lost(m->session->hub, i))
                r = open_member(m, i, opening, e);
    return r;
}

/* One that is filled, and has not gone back yet with the others. */
static const struct link *find_filling(const struct shd_session *s)
{
    const struct hub *hub = s->hub;
    uint64_t to;
    for (struct shd_model *m = session_first(s); m != NULL; m = session_next(s, m))
        for (uint32_t i = 0; m->map != NULL && i < m->map->member_count; i++)
            if (!hub_lost(m->session->hub, i) && m->map->owners[i].mapped &&
                membership_fills(hub, &hub->links[i]) &&
                board_rewound(m->map->owners[i].board.base, &to) == 0)
                return &hub->links[i];
    return NULL;
}

static int await_rewinds(struct shd_session *s, bool *ret_waited, struct shd_err *e)
{
    const uint64_t start_ns = clock_now_ns();
    const struct link *link;
    int r = SHD_OK;
    while (r == SHD_OK && (link = find_filling(s)) != NULL) {
        const uint64_t left_ns = hub_left_ns(s->hub, start_ns, POLL_NS);
        *ret_waited = true;
        r = left_ns > 0 ? hub_poll(s->hub, left_ns, e)
                        : link_err(link, SHD_ETIMEDOUT, e, "is being filled, without an end");
        if (r == SHD_OK)
            membership_give_up(s->hub, link, start_ns);
    }
    return r;
}

static void say_joined(const struct shd_session *s)
{
    char line[300];
    for (uint32_t i = s->hub->owner_count; i < s->hub->link_count; i++) {
        const struct link *link = &s->hub->links[i];
        bool joining = false;
        for (struct shd_model *m = session_first(s); m != NULL; m = session_next(s, m))
            joining = joining || (m->map != NULL && m->map->owners[i].joining);
        if (!joining || link->state == LINK_GONE || s->blame == NULL)
            continue;
        snprintf(line, sizeof line, "shd: daemon %.60s is in again, as the replica of daemon %.60s",
                 link->device, s->hub->links[link_owner(link)].device);
        blame_say(s->blame, line);
    }
}

static int join(struct shd_session *s, const struct layout_opening *opening, struct shd_err *e)
{
    struct shd_err why = { 0 };
    s->hub->members.joining = true;
    begin_members(s);
    FAIL_POINT("rejoin:begun");
    int r = await_links(s->hub, &why);
    if (r == SHD_OK)
        r = open_members(s, opening, &why);
    if (r != SHD_OK)
        let_go(s, &why);
    else
        say_joined(s);
    end_members(s);
    s->hub->members.joining = false;
    if (r == SHD_OK)
        r = membership_settle(s->hub, &why);
    return r == SHD_OK ? SHD_OK : err_copy(&why, e);
}

static int take_in(struct shd_session *s, const struct layout_opening *opening, bool *ret_any,
                   struct shd_err *e)
{
    s->hub->members.returned = false; /* or its waits would end */
    const int r = membership_refresh(s->hub, e);
    if (r != SHD_OK || !membership_join(s->hub))
        return r;
    *ret_any = true;
    return join(s, opening, e);
}

bool rejoin_is_due(const struct shd_model *m)
{
    return m->session->hub != NULL && m->session->hub->members.returned;
}

int rejoin_due(struct shd_session *s, struct shd_err *e)
{
    bool any;
    return s->hub->members.returned ? take_in(s, /* opening= */ NULL, &any, e) : SHD_OK;
}

int rejoin_session(struct shd_session *s, struct shd_err *e)
{
    bool any;
    if (s->hub == NULL || s->hub->members.membership == NULL)
        return SHD_OK;
    const int r = take_in(s, /* opening= */ NULL, &any, e);
    return r == SHD_OK ? await_rewinds(s, &any, e) : r;
}

int rejoin_look(struct shd_model *m, const struct layout_opening *opening, bool *ret_again,
                struct shd_err *e)
{
    struct shd_session *s = m->session;
    uint64_t to;
    const uint64_t rewound = rewind_newest(m, &to);
    *ret_again = false;
    if (s->hub->members.membership == NULL ||
        (m->map->viewed && rewound <= m->map->viewed_rewound && !rejoin_is_due(m)))
        return SHD_OK;
    int r = take_in(s, opening, ret_again, e);
    if (r == SHD_OK)
        r = await_rewinds(s, ret_again, e);
    if (r != SHD_OK)
        return r;
    m->map->viewed = true;
    m->map->viewed_rewound = rewound;
    return SHD_OK;
}

bool rejoin_forget(struct shd_model *m)
{
    m->map->viewed = false;
    return m->session->hub->members.membership != NULL;
}

bool rejoin_may_forget(struct shd_model *m)
{
    return m->session->hub->members.membership != NULL && membership_reaches(m->session->hub) &&
           rejoin_forget(m);
}
