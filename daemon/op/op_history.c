/* HISTORY: what committed steps came to; see proto/share/history.h. */
#include "proto/share/history.h"

#include <inttypes.h>

#include "daemon/core/ledger.h"
#include "daemon/model/model.h"
#include "daemon/net/op.h"
#include "daemon/op/requests.h"
#include "proto/base/sys.h"
#include "proto/share/audit.h"

static int op_history(struct op *op)
{
    const struct wire_history *req = &op->req.history;
    const int r = model_of(op, req->model);
    if (r != SHD_OK)
        return r;
    const struct ledger *l = op->model->ledger;
    const uint64_t commits = atomic_load(&l->head->commits);
    uint64_t next = req->from < commits ? req->from : commits;
    const uint32_t room = req->count < AUDIT_SLOTS ? req->count : AUDIT_SLOTS;
    struct history_row *rows = sys_malloc(req->count * sizeof *rows +
                                          room * sizeof(struct audit_row));
    if (rows == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for %" PRIu32 " rows", req->count);
    op->text = (char *)rows; /* freed with the op */
    struct audit_row *audits = (struct audit_row *)(void *)(rows + req->count);
    const uint32_t count = history_read(l->history, l->head->history_slots, commits, &next, rows,
                                        req->count);
    const uint32_t known = l->audit != NULL && count > 0
                               ? audit_read(l->audit, commits, rows[0].step, next, audits, room)
                               : 0;
    op->reply.type = WIRE_ROWS;
    op->reply.rows = (struct wire_rows){ .next = next,
                                         .rows = { (const uint8_t *)rows, count * sizeof *rows },
                                         .audits = { (const uint8_t *)audits,
                                                     known * sizeof *audits } };
    return SHD_OK;
}

const struct request request_history = { op_history, ANY_ROLE };
