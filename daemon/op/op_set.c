/* SET: hyperparameters of a model are changed, or looked at; see core/step_set.h. */
#include <string.h>

#include "daemon/base/state.h"
#include "daemon/core/step.h"
#include "daemon/model/inbox.h"
#include "daemon/model/model.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "daemon/op/requests.h"
#include "proto/spec/settings.h"

/* A worker of an older build would be refused an answer in the middle of its step. */
static int check_workers(struct op *op)
{
    const struct session_table *table = op->daemon->sessions;
    const bool old = op->req.set.more.bytes == 0;
    const uint32_t level = old ? WIRE_LEVEL_STATES : WIRE_LEVEL_AUDITS;
    for (uint32_t i = 0; i < table->made; i++) {
        const struct session *s = &table->items[i];
        for (uint32_t k = 0; k < s->inbox_count && s->said.level < level; k++)
            if (s->inboxes[k]->model == op->model)
                return err_set(&op->err, SHD_ENOTSUP,
                               "worker '%.60s' (pid %d) is of an older build, which knows no "
                               "%s: end it, or start it again with this one",
                               s->name, (int)s->pid,
                               old ? "settings" : "micro_batches or eps that are set");
    }
    return SHD_OK;
}

static int change(struct op *op, uint64_t *ret_from)
{
    const struct wire_set *req = &op->req.set;
    if (op->session->role == WIRE_READER)
        return err_set(&op->err, SHD_EAUTH, "a reader cannot change settings");
    *ret_from = step_collecting(op->model->core);
    if (req->go_on)
        return model_go_on(op->model, &op->err);
    const struct settings_bytes given = { req->change.data, req->more.data, req->change.bytes,
                                          req->more.bytes };
    const int r = check_workers(op);
    return r == SHD_OK ? model_set(op->model, &given, req->from, req->id, ret_from, &op->err) : r;
}

static int op_set(struct op *op)
{
    const struct wire_set *req = &op->req.set;
    uint64_t from = 0;
    int r = model_of(op, req->model);
    if (r == SHD_OK && !req->look)
        r = change(op, &from);
    if (r == SHD_OK)
        r = model_settings(op->model, step_collecting(op->model->core), &op->text, &op->err);
    if (r != SHD_OK)
        return r;
    const char *json = op->text != NULL ? op->text : "{\"now\":{},\"next\":null}";
    op->reply.type = WIRE_SET_ANSWER;
    op->reply.set_answer = (struct wire_set_answer){
        .from = from, .json = { (const uint8_t *)json, strlen(json) }
    };
    return SHD_OK;
}

const struct request request_set = { op_set, ANY_ROLE };
