/* See fork.h. */
#include "daemon/model/fork.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core/ledger.h"
#include "daemon/core/ledger_set.h"
#include "daemon/core/step.h"
#include "daemon/core/step_set.h"
#include "daemon/core/sweep.h"
#include "daemon/model/model.h"
#include "proto/base/sys.h"
#include "proto/share/shardmap.h"

int fork_check(const struct model *from, const struct model *to, struct shd_err *e)
{
    const struct shardmap *a = from->map, *b = to->map;
    if (a->owner == b->owner && a->owners == b->owners && a->units == b->units &&
        a->elems == b->elems && a->arrays == b->arrays && a->moment_elems == b->moment_elems &&
        a->train_elems == b->train_elems)
        return SHD_OK;
    return err_set(e, SHD_ESPEC, "model '%s' is not laid out as '%s' is", to->ledger->head->name,
                   from->ledger->head->name);
}

int fork_may_begin(const struct model *from, uint64_t step, struct shd_err *e)
{
    const enum sweep_when when = sweep_when(from->core, step);
    if (when != SWEEP_OVER)
        return when == SWEEP_NOW ? SHD_OK : SHD_PENDING;
    return err_set(e, SHD_ESTEP, "fork of step %" PRIu64 " asked for, the open step is %" PRIu64,
                   step, step_collecting(from->core));
}

int fork_take(const struct model *from, struct ledger_start *ret_start, struct shd_err *e)
{
    const struct step_blob blob = step_last_blob(from->core);
    const uint32_t units = from->ledger->head->units;
    const bool apart = step_units_counted_apart(from->core);
    uint64_t *updates = apart ? sys_calloc(units, sizeof *updates) : NULL;
    void *copy = blob.bytes > 0 ? sys_malloc(blob.bytes) : NULL;
    if ((apart && updates == NULL) || (blob.bytes > 0 && copy == NULL)) {
        free(updates);
        free(copy);
        return err_set(e, SHD_ENOMEM, "no memory to fork a model");
    }
    for (uint32_t u = 0; apart && u < units; u++)
        updates[u] = step_unit_updates(from->core, u);
    if (blob.bytes > 0)
        memcpy(copy, blob.data, blob.bytes);
    *ret_start = (struct ledger_start){ .step = step_now(from->core),
                                        .updates = step_updates(from->core),
                                        .unit_updates = updates,
                                        .blob = copy,
                                        .blob_bytes = blob.bytes };
    step_last_decision(from->core, &ret_start->decision);
    return SHD_OK;
}

int fork_settings(const struct model *from, struct model *to, struct shd_err *e)
{
    const struct settings_kept *kept = step_settings_kept(from->core);
    if (from->map->owner != 0 || kept == NULL || (!settings_any(kept) && to->ledger->set == NULL))
        return SHD_OK;
    if (to->ledger->set == NULL)
        return err_set(e, SHD_ENOTSUP,
                       "model '%s' has settings, which the build of another daemon does not know "
                       "of: upgrade it",
                       from->ledger->head->name);
    to->ledger->set->kept[0] = *kept; /* the same spec: the same numbers */
    return SHD_OK;
}

void fork_forget(struct ledger_start *start)
{
    free((void *)(uintptr_t)start->unit_updates);
    free((void *)(uintptr_t)start->blob);
    *start = (struct ledger_start){ 0 };
}
