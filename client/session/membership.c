/* See membership.h. */
#include "client/session/membership.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/session/blame.h"
#include "client/session/hub.h"
#include "client/session/link.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/files/arbiter.h"
#include "proto/files/replicas.h"
#include "proto/spec/layout.h"

#define PATIENCE_ENV "SHARDD_REPLICA_PATIENCE"
#define PATIENCE_NS  (8 * NS_PER_S) /* a daemon that is started again is there sooner */
#define FIRST_TIMES  3u       /* as long, for who was never met: hosts begin one after the other */
#define LOOK_NS      NS_PER_S /* between two looks at the view */
#define HURRY_NS     (NS_PER_S / 4) /* the same while somebody is away */
#define ALWAYS_NS    (5 * NS_PER_S) /* the same of who never waits, while the arbiter is there */
#define SETTLE_NS    (20 * NS_PER_MS)
#define FILLS_MAX    8u /* times the patience */

struct membership {
    struct replicas hosts;    /* owned */
    struct arbiter *arbiter;  /* owned */
    struct arbiter_view view; /* owned: the newest that is known */
    uint64_t *came; /* owned, [hosts]: the view that each came back with, as far as this session
                     * has joined it; 0: it was there from the beginning */
    uint64_t patience_ns;
    uint64_t looked_ns;
    bool unreachable; /* the arbiter: that was said */
    bool alone;       /* one that is missed has no other: that was said */
};

/* -- Judging ----------------------------------------------------------------------------------- */

static bool has_other(const struct membership_link *links, uint32_t count, uint32_t slice,
                      const bool *out)
{
    for (uint32_t i = 0; i < count; i++)
        if (links[i].slice == slice && links[i].up && !links[i].out && !out[links[i].host])
            return true;
    return false;
}

uint32_t membership_judge(const struct membership_link *links, uint32_t count, uint32_t hosts,
                          bool *ret_out)
{
    uint32_t out = 0;
    memset(ret_out, 0, hosts * sizeof *ret_out);
    for (uint32_t i = 0; i < count; i++)
        if (links[i].missed && !links[i].out) {
            out += !ret_out[links[i].host];
            ret_out[links[i].host] = true;
        }
    for (uint32_t i = 0; out > 0 && i < count; i++)
        if (!has_other(links, count, links[i].slice, ret_out)) {
            memset(ret_out, 0, hosts * sizeof *ret_out);
            return 0;
        }
    return out;
}

/* -- Opening ----------------------------------------------------------------------------------- */

static int take_patience(struct membership *m, struct shd_err *e)
{
    const char *text = getenv(PATIENCE_ENV);
    char *end;
    m->patience_ns = PATIENCE_NS;
    if (text == NULL || text[0] == '\0')
        return SHD_OK;
    const double seconds = strtod(text, &end);
    if (*end != '\0' || !(seconds >= 0.1 && seconds <= 86400))
        return err_set(e, SHD_EINVAL,
                       PATIENCE_ENV " is '%.40s': seconds from 0.1 to 86400 are wanted, as 8",
                       text);
    m->patience_ns = (uint64_t)(seconds * (double)NS_PER_S);
    return SHD_OK;
}

int membership_open(const char *dir, struct membership **ret_membership, struct shd_err *e)
{
    struct membership *m = sys_calloc(1, sizeof *m);
    if (m == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a session");
    int r = replicas_read(dir, &m->hosts, e);
    if (r == SHD_ENOENT)
        r = err_set(e, r,
                    "the address names pairs, and '%.100s' has no " REPLICAS_FILE
                    ", which says what "
                    "hosts they are of: `shardctl host --replicas 2` writes it",
                    dir);
    if (r == SHD_OK)
        r = take_patience(m, e);
    if (r == SHD_OK && (m->came = sys_calloc(m->hosts.host_count, sizeof *m->came)) == NULL)
        r = err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " hosts", m->hosts.host_count);
    if (r == SHD_OK)
        r = arbiter_open(m->hosts.arbiter, m->hosts.cluster, &m->arbiter, e);
    if (r != SHD_OK)
        membership_close(m);
    else
        *ret_membership = m;
    return r;
}

void membership_close(struct membership *m)
{
    if (m == NULL)
        return;
    arbiter_view_free(&m->view);
    arbiter_close(m->arbiter);
    replicas_free(&m->hosts);
    free(m->came);
    free(m);
}

/* -- The view ---------------------------------------------------------------------------------- */

/* check_devices() has seen to it that there is one. */
static const struct replicas_host *host_of(const struct membership *m, const struct link *link)
{
    const struct replicas_host *host = replicas_host_of(&m->hosts, link->device);
    CHECK(host != NULL);
    return host;
}

static bool link_is_out(const struct membership *m, const struct link *link)
{
    return arbiter_view_has(&m->view, host_of(m, link)->name);
}

static uint64_t *came_of(const struct membership *m, const struct link *link)
{
    return &m->came[host_of(m, link) - m->hosts.hosts];
}

/* The view that it came back with; 0: it was never out. */
static uint64_t came_in_view(const struct membership *m, const struct link *link)
{
    const struct arbiter_behind *behind = arbiter_view_behind(&m->view, host_of(m, link)->name);
    return behind != NULL ? behind->since : 0;
}

/* Also where it is in again: what it had when this session met it is gone. */
static bool link_is_lost(const struct membership *m, const struct link *link)
{
    return link_is_out(m, link) || came_in_view(m, link) != *came_of(m, link);
}

static struct link *twin_of(struct hub *hub, const struct link *link)
{
    const uint32_t n = hub->owner_count;
    return &hub->links[link->index < n ? link->index + n : link->index - n];
}

/* One of them may be in again, and have the slice: not for this session, which has not taken it in.
 */
static int err_both(const struct membership *m, const struct link *a, const struct link *b,
                    struct shd_err *e)
{
    const struct link *back = !link_is_out(m, a) ? a : !link_is_out(m, b) ? b : NULL;
    if (back != NULL)
        return err_set(e, SHD_EGONE,
                       "of slice %" PRIu32 " daemon %s is out (view %" PRIu64
                       "), and daemon %s came in again since this session began, which has not "
                       "taken it in: connect anew",
                       link_owner(a), (back == a ? b : a)->device, m->view.number, back->device);
    return err_set(e, SHD_EGONE,
                   "slice %" PRIu32
                   " is lost: the hosts of daemon %s and of daemon %s, its replica, "
                   "are out (view %" PRIu64 "); restore a checkpoint",
                   link_owner(a), a->device, b->device, m->view.number);
}

/* Daemons are told the newest view by connections made anew, once nobody is left who is out in it:
 * a daemon takes in no session of an older one. While hosts are taken in again nobody is let go of,
 * and no daemon is asked for more than what it has. */
static void tell(const struct membership *m, struct hub *hub)
{
    struct shd_err why = { 0 };
    err_set(&why, SHD_ECANCELED, "view %" PRIu64 " of the hosts", m->view.number);
    if (hub->members.told == m->view.number + 1)
        return;
    hub->members.told = m->view.number + 1;
    for (uint32_t i = 0; i < hub->link_count; i++) {
        struct link *link = &hub->links[i];
        if (link->state != LINK_GONE && link->state != LINK_DOWN && link->fault.code == SHD_OK)
            link_down(link, &why);
    }
}

static bool any_to_go(const struct membership *m, const struct hub *hub)
{
    for (uint32_t i = 0; i < hub->link_count; i++)
        if (hub->links[i].state != LINK_GONE && hub->links[i].fault.code == SHD_OK &&
            link_is_lost(m, &hub->links[i]))
            return true;
    return false;
}

/* Is it in, and has all of it been let go of? */
static bool is_to_be_joined(const struct membership *m, const struct hub *hub,
                            const struct link *link)
{
    const struct replicas_host *host = host_of(m, link);
    for (uint32_t i = 0; i < hub->link_count; i++)
        if (hub->links[i].state != LINK_GONE && host_of(m, &hub->links[i]) == host)
            return false;
    return !link_is_out(m, link);
}

/* Is its host in again with all steps that count? Then this session lets go of what it knew of it,
 * and has it to be taken in. Who only looks connects anew: trainers go on there. */
static bool mark_returned(const struct membership *m, struct hub *hub, const struct link *link)
{
    const struct shd_err why = { SHD_EGONE, "its host came in again since this session began" };
    const struct link *gone = link;
    if (hub->role != WIRE_TRAINER || link_is_out(m, link) || membership_fills(hub, link))
        return false;
    if (link->state != LINK_GONE) {
        gone = link_is_replica(link) ? link : twin_of(hub, link); /* an owner changes places */
        if (twin_of(hub, link)->state == LINK_GONE || !hub_lose(hub, link->index, &why))
            return false;
    }
    hub->members.returned = hub->members.returned || is_to_be_joined(m, hub, gone);
    return true;
}

/* What the view has out is let go of. An owner whose replica has not come as far is looked at
 * again. */
static void apply(struct membership *m, struct hub *hub)
{
    for (uint32_t i = 0; i < hub->link_count; i++) {
        struct link *link = &hub->links[i], *twin = twin_of(hub, link);
        struct shd_err why = { 0 };
        char line[300];
        if (link->state == LINK_GONE || link->fault.code != SHD_OK || !link_is_lost(m, link))
            continue;
        const bool alone = twin->state == LINK_GONE || link_is_lost(m, twin);
        if (alone && (mark_returned(m, hub, twin) || mark_returned(m, hub, link)))
            continue;
        if (alone) {
            err_both(m, link, twin, &why);
            link_fault(link, &why);
            continue;
        }
        const char *host = host_of(m, link)->name;
        err_set(&why, SHD_EGONE, "its host %s is out", host);
        snprintf(line, sizeof line,
                 "shd: host %.60s is out (view %" PRIu64 "): daemon %.60s holds slice %" PRIu32
                 " alone from here on",
                 host, m->view.number, twin->device, link_owner(link));
        if (hub_lose(hub, i, &why) && hub->blame != NULL)
            blame_say(hub->blame, line);
    }
    if (!any_to_go(m, hub) || hub->members.joining)
        tell(m, hub);
}

static int read_view(struct membership *m, struct shd_err *e)
{
    struct arbiter_view view = { 0 };
    const int r = arbiter_read(m->arbiter, &view, e);
    if (r != SHD_OK)
        return r;
    m->unreachable = false;
    if (view.number > m->view.number) {
        arbiter_view_free(&m->view);
        m->view = view;
    } else {
        arbiter_view_free(&view);
    }
    return SHD_OK;
}

/* Pairs on one host would be lost together. */
static int check_devices(const struct membership *m, const struct hub *hub, struct shd_err *e)
{
    for (uint32_t i = 0; i < hub->link_count; i++) {
        const struct link *link = &hub->links[i];
        const struct replicas_host *host = replicas_host_of(&m->hosts, link->device);
        if (host == NULL)
            return err_set(
                e, SHD_EINVAL,
                "device '%s' of the address is of no host that " REPLICAS_FILE
                " beside its sockets names: take the address that `shardctl host` prints",
                link->device);
        const struct link *twin = &hub->links[link_owner(link)];
        if (twin != link && replicas_host_of(&m->hosts, twin->device) == host)
            return err_set(
                e, SHD_EINVAL,
                "devices '%s' and '%s' of the address are a pair, and both of host '%s': "
                "take the address that `shardctl host` prints",
                twin->device, link->device, host->name);
    }
    return SHD_OK;
}

/* Before they are connected to: of a pair the one that has been in for longer is the owner. */
static void arrange(const struct membership *m, struct hub *hub)
{
    for (uint32_t i = 0; i < hub->owner_count; i++) {
        struct link *first = &hub->links[i], *second = &hub->links[hub->owner_count + i];
        *came_of(m, first) = came_in_view(m, first);
        *came_of(m, second) = came_in_view(m, second);
        if (!arbiter_view_swaps(&m->view, host_of(m, first)->name, host_of(m, second)->name))
            continue;
        const struct link swapped = *first;
        *first = *second;
        *second = swapped;
        first->index = i;
        second->index = hub->owner_count + i;
    }
}

int membership_begin(struct hub *hub, struct shd_err *e)
{
    struct membership *m = hub->members.membership;
    int r = check_devices(m, hub, e);
    if (r != SHD_OK)
        return r;
    r = read_view(m, e);
    if (r != SHD_OK)
        return err_prefix(e, "who of the hosts with replicas is out cannot be told");
    arrange(m, hub);
    apply(m, hub);
    hub->members.tells = m->hosts.host_count > 2;
    hub->at.first_ns = (FIRST_TIMES + 1) * m->patience_ns;
    return hub_check(hub, e);
}

/* -- Claiming ---------------------------------------------------------------------------------- */

static bool is_missed(const struct membership *m, const struct link *link, uint64_t now_ns)
{
    const uint64_t patience_ns = (link->known ? 1 : FIRST_TIMES) * m->patience_ns;
    return link->state != LINK_UP && link->state != LINK_GONE && now_ns > link->since_ns &&
           now_ns - link->since_ns >= patience_ns;
}

static int find_out(const struct membership *m, const struct hub *hub, uint64_t now_ns, bool *out)
{
    struct membership_link *links = sys_calloc(hub->link_count, sizeof *links);
    if (links == NULL)
        return 0;
    for (uint32_t i = 0; i < hub->link_count; i++) {
        const struct link *link = &hub->links[i];
        links[i] = (struct membership_link){
            .slice = link_owner(link),
            .host = (uint32_t)(host_of(m, link) - m->hosts.hosts),
            .up = link->state == LINK_UP && !membership_fills(hub, link),
            .out = link->state == LINK_GONE || link_is_lost(m, link),
            .missed = is_missed(m, link, now_ns),
        };
    }
    const uint32_t count = membership_judge(links, hub->link_count, m->hosts.host_count, out);
    free(links);
    return (int)count;
}

/* Those of the view, and these. */
static int claim(struct membership *m, const bool *out, struct shd_err *e)
{
    struct arbiter_view next = { 0 };
    int r = arbiter_view_copy(&m->view, &next, e);
    for (uint32_t h = 0; r == SHD_OK && h < m->hosts.host_count; h++) {
        struct arbiter_view more = { 0 };
        if (!out[h] || arbiter_view_has(&next, m->hosts.hosts[h].name))
            continue;
        r = arbiter_view_next(&next, m->hosts.hosts[h].name, &more, e);
        if (r != SHD_OK)
            break;
        arbiter_view_free(&next);
        next = more;
    }
    next.number = m->view.number + 1; /* all of them at once */
    if (r == SHD_OK)
        r = arbiter_claim(m->arbiter, &next, e);
    arbiter_view_free(&next);
    return r;
}

static void say_unreachable(struct membership *m, const struct hub *hub, const struct shd_err *e)
{
    char line[SHD_ERR_TEXT_BYTES + 100];
    if (!m->unreachable && hub->blame != NULL) {
        snprintf(line, sizeof line,
                 "shd: WARNING: the arbiter of the replicas cannot be asked, so nobody can be put "
                 "out: %s",
                 e->text);
        blame_say(hub->blame, line);
    }
    m->unreachable = true;
}

/* Why nobody goes on in the place of a daemon that is missed; NULL: somebody can. */
static const char *find_why_alone(const struct membership *m, struct hub *hub,
                                  const struct link *link)
{
    const struct link *twin = twin_of(hub, link);
    if (link_is_out(m, twin))
        return "is out";
    if (membership_fills(hub, twin))
        return "is being filled";
    if (twin->state == LINK_GONE || link_is_lost(m, twin))
        return "came in again since this session began";
    return twin->state == LINK_UP ? NULL : "is away, too";
}

/* Once, until all are there. */
static void say_alone(struct membership *m, struct hub *hub, const struct link *link)
{
    const char *why = find_why_alone(m, hub, link);
    char line[400];
    if (m->alone || why == NULL)
        return;
    snprintf(line, sizeof line,
             "shd: WARNING: host %.60s stays away, and nobody goes on with its slice %" PRIu32
             ", on daemon %.60s: host %.60s, which has the other copy, %s; if both are lost for "
             "good restore a checkpoint",
             host_of(m, link)->name, link_owner(link), link->device,
             host_of(m, twin_of(hub, link))->name, why);
    m->alone = true;
    blame_say(hub->blame, line);
}

/* What anybody's claim has made of it is the view. */
static void put_out(struct membership *m, const struct hub *hub, const bool *out)
{
    struct shd_err e = { 0 };
    int r = claim(m, out, &e);
    if (r == SHD_OK || r == SHD_EBUSY)
        r = read_view(m, &e);
    if (r != SHD_OK)
        say_unreachable(m, hub, &e);
}

static void put_out_missed(struct membership *m, struct hub *hub, uint64_t now_ns)
{
    bool out[ARBITER_HOSTS_MAX];
    if (find_out(m, hub, now_ns, out) > 0)
        put_out(m, hub, out);
    else
        for (uint32_t i = 0; i < hub->link_count; i++) {
            const struct link *link = &hub->links[i], *twin = twin_of(hub, link);
            const bool missed = is_missed(m, link, now_ns) && !link_is_lost(m, link);
            /* with a twin that is in again somebody can be put out */
            if (missed && (twin->state != LINK_GONE || !mark_returned(m, hub, twin)))
                say_alone(m, hub, link);
        }
}

bool membership_news(struct hub *hub)
{
    struct membership *m = hub->members.membership;
    struct shd_err e = { 0 };
    if (m == NULL || hub->leaving)
        return false;
    if (read_view(m, &e) != SHD_OK)
        say_unreachable(m, hub, &e);
    const bool any = any_to_go(m, hub);
    if (any)
        apply(m, hub);
    return any;
}

bool membership_lost(struct hub *hub, const struct link *link)
{
    struct membership *m = hub->members.membership;
    struct shd_err e = { 0 };
    if (m == NULL)
        return false;
    if (read_view(m, &e) != SHD_OK)
        say_unreachable(m, hub, &e);
    return link_is_lost(m, link);
}

void membership_look(struct hub *hub)
{
    struct membership *m = hub->members.membership;
    const uint64_t now_ns = clock_now_ns();
    struct shd_err e = { 0 };
    const bool hurry = hub->down_count > 0, waits = hub->at.waited_ns >= LOOK_NS;
    const uint64_t every_ns = hurry ? HURRY_NS : waits ? LOOK_NS : ALWAYS_NS;
    if (hub->leaving || (!hurry && !waits && m->unreachable) || now_ns - m->looked_ns < every_ns)
        return;
    m->looked_ns = now_ns;
    m->alone = m->alone && hurry;
    if (read_view(m, &e) != SHD_OK)
        say_unreachable(m, hub, &e);
    else if (hurry)
        put_out_missed(m, hub, now_ns);
    apply(m, hub);
}

int membership_settle(struct hub *hub, struct shd_err *e)
{
    int r = SHD_OK;
    while (r == SHD_OK && any_to_go(hub->members.membership, hub)) {
        apply(hub->members.membership, hub);
        if (any_to_go(hub->members.membership, hub))
            r = hub_poll(hub, SETTLE_NS, e);
    }
    return r == SHD_OK ? hub_check(hub, e) : r;
}

/* -- Hosts that come back ---------------------------------------------------------------------- */

int membership_refresh(struct hub *hub, struct shd_err *e)
{
    struct membership *m = hub->members.membership;
    const uint64_t start_ns = clock_now_ns();
    struct shd_err why = { 0 };
    while (read_view(m, &why) != SHD_OK) {
        say_unreachable(m, hub, &why);
        const uint64_t left_ns = hub_left_ns(hub, start_ns, HURRY_NS);
        if (left_ns == 0)
            return err_set(e, SHD_ETIMEDOUT,
                           "who of the hosts with replicas is in is not known: "
                           "%.200s",
                           why.text);
        const int r = hub_poll(hub, left_ns, e);
        if (r != SHD_OK)
            return r;
    }
    m->looked_ns = clock_now_ns();
    apply(m, hub);
    return hub_check(hub, e);
}

bool membership_reaches(struct hub *hub)
{
    struct shd_err why;
    return read_view(hub->members.membership, &why) == SHD_OK;
}

bool membership_join(struct hub *hub)
{
    const struct membership *m = hub->members.membership;
    bool join[ARBITER_HOSTS_MAX] = { false }, any = false;
    hub->members.returned = false;
    for (uint32_t i = 0; i < hub->link_count; i++)
        if (is_to_be_joined(m, hub, &hub->links[i]))
            join[host_of(m, &hub->links[i]) - m->hosts.hosts] = true;
    for (uint32_t i = 0; i < hub->link_count; i++) {
        struct link *link = &hub->links[i];
        if (!join[host_of(m, link) - m->hosts.hosts])
            continue;
        *came_of(m, link) = came_in_view(m, link);
        hub_return(hub, i);
        any = true;
    }
    return any;
}

bool membership_fills(const struct hub *hub, const struct link *link)
{
    const struct membership *m = hub->members.membership;
    const struct arbiter_behind *behind = m != NULL ? arbiter_view_behind(&m->view,
                                                                          host_of(m, link)->name)
                                                    : NULL;
    return behind != NULL && behind->filling;
}

void membership_give_up(struct hub *hub, const struct link *link, uint64_t start_ns)
{
    struct membership *m = hub->members.membership;
    bool out[ARBITER_HOSTS_MAX] = { false };
    if (clock_now_ns() - start_ns < FILLS_MAX * m->patience_ns)
        return;
    out[host_of(m, link) - m->hosts.hosts] = true;
    put_out(m, hub, out);
    apply(m, hub);
}
