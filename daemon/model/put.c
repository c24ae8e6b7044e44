/* See put.h. */
#include "daemon/model/put.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <uv.h>

#include "daemon/base/keeper.h"
#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/core/ledger.h"
#include "daemon/core/step.h"
#include "daemon/core/step_put.h"
#include "daemon/model/common.h"
#include "daemon/model/model.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/share/putmap.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec.h"
#include "proto/wire/wire.h"

enum put_state {
    PUT_MAKING,  /* op waits for libuv's pool */
    PUT_FILLING, /* the session writes */
    PUT_STORING, /* op waits for the keeper */
    PUT_FULL,
};

struct put {
    struct model *model; /* borrowed */
    struct op *op;       /* borrowed: pending; NULL: none */
    enum put_state state;
    uint64_t session; /* 0: it is gone, or was a predecessor's */
    uint64_t origin, step;
    uint64_t view;          /* the session's, of the replicas' hosts; with that: */
    uint64_t consent;       /* when owner 0 let it begin, by its monotonic clock: puts follow it */
    bool first;             /* this is owner 0 to the session, which has let it begin itself */
    struct segment segment; /* owned */
    uint8_t *arrays;        /* owned, [units]; as putmap_check() */
    uint64_t *updates;      /* owned, [units]; as step_put_updates() */
    bool stored;            /* with the keeper */
    bool given_up;          /* by its session, while op is pending */
    bool left;              /* frozen units have pages of their own again (common.h) */
    uv_work_t work;
    int status;
    struct shd_err err;
};

static void put_delete(struct put *put)
{
    const uint64_t bytes = put->segment.bytes;
    segment_close(&put->segment);
    model_give(put->model, bytes);
    free(put->arrays);
    free(put->updates);
    free(put);
}

static void drop(struct model *m, const char *why)
{
    struct put *put = m->put;
    CHECK(put->op == NULL);
    if (why != NULL)
        log_info("op=put model=%s origin=%016" PRIx64 " step=%" PRIu64 " why=\"dropped: %s\"",
                 m->spec->name, put->origin, put->step, why);
    m->put = NULL;
    if (put->stored)
        keeper_remove_part(m->kept.keeper, m->kept.instance, KEEPER_PUT);
    if (put->session != 0)
        session_ticket_forget(m->daemon, put->session, put->segment.fd);
    put_delete(put);
}

/* Is it the put that the model's last commit recorded? */
static bool is_last(const struct model *m, uint64_t origin)
{
    struct decision last;
    return step_last_decision(m->core, &last) && last.put == origin;
}

static bool being_applied(const struct model *m)
{
    return m->put != NULL && step_phase(m->core) == STEP_APPLYING && is_last(m, m->put->origin);
}

static bool kept_for_owner_0(const struct put *put)
{
    return put->state == PUT_FULL && !put->first;
}

/* Owner 0's replica is asked as the other owners are: owner 0 has consented. */
static bool is_first(const struct op *op)
{
    return op->model->map->owner == 0 && op->req.create.consent == 0;
}

/* Of another owner 0, which a new view has, the clock is another one. */
static bool is_older(const struct op *op, const struct put *put)
{
    const bool other_view = put->view > 0 && op->session->said.view > put->view;
    return !other_view && op->req.create.consent < put->consent;
}

/* Nobody waits for what was pending any more. Of owner 0, too, nobody has asked to commit values
 * that were not said to be full. */
static int check_wanted(const struct put *put, struct shd_err *e)
{
    if (put->session == 0)
        return err_set(e, SHD_EGONE, "its session has gone");
    return put->given_up ? err_set(e, SHD_ENOENT, "its session gave up") : SHD_OK;
}

/* The pending request is done. */
static void finish(struct put *put, int status)
{
    struct op *op = put->op;
    put->op = NULL;
    if (status != SHD_OK)
        op->err = put->err;
    if (status != SHD_OK)
        drop(put->model, put->err.text);
    op_finish(op, status);
}

static int busy(struct op *op)
{
    op->reply.retry_ms = OPS_RETRY_MS;
    return err_set(&op->err, SHD_EBUSY, "daemon %s is at another put: ask again",
                   op->daemon->device);
}

static int answer(struct op *op, enum wire_created_what what)
{
    op->reply.type = WIRE_CREATED;
    op->reply.created = (struct wire_created){ .what = what, .by = "" };
    return SHD_OK;
}

static int answer_yours(struct op *op, const struct put *put)
{
    const uint64_t ticket = session_ticket_new(op->session, put->segment.fd, SEGMENT_STAGE,
                                               put->segment.bytes);
    if (ticket == 0)
        return err_set(&op->err, SHD_EBUSY,
                       "session has %u unclaimed segments, the most there may be",
                       SESSION_TICKETS_MAX);
    answer(op, WIRE_CREATED_YOURS);
    op->reply.created.ticket = ticket;
    op->reply.created.bytes = put->segment.bytes;
    op->reply.created.consent = put->consent;
    return SHD_OK;
}

/* -- Beginning ----------------------------------------------------------------------------------
 */

static void write_head(struct put *put)
{
    struct putmap_head *head = put->segment.base;
    *head = (struct putmap_head){ .origin = put->origin,
                                  .step = put->step,
                                  .units = put->model->spec->unit_count,
                                  .consent = put->consent };
    memcpy(head + 1, put->arrays, put->model->spec->unit_count);
}

static void write_updates(struct put *put)
{
    uint8_t *at = (uint8_t *)put->segment.base + putmap_updates_at(put->model->map, put->arrays);
    if (put->updates != NULL)
        memcpy(at, put->updates, put->model->spec->unit_count * sizeof *put->updates);
}

static bool of_frozen_units(const struct put *put)
{
    const struct spec *spec = put->model->spec;
    for (uint32_t u = 0; u < spec->unit_count; u++)
        if (spec->units[u].frozen && put->arrays[u] != 0)
            return true;
    return false;
}

static void make(uv_work_t *work)
{
    struct put *put = work->data;
    const uint64_t bytes = putmap_bytes(put->model->map, put->arrays, put->updates != NULL);
    FAIL_POINT("put:make");
    if (of_frozen_units(put))
        put->status = common_leave(put->model, &put->left, &put->err);
    if (put->status == SHD_OK)
        put->status = model_take(put->model, bytes, "a put", &put->err);
    const uint64_t asked = put->status == SHD_OK ? bytes : 0;
    if (put->status == SHD_OK)
        put->status = segment_new("shardd-put", SEGMENT_STAGE, bytes, &put->segment, &put->err);
    model_settle(put->model, asked, put->segment.bytes);
    if (put->status == SHD_OK)
        write_head(put);
}

static void made(uv_work_t *work, int cancelled)
{
    struct put *put = work->data;
    CHECK(cancelled == 0);
    if (put->left)
        common_left(put->model);
    if (put->model->daemon->stopping)
        return;
    if (put->status == SHD_OK)
        put->status = check_wanted(put, &put->err);
    if (put->status == SHD_OK) {
        put->state = PUT_FILLING;
        put->status = answer_yours(put->op, put);
        put->err = put->op->err;
    }
    finish(put, put->status);
}

/* Of each unit, or NULL. */
static int take_updates(struct op *op, uint64_t **ret_updates)
{
    const struct wire_bytes *from = &op->req.create.unit_updates;
    const struct model *m = op->model;
    *ret_updates = NULL;
    if (from->bytes == 0)
        return SHD_OK;
    if (from->bytes != m->spec->unit_count * sizeof **ret_updates)
        return err_set(&op->err, SHD_ERANGE,
                       "a put with %zu counts of updates, model '%s' has %" PRIu32 " units",
                       from->bytes / sizeof **ret_updates, m->spec->name, m->spec->unit_count);
    uint64_t *updates = sys_malloc(from->bytes);
    if (updates == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for a put");
    memcpy(updates, from->data, from->bytes);
    const int r = step_put_check_updates(m->core, updates, &op->err);
    if (r == SHD_OK)
        *ret_updates = updates;
    else
        free(updates);
    return r;
}

static int begin(struct op *op)
{
    const struct wire_create *req = &op->req.create;
    struct model *m = op->model;
    uint64_t *updates;
    const int r = take_updates(op, &updates);
    if (r != SHD_OK)
        return r;
    struct put *put = sys_calloc(1, sizeof *put);
    uint8_t *arrays = sys_malloc(m->spec->unit_count);
    if (put == NULL || arrays == NULL) {
        free(put);
        free(arrays);
        free(updates);
        return err_set(&op->err, SHD_ENOMEM, "no memory for a put");
    }
    memcpy(arrays, req->arrays.data, m->spec->unit_count);
    *put = (struct put){ .model = m,
                         .op = op,
                         .session = op->session->id,
                         .origin = req->origin,
                         .step = req->step,
                         .view = op->session->said.view,
                         .consent = is_first(op) ? uv_hrtime() : req->consent,
                         .first = is_first(op),
                         .arrays = arrays,
                         .updates = updates,
                         .segment = SEGMENT_CLOSED };
    put->work.data = put;
    m->put = put;
    uv_queue_work(op->daemon->loop, &put->work, make, made);
    return SHD_PENDING;
}

/* Another one is in the way: SHD_OK: not any more. */
static int make_way(struct op *op)
{
    struct model *m = op->model;
    const struct put *put = m->put;
    if (put == NULL)
        return SHD_OK;
    const bool others = put->session != 0 && put->session != op->session->id;
    if (put->op != NULL || being_applied(m) || (others && is_first(op)))
        return busy(op);
    drop(m, "another one begins");
    return SHD_OK;
}

int put_begin(struct op *op)
{
    const struct wire_create *req = &op->req.create;
    int r = model_of(op, req->model);
    if (r != SHD_OK)
        return r;
    struct model *m = op->model;
    const struct put *put = m->put;
    if (req->step < step_collecting(m->core))
        return answer(op, WIRE_CREATED_OVER);
    r = putmap_check(m->spec, req->arrays.data, req->arrays.bytes, &op->err);
    if (r != SHD_OK)
        return r;
    r = step_put_check(m->core, req->step, &op->err);
    if (r != SHD_OK)
        return r;
    if (put != NULL && put->origin == req->origin && put->session == op->session->id &&
        put->state == PUT_FILLING)
        return answer_yours(op, put); /* the reply was lost */
    if (put != NULL && !is_first(op) && is_older(op, put))
        return err_set(&op->err, SHD_ENOENT, "owner 0 has let another put begin since");
    r = make_way(op);
    if (r == SHD_OK && m->use.forks > 0)
        return busy(op);
    return r == SHD_OK ? begin(op) : r;
}

/* -- Full ---------------------------------------------------------------------------------------
 */

static void store(uv_work_t *work)
{
    struct put *put = work->data;
    const struct model_kept *kept = &put->model->kept;
    write_updates(put);
    ((struct putmap_head *)put->segment.base)->magic = put->updates != NULL ? PUTMAP_COUNTS
                                                                            : PUTMAP_MAGIC;
    FAIL_POINT("put:store:before");
    put->status = keeper_store(kept->keeper, kept->instance, KEEPER_PUT, put->segment.fd,
                               &put->err);
    FAIL_POINT("put:store:after");
}

static void stored(uv_work_t *work, int cancelled)
{
    struct put *put = work->data;
    CHECK(cancelled == 0);
    if (put->model->daemon->stopping)
        return;
    put->stored = put->status == SHD_OK;
    if (put->status == SHD_OK)
        put->status = check_wanted(put, &put->err);
    if (put->status == SHD_OK) {
        put->state = PUT_FULL;
        answer(put->op, WIRE_CREATED_FULL);
    }
    finish(put, put->status);
}

static int no_such(struct op *op, uint64_t origin)
{
    return err_set(&op->err, SHD_ENOENT, "daemon %s has no values of a put %016" PRIx64,
                   op->daemon->device, origin);
}

/* or_of_none: also when that one has gone. */
static bool is_of(const struct put *put, const struct session *s, bool or_of_none)
{
    return put->session == s->id || (or_of_none && put->session == 0);
}

int put_full(struct op *op)
{
    const uint64_t origin = op->req.create.origin;
    int r = model_of(op, op->req.create.model);
    if (r != SHD_OK)
        return r;
    struct put *put = op->model->put;
    const bool full = put != NULL && put->state == PUT_FULL; /* the answer, or a predecessor's
                                                              * session, was lost */
    if (put == NULL || put->origin != origin || !is_of(put, op->session, full))
        return no_such(op, origin);
    r = step_put_check(op->model->core, put->step, &op->err);
    if (r != SHD_OK)
        return r;
    if (put->op != NULL)
        return busy(op);
    if (full)
        return answer(op, WIRE_CREATED_FULL);
    put->op = op;
    put->state = PUT_STORING;
    uv_queue_work(op->daemon->loop, &put->work, store, stored);
    return SHD_PENDING;
}

int put_drop(struct op *op)
{
    const uint64_t origin = op->req.create.origin;
    const int r = model_of(op, op->req.create.model);
    if (r != SHD_OK)
        return r;
    struct put *put = op->model->put;
    if (put == NULL || put->origin != origin || is_last(op->model, origin) ||
        !is_of(put, op->session, /* or_of_none= */ false))
        return no_such(op, origin);
    if (put->op != NULL)
        put->given_up = true; /* it goes when what is pending is done */
    else
        drop(op->model, "its session gave up");
    return answer(op, WIRE_CREATED_DROPPED);
}

/* -- Committing ---------------------------------------------------------------------------------
 */

int put_check(struct op *op)
{
    return step_put_decision(op->model->core, &op->req.commit.decision, &op->err);
}

int put_commit(struct op *op, struct step_actions *ret_actions)
{
    const struct wire_commit *req = &op->req.commit;
    struct model *m = op->model;
    const uint64_t origin = req->decision.put;
    ret_actions->count = 0;
    if (origin == 0 || req->step < step_collecting(m->core))
        return SHD_OK; /* no put, or the answer is known */
    if (m->put == NULL || m->put->origin != origin || m->put->state != PUT_FULL)
        return no_such(op, origin);
    const bool first = m->map->owner == 0 && !req->recorded;
    int r = step_put_check_updates(m->core, m->put->updates, &op->err);
    if (r == SHD_OK && !first)
        r = step_put_clear(m->core, req->step, ret_actions);
    else if (r == SHD_OK)
        r = step_put_check(m->core, req->step, &op->err);
    if (r == SHD_OK && first && !step_put_idle(m->core))
        r = SHD_PENDING;
    if (r == SHD_OK)
        step_put_updates(m->core, m->put->updates);
    return r;
}

uint8_t put_arrays(const struct model *m, uint32_t unit)
{
    return being_applied(m) ? m->put->arrays[unit] : 0;
}

const float *put_slice(const struct model *m, uint32_t array, uint32_t unit)
{
    const uint64_t at = putmap_offset_bytes(m->map, m->put->arrays, array, unit);
    return (const float *)((const uint8_t *)m->put->segment.base + at);
}

void put_step_over(struct model *m)
{
    const struct put *put = m->put;
    if (put == NULL || put->op != NULL || put->step >= step_collecting(m->core) || being_applied(m))
        return;
    drop(m, is_last(m, put->origin) ? NULL : "its step is over");
}

bool put_make_room(struct model *m)
{
    if (m->put != NULL && (m->put->op != NULL || being_applied(m)))
        return false;
    if (m->put != NULL)
        drop(m, "the model goes back to an earlier step");
    return true;
}

/* -- Ends ---------------------------------------------------------------------------------------
 */

void put_unclaim(struct model *m)
{
    struct put *put = m->put;
    if (put == NULL || put->session == 0)
        return;
    session_ticket_forget(m->daemon, put->session, put->segment.fd);
    put->session = 0;
}

void put_forget_session(struct daemon *d, const struct session *s)
{
    for (uint32_t i = 0; i < d->model_count; i++) {
        struct model *m = d->models[i];
        struct put *put = m->put;
        if (put == NULL || put->session != s->id)
            continue;
        put->session = 0;
        if (put->op == NULL && !kept_for_owner_0(put) && !being_applied(m))
            drop(m, "its session has gone");
    }
}

/* The last commit was a put that is not in all units yet. */
static uint64_t origin_needed(const struct ledger *l)
{
    const uint64_t commits = atomic_load(&l->head->commits);
    uint64_t step;
    if (ledger_rewinding(l, &step))
        return 0; /* none was being applied */
    for (uint32_t u = 0; u < l->head->units; u++)
        if (atomic_load(&l->unit[u].version) < commits)
            return l->head->beside.put[commits & 1];
    return 0;
}

/* What they are is looked at when the put is committed: the model has no core yet. */
static int take_kept_updates(const struct model *m, struct put *put, struct shd_err *e)
{
    const uint8_t *from = (const uint8_t *)put->segment.base +
                          putmap_updates_at(m->map, put->arrays);
    put->updates = sys_calloc(m->spec->unit_count, sizeof *put->updates);
    if (put->updates == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a put");
    memcpy(put->updates, from, m->spec->unit_count * sizeof *put->updates);
    return SHD_OK;
}

/* Nothing in it is trusted. */
static int take_kept(struct model *m, int fd, struct put *put, struct shd_err *e)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return err_sys(e, SHD_ESEGMENT, "look at the values of a put");
    const uint64_t bytes = st.st_size > 0 ? (uint64_t)st.st_size : 0;
    const uint64_t units = m->spec->unit_count;
    int r = segment_check(fd, SEGMENT_STAGE, bytes, e);
    if (r == SHD_OK && bytes < layout_align(sizeof(struct putmap_head) + units, SHD_PAGE_BYTES))
        r = err_set(e, SHD_ESEGMENT, "the values of a put are in %" PRIu64 " bytes", bytes);
    if (r == SHD_OK)
        r = segment_map(fd, SEGMENT_STAGE, bytes, &put->segment, e);
    if (r != SHD_OK)
        return r;
    model_have(m, put->segment.bytes);
    const struct putmap_head *head = put->segment.base;
    put->origin = head->origin;
    put->step = head->step;
    put->consent = head->consent;
    memcpy(put->arrays, head + 1, units);
    const bool counts = head->magic == PUTMAP_COUNTS;
    if ((head->magic != PUTMAP_MAGIC && !counts) || head->origin == 0)
        return err_set(e, SHD_ESEGMENT, "the values of a put begin with %#" PRIx64, head->magic);
    r = putmap_check(m->spec, put->arrays, head->units, e);
    if (r != SHD_OK)
        return r;
    if (putmap_bytes(m->map, put->arrays, counts) != bytes)
        return err_set(e, SHD_ESEGMENT, "the values of a put have %" PRIu64 " bytes, not %" PRIu64,
                       bytes, putmap_bytes(m->map, put->arrays, counts));
    return counts ? take_kept_updates(m, put, e) : SHD_OK;
}

static int take_any(struct model *m, int fd, struct shd_err *e)
{
    if (fd < 0)
        return err_set(e, SHD_ESEGMENT, "the keeper has no values of a put");
    struct put *put = sys_calloc(1, sizeof *put);
    uint8_t *arrays = sys_calloc(m->spec->unit_count, 1);
    if (put == NULL || arrays == NULL) {
        free(put);
        free(arrays);
        return err_set(e, SHD_ENOMEM, "no memory for a put");
    }
    *put = (struct put){
        .model = m, .state = PUT_FULL, .arrays = arrays, .stored = true, .segment = SEGMENT_CLOSED
    };
    put->work.data = put;
    const int r = take_kept(m, fd, put, e);
    if (r == SHD_OK) {
        m->put = put;
        return r;
    }
    put->segment.fd = -1; /* the group's */
    put_delete(put);
    return r;
}

int put_adopt(struct model *m, const struct keeper_group *g, struct shd_err *e)
{
    const uint64_t needed = origin_needed(m->ledger);
    const int fd = g->fd[KEEPER_PUT];
    if (fd < 0 && needed == 0)
        return SHD_OK;
    int r = take_any(m, fd, e);
    if (r == SHD_OK && needed != 0 && m->put->origin != needed)
        r = err_set(e, SHD_ESEGMENT,
                    "the keeper has values of a put %016" PRIx64
                    ", needed are those of %016" PRIx64,
                    m->put->origin, needed);
    if (r == SHD_ENOMEM || r == SHD_OK || needed != 0)
        return r;
    log_warn("op=adopt model=%s why=\"dropped: %s\" do=\"nothing: they are of a put that was "
             "not committed\"",
             m->spec->name, e->text);
    return SHD_OK;
}

void put_adopted(const struct model *m, struct keeper_group *g)
{
    if (m->put != NULL || g->fd[KEEPER_PUT] < 0)
        return;
    keeper_remove_part(m->kept.keeper, g->instance, KEEPER_PUT);
    close(g->fd[KEEPER_PUT]);
    g->fd[KEEPER_PUT] = -1;
}

void put_free(struct model *m)
{
    if (m->put != NULL)
        put_delete(m->put);
    m->put = NULL;
}

void put_unadopt(struct model *m)
{
    if (m->put != NULL)
        m->put->segment.fd = -1;
    put_free(m);
}
