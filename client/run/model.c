/* Opening models, looking things up in them, closing them. See client/shd.h. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/paths/order.h"
#include "client/paths/path.h"
#include "client/plan/plan_own.h"
#include "client/run/exec.h"
#include "client/run/grads.h"
#include "client/run/hostsum.h"
#include "client/run/move.h"
#include "client/run/pin.h"
#include "client/run/policy.h"
#include "client/session/replay.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/flags.h"
#include "proto/base/sys.h"
#include "proto/share/history.h"
#include "proto/spec/guard.h"
#include "proto/spec/spec_json.h"

/* -- Opening and closing ----------------------------------------------------------------------- */

static void model_free(struct shd_model *m)
{
    order_free(m); /* first: what its stream works on goes */
    if (m->saving != NULL)
        m->save_free(m->saving);
    pin_close(m);
    m->session->control->close(m);
    exec_free(m->exec);
    plan_own_free(m->policy.own);
    if (m->grads != NULL)
        hostsum_leave(m, m->grads->hostsum);
    grads_free(m->grads);
    free(m->holds);
    free(m->reports);
    spec_free(m->spec);
    free(m->spec_json);
    free(m);
}

static int check_not_open(const struct shd_session *s, const struct shd_model *opened,
                          struct shd_err *e)
{
    for (const struct shd_model *m = s->models; m != NULL; m = m->next)
        if (strcmp(m->spec->name, opened->spec->name) == 0)
            return err_set(e, SHD_EEXIST, "model '%s' is open in this session already",
                           m->spec->name);
    return SHD_OK;
}

/* At the owners that it has now. */
static int open_moved(struct shd_model *m, const char *name, uint32_t slots, struct shd_err *e)
{
    char wanted[SPEC_NAME_BYTES_MAX];
    snprintf(wanted, sizeof wanted, "%s", m->spec != NULL ? m->spec->name : name);
    const int r = move_session(m->session, wanted, e);
    if (r != SHD_OK)
        return r;
    m->session->control->close(m); /* of the others */
    return m->session->control->open(m, wanted, slots, e);
}

/* spec (taken in any case) or, when NULL, the model called name. */
static int open_model(shd_session *s, struct spec *spec, const char *name, shd_model **ret_model,
                      struct shd_err *e)
{
    struct shd_model *m = sys_calloc(1, sizeof *m);
    if (m == NULL) {
        spec_free(spec);
        return err_set(e, SHD_ENOMEM, "no memory for a model");
    }
    m->session = s;
    m->reader = s->reader;
    m->in.step = UINT64_MAX;
    m->policy = (struct policy){ .plan = PLAN_POLICY_DEFAULT };
    uint32_t slots = 0;
    int r = SHD_OK;
    if (spec != NULL) {
        r = model_set_spec(m, spec, e);
        if (r != SHD_OK)
            spec_free(spec);
        else
            r = check_not_open(s, m, e);
        if (r == SHD_OK && s->hub != NULL && !s->reads)
            r = policy_slots(m, &slots, e);
    }
    if (r == SHD_OK)
        r = s->control->open(m, name, slots, e);
    if (r == SHD_EMOVED)
        r = open_moved(m, name, slots, e);
    if (r == SHD_OK)
        policy_opened(m);
    if (r == SHD_OK && spec == NULL)
        r = check_not_open(s, m, e);
    if (r != SHD_OK) {
        model_free(m);
        return r;
    }
    m->next = s->models;
    s->models = m;
    *ret_model = m;
    return SHD_OK;
}

/* The fork instead, where this worker computes a step again. Takes spec in any case. */
static int open_model_or_fork(shd_session *s, struct spec *spec, const char *name,
                              shd_model **ret_model, struct shd_err *e)
{
    char to[SPEC_NAME_BYTES_MAX];
    const char *wanted = spec != NULL ? spec->name : name;
    if (s->hub == NULL || strlen(wanted) >= sizeof to)
        return open_model(s, spec, name, ret_model, e);
    int r = replay_name(wanted, to, e);
    if (r == SHD_OK && spec == NULL)
        return open_model(s, spec, to, ret_model, e);
    char *renamed = r == SHD_OK ? sys_strdup(to) : NULL;
    if (renamed == NULL) {
        spec_free(spec);
        return r != SHD_OK ? r : err_set(e, SHD_ENOMEM, "no memory for a name");
    }
    free(spec->name);
    spec->name = renamed;
    return open_model(s, spec, name, ret_model, e);
}

int shd_model_open(shd_session *s, const char *spec_json, shd_model **ret_model, struct shd_err *e)
{
    if (spec_json == NULL)
        return err_set(e, SHD_EINVAL, "no spec: shd_model_attach() attaches without one");
    struct spec *spec;
    int r = session_check(s, e);
    if (r == SHD_OK)
        r = spec_parse(spec_json, strlen(spec_json), &spec, e);
    return r == SHD_OK ? open_model_or_fork(s, spec, "", ret_model, e) : r;
}

int shd_model_attach(shd_session *s, const char *name, shd_model **ret_model, struct shd_err *e)
{
    const int r = session_check(s, e);
    if (r != SHD_OK)
        return r;
    return open_model_or_fork(s, /* spec= */ NULL, name != NULL ? name : "", ret_model, e);
}

void shd_model_close(shd_model *m)
{
    if (m == NULL || m->session->left)
        return;
    struct shd_model **at = &m->session->models;
    while (*at != m)
        at = &(*at)->next;
    *at = m->next;
    model_free(m);
}

/* -- Looking things up ------------------------------------------------------------------------- */

const char *shd_model_name(const shd_model *m)
{
    return m->spec->name;
}

uint64_t shd_step(const shd_model *m)
{
    return m->step;
}

const char *shd_model_spec(shd_model *m)
{
    if (m->spec_json == NULL && spec_dump(m->spec, &m->spec_json, /* e= */ NULL) != SHD_OK)
        return NULL;
    return m->spec_json;
}

uint32_t shd_micro_batches(const shd_model *m)
{
    return model_micro_batches(m);
}

uint32_t shd_accumulate(const shd_model *m)
{
    return m->spec->accumulate;
}

bool shd_unit_frozen(const shd_model *m, uint32_t unit)
{
    return unit < m->spec->unit_count && m->spec->units[unit].frozen;
}

uint64_t shd_unit_elems(const shd_model *m, uint32_t unit)
{
    return unit < m->spec->unit_count ? m->spec->units[unit].elems : 0;
}

uint64_t shd_unit_misses(const shd_model *m, uint32_t unit)
{
    return unit < m->spec->unit_count ? m->holds[unit].misses : 0;
}

double shd_loss_scale(const shd_model *m)
{
    uint32_t good_steps;
    return loss_scale_next(m->decided ? &m->decision : NULL, &good_steps);
}

uint32_t shd_units(const shd_model *m)
{
    return m->spec->unit_count;
}

const char *shd_unit_name(const shd_model *m, uint32_t unit)
{
    return unit < m->spec->unit_count ? m->spec->units[unit].name : NULL;
}

enum shd_dtype shd_param_dtype(const shd_model *m)
{
    return m->spec->publish;
}

uint32_t shd_tensors(const shd_model *m)
{
    return m->spec->tensor_count;
}

int shd_tensor_get(const shd_model *m, uint32_t index, struct shd_tensor *ret_tensor,
                   struct shd_err *e)
{
    if (index >= m->spec->tensor_count)
        return err_set(e, SHD_ERANGE, "tensor %" PRIu32 " of a model with %" PRIu32, index,
                       m->spec->tensor_count);
    const int r = sized_check(ret_tensor, sizeof *ret_tensor, "shd_tensor", e);
    if (r != SHD_OK)
        return r;
    const struct shd_tensor tensor = model_tensor(m, index);
    sized_give(ret_tensor, &tensor);
    return SHD_OK;
}

/* With what may have been meant, where there is memory to look for it. */
static int err_no_tensor(const shd_model *m, const char *name, struct shd_err *e)
{
    const uint32_t count = m->spec->tensor_count;
    const char **names = sys_calloc(count, sizeof *names);
    char meant[96] = "";
    for (uint32_t i = 0; names != NULL && i < count; i++)
        names[i] = m->spec->tensors[i].name;
    if (names != NULL)
        suggest(name, names, count, "", meant, sizeof meant);
    free(names);
    return err_set(e, SHD_ENOENT, "model '%.60s' has no tensor '%.80s'%s", m->spec->name, name,
                   meant);
}

static int err_cut(const shd_model *m, const struct spec_tensor *first, struct shd_err *e)
{
    const uint32_t tiles = m->spec->units[first->unit].tiles;
    return err_set(e, SHD_ENOENT,
                   "tensor '%.60s' of model '%.60s' is cut into %" PRIu32
                   " tiles: name one of them, '%.60s/0' to '%.60s/%" PRIu32 "'",
                   first->of, m->spec->name, tiles, first->of, first->of, tiles - 1);
}

int shd_tensor_find(const shd_model *m, const char *name, struct shd_tensor *ret_tensor,
                    struct shd_err *e)
{
    uint32_t index;
    if (spec_find_tensor(m->spec, name, &index))
        return shd_tensor_get(m, index, ret_tensor, e);
    for (uint32_t t = 0; t < m->spec->tensor_count; t++)
        if (m->spec->tensors[t].of != NULL && strcmp(m->spec->tensors[t].of, name) == 0)
            return err_cut(m, &m->spec->tensors[t], e);
    return err_no_tensor(m, name, e);
}

/* Of several workers' blobs that of the first to commit is kept, at each owner; owner 0's counts.
 */
int shd_blob(shd_model *m, void *buf, size_t capacity, size_t *ret_bytes, struct shd_err *e)
{
    const int r = session_check(m->session, e);
    return r == SHD_OK ? m->session->control->blob(m, /* owner= */ 0, buf, capacity, ret_bytes, e)
                       : r;
}

#define ROWS_AT_ONCE 256u

/* What an owner says of where a step came from, which is not checked yet. */
static void show_cause(const struct path_history *h, const struct spec *spec,
                       struct shd_step_row *row)
{
    for (uint32_t i = 0; i < h->audit_count; i++) {
        const struct audit_row *a = &h->audits[i];
        if (a->step != row->step || a->unit > spec->unit_count || a->group > spec_returns(spec))
            continue;
        row->cause_unit = a->unit;
        row->cause_norm = a->norm;
        row->cause_micro = a->group > 0 ? (a->group - 1) * spec->accumulate + 1 : 0;
        row->cause_share = a->share;
        row->cause_pid = a->worker.pid;
        row->cause_rank = a->worker.rank;
        memcpy(row->cause_worker, a->worker.name, sizeof row->cause_worker - 1);
    }
}

/* size: of the caller's. */
static void show_row(const struct path_history *h, uint32_t at, const struct spec *spec,
                     size_t size, void *ret_row)
{
    const struct history_row *from = &h->rows[at];
    struct shd_step_row row = { .step = from->step,
                                .time_ns = from->time_ns,
                                .skipped = from->skipped != 0,
                                .grad_norm = from->norm,
                                .lr = from->lr,
                                .loss_scale = from->loss_scale > 1 ? from->loss_scale : 1 };
    if (from->skipped > 1 && from->skipped <= GUARD_WHAT_END) {
        row.guard = from->skipped - 1;
        row.guard_bound = (double)from->scale;
    }
    row.metric_count = from->metric_count <= SHD_METRICS_MAX ? from->metric_count : 0;
    if (row.skipped)
        show_cause(h, spec, &row);
    row.reported = (uint16_t)(from->reported * spec->accumulate);
    memcpy(row.metrics, from->metrics, row.metric_count * sizeof *from->metrics);
    memcpy(ret_row, &size, sizeof size);
    sized_give(ret_row, &row);
}

int shd_history(shd_model *m, uint64_t *from, struct shd_step_row *rows, uint32_t room,
                uint32_t *ret_count, struct shd_err *e)
{
    struct history_row part[ROWS_AT_ONCE];
    struct audit_row audits[AUDIT_SLOTS];
    struct path_history h = { .from = *from, .rows = part, .audits = audits };
    uint64_t before = UINT64_MAX;
    uint32_t count = 0;
    int checked = session_check(m->session, e);
    if (checked == SHD_OK && room > 0)
        checked = sized_check(rows, sizeof *rows, "shd_step_row", e);
    if (checked != SHD_OK)
        return checked;
    const size_t size = room > 0 ? rows->size : 0;
    while (count < room && h.from != before) {
        const uint32_t left = room - count;
        before = h.from;
        h.room = left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE;
        const int r = m->session->control->history(m, &h, e);
        if (r != SHD_OK)
            return r;
        for (uint32_t i = 0; i < h.count; i++)
            show_row(&h, i, m->spec, size, (uint8_t *)rows + count++ * size);
    }
    *from = h.from;
    *ret_count = count;
    return SHD_OK;
}

int shd_get(shd_model *m, uint32_t unit, enum shd_array array, float *ret_values,
            uint64_t *ret_step, uint64_t *ret_updates, struct shd_err *e)
{
    uint64_t step, updates;
    const int checked = session_check(m->session, e);
    if (checked != SHD_OK)
        return checked;
    if (unit >= m->spec->unit_count)
        return err_set(e, SHD_ERANGE, "unit %" PRIu32 " of a model with %" PRIu32, unit,
                       m->spec->unit_count);
    if ((uint32_t)array > SHD_MOMENT2 && array != SHD_EMA)
        return err_set(e, SHD_ERANGE, "array %" PRIu32 ", must be 0 to 2, or %d", (uint32_t)array,
                       SHD_EMA);
    if (array == SHD_EMA && !spec_unit_ema(m->spec, unit))
        return err_set(e, SHD_EINVAL, "unit '%s' has no moving average: %s",
                       m->spec->units[unit].name,
                       m->spec->ema > 0 ? "it is frozen or a mean" : "the spec has no ema");
    if (array != SHD_PARAMS && m->spec->units[unit].frozen)
        return err_set(e, SHD_EINVAL, "unit '%s' is frozen: it has no moments",
                       m->spec->units[unit].name);
    if (array != SHD_PARAMS && m->spec->units[unit].mean)
        return err_set(e, SHD_EINVAL, "unit '%s' is a mean: it has no moments",
                       m->spec->units[unit].name);
    if (array != SHD_PARAMS && m->spec->units[unit].adafactor)
        return err_set(e, SHD_EINVAL,
                       "unit '%s' is Adafactor's: it has no moments, but statistics, which are the "
                       "last tensor of its parameters",
                       m->spec->units[unit].name);
    if (array != SHD_EMA && (uint32_t)array > spec_moments(m->spec))
        return err_set(e, SHD_EINVAL,
                       "moment %" PRIu32 " of model '%s', whose optimizer has %" PRIu32,
                       (uint32_t)array, m->spec->name, spec_moments(m->spec));
    const uint32_t number = array == SHD_EMA ? spec_ema_array(m->spec) : (uint32_t)array;
    const struct path_get get = { unit, number, ret_values, ret_step != NULL ? ret_step : &step,
                                  ret_updates != NULL ? ret_updates : &updates };
    return m->session->control->get(m, &get, e);
}

int shd_digest(shd_model *m, char ret_hex[65], uint64_t *ret_step, struct shd_err *e)
{
    static_assert(DIGEST_HEX_BYTES == 65, "shd.h and digest.h agree");
    const struct control_ops *control = m->session->control;
    uint64_t step;
    int r = session_check(m->session, e);
    const struct digest_source source = { .leaves = control->leaves,
                                          .ctx = m,
                                          .units_max = control->range_units(m) };
    if (r == SHD_OK)
        r = digest_run(m->spec, &source, ret_hex, &step, e);
    if (r == SHD_OK && ret_step != NULL)
        *ret_step = step;
    return r;
}
