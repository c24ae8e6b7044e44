/* See replace.h. */
#include "daemon/model/replace.h"

#include <inttypes.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/core/ledger.h"
#include "daemon/core/step.h"
#include "daemon/model/inbox.h"
#include "daemon/model/model.h"
#include "daemon/model/moved.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "proto/base/failpoint.h"
#include "proto/wire/wire.h"

bool replace_done(const struct op *op, const struct model *open)
{
    const uint64_t id = op->req.restore.restore_id;
    return open != NULL && id != 0 && open->ledger->head->restored.id == id;
}

int replace_check(struct op *op, const struct model *open)
{
    const struct wire_restore *req = &op->req.restore;
    const struct daemon *d = op->daemon;
    const struct ledger_head *head = open->ledger->head;
    const char *name = head->name;
    const uint64_t step = step_now(open->core);
    char trainers[170];
    if (!req->replace)
        return err_set(&op->err, SHD_EEXIST, "daemon %s has model '%s' open at step %" PRIu64,
                       d->device, name, step);
    if (req->owner != head->owner || req->owners != head->owners)
        return err_set(&op->err, SHD_ESPEC,
                       "daemon %s has model '%s' open as owner %" PRIu32 " of %" PRIu32
                       ", and is to replace it as owner %" PRIu32 " of %" PRIu32
                       ": name the daemons that have it, in their order",
                       d->device, name, head->owner, head->owners, req->owner, req->owners);
    if (!d->kept)
        return err_set(&op->err, SHD_ENOTSUP,
                       "daemon %s has no keeper that would start its successor: end it, start it "
                       "again and restore then",
                       d->device);
    if (req->force)
        return SHD_OK;
    if (inbox_name_trainers(open, /* but= */ NULL, trainers, sizeof trainers) > 0)
        return err_set(&op->err, SHD_EBUSY,
                       "model '%s' is at step %" PRIu64 " and being trained by %s: end them first",
                       name, step, trainers);
    if (open->checkpoint != NULL)
        return err_set(&op->err, SHD_EBUSY, "model '%s' is being saved at step %" PRIu64, name,
                       step);
    return SHD_OK;
}

void replace_with(struct model *open, struct model *m)
{
    struct daemon *d = open->daemon;
    m->ledger->head->restored.replaces = open->kept.instance;
    FAIL_POINT("replace:ready:before");
    atomic_store_explicit(&m->ledger->head->ready, 1, memory_order_release);
    FAIL_POINT("replace:ready:after");
    log_info("op=replace model=%s from_step=%" PRIu64 " step=%" PRIu64
             " next=\"ending so that a successor serves it\"",
             m->ledger->head->name, step_now(open->core), step_now(m->core));
    d->hooks->succeed(d);
}

void replace_nothing(struct daemon *d, struct model *m)
{
    FAIL_POINT("restore:ready:before");
    atomic_store_explicit(&m->ledger->head->ready, 1, memory_order_release);
    FAIL_POINT("restore:ready:after");
    moved_here(d, m->ledger->head->name,
               (struct moved_seat){ m->ledger->head->owner, m->ledger->head->owners });
    model_serve(d, m);
}
