/* See create.h. */
#include "client/paths/create.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "client/paths/look.h"
#include "client/paths/map.h"
#include "client/paths/rewind.h"
#include "client/session/hub.h"
#include "client/session/round.h"
#include "client/session/session.h"
#include "client/session/spec_out.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/share/segment.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"
#include "proto/spec/settings.h"

#define FORKS_MAX 64u
#define LEAD_MAX  4096u /* steps ahead of the furthest owner */
#define POLL_NS   (20 * NS_PER_MS)
#define REACH_NS  (2000 * NS_PER_MS) /* for a step that was to come */

struct part {                     /* an owner's */
    struct shardmap *shards;      /* owned */
    struct segment stage;         /* owned */
    struct wire_segment offered;  /* to be claimed */
    enum wire_created_what state; /* as it last answered */
};

struct creating { /* one attempt */
    struct hub *hub;
    const struct spec *spec;
    const struct spec_out *json;
    struct starts *starts;
    struct part *parts; /* owned, [links] */
    float *values;      /* owned, [elements of the largest unit] */
    uint64_t origin;
    bool one_count; /* as wire_open_model */
    enum wire_create_what what;
    char by[WIRE_NAME_BYTES_MAX];
    bool begun;  /* by owner 0 at least; or it was asked to, and its answer was not waited for */
    bool opened; /* owner 0 was asked to */
    struct round putting;
};

/* -- Create -------------------------------------------------------------------------------------
 */

static void make_create(const struct round *round, const struct link *link,
                        struct wire_request *ret_request)
{
    const struct creating *c = round->ctx;
    const bool begin = c->what == WIRE_CREATE_BEGIN;
    ret_request->create = (struct wire_create){
        .what = c->what,
        .origin = c->origin,
        .name = begin ? c->spec->name : "",
        .owner = link_owner(link),
        .owners = c->hub->owner_count,
        .one_count = begin && c->one_count,
        .twin = link_is_replica(link),
    };
    if (begin)
        spec_out_fill(c->json, &ret_request->create.spec, &ret_request->create.spec_at);
}

static int take_created(const struct round *round, const struct link *link,
                        const struct wire_reply *reply, struct shd_err *e)
{
    (void)e;
    struct creating *c = round->ctx;
    struct part *part = &c->parts[link->index];
    part->state = reply->created.what;
    part->offered = (struct wire_segment){ .kind = SEGMENT_STAGE,
                                           .ticket = reply->created.ticket,
                                           .bytes = reply->created.bytes };
    memcpy(c->by, reply->created.by, strlen(reply->created.by) + 1);
    return SHD_OK;
}

static struct round create_round(struct creating *c, enum wire_create_what what)
{
    c->what = what;
    return (struct round){ .what = "start values",
                           .asks = WIRE_CREATE,
                           .type = WIRE_CREATED,
                           .make = make_create,
                           .take = take_created,
                           .replicated = true,
                           .spec = what == WIRE_CREATE_BEGIN ? c->json : NULL,
                           .ctx = c };
}

enum whom {
    OWNER_0,
    REPLICA_0, /* of that one, if there is one */
    OTHERS,
    ALL_OTHERS, /* but owner 0 */
};

static bool is_of(const struct link *link, enum whom whom)
{
    if (link->index == 0 || whom == OWNER_0)
        return link->index == 0 && whom == OWNER_0;
    return whom == ALL_OTHERS || (link_owner(link) == 0) == (whom == REPLICA_0);
}

/* Each must answer `wanted`. */
static int ask(struct creating *c, enum wire_create_what what, enum whom whom,
               enum wire_created_what wanted, struct shd_err *e)
{
    struct round round = create_round(c, what);
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < c->hub->link_count; i++)
        if (is_of(&c->hub->links[i], whom))
            r = round_ask(&round, &c->hub->links[i], 0, e);
    r = round_finish(&round, c->hub, r, e);
    for (uint32_t i = 0; r == SHD_OK && i < c->hub->link_count; i++)
        if (c->hub->links[i].state == LINK_GONE || !is_of(&c->hub->links[i], whom))
            continue;
        else if (c->parts[i].state == WIRE_CREATED_OPEN && what == WIRE_CREATE_BEGIN && i > 0)
            r = link_err(&c->hub->links[i], SHD_EEXIST, e, "has model '%s' open, and %s has not",
                         c->spec->name, c->hub->links[0].device);
        else if (c->parts[i].state != wanted && (i > 0 || what != WIRE_CREATE_BEGIN))
            r = link_err(&c->hub->links[i], SHD_EPROTO, e, "answered start values with %d",
                         (int)c->parts[i].state);
    return r;
}

/* -- Stages -------------------------------------------------------------------------------------
 */

static int take_stage(const struct creating *c, uint32_t owner, struct shd_err *e)
{
    struct link *link = &c->hub->links[owner];
    struct part *part = &c->parts[owner];
    uint64_t elems = 0;
    int fd = -1;
    for (uint32_t u = 0; u < c->spec->unit_count; u++)
        if (part->shards->slice[u].elems > elems)
            elems = part->shards->slice[u].elems;
    const uint64_t bytes = elems > 0 ? layout_align(elems * sizeof(float), SHD_PAGE_BYTES)
                                     : SHD_PAGE_BYTES;
    if (part->offered.bytes != bytes)
        return link_err(link, SHD_ESEGMENT, e,
                        "offers a stage of %" PRIu64 " bytes, the spec makes it %" PRIu64,
                        part->offered.bytes, bytes);
    int r = link_claim(link, &part->offered, &fd, e);
    if (r == SHD_OK)
        r = segment_map(fd, SEGMENT_STAGE, bytes, &part->stage, e);
    if (r != SHD_OK && fd >= 0)
        close(fd);
    return r;
}

static int make_parts(struct creating *c, struct shd_err *e)
{
    const uint32_t members = c->hub->link_count;
    uint64_t elems = 0;
    for (uint32_t u = 0; u < c->spec->unit_count; u++)
        if (c->spec->units[u].elems > elems)
            elems = c->spec->units[u].elems;
    c->parts = sys_calloc(members, sizeof *c->parts);
    c->values = sys_malloc(elems * sizeof *c->values);
    if (c->parts == NULL || c->values == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for start values of %" PRIu64 " elements", elems);
    int r = SHD_OK;
    for (uint32_t i = 0; i < members; i++)
        c->parts[i].stage = SEGMENT_CLOSED;
    for (uint32_t i = 0; r == SHD_OK && i < members; i++)
        r = shardmap_new(c->spec, i % c->hub->owner_count, c->hub->owner_count, &c->parts[i].shards,
                         e);
    return r;
}

static void free_parts(struct creating *c)
{
    for (uint32_t i = 0; c->parts != NULL && i < c->hub->link_count; i++) {
        segment_close(&c->parts[i].stage);
        shardmap_free(c->parts[i].shards);
    }
    free(c->parts);
    free(c->values);
    c->parts = NULL;
    c->values = NULL;
}

/* -- Units --------------------------------------------------------------------------------------
 */

static void make_put(const struct round *round, const struct link *link,
                     struct wire_request *ret_request)
{
    (void)link;
    const struct creating *c = round->ctx;
    ret_request->put = (struct wire_put){ .origin = c->origin, .unit = (uint32_t)round->arg };
}

static int put_unit(struct creating *c, uint32_t unit, struct shd_err *e)
{
    int r = SHD_OK;
    c->putting = (struct round){ .what = "Put",
                                 .asks = WIRE_PUT,
                                 .type = WIRE_REPLY_NONE,
                                 .make = make_put,
                                 .replicated = true,
                                 .ctx = c };
    for (uint32_t i = 0; r == SHD_OK && i < c->hub->link_count; i++) {
        if (c->parts[i].stage.base == NULL)
            continue; /* gone */
        const struct slice slice = c->parts[i].shards->slice[unit];
        memcpy(c->parts[i].stage.base, c->values + slice.first_elem,
               slice.elems * sizeof *c->values);
        r = round_ask(&c->putting, &c->hub->links[i], unit, e);
    }
    return r;
}

static int put_units(struct creating *c, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t u = 0; r == SHD_OK && u < c->spec->unit_count; u++) {
        r = starts_fill(c->starts, c->spec, u, c->values, e);
        if (u > 0) {
            const int taken = round_finish(&c->putting, c->hub, r, r == SHD_OK ? e : NULL);
            r = r == SHD_OK ? taken : r;
        }
        if (r == SHD_OK)
            r = put_unit(c, u, e);
        if (r != SHD_OK)
            hub_forget(c->hub, &c->putting);
    }
    return r == SHD_OK ? round_finish(&c->putting, c->hub, r, e) : r;
}

static int put_all(struct creating *c, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < c->hub->link_count; i++)
        if (c->hub->links[i].state != LINK_GONE)
            r = take_stage(c, i, e);
    return r == SHD_OK ? put_units(c, e) : r;
}

/* -- Forking ------------------------------------------------------------------------------------
 */

static void make_fork(const struct round *round, const struct link *link,
                      struct wire_request *ret_request)
{
    const struct creating *c = round->ctx;
    const struct settings *change = c->starts->change;
    ret_request->fork = (struct wire_fork){
        .origin = c->origin,
        .model = c->starts->from->map->owners[link->index].layout.handle,
        .step = c->starts->step
    };
    if (change == NULL || link_owner(link) > 0)
        return;
    const struct settings_bytes b = settings_pack(change);
    ret_request->fork.settings = (struct wire_bytes){ b.old, b.old_bytes };
    ret_request->fork.settings_more = (struct wire_bytes){ b.more, b.more_bytes };
}

static int take_forked(const struct round *round, const struct link *link,
                       const struct wire_reply *reply, struct shd_err *e)
{
    const struct creating *c = round->ctx;
    if (reply->forked.step == c->starts->step)
        return SHD_OK;
    return link_err(link, SHD_EPROTO, e, "forked step %" PRIu64 ", not %" PRIu64,
                    reply->forked.step, c->starts->step);
}

/* All at one step, or SHD_ESTEP, SHD_ETIMEDOUT. */
static int fork_at(struct creating *c, uint64_t step, struct shd_err *e)
{
    struct round round = { .what = "Fork",
                           .asks = WIRE_FORK,
                           .type = WIRE_FORKED,
                           .make = make_fork,
                           .take = take_forked,
                           .replicated = true,
                           .ctx = c };
    c->starts->step = step;
    return round_all(&round, c->hub, 0, e);
}

/* The furthest owner's step; where that moves on meanwhile, one further ahead each time. One that
 * nobody reaches is given up for the one that is open. */
static int fork_open(struct creating *c, struct shd_err *e)
{
    const uint64_t timeout_ns = c->hub->timeout_ns;
    const bool patient = c->hub->patient;
    uint64_t lead = 0;
    int r = SHD_ESTEP;
    for (uint32_t i = 0; (r == SHD_ESTEP || r == SHD_ETIMEDOUT) && i < FORKS_MAX; i++) {
        c->hub->patient = lead == 0 && patient;
        c->hub->timeout_ns = lead == 0 ? timeout_ns : REACH_NS;
        const struct rewind_mark mark = rewind_mark(c->starts->from);
        r = fork_at(c, look_furthest(c->starts->from) + lead, e);
        if (r == SHD_OK && rewind_since(c->starts->from, &mark)) {
            r = err_set(e, SHD_ESTEP, "model '%s' goes back and forth: fork it when it is at rest",
                        c->starts->from->spec->name);
            hub_poll(c->hub, POLL_NS, NULL);
        }
        if (r == SHD_ETIMEDOUT && lead == 0)
            break;
        lead = r == SHD_ETIMEDOUT ? 0 : lead < LEAD_MAX ? 2 * lead + 1 : lead;
    }
    c->hub->patient = patient;
    c->hub->timeout_ns = timeout_ns;
    return r;
}

static int fork_all(struct creating *c, struct shd_err *e)
{
    return c->starts->exact ? fork_at(c, c->starts->step, e) : fork_open(c, e);
}

/* -- An attempt ---------------------------------------------------------------------------------
 */

/* Best effort: daemons that do not hear of it drop the model with the session. */
static void give_up(struct creating *c)
{
    struct round round = create_round(c, WIRE_CREATE_DROP);
    if (c->begun && !c->opened && hub_check(c->hub, NULL) == SHD_OK)
        round_let_go(&round, c->hub);
}

/* Owner 0's replica has it whole once all others have: it may be asked in its place from then on
 * (daemon/core/presence.h). */
static int open_all(struct creating *c, struct shd_err *e)
{
    int r = ask(c, WIRE_CREATE_FULL, OWNER_0, WIRE_CREATED_FULL, e);
    if (r == SHD_OK)
        r = ask(c, WIRE_CREATE_FULL, OTHERS, WIRE_CREATED_FULL, e);
    FAIL_POINT("open:others_full");
    if (r == SHD_OK)
        r = ask(c, WIRE_CREATE_FULL, REPLICA_0, WIRE_CREATED_FULL, e);
    if (r != SHD_OK)
        return r;
    FAIL_POINT("open:full");
    c->opened = true;
    r = ask(c, WIRE_CREATE_OPEN, OWNER_0, WIRE_CREATED_OPEN, e);
    if (r == SHD_ENOENT)
        c->opened = false;
    if (r != SHD_OK)
        return r;
    c->starts->created = true;
    FAIL_POINT("open:opened");
    r = ask(c, WIRE_CREATE_OPEN, ALL_OTHERS, WIRE_CREATED_OPEN, e);
    FAIL_POINT("open:all_opened");
    return r;
}

static int attempt(struct creating *c, struct shd_err *e)
{
    int r = ask(c, WIRE_CREATE_BEGIN, OWNER_0, WIRE_CREATED_YOURS, e);
    c->begun = r == SHD_ETIMEDOUT;
    if (r != SHD_OK || c->parts[0].state == WIRE_CREATED_OPEN)
        return r;
    if (c->parts[0].state != WIRE_CREATED_YOURS)
        return err_set(e, SHD_ENOENT,
                       "model '%s' is not there yet: session '%s' puts its start values",
                       c->spec->name, c->by);
    c->begun = true;
    FAIL_POINT("open:begun");
    r = ask(c, WIRE_CREATE_BEGIN, ALL_OTHERS, WIRE_CREATED_YOURS, e);
    FAIL_POINT("open:all_begun");
    if (c->starts->from != NULL)
        r = r == SHD_OK ? fork_all(c, e) : r;
    else
        r = r == SHD_OK ? put_all(c, e) : r;
    FAIL_POINT("open:put");
    return r == SHD_OK ? open_all(c, e) : r;
}

/* Connections that were lost, ever. */
static uint64_t losses(const struct hub *hub)
{
    uint64_t count = 0;
    for (uint32_t i = 0; i < hub->link_count; i++)
        count += hub->links[i].epoch;
    return count;
}

static int create_once(const struct shd_model *m, const struct spec_out *json,
                       struct starts *starts, bool *ret_again, struct shd_err *e)
{
    struct creating c = { .hub = m->session->hub,
                          .spec = m->spec,
                          .json = json,
                          .starts = starts,
                          .one_count = hub_has_older(m->session->hub, WIRE_LEVEL_COUNTS) };
    const uint64_t losses_before = losses(c.hub);
    int r = make_parts(&c, e);
    while (r == SHD_OK && c.origin == 0)
        if (getrandom(&c.origin, sizeof c.origin, 0) != (ssize_t)sizeof c.origin)
            r = err_sys(e, SHD_EIO, "get random bytes");
    if (r == SHD_OK)
        r = attempt(&c, e);
    /* A daemon that died has forgotten its part, or never heard of the attempt. */
    *ret_again = c.begun && !starts->created && (r == SHD_ENOENT || r == SHD_EGONE) &&
                 losses(c.hub) != losses_before && hub_check(c.hub, NULL) == SHD_OK;
    if (r != SHD_OK)
        give_up(&c);
    free_parts(&c);
    return r;
}

int create_model(struct shd_model *m, const struct spec_out *json, struct starts *starts,
                 struct shd_err *e)
{
    bool again = true;
    int r = SHD_OK;
    starts->created = false;
    while (again)
        r = create_once(m, json, starts, &again, e);
    return r;
}
