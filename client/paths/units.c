/* See units.h. A page of units at a time, all of the same step at all owners, or all is asked
 * again: of the last step they may be some apart. */
#include "client/paths/units.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "client/paths/map.h"
#include "client/session/hub.h"
#include "client/session/round.h"
#include "proto/base/clock.h"
#include "proto/base/fixsum.h"
#include "proto/share/unit_row.h"

#define PAUSE_NS  (2 * NS_PER_MS)
#define TRIES_MAX 100u /* that the model was quicker */

struct asking {
    const struct shd_model *m;
    struct path_units *units;
    uint64_t step;        /* asked for */
    uint32_t first;       /* of the page, counted from units->first; */
    uint32_t count;       /* units in it */
    uint32_t answers;     /* owners that have the step */
    uint64_t least, most; /* 1 + the steps that owners have told of; 0: one has none such */
    struct {
        enum unit_known gradient, change;
        struct fixsum grad, update, weight;
    } sums[WIRE_UNITS_MAX];
};

static void make_history(const struct round *round, const struct link *link,
                         struct wire_request *ret_request)
{
    const struct asking *a = round->ctx;
    ret_request->history = (struct wire_history){
        .model = a->m->map->owners[link->index].layout.handle,
        .from = a->step,
        .count = a->count,
        .units_from = 1 + a->units->first + a->first,
    };
}

/* What one owner knows of what all others know so far. */
static enum unit_known both(enum unit_known a, uint32_t b)
{
    if (a == UNIT_UNKNOWN || b == UNIT_UNKNOWN)
        return UNIT_UNKNOWN;
    return a == UNIT_NOT_FINITE || b == UNIT_NOT_FINITE ? UNIT_NOT_FINITE : UNIT_FINITE;
}

static bool add(struct fixsum *sum, const uint8_t *bytes)
{
    struct fixsum part;
    bool none;
    if (!fixsum_unpack(bytes, &part, &none))
        return false;
    fixsum_merge(sum, &part);
    return true;
}

static int take_row(struct asking *a, uint32_t i, const struct unit_row *row)
{
    if (row->gradient > UNIT_NOT_FINITE || row->change > UNIT_NOT_FINITE ||
        !add(&a->sums[i].grad, row->grad) || !add(&a->sums[i].update, row->update) ||
        !add(&a->sums[i].weight, row->weight))
        return SHD_EPROTO;
    a->sums[i].gradient = both(a->sums[i].gradient, row->gradient);
    a->sums[i].change = both(a->sums[i].change, row->change);
    return SHD_OK;
}

/* Owner 0's word, which divides by what all have divided by. */
static void take_step(struct path_units *u, const struct wire_rows *rows)
{
    u->step = rows->units_step - 1;
    u->divisor = rows->units_divisor;
    u->skipped = rows->units_skipped;
}

static int take_rows(const struct round *round, const struct link *link,
                     const struct wire_reply *reply, struct shd_err *e)
{
    struct asking *a = round->ctx;
    const struct wire_rows *rows = &reply->rows;
    struct unit_row row;
    const uint64_t step = rows->units_step;
    a->least = step < a->least ? step : a->least;
    a->most = step > a->most ? step : a->most;
    if (step == 0)
        return SHD_OK;
    if (rows->units.bytes != a->count * sizeof row || !(rows->units_divisor > 0))
        return link_err(link, SHD_EPROTO, e, "sent %zu bytes of %" PRIu32 " units",
                        rows->units.bytes, a->count);
    a->answers++;
    for (uint32_t i = 0; i < a->count; i++) {
        memcpy(&row, rows->units.data + i * sizeof row, sizeof row);
        if (take_row(a, i, &row) != SHD_OK)
            return link_err(link, SHD_EPROTO, e, "sent what is no sum of a unit");
    }
    if (link->index == 0)
        take_step(a->units, rows);
    return SHD_OK;
}

static int ask_page(struct asking *a, struct shd_err *e)
{
    struct hub *hub = a->m->session->hub;
    struct round round = { .what = "History",
                           .asks = WIRE_HISTORY,
                           .type = WIRE_ROWS,
                           .make = make_history,
                           .take = take_rows,
                           .ctx = a };
    int r = SHD_OK;
    a->answers = 0;
    a->least = UINT64_MAX;
    a->most = 0;
    for (uint32_t i = 0; i < a->count; i++) {
        a->sums[i].gradient = a->sums[i].change = UNIT_FINITE;
        fixsum_init(&a->sums[i].grad);
        fixsum_init(&a->sums[i].update);
        fixsum_init(&a->sums[i].weight);
    }
    for (uint32_t i = 0; r == SHD_OK && i < hub->owner_count; i++)
        r = round_ask(&round, &hub->links[i], 0, e);
    return round_finish(&round, hub, r, e);
}

static double norm_of(enum unit_known known, struct fixsum *sum)
{
    if (known != UNIT_FINITE)
        return known == UNIT_UNKNOWN ? (double)NAN : (double)INFINITY;
    fixsum_carry(sum);
    return sqrt(fixsum_value(sum));
}

static void give_page(struct asking *a)
{
    for (uint32_t i = 0; i < a->count; i++) {
        struct path_unit *to = &a->units->units[a->first + i];
        to->gradient = norm_of(a->sums[i].gradient, &a->sums[i].grad);
        to->update = norm_of(a->sums[i].change, &a->sums[i].update);
        to->weight = norm_of(a->sums[i].change, &a->sums[i].weight);
    }
}

/* All pages of one step. *ret_again: some owner does not have it, but may have a later one. */
static int ask_once(struct asking *a, bool *ret_again, struct shd_err *e)
{
    const bool last = a->units->step == UINT64_MAX;
    int r = SHD_OK;
    *ret_again = false;
    a->step = a->units->step;
    for (a->first = 0; a->first < a->units->count; a->first += a->count) {
        const uint32_t left = a->units->count - a->first;
        a->count = left < WIRE_UNITS_MAX ? left : WIRE_UNITS_MAX;
        r = ask_page(a, e);
        if (r == SHD_OK && a->least > 0 && a->least < a->most && a->step == UINT64_MAX) {
            a->step = a->least - 1; /* of the last ones that they have the first one */
            r = ask_page(a, e);
        }
        if (r != SHD_OK)
            return r;
        if (a->least == 0 || a->least != a->most) {
            *ret_again = last && a->most > 0;
            return SHD_ENOENT;
        }
        a->step = a->least - 1;
        give_page(a);
    }
    return SHD_OK;
}

static int err_none(const struct asking *a, uint64_t step, struct shd_err *e)
{
    const char *name = a->m->spec->name;
    if (step == UINT64_MAX)
        return err_set(e, SHD_ENOENT,
                       "no step of model '%.60s' has been seen by all its owners since they were "
                       "started",
                       name);
    return err_set(e, SHD_ENOENT,
                   "step %" PRIu64 " of model '%.60s': it is not over, too long ago, or an owner "
                   "was restarted since",
                   step, name);
}

int units_ask(struct shd_model *m, struct path_units *units, struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    struct asking a = { .m = m, .units = units };
    const uint64_t start_ns = clock_now_ns(), step = units->step;
    bool again = true;
    for (uint32_t tries = 1; again; tries++) {
        units->step = step;
        const int r = ask_once(&a, &again, e);
        if (r == SHD_EGONE && hub_check(hub, NULL) == SHD_OK)
            again = true; /* a daemon died: its successor is asked */
        else if (r != SHD_ENOENT)
            return r;
        const uint64_t left_ns = hub_left_ns(hub, start_ns, PAUSE_NS);
        if (!again || left_ns == 0 || tries == TRIES_MAX)
            break;
        const int polled = hub_poll(hub, left_ns, e);
        if (polled != SHD_OK)
            return polled;
    }
    return err_none(&a, step, e);
}
