/* One step as the worker sees it: acquire, grad, return, report, commit. See client/shd.h.
 *
 * What all paths have in common is here: arguments are checked, gradient slots and holds are kept,
 * waiting is counted. The moving itself is the path's. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "client/paths/path.h"
#include "client/plan/plan_cost.h"
#include "client/run/gaps.h"
#include "client/run/grads.h"
#include "client/run/hold.h"
#include "client/run/parts.h"
#include "client/run/policy.h"
#include "client/run/reset.h"
#include "client/run/train.h"
#include "client/session/activity.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "kernels/runs.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

static int check_unit(const struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    if (unit < m->spec->unit_count)
        return SHD_OK;
    return err_set(e, SHD_ERANGE, "unit %" PRIu32 " of model '%s' with %" PRIu32, unit,
                   m->spec->name, m->spec->unit_count);
}

static int check_micro(const struct shd_model *m, uint32_t micro, struct shd_err *e)
{
    if (micro < m->spec->micro_batches)
        return SHD_OK;
    return err_set(e, SHD_ERANGE, "micro-batch %" PRIu32 " of a step with %" PRIu32, micro,
                   m->spec->micro_batches);
}

/* -- Parameters -------------------------------------------------------------------------------- */

int shd_acquire(shd_model *m, uint32_t unit, const void **ret_params, struct shd_err *e)
{
    int r = check_unit(m, unit, e);
    if (r == SHD_OK && m->session->left)
        r = session_check(m->session, e);
    if (r == SHD_OK && m->fault.code != SHD_OK)
        r = err_copy(&m->fault, e);
    if (r == SHD_OK)
        r = hold_fetch(m, unit, e);
    if (r != SHD_OK)
        return r;
    r = hold_acquire(m, unit, e);
    if (r != SHD_OK) {
        hold_let_go(m, unit);
        return r;
    }
    if (ret_params != NULL)
        *ret_params = m->reader->params(m, unit);
    return SHD_OK;
}

const void *shd_params(const shd_model *m, uint32_t unit)
{
    if (unit >= m->spec->unit_count || m->holds[unit].acquired == 0)
        return NULL;
    return m->reader->params(m, unit);
}

void shd_release(shd_model *m, uint32_t unit)
{
    if (unit < m->spec->unit_count && !m->session->left)
        hold_release(m, unit);
}

/* -- Gradients --------------------------------------------------------------------------------- */

static uint32_t group_of(const struct shd_model *m, uint32_t micro)
{
    return micro / m->spec->accumulate;
}

static struct grad_slot *find_held(struct shd_model *m, uint32_t group, uint32_t unit)
{
    for (uint32_t i = 0; i < m->slot_count; i++) {
        struct grad_slot *s = &m->slots[i];
        if (s->state == SLOT_HELD && s->group == group && s->unit == unit)
            return s;
    }
    return NULL;
}

static int make_slots(struct shd_model *m, struct shd_err *e)
{
    uint32_t slots;
    int r = policy_slots(m, &slots, e);
    if (r != SHD_OK)
        return r;
    m->slot_count = slots;
    r = m->session->control->open_slots(m, e);
    if (r != SHD_OK)
        m->slot_count = 0;
    return r;
}

static int take_slot(struct shd_model *m, struct grad_slot **ret_slot, struct shd_err *e)
{
    if (m->slot_count == 0) {
        const int r = make_slots(m, e);
        if (r != SHD_OK)
            return r;
    }
    struct grad_slot *slot = model_find_slot(m, SLOT_FREE);
    if (slot == NULL && model_find_slot(m, SLOT_SENT) == NULL)
        return err_set(e, SHD_EBUSY,
                       "all %" PRIu32 " gradient slots are handed out and not "
                       "returned: return one, or ask for more in shd_options.slots (at most %u)",
                       m->slot_count, SHD_SLOTS_MAX);
    if (slot == NULL) {
        const uint64_t start_ns = clock_now_ns();
        activity_begin(m, ACTIVITY_WAIT_SLOT, ACTIVITY_NONE, ACTIVITY_NONE);
        const int r = m->session->control->wait_slot(m, e);
        activity_end(m);
        m->session->wait_ns += clock_now_ns() - start_ns;
        if (r != SHD_OK)
            return r;
        slot = model_find_slot(m, SLOT_FREE);
    }
    CHECK(slot != NULL);
    const int r = m->session->control->ready_slot(m, (uint32_t)(slot - m->slots), e);
    if (r == SHD_OK)
        *ret_slot = slot;
    return r;
}

static uint64_t grad_bytes(const struct shd_model *m, uint32_t unit)
{
    return plan_unit_grad_bytes(m->spec, unit, SHD_F32);
}

/* Before a gradient is asked for or handed over: arguments are right, the model is as its policy
 * wants it, and no return has failed. */
static int check_place(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    int r = session_check(m->session, e);
    if (r == SHD_OK)
        r = check_unit(m, unit, e);
    if (r == SHD_OK)
        r = check_micro(m, micro, e);
    if (r == SHD_OK && m->spec->units[unit].frozen)
        r = err_set(e, SHD_EINVAL, "unit %" PRIu32 " '%s' is frozen: it has no gradient", unit,
                    m->spec->units[unit].name);
    if (r == SHD_OK)
        r = policy_start(m, e);
    if (r == SHD_OK)
        r = m->session->control->poll(m, e);
    if (r == SHD_OK)
        r = err_copy(&m->fault, e);
    return r == SHD_OK ? reset_look(m, e) : r;
}

/* Hand out the array of a slot: the owners read what is written there. */
static int open_slot(struct shd_model *m, uint32_t micro, uint32_t unit, float **ret_grad,
                     bool *ret_fresh, struct shd_err *e)
{
    struct grad_slot *slot = find_held(m, micro, unit);
    *ret_fresh = slot == NULL;
    if (slot == NULL) {
        int r = take_slot(m, &slot, e);
        if (r == SHD_OK)
            r = err_copy(&m->fault, e); /* it may have come to light while waiting */
        if (r != SHD_OK)
            return r;
        CHECK(slot != NULL);
        *slot = (struct grad_slot){
            .state = SLOT_HELD, .group = micro, .unit = unit, .dtype = SHD_F32
        };
        session_live(m->session, grad_bytes(m, unit), /* more= */ true);
    }
    *ret_grad = m->session->control->slot_array(m, (uint32_t)(slot - m->slots), unit);
    return SHD_OK;
}

int shd_grad(shd_model *m, uint32_t micro, uint32_t unit, float **ret_grad, struct shd_err *e)
{
    float *grad;
    bool fresh;
    int r = check_place(m, micro, unit, e);
    if (r == SHD_OK && m->grads != NULL)
        r = grads_open(m, micro, unit, &grad, &fresh, e);
    else if (r == SHD_OK)
        r = open_slot(m, micro, unit, &grad, &fresh, e);
    if (r != SHD_OK)
        return r;
    struct shd_err why = { 0 };
    if (fresh)
        r = gaps_zero(m, unit, grad, &why);
    if (r != SHD_OK) /* the array is handed out, and may not be used */
        return model_broken(m, &why, e);
    *ret_grad = grad;
    return SHD_OK;
}

/* Tell the owners of a gradient, and count it. */
static int give(struct shd_model *m, const struct path_return *ret, struct shd_err *e)
{
    m->in.handed = true;
    const int r = m->session->control->give(m, ret, e);
    if (r != SHD_OK)
        return r;
    m->reports[ret->group * m->spec->accumulate].given++;
    m->session->units_returned++;
    return SHD_OK;
}

static int give_none(struct shd_model *m, uint32_t group, uint32_t unit, struct shd_err *e)
{
    const struct path_return ret = { group, unit, NULL };
    return give(m, &ret, e);
}

static int give_slot(struct shd_model *m, struct grad_slot *slot, struct shd_err *e)
{
    const uint32_t unit = slot->unit;
    const enum shd_dtype dtype = slot->dtype;
    const struct path_return ret = { slot->group, unit, slot };
    const int r = give(m, &ret, e);
    if (r != SHD_OK)
        return r;
    m->session->bytes_returned += plan_unit_grad_bytes(m->spec, unit, dtype);
    return SHD_OK;
}

/* The entry's sum is in a slot whose return broke off, or is written into a new one. */
static int fill_slot(struct shd_model *m, const struct grad_entry *entry,
                     struct grad_slot **ret_slot, struct shd_err *e)
{
    const enum shd_dtype dtype = spec_unit_grad_dtype(m->spec, entry->unit);
    struct grad_slot *slot = find_held(m, entry->group, entry->unit);
    if (slot != NULL) {
        *ret_slot = slot;
        return SHD_OK;
    }
    int r = take_slot(m, &slot, e);
    if (r != SHD_OK)
        return r;
    CHECK(slot != NULL);
    r = err_copy(&m->fault, e);
    if (r == SHD_OK)
        r = m->session->control->fill_slot(m, (uint32_t)(slot - m->slots), entry->unit, entry->sum,
                                           dtype, e);
    if (r != SHD_OK)
        return r;
    *slot = (struct grad_slot){
        .state = SLOT_HELD, .group = entry->group, .unit = entry->unit, .dtype = dtype
    };
    *ret_slot = slot;
    return SHD_OK;
}

/* The entry's group is complete: hand its sum over. After an error it can be repeated. */
static int hand_over(struct shd_model *m, struct grad_entry *entry, struct shd_err *e)
{
    struct grad_slot *slot = NULL;
    int r;
    if (entry->sum == NULL) {
        r = give_none(m, entry->group, entry->unit, e);
    } else {
        r = fill_slot(m, entry, &slot, e);
        if (r == SHD_OK)
            r = give_slot(m, slot, e);
        if (r != SHD_OK && slot != NULL && slot->sent == 0)
            slot->state = SLOT_FREE;
    }
    if (r == SHD_OK)
        grads_done(m, entry);
    return r;
}

static int not_handed_out(const struct shd_model *m, uint32_t micro, uint32_t unit,
                          struct shd_err *e)
{
    return err_set(e, SHD_EINVAL,
                   "unit %" PRIu32 " '%s', micro-batch %" PRIu32 ": shd_grad() "
                   "did not hand out its gradient",
                   unit, m->spec->units[unit].name, micro);
}

/* Can this micro-batch be returned? Also, once more, where handing the group over broke off. */
static bool entry_open(const struct shd_model *m, const struct grad_entry *entry, uint32_t micro)
{
    const uint32_t a = m->spec->accumulate;
    return entry != NULL && (entry->open ? entry->taken == micro % a : entry->taken == a);
}

static int return_staged(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    struct grad_entry *entry = grads_find(m->grads, group_of(m, micro), unit);
    if (!entry_open(m, entry, micro))
        return not_handed_out(m, micro, unit, e);
    const int r = entry->open ? grads_close(m, entry, e) : SHD_OK;
    if (r != SHD_OK)
        return r;
    return entry->taken == m->spec->accumulate ? hand_over(m, entry, e) : SHD_OK;
}

static int return_one(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    int r = check_place(m, micro, unit, e);
    if (r == SHD_OK && m->grads != NULL)
        return return_staged(m, micro, unit, e);
    if (r != SHD_OK)
        return r;
    struct grad_slot *slot = find_held(m, micro, unit);
    if (slot == NULL)
        return not_handed_out(m, micro, unit, e);
    r = give_slot(m, slot, e);
    if (r == SHD_OK)
        session_live(m->session, grad_bytes(m, unit), /* more= */ false);
    return r;
}

int shd_return(shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    int r = session_check(m->session, e);
    if (r != SHD_OK)
        return r;
    activity_begin(m, ACTIVITY_RETURN, unit, micro);
    r = return_one(m, micro, unit, e);
    activity_end(m);
    return r;
}

/* Handing it over broke off before: it is written, and owners may read it. */
static bool is_on_its_way(struct shd_model *m, uint32_t micro, uint32_t unit)
{
    const struct grad_slot *slot = find_held(m, group_of(m, micro), unit);
    if (m->grads == NULL)
        return slot != NULL && slot->sent > 0;
    const struct grad_entry *entry = grads_find(m->grads, group_of(m, micro), unit);
    return entry != NULL && !entry->open && entry->taken == m->spec->accumulate;
}

static int fill_parts(struct shd_model *m, uint32_t micro, uint32_t unit, const struct parts *parts,
                      struct shd_err *e)
{
    float *grad = NULL;
    if (is_on_its_way(m, micro, unit))
        return SHD_OK;
    const int r = shd_grad(m, micro, unit, &grad, e);
    if (r != SHD_OK)
        return r;
    CHECK(grad != NULL);
    m->session->bytes_copied += parts_copy(m, unit, parts, grad);
    return SHD_OK;
}

int shd_return_parts(shd_model *m, uint32_t micro, uint32_t unit, const struct shd_part *parts,
                     uint32_t count, double scale, struct shd_err *e)
{
    const struct parts all = { parts, count, scale };
    int r = check_place(m, micro, unit, e);
    if (r == SHD_OK && m->session->on_gpu)
        r = err_set(e, SHD_ENOTSUP,
                    "parts are of host memory, and this worker's arrays are on cuda:%" PRIu32
                    ": write to shd_grad() there",
                    m->session->ordinal);
    if (r == SHD_OK)
        r = parts_check(m, unit, &all, e);
    if (r != SHD_OK)
        return r;
    activity_begin(m, ACTIVITY_RETURN, unit, micro);
    r = fill_parts(m, micro, unit, &all, e);
    if (r == SHD_OK)
        r = return_one(m, micro, unit, e);
    activity_end(m);
    return r;
}

static int return_none_staged(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    struct grad_entry *entry = grads_find(m->grads, group_of(m, micro), unit);
    int r = SHD_OK;
    if (entry == NULL || entry->open || entry->taken < m->spec->accumulate)
        r = grads_none(m, micro, unit, &entry, e);
    if (r != SHD_OK)
        return r;
    return entry->taken == m->spec->accumulate ? hand_over(m, entry, e) : SHD_OK;
}

int shd_return_none(shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    int r = check_place(m, micro, unit, e);
    if (r == SHD_OK && m->grads != NULL)
        return return_none_staged(m, micro, unit, e);
    if (r != SHD_OK)
        return r;
    struct grad_slot *slot = find_held(m, micro, unit);
    if (slot != NULL && slot->sent > 0)
        return err_set(e, SHD_EINVAL,
                       "unit %" PRIu32 " '%s', micro-batch %" PRIu32 ": its return "
                       "has begun, repeat that",
                       unit, m->spec->units[unit].name, micro);
    r = give_none(m, micro, unit, e);
    if (r == SHD_OK && slot != NULL) { /* asked for, then not needed */
        slot->state = SLOT_FREE;
        session_live(m->session, grad_bytes(m, unit), /* more= */ false);
    }
    return r;
}

bool train_grad_open(struct shd_model *m, uint32_t micro, uint32_t unit)
{
    if (m->grads == NULL)
        return find_held(m, micro, unit) != NULL;
    const struct grad_entry *entry = grads_find(m->grads, group_of(m, micro), unit);
    return entry != NULL && entry->open && entry->taken == micro % m->spec->accumulate;
}

int shd_report(shd_model *m, uint32_t micro, const double *metrics, uint32_t count,
               struct shd_err *e)
{
    return shd_report_named(m, micro, "", metrics, count, e);
}

static int check_metric_names(const char *names, struct shd_err *e)
{
    size_t bytes = 0;
    while (names[bytes] >= ' ' && names[bytes] <= '~')
        bytes++;
    if (names[bytes] == '\0' && bytes < WIRE_NAME_BYTES_MAX)
        return SHD_OK;
    return err_set(e, SHD_EINVAL,
                   "names of metrics: must be printable ASCII, at most %u bytes together",
                   WIRE_NAME_BYTES_MAX - 1);
}

int shd_report_named(shd_model *m, uint32_t micro, const char *names, const double *metrics,
                     uint32_t count, struct shd_err *e)
{
    int r = session_check(m->session, e);
    if (r == SHD_OK)
        r = check_micro(m, micro, e);
    if (r == SHD_OK)
        r = check_metric_names(names, e);
    if (r != SHD_OK)
        return r;
    if (count > SHD_METRICS_MAX)
        return err_set(e, SHD_ERANGE, "%" PRIu32 " metrics reported, at most %d", count,
                       SHD_METRICS_MAX);
    struct report *report = &m->reports[micro];
    const uint32_t given = m->reports[micro - micro % m->spec->accumulate].given;
    if (given > 0 && report->count > 0)
        return SHD_OK; /* a step run again: some owner has the first ones */
    if (given >= model_returned_units(m))
        return err_set(e, SHD_EINVAL,
                       "metrics of micro-batch %" PRIu32 ", all gradients of which are returned: "
                       "report before the last return",
                       micro);
    report->count = count;
    if (count > 0)
        memcpy(report->metrics, metrics, count * sizeof *metrics);
    snprintf(report->names, sizeof report->names, "%s", names);
    return SHD_OK;
}

/* -- Commit ------------------------------------------------------------------------------------ */

static int take_update(const struct shd_update *update, struct shd_update *ret_update,
                       struct shd_err *e)
{
    if (update == NULL)
        return err_set(e, SHD_EINVAL, "no update: shd_commit() needs a learning rate at least");
    struct shd_update u = { 0 };
    const int r = sized_take(&u, sizeof u, update, offsetof(struct shd_update, clip_norm),
                             "shd_update", e);
    if (r != SHD_OK)
        return r;
    if (u.blob_bytes > SHD_BLOB_BYTES_MAX)
        return err_set(e, SHD_ERANGE, "blob has %zu bytes, at most %zu", u.blob_bytes,
                       SHD_BLOB_BYTES_MAX);
    if (u.blob == NULL && u.blob_bytes > 0)
        return err_set(e, SHD_EINVAL, "blob is NULL and has %zu bytes", u.blob_bytes);
    if (u.dynamic_loss_scale && u.loss_scale != 0)
        return err_set(e, SHD_EINVAL,
                       "loss_scale is %g and dynamic_loss_scale is set: leave loss_scale 0, "
                       "shd_loss_scale() tells the one in use",
                       u.loss_scale);
    if (u.divide_by > SHD_METRICS_MAX)
        return err_set(e, SHD_ERANGE,
                       "divide_by is %" PRIu32 ", must be 0 (the micro-batches) or 1 + a metric's "
                       "index, at most %d",
                       u.divide_by, SHD_METRICS_MAX);
    if (u.groups == NULL && u.group_count > 0)
        return err_set(e, SHD_EINVAL, "groups is NULL and group_count %" PRIu32, u.group_count);
    *ret_update = u;
    return SHD_OK;
}

_Static_assert(sizeof(struct shd_rates) == sizeof(struct decision_rates) &&
                   sizeof(struct shd_rates) == DECISION_RATES * sizeof(double),
               "one struct by two names: four doubles");

static int check_rates(const struct shd_model *m, const struct shd_update *u, struct shd_err *e)
{
    /* More groups than fit would not be counted right. */
    const uint32_t count = u->group_count <= DECISION_GROUPS_MAX ? u->group_count
                                                                 : DECISION_GROUPS_MAX + 1;
    return runs_check_rates(m->spec, (const double *)u->groups, count * DECISION_RATES, e);
}

static int check_all_summed(const struct shd_model *m, struct shd_err *e)
{
    const uint32_t a = m->spec->accumulate;
    for (uint32_t i = 0; i < m->grads->entry_count; i++) {
        const struct grad_entry *g = &m->grads->entries[i];
        if (!g->used)
            continue;
        if (g->open || g->taken == a)
            return err_set(e, SHD_EINVAL,
                           "gradient of unit %" PRIu32 " '%s', micro-batch %" PRIu32
                           ", was handed out and not returned",
                           g->unit, m->spec->units[g->unit].name,
                           g->group * a + (g->open ? g->taken : a - 1));
        return err_set(e, SHD_EINVAL,
                       "unit %" PRIu32 " '%s': micro-batches %" PRIu32 " to %" PRIu32
                       " are summed here, and only %" PRIu32 " of them came in",
                       g->unit, m->spec->units[g->unit].name, g->group * a, g->group * a + a - 1,
                       g->taken);
    }
    return SHD_OK;
}

/* Waiting for a gradient that this worker itself keeps would never end. */
static int check_all_returned(const struct shd_model *m, struct shd_err *e)
{
    if (m->grads != NULL)
        return check_all_summed(m, e);
    for (uint32_t i = 0; i < m->slot_count; i++) {
        const struct grad_slot *s = &m->slots[i];
        if (s->state == SLOT_HELD)
            return err_set(e, SHD_EINVAL,
                           "gradient of unit %" PRIu32 " '%s', micro-batch %" PRIu32
                           ", was handed out and not returned",
                           s->unit, m->spec->units[s->unit].name, s->group);
    }
    return SHD_OK;
}

static struct decide_args decide_args(const struct shd_model *m, const struct shd_update *update)
{
    struct decide_args args = {
        .micro_batches = m->spec->micro_batches,
        .lr = update->lr,
        .clip_norm = update->clip_norm,
        .loss_scale = update->loss_scale,
        .divide_by = update->divide_by,
        .groups = (const struct decision_rates *)update->groups,
        .group_count = update->group_count,
        .puts = m->decided ? m->decision.puts : 0,
    };
    if (update->dynamic_loss_scale)
        args.loss_scale = loss_scale_next(m->decided ? &m->decision : NULL, &args.good_steps);
    return args;
}

static void say_overtaken(const struct shd_model *m)
{
    char text[80];
    if (m->session->hub == NULL)
        return;
    snprintf(text, sizeof text, "overtaken: others have committed step %" PRIu64, m->step);
    event_say(&m->session->hub->events,
              &(struct shd_event){
                  .kind = SHD_EVENT_OVERTAKEN, .daemon = "", .text = text, .step = m->step });
}

/* Where the step was reset and nothing of this worker's was in, the commit waits on. */
static int commit_or_look(struct shd_model *m, const struct decide_args *args,
                          const struct wire_bytes *blob, struct decided *ret_decided,
                          struct shd_err *e)
{
    for (;;) {
        const int looked = reset_look(m, e);
        if (looked != SHD_OK)
            return looked;
        const uint64_t attempt = m->in.attempt;
        const int r = m->session->control->commit(m, args, blob, ret_decided, e);
        if (r != SHD_ERESET || m->session->control->attempt(m) == attempt)
            return r;
    }
}

int shd_commit(shd_model *m, const struct shd_update *update, struct shd_result *ret_result,
               struct shd_err *e)
{
    struct shd_update u = { 0 };
    int r = session_check(m->session, e);
    if (r == SHD_OK)
        r = sized_check(ret_result, sizeof *ret_result, "shd_result", e);
    if (r == SHD_OK)
        r = take_update(update, &u, e);
    if (r == SHD_OK)
        r = check_rates(m, &u, e);
    if (r == SHD_OK)
        r = check_all_returned(m, e);
    if (r == SHD_OK)
        r = m->session->control->poll(m, e);
    if (r == SHD_OK)
        r = err_copy(&m->fault, e);
    if (r != SHD_OK)
        return r;
    struct decided decided;
    const struct decide_args args = decide_args(m, &u);
    const struct wire_bytes blob = { u.blob, u.blob_bytes };
    const uint64_t start_ns = clock_now_ns();
    r = commit_or_look(m, &args, u.blob != NULL ? &blob : NULL, &decided, e);
    m->session->wait_ns += clock_now_ns() - start_ns;
    if (r != SHD_OK)
        return r;
    struct shd_result result = { .step = m->step,
                                 .grad_norm = decided.grad_norm,
                                 .skipped = decided.decision.skip,
                                 .reported = decided.reported * m->spec->accumulate,
                                 .over = decided.over };
    memcpy(result.metrics, decided.metrics, decided.metric_count * sizeof *decided.metrics);
    if (decided.over) {
        say_overtaken(m);
        r = m->session->control->catch_up(m, e);
        if (r != SHD_OK)
            return r;
    } else {
        model_decided(m, &decided.decision);
        m->step++;
    }
    model_step_over(m);
    sized_give(ret_result, &result);
    return SHD_OK;
}
