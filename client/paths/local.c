/* See local.h. */
#include "client/paths/local.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "client/paths/cause.h"
#include "client/paths/coded.h"
#include "client/paths/kern_run.h"
#include "client/paths/local_publish.h"
#include "client/paths/local_put.h"
#include "client/paths/local_show.h"
#include "client/paths/local_state.h"
#include "client/paths/place.h"
#include "client/paths/set.h"
#include "client/paths/watch.h"
#include "kernels/kern.h"
#include "kernels/runs.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"
#include "proto/share/guard_window.h"
#include "proto/share/parts.h"
#include "proto/share/shardmap.h"
#include "proto/share/unit_window.h"

/* -- Session ----------------------------------------------------------------------------------- */

static int local_status(struct shd_session *s, uint32_t owner, char **ret_json, struct shd_err *e)
{
    CHECK(owner == 0);
    json_t *models = json_array();
    for (const struct shd_model *m = s->models; m != NULL; m = m->next)
        json_array_append_new(
            models, json_pack("{s:s, s:I}", "name", m->spec->name, "step", (json_int_t)m->step));
    json_t *root = json_pack("{s:s, s:s, s:o}", "device", "local", "kernels", s->kern->ops->name,
                             "models", models);
    char *json = root != NULL ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    if (json == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a status");
    *ret_json = json;
    return SHD_OK;
}

/* -- Opening ----------------------------------------------------------------------------------- */

static int new_memory(struct shd_session *s, uint64_t bytes, void **ret_base, struct shd_err *e)
{
    void *base = s->kern->ops->alloc(s->kern, bytes);
    if (base == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu64 " bytes", bytes);
    *ret_base = base;
    return SHD_OK;
}

/* Whoever is the only owner has as much room for an update as all of them. */
static int new_scratch(struct shd_model *m, struct shd_err *e)
{
    struct local_model *local = m->local;
    struct shardmap *map = NULL;
    if (!spec_has_whole(m->spec))
        return SHD_OK;
    if (m->session->kern->ops->place != SEGMENT_HOST)
        return err_set(e, SHD_ENOTSUP,
                       "a group's optimizer is muon, lamb or adafactor, which is not done on a GPU "
                       "(%s) yet: open the "
                       "model on the host (device \"host\")",
                       m->session->kern->ops->product);
    int r = shardmap_new(m->spec, 0, 1, &map, e);
    if (r != SHD_OK)
        return r;
    local->scratch_bytes = map->scratch_elems * sizeof(float);
    shardmap_free(map);
    return new_memory(m->session, local->scratch_bytes, &local->scratch, e);
}

static int open_matrices(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    struct local_unit *u = &m->local->units[unit];
    const struct slice all = { 0, m->spec->units[unit].elems };
    const int r = runs_matrices(m->spec, unit, all, &u->whole, e);
    if (r == SHD_OK && u->whole != NULL)
        u->whole->scratch = m->local->scratch;
    return r;
}

static int open_unit(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    const struct spec *spec = m->spec;
    const uint64_t elems = spec->units[unit].elems;
    const bool frozen = spec->units[unit].frozen;
    const uint32_t moments = spec_unit_moments(spec, unit);
    struct local_unit *u = &m->local->units[unit];
    const bool ema = spec_unit_ema(spec, unit);
    const uint64_t array_bytes = elems * sizeof(float);
    const uint64_t moment_bytes = spec->int8 ? quant_bytes(elems) : array_bytes;
    const uint64_t state_bytes = (frozen ? 1 : 2) * array_bytes + moments * moment_bytes +
                                 (ema ? array_bytes : 0);
    const uint64_t publish_bytes = elems * dtype_bytes(spec->publish);
    const bool coded = spec->codec != CODEC_NONE;
    const uint64_t bytes = state_bytes + publish_bytes +
                           (coded ? codec_bytes(spec->codec, elems) : 0);
    void *base = NULL;
    int r = new_memory(m->session, bytes, &base, e);
    if (r != SHD_OK)
        return r;
    u->memory = base;
    u->memory_bytes = bytes;
    u->param = base;
    u->acc = frozen ? NULL : u->param + elems;
    u->m = moments > 0 ? u->acc + elems : NULL;
    u->v = moments == 2 ? u->m + moment_bytes / sizeof(float) : NULL;
    u->ema = ema ? u->param + (state_bytes - array_bytes) / sizeof(float) : NULL;
    u->publish = (uint8_t *)base + state_bytes;
    u->codes = coded ? (uint8_t *)u->publish + publish_bytes : NULL;
    u->arrived = m->local->arrived + (uint64_t)unit * spec_returns(spec);
    r = runs_new(spec, unit, (struct slice){ 0, elems }, &u->runs, &u->run_count, e);
    return r == SHD_OK ? open_matrices(m, unit, e) : r;
}

/* This program's start values. */
static int put_starts(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    const uint64_t bytes = m->spec->units[unit].elems * sizeof(float);
    float *values = sys_malloc(bytes);
    if (values == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the start values of unit %" PRIu32, unit);
    int r = starts_fill(m->session->starts, m->spec, unit, values, e);
    const struct kern_copy copy = { m->local->units[unit].param, values, bytes };
    if (r == SHD_OK)
        r = kern_run_op(m->session->kern, &(struct kern_op){ KERN_COPY, { .copy = copy } }, e);
    free(values);
    return r;
}

/* Give a unit its initial values, and publish them. */
static int fill_unit(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    const struct spec_unit *su = &m->spec->units[unit];
    const struct local_unit *u = &m->local->units[unit];
    struct kern *k = m->session->kern;
    const uint64_t zero_elems = (uint64_t)((uint8_t *)u->publish - (uint8_t *)u->memory) /
                                sizeof(float);
    const struct kern_op zero = kern_zero(u->memory, zero_elems);
    const int zeroed = kern_run_op(k, &zero, e);
    if (zeroed != SHD_OK)
        return zeroed;
    const bool own = m->session->starts != NULL;
    if (own) {
        const int r = put_starts(m, unit, e);
        if (r != SHD_OK)
            return r;
    }
    for (uint32_t t = su->first_tensor; !own && t < su->first_tensor + su->tensor_count; t++) {
        struct kern_fill fill;
        if (!runs_fill(m->spec, t, (struct slice){ 0, su->elems }, u->param, &fill))
            continue;
        const int r = kern_run_op(k, &(struct kern_op){ KERN_FILL, { .fill = fill } }, e);
        if (r != SHD_OK)
            return r;
    }
    const struct kern_copy ema = { u->ema, u->param, su->elems * sizeof(float) };
    int r = local_publish(m, unit, e);
    if (r == SHD_OK && u->ema != NULL)
        r = kern_run_op(k, &(struct kern_op){ KERN_COPY, { .copy = ema } }, e);
    return r;
}

/* What rules of units with a window are made of. */
static bool new_window(struct local_model *local, const struct guard *guard)
{
    if (guard == NULL || guard->columns == 0)
        return true;
    local->window = sys_calloc(1, unit_window_bytes(guard->rows, guard->columns));
    local->unit_norms = sys_calloc(guard->columns, sizeof *local->unit_norms);
    return local->window != NULL && local->unit_norms != NULL;
}

static struct unit_window window_of(const struct shd_model *m)
{
    return unit_window_at(m->local->window, m->spec->guard->rows, m->spec->guard->columns);
}

static int new_local(struct shd_model *m, struct shd_err *e)
{
    const struct spec *spec = m->spec;
    struct local_model *local = sys_calloc(1, sizeof *local);
    m->local = local;
    if (local != NULL) {
        local->units = sys_calloc(spec->unit_count, sizeof *local->units);
        local->arrived = sys_calloc(spec->unit_count, spec_returns(spec));
        local->hypers = sys_calloc(spec->group_count, sizeof *local->hypers);
        local->history = sys_calloc(HISTORY_SLOTS, sizeof *local->history);
        local->audit = sys_calloc(AUDIT_SLOTS, sizeof *local->audit);
        if (spec->guard_audit) {
            void *parts = sys_calloc(1, parts_bytes(spec->unit_count, spec_returns(spec)));
            local->parts = parts != NULL ? parts_init(parts, spec->unit_count, spec_returns(spec))
                                         : NULL;
        }
    }
    if (local == NULL || local->units == NULL || local->arrived == NULL || local->hypers == NULL ||
        local->history == NULL || local->audit == NULL ||
        (spec->guard_audit && local->parts == NULL) || !new_window(local, spec->guard))
        return err_set(e, SHD_ENOMEM, "no memory for model '%s'", spec->name);
    for (uint32_t u = 0; u < spec->unit_count; u++)
        if (!spec->units[u].frozen && spec->units[u].elems > local->slot_elems)
            local->slot_elems = spec->units[u].elems;
    return SHD_OK;
}

static int check_device(const struct shd_model *m, struct shd_err *e)
{
    const struct kern_ops *ops = m->session->kern->ops;
    if (!m->spec->int8 || ops->int8)
        return SHD_OK;
    return err_set(e, SHD_ENOTSUP,
                   "model '%s' has moments in 8 bits (optimizer.moments: int8), which %s does not "
                   "have: give it f32",
                   m->spec->name, ops->name);
}

static int local_open(struct shd_model *m, const char *name, uint32_t slots, struct shd_err *e)
{
    (void)slots;
    if (m->spec == NULL)
        return err_set(e, SHD_ENOENT, "local: holds no model '%.100s': open it with its spec",
                       name);
    int r = check_device(m, e);
    if (r == SHD_OK)
        r = new_local(m, e);
    if (r == SHD_OK)
        r = new_scratch(m, e);
    for (uint32_t u = 0; r == SHD_OK && u < m->spec->unit_count; u++) {
        r = open_unit(m, u, e);
        if (r == SHD_OK)
            r = fill_unit(m, u, e);
    }
    if (r == SHD_OK && m->session->starts != NULL)
        m->session->starts->created = true;
    return r;
}

static uint64_t slots_bytes(const struct shd_model *m)
{
    return m->slot_count * m->local->slot_elems * sizeof(float);
}

static int local_open_slots(struct shd_model *m, struct shd_err *e)
{
    void *base = NULL;
    const int r = new_memory(m->session, slots_bytes(m), &base, e);
    if (r == SHD_OK)
        m->local->slots = base;
    return r;
}

static void local_close(struct shd_model *m)
{
    struct local_model *local = m->local;
    struct kern *k = m->session->kern;
    if (local == NULL)
        return;
    for (uint32_t u = 0; local->units != NULL && u < m->spec->unit_count; u++) {
        free(local->units[u].runs);
        free(local->units[u].whole);
        k->ops->release(k, local->units[u].memory, local->units[u].memory_bytes);
    }
    if (local->scratch != NULL)
        k->ops->release(k, local->scratch, local->scratch_bytes);
    if (local->slots != NULL)
        k->ops->release(k, local->slots, slots_bytes(m));
    free(local->units);
    free(local->arrived);
    free(local->hypers);
    free(local->blob);
    free(local->history);
    free(local->audit);
    free(local->parts);
    free(local->window);
    free(local->unit_norms);
    free(local);
    m->local = NULL;
}

/* -- Looking ----------------------------------------------------------------------------------- */

static int local_history(struct shd_model *m, struct path_history *h, struct shd_err *e)
{
    (void)e;
    h->count = history_read(m->local->history, HISTORY_SLOTS, m->step, &h->from, h->rows, h->room);
    h->audit_count = h->count > 0 ? audit_read(m->local->audit, m->step, h->rows[0].step, h->from,
                                               h->audits, AUDIT_SLOTS)
                                  : 0;
    return SHD_OK;
}

static int local_blob(struct shd_model *m, uint32_t owner, void *buf, size_t capacity,
                      size_t *ret_bytes, struct shd_err *e)
{
    CHECK(owner == 0);
    const struct local_model *local = m->local;
    if (local->blob_bytes > capacity)
        return err_set(e, SHD_ERANGE, "blob has %zu bytes, the buffer %zu", local->blob_bytes,
                       capacity);
    if (local->blob_bytes > 0)
        memcpy(buf, local->blob, local->blob_bytes);
    *ret_bytes = local->blob_bytes;
    return SHD_OK;
}

static int local_get(struct shd_model *m, const struct path_get *get, struct shd_err *e)
{
    const struct local_unit *u = &m->local->units[get->unit];
    const struct kern_op read = kern_read_of(local_state(m->spec, u, get->array), 0,
                                             m->spec->units[get->unit].elems, get->values);
    *get->ret_step = m->step;
    *get->ret_updates = u->updates;
    return kern_run_op(m->session->kern, &read, e);
}

static uint32_t local_range_units(const struct shd_model *m)
{
    (void)m;
    return 0; /* nothing is asked of others */
}

static int local_leaves(void *ctx, const struct digest_part *part, uint8_t (*ret_leaves)[32],
                        struct digest_stamp *stamp, struct shd_err *e)
{
    struct shd_model *m = ctx;
    const struct spec_tensor *t = &m->spec->tensors[part->tensor];
    const struct local_unit *u = &m->local->units[t->unit];
    const struct kern_array array = local_state(m->spec, u, part->array);
    CHECK(array.base != NULL);
    uint64_t first = 0;
    const uint64_t elems = ckpt_leaf_elems(t, part->first_leaf, part->leaves, &first);
    const uint64_t head = SHD_BLOCK_ELEMS - first % SHD_BLOCK_ELEMS;
    struct kern_hash hash = kern_hash_of(array, first, elems);
    hash.head_elems = head < elems ? head : elems;
    hash.out = ret_leaves;
    CHECK(kern_hash_leaves(hash.head_elems, elems) == part->leaves);
    const int r = kern_run_op(m->session->kern, &(struct kern_op){ KERN_HASH, { .hash = hash } },
                              e);
    return r == SHD_OK ? digest_stamp_take(stamp, m->step, m->local->updates, e) : r;
}

/* -- A micro-batch ----------------------------------------------------------------------------- */

static int local_wait_slot(struct shd_model *m, struct shd_err *e)
{
    const struct grad_slot *slot = model_find_slot(m, SLOT_SENT);
    CHECK(slot != NULL); /* the caller saw one */
    return err_set(e, SHD_EBUSY,
                   "all %" PRIu32 " gradient slots are taken: unit %" PRIu32
                   ", micro-batch %" PRIu32 " waits for micro-batch %" PRIu32
                   ": hand them in ascending order",
                   m->slot_count, slot->unit, slot->group * m->spec->accumulate,
                   m->local->units[slot->unit].next_group * m->spec->accumulate);
}

static float *local_slot_array(const struct shd_model *m, uint32_t slot, uint32_t unit)
{
    (void)unit;
    return m->local->slots + slot * m->local->slot_elems;
}

static int local_fill_slot(struct shd_model *m, uint32_t slot, uint32_t unit, const float *grad,
                           enum shd_dtype dtype, struct shd_err *e)
{
    const struct kern_cast cast = {
        .out = local_slot_array(m, slot, unit),
        .out_dtype = dtype,
        .in = grad,
        .elems = m->spec->units[unit].elems,
    };
    if (spec_unit_grad_codec(m->spec, unit) != CODEC_NONE)
        return coded_write(m, slot, unit, (struct slice){ 0, cast.elems }, grad, cast.out, e);
    m->session->bytes_copied += cast.elems * dtype_bytes(dtype);
    return kern_run_op(m->session->kern, &(struct kern_op){ KERN_CAST, { .cast = cast } }, e);
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

/* No attempt at a step has that of another. */
static uint64_t round_of(const struct shd_model *m)
{
    return m->step + m->in.attempt;
}

/* Add the gradients that are in, in ascending order, up to the first group that is missing. */
static int sum_arrived(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    struct local_unit *u = &m->local->units[unit];
    const uint32_t groups = model_returns(m);
    while (u->next_group < groups && u->arrived[u->next_group] != ARRIVED_NOT) {
        if (u->arrived[u->next_group] == ARRIVED_GRAD) {
            const uint32_t slot = find_sent(m, u->next_group, unit);
            struct kern_sum sum = { .finite = true };
            fixsum_init(&sum.sum);
            const struct kern_accumulate accumulate = {
                .acc = u->acc,
                .grad = local_slot_array(m, slot, unit),
                .grad_dtype = m->slots[slot].dtype,
                .grad_codec = spec_unit_grad_codec(m->spec, unit),
                .elems = m->spec->units[unit].elems,
                .first = !u->summed,
                .sum = m->local->parts != NULL ? &sum : NULL,
            };
            const int r = kern_run_op(
                m->session->kern,
                &(struct kern_op){ KERN_ACCUMULATE, { .accumulate = accumulate } }, e);
            if (r != SHD_OK)
                return r;
            if (m->local->parts != NULL)
                parts_take(m->local->parts,
                           &(struct part){ .round = round_of(m),
                                           .unit = unit,
                                           .group = u->next_group,
                                           .first = !u->summed },
                           sum.finite ? &sum.sum : NULL);
            u->summed = true;
            u->summed_step = 0;
            m->slots[slot].state = SLOT_FREE;
        }
        u->next_group++;
    }
    return SHD_OK;
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

static int local_give(struct shd_model *m, const struct path_return *ret, struct shd_err *e)
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
    return r == SHD_OK ? SHD_OK : model_broken(m, &why, e);
}

/* -- Commit ------------------------------------------------------------------------------------ */

static int check_complete(const struct shd_model *m, struct shd_err *e)
{
    for (uint32_t u = 0; u < m->spec->unit_count; u++)
        if (!m->spec->units[u].frozen && m->local->units[u].next_group < model_returns(m))
            return err_set(e, SHD_EINVAL,
                           "unit %" PRIu32 " '%s', micro-batch %" PRIu32 " of step %" PRIu64
                           " was not returned, and nobody else will",
                           u, m->spec->units[u].name,
                           m->local->units[u].next_group * m->spec->accumulate, m->step);
    return SHD_OK;
}

static int sum_squares(struct shd_model *m, struct wire_prepared *prepared, struct shd_err *e)
{
    struct kern_sum sum = { .finite = true }, mean = { .finite = true };
    fixsum_init(&sum.sum);
    fixsum_init(&mean.sum);
    for (uint32_t i = 0; i < m->spec->unit_count; i++) {
        struct local_unit *u = &m->local->units[i];
        const uint64_t elems = m->spec->units[i].elems;
        if (m->spec->units[i].frozen)
            continue;
        if (!u->summed) { /* took part in no micro-batch */
            const struct kern_op zero = kern_zero(u->acc, elems);
            const int r = kern_run_op(m->session->kern, &zero, e);
            if (r != SHD_OK)
                return r;
            continue;
        }
        const struct kern_sumsq sumsq = { u->acc, elems, m->spec->units[i].mean ? &mean : &sum };
        const int r = kern_run_op(m->session->kern,
                                  &(struct kern_op){ KERN_SUMSQ, { .sumsq = sumsq } }, e);
        if (r != SHD_OK)
            return r;
    }
    fixsum_carry(&sum.sum);
    prepared->finite = sum.finite && mean.finite;
    prepared->sum = sum.sum;
    return SHD_OK;
}

static void sum_metrics(const struct shd_model *m, struct wire_prepared *prepared)
{
    const struct local_model *local = m->local;
    for (uint32_t group = 0; group < model_returns(m); group++) {
        prepared->reported += local->metric_counts[group] > 0;
        if (local->metric_counts[group] > prepared->metric_count)
            prepared->metric_count = local->metric_counts[group];
        for (uint32_t i = 0; i < local->metric_counts[group]; i++)
            prepared->metrics[i] += local->metrics[group][i];
    }
}

static uint32_t count_took(const struct local_unit *u, uint32_t groups)
{
    uint32_t took = 0;
    for (uint32_t g = 0; g < groups; g++)
        took += u->arrived[g] == ARRIVED_GRAD;
    return took;
}

/* Does this step update the unit? It is counted where it does, and that of a unit that is not
 * trained is the model's. */
static bool count_update(const struct shd_model *m, uint32_t unit)
{
    struct local_unit *u = &m->local->units[unit];
    const struct spec_unit *su = &m->spec->units[unit];
    const bool idle = su->skips_idle && !u->summed;
    u->updates += su->frozen || su->mean || !idle;
    return !su->frozen && !idle;
}

static int update_units(struct shd_model *m, const struct decision *decision, struct shd_err *e)
{
    struct local_model *local = m->local;
    uint64_t of = 0; /* which update local->hypers are of */
    for (uint32_t i = 0; i < m->spec->unit_count; i++) {
        const struct local_unit *u = &local->units[i];
        const bool mean = m->spec->units[i].mean;
        if (!count_update(m, i))
            continue;
        local->units[i].updated_step = mean ? 0 : m->step + 1;
        if (u->updates != of)
            runs_hypers(m->spec, decision, u->updates, local->hypers);
        of = u->updates;
        const struct kern_update update = {
            .kind = spec_unit_optimizer(m->spec, i),
            .param = u->param,
            .m = u->m,
            .v = u->v,
            .int8 = m->spec->int8 && u->m != NULL,
            .grad = u->acc,
            .grad_scale = mean ? (float)count_took(u, model_returns(m)) : decision->scale,
            .publish = u->codes == NULL ? u->publish : NULL,
            .publish_dtype = u->codes == NULL ? m->spec->publish : 0,
            .elems = m->spec->units[i].elems,
            .runs = u->runs,
            .run_count = u->run_count,
            .hypers = local->hypers,
            .hyper_count = m->spec->group_count,
            .whole = u->whole != NULL ? *u->whole : (struct kern_whole){ 0 },
            .ema = { .average = u->ema,
                     .rest = u->ema != NULL ? runs_ema_rest(m->spec, u->updates) : 0 },
        };
        int r = kern_run_op(m->session->kern,
                            &(struct kern_op){ KERN_UPDATE, { .update = update } }, e);
        if (r == SHD_OK && u->codes != NULL)
            r = local_publish(m, i, e);
        if (r != SHD_OK)
            return r;
    }
    local->updates++;
    return SHD_OK;
}

/* The blob gets its room before the update, after which nothing may fail. */
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
    local->returns_before = model_returns(m);
    memset(local->arrived, ARRIVED_NOT, (size_t)m->spec->unit_count * spec_returns(m->spec));
    memset(local->metric_counts, 0, sizeof local->metric_counts);
}

static uint64_t local_attempt(const struct shd_model *m)
{
    return m->in.attempt; /* who resets is this worker */
}

static int local_reset(struct shd_model *m, uint64_t *ret_attempt, struct shd_err *e)
{
    (void)e;
    begin_step(m);
    for (uint32_t i = 0; i < m->slot_count; i++)
        if (m->slots[i].state == SLOT_SENT)
            m->slots[i].state = SLOT_FREE;
    *ret_attempt = m->in.attempt + 1;
    return SHD_OK;
}

static int check_stopped(const struct shd_model *m, struct shd_err *e)
{
    const struct local_stopped *s = &m->local->stopped;
    char text[GUARD_TEXT_BYTES];
    if (s->by.what == GUARD_NONE)
        return SHD_OK;
    return err_set(e, SHD_ESTOPPED,
                   "a guard stopped training at step %" PRIu64
                   ": %s; shd_model_set() with guard=go-on goes on",
                   s->step, guard_text(&s->by, text));
}

static void name_group(struct shd_model *m, bool infinite, double squares,
                       struct decision_cause *cause)
{
    uint8_t bytes[WIRE_UNIT_SUMS_MAX * FIXSUM_BYTES];
    struct cause c;
    bool more = true;
    cause_begin(&c, model_returns(m), /* groups= */ true, infinite);
    while (more) {
        const uint32_t left = c.count - c.first;
        const struct wire_bytes page = {
            bytes, (left < WIRE_UNIT_SUMS_MAX ? left : WIRE_UNIT_SUMS_MAX) * FIXSUM_BYTES
        };
        if (!parts_read(m->local->parts, round_of(m), cause->unit - 1, c.first,
                        (uint32_t)(page.bytes / FIXSUM_BYTES), bytes) ||
            cause_take(&c, &page, NULL) != SHD_OK)
            return;
        more = cause_next(&c);
    }
    cause->group = c.found;
    if (c.found > 0)
        cause->share = infinite ? 1 : (float)(fixsum_value(&c.largest) / squares);
}

struct naming { /* as in turn.c, of one owner */
    struct decided *decided;
    bool infinite;
    struct watch watch;
    struct fixsum largest;
    struct decision_cause cause;
};

static double norm_of(const struct shd_model *m, const struct decision *d, double squares)
{
    const double count = d->divisor > 0 ? d->divisor : model_micro_batches(m);
    return sqrt(squares) / count / d->loss_scale;
}

/* The unit's own limits, and its norm for those of later steps. */
static void watch_one(const struct shd_model *m, struct watch *w, const struct guard_limits *limits,
                      struct watch_unit *u)
{
    const struct guard *guard = m->spec->guard;
    double own[GUARD_RULES_MAX];
    uint32_t count = 0;
    const uint32_t column = guard->columns > 0 ? guard->column[u->unit] : 0;
    for (uint32_t i = 0; column > 0 && i < guard->count; i++) {
        if ((guard->watched[u->unit] >> i & 1) == 0 || !guard_unit_windowed(&guard->rules[i]))
            continue;
        const struct unit_window window = window_of(m);
        own[count++] = unit_window_limit(&window, &guard->rules[i], m->step, column - 1);
    }
    u->own = own;
    watch_unit(w, limits, u);
    if (column > 0)
        m->local->unit_norms[column - 1] = u->norm;
}

/* The sum of a unit's gradient is known. */
static void name_unit(const struct shd_model *m, struct naming *n,
                      const struct guard_limits *limits, uint32_t unit, struct kern_sum *sum)
{
    fixsum_carry(&sum->sum);
    const double squares = fixsum_value(&sum->sum);
    const double norm = norm_of(m, &n->decided->decision, squares);
    if (n->watch.watched != NULL)
        watch_one(m, &n->watch, limits,
                  &(struct watch_unit){ .unit = unit, .norm = norm, .squares = squares });
    if (n->infinite ? sum->finite : fixsum_compare(&sum->sum, &n->largest) <= 0)
        return;
    n->largest = sum->sum;
    n->cause.unit = unit + 1;
    n->cause.norm = n->infinite ? (double)INFINITY : norm;
}

static int name_units(struct shd_model *m, struct naming *n, const struct guard_limits *limits,
                      struct shd_err *e)
{
    for (uint32_t i = 0; i < m->spec->unit_count && !(n->infinite && n->cause.unit > 0); i++) {
        const struct local_unit *u = &m->local->units[i];
        const struct spec_unit *unit = &m->spec->units[i];
        struct kern_sum sum = { .finite = true };
        fixsum_init(&sum.sum);
        if (unit->frozen || !u->summed || (unit->mean && !n->infinite))
            continue;
        const struct kern_sumsq sumsq = { u->acc, unit->elems, &sum };
        const int r = kern_run_op(m->session->kern,
                                  &(struct kern_op){ KERN_SUMSQ, { .sumsq = sumsq } }, e);
        if (r != SHD_OK)
            return r;
        name_unit(m, n, limits, i, &sum);
    }
    return SHD_OK;
}

/* As cause.h and watch.h have it: the one owner's sums are whole. */
static int name_cause(struct shd_model *m, const struct guard_limits *limits,
                      struct decided *decided, struct shd_err *e)
{
    const struct guard *guard = m->spec->guard;
    struct naming n = { .decided = decided, .infinite = decided->cause == DECIDE_CAUSE_INFINITE };
    fixsum_init(&n.largest);
    watch_begin(&n.watch, guard != NULL && !n.infinite ? guard->watched : NULL);
    if (decided->cause == DECIDE_CAUSE_NONE && n.watch.watched == NULL)
        return SHD_OK;
    if (guard != NULL && m->local->unit_norms != NULL)
        memset(m->local->unit_norms, 0, guard->columns * sizeof *m->local->unit_norms);
    const int r = name_units(m, &n, limits, e);
    if (r != SHD_OK)
        return r;
    double squares = fixsum_value(&n.largest);
    if (n.watch.watched != NULL && watch_end(&n.watch, limits, &decided->decision)) {
        n.cause = (struct decision_cause){ .unit = n.watch.unit + 1, .norm = n.watch.norm };
        squares = n.watch.squares;
    } else if (decided->cause == DECIDE_CAUSE_NONE) {
        return SHD_OK;
    }
    if (m->local->parts != NULL && n.cause.unit > 0)
        name_group(m, n.infinite, squares, &n.cause);
    decided->decision.cause = n.cause;
    return SHD_OK;
}

static int decide_local(struct shd_model *m, const struct decide_args *asked,
                        struct decided *ret_decided, struct shd_err *e)
{
    struct wire_prepared prepared = { .step = m->step };
    struct decide_args args = *asked;
    struct settings settings;
    struct guard_limits limits;
    int r = check_complete(m, e);
    if (r == SHD_OK)
        r = check_stopped(m, e);
    if (r == SHD_OK)
        r = sum_squares(m, &prepared, e);
    if (r != SHD_OK)
        return r;
    sum_metrics(m, &prepared);
    settings_at(&m->local->settings, m->step, &settings, /* ret_since= */ NULL);
    args.prepared = &prepared;
    args.owners = 1;
    args.settings = &settings;
    guard_window_limits(m->spec->guard, m->local->history, HISTORY_SLOTS, m->step, &limits);
    guard_limits_back(&limits, GUARD_BACK_STOPS); /* no snapshots are kept here */
    args.guard = &limits;
    r = decide(&args, ret_decided, e);
    return r == SHD_OK ? name_cause(m, &limits, ret_decided, e) : r;
}

static struct history_row decided_row(const struct decided *decided, uint64_t step)
{
    const struct decision *d = &decided->decision;
    struct history_row row = { .step = step,
                               .norm = decided->grad_norm,
                               .lr = d->lr,
                               .loss_scale = d->loss_scale,
                               .scale = d->guard.what != 0 ? (float)d->guard.bound : d->scale,
                               .metric_count = decided->metric_count,
                               .skipped = history_skipped(d->skip, d->guard.what),
                               .reported = decided->reported };
    memcpy(row.metrics, decided->metrics, sizeof row.metrics);
    return row;
}

static int local_commit(struct shd_model *m, const struct decide_args *args,
                        const struct wire_bytes *blob, struct decided *ret_decided,
                        struct shd_err *e)
{
    struct local_model *local = m->local;
    struct decided decided;
    uint8_t *taken = NULL;
    int r = decide_local(m, args, &decided, e);
    decided.decision.micro_batches = settings_micro_batches(&local->settings, m->step + 1);
    if (r == SHD_OK)
        r = take_blob(blob, &taken, e);
    struct shd_err why = { 0 };
    if (r == SHD_OK && !decided.decision.skip && update_units(m, &decided.decision, &why) != SHD_OK)
        r = model_broken(m, &why, e);
    if (r != SHD_OK) {
        free(taken);
        return r;
    }
    if (taken != NULL) {
        free(local->blob);
        local->blob = taken;
        local->blob_bytes = blob->bytes;
    }
    struct history_row row = decided_row(&decided, m->step);
    row.time_ns = clock_read_ns(CLOCK_REALTIME);
    history_put(local->history, HISTORY_SLOTS, &row);
    audit_put(local->audit, m->step, &decided.decision.cause);
    if (local->window != NULL) {
        struct unit_window window = window_of(m);
        unit_window_put(&window, m->step, decided.decision.skip ? NULL : local->unit_norms);
    }
    if (decided.decision.guard.stop)
        local->stopped = (struct local_stopped){ decided.decision.guard, m->step };
    for (uint32_t u = 0; u < m->spec->unit_count; u++)
        local->units[u].summed_step = local->units[u].summed ? m->step + 1 : 0;
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

static int local_lease(struct shd_model *m, uint32_t owner, bool now,
                       struct wire_leased *ret_leased, struct shd_err *e)
{
    const uint32_t groups = model_returns(m);
    (void)owner;
    (void)now;
    (void)e;
    *ret_leased = (struct wire_leased){ .step = m->step, .what = WIRE_LEASED_ALL_IN };
    for (uint32_t group = 0; group < groups; group++) {
        if (group_is_in(m, group))
            continue;
        ret_leased->what = WIRE_LEASED_NOTHING;
        if (model_leased(m, group))
            continue;
        ret_leased->what = WIRE_LEASED_GROUP;
        ret_leased->group = group;
        break;
    }
    return SHD_OK;
}

/* There is no other worker. */
static int local_meet(struct shd_model *m, uint32_t workers, struct shd_err *e)
{
    if (workers == 1)
        return SHD_OK;
    return err_set(e, SHD_EINVAL, "%" PRIu32 " workers of '%s', which is in this process alone",
                   workers, m->spec->name);
}

static int local_unlease(struct shd_model *m, uint32_t group, struct shd_err *e)
{
    (void)m;
    (void)group;
    (void)e;
    return SHD_OK; /* the model knows what it has leased */
}

/* -- The tables -------------------------------------------------------------------------------- */

static bool local_readable(const struct shd_model *m, uint32_t unit)
{
    (void)m;
    (void)unit;
    return true; /* updates are done when commit returns */
}

static const void *local_params(const struct shd_model *m, uint32_t unit)
{
    return m->local->units[unit].publish;
}

const struct reader_ops reader_local = {
    .kind = SHD_PATH_MAP,
    .shown = ACTIVITY_PATH_MAP,
    .fetch = mapped_nothing,
    .readable = local_readable,
    .wait_unit = mapped_nothing,
    .let_go = mapped_let_go,
    .params = local_params,
};

static int local_poll(struct shd_model *m, struct shd_err *e)
{
    (void)m;
    (void)e;
    return SHD_OK;
}

static int local_catch_up(struct shd_model *m, struct shd_err *e)
{
    return err_set(e, SHD_EINTERNAL, "step %" PRIu64 " is over, and nobody else is here", m->step);
}

const struct control_ops control_local = {
    .status = local_status,
    .open = local_open,
    .close = local_close,
    .open_slots = local_open_slots,
    .wait_slot = local_wait_slot,
    .ready_slot = mapped_nothing,
    .slot_array = local_slot_array,
    .fill_slot = local_fill_slot,
    .give = local_give,
    .poll = local_poll,
    .commit = local_commit,
    .attempt = local_attempt,
    .reset = local_reset,
    .catch_up = local_catch_up,
    .lease = local_lease,
    .meet = local_meet,
    .unlease = local_unlease,
    .blob = local_blob,
    .history = local_history,
    .get = local_get,
    .show = local_show,
    .put = local_put,
    .set = set_local,
    .leaves = local_leaves,
    .range_units = local_range_units,
};
