/* See put.h. */
#include "client/paths/put.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "client/paths/commit.h"
#include "client/paths/map.h"
#include "client/paths/rejoin.h"
#include "client/paths/reset.h"
#include "client/session/hub.h"
#include "client/session/round.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/share/putmap.h"

struct part {                     /* an owner's */
    struct segment segment;       /* owned */
    struct wire_segment offered;  /* to be claimed */
    enum wire_created_what state; /* as it last answered */
};

struct putting { /* one attempt */
    struct shd_model *m;
    struct hub *hub;
    const struct path_put *put;
    struct part *parts; /* owned, [links] */
    float *values;      /* owned, [elements of the largest unit that is put] */
    struct decision decision;
    enum wire_create_what what;
    uint64_t attempt;     /* of the step that it is to end */
    uint64_t consent;     /* owner 0's */
    uint32_t successions; /* of the hub, when it began */
    bool begun;   /* by owner 0 at least; or it was asked to, and its answer not waited for */
    bool asked;   /* owner 0 was asked to commit */
    bool counted; /* it has */
};

/* -- What is put --------------------------------------------------------------------------------
 */

struct decision put_decision(const struct shd_model *m, const struct path_put *put, uint64_t origin)
{
    const struct decision *last = m->decided ? &m->decision : NULL;
    struct decision d = { .skip = true,
                          .lr = last != NULL ? last->lr : 0,
                          .put = origin,
                          .updates = put->updates,
                          .puts = (last != NULL ? last->puts : 0) + 1 };
    d.loss_scale = loss_scale_next(last, &d.good_steps);
    return d;
}

int put_fill(const struct shd_model *m, const struct path_put *put, uint32_t unit, uint32_t array,
             float *values, struct shd_err *e)
{
    const bool ema = array == spec_ema_array(m->spec);
    const int r = put->fill(put->ctx, unit, ema ? SHD_EMA : (enum shd_array)array, values);
    if (r != 0)
        return err_set(e, SHD_EINTERNAL,
                       "fill of array %" PRIu32 " of unit %" PRIu32 " '%s' gave up with %d: "
                       "nothing is put",
                       array, unit, m->spec->units[unit].name, r);
    unit_zero_gaps(m->spec, unit, values);
    return SHD_OK;
}

/* -- Requests -----------------------------------------------------------------------------------
 */

static void make_create(const struct round *round, const struct link *link,
                        struct wire_request *ret_request)
{
    const struct putting *p = round->ctx;
    const bool begin = p->what == WIRE_CREATE_PUT;
    ret_request->create = (struct wire_create){
        .what = p->what,
        .origin = p->decision.put,
        .name = "",
        .owner = link_owner(link),
        .owners = p->hub->owner_count,
        .model = p->m->map->owners[link->index].layout.handle,
        .step = p->m->step,
        .consent = p->consent,
        .attempt = begin ? p->attempt : 0,
        .arrays = { p->put->arrays, begin ? p->m->spec->unit_count : 0 },
    };
    if (begin && p->put->unit_updates != NULL)
        ret_request->create.unit_updates = (struct wire_bytes){
            (const uint8_t *)p->put->unit_updates, p->m->spec->unit_count * sizeof(uint64_t)
        };
}

static int take_created(const struct round *round, const struct link *link,
                        const struct wire_reply *reply, struct shd_err *e)
{
    (void)e;
    struct putting *p = round->ctx;
    struct part *part = &p->parts[link->index];
    part->state = reply->created.what;
    if (link->index == 0 && part->state == WIRE_CREATED_YOURS)
        p->consent = reply->created.consent;
    part->offered = (struct wire_segment){ .kind = SEGMENT_STAGE,
                                           .ticket = reply->created.ticket,
                                           .bytes = reply->created.bytes };
    return SHD_OK;
}

static struct round put_round(struct putting *p, enum wire_create_what what)
{
    p->what = what;
    return (struct round){ .what = "put",
                           .asks = WIRE_CREATE,
                           .type = WIRE_CREATED,
                           .make = make_create,
                           .take = take_created,
                           .replicated = true,
                           .ctx = p };
}

/* To owner 0 (first), or to all others; each must answer `wanted`, owner 0 also that it is over. */
static int ask(struct putting *p, enum wire_create_what what, bool first,
               enum wire_created_what wanted, struct shd_err *e)
{
    struct round round = put_round(p, what);
    const uint32_t end = first ? 1 : p->hub->link_count;
    int r = SHD_OK;
    for (uint32_t i = first ? 0 : 1; r == SHD_OK && i < end; i++)
        r = round_ask(&round, &p->hub->links[i], 0, e);
    r = round_finish(&round, p->hub, r, e);
    for (uint32_t i = first ? 0 : 1; r == SHD_OK && i < end; i++)
        if (p->hub->links[i].state != LINK_GONE && p->parts[i].state != wanted &&
            !(first && p->parts[i].state == WIRE_CREATED_OVER))
            r = link_err(&p->hub->links[i], SHD_ESTEP, e,
                         "answered a put in step %" PRIu64 " with %d", p->m->step,
                         (int)p->parts[i].state);
    return r;
}

static void make_commit(const struct round *round, const struct link *link,
                        struct wire_request *ret_request)
{
    const struct putting *p = round->ctx;
    ret_request->commit = (struct wire_commit){
        .model = p->m->map->owners[link->index].layout.handle,
        .step = p->m->step,
        .decision = p->decision,
        .recorded = link->index > 0,
    };
}

/* Owner 0 has had another put of this step first, or something else; or it has said how many
 * micro-batches the next step has, which goes to the others. */
static int take_committed(const struct round *round, const struct link *link,
                          const struct wire_reply *reply, struct shd_err *e)
{
    struct putting *p = round->ctx;
    const bool ours = !reply->committed.over && reply->committed.decision.put == p->decision.put;
    if (link->index == 0)
        p->counted = ours;
    if (link->index == 0 && ours)
        p->decision = reply->committed.decision;
    if (link->index > 0 && !ours)
        return link_err(link, SHD_EINTERNAL, e,
                        "has another decision of step %" PRIu64 " than the put that owner 0 has",
                        p->m->step);
    return SHD_OK;
}

/* To members [from, end). */
static int commit(struct putting *p, uint32_t from, uint32_t end, struct shd_err *e)
{
    struct round round = { .what = "Commit of a put",
                           .asks = WIRE_COMMIT,
                           .type = WIRE_COMMITTED,
                           .make = make_commit,
                           .take = take_committed,
                           .replicated = true,
                           .follows = p->counted,
                           .ctx = p };
    int r = SHD_OK;
    for (uint32_t i = from; r == SHD_OK && i < end; i++)
        r = round_ask(&round, &p->hub->links[i], p->m->step, e);
    return round_finish(&round, p->hub, r, e);
}

/* -- Values -------------------------------------------------------------------------------------
 */

static int take_segment(const struct putting *p, uint32_t owner, struct shd_err *e)
{
    struct link *link = &p->hub->links[owner];
    struct part *part = &p->parts[owner];
    const uint64_t bytes = putmap_bytes(p->m->map->owners[owner].shards, p->put->arrays,
                                        p->put->unit_updates != NULL);
    int fd = -1;
    if (part->offered.bytes != bytes)
        return link_err(link, SHD_ESEGMENT, e,
                        "offers %" PRIu64 " bytes for a put, the spec makes it %" PRIu64,
                        part->offered.bytes, bytes);
    int r = link_claim(link, &part->offered, &fd, e);
    if (r == SHD_OK)
        r = segment_map(fd, SEGMENT_STAGE, bytes, &part->segment, e);
    if (r != SHD_OK && fd >= 0)
        close(fd);
    return r;
}

static int write_array(const struct putting *p, uint32_t array, uint32_t unit, struct shd_err *e)
{
    const int r = put_fill(p->m, p->put, unit, array, p->values, e);
    for (uint32_t i = 0; r == SHD_OK && i < p->hub->link_count; i++) {
        if (p->parts[i].segment.base == NULL)
            continue; /* gone */
        const struct shardmap *map = p->m->map->owners[i].shards;
        const struct slice slice = map->slice[unit];
        const uint64_t at = putmap_offset_bytes(map, p->put->arrays, array, unit);
        memcpy((uint8_t *)p->parts[i].segment.base + at, p->values + slice.first_elem,
               slice.elems * sizeof *p->values);
    }
    return r;
}

static int write_all(const struct putting *p, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < p->hub->link_count; i++)
        if (p->hub->links[i].state != LINK_GONE)
            r = take_segment(p, i, e);
    for (uint32_t u = 0; r == SHD_OK && u < p->m->spec->unit_count; u++)
        for (uint32_t a = 0; r == SHD_OK && a < PUTMAP_ARRAYS; a++)
            if ((p->put->arrays[u] >> a & 1) != 0)
                r = write_array(p, a, u, e);
    return r;
}

/* -- An attempt ---------------------------------------------------------------------------------
 */

/* An older daemon would not understand counts of units. */
static int check_peers(const struct putting *p, struct shd_err *e)
{
    for (uint32_t i = 0; p->put->unit_updates != NULL && i < p->hub->link_count; i++)
        if (p->hub->links[i].state != LINK_GONE && p->hub->links[i].peer.level < WIRE_LEVEL_COUNTS)
            return link_err(&p->hub->links[i], SHD_ENOTSUP, e,
                            "is of an older build, which has one count of updates for all units: "
                            "put without unit_updates, or upgrade it");
    return SHD_OK;
}

static int make_parts(struct putting *p, struct shd_err *e)
{
    uint64_t elems = 0;
    for (uint32_t u = 0; u < p->m->spec->unit_count; u++)
        if (p->put->arrays[u] != 0 && p->m->spec->units[u].elems > elems)
            elems = p->m->spec->units[u].elems;
    p->parts = sys_calloc(p->hub->link_count, sizeof *p->parts);
    p->values = sys_malloc(elems * sizeof *p->values);
    if (p->parts == NULL || p->values == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a put of %" PRIu64 " elements", elems);
    for (uint32_t i = 0; i < p->hub->link_count; i++)
        p->parts[i].segment = SEGMENT_CLOSED;
    return SHD_OK;
}

static void free_parts(struct putting *p)
{
    for (uint32_t i = 0; p->parts != NULL && i < p->hub->link_count; i++)
        segment_close(&p->parts[i].segment);
    free(p->parts);
    free(p->values);
    p->parts = NULL;
    p->values = NULL;
}

/* Best effort: the values go with the session, or with their step. */
static void give_up(struct putting *p)
{
    struct round round = put_round(p, WIRE_CREATE_PUT_DROP);
    if (p->begun && !p->asked && hub_check(p->hub, NULL) == SHD_OK)
        round_let_go(&round, p->hub);
}

/* In an owner's place is its replica: what was said there was not said by that one, and what owner
 * 0 alone has recorded counts for nobody. */
static int check_places(struct putting *p, struct shd_err *e)
{
    if (p->successions == p->hub->members.successions)
        return SHD_OK;
    p->counted = false;
    return err_set(e, SHD_EGONE, "an owner was lost in the middle of a put");
}

/* Owner 0 has it on record: its replica next, so that whichever is lost, nobody else has what none
 * of them has; then the others. */
static int commit_others(struct putting *p, struct shd_err *e)
{
    const uint32_t owners = p->hub->owner_count, members = p->hub->link_count;
    int r = SHD_OK;
    if (members > owners) {
        r = commit(p, owners, owners + 1, e);
        if (r == SHD_OK)
            r = check_places(p, e);
        FAIL_POINT("put:twin_committed");
    }
    return r == SHD_OK ? commit(p, 1, members, e) : r;
}

/* *ret_over: the step is. */
static int attempt(struct putting *p, bool *ret_over, struct shd_err *e)
{
    int r = ask(p, WIRE_CREATE_PUT, /* first= */ true, WIRE_CREATED_YOURS, e);
    p->begun = r == SHD_ETIMEDOUT;
    *ret_over = r == SHD_OK && p->parts[0].state == WIRE_CREATED_OVER;
    if (r != SHD_OK || *ret_over)
        return r;
    p->begun = true;
    FAIL_POINT("put:begun");
    r = ask(p, WIRE_CREATE_PUT, /* first= */ false, WIRE_CREATED_YOURS, e);
    if (r == SHD_OK)
        r = check_places(p, e);
    if (r == SHD_OK)
        r = write_all(p, e);
    FAIL_POINT("put:written");
    if (r == SHD_OK)
        r = ask(p, WIRE_CREATE_PUT_FULL, /* first= */ true, WIRE_CREATED_FULL, e);
    FAIL_POINT("put:full");
    if (r == SHD_OK)
        r = ask(p, WIRE_CREATE_PUT_FULL, /* first= */ false, WIRE_CREATED_FULL, e);
    FAIL_POINT("put:all_full");
    if (r == SHD_OK)
        r = check_places(p, e);
    if (r != SHD_OK)
        return r;
    p->asked = true;
    r = commit(p, 0, 1, e);
    p->asked = r != SHD_EBUSY && r != SHD_ENOENT;
    *ret_over = r == SHD_OK && !p->counted;
    FAIL_POINT("put:committed");
    if (r == SHD_OK && p->counted)
        r = commit_others(p, e);
    FAIL_POINT("put:all_committed");
    return r;
}

/* Somebody has ended the step: by a put, then that counts. */
static int look_who(const struct putting *p, bool *ret_counts, struct shd_err *e)
{
    struct shd_model *m = p->m;
    const uint64_t step = m->step, puts = m->decided ? m->decision.puts : 0;
    const int r = settle_catch_up(m, e);
    if (r != SHD_OK)
        return r;
    *ret_counts = m->decided && m->decision.put != 0 && m->decision.put == m->map->put_origin;
    if (m->decided && m->decision.puts > puts)
        return SHD_OK;
    return err_set(e, SHD_ESTEP,
                   "step %" PRIu64 " was committed by other workers before the put, and step "
                   "%" PRIu64 " is open: put where no other worker trains",
                   step, m->step);
}

/* Connections that were lost, ever. */
static uint64_t losses(const struct hub *hub)
{
    uint64_t count = 0;
    for (uint32_t i = 0; i < hub->link_count; i++)
        count += hub->links[i].epoch;
    return count;
}

/* Who is in is read behind the attempt: a host that comes in later does so with another one, in
 * which owners begin no such put. */
static int put_once(struct shd_model *m, const struct path_put *put, bool *ret_counts,
                    bool *ret_again, struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    struct putting p = { .m = m, .hub = hub, .put = put, .attempt = reset_attempt(m) };
    uint64_t origin = 0;
    bool over = false, any;
    int r = rejoin_look(m, /* opening= */ NULL, &any, e);
    const uint64_t losses_before = losses(p.hub);
    p.successions = hub->members.successions;
    if (r == SHD_OK)
        r = check_peers(&p, e);
    if (r == SHD_OK)
        r = make_parts(&p, e);
    while (r == SHD_OK && origin == 0)
        if (getrandom(&origin, sizeof origin, 0) != (ssize_t)sizeof origin)
            r = err_sys(e, SHD_EIO, "get random bytes");
    p.decision = put_decision(m, put, origin);
    if (r == SHD_OK)
        r = attempt(&p, &over, e);
    if (p.begun)
        m->map->put_origin = origin;
    /* A daemon that died has forgotten its part. */
    *ret_again = p.begun && !p.counted && (r == SHD_ENOENT || r == SHD_EGONE) &&
                 losses(p.hub) != losses_before && hub_check(p.hub, NULL) == SHD_OK;
    *ret_again = *ret_again || (!p.begun && r == SHD_ERESET && reset_attempt(m) != p.attempt);
    if (r != SHD_OK && !p.counted)
        give_up(&p);
    free_parts(&p);
    if (r != SHD_OK || over)
        return r == SHD_OK ? look_who(&p, ret_counts, e) : r;
    model_decided(m, &p.decision);
    m->step++;
    *ret_counts = true;
    return SHD_OK;
}

int put_values(struct shd_model *m, const struct path_put *put, bool *ret_counts, struct shd_err *e)
{
    bool again = true;
    int r = SHD_OK;
    while (again)
        r = put_once(m, put, ret_counts, &again, e);
    if (r == SHD_ECANCELED)
        hub_renew(m->session->hub);
    return r;
}
