/* See reset.h. */
#include "client/run/reset.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "client/paths/commit.h"
#include "client/paths/path.h"
#include "client/paths/rejoin.h"
#include "client/paths/rewind.h"
#include "client/run/drop.h"
#include "client/session/hub.h"
#include "client/session/session.h"

/* Returned by this worker, or by a predecessor so that it left it out. */
static bool has_something_in(const struct shd_model *m)
{
    static const uint8_t none[MODEL_IN_BYTES];
    return m->in.handed || (m->in.step == m->step && memcmp(m->in.groups, none, sizeof none) != 0);
}

static void say_reset(const struct shd_model *m)
{
    char text[80];
    if (m->session->hub == NULL)
        return;
    snprintf(text, sizeof text, "step %" PRIu64 " was reset and begins again", m->step);
    event_say(&m->session->hub->events,
              &(struct shd_event){
                  .kind = SHD_EVENT_RESET, .daemon = "", .text = text, .step = m->step });
}

static void say_rewound(const struct shd_model *m)
{
    char text[80];
    snprintf(text, sizeof text, "the model went back: it is at step %" PRIu64, m->step);
    event_say(&m->session->hub->events,
              &(struct shd_event){
                  .kind = SHD_EVENT_RESET, .daemon = "", .text = text, .step = m->step });
}

/* Go to the step where the owners are now, all of them: what this worker had is of none. */
static int go_back(struct shd_model *m, struct shd_err *e)
{
    const uint64_t from = m->step;
    drop_step(m);
    m->sealed = m->decided = false;
    const int r = settle_catch_up(m, e);
    if (r != SHD_OK)
        return r;
    model_step_over(m);
    say_rewound(m);
    return err_set(e, SHD_ERESET,
                   "model '%s' went back: it is at step %" PRIu64
                   ", and this worker was at step %" PRIu64 ": go on where it is",
                   m->spec->name, m->step, from);
}

/* A rewind is another attempt, too, of which a relay says so later: the owners are asked. What this
 * worker has stays as it is. */
static int ask_rewound(struct shd_model *m, bool *ret_rewound, struct shd_err *e)
{
    const struct groups_in in = m->in;
    const uint64_t step = m->step, rewound = m->map->rewound;
    const bool decided = m->decided;
    const int r = settle_catch_up(m, e);
    *ret_rewound = m->step != step || m->map->rewound != rewound;
    m->step = step;
    m->decided = decided;
    m->in = in;
    return r;
}

/* The board says nothing of a step that is over: then it is a later one that begins again. */
int reset_look(struct shd_model *m, struct shd_err *e)
{
    const uint64_t attempt = m->session->control->attempt(m); /* before: of a rewind it knows */
    if (rejoin_is_due(m))
        return go_back(m, e);
    const int awaited = m->map != NULL ? rewind_await(m, e) : SHD_OK;
    if (awaited != SHD_OK)
        return awaited;
    if (m->map != NULL && rewind_seen(m, NULL) != SHD_OK)
        return go_back(m, e);
    if (attempt <= m->in.attempt)
        return SHD_OK;
    if (m->map != NULL && rejoin_forget(m)) {
        bool rewound;
        const int r = ask_rewound(m, &rewound, e);
        if (r != SHD_OK || rewound)
            return r != SHD_OK ? r : go_back(m, e);
    }
    const bool lost = has_something_in(m);
    m->in.attempt = attempt;
    m->leases.owner = 0; /* none has all groups in */
    if (!lost)
        return SHD_OK;
    drop_step(m);
    say_reset(m);
    return err_set(e, SHD_ERESET,
                   "step %" PRIu64 " was reset, as a worker gave up gradients that it had returned "
                   "already: compute this worker's micro-batches again",
                   m->step);
}
