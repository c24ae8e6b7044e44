/* One step as the worker sees it: acquire, grad, return, report, commit. See client/shd.h.
 *
 * What all paths have in common is here: arguments are checked, gradient slots and holds are kept,
 * waiting is counted. The moving itself is the path's. */
#include <inttypes.h>
#include <string.h>

#include "client/hub.h"
#include "client/path.h"
#include "client/session.h"
#include "proto/check.h"

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

static int check_fault(const struct shd_model *m, struct shd_err *e)
{
    if (m->fault.code != SHD_OK && e != NULL)
        *e = m->fault;
    return m->fault.code;
}

/* -- Parameters -------------------------------------------------------------------------------- */

int shd_acquire(shd_model *m, uint32_t unit, const void **ret_params, struct shd_err *e)
{
    const struct path_ops *path = m->session->path;
    int r = check_unit(m, unit, e);
    if (r == SHD_OK)
        r = check_fault(m, e);
    if (r != SHD_OK)
        return r;
    const uint64_t start_ns = hub_clock_ns();
    r = path->wait_unit(m, unit, e);
    m->session->wait_ns += hub_clock_ns() - start_ns;
    if (r != SHD_OK)
        return r;
    m->holds[unit]++;
    m->session->units_acquired++;
    if (ret_params != NULL)
        *ret_params = path->params(m, unit);
    return SHD_OK;
}

void shd_release(shd_model *m, uint32_t unit)
{
    if (unit < m->spec->unit_count && m->holds[unit] > 0)
        m->holds[unit]--;
}

/* -- Gradients --------------------------------------------------------------------------------- */

static struct grad_slot *find_held(struct shd_model *m, uint32_t micro, uint32_t unit)
{
    for (uint32_t i = 0; i < m->slot_count; i++) {
        struct grad_slot *s = &m->slots[i];
        if (s->state == SLOT_HELD && s->micro == micro && s->unit == unit)
            return s;
    }
    return NULL;
}

static uint32_t count_slots(const struct shd_model *m, enum slot_state state)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < m->slot_count; i++)
        count += m->slots[i].state == state;
    return count;
}

static struct grad_slot *find_free(struct shd_model *m)
{
    for (uint32_t i = 0; i < m->slot_count; i++)
        if (m->slots[i].state == SLOT_FREE)
            return &m->slots[i];
    return NULL;
}

static int make_slots(struct shd_model *m, struct shd_err *e)
{
    uint32_t slots;
    int r = model_slots_needed(m, &slots, e);
    if (r != SHD_OK)
        return r;
    m->slot_count = slots;
    r = m->session->path->open_slots(m, e);
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
    if (find_free(m) == NULL && count_slots(m, SLOT_SENT) == 0)
        return err_set(e, SHD_EBUSY,
                       "all %" PRIu32 " gradient slots are handed out and not "
                       "returned: return one, or ask for more in shd_options.slots (at most %u)",
                       m->slot_count, SHD_SLOTS_MAX);
    if (find_free(m) == NULL) {
        const uint64_t start_ns = hub_clock_ns();
        const int r = m->session->path->wait_slot(m, e);
        m->session->wait_ns += hub_clock_ns() - start_ns;
        if (r != SHD_OK)
            return r;
    }
    *ret_slot = find_free(m);
    CHECK(*ret_slot != NULL);
    return SHD_OK;
}

/* Zero the elements of no tensor: owners sum whole slices. */
static void zero_gaps(const struct shd_model *m, uint32_t unit, float *grad)
{
    const struct spec_unit *u = &m->spec->units[unit];
    uint64_t end = 0;
    for (uint32_t t = u->first_tensor; t < u->first_tensor + u->tensor_count; t++) {
        const struct spec_tensor *tensor = &m->spec->tensors[t];
        memset(grad + end, 0, (tensor->offset_elems - end) * sizeof *grad);
        end = tensor->offset_elems + tensor->elems;
    }
    memset(grad + end, 0, (u->elems - end) * sizeof *grad);
}

static int check_place(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    int r = check_unit(m, unit, e);
    if (r == SHD_OK)
        r = check_micro(m, micro, e);
    if (r == SHD_OK)
        r = m->session->path->poll(m, e);
    return r == SHD_OK ? check_fault(m, e) : r;
}

int shd_grad(shd_model *m, uint32_t micro, uint32_t unit, float **ret_grad, struct shd_err *e)
{
    int r = check_place(m, micro, unit, e);
    if (r != SHD_OK)
        return r;
    struct grad_slot *slot = find_held(m, micro, unit);
    const bool taken = slot == NULL;
    if (taken)
        r = take_slot(m, &slot, e);
    if (r == SHD_OK && taken)
        r = check_fault(m, e); /* it may have come to light while waiting */
    if (r != SHD_OK)
        return r;
    CHECK(slot != NULL);
    float *grad = m->session->path->slot_array(m, (uint32_t)(slot - m->slots), unit);
    if (taken) {
        *slot = (struct grad_slot){ .state = SLOT_HELD, .micro = micro, .unit = unit };
        zero_gaps(m, unit, grad);
    }
    *ret_grad = grad;
    return SHD_OK;
}

int shd_return(shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    int r = check_place(m, micro, unit, e);
    if (r != SHD_OK)
        return r;
    struct grad_slot *slot = find_held(m, micro, unit);
    if (slot == NULL)
        return err_set(e, SHD_EINVAL,
                       "unit %" PRIu32 " '%s', micro-batch %" PRIu32 ": shd_grad() "
                       "did not hand out its gradient",
                       unit, m->spec->units[unit].name, micro);
    const struct path_return ret = { micro, unit, slot };
    r = m->session->path->give(m, &ret, e);
    if (r == SHD_OK)
        m->session->units_returned++;
    return r;
}

int shd_return_none(shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    int r = check_place(m, micro, unit, e);
    if (r != SHD_OK)
        return r;
    struct grad_slot *slot = find_held(m, micro, unit);
    if (slot != NULL && slot->sent > 0)
        return err_set(e, SHD_EINVAL,
                       "unit %" PRIu32 " '%s', micro-batch %" PRIu32 ": its return "
                       "has begun, repeat that",
                       unit, m->spec->units[unit].name, micro);
    const struct path_return ret = { micro, unit, NULL };
    r = m->session->path->give(m, &ret, e);
    if (r != SHD_OK)
        return r;
    if (slot != NULL) /* asked for, then not needed */
        slot->state = SLOT_FREE;
    m->session->units_returned++;
    return SHD_OK;
}

int shd_report(shd_model *m, uint32_t micro, const double *metrics, uint32_t count,
               struct shd_err *e)
{
    const int r = check_micro(m, micro, e);
    if (r != SHD_OK)
        return r;
    if (count > SHD_METRICS_MAX)
        return err_set(e, SHD_ERANGE, "%" PRIu32 " metrics reported, at most %d", count,
                       SHD_METRICS_MAX);
    struct report *report = &m->reports[micro];
    *report = (struct report){ .count = count };
    if (count > 0)
        memcpy(report->metrics, metrics, count * sizeof *metrics);
    return SHD_OK;
}

/* -- Commit ------------------------------------------------------------------------------------ */

static int take_update(const struct shd_update *update, struct shd_update *ret_update,
                       struct shd_err *e)
{
    if (update == NULL)
        return err_set(e, SHD_EINVAL, "no update: shd_commit() needs a learning rate at least");
    if (update->size < offsetof(struct shd_update, clip_norm) || update->size > sizeof *update)
        return err_set(e, SHD_EINVAL, "shd_update.size is %zu, this library (%s) has %zu",
                       update->size, SHD_VERSION, sizeof *update);
    struct shd_update u = { 0 };
    memcpy(&u, update, update->size);
    if (u.blob_bytes > SHD_BLOB_BYTES_MAX)
        return err_set(e, SHD_ERANGE, "blob has %zu bytes, at most %zu", u.blob_bytes,
                       SHD_BLOB_BYTES_MAX);
    if (u.blob == NULL && u.blob_bytes > 0)
        return err_set(e, SHD_EINVAL, "blob is NULL and has %zu bytes", u.blob_bytes);
    *ret_update = u;
    return SHD_OK;
}

/* Waiting for a gradient that this worker itself keeps would never end. */
static int check_all_returned(const struct shd_model *m, struct shd_err *e)
{
    for (uint32_t i = 0; i < m->slot_count; i++) {
        const struct grad_slot *s = &m->slots[i];
        if (s->state == SLOT_HELD)
            return err_set(e, SHD_EINVAL,
                           "gradient of unit %" PRIu32 " '%s', micro-batch %" PRIu32
                           ", was handed out and not returned",
                           s->unit, m->spec->units[s->unit].name, s->micro);
    }
    return SHD_OK;
}

int shd_commit(shd_model *m, const struct shd_update *update, struct shd_result *ret_result,
               struct shd_err *e)
{
    struct shd_update u;
    int r = take_update(update, &u, e);
    if (r == SHD_OK)
        r = check_all_returned(m, e);
    if (r == SHD_OK)
        r = m->session->path->poll(m, e);
    if (r == SHD_OK)
        r = check_fault(m, e);
    if (r != SHD_OK)
        return r;
    struct decided decided;
    const uint64_t start_ns = hub_clock_ns();
    r = m->session->path->commit(m, &u, &decided, e);
    m->session->wait_ns += hub_clock_ns() - start_ns;
    if (r != SHD_OK)
        return r;
    struct shd_result result = { .step = m->step,
                                 .grad_norm = decided.grad_norm,
                                 .skipped = decided.decision.skip,
                                 .over = decided.over };
    memcpy(result.metrics, decided.metrics, decided.metric_count * sizeof *decided.metrics);
    m->step++;
    memset(m->reports, 0, m->spec->micro_batches * sizeof *m->reports);
    if (ret_result != NULL)
        *ret_result = result;
    return SHD_OK;
}
