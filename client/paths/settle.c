/* Owners one step apart; see settle.h.
 *
 * A worker commits a step to one owner after the other. Whoever attaches in between, or after that
 * worker died in it, finds some owners a step ahead. Those have the decision on record, and
 * anybody may pass it on: a commit that arrives twice is acknowledged. The blob goes with it.
 *
 * The owners were asked one after the other, and other workers go on meanwhile: what does not fit
 * together is looked at again, and only what stays so is an error. */
#include "client/paths/settle.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/paths/commit.h"
#include "client/paths/layout.h"
#include "client/paths/look.h"
#include "client/paths/segments.h"
#include "client/paths/turn.h"
#include "client/session/link.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"

#define LOOKS_MAX 50u /* at owners that move on each time */

struct steps {
    uint64_t min, max;
    uint32_t ahead, behind; /* the first owner with the highest, with the lowest step */
};

static struct steps find_steps(const struct map_model *map)
{
    struct steps s = { map->owners[0].layout.step, map->owners[0].layout.step, 0, 0 };
    for (uint32_t i = 1; i < map->owner_count; i++) {
        const uint64_t step = map->owners[i].layout.step;
        if (step < s.min) {
            s.min = step;
            s.behind = i;
        }
        if (step > s.max) {
            s.max = step;
            s.ahead = i;
        }
    }
    return s;
}

/* The step before s.max, to all. *ret_over: it is no longer on record, so the owners moved on. */
static int pass_on(struct shd_model *m, struct steps s, bool *ret_over, struct shd_err *e)
{
    const struct turn_update update = { .args = { .micro_batches = m->spec->micro_batches },
                                        .recorded_only = true };
    size_t bytes;
    void *data = sys_malloc(SHD_BLOB_BYTES_MAX);
    if (data == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a blob");
    int r = look_owner_blob(m, s.ahead, data, SHD_BLOB_BYTES_MAX, &bytes, e);
    if (r == SHD_OK) {
        const struct wire_bytes blob = { data, bytes };
        m->step = s.min;
        turn_begin(m->map->turn, m->step, &update);
        r = commit_turn(m, &blob, e);
    }
    free(data);
    *ret_over = r == SHD_OK && turn_state(m->map->turn) == TURN_OVER;
    return r;
}

/* Groups that are in at every owner. */
static void take_in(struct shd_model *m)
{
    const struct map_model *map = m->map;
    memset(m->in.groups, 0xff, sizeof m->in.groups);
    for (uint32_t i = 0; i < map->owner_count; i++)
        for (size_t b = 0; b < sizeof m->in.groups; b++)
            m->in.groups[b] &= map->owners[i].layout.step == m->step ? map->owners[i].layout.in[b]
                                                                     : 0;
    m->in.step = m->step;
}

static void settled(struct shd_model *m, struct steps s)
{
    const struct map_layout *ahead = &m->map->owners[s.ahead].layout;
    m->step = s.max;
    if (ahead->decided)
        model_decided(m, &ahead->decision);
    take_in(m);
}

/* An owner that is passed has all gradients of its step: the commit of the other needed them. One
 * that lacks some was asked before that commit; or it has lost its state, and begins anew. */
static bool can_follow(const struct shd_model *m, struct steps s)
{
    const struct map_model *map = m->map;
    const uint32_t groups = spec_returns(m->spec);
    for (uint32_t i = 0; i < map->owner_count; i++)
        for (uint32_t g = 0; map->owners[i].layout.step == s.min && g < groups; g++)
            if ((map->owners[i].layout.in[g / 8] & 1u << g % 8) == 0)
                return false;
    return s.min + 1 == s.max;
}

static int err_apart(const struct shd_model *m, struct steps s, struct shd_err *e)
{
    const struct link *links = m->session->hub->links;
    return link_err(&links[s.behind], SHD_ESTEP, e,
                    "has model '%s' at step %" PRIu64 ", daemon %s has it at step %" PRIu64
                    ": %s lost its state, or they were not run together; restore a checkpoint",
                    m->spec->name, s.min, links[s.ahead].device, s.max, links[s.behind].device);
}

static bool same_steps(struct steps a, struct steps b)
{
    return a.min == b.min && a.max == b.max;
}

/* Ask once more, and take only what can change: steps and decisions. */
static int refresh(struct shd_model *m, struct shd_err *e)
{
    struct layout_opening o = { m, "", m->spec->name, /* slots= */ 0 };
    struct hub *hub = m->session->hub;
    int r = layout_ask_all(&o, e);
    for (uint32_t i = 0; r == SHD_OK && i < hub->link_count; i++) { /* let go of the tickets */
        r = segments_take(m, &hub->links[i], &m->map->owners[i].layout, /* wanted= */ 0, e);
        r = r == SHD_EGONE ? SHD_OK : r; /* and so they are gone */
    }
    return r;
}

int settle_steps(struct shd_model *m, struct shd_err *e)
{
    struct steps s = find_steps(m->map), before = { UINT64_MAX, UINT64_MAX, 0, 0 };
    for (uint32_t look = 0; s.min != s.max; look++) {
        bool over = true;
        int r = can_follow(m, s) ? pass_on(m, s, &over, e) : SHD_OK;
        if (r == SHD_OK && !over)
            break;
        if (r == SHD_OK && (same_steps(s, before) || look == LOOKS_MAX))
            r = err_apart(m, s, e);
        if (r == SHD_OK)
            r = refresh(m, e);
        if (r != SHD_OK)
            return r;
        before = s;
        s = find_steps(m->map);
    }
    settled(m, s);
    return SHD_OK;
}

int settle_catch_up(struct shd_model *m, struct shd_err *e)
{
    const int r = refresh(m, e);
    return r == SHD_OK ? settle_steps(m, e) : r;
}
