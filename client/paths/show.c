/* See show.h. */
#include "client/paths/show.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/paths/map.h"
#include "client/session/hub.h"
#include "client/session/round.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"

#define PAUSE_NS  (2 * NS_PER_MS)
#define TRIES_MAX 100u /* that the model was quicker than the counting */

struct showing {
    const struct shd_model *m;
    const struct path_show *show;
    struct path_shown shown;
    bool any;     /* of the owners has answered: shown says what it is as of */
    bool differs; /* another one's is of another step */
};

/* The owner's part of the range; *ret_first: in the range. */
static uint64_t part_of(const struct showing *s, uint32_t owner, uint64_t *ret_first)
{
    const struct spec_tensor *t = &s->m->spec->tensors[s->show->tensor];
    uint64_t first = 0;
    const uint64_t begin = t->offset_elems + s->show->first;
    const uint64_t elems = layout_intersect(s->m->map->owners[owner].shards->slice[t->unit], begin,
                                            s->show->elems, &first);
    *ret_first = elems > 0 ? first - begin : 0;
    return elems;
}

static void make_show(const struct round *round, const struct link *link,
                      struct wire_request *ret_request)
{
    const struct showing *s = round->ctx;
    ret_request->show = (struct wire_show){ .model = s->m->map->owners[link->index].layout.handle,
                                            .tensor = s->show->tensor,
                                            .array = s->show->array,
                                            .first = s->show->first,
                                            .elems = s->show->elems,
                                            .values = s->show->values != NULL };
}

static void take_stamp(struct showing *s, const struct wire_shown *got)
{
    struct path_shown *shown = &s->shown;
    if (!s->any) {
        shown->step = got->step;
        shown->updates = got->updates;
        shown->of_step = got->of_step;
        shown->groups = got->groups;
    }
    s->any = true;
    s->differs = s->differs || got->step != shown->step || got->updates != shown->updates ||
                 got->of_step != shown->of_step || got->groups != shown->groups;
}

static int take_shown(const struct round *round, const struct link *link,
                      const struct wire_reply *reply, struct shd_err *e)
{
    struct showing *s = round->ctx;
    const struct wire_shown *got = &reply->shown;
    struct tally part;
    uint64_t first;
    const uint64_t elems = part_of(s, link->index, &first);
    const uint64_t values_bytes = s->show->values != NULL ? elems * sizeof(float) : 0;
    if (got->tally.bytes != sizeof part || got->values.bytes != values_bytes)
        return link_err(link, SHD_EPROTO, e,
                        "sent a tally of %zu bytes and %zu bytes of values, expected are %zu and "
                        "%" PRIu64,
                        got->tally.bytes, got->values.bytes, sizeof part, values_bytes);
    memcpy(&part, got->tally.data, sizeof part);
    if (!tally_check(&part, elems))
        return link_err(link, SHD_EPROTO, e, "sent what is no tally of %" PRIu64 " elements",
                        elems);
    tally_merge(&s->shown.tally, &part);
    if (values_bytes > 0)
        memcpy(s->show->values + first, got->values.data, values_bytes);
    take_stamp(s, got);
    return SHD_OK;
}

/* *ret_again: owners were at different steps, the model went on meanwhile, or one died. */
static int show_once(struct showing *s, bool *ret_again, struct shd_err *e)
{
    struct hub *hub = s->m->session->hub;
    struct round round = { .what = "Show",
                           .hint = "an update is running",
                           .asks = WIRE_SHOW,
                           .type = WIRE_SHOWN,
                           .make = make_show,
                           .take = take_shown,
                           .ctx = s };
    int r = SHD_OK;
    uint64_t first;
    s->any = s->differs = false;
    tally_init(&s->shown.tally);
    for (uint32_t i = 0; r == SHD_OK && i < hub->owner_count; i++)
        if (part_of(s, i, &first) > 0)
            r = round_ask(&round, &hub->links[i], 0, e);
    r = round_finish(&round, hub, r, e);
    *ret_again = (r == SHD_OK && s->differs) || r == SHD_ESTEP ||
                 (r == SHD_EGONE && hub_check(hub, NULL) == SHD_OK);
    return r;
}

static int err_quicker(const struct showing *s, uint32_t tries, struct shd_err *e)
{
    const struct spec_tensor *t = &s->m->spec->tensors[s->show->tensor];
    return err_set(e, SHD_EBUSY,
                   "model '%.60s' went on %" PRIu32 " times before %" PRIu64
                   " elements of '%.60s' were counted: ask for fewer",
                   s->m->spec->name, tries, s->show->elems, t->name);
}

int show_range(struct shd_model *m, const struct path_show *show, struct path_shown *ret_shown,
               struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    struct showing s = { .m = m, .show = show };
    const uint64_t start_ns = clock_now_ns();
    bool again = true;
    int r = SHD_OK;
    for (uint32_t tries = 1; (r = show_once(&s, &again, e)), again; tries++) {
        const uint64_t left_ns = hub_left_ns(hub, start_ns, PAUSE_NS);
        if (left_ns == 0 || tries == TRIES_MAX)
            return err_quicker(&s, tries, e);
        r = hub_poll(hub, left_ns, e);
        if (r != SHD_OK)
            return r;
    }
    if (r == SHD_OK)
        *ret_shown = s.shown;
    return r;
}
