/* See pin.h. */
#include "client/run/pin.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "client/paths/coded.h"
#include "client/paths/look.h"
#include "client/paths/map.h"
#include "client/paths/place.h"
#include "client/paths/rewind.h"
#include "client/run/stream.h"
#include "client/session/hub.h"
#include "client/session/round.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"

#define REACH_NS (2000 * NS_PER_MS) /* for a step a little ahead */
#define BUSY_NS  (1000 * NS_PER_MS) /* a dead reader's daemons may not know yet */
#define POLL_NS  (20 * NS_PER_MS)
#define LEAD_MAX 4096u /* steps ahead of the furthest owner */

struct pin_owner {
    bool in; /* its answer is: */
    int status;
    uint32_t epoch; /* of the link it came by */
    struct wire_pinned got;
    uint64_t segment; /* that is mapped, of the link's epoch mapped_epoch; 0: none */
    uint32_t mapped_epoch;
    char text[SHD_ERR_TEXT_BYTES]; /* when status is not SHD_OK */
};

struct pinned {
    struct shd_model *model; /* borrowed */
    struct shd_pin_options options;
    bool held;       /* all of `step` is mapped */
    void **units;    /* owned: place_reserve_units(); NULL: none */
    void **decoded;  /* owned: the same, of memory, where they are codes; NULL: likewise */
    uint64_t step;   /* asked for */
    uint64_t number; /* of the question; answers to earlier ones do not count */
    uint32_t lead;   /* of the next question */
    uint64_t asked_ns;
    struct rewind_mark mark;  /* when that was */
    struct pin_owner *owners; /* owned, [owner_count] */
};

/* -- Asking ------------------------------------------------------------------------------------ */

static int make_pin(struct link *link, const struct call *call, struct wire_request *ret_request,
                    struct shd_err *e)
{
    const struct pinned *p = call->ctx;
    (void)e;
    ret_request->type = WIRE_PIN;
    ret_request->pin = (struct wire_pin){ .model = p->model->map->owners[link->index].layout.handle,
                                          .step = call->step,
                                          .ema = p->options.ema };
    return SHD_OK;
}

static void answered(struct link *link, const struct call *call, const struct wire_reply *reply)
{
    struct pinned *p = call->ctx;
    struct pin_owner *o = &p->owners[link->index];
    const uint64_t bytes = shardmap_publish_bytes(p->model->map->owners[link->index].shards);
    if (call->arg != p->number)
        return; /* of a question that was given up */
    o->in = true;
    o->status = reply->status;
    o->epoch = link->epoch;
    if (reply->status != SHD_OK)
        snprintf(o->text, sizeof o->text, "daemon %s: %.200s", link->device, reply->text);
    else if (reply->type != WIRE_PINNED || reply->pinned.step != call->step ||
             reply->pinned.bytes != bytes) {
        o->status = SHD_EPROTO;
        snprintf(o->text, sizeof o->text, "daemon %s answered PIN with something else",
                 link->device);
    } else
        o->got = reply->pinned;
}

/* The step to ask for. */
static int find_step(const struct pinned *p, uint64_t *ret_step, struct shd_err *e)
{
    const struct shd_pin_options *o = &p->options;
    const uint64_t furthest = look_furthest(p->model) + p->lead;
    const uint64_t step = o->exact || furthest < o->step ? o->step : furthest;
    const uint64_t over = o->every > 1 ? step % o->every : 0;
    const uint64_t more = over > 0 ? o->every - over : 0;
    if (more > UINT64_MAX - step)
        return err_set(e, SHD_ERANGE, "no multiple of %" PRIu64 " comes after step %" PRIu64,
                       o->every, step);
    *ret_step = step + more;
    return SHD_OK;
}

static int ask(struct pinned *p, struct shd_err *e)
{
    struct hub *hub = p->model->session->hub;
    int r = find_step(p, &p->step, e);
    p->number++;
    p->asked_ns = clock_now_ns();
    p->mark = rewind_mark(p->model);
    for (uint32_t i = 0; i < hub->owner_count; i++)
        p->owners[i].in = false;
    for (uint32_t i = 0; r == SHD_OK && i < hub->owner_count; i++) {
        const struct call call = {
            .make = make_pin, .fn = answered, .ctx = p, .arg = p->number, .step = p->step
        };
        r = hub_ask(&hub->links[i], &call, e);
    }
    return r;
}

static void make_unpin(const struct round *round, const struct link *link,
                       struct wire_request *ret_request)
{
    const struct pinned *p = round->ctx;
    ret_request->unpin.model = p->model->map->owners[link->index].layout.handle;
}

static void let_go(struct pinned *p)
{
    struct hub *hub = p->model->session->hub;
    struct round round = {
        .what = "Unpin", .asks = WIRE_UNPIN, .type = WIRE_REPLY_NONE, .make = make_unpin, .ctx = p
    };
    hub_forget(hub, p);
    round_let_go(&round, hub);
}

/* -- Waiting ----------------------------------------------------------------------------------- */

enum outcome { OUTCOME_WAITS, OUTCOME_ALL_IN, OUTCOME_MOVED_ON, OUTCOME_BUSY, OUTCOME_FAILED };

static enum outcome look(const struct pinned *p, const struct pin_owner **ret_failed)
{
    const uint32_t owners = p->model->map->owner_count;
    enum outcome outcome = OUTCOME_ALL_IN;
    for (uint32_t i = 0; i < owners; i++) {
        const struct pin_owner *o = &p->owners[i];
        if (o->in && o->status != SHD_OK && o->status != SHD_ESTEP) {
            *ret_failed = o;
            return o->status == SHD_EBUSY ? OUTCOME_BUSY : OUTCOME_FAILED;
        }
        if (o->in && o->status == SHD_ESTEP) {
            *ret_failed = o;
            outcome = OUTCOME_MOVED_ON;
        } else if (!o->in && outcome == OUTCOME_ALL_IN)
            outcome = OUTCOME_WAITS;
    }
    return outcome;
}

static int timed_out(const struct pinned *p, struct shd_err *e)
{
    const struct hub *hub = p->model->session->hub;
    for (uint32_t i = 0; i < hub->owner_count; i++)
        if (!p->owners[i].in)
            return link_err(&hub->links[i], SHD_ETIMEDOUT, e,
                            "has not pinned step %" PRIu64 " (it is at %" PRIu64 ")%s%s", p->step,
                            look_step(p->model, i), hub->held_up[0] != '\0' ? ": " : "",
                            hub->held_up);
    return err_set(e, SHD_ETIMEDOUT, "step %" PRIu64 " was not pinned in time", p->step);
}

/* An answer is missing: look for it. A step that is to come may be a matter of hours; the limit of
 * a wait is for owners that have it. */
static int wait_more(struct pinned *p, uint64_t *start_ns, uint64_t came_ns, struct shd_err *e)
{
    struct hub *hub = p->model->session->hub;
    uint64_t slice_ns = POLL_NS;
    if (look_furthest(p->model) < p->step) {
        *start_ns = clock_now_ns();
        if (p->options.timeout_ms > 0 && *start_ns - came_ns > p->options.timeout_ms * NS_PER_MS)
            return timed_out(p, e);
        if (p->lead > 0 && *start_ns - p->asked_ns > REACH_NS) { /* nobody goes on */
            p->lead = 0;
            return ask(p, e);
        }
    } else
        slice_ns = hub_left_ns(hub, *start_ns, POLL_NS);
    if (slice_ns == 0)
        return timed_out(p, e);
    const int r = hub_poll(hub, slice_ns, e);
    return r == SHD_OK ? stream_look(p->model, e) : r; /* a step to come may lack what is ours */
}

/* As many other steps are pinned as there may be, here or there: have none in hand meanwhile. */
static int wait_for_place(struct pinned *p, uint64_t begun_ns, const struct pin_owner *busy,
                          struct shd_err *e)
{
    if (!p->options.wait && clock_now_ns() - begun_ns > BUSY_NS)
        return err_set(e, SHD_EBUSY, "%s", busy->text);
    let_go(p);
    const int r = hub_poll(p->model->session->hub, POLL_NS, e);
    return r == SHD_OK ? ask(p, e) : r;
}

/* Until all owners have answered for one step. */
static int await(struct pinned *p, struct shd_err *e)
{
    const struct pin_owner *refused = NULL;
    const uint64_t begun_ns = clock_now_ns();
    uint64_t start_ns = begun_ns;
    int r = SHD_OK;
    while (r == SHD_OK) {
        switch (look(p, &refused)) {
        case OUTCOME_ALL_IN:
            if (!rewind_since(p->model, &p->mark))
                return SHD_OK;
            r = hub_poll(p->model->session->hub, POLL_NS, e);
            if (r == SHD_OK)
                r = ask(p, e);
            break;
        case OUTCOME_FAILED:
            return err_set(e, refused->status, "%s", refused->text);
        case OUTCOME_BUSY:
            r = wait_for_place(p, begun_ns, refused, e);
            break;
        case OUTCOME_MOVED_ON:
            if (p->options.exact)
                return err_set(e, SHD_ESTEP, "%s", refused->text);
            p->lead = p->lead == 0 ? 1 : p->lead < LEAD_MAX ? 2 * p->lead : LEAD_MAX;
            r = ask(p, e);
            break;
        case OUTCOME_WAITS:
            r = wait_more(p, &start_ns, begun_ns, e);
            break;
        }
    }
    return r;
}

/* -- Mapping ----------------------------------------------------------------------------------- */

/* Errors: SHD_EGONE: it died since it answered. */
static int map_owner(struct pinned *p, struct link *link, struct shd_err *e)
{
    struct shd_model *m = p->model;
    struct pin_owner *o = &p->owners[link->index];
    const struct wire_segment segment = { .kind = SEGMENT_PUBLISH,
                                          .ticket = o->got.ticket,
                                          .bytes = o->got.bytes };
    int fd = -1;
    if (o->epoch != link->epoch)
        return link_err(link, SHD_EGONE, e, "has been succeeded meanwhile");
    if (o->segment == o->got.segment && o->mapped_epoch == o->epoch)
        return SHD_OK; /* its contents are others */
    int r = link_claim(link, &segment, &fd, e);
    if (r != SHD_OK)
        return r;
    o->segment = 0;
    r = place_units(m, p->units, &m->map->owners[link->index], fd, e);
    close(fd);
    if (r != SHD_OK)
        return r;
    o->segment = o->got.segment;
    o->mapped_epoch = o->epoch;
    return SHD_OK;
}

static int map_owners(struct pinned *p, struct shd_err *e)
{
    struct hub *hub = p->model->session->hub;
    int r = p->units == NULL ? place_reserve_units(p->model, &p->units, e) : SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < hub->owner_count; i++)
        r = map_owner(p, &hub->links[i], e);
    return r;
}

/* Codes of all owners become arrays, when all are of one step. */
static int decode(struct pinned *p, struct shd_err *e)
{
    struct shd_model *m = p->model;
    if (m->spec->codec == CODEC_NONE)
        return SHD_OK;
    const int r = p->decoded == NULL ? place_memory_units(m, &p->decoded, e) : SHD_OK;
    for (uint32_t u = 0; r == SHD_OK && u < m->spec->unit_count; u++)
        coded_read(m, u, p->units, m->spec->units[u].elems, p->decoded[u]);
    return r;
}

static void unmap(struct pinned *p)
{
    place_release_units(p->model, p->units);
    place_release_units(p->model, p->decoded);
    p->units = p->decoded = NULL;
    for (uint32_t i = 0; i < p->model->map->owner_count; i++)
        p->owners[i].segment = 0;
}

static int pin_step(struct pinned *p, struct shd_err *e)
{
    struct hub *hub = p->model->session->hub;
    p->lead = 0;
    int r = ask(p, e);
    if (r == SHD_OK)
        r = await(p, e);
    if (r == SHD_OK)
        r = map_owners(p, e);
    while (r == SHD_EGONE && hub_check(hub, e) == SHD_OK) {
        r = hub_poll(hub, POLL_NS, e);
        if (r == SHD_OK)
            r = ask(p, e);
        if (r == SHD_OK)
            r = await(p, e);
        if (r == SHD_OK)
            r = map_owners(p, e);
    }
    return r;
}

/* -- Calls ------------------------------------------------------------------------------------- */

static int take_options(const struct shd_pin_options *options, struct shd_pin_options *ret_options,
                        struct shd_err *e)
{
    if (options == NULL)
        return SHD_OK;
    const int r = sized_take(ret_options, sizeof *ret_options, options, sizeof options->size,
                             "shd_pin_options", e);
    if (r != SHD_OK)
        return r;
    if (ret_options->timeout_ms > UINT64_MAX / 2 / NS_PER_MS)
        return err_set(e, SHD_ERANGE, "timeout of %" PRIu64 " ms", ret_options->timeout_ms);
    if (ret_options->exact && ret_options->every > 1)
        return err_set(e, SHD_EINVAL, "`exact` and `every`: one of them");
    return SHD_OK;
}

static int check_model(const struct shd_model *m, struct shd_err *e)
{
    const int r = session_check(m->session, e);
    if (r != SHD_OK)
        return r;
    if (m->map == NULL)
        return err_set(e, SHD_ENOTSUP, "\"local:\" has nobody to pin a step for: shd_acquire()");
    if (hub_has_older(m->session->hub, WIRE_LEVEL_STATES))
        return err_set(e, SHD_ENOTSUP, "a daemon is of an older version, which pins no steps");
    return SHD_OK;
}

static int pinned_new(struct shd_model *m, struct shd_err *e)
{
    struct pinned *p = sys_calloc(1, sizeof *p);
    if (p != NULL)
        p->owners = sys_calloc(m->map->owner_count, sizeof *p->owners);
    if (p == NULL || p->owners == NULL) {
        free(p);
        return err_set(e, SHD_ENOMEM, "no memory to pin a step");
    }
    p->model = m;
    m->map->pinned = p;
    return SHD_OK;
}

int shd_pin(shd_model *m, const struct shd_pin_options *options, uint64_t *ret_step,
            struct shd_err *e)
{
    struct shd_pin_options o = { 0 };
    int r = check_model(m, e);
    if (r == SHD_OK)
        r = take_options(options, &o, e);
    if (r == SHD_OK && o.ema && m->spec->ema == 0)
        r = err_set(e, SHD_EINVAL, "model '%s' has no moving average of its parameters",
                    m->spec->name);
    if (r == SHD_OK && m->map->pinned == NULL)
        r = pinned_new(m, e);
    if (r != SHD_OK || m->map->pinned == NULL)
        return r;
    struct pinned *p = m->map->pinned;
    const uint64_t start_ns = clock_now_ns();
    p->held = false;
    p->options = o;
    r = pin_step(p, e);
    if (r == SHD_OK)
        r = decode(p, e);
    m->session->wait_ns += clock_now_ns() - start_ns;
    if (r != SHD_OK) {
        let_go(p);
        unmap(p);
        return r;
    }
    p->held = true;
    if (ret_step != NULL)
        *ret_step = p->step;
    return SHD_OK;
}

const void *shd_pinned(const shd_model *m, uint32_t unit)
{
    const struct pinned *p = m->map != NULL ? m->map->pinned : NULL;
    if (p == NULL || !p->held || unit >= m->spec->unit_count)
        return NULL;
    return p->decoded != NULL ? p->decoded[unit] : p->units[unit];
}

void shd_unpin(shd_model *m)
{
    struct pinned *p = m->map != NULL ? m->map->pinned : NULL;
    if (p == NULL || !p->held || m->session->left)
        return;
    p->held = false;
    let_go(p);
    unmap(p);
}

void pin_close(struct shd_model *m)
{
    struct pinned *p = m->map != NULL ? m->map->pinned : NULL;
    if (p == NULL)
        return;
    shd_unpin(m);
    hub_forget(m->session->hub, p);
    free(p->owners);
    free(p);
    m->map->pinned = NULL;
}
