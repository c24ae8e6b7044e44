/* The in-process path ("local:"): the owner is this process itself.
 *
 * An implementation of its own, simple on purpose: whole units, one operation at a time, no
 * daemon, no messages. It gives the same bits because it runs the same kernels (kernels/kern.h)
 * on the same runs (kernels/runs.h) in the same order, so the two check each other.
 *
 * Happy path: a returned gradient is added as soon as those of lower micro-batches are in; commit
 * sums the squares, decides as any worker would, updates unit by unit. Nothing ever waits: what
 * is missing can only come from the caller, so it is an error at once. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "client/path.h"
#include "kernels/kern.h"
#include "kernels/runs.h"
#include "proto/check.h"
#include "proto/segment.h"
#include "proto/sys.h"

enum arrival { ARRIVED_NOT, ARRIVED_NONE, ARRIVED_GRAD };

struct local_unit { /* arrays are fp32 [elems of the unit] */
    void *memory;   /* owned mapping of all of them */
    uint64_t memory_bytes;
    float *param, *m, *v;  /* v: AdamW only, else NULL */
    float *acc;            /* gradient sum of the open step */
    void *publish;         /* what workers read, in the model's dtype */
    struct kern_run *runs; /* owned */
    uint32_t run_count;
    uint32_t next_micro; /* micro-batches below it are summed */
    bool summed;         /* acc holds a gradient of this step */
    uint8_t *arrived;    /* [micro_batches] in the model's block, enum arrival */
};

struct local_model {
    struct local_unit *units;                        /* owned, [units] */
    uint8_t *arrived;                                /* owned, [units * micro_batches] */
    struct kern_hyper *hypers;                       /* owned, [groups] */
    float *slots;                                    /* owned mapping, [slot_count * slot_elems] */
    uint64_t slot_elems;                             /* of the largest unit */
    uint64_t updates;                                /* steps that were not skipped */
    double metrics[SHD_MICROS_MAX][SHD_METRICS_MAX]; /* of the open step */
    uint32_t metric_counts[SHD_MICROS_MAX];
    uint8_t *blob; /* owned */
    size_t blob_bytes;
};

/* -- Kernels, one after the other -------------------------------------------------------------- */

static int finish(struct kern_waiter *w, const char *what, struct shd_err *e)
{
    const int r = kern_wait(w);
    return r == SHD_OK ? SHD_OK : err_set(e, r, "%s failed: %s", what, status_meaning(r));
}

static int run_fill(struct kern *k, const struct kern_fill *a, struct shd_err *e)
{
    struct kern_waiter w;
    kern_waiter_init(&w);
    const int r = k->ops->fill(k, a, &w.done, e);
    return r == SHD_OK ? finish(&w, "fill", e) : r;
}

static int run_cast(struct kern *k, const struct kern_cast *a, struct shd_err *e)
{
    struct kern_waiter w;
    kern_waiter_init(&w);
    const int r = k->ops->cast(k, a, &w.done, e);
    return r == SHD_OK ? finish(&w, "cast", e) : r;
}

static int run_accumulate(struct kern *k, const struct kern_accumulate *a, struct shd_err *e)
{
    struct kern_waiter w;
    kern_waiter_init(&w);
    const int r = k->ops->accumulate(k, a, &w.done, e);
    return r == SHD_OK ? finish(&w, "accumulate", e) : r;
}

static int run_sumsq(struct kern *k, const struct kern_sumsq *a, struct shd_err *e)
{
    struct kern_waiter w;
    kern_waiter_init(&w);
    const int r = k->ops->sumsq(k, a, &w.done, e);
    return r == SHD_OK ? finish(&w, "sumsq", e) : r;
}

static int run_update(struct kern *k, const struct spec *spec, const struct kern_update *a,
                      struct shd_err *e)
{
    struct kern_waiter w;
    kern_waiter_init(&w);
    const int r = runs_update(k, spec, a, &w.done, e);
    return r == SHD_OK ? finish(&w, "update", e) : r;
}

static int run_hash(struct kern *k, const struct kern_hash *a, struct shd_err *e)
{
    struct kern_waiter w;
    kern_waiter_init(&w);
    const int r = k->ops->hash(k, a, &w.done, e);
    return r == SHD_OK ? finish(&w, "hash", e) : r;
}

/* -- Session ----------------------------------------------------------------------------------- */

int path_local_connect(struct shd_session *s, uint32_t threads, struct shd_err *e)
{
    const struct kern_config config = { .threads = threads };
    return kern_cpu_new(&config, &s->kern, e);
}

static uint32_t local_owners(const struct shd_session *s)
{
    (void)s;
    return 1;
}

static void local_disconnect(struct shd_session *s)
{
    s->kern->ops->free(s->kern);
    s->kern = NULL;
}

/* Names of models are printable without quote or backslash (proto/spec.h). */
static int local_status(struct shd_session *s, uint32_t owner, char **ret_json, struct shd_err *e)
{
    CHECK(owner == 0);
    size_t capacity = 128;
    for (const struct shd_model *m = s->models; m != NULL; m = m->next)
        capacity += strlen(m->spec->name) + 64;
    char *json = sys_malloc(capacity);
    if (json == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a status of %zu bytes", capacity);
    size_t used = (size_t)snprintf(json, capacity,
                                   "{\"device\":\"local\",\"kernels\":\"%s\","
                                   "\"models\":[",
                                   s->kern->ops->name);
    for (const struct shd_model *m = s->models; m != NULL; m = m->next)
        used += (size_t)snprintf(json + used, capacity - used,
                                 "%s{\"name\":\"%s\",\"step\":%" PRIu64 "}",
                                 m == s->models ? "" : ",", m->spec->name, m->step);
    snprintf(json + used, capacity - used, "]}");
    *ret_json = json;
    return SHD_OK;
}

/* -- Opening ----------------------------------------------------------------------------------- */

static int map_memory(uint64_t bytes, void **ret_base, struct shd_err *e)
{
    void *base = sys_mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return err_sys(e, SHD_ENOMEM, "map %" PRIu64 " bytes", bytes);
    *ret_base = base;
    return SHD_OK;
}

static int open_unit(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    const struct spec *spec = m->spec;
    const uint64_t elems = spec->units[unit].elems;
    const uint32_t moments = spec_moments(spec);
    struct local_unit *u = &m->local->units[unit];
    const uint64_t bytes = (2 + moments) * elems * sizeof(float) +
                           elems * dtype_bytes(spec->publish);
    void *base = NULL;
    int r = map_memory(bytes, &base, e);
    if (r != SHD_OK)
        return r;
    u->memory = base;
    u->memory_bytes = bytes;
    u->param = base;
    u->acc = u->param + elems;
    u->m = u->acc + elems;
    u->v = moments == 2 ? u->m + elems : NULL;
    u->publish = u->m + moments * elems;
    u->arrived = m->local->arrived + (uint64_t)unit * spec->micro_batches;
    return runs_new(spec, unit, (struct slice){ 0, elems }, &u->runs, &u->run_count, e);
}

/* Initial values of a unit, and what is published of them. */
static int fill_unit(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    const struct spec_unit *su = &m->spec->units[unit];
    const struct local_unit *u = &m->local->units[unit];
    struct kern *k = m->session->kern;
    for (uint32_t t = su->first_tensor; t < su->first_tensor + su->tensor_count; t++) {
        struct kern_fill fill;
        if (!runs_fill(m->spec, t, (struct slice){ 0, su->elems }, u->param, &fill))
            continue;
        const int r = run_fill(k, &fill, e);
        if (r != SHD_OK)
            return r;
    }
    const struct kern_cast cast = { u->publish, m->spec->publish, u->param, su->elems };
    return run_cast(k, &cast, e);
}

static int new_local(struct shd_model *m, struct shd_err *e)
{
    const struct spec *spec = m->spec;
    struct local_model *local = sys_calloc(1, sizeof *local);
    m->local = local;
    if (local != NULL) {
        local->units = sys_calloc(spec->unit_count, sizeof *local->units);
        local->arrived = sys_calloc(spec->unit_count, spec->micro_batches);
        local->hypers = sys_calloc(spec->group_count, sizeof *local->hypers);
    }
    if (local == NULL || local->units == NULL || local->arrived == NULL || local->hypers == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for model '%s'", spec->name);
    for (uint32_t u = 0; u < spec->unit_count; u++)
        if (spec->units[u].elems > local->slot_elems)
            local->slot_elems = spec->units[u].elems;
    return SHD_OK;
}

static int local_open(struct shd_model *m, const char *name, struct shd_err *e)
{
    if (m->spec == NULL)
        return err_set(e, SHD_ENOENT, "local: holds no model '%.100s': open it with its spec",
                       name);
    int r = new_local(m, e);
    for (uint32_t u = 0; r == SHD_OK && u < m->spec->unit_count; u++) {
        r = open_unit(m, u, e);
        if (r == SHD_OK)
            r = fill_unit(m, u, e);
    }
    return r;
}

static int local_open_slots(struct shd_model *m, struct shd_err *e)
{
    void *base = NULL;
    const int r = map_memory(m->slot_count * m->local->slot_elems * sizeof(float), &base, e);
    if (r == SHD_OK)
        m->local->slots = base;
    return r;
}

static void local_close(struct shd_model *m)
{
    struct local_model *local = m->local;
    if (local == NULL)
        return;
    for (uint32_t u = 0; local->units != NULL && u < m->spec->unit_count; u++) {
        free(local->units[u].runs);
        if (local->units[u].memory != NULL)
            munmap(local->units[u].memory, local->units[u].memory_bytes);
    }
    if (local->slots != NULL)
        munmap(local->slots, m->slot_count * local->slot_elems * sizeof(float));
    free(local->units);
    free(local->arrived);
    free(local->hypers);
    free(local->blob);
    free(local);
    m->local = NULL;
}

/* -- A micro-batch ----------------------------------------------------------------------------- */

static int local_wait_unit(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    (void)m;
    (void)unit;
    (void)e;
    return SHD_OK; /* updates are done when commit returns */
}

static const void *local_params(const struct shd_model *m, uint32_t unit)
{
    return m->local->units[unit].publish;
}

static int local_wait_slot(struct shd_model *m, struct shd_err *e)
{
    for (uint32_t i = 0; i < m->slot_count; i++) {
        const struct grad_slot *slot = &m->slots[i];
        if (slot->state != SLOT_SENT)
            continue;
        return err_set(
            e, SHD_EBUSY,
            "all %" PRIu32 " gradient slots are taken: unit %" PRIu32 ", micro-batch %" PRIu32
            " waits for micro-batch %" PRIu32 ": hand them in ascending order",
            m->slot_count, slot->unit, slot->micro, m->local->units[slot->unit].next_micro);
    }
    CHECK(false); /* the caller saw one */
    return SHD_EINTERNAL;
}

static float *local_slot_array(const struct shd_model *m, uint32_t slot, uint32_t unit)
{
    (void)unit;
    return m->local->slots + slot * m->local->slot_elems;
}

static int local_poll(struct shd_model *m, struct shd_err *e)
{
    (void)m;
    (void)e;
    return SHD_OK;
}

static uint32_t find_sent(const struct shd_model *m, uint32_t micro, uint32_t unit)
{
    uint32_t i = 0;
    while (m->slots[i].state != SLOT_SENT || m->slots[i].micro != micro ||
           m->slots[i].unit != unit) {
        i++;
        CHECK(i < m->slot_count);
    }
    return i;
}

/* Add what is in, in ascending order, up to the first micro-batch that is missing. */
static int sum_arrived(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    struct local_unit *u = &m->local->units[unit];
    while (u->next_micro < m->spec->micro_batches && u->arrived[u->next_micro] != ARRIVED_NOT) {
        if (u->arrived[u->next_micro] == ARRIVED_GRAD) {
            const uint32_t slot = find_sent(m, u->next_micro, unit);
            const struct kern_accumulate accumulate = {
                .acc = u->acc,
                .grad = local_slot_array(m, slot, unit),
                .grad_dtype = SHD_F32,
                .elems = m->spec->units[unit].elems,
                .first = !u->summed,
            };
            const int r = run_accumulate(m->session->kern, &accumulate, e);
            if (r != SHD_OK)
                return r;
            u->summed = true;
            m->slots[slot].state = SLOT_FREE;
        }
        u->next_micro++;
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

/* The first report of a micro-batch counts, as with daemons. */
static void take_metrics(struct shd_model *m, uint32_t micro)
{
    const struct report *report = &m->reports[micro];
    if (m->local->metric_counts[micro] > 0 || report->count == 0)
        return;
    m->local->metric_counts[micro] = report->count;
    memcpy(m->local->metrics[micro], report->metrics, sizeof report->metrics);
}

static int local_give(struct shd_model *m, const struct path_return *ret, struct shd_err *e)
{
    struct local_unit *u = &m->local->units[ret->unit];
    if (u->arrived[ret->micro] != ARRIVED_NOT) { /* counts once */
        if (ret->slot != NULL)
            ret->slot->state = SLOT_FREE;
        return SHD_OK;
    }
    take_metrics(m, ret->micro);
    u->arrived[ret->micro] = ret->slot != NULL ? ARRIVED_GRAD : ARRIVED_NONE;
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
        if (m->local->units[u].next_micro < m->spec->micro_batches)
            return err_set(e, SHD_EINVAL,
                           "unit %" PRIu32 " '%s', micro-batch %" PRIu32 " of step %" PRIu64
                           " was not returned, and nobody else will",
                           u, m->spec->units[u].name, m->local->units[u].next_micro, m->step);
    return SHD_OK;
}

static int sum_squares(struct shd_model *m, struct wire_prepared *prepared, struct shd_err *e)
{
    struct kern_sum sum = { .finite = true };
    fixsum_init(&sum.sum);
    for (uint32_t i = 0; i < m->spec->unit_count; i++) {
        struct local_unit *u = &m->local->units[i];
        const uint64_t elems = m->spec->units[i].elems;
        if (!u->summed) { /* took part in no micro-batch */
            memset(u->acc, 0, elems * sizeof *u->acc);
            continue;
        }
        const struct kern_sumsq sumsq = { u->acc, elems, &sum };
        const int r = run_sumsq(m->session->kern, &sumsq, e);
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
    for (uint32_t micro = 0; micro < m->spec->micro_batches; micro++) {
        if (local->metric_counts[micro] > prepared->metric_count)
            prepared->metric_count = local->metric_counts[micro];
        for (uint32_t i = 0; i < local->metric_counts[micro]; i++)
            prepared->metrics[i] += local->metrics[micro][i];
    }
}

static int update_units(struct shd_model *m, const struct wire_decision *decision,
                        struct shd_err *e)
{
    struct local_model *local = m->local;
    runs_hypers(m->spec, decision->lr, local->updates + 1, local->hypers);
    for (uint32_t i = 0; i < m->spec->unit_count; i++) {
        const struct local_unit *u = &local->units[i];
        const struct kern_update update = {
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
        const int r = run_update(m->session->kern, m->spec, &update, e);
        if (r != SHD_OK)
            return r;
    }
    local->updates++;
    return SHD_OK;
}

/* Room first: after the update nothing may fail. */
static int take_blob(const struct shd_update *update, uint8_t **ret_blob, struct shd_err *e)
{
    *ret_blob = NULL;
    if (update->blob == NULL)
        return SHD_OK;
    uint8_t *blob = sys_malloc(update->blob_bytes + 1);
    if (blob == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a blob of %zu bytes", update->blob_bytes);
    memcpy(blob, update->blob, update->blob_bytes);
    *ret_blob = blob;
    return SHD_OK;
}

static void begin_step(struct shd_model *m)
{
    struct local_model *local = m->local;
    for (uint32_t u = 0; u < m->spec->unit_count; u++) {
        local->units[u].next_micro = 0;
        local->units[u].summed = false;
    }
    memset(local->arrived, ARRIVED_NOT, (size_t)m->spec->unit_count * m->spec->micro_batches);
    memset(local->metric_counts, 0, sizeof local->metric_counts);
}

static int decide_local(struct shd_model *m, const struct shd_update *update,
                        struct decided *ret_decided, struct shd_err *e)
{
    struct wire_prepared prepared = { .step = m->step };
    int r = check_complete(m, e);
    if (r == SHD_OK)
        r = sum_squares(m, &prepared, e);
    if (r != SHD_OK)
        return r;
    sum_metrics(m, &prepared);
    const struct decide_args args = {
        .prepared = &prepared,
        .owners = 1,
        .micro_batches = m->spec->micro_batches,
        .lr = update->lr,
        .clip_norm = update->clip_norm,
        .loss_scale = update->loss_scale,
    };
    return decide(&args, ret_decided, e);
}

static int local_commit(struct shd_model *m, const struct shd_update *update,
                        struct decided *ret_decided, struct shd_err *e)
{
    struct local_model *local = m->local;
    struct decided decided;
    uint8_t *blob = NULL;
    int r = decide_local(m, update, &decided, e);
    if (r == SHD_OK)
        r = take_blob(update, &blob, e);
    struct shd_err why = { 0 };
    if (r == SHD_OK && !decided.decision.skip && update_units(m, &decided.decision, &why) != SHD_OK)
        r = kernel_failed(m, &why, e);
    if (r != SHD_OK) {
        free(blob);
        return r;
    }
    if (blob != NULL) {
        free(local->blob);
        local->blob = blob;
        local->blob_bytes = update->blob_bytes;
    }
    begin_step(m);
    *ret_decided = decided;
    return SHD_OK;
}

/* -- Looking ----------------------------------------------------------------------------------- */

static int local_blob(struct shd_model *m, void *buf, size_t capacity, size_t *ret_bytes,
                      struct shd_err *e)
{
    const struct local_model *local = m->local;
    if (local->blob_bytes > capacity)
        return err_set(e, SHD_ERANGE, "blob has %zu bytes, the buffer %zu", local->blob_bytes,
                       capacity);
    if (local->blob_bytes > 0)
        memcpy(buf, local->blob, local->blob_bytes);
    *ret_bytes = local->blob_bytes;
    return SHD_OK;
}

static int local_leaves(void *ctx, const struct digest_part *part, uint8_t (*ret_leaves)[32],
                        struct digest_stamp *stamp, struct shd_err *e)
{
    struct shd_model *m = ctx;
    const struct spec_tensor *t = &m->spec->tensors[part->tensor];
    const struct local_unit *u = &m->local->units[t->unit];
    const float *const arrays[] = { u->param, u->m, u->v };
    CHECK(part->array < ARRAY_SIZE(arrays) && arrays[part->array] != NULL);
    uint64_t first = 0;
    const uint64_t elems = digest_elems(t, part->first_leaf, part->leaves, &first);
    const uint64_t head = SHD_BLOCK_ELEMS - first % SHD_BLOCK_ELEMS;
    const struct kern_hash hash = {
        .x = arrays[part->array] + first,
        .elems = elems,
        .head_elems = head < elems ? head : elems,
        .out = ret_leaves,
    };
    CHECK(kern_hash_leaves(hash.head_elems, elems) == part->leaves);
    const int r = run_hash(m->session->kern, &hash, e);
    return r == SHD_OK ? digest_stamp_take(stamp, m->step, m->local->updates, e) : r;
}

const struct path_ops path_local = {
    .name = "local",
    .owners = local_owners,
    .disconnect = local_disconnect,
    .status = local_status,
    .open = local_open,
    .close = local_close,
    .open_slots = local_open_slots,
    .wait_unit = local_wait_unit,
    .params = local_params,
    .wait_slot = local_wait_slot,
    .slot_array = local_slot_array,
    .give = local_give,
    .poll = local_poll,
    .commit = local_commit,
    .blob = local_blob,
    .leaves = local_leaves,
};
