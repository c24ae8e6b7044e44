/* See refill_model.h. */
#include "client/checkpoint/refill_model.h"

#include <inttypes.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "client/checkpoint/restore.h"
#include "client/checkpoint/save.h"
#include "client/paths/layout.h"
#include "client/paths/map.h"
#include "client/paths/rewind.h"
#include "client/session/hub.h"
#include "client/session/link.h"
#include "client/session/round.h"
#include "proto/base/clock.h"
#include "proto/base/failpoint.h"
#include "proto/spec/settings_text.h"

#define TRIES_MAX 20u
#define LEAD_MAX  4096u
#define POLL_NS   (20 * NS_PER_MS)
#define STILL_NS  (20 * NS_PER_S) /* so long no step: nobody trains */

/* -- Asking ------------------------------------------------------------------------------------ */

/* One request to one daemon, of the others or of the host. */
struct asking { /* ctx of its rounds */
    const struct refill_model *m;
    struct wire_request body;
    struct wire_reply reply;    /* without what it points to */
    struct settings_kept *kept; /* what a SET says is set; NULL: not wanted */
};

static uint32_t handle_at(const struct refill_model *m, const struct link *link)
{
    return link->hub == m->there ? m->handles[link->index]
                                 : m->model->map->owners[link->index].layout.handle;
}

static void make_body(const struct round *round, const struct link *link,
                      struct wire_request *ret_request)
{
    const struct asking *a = round->ctx;
    const uint64_t seq = ret_request->seq;
    *ret_request = a->body;
    ret_request->seq = seq;
    if (a->body.type == WIRE_SNAPSHOT)
        ret_request->snapshot.model = handle_at(a->m, link);
    else if (a->body.type == WIRE_SET)
        ret_request->set.model = handle_at(a->m, link);
    else
        ret_request->rewind.model = handle_at(a->m, link);
}

static int take_reply(const struct round *round, const struct link *link,
                      const struct wire_reply *reply, struct shd_err *e)
{
    struct asking *a = round->ctx;
    const struct wire_bytes *json = &reply->set_answer.json;
    (void)link;
    a->reply = *reply;
    return a->kept == NULL ? SHD_OK
                           : settings_read(a->m->model->spec, (const char *)json->data, json->bytes,
                                           a->kept, e);
}

static struct round round_of(struct asking *a)
{
    const bool snapshot = a->body.type == WIRE_SNAPSHOT, set = a->body.type == WIRE_SET;
    return (struct round){ .what = snapshot ? "Snapshot"
                                   : set    ? "Set"
                                            : "Rewind",
                           .hint = "it may be busy with its memory",
                           .asks = a->body.type,
                           .type = snapshot ? WIRE_SNAPSHOTS
                                   : set    ? WIRE_SET_ANSWER
                                            : WIRE_REWOUND,
                           .make = make_body,
                           .take = take_reply,
                           .replicated = true,
                           .ctx = a };
}

static int ask(struct asking *a, struct link *link, struct shd_err *e)
{
    struct round round = round_of(a);
    a->reply = (struct wire_reply){ .type = WIRE_REPLY_NONE };
    return round_one(&round, link, 0, e);
}

/* The same of all that are there. */
static int ask_all(struct asking *a, struct hub *hub, uint32_t from, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t i = from; r == SHD_OK && i < hub->link_count; i++)
        if (hub->links[i].state != LINK_GONE)
            r = ask(a, &hub->links[i], e);
    return r;
}

static struct asking snapshot_of(const struct refill_model *m, enum wire_snapshot_what what)
{
    return (struct asking){
        .m = m, .body = { .type = WIRE_SNAPSHOT, .snapshot = { .what = what, .step = m->step } }
    };
}

/* One that does not know of it would undo settings that its twin keeps. Looked at once: a daemon
 * may be upgraded while its host, or another, is filled. */
static bool all_keep_settings(const struct refill_model *m)
{
    return !hub_has_older(m->model->session->hub, WIRE_LEVEL_STAYS) &&
           !hub_has_older(m->there, WIRE_LEVEL_STAYS);
}

static struct asking rewind_of(const struct refill_model *m, enum wire_rewind_what what,
                               uint64_t attempt)
{
    return (struct asking){ .m = m,
                            .body = { .type = WIRE_REWIND,
                                      .rewind = { .what = what,
                                                  .step = m->step,
                                                  .attempt = attempt,
                                                  .consent = m->consent,
                                                  .keep_settings = m->keep_settings } } };
}

static struct link *owner_0(const struct refill_model *m)
{
    return &m->model->session->hub->links[0];
}

static int look_set(const struct refill_model *m, struct link *link, struct settings_kept *ret_kept,
                    struct shd_err *e)
{
    struct asking a = { .m = m,
                        .body = { .type = WIRE_SET, .set = { .look = true } },
                        .kept = ret_kept };
    return ask(&a, link, e);
}

/* Owner 0 answers with the decision of the step before the open one. */
static int look_puts(const struct refill_model *m, uint64_t *ret_puts, struct shd_err *e)
{
    struct link *link = owner_0(m);
    struct map_layout layout = { 0 };
    struct layout_opening o = { .m = m->model,
                                .name = shd_model_name(m->model),
                                .ret_layout = &layout };
    int r = SHD_EGONE;
    for (uint32_t i = 0; r == SHD_EGONE && i < TRIES_MAX; i++) { /* a daemon that is there again */
        r = layout_ask(&o, link, e);
        if (r == SHD_OK)
            r = segments_take(m->model, link, &layout, /* wanted= */ 0, e);
    }
    *ret_puts = r == SHD_OK && layout.decided ? layout.decision.puts : 0;
    return r;
}

/* -- At the others ----------------------------------------------------------------------------- */

/* Of the step that is to come, or passes: is anybody on the way there? */
static int look_still(const struct refill_model *m, uint64_t *furthest, uint64_t *moved_ns,
                      struct shd_err *e)
{
    const uint64_t step = save_step(m->model), now_ns = clock_now_ns();
    if (step != *furthest || step >= m->step)
        *moved_ns = now_ns;
    *furthest = step;
    if (now_ns - *moved_ns < STILL_NS)
        return SHD_OK;
    return err_set(e, SHD_ETIMEDOUT,
                   "model '%s' is at step %" PRIu64 ", and does not come to step %" PRIu64
                   ", which was to be kept",
                   shd_model_name(m->model), step, m->step);
}

/* Until the snapshot that round asks for is kept by all, and the checkpoint is written.
 * *ret_step: of that. */
static int await_both(const struct refill_model *m, struct round *round, uint64_t *ret_step,
                      struct shd_err *e)
{
    struct shd_checkpointed saved = { .size = sizeof saved };
    uint64_t furthest = 0, moved_ns = clock_now_ns();
    bool done = false;
    int r = SHD_OK;
    while (r == SHD_OK && (!done || (round->waiting > 0 && round->err.code == SHD_OK))) {
        r = hub_poll(m->model->session->hub, POLL_NS, e);
        if (r == SHD_OK && !done)
            r = shd_checkpoint_poll(m->model, &done, &saved, e);
        if (r == SHD_OK)
            r = look_still(m, &furthest, &moved_ns, e);
    }
    *ret_step = saved.step;
    return r;
}

/* Both are asked for before either is waited for. SHD_ESTEP: too late for the snapshot. */
static int save_step_at(struct refill_model *m, const char *path, uint64_t *ret_step,
                        struct shd_err *e)
{
    struct hub *hub = m->model->session->hub;
    const struct shd_checkpoint_options options = { .size = sizeof options,
                                                    .keep = 1,
                                                    .step = m->step };
    struct asking a = snapshot_of(m, WIRE_SNAPSHOT_TAKE);
    struct round round = round_of(&a);
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < hub->link_count; i++)
        r = round_ask(&round, &hub->links[i], 0, e);
    if (r == SHD_OK)
        r = shd_checkpoint_begin(m->model, path, &options, e);
    if (r == SHD_OK)
        r = await_both(m, &round, ret_step, e);
    return round_finish(&round, hub, r, e);
}

/* The first one is the open one, which may be over by then; so the next are further ahead. */
static int save_one_step(struct refill_model *m, const char *path, struct shd_err *e)
{
    uint64_t lead = 0;
    for (uint32_t i = 0; i < TRIES_MAX; i++) {
        uint64_t saved = 0;
        m->step = save_step(m->model) + lead;
        const int r = save_step_at(m, path, &saved, e);
        if (r == SHD_OK && saved == m->step)
            return SHD_OK;
        if (r != SHD_OK && r != SHD_ESTEP)
            return r;
        lead = lead == 0 ? 1 : lead < LEAD_MAX ? 2 * lead : LEAD_MAX;
    }
    return err_set(e, SHD_ETIMEDOUT, "no step of model '%s' could be kept and saved in %u tries",
                   shd_model_name(m->model), TRIES_MAX);
}

/* The snapshot stays from here on. */
static int hold(struct refill_model *m, struct shd_err *e)
{
    struct hub *hub = m->model->session->hub;
    uint64_t to;
    m->consent = 0;
    m->known = rewind_newest(m->model, &to);
    struct asking first = rewind_of(m, WIRE_REWIND_HOLD, m->known);
    const int r = ask(&first, &hub->links[0], e);
    if (r != SHD_OK)
        return r;
    m->consent = first.reply.rewound.consent;
    struct asking others = rewind_of(m, WIRE_REWIND_HOLD, m->known);
    return ask_all(&others, hub, 1, e);
}

int refill_model_save(struct refill_model *m, const char *path, struct shd_err *e)
{
    const int r = save_one_step(m, path, e);
    m->keep_settings = all_keep_settings(m);
    return r == SHD_OK ? hold(m, e) : r;
}

/* -- At the host ------------------------------------------------------------------------------- */

struct opening { /* ctx of its round */
    struct refill_model *m;
    struct wire_segment segments[WIRE_SEGMENTS_MAX];
    uint32_t segment_count;
};

static void make_open(const struct round *round, const struct link *link,
                      struct wire_request *ret_request)
{
    const struct opening *o = round->ctx;
    ret_request->open_model = (struct wire_open_model){
        .name = shd_model_name(o->m->model),
        .owner = link_owner(link),
        .owners = link_owners(link),
        .settled = true,
        .spec_apart = true,
    };
}

static int take_open(const struct round *round, const struct link *link,
                     const struct wire_reply *reply, struct shd_err *e)
{
    struct opening *o = round->ctx;
    const struct wire_layout *layout = &reply->layout;
    if (layout->step != o->m->step)
        return link_err(link, SHD_ESTEP, e,
                        "has model '%s' at step %" PRIu64 ", restored was step %" PRIu64,
                        shd_model_name(o->m->model), layout->step, o->m->step);
    o->m->handles[link->index] = layout->model;
    memcpy(o->segments, layout->segments, sizeof o->segments);
    o->segment_count = layout->segment_count;
    return SHD_OK;
}

/* None of what it offers is mapped here: only let go of the tickets. */
static int open_there(struct refill_model *m, struct link *link, struct shd_err *e)
{
    struct opening o = { .m = m };
    struct round round = { .what = "OpenModel",
                           .asks = WIRE_OPEN_MODEL,
                           .type = WIRE_LAYOUT,
                           .make = make_open,
                           .take = take_open,
                           .ctx = &o };
    int r = round_one(&round, link, 0, e);
    for (uint32_t i = 0; r == SHD_OK && i < o.segment_count; i++) {
        int fd;
        r = link_claim(link, &o.segments[i], &fd, e);
        if (r == SHD_OK)
            close(fd);
    }
    return r;
}

/* What is kept by itself is kept there as at owner 0. */
static int copy_options(const struct refill_model *m, struct shd_err *e)
{
    struct asking look = snapshot_of(m, WIRE_SNAPSHOT_LOOK);
    struct asking set = snapshot_of(m, WIRE_SNAPSHOT_EVERY);
    const int r = ask(&look, owner_0(m), e);
    if (r != SHD_OK)
        return r;
    set.body.snapshot.every = look.reply.snapshots.every;
    set.body.snapshot.keep = look.reply.snapshots.keep;
    return ask_all(&set, m->there, 0, e);
}

int refill_model_restore(struct refill_model *m, const char *path, struct shd_err *e)
{
    const struct map_layout *first = &m->model->map->owners[0].layout;
    const struct restore_as as = { .id = layout_source(m->model, first),
                                   .one_count = first->one_count };
    uint64_t step = 0;
    int r = restore_seats(m->there, path, &as, &step, e);
    for (uint32_t i = 0; r == SHD_OK && i < m->there->link_count; i++)
        r = open_there(m, &m->there->links[i], e);
    if (r == SHD_OK)
        r = copy_options(m, e);
    if (r != SHD_OK)
        return r;
    struct asking keep = snapshot_of(m, WIRE_SNAPSHOT_TAKE);
    r = ask_all(&keep, m->there, 0, e);
    if (r != SHD_OK)
        return r;
    struct asking stay = rewind_of(m, WIRE_REWIND_HOLD, /* attempt= */ 0);
    return ask_all(&stay, m->there, 0, e);
}

/* -- Back, all of them ------------------------------------------------------------------------- */

/* Owner 0's replica was restored with what had been set by then. Told the rest while it is at that
 * step it keeps it as owner 0 does, and whoever fills the host may die. */
static int tell_set(const struct refill_model *m, struct link *replica, struct shd_err *e)
{
    struct settings_kept kept;
    struct settings change;
    uint64_t step, next = 0;
    int r;
    while ((r = look_set(m, replica, &kept, e)) == SHD_OK &&
           settings_lacks(&m->was, &kept, m->step, &change, &step) && step >= next) {
        const struct settings_bytes b = settings_pack(&change);
        struct asking a = { .m = m,
                            .body = { .type = WIRE_SET,
                                      .set = { .change = { b.old, b.old_bytes },
                                               .more = { b.more, b.more_bytes },
                                               .from = step } } };
        if (getrandom(&a.body.set.id, sizeof a.body.set.id, 0) != (ssize_t)sizeof a.body.set.id)
            return err_sys(e, SHD_EIO, "get random bytes");
        r = ask(&a, replica, e);
        if (r != SHD_OK)
            return r;
        next = step + 1; /* whatever the replica makes of it, this comes to an end */
    }
    return r;
}

static int tell_replica(const struct refill_model *m, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < m->there->link_count; i++)
        if (link_owner(&m->there->links[i]) == 0)
            r = tell_set(m, &m->there->links[i], e);
    return r;
}

/* Another session may have gone back to the step before the view with the host: workers have gone
 * along with that rewind, without the host. So the snapshot is held anew, and what counts is a
 * rewind from here on. What is set or put behind the look has owner 0 refuse. */
static int go(struct refill_model *m, uint64_t *ret_attempt, struct shd_err *e)
{
    bool apart;
    int r = rewind_together(m->model, &apart, e);
    if (r == SHD_OK)
        r = hold(m, e);
    if (r == SHD_OK)
        r = look_puts(m, &m->puts, e);
    if (r == SHD_OK)
        r = look_set(m, owner_0(m), &m->was, e);
    if (r != SHD_OK)
        return r;
    FAIL_POINT("refill:looked");
    r = tell_replica(m, e);
    if (r != SHD_OK)
        return r;
    struct asking asked = rewind_of(m, WIRE_REWIND_GO, m->known);
    r = ask(&asked, owner_0(m), e);
    *ret_attempt = asked.reply.rewound.attempt;
    return r;
}

/* The host has never gone back: it is asked by its own count. */
int refill_model_go_back(struct refill_model *m, struct shd_err *e)
{
    struct hub *hub = m->model->session->hub;
    uint64_t attempt = 0;
    int r = go(m, &attempt, e);
    for (uint32_t i = 0; r == SHD_ESTEP && i < TRIES_MAX; i++) { /* others are at the same */
        r = hub_poll(hub, POLL_NS, e);
        if (r == SHD_OK)
            r = go(m, &attempt, e);
    }
    if (r == SHD_ENOENT)
        return err_set(e, SHD_ESTEP,
                       "model '%s' went back to before step %" PRIu64
                       ", which the host was filled with: do it again",
                       shd_model_name(m->model), m->step);
    if (r != SHD_OK)
        return r;
    FAIL_POINT("refill:gone");
    struct asking follow = rewind_of(m, WIRE_REWIND_FOLLOW, attempt);
    r = ask_all(&follow, hub, 0, e);
    if (r == SHD_OK)
        r = ask_all(&follow, m->there, 0, e);
    FAIL_POINT("refill:followed");
    return r;
}

/* -- What changed meanwhile -------------------------------------------------------------------- */

int refill_model_settle(struct refill_model *m, bool *ret_lost, struct shd_err *e)
{
    struct settings_kept kept;
    struct settings ignored;
    uint64_t step;
    int r = copy_options(m, e); /* which no rewind undoes */
    *ret_lost = false;
    if (r != SHD_OK || m->keep_settings)
        return r;
    r = look_set(m, owner_0(m), &kept, e);
    *ret_lost = r == SHD_OK && settings_lacks(&m->was, &kept, m->step, &ignored, &step);
    return r;
}

bool refill_model_lost_puts(const struct refill_model *m)
{
    struct shd_err ignored;
    uint64_t puts;
    return look_puts(m, &puts, &ignored) == SHD_OK && puts < m->puts;
}
