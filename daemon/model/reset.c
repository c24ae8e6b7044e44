/* See reset.h. */
#include "daemon/model/reset.h"

#include <inttypes.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/core/lease.h"
#include "daemon/core/step.h"
#include "daemon/core/step_reset.h"
#include "daemon/model/apply.h"
#include "daemon/model/model.h"
#include "daemon/model/spill.h"
#include "proto/share/board.h"
#include "proto/spec/spec.h"
#include "proto/wire/wire.h"

static void begin_again(struct model *m)
{
    struct step_actions actions;
    const uint64_t attempt = step_attempt(m->core), step = step_collecting(m->core);
    board_set_attempt(m->board, step, attempt);
    while (step_reset_more(m->core, &actions))
        apply_actions(m, &actions);
    board_set_step(m->board, step_now(m->core), step_phase(m->core));
    m->spill->bytes = 0;
    lease_begin_again(m->lease);
    log_info("op=reset model=%s step=%" PRIu64 " attempt=%" PRIu64, m->spec->name, step, attempt);
    m->daemon->hooks->model_moved(m, /* phase_changed= */ true);
}

int reset_ask(struct model *m, const struct wire_reset *req, struct wire_reset_answer *ret_answer,
              struct shd_err *e)
{
    static const enum wire_reset_what what[] = { [STEP_RESET_DONE] = WIRE_RESET_DONE,
                                                 [STEP_RESET_PROMISED] = WIRE_RESET_PROMISED,
                                                 [STEP_RESET_OVER] = WIRE_RESET_OVER };
    const uint64_t before = step_attempt(m->core);
    enum step_reset_answer answer = STEP_RESET_DONE;
    const int r = step_reset(m->core, req->step, req->attempt, req->agreed, &answer, e);
    if (r != SHD_OK)
        return r;
    if (step_attempt(m->core) != before)
        begin_again(m);
    *ret_answer = (struct wire_reset_answer){ .step = req->step,
                                              .attempt = step_attempt(m->core),
                                              .what = what[answer] };
    return SHD_OK;
}

bool reset_follow(struct model *m, uint64_t step, uint64_t attempt)
{
    const enum step_when when = step_when(m->core, step, attempt);
    const struct wire_reset agreed = { .step = step, .attempt = attempt, .agreed = true };
    struct wire_reset_answer answer;
    struct shd_err e;
    if (when != STEP_WHEN_AHEAD)
        return when == STEP_WHEN_NOW;
    if (reset_ask(m, &agreed, &answer, &e) == SHD_OK)
        return true;
    log_warn("op=reset model=%s why=\"%s\" do=\"the gradient is dropped\"", m->spec->name, e.text);
    return false;
}
