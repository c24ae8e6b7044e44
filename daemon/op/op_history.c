/* HISTORY: what committed steps came to; see proto/share/history.h. */
#include "proto/share/history.h"

#include <inttypes.h>

#include "daemon/core/ledger.h"
#include "daemon/model/model.h"
#include "daemon/net/op.h"
#include "daemon/op/requests.h"
#include "proto/base/sys.h"

static int op_history(struct op *op)
{
    const struct wire_history *req = &op->req.history;
    const int r = model_of(op, req->model);
    if (r != SHD_OK)
        return r;
    const struct ledger *l = op->model->ledger;
    const uint64_t commits = atomic_load(&l->head->commits);
    uint64_t next = req->from < commits ? req->from : commits;
    struct history_row *rows = sys_malloc(req->count * sizeof *rows);
    if (rows == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for %" PRIu32 " rows", req->count);
    op->text = (char *)rows; /* freed with the op */
    const uint32_t count = history_read(l->history, l->head->history_slots, commits, &next, rows,
                                        req->count);
    op->reply.type = WIRE_ROWS;
    op->reply.rows = (struct wire_rows){ .next = next,
                                         .rows = { (const uint8_t *)rows, count * sizeof *rows } };
    return SHD_OK;
}

const struct request request_history = { op_history, ANY_ROLE };
