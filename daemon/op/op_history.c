/* HISTORY: what committed steps came to (proto/share/history.h), or units in one of the last ones,
 * whose updates are done (model/norms.h). */
#include "proto/share/history.h"

#include <inttypes.h>
#include <stdlib.h>

#include "daemon/core/ledger.h"
#include "daemon/core/step.h"
#include "daemon/model/metrics.h"
#include "daemon/model/model.h"
#include "daemon/model/norms.h"
#include "daemon/net/op.h"
#include "daemon/op/requests.h"
#include "proto/base/sys.h"
#include "proto/share/audit.h"
#include "proto/share/unit_row.h"

_Static_assert(UNIT_UNKNOWN == (int)NORMS_UNKNOWN && UNIT_FINITE == (int)NORMS_FINITE &&
                   UNIT_NOT_FINITE == (int)NORMS_NOT_FINITE,
               "what is known has one number in messages and here");

/* Does this owner still have the step, all of it? UINT64_MAX: the last one that it has. */
static bool find_step(const struct model *m, uint64_t step, struct norms_step *ret_step)
{
    struct norms *norms = m->metrics->norms;
    const uint64_t done = step_now(m->core), kept = norms_steps(norms) - 1;
    if (step != UINT64_MAX)
        return step < done && done - step <= kept && norms_get_step(norms, step, ret_step);
    for (uint64_t back = 1; back <= kept && back <= done; back++)
        if (norms_get_step(norms, done - back, ret_step))
            return true;
    return false;
}

static void pack(uint8_t bytes[FIXSUM_BYTES], const struct fixsum *sum, enum norms_known known)
{
    struct fixsum zero;
    fixsum_init(&zero);
    fixsum_pack(known == NORMS_FINITE ? sum : &zero, bytes);
}

/* Of an update the last one that was measured, at the step or before it. */
static void fill_rows(const struct model *m, uint64_t step, uint32_t first, uint32_t count,
                      struct norms_cell *cells, struct unit_row *rows)
{
    struct norms_cell *changes = cells + count;
    norms_get_cells(m->metrics->norms, step, first, count, cells);
    norms_get_cells(m->metrics->norms, step - step % NORMS_EVERY, first, count, changes);
    for (uint32_t i = 0; i < count; i++) {
        rows[i].gradient = cells[i].gradient;
        rows[i].change = changes[i].change;
        pack(rows[i].grad, &cells[i].grad, cells[i].gradient);
        pack(rows[i].update, &changes[i].update, changes[i].change);
        pack(rows[i].weight, &changes[i].weight, changes[i].change);
    }
}

static int tell_units(struct op *op)
{
    const struct wire_history *req = &op->req.history;
    const struct model *m = op->model;
    const uint32_t first = req->units_from - 1, count = req->count, units = m->ledger->head->units;
    struct norms_step of;
    if (count > WIRE_UNITS_MAX || first >= units || count > units - first)
        return err_set(&op->err, SHD_ERANGE,
                       "%" PRIu32 " units from %" PRIu32 " of a model with %" PRIu32
                       ", at most %u at once",
                       count, first, units, WIRE_UNITS_MAX);
    op->reply.type = WIRE_ROWS;
    op->reply.rows = (struct wire_rows){ .next = step_now(m->core) };
    if (!find_step(m, req->from, &of))
        return SHD_OK;
    struct norms_cell *cells = sys_malloc((size_t)count * 2 * sizeof *cells);
    struct unit_row *rows = sys_malloc(count * sizeof *rows);
    op->work = rows; /* freed with the op */
    if (cells == NULL || rows == NULL) {
        free(cells);
        return err_set(&op->err, SHD_ENOMEM, "no memory for %" PRIu32 " units", count);
    }
    fill_rows(m, of.step, first, count, cells, rows);
    free(cells);
    op->reply.rows.units = (struct wire_bytes){ (const uint8_t *)rows, count * sizeof *rows };
    op->reply.rows.units_step = of.step + 1;
    op->reply.rows.units_divisor = of.divisor;
    op->reply.rows.units_skipped = history_skipped(of.skipped, of.guard);
    return SHD_OK;
}

static int op_history(struct op *op)
{
    const struct wire_history *req = &op->req.history;
    const int r = model_of(op, req->model);
    if (r != SHD_OK)
        return r;
    if (req->units_from > 0)
        return tell_units(op);
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
