/* A step in this process: summing gradients, committing. See local_step.h. */
#include "client/paths/local_step.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/paths/kern_run.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"

/* -- A micro-batch ----------------------------------------------------------------------------- */

int local_wait_slot(struct shd_model *m, struct shd_err *e)
{
    for (uint32_t i = 0; i < m->slot_count; i++) {
        const struct grad_slot *slot = &m->slots[i];
        if (slot->state != SLOT_SENT)
            continue;
        return err_set(e, SHD_EBUSY,
                       "all %" PRIu32 " gradient slots are taken: unit %" PRIu32
                       ", micro-batch %" PRIu32 " waits for micro-batch %" PRIu32
                       ": hand them in ascending order",
                       m->slot_count, slot->unit, slot->group * m->spec->accumulate,
                       m->local->units[slot->unit].next_group * m->spec->accumulate);
    }
    CHECK(false); /* the caller saw one */
    return SHD_EINTERNAL;
}

float *local_slot_array(const struct shd_model *m, uint32_t slot, uint32_t unit)
{
    (void)unit;
    return m->local->slots + slot * m->local->slot_elems;
}

int local_fill_slot(struct shd_model *m, uint32_t slot, uint32_t unit, const float *grad,
                    enum shd_dtype dtype, struct shd_err *e)
{
    const struct kern_cast cast = {
        .out = local_slot_array(m, slot, unit),
        .out_dtype = dtype,
        .in = grad,
        .elems = m->spec->units[unit].elems,
    };
    m->session->bytes_copied += cast.elems * dtype_bytes(dtype);
    return kern_run(m->session->kern, &(struct kern_op){ KERN_CAST, { .cast = cast } }, e);
}

static uint32_t find_sent(const struct shd_model *m, uint32_t group, uint32_t unit)
{
    uint32_t i = 0;
    while (m->slots[i].state != SLOT_SENT || m->slots[i].group != group ||
           m->slots[i].unit != unit) {
        i++;
        CHECK(i < m->slot_count);
    }
    return i;
}

/* Add what is in, in ascending order, up to the first group that is missing. */
static int sum_arrived(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    struct local_unit *u = &m->local->units[unit];
    while (u->next_group < spec_returns(m->spec) && u->arrived[u->next_group] != ARRIVED_NOT) {
        if (u->arrived[u->next_group] == ARRIVED_GRAD) {
            const uint32_t slot = find_sent(m, u->next_group, unit);
            const struct kern_accumulate accumulate = {
                .acc = u->acc,
                .grad = local_slot_array(m, slot, unit),
                .grad_dtype = m->slots[slot].dtype,
                .elems = m->spec->units[unit].elems,
                .first = !u->summed,
            };
            const int r = kern_run(
                m->session->kern,
                &(struct kern_op){ KERN_ACCUMULATE, { .accumulate = accumulate } }, e);
            if (r != SHD_OK)
                return r;
            u->summed = true;
            m->slots[slot].state = SLOT_FREE;
        }
        u->next_group++;
    }
    return SHD_OK;
}

/* State is half changed: the model cannot go on. */
static int kernel_failed(struct shd_model *m, const struct shd_err *why, struct shd_err *e)
{
    m->fault = *why;
    if (e != NULL)
        *e = *why;
    return why->code;
}

/* The first report of a group counts, as with daemons. */
static void take_metrics(struct shd_model *m, uint32_t group)
{
    const struct report report = model_report(m, group);
    if (m->local->metric_counts[group] > 0 || report.count == 0)
        return;
    m->local->metric_counts[group] = report.count;
    memcpy(m->local->metrics[group], report.metrics, sizeof report.metrics);
}

int local_give(struct shd_model *m, const struct path_return *ret, struct shd_err *e)
{
    struct local_unit *u = &m->local->units[ret->unit];
    if (u->arrived[ret->group] != ARRIVED_NOT) { /* counts once */
        if (ret->slot != NULL)
            ret->slot->state = SLOT_FREE;
        return SHD_OK;
    }
    take_metrics(m, ret->group);
    u->arrived[ret->group] = ret->slot != NULL ? ARRIVED_GRAD : ARRIVED_NONE;
    if (ret->slot != NULL)
        ret->slot->state = SLOT_SENT;
    struct shd_err why = { 0 };
    const int r = sum_arrived(m, ret->unit, &why);
    return r == SHD_OK ? SHD_OK : kernel_failed(m, &why, e);
}

/* -- Commit ------------------------------------------------------------------------------------ */

static int check_complete(const struct shd_model *m, struct shd_err *e)
{
    for (uint32_t u = 0; u < m->spec->unit_count; u++)
        if (!m->spec->units[u].frozen && m->local->units[u].next_group < spec_returns(m->spec))
            return err_set(e, SHD_EINVAL,
                           "unit %" PRIu32 " '%s', micro-batch %" PRIu32 " of step %" PRIu64
                           " was not returned, and nobody else will",
                           u, m->spec->units[u].name,
                           m->local->units[u].next_group * m->spec->accumulate, m->step);
    return SHD_OK;
}

static int sum_squares(struct shd_model *m, struct wire_prepared *prepared, struct shd_err *e)
{
    struct kern_sum sum = { .finite = true };
    fixsum_init(&sum.sum);
    for (uint32_t i = 0; i < m->spec->unit_count; i++) {
        struct local_unit *u = &m->local->units[i];
        const uint64_t elems = m->spec->units[i].elems;
        if (m->spec->units[i].frozen)
            continue;
        if (!u->summed) { /* took part in no micro-batch */
            const struct kern_op zero = kern_zero(u->acc, elems);
            const int r = kern_run(m->session->kern, &zero, e);
            if (r != SHD_OK)
                return r;
            continue;
        }
        const struct kern_sumsq sumsq = { u->acc, elems, &sum };
        const int r = kern_run(m->session->kern,
                               &(struct kern_op){ KERN_SUMSQ, { .sumsq = sumsq } }, e);
        if (r != SHD_OK)
            return r;
    }
    fixsum_carry(&sum.sum);
    prepared->finite = sum.finite;
    prepared->sum = sum.sum;
    return SHD_OK;
}

static void sum_metrics(const struct shd_model *m, struct wire_prepared *prepared)
{
    const struct local_model *local = m->local;
    for (uint32_t group = 0; group < spec_returns(m->spec); group++) {
        if (local->metric_counts[group] > prepared->metric_count)
            prepared->metric_count = local->metric_counts[group];
        for (uint32_t i = 0; i < local->metric_counts[group]; i++)
            prepared->metrics[i] += local->metrics[group][i];
    }
}

static int update_units(struct shd_model *m, const struct decision *decision, struct shd_err *e)
{
    struct local_model *local = m->local;
    runs_hypers(m->spec, decision->lr, local->updates + 1, local->hypers);
    for (uint32_t i = 0; i < m->spec->unit_count; i++) {
        const struct local_unit *u = &local->units[i];
        if (m->spec->units[i].frozen)
            continue;
        const struct kern_update update = {
            .kind = m->spec->optimizer,
            .param = u->param,
            .m = u->m,
            .v = u->v,
            .grad = u->acc,
            .grad_scale = decision->scale,
            .publish = u->publish,
            .publish_dtype = m->spec->publish,
            .elems = m->spec->units[i].elems,
            .runs = u->runs,
            .run_count = u->run_count,
            .hypers = local->hypers,
            .hyper_count = m->spec->group_count,
        };
        const int r = kern_run(m->session->kern,
                               &(struct kern_op){ KERN_UPDATE, { .update = update } }, e);
        if (r != SHD_OK)
            return r;
    }
    local->updates++;
    return SHD_OK;
}

/* Room first: after the update nothing may fail. */
static int take_blob(const struct wire_bytes *from, uint8_t **ret_blob, struct shd_err *e)
{
    *ret_blob = NULL;
    if (from == NULL)
        return SHD_OK;
    uint8_t *blob = sys_malloc(from->bytes + 1);
    if (blob == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a blob of %zu bytes", from->bytes);
    memcpy(blob, from->data, from->bytes);
    *ret_blob = blob;
    return SHD_OK;
}

static void begin_step(struct shd_model *m)
{
    struct local_model *local = m->local;
    for (uint32_t u = 0; u < m->spec->unit_count; u++) {
        local->units[u].next_group = 0;
        local->units[u].summed = false;
    }
    memset(local->arrived, ARRIVED_NOT, (size_t)m->spec->unit_count * spec_returns(m->spec));
    memset(local->metric_counts, 0, sizeof local->metric_counts);
}

static int decide_local(struct shd_model *m, const struct decide_args *asked,
                        struct decided *ret_decided, struct shd_err *e)
{
    struct wire_prepared prepared = { .step = m->step };
    struct decide_args args = *asked;
    int r = check_complete(m, e);
    if (r == SHD_OK)
        r = sum_squares(m, &prepared, e);
    if (r != SHD_OK)
        return r;
    sum_metrics(m, &prepared);
    args.prepared = &prepared;
    args.owners = 1;
    return decide(&args, ret_decided, e);
}

int local_commit(struct shd_model *m, const struct decide_args *args, const struct wire_bytes *blob,
                 struct decided *ret_decided, struct shd_err *e)
{
    struct local_model *local = m->local;
    struct decided decided;
    uint8_t *taken = NULL;
    int r = decide_local(m, args, &decided, e);
    if (r == SHD_OK)
        r = take_blob(blob, &taken, e);
    struct shd_err why = { 0 };
    if (r == SHD_OK && !decided.decision.skip && update_units(m, &decided.decision, &why) != SHD_OK)
        r = kernel_failed(m, &why, e);
    if (r != SHD_OK) {
        free(taken);
        return r;
    }
    if (taken != NULL) {
        free(local->blob);
        local->blob = taken;
        local->blob_bytes = blob->bytes;
    }
    begin_step(m);
    *ret_decided = decided;
    return SHD_OK;
}

/* -- Work: there is one worker ----------------------------------------------------------------- */

static bool group_is_in(const struct shd_model *m, uint32_t group)
{
    for (uint32_t u = 0; u < m->spec->unit_count; u++)
        if (!m->spec->units[u].frozen && m->local->units[u].arrived[group] == ARRIVED_NOT)
            return false;
    return true;
}

int local_lease(struct shd_model *m, uint32_t owner, struct wire_leased *ret_leased,
                struct shd_err *e)
{
    const uint32_t groups = spec_returns(m->spec);
    uint32_t group = 0;
    (void)owner;
    (void)e;
    while (group < groups && group_is_in(m, group))
        group++;
    *ret_leased = (struct wire_leased){ .step = m->step,
                                        .what = group < groups ? WIRE_LEASED_GROUP
                                                               : WIRE_LEASED_ALL_IN,
                                        .group = group < groups ? group : 0 };
    return SHD_OK;
}