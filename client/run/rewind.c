/* Snapshots, and going back to one. See client/shd.h. */
#include <inttypes.h>

#include "client/paths/map.h"
#include "client/paths/path.h"
#include "client/paths/rejoin.h"
#include "client/paths/rewind.h"
#include "client/run/reset.h"
#include "client/run/rewind.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/failpoint.h"

#define ATTEMPTS_MAX 16u /* while other sessions are at the same */
#define POLL_NS      (20 * NS_PER_MS)

_Static_assert(SHD_SNAPSHOTS_MAX == WIRE_SNAPSHOTS_MAX, "shd.h and the messages agree");

static int check(struct shd_model *m, struct shd_err *e)
{
    int r = session_check(m->session, e);
    if (r != SHD_OK)
        return r;
    if (m->session->hub == NULL)
        return err_set(e, SHD_ENOTSUP, "\"local:\" keeps no snapshots: run daemons");
    if (hub_has_older(m->session->hub, WIRE_LEVEL_RULES))
        return err_set(e, SHD_ENOTSUP, "a daemon is of an older version, which keeps no snapshots");
    r = m->session->control->poll(m, e);
    if (r == SHD_OK)
        r = err_copy(&m->fault, e);
    return r == SHD_OK ? rejoin_look(m, /* opening= */ NULL, &(bool){ false }, e) : r;
}

int shd_snapshot(shd_model *m, uint64_t *ret_step, struct shd_err *e)
{
    uint64_t step = 0;
    int r = check(m, e);
    if (r == SHD_OK)
        r = snapshot_owners(m, &step, e);
    if (r == SHD_OK && ret_step != NULL)
        *ret_step = step;
    return r;
}

int shd_snapshot_every(shd_model *m, uint64_t every, uint32_t keep, struct shd_err *e)
{
    const int r = check(m, e);
    return r == SHD_OK ? snapshot_options(m, every, keep, e) : r;
}

int shd_snapshots(shd_model *m, struct shd_snapshot_row *rows, uint32_t room, uint32_t *ret_count,
                  struct shd_err *e)
{
    struct snapshot_row found[WIRE_SNAPSHOTS_MAX];
    const size_t stride = room > 0 ? rows->size : 0;
    uint32_t count = 0;
    int r = check(m, e);
    if (r == SHD_OK && room > 0)
        r = sized_check(rows, sizeof *rows, "shd_snapshot_row", e);
    if (r == SHD_OK)
        r = snapshot_list(m, found, &count, e);
    if (r != SHD_OK)
        return r;
    for (uint32_t i = 0; i < count && i < room; i++) {
        const struct shd_snapshot_row row = { .size = stride,
                                              .step = found[i].step,
                                              .bytes = found[i].bytes,
                                              .time_ns = found[i].time_ns };
        struct shd_snapshot_row *to = (void *)((uint8_t *)rows + i * stride);
        to->size = stride;
        sized_give(to, &row);
    }
    *ret_count = count;
    return SHD_OK;
}

static int find_latest(struct shd_model *m, uint64_t *step, struct shd_err *e)
{
    struct snapshot_row found[WIRE_SNAPSHOTS_MAX];
    uint32_t count = 0;
    const int r = snapshot_list(m, found, &count, e);
    if (r != SHD_OK)
        return r;
    if (count == 0)
        return err_set(e, SHD_ENOENT, "there is no snapshot of model '%s' that all its owners have",
                       m->spec->name);
    *step = found[count - 1].step;
    return SHD_OK;
}

/* A host that came in with a rewind goes back, too: who is in is read between that rewind, which is
 * the last one where it is held, and this one. */
static int rewind_members(struct shd_model *m, uint64_t to, struct shd_err *e)
{
    int r = SHD_ESTEP;
    for (uint32_t i = 0; r == SHD_ESTEP && i < ATTEMPTS_MAX; i++) {
        uint64_t last;
        bool any;
        r = i > 0 ? hub_poll(m->session->hub, POLL_NS, e) : SHD_OK;
        if (r == SHD_OK)
            r = rewind_together(m, &any, e);
        const uint64_t known = rewind_newest(m, &last);
        if (r == SHD_OK)
            r = rejoin_look(m, /* opening= */ NULL, &any, e);
        if (r == SHD_OK)
            r = rewind_owners(m, to, known, /* keep_settings= */ false, e);
    }
    return r;
}

int shd_model_rewind(shd_model *m, uint64_t to, uint64_t *ret_step, struct shd_err *e)
{
    int r = check(m, e);
    if (r == SHD_OK && m->session->reads)
        r = err_set(e, SHD_EAUTH, "a reader does not rewind a model");
    if (r == SHD_OK && to == SHD_REWIND_LATEST)
        r = find_latest(m, &to, e);
    if (r == SHD_OK)
        r = rewind_members(m, to, e);
    if (r != SHD_OK)
        return r;
    r = reset_look(m, e); /* this worker goes back, too */
    if (r != SHD_OK && r != SHD_ERESET)
        return r;
    if (ret_step != NULL)
        *ret_step = to;
    return SHD_OK;
}

/* -- By a guard -------------------------------------------------------------------------------- */

struct shd_result rewind_result(const struct shd_model *m)
{
    return (struct shd_result){ .step = m->step,
                                .rewound = true,
                                .guard_step = m->map != NULL ? m->map->owners[0].layout.guard_back
                                                             : 0 };
}

bool rewind_due(const struct shd_model *m)
{
    return m->session->hub != NULL && m->decided && m->decision.guard.rewind;
}

/* The newest one from before the step that is given up. */
static int find_before(struct shd_model *m, uint64_t step, uint64_t *ret_to, struct shd_err *e)
{
    struct snapshot_row found[WIRE_SNAPSHOTS_MAX];
    uint32_t count = 0;
    const int r = snapshot_list(m, found, &count, e);
    if (r != SHD_OK)
        return r;
    while (count > 0 && found[count - 1].step > step)
        count--;
    if (count == 0)
        return err_set(e, SHD_ENOENT,
                       "there is no snapshot up to step %" PRIu64 " that all owners have: "
                       "`shardctl snapshot --every` keeps some",
                       step);
    *ret_to = found[count - 1].step;
    return SHD_OK;
}

int rewind_by_guard(struct shd_model *m, struct shd_err *e)
{
    uint64_t to = 0;
    int r = SHD_OK;
    CHECK(m->step > 0);
    FAIL_POINT("guard:back");
    if (rewind_seen(m, NULL) == SHD_OK) {
        r = find_before(m, m->step - 1, &to, e);
        if (r == SHD_OK)
            r = rewind_once(m, to, e);
    }
    if (r != SHD_OK && rewind_seen(m, NULL) == SHD_OK)
        return r;
    r = reset_look(m, e);
    return r == SHD_ERESET ? SHD_OK : r;
}
