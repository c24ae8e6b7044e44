/* See rewind_turn.h. */
#include "client/paths/rewind_turn.h"

#include <inttypes.h>

#include "proto/base/check.h"

struct rewind_seen rewind_newest_of(const struct rewind_seen *boards, uint32_t count,
                                    bool *ret_apart)
{
    struct rewind_seen newest = { 0, 0 };
    *ret_apart = false;
    for (uint32_t i = 0; i < count; i++)
        if (boards[i].attempt > newest.attempt)
            newest = boards[i];
    for (uint32_t i = 0; i < count; i++)
        *ret_apart = *ret_apart || boards[i].attempt < newest.attempt;
    return newest;
}

struct rewind_mark rewind_mark_of(const struct rewind_seen *boards, uint32_t count)
{
    struct rewind_mark mark;
    mark.attempt = rewind_newest_of(boards, count, &mark.apart).attempt;
    return mark;
}

bool rewind_between(const struct rewind_mark *asked, const struct rewind_mark *answered)
{
    return asked->apart || answered->attempt != asked->attempt;
}

static void ask(struct rewind_turn *t, enum wire_rewind_what what, uint32_t from, uint32_t end)
{
    t->ask.what = what;
    t->from = from;
    t->end = end;
    t->answers = 0;
}

void rewind_turn_begin(struct rewind_turn *t, uint32_t owners, const struct wire_rewind *what)
{
    CHECK(owners > 0);
    *t = (struct rewind_turn){ .owners = owners, .ask = *what };
    ask(t, WIRE_REWIND_HOLD, 0, 1);
}

void rewind_turn_follow(struct rewind_turn *t, uint32_t owners, struct rewind_seen rewind)
{
    CHECK(owners > 0);
    *t = (struct rewind_turn){ .owners = owners,
                               .ask = { .step = rewind.step, .attempt = rewind.attempt } };
    ask(t, WIRE_REWIND_FOLLOW, 0, owners);
}

bool rewind_turn_next(const struct rewind_turn *t, uint32_t *ret_from, uint32_t *ret_end)
{
    *ret_from = t->from;
    *ret_end = t->end;
    return t->from < t->end;
}

/* All that were asked have answered. */
static void go_on(struct rewind_turn *t)
{
    switch (t->ask.what) {
    case WIRE_REWIND_HOLD:
        if (t->from == 0)
            t->ask.consent = t->last.consent;
        if (t->end < t->owners)
            ask(t, WIRE_REWIND_HOLD, 1, t->owners);
        else
            ask(t, WIRE_REWIND_GO, 0, 1);
        break;
    case WIRE_REWIND_GO:
        t->ask.step = t->last.step;
        t->ask.attempt = t->last.attempt;
        ask(t, WIRE_REWIND_FOLLOW, 0, t->owners);
        break;
    case WIRE_REWIND_FOLLOW:
        t->end = t->from;
        break;
    }
}

int rewind_turn_answered(struct rewind_turn *t, uint32_t owner, const struct wire_rewound *answer,
                         struct shd_err *e)
{
    CHECK(owner >= t->from && owner < t->end && t->answers < t->end - t->from);
    if (t->ask.what == WIRE_REWIND_FOLLOW && answer->attempt < t->ask.attempt)
        return err_set(e, SHD_EPROTO, "has not followed a rewind to step %" PRIu64, t->ask.step);
    t->last = *answer;
    if (++t->answers == t->end - t->from)
        go_on(t);
    return SHD_OK;
}
