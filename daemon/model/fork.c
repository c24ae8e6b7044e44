/* See fork.h. */
#include "daemon/model/fork.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core/ledger.h"
#include "daemon/core/ledger_guard.h"
#include "daemon/core/ledger_set.h"
#include "daemon/core/step.h"
#include "daemon/core/step_rewind.h"
#include "daemon/core/step_set.h"
#include "daemon/core/sweep.h"
#include "daemon/model/model.h"
#include "daemon/model/snapshots.h"
#include "proto/base/sys.h"
#include "proto/share/shardmap.h"
#include "proto/spec/ramp.h"
#include "proto/spec/spec.h"

struct kept { /* what a snapshot has of its ledger: it may be written anew before that is needed */
    struct rewind_record record;
    struct rewind_more more;
    uint64_t *updates; /* owned, [units] */
    uint8_t *blob;     /* owned; NULL: none */
};

struct fork {
    struct model *from;             /* borrowed until it is copied */
    struct snapshot_item *snapshot; /* lent; NULL: it was the open step, or is given back */
    const void *arrays;
    struct ledger_start start; /* owned, its arrays: of the open step */
    struct kept *kept;         /* owned: of a snapshot; NULL: it is of the open step */
    uint64_t go_on;            /* as in the guard's ledger */
};

int fork_check(const struct model *from, const struct model *to, struct shd_err *e)
{
    const struct shardmap *a = from->map, *b = to->map;
    if (a->owner == b->owner && a->owners == b->owners && a->units == b->units &&
        a->elems == b->elems && a->arrays == b->arrays && a->moment_elems == b->moment_elems &&
        a->moment_words == b->moment_words && a->train_elems == b->train_elems)
        return SHD_OK;
    return err_set(e, SHD_ESPEC, "model '%s' is not laid out as '%s' is", to->ledger->head->name,
                   from->ledger->head->name);
}

int fork_may_begin(const struct model *from, uint64_t step, struct shd_err *e)
{
    const enum sweep_when when = sweep_when(from->core, step);
    if (when == SWEEP_NOW || snapshot_has(from, step))
        return SHD_OK;
    if (when == SWEEP_TO_COME)
        return SHD_PENDING;
    if (snapshot_comes(from, step))
        return SHD_EBUSY;
    return err_set(e, SHD_ESTEP,
                   "fork of step %" PRIu64 " asked for, the open step is %" PRIu64
                   ", and there is no snapshot of that",
                   step, step_collecting(from->core));
}

/* -- Taking -------------------------------------------------------------------------------------
 */

static int no_memory(struct shd_err *e)
{
    return err_set(e, SHD_ENOMEM, "no memory to fork a model");
}

static int take_open(struct fork *f, struct shd_err *e)
{
    const struct model *from = f->from;
    const struct step_blob blob = step_last_blob(from->core);
    const uint32_t units = from->ledger->head->units;
    const bool apart = step_units_counted_apart(from->core);
    uint64_t *updates = apart ? sys_calloc(units, sizeof *updates) : NULL;
    void *copy = blob.bytes > 0 ? sys_malloc(blob.bytes) : NULL;
    f->start = (struct ledger_start){ .step = step_now(from->core),
                                      .updates = step_updates(from->core),
                                      .unit_updates = updates,
                                      .blob = copy,
                                      .blob_bytes = blob.bytes };
    if ((apart && updates == NULL) || (blob.bytes > 0 && copy == NULL))
        return no_memory(e);
    for (uint32_t u = 0; apart && u < units; u++)
        updates[u] = step_unit_updates(from->core, u);
    if (blob.bytes > 0)
        memcpy(copy, blob.data, blob.bytes);
    step_last_decision(from->core, &f->start.decision);
    f->arrays = from->state.base;
    return SHD_OK;
}

static int take_kept(struct fork *f, const struct snapshot_lent *lent, struct shd_err *e)
{
    const uint32_t units = f->from->ledger->head->units;
    const uint64_t blob_bytes = lent->record->record.blob_bytes;
    struct kept *kept = f->kept = sys_calloc(1, sizeof *kept);
    f->snapshot = lent->snapshot;
    f->arrays = lent->state;
    if (kept == NULL)
        return no_memory(e);
    kept->updates = sys_calloc(units, sizeof *kept->updates);
    kept->blob = blob_bytes > 0 ? sys_malloc(blob_bytes) : NULL;
    if (kept->updates == NULL || (blob_bytes > 0 && kept->blob == NULL))
        return no_memory(e);
    memcpy(&kept->record, lent->record, sizeof kept->record);
    if (lent->more != NULL)
        kept->more = *lent->more;
    else
        ledger_settings_from_old(&kept->record.kept, &kept->more.kept);
    memcpy(kept->updates, lent->updates, units * sizeof *kept->updates);
    if (blob_bytes > 0)
        memcpy(kept->blob, lent->blob, blob_bytes);
    return SHD_OK;
}

/* -- Micro-batches ------------------------------------------------------------------------------
 */

static bool differ_at(const struct model *a, const struct model *b, const struct ramp *rows)
{
    for (uint32_t i = 0; rows != NULL && i < rows->count; i++)
        if (spec_micro_batches(a->spec, rows->rows[i].from) !=
            spec_micro_batches(b->spec, rows->rows[i].from))
            return true;
    return spec_micro_batches(a->spec, 0) != spec_micro_batches(b->spec, 0);
}

/* The fork's spec has other micro-batches: what was set of those of `from` is not set of it. */
static bool has_own_micros(const struct model *from, const struct model *to)
{
    return differ_at(from, to, from->spec->ramp) || differ_at(from, to, to->spec->ramp);
}

static void forget_micros(struct settings_kept *kept)
{
    const uint32_t index = setting_micros(settings_groups(kept->now.count));
    uint64_t waiting = 0;
    if (kept->now.count > 0) {
        kept->now.numbers[index] = (double)NAN;
        kept->since[index] = 0;
    }
    for (uint64_t i = 0; i < kept->waiting; i++)
        if (kept->waits[i].index != index)
            kept->waits[waiting++] = kept->waits[i];
    kept->waiting = waiting;
}

/* -- Settings -----------------------------------------------------------------------------------
 */

static bool has_change(const struct fork_ask *ask)
{
    return ask->change.old_bytes + ask->change.more_bytes > 0;
}

static int change_settings(const struct model *to, const struct fork_ask *ask,
                           struct settings_kept *kept, struct shd_err *e)
{
    const struct settings_when when = { .open = ask->step, .earliest = ask->step };
    struct settings change;
    struct settings_kept after;
    uint64_t from;
    int r = settings_unpack(&ask->change, /* change= */ true, &change, e);
    if (r == SHD_OK)
        r = settings_check(to->spec, &change, /* change= */ true, e);
    if (r == SHD_OK && change.count > 0)
        r = settings_give(kept, &change, &when, &after, &from, e);
    if (r == SHD_OK && change.count > 0)
        *kept = after;
    return r;
}

static int take_settings(const struct fork *f, struct model *to, const struct fork_ask *ask,
                         struct shd_err *e)
{
    struct settings_kept room, kept = { 0 };
    const struct settings_kept *of = f->kept != NULL ? &f->kept->more.kept
                                                     : step_settings_kept(f->from->core, &room);
    const bool any = (of != NULL && settings_any(of)) || has_change(ask);
    const bool has_room = ledger_settings_room(to->ledger);
    if (to->map->owner != 0 || (!any && !has_room))
        return SHD_OK;
    if (!has_room)
        return err_set(e, SHD_ENOTSUP,
                       "model '%s' has settings, which the build of another daemon does not know "
                       "of: upgrade it",
                       f->from->ledger->head->name);
    if (of != NULL)
        kept = *of;
    if (has_own_micros(f->from, to))
        forget_micros(&kept);
    int r = settings_check_kept(to->spec, &kept, e);
    if (r == SHD_OK && has_change(ask))
        r = change_settings(to, ask, &kept, e);
    return r == SHD_OK ? ledger_settings_keep(to->ledger, &kept, e) : r;
}

int fork_take(struct model *from, struct model *to, const struct fork_ask *ask,
              struct fork **ret_fork, struct shd_err *e)
{
    struct snapshot_lent lent;
    struct fork *f = sys_calloc(1, sizeof *f);
    int r;
    if (f == NULL)
        return no_memory(e);
    f->from = from;
    f->go_on = step_rewind_go_on(from->ledger, ask->step);
    if (sweep_when(from->core, ask->step) == SWEEP_NOW)
        r = take_open(f, e);
    else if (snapshot_lend(from, ask->step, &lent))
        r = take_kept(f, &lent, e);
    else
        r = err_set(e, SHD_ESTEP, "there is no snapshot of step %" PRIu64, ask->step);
    if (r == SHD_OK)
        r = take_settings(f, to, ask, e);
    if (r == SHD_OK && has_own_micros(from, to)) {
        f->start.decision.micro_batches = 0;
        if (f->kept != NULL)
            f->kept->more.chosen.micro_batches = 0;
    }
    if (r == SHD_OK) {
        *ret_fork = f;
        return SHD_OK;
    }
    fork_copied(f);
    fork_free(f);
    return r;
}

/* -- Beginning ----------------------------------------------------------------------------------
 */

const void *fork_arrays(const struct fork *f)
{
    return f->arrays;
}

void fork_copied(struct fork *f)
{
    if (f->snapshot != NULL)
        snapshot_give_back(f->from, f->snapshot);
    f->snapshot = NULL;
    f->from = NULL;
}

uint64_t fork_step(const struct fork *f)
{
    return f->kept != NULL ? f->kept->record.step : f->start.step;
}

uint64_t fork_updates(const struct fork *f)
{
    if (f->kept == NULL)
        return f->start.updates;
    return f->kept->record.step > 0 ? f->kept->record.record.updates : 0;
}

static int begin_kept(const struct fork *f, struct model *to, struct shd_err *e)
{
    struct ledger looked_at;
    if (to->ledger->rewind == NULL)
        return err_set(e, SHD_ENOTSUP,
                       "the ledger that an older daemon or library has room for does not hold what "
                       "a snapshot has: upgrade it");
    step_rewind_start(to->ledger, &f->kept->record, &f->kept->more.chosen, f->go_on,
                      f->kept->updates, f->kept->blob);
    const int r = ledger_adopt(&looked_at, to->ledger->head, to->ledger->head->bytes, e);
    return r == SHD_OK ? model_core_anew(to, e) : r;
}

int fork_begin(const struct fork *f, struct model *to, struct shd_err *e)
{
    if (fork_step(f) == 0)
        return SHD_OK;
    if (f->kept != NULL)
        return begin_kept(f, to, e);
    const int r = model_start_at(to, &f->start, e);
    if (r == SHD_OK && to->ledger->guard != NULL)
        atomic_store_explicit(&to->ledger->guard->go_on, f->go_on, memory_order_relaxed);
    return r;
}

void fork_free(struct fork *f)
{
    if (f == NULL)
        return;
    if (f->kept != NULL) {
        free(f->kept->updates);
        free(f->kept->blob);
    }
    free(f->kept);
    free((void *)(uintptr_t)f->start.unit_updates);
    free((void *)(uintptr_t)f->start.blob);
    free(f);
}
