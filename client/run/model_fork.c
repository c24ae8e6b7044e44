/* Forking a model. See client/shd.h, and client/paths/create.h for how it comes to be at all owners
 * or at none. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/paths/create.h"
#include "client/paths/look.h"
#include "client/paths/path.h"
#include "client/paths/rejoin.h"
#include "client/paths/rewind.h"
#include "client/session/hub.h"
#include "client/session/replay.h"
#include "client/session/session.h"
#include "client/session/spec_out.h"
#include "proto/spec/spec_change.h"

static int check(const shd_model *m, const char *name, const struct shd_fork_options *options,
                 struct shd_err *e)
{
    const int r = session_check(m->session, e);
    if (r != SHD_OK)
        return r;
    if (m->session->hub == NULL)
        return err_set(e, SHD_ENOTSUP, "\"local:\" does not fork: run daemons");
    if (name == NULL || strlen(name) >= SPEC_NAME_BYTES_MAX)
        return err_set(e, SHD_EINVAL, "a fork needs a name of 1 to %u characters",
                       SPEC_NAME_BYTES_MAX - 1);
    if ((options->exact || options->set != NULL) &&
        hub_has_older(m->session->hub, WIRE_LEVEL_AUDITS))
        return err_set(e, SHD_ENOTSUP,
                       "a daemon is of an older version, which forks a model at its open step and "
                       "changes nothing: upgrade it");
    return SHD_OK;
}

/* Which steps there are instead, as of now. */
static int no_step(shd_model *m, uint64_t step, struct shd_err *e)
{
    struct snapshot_row rows[WIRE_SNAPSHOTS_MAX];
    char list[WIRE_SNAPSHOTS_MAX * 24] = "";
    uint32_t count = 0;
    if (hub_has_older(m->session->hub, WIRE_LEVEL_RULES) ||
        snapshot_list(m, rows, &count, e) != SHD_OK)
        count = 0;
    for (uint32_t i = 0; i < count; i++) {
        const size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, "%s%" PRIu64, used > 0 ? ", " : "", rows[i].step);
    }
    return err_set(e, SHD_ESTEP,
                   "model '%.60s' has no step %" PRIu64 " to fork: its open step is %" PRIu64
                   ", %s%s",
                   m->spec->name, step, look_furthest(m),
                   count > 0 ? "and it has snapshots of steps " : "and it has no snapshots", list);
}

/* One that is to come may never come. */
static int check_step(shd_model *m, uint64_t step, struct shd_err *e)
{
    int r = m->session->control->poll(m, e);
    if (r == SHD_OK)
        r = err_copy(&m->fault, e);
    return r == SHD_OK && step > look_furthest(m) ? no_step(m, step, e) : r;
}

static int make(shd_model *m, const struct spec_changed *changed, struct starts *starts,
                struct shd_err *e)
{
    struct spec_out out = { .segment = SEGMENT_CLOSED };
    struct shd_model fork = { .session = m->session, .spec = changed->spec }; /* looked at */
    int r = spec_out_init(&out, changed->json, e);
    if (r != SHD_OK)
        return r;
    r = create_model(&fork, &out, starts, e);
    spec_out_deinit(&out);
    if (r == SHD_ECANCELED)
        hub_renew(m->session->hub);
    if (r == SHD_OK && !starts->created)
        r = err_set(e, SHD_EEXIST, "model '%s' is open already", changed->spec->name);
    return r;
}

int shd_model_fork_with(shd_model *m, const char *name, const struct shd_fork_options *options,
                        uint64_t *ret_step, struct shd_err *e)
{
    struct shd_fork_options o = { .size = sizeof o };
    struct spec_changed changed = { .spec = NULL };
    int r = options != NULL
                ? sized_take(&o, sizeof o, options, sizeof o.size, "shd_fork_options", e)
                : SHD_OK;
    if (r == SHD_OK)
        r = check(m, name, &o, e);
    if (r == SHD_OK)
        r = replay_allows("shd_model_fork()", e);
    if (r == SHD_OK)
        r = rejoin_session(m->session, e); /* a host that is in again has it, too */
    if (r != SHD_OK)
        return r;
    r = spec_change(m->spec, name, o.set, &changed, e);
    if (r != SHD_OK)
        return err_prefix(e, "a fork of model '%.60s'", m->spec->name);
    struct starts starts = { .from = m,
                             .exact = o.exact,
                             .step = o.exact ? o.step : 0,
                             .change = changed.change.count > 0 ? &changed.change : NULL };
    if (o.exact)
        r = check_step(m, o.step, e);
    if (r == SHD_OK) {
        r = make(m, &changed, &starts, e);
        if (r == SHD_ESTEP && o.exact)
            r = no_step(m, o.step, e);
    }
    if (r == SHD_OK && ret_step != NULL)
        *ret_step = starts.step;
    spec_changed_free(&changed);
    return r;
}

int shd_model_fork(shd_model *m, const char *name, uint64_t *ret_step, struct shd_err *e)
{
    return shd_model_fork_with(m, name, /* options= */ NULL, ret_step, e);
}
