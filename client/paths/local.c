/* Opening models in this process, and looking at them. See local.h. */
#include "client/paths/local.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/paths/kern_run.h"
#include "client/paths/local_step.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"

/* -- Session ----------------------------------------------------------------------------------- */

static uint32_t local_owners(const struct shd_session *s)
{
    (void)s;
    return 1;
}

static void local_disconnect(struct shd_session *s)
{
    (void)s; /* its compute threads end with the session */
}

/* Names of models are printable without quote or backslash (proto/spec/spec.h). */
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

static int new_memory(struct shd_session *s, uint64_t bytes, void **ret_base, struct shd_err *e)
{
    void *base = s->kern->ops->alloc(s->kern, bytes);
    if (base == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu64 " bytes", bytes);
    *ret_base = base;
    return SHD_OK;
}

static int open_unit(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    const struct spec *spec = m->spec;
    const uint64_t elems = spec->units[unit].elems;
    const bool frozen = spec->units[unit].frozen;
    const uint32_t moments = frozen ? 0 : spec_moments(spec);
    struct local_unit *u = &m->local->units[unit];
    const uint64_t arrays = frozen ? 1 : 2 + moments; /* of fp32 */
    const uint64_t bytes = arrays * elems * sizeof(float) + elems * dtype_bytes(spec->publish);
    void *base = NULL;
    int r = new_memory(m->session, bytes, &base, e);
    if (r != SHD_OK)
        return r;
    u->memory = base;
    u->memory_bytes = bytes;
    u->param = base;
    u->acc = frozen ? NULL : u->param + elems;
    u->m = frozen ? NULL : u->acc + elems;
    u->v = moments == 2 ? u->m + elems : NULL;
    u->publish = u->param + arrays * elems;
    u->arrived = m->local->arrived + (uint64_t)unit * spec_returns(spec);
    return runs_new(spec, unit, (struct slice){ 0, elems }, &u->runs, &u->run_count, e);
}

/* Initial values of a unit, and what is published of them. */
static int fill_unit(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    const struct spec_unit *su = &m->spec->units[unit];
    const struct local_unit *u = &m->local->units[unit];
    struct kern *k = m->session->kern;
    const uint64_t zero_elems = (u->memory_bytes - su->elems * dtype_bytes(m->spec->publish)) /
                                sizeof(float);
    const int zeroed = kern_run_zero(k, u->memory, zero_elems, e);
    if (zeroed != SHD_OK)
        return zeroed;
    for (uint32_t t = su->first_tensor; t < su->first_tensor + su->tensor_count; t++) {
        struct kern_fill fill;
        if (!runs_fill(m->spec, t, (struct slice){ 0, su->elems }, u->param, &fill))
            continue;
        const int r = kern_run_fill(k, &fill, e);
        if (r != SHD_OK)
            return r;
    }
    const struct kern_cast cast = { u->publish, m->spec->publish, u->param, su->elems };
    return kern_run_cast(k, &cast, e);
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
    }
    if (local == NULL || local->units == NULL || local->arrived == NULL || local->hypers == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for model '%s'", spec->name);
    for (uint32_t u = 0; u < spec->unit_count; u++)
        if (!spec->units[u].frozen && spec->units[u].elems > local->slot_elems)
            local->slot_elems = spec->units[u].elems;
    return SHD_OK;
}

static int local_open(struct shd_model *m, const char *name, uint32_t slots, struct shd_err *e)
{
    (void)slots;
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
        k->ops->release(k, local->units[u].memory, local->units[u].memory_bytes);
    }
    if (local->slots != NULL)
        k->ops->release(k, local->slots, slots_bytes(m));
    free(local->units);
    free(local->arrived);
    free(local->hypers);
    free(local->blob);
    free(local);
    m->local = NULL;
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
    const uint64_t elems = ckpt_leaf_elems(t, part->first_leaf, part->leaves, &first);
    const uint64_t head = SHD_BLOCK_ELEMS - first % SHD_BLOCK_ELEMS;
    const struct kern_hash hash = {
        .x = arrays[part->array] + first,
        .elems = elems,
        .head_elems = head < elems ? head : elems,
        .out = ret_leaves,
    };
    CHECK(kern_hash_leaves(hash.head_elems, elems) == part->leaves);
    const int r = kern_run_hash(m->session->kern, &hash, e);
    return r == SHD_OK ? digest_stamp_take(stamp, m->step, m->local->updates, e) : r;
}

/* -- The tables -------------------------------------------------------------------------------- */

static int local_fetch(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    (void)m;
    (void)unit;
    (void)e;
    return SHD_OK; /* always there */
}

static bool local_readable(const struct shd_model *m, uint32_t unit)
{
    (void)m;
    (void)unit;
    return true; /* updates are done when commit returns */
}

static int local_wait_unit(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    (void)m;
    (void)unit;
    (void)e;
    return SHD_OK;
}

static void local_let_go(struct shd_model *m, uint32_t unit)
{
    (void)m;
    (void)unit;
}

static const void *local_params(const struct shd_model *m, uint32_t unit)
{
    return m->local->units[unit].publish;
}

const struct reader_ops reader_local = {
    .kind = SHD_PATH_MAP,
    .shown = ACTIVITY_PATH_MAP,
    .fetch = local_fetch,
    .readable = local_readable,
    .wait_unit = local_wait_unit,
    .let_go = local_let_go,
    .params = local_params,
};

static int local_ready_slot(struct shd_model *m, uint32_t slot, struct shd_err *e)
{
    (void)m;
    (void)slot;
    (void)e;
    return SHD_OK;
}

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
    .owners = local_owners,
    .disconnect = local_disconnect,
    .status = local_status,
    .open = local_open,
    .close = local_close,
    .open_slots = local_open_slots,
    .wait_slot = local_wait_slot,
    .ready_slot = local_ready_slot,
    .slot_array = local_slot_array,
    .fill_slot = local_fill_slot,
    .give = local_give,
    .poll = local_poll,
    .commit = local_commit,
    .catch_up = local_catch_up,
    .lease = local_lease,
    .blob = local_blob,
    .leaves = local_leaves,
};
