/* See show.h. */
#include "daemon/model/show.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <uv.h>

#include "daemon/base/state.h"
#include "daemon/base/task.h"
#include "daemon/core/step.h"
#include "daemon/model/model.h"
#include "kernels/delta.h"
#include "kernels/kern.h"
#include "proto/base/sys.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec.h"

#define ARRAYS_MAX 3u /* an update's: parameters and moments */

struct show_copy {
    struct task task; /* first */
    struct show *show;
};

struct show {
    uv_work_t work;
    struct show_ask ask;
    struct show_done done;
    struct shown shown;
    struct delta_rule rule; /* of an update */
    uint64_t unit_first;    /* element of the unit that is the first one here */
    uint64_t counted;       /* elements, behind it */
    uint64_t piece_elems;   /* that are counted now */
    uint64_t piece_max;     /* what there is room for, whole blocks */
    uint32_t arrays;        /* that it takes, the parameters first if there are several */
    struct show_copy copies[ARRAYS_MAX];
    uint32_t copying;
    int status;
    struct shd_err err;
    float *kept;    /* [shown.elems], in this block; NULL: no values are asked for */
    float values[]; /* [arrays][piece_max] */
};

const struct shown *shown_of(const struct show *show)
{
    return &show->shown;
}

static uint32_t unit_of(const struct show_ask *ask)
{
    return ask->model->spec->tensors[ask->tensor].unit;
}

/* -- What there is ------------------------------------------------------------------------------
 */

static int check_update(const struct show_ask *ask, struct delta_rule *ret_rule, struct shd_err *e)
{
    const struct model *m = ask->model;
    const uint32_t unit = unit_of(ask);
    struct decision decision;
    const uint64_t updates = step_unit_updates(m->core, unit);
    if (!step_unit_updated(m->core, unit) || !step_last_decision(m->core, &decision) ||
        updates == 0)
        return err_set(e, SHD_ENOENT,
                       "the last step did not update unit '%.80s': there was none yet, it was "
                       "skipped or put, or the unit is frozen, a mean or was idle",
                       m->spec->units[unit].name);
    return delta_rule_of(m->spec, ask->tensor, &decision, updates, ret_rule, e);
}

static int check_array(const struct show_ask *ask, struct delta_rule *ret_rule, struct shd_err *e)
{
    const struct model *m = ask->model;
    const struct spec_unit *unit = &m->spec->units[unit_of(ask)];
    if (ask->array == SHOW_UPDATE)
        return check_update(ask, ret_rule, e);
    if (ask->array == SHOW_GRAD && unit->frozen)
        return err_set(e, SHD_EINVAL, "unit '%.100s' is frozen: it has no gradient", unit->name);
    if (ask->array == SHOW_EMA && !spec_unit_ema(m->spec, unit_of(ask)))
        return err_set(e, SHD_EINVAL, "unit '%.100s' has no moving average: %s", unit->name,
                       m->spec->ema > 0 ? "it is frozen or a mean" : "the spec has no ema");
    if (ask->array < SHOW_GRAD && ask->array > spec_unit_moments(m->spec, unit_of(ask)))
        return err_set(e, SHD_EINVAL, "unit '%.100s' has %" PRIu32 " moments, not %" PRIu32,
                       unit->name, spec_unit_moments(m->spec, unit_of(ask)), ask->array);
    return SHD_OK;
}

/* What it would be as of now. */
static int look(const struct show_ask *ask, struct shown *ret_now, struct shd_err *e)
{
    const struct step *core = ask->model->core;
    struct step_gradient gradient = { 0 };
    if (step_phase(core) == STEP_APPLYING)
        return err_set(e, SHD_EBUSY, "a step is being applied");
    const int r = ask->array == SHOW_GRAD ? step_unit_gradient(core, unit_of(ask), &gradient, e)
                                          : SHD_OK;
    if (r != SHD_OK)
        return r;
    ret_now->step = step_now(core);
    ret_now->updates = step_unit_updates(core, unit_of(ask));
    ret_now->of_step = gradient.step;
    ret_now->groups = gradient.micros;
    return SHD_OK;
}

static int check_unmoved(const struct show *show, struct shd_err *e)
{
    const struct shown *before = &show->shown;
    struct shown now = { 0 };
    const int r = look(&show->ask, &now, e);
    if (r == SHD_OK && now.step == before->step && now.of_step == before->of_step &&
        now.groups == before->groups)
        return r;
    return err_set(e, SHD_ESTEP,
                   "model '%.80s' went on from step %" PRIu64 " while %" PRIu64
                   " elements of '%.80s' were counted",
                   show->ask.model->spec->name, before->step, before->elems,
                   show->ask.model->spec->tensors[show->ask.tensor].name);
}

/* -- Piece by piece -----------------------------------------------------------------------------
 */

static uint64_t head_of(const struct show *show)
{
    return SHD_BLOCK_ELEMS - (show->unit_first + show->counted) % SHD_BLOCK_ELEMS;
}

static void finish(struct show *show, int status)
{
    show->ask.model->use.shows--;
    show->done.fn(show->done.ctx, status, &show->err);
}

/* On libuv's pool. */
static void count(uv_work_t *work)
{
    struct show *show = work->data;
    const float *x = show->values;
    if (show->ask.array == SHOW_UPDATE) {
        const struct delta d = { &show->rule, x, x + show->piece_max,
                                 show->arrays > 2 ? x + 2 * show->piece_max : NULL,
                                 show->piece_elems };
        delta_tally(&d, head_of(show), &show->shown.tally);
        if (show->kept != NULL)
            delta_of(&d, show->kept + show->counted);
        return;
    }
    tally_add(&show->shown.tally, x, show->piece_elems, head_of(show));
    if (show->kept != NULL)
        memcpy(show->kept + show->counted, x, show->piece_elems * sizeof *x);
}

static int queue_piece(struct show *show, struct shd_err *e);

static void counted(uv_work_t *work, int cancelled)
{
    struct show *show = work->data;
    (void)cancelled; /* nobody cancels */
    if (show->ask.model->daemon->stopping)
        return;
    show->counted += show->piece_elems;
    const bool more = show->counted < show->shown.elems;
    const int r = more ? queue_piece(show, &show->err) : SHD_OK;
    if (r != SHD_PENDING)
        finish(show, r);
}

static void copied(struct task *task)
{
    struct show *show = ((struct show_copy *)task)->show;
    if (task->status != SHD_OK && show->status == SHD_OK)
        show->status = kern_explain(show->ask.model->kern, task->status, &show->err,
                                    "copying what is to be counted");
    if (--show->copying > 0)
        return;
    if (show->status == SHD_OK)
        uv_queue_work(show->ask.model->daemon->loop, &show->work, count, counted);
    else
        finish(show, show->status);
}

/* The number in the state of the array, or of the first of several. */
static uint32_t first_array(const struct show *show)
{
    const struct show_ask *ask = &show->ask;
    if (show->arrays > 1)
        return SHARDMAP_PARAM;
    return ask->array == SHOW_GRAD  ? SHARDMAP_ACC
           : ask->array == SHOW_EMA ? spec_ema_array(ask->model->spec)
                                    : ask->array;
}

/* All arrays at once: no update comes between. What was queued is waited for. */
static int queue_piece(struct show *show, struct shd_err *e)
{
    const struct model *m = show->ask.model;
    const uint32_t unit = unit_of(&show->ask);
    const uint64_t left = show->shown.elems - show->counted;
    const uint64_t room = show->piece_max - (SHD_BLOCK_ELEMS - head_of(show));
    const uint64_t at = show->unit_first + show->counted - m->map->slice[unit].first_elem;
    const uint32_t first = first_array(show);
    show->piece_elems = left < room ? left : room;
    int r = check_unmoved(show, e);
    for (uint32_t a = 0; r == SHD_OK && a < show->arrays; a++) {
        struct show_copy *copy = &show->copies[a];
        const struct kern_op op = kern_read_of(model_state(m, first + a, unit), at,
                                               show->piece_elems,
                                               show->values + a * show->piece_max);
        copy->show = show;
        task_init(&copy->task, m->daemon->tasks, copied);
        r = m->kern->ops->submit(m->kern, &op, &copy->task.done, e);
        show->copying += r == SHD_OK;
    }
    if (show->copying == 0)
        return r;
    show->status = r;
    if (r != SHD_OK && e != &show->err)
        show->err = *e;
    return SHD_PENDING;
}

/* -- Beginning ----------------------------------------------------------------------------------
 */

static uint32_t arrays_of(const struct show_ask *ask)
{
    return ask->array == SHOW_UPDATE ? 1 + spec_unit_moments(ask->model->spec, unit_of(ask)) : 1;
}

/* With room for a piece, less where the range is shorter, and for all values that are asked for. */
static struct show *show_new(const struct show_ask *ask, uint64_t elems)
{
    const uint32_t arrays = arrays_of(ask);
    uint64_t piece = SHOW_PIECE_BYTES / sizeof(float) / arrays / SHD_BLOCK_ELEMS * SHD_BLOCK_ELEMS;
    if (piece > layout_align(elems, SHD_BLOCK_ELEMS) + SHD_BLOCK_ELEMS)
        piece = layout_align(elems, SHD_BLOCK_ELEMS) + SHD_BLOCK_ELEMS;
    const uint64_t values = arrays * piece, kept = ask->values ? elems : 0;
    struct show *show = sys_malloc(sizeof *show + (values + kept) * sizeof(float));
    if (show == NULL)
        return NULL;
    memset(show, 0, sizeof *show);
    show->ask = *ask;
    show->work.data = show;
    show->arrays = arrays;
    show->piece_max = piece;
    show->shown.elems = elems;
    show->kept = kept > 0 ? show->values + values : NULL;
    show->shown.values = show->kept;
    tally_init(&show->shown.tally);
    return show;
}

int show_begin(const struct show_ask *ask, const struct show_done *done, struct show **ret_show,
               struct shd_err *e)
{
    const struct model *m = ask->model;
    const struct spec_tensor *t = &m->spec->tensors[ask->tensor];
    struct delta_rule rule = { 0 };
    struct shown now = { 0 };
    uint64_t first = 0;
    *ret_show = NULL;
    int r = check_array(ask, &rule, e);
    if (r == SHD_OK)
        r = look(ask, &now, e);
    if (r != SHD_OK)
        return r;
    const uint64_t elems = layout_intersect(m->map->slice[t->unit], t->offset_elems + ask->first,
                                            ask->elems, &first);
    struct show *show = show_new(ask, elems);
    if (show == NULL)
        return err_set(e, SHD_ENOMEM, "no memory to count %" PRIu64 " elements", elems);
    show->done = *done;
    show->rule = rule;
    show->unit_first = first;
    show->shown.step = now.step;
    show->shown.updates = now.updates;
    show->shown.of_step = now.of_step;
    show->shown.groups = now.groups;
    r = elems > 0 ? queue_piece(show, e) : SHD_OK;
    ask->model->use.shows += r == SHD_PENDING;
    if (r == SHD_OK || r == SHD_PENDING)
        *ret_show = show;
    else
        free(show);
    return r;
}
