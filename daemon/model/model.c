/* See model.h. */
#include "daemon/model/model.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/base/task.h"
#include "daemon/core/lease.h"
#include "daemon/core/ledger.h"
#include "daemon/core/ledger_set.h"
#include "daemon/core/step.h"
#include "daemon/core/step_guard.h"
#include "daemon/core/step_init.h"
#include "daemon/core/step_set.h"
#include "daemon/core/verify.h"
#include "daemon/model/inbox.h"
#include "daemon/model/memory.h"
#include "daemon/model/metrics.h"
#include "daemon/model/model_json.h"
#include "daemon/model/model_unit.h"
#include "daemon/model/quota.h"
#include "daemon/model/spill.h"
#include "daemon/net/op.h"
#include "kernels/runs.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/share/board.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"
#include "proto/spec/settings_text.h"
#include "proto/wire/wire.h"

#define FILL_PIECES_MAX 256u /* of a batch of initial values: the queue has room for others */
#define FILL_ELEMS      (UINT64_C(1) << 20) /* a batch ends with the piece that makes it so many */

struct model_fill {         /* of initial values, a batch at a time */
    struct task task;       /* first: of a batch */
    struct kern_done piece; /* of each of its pieces */
    _Atomic uint32_t left;  /* of these, and one while they are being queued */
    _Atomic int status;     /* SHD_OK, or of a piece that failed */
    struct model *model;
    void (*done)(struct model *m);
    uint32_t next; /* piece: a tensor's values; behind the last tensor the published copy */
    bool waits;    /* the kernel queue was full */
};

struct hypers_set {
    uint64_t step, updates; /* of which update; updates 0: none yet */
    uint32_t users;         /* updates that run with it */
    struct kern_hyper of_group[SHD_GROUPS_MAX];
};

/* As many as updates run at once: there is always one that is free, or the right one. */
struct model_hypers {
    struct hypers_set sets[STEP_APPLY_AHEAD];
    uint32_t next; /* to be made anew, if it is free */
};

struct parts {      /* of a model, in one block */
    struct model m; /* first */
    struct model_hypers hypers;
    struct ledger ledger;
    struct model_fill fill;
    struct spill spill;
    struct metrics_model metrics;
};

uint64_t model_restore_id(const struct model *m)
{
    return m->ledger->head->restored.id;
}

bool model_one_count(const struct model *m)
{
    return !ledger_counts_units(m->ledger);
}

uint64_t model_state_bytes(const struct model *m)
{
    const uint64_t trail = m->kern->ops->trail_bytes(m->kern, m->trail.chunk_count);
    return layout_align(shardmap_state_bytes(m->map) + trail, SHD_PAGE_BYTES);
}

void model_find_trail(struct model *m)
{
    const uint64_t bytes = m->kern->ops->trail_bytes(m->kern, m->trail.chunk_count);
    m->trail.area = m->ledger->trail;
    m->trail.chunks = m->ledger->chunks;
    if (bytes == 0)
        return;
    /* Whole pages come before it: it is aligned. */
    m->trail.area = (void *)((uint8_t *)m->state.base + shardmap_state_bytes(m->map));
    m->trail.chunks = NULL;
}

int model_share(struct model *m, struct shd_err *e)
{
    return memory_share_again(m, e);
}

static struct ledger_shape ledger_shape_of(const struct model *m)
{
    const struct quota_maker maker = quota_maker_of(m->kept.quota);
    return (struct ledger_shape){ .name = m->spec->name,
                                  .spec = m->json.text,
                                  .spec_bytes = m->json.bytes,
                                  .owner = m->map->owner,
                                  .owners = m->map->owners,
                                  .units = m->spec->unit_count,
                                  .micros = spec_returns(m->spec),
                                  .instance = m->kept.instance,
                                  .state_bytes = model_state_bytes(m),
                                  .chunk_count = m->trail.chunk_count,
                                  .history_slots = LEDGER_HISTORY,
                                  .window = step_guard_shape(m->spec->guard, m->map->owner),
                                  .one_count = m->kept.one_count,
                                  .maker = { maker.known, maker.uid, maker.gid } };
}

static int make_kept(struct model *m, struct shd_err *e)
{
    if (getrandom(&m->kept.instance, sizeof m->kept.instance, 0) !=
        (ssize_t)sizeof m->kept.instance)
        return err_sys(e, SHD_EIO, "get random bytes");
    const struct ledger_shape shape = ledger_shape_of(m);
    const int r = memory_make(m, &shape, e);
    if (r == SHD_OK) {
        model_find_trail(m);
        return r;
    }
    return err_prefix(e, "model '%.64s' as owner %" PRIu32 " of %" PRIu32, m->spec->name,
                      m->map->owner, m->map->owners);
}

static int make_units(struct model *m, struct shd_err *e)
{
    const uint32_t units = m->spec->unit_count, micros = spec_returns(m->spec);
    if ((uint64_t)units * micros > STEP_CELLS_MAX)
        return err_set(e, SHD_ERANGE, "%" PRIu32 " units x %" PRIu32 " gradients exceed %" PRIu64,
                       units, micros, STEP_CELLS_MAX);
    m->units = sys_calloc(units, sizeof *m->units);
    if (m->units == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " units", units);
    const bool wholes = spec_has_whole(m->spec);
    const int made = metrics_model_init(m->metrics, units, e);
    if (made != SHD_OK)
        return made;
    for (uint32_t u = 0; u < units; u++) {
        struct model_unit *mu = &m->units[u];
        mu->model = m;
        mu->unit = u;
        mu->grad_codec = spec_unit_grad_codec(m->spec, u);
        mu->first_chunk = m->trail.chunk_count;
        m->trail.chunk_count += kern_trail_chunks(m->map->slice[u].elems);
        mu->ema_chunk = m->trail.chunk_count;
        if (m->spec->ema > 0)
            m->trail.chunk_count += kern_trail_chunks(m->map->slice[u].elems);
        int r = runs_new(m->spec, u, m->map->slice[u], &mu->runs, &mu->run_count, e);
        if (r == SHD_OK)
            r = runs_matrices(m->spec, u, m->map->slice[u], &mu->whole, e);
        if (r != SHD_OK)
            return r;
        if (mu->whole != NULL)
            mu->whole->first_chunk = m->trail.chunk_count;
        if (wholes)
            m->trail.chunk_count += 3 * kern_trail_chunks(m->map->slice[u].elems);
    }
    return SHD_OK;
}

/* NULL is a no-op. */
static void free_lease(struct lease *lease)
{
    free(lease != NULL ? lease_verify(lease) : NULL);
    free(lease);
}

/* In memory of lease_bytes(), which is freed when there is none for more. Behind the core. */
static int make_lease(struct model *m, void *memory, struct shd_err *e)
{
    const struct verify_shape shape = { .every = m->spec->verify_every,
                                        .units = m->spec->unit_count,
                                        .trained = m->spec->trained_units,
                                        .first = m->map->owner == 0,
                                        .blind = m->kept.adopted };
    m->lease = lease_init(memory, spec_returns(m->spec),
                          /* cautious= */ m->map->owner > 0 || m->kept.adopted);
    if (shape.every == 0)
        return SHD_OK;
    void *verify = sys_malloc(verify_bytes(&shape));
    if (verify == NULL)
        return err_set(e, SHD_ENOMEM, "no memory to verify %" PRIu32 " units", shape.units);
    lease_set_verify(m->lease, verify_init(verify, &shape, m->core));
    return SHD_OK;
}

int model_core(struct model *m, struct shd_err *e)
{
    const uint32_t units = m->spec->unit_count;
    void *core = sys_malloc(step_bytes(units, spec_returns(m->spec)));
    void *lease = sys_malloc(lease_bytes(spec_returns(m->spec)));
    bool *frozen = sys_calloc(units, sizeof *frozen);
    if (core == NULL || lease == NULL || frozen == NULL) {
        free(core);
        free(lease);
        free(frozen);
        return err_set(e, SHD_ENOMEM, "no memory for the step state of %" PRIu32 " units", units);
    }
    for (uint32_t u = 0; u < units; u++) {
        frozen[u] = m->spec->units[u].frozen;
        m->units[u].acc = frozen[u] ? NULL : model_array(m, SHARDMAP_ACC, u);
    }
    m->core = step_init(core, m->ledger, frozen);
    step_guard(m->core, m->spec->guard);
    free(frozen);
    for (uint32_t u = 0; u < units; u++)
        if (m->spec->units[u].skips_idle)
            step_skips_idle(m->core, u);
    for (uint32_t u = 0; u < units; u++)
        if (m->spec->units[u].mean)
            step_means(m->core, u);
    const int ramped = step_ramp(m->core, m->spec->ramp, m->spec->accumulate, e);
    int r = make_lease(m, lease, e);
    if (r == SHD_OK)
        r = memory_page(m, e);
    struct settings_kept room;
    const struct settings_kept *kept = step_settings_kept(m->core, &room);
    r = r == SHD_OK ? ramped : r;
    if (r == SHD_OK && kept != NULL)
        r = settings_check_kept(m->spec, kept, e);
    return r == SHD_OK ? step_check_counts(m->core, e) : r;
}

int model_core_anew(struct model *m, struct shd_err *e)
{
    struct step *core = m->core;
    struct lease *lease = m->lease;
    const int r = model_core(m, e); /* from where the ledger is now */
    if (r != SHD_OK && m->core != core) {
        free(m->core);
        free_lease(m->lease);
    }
    if (r != SHD_OK) {
        m->core = core;
        m->lease = lease;
        return r;
    }
    free(core);
    free_lease(lease);
    *m->hypers = (struct model_hypers){ 0 }; /* the same step may be decided otherwise now */
    return SHD_OK;
}

int model_start_at(struct model *m, const struct ledger_start *start, struct shd_err *e)
{
    if (start->unit_updates != NULL && !ledger_counts_units(m->ledger))
        return err_set(e, SHD_ENOTSUP,
                       "units of the checkpoint have had different numbers of updates, which the "
                       "build of another daemon, or of the library that restores it, does not "
                       "count: upgrade it");
    if (!ledger_decision_room(m->ledger, &start->decision))
        return err_set(e, SHD_ENOTSUP,
                       "the checkpoint's last decision has what the build of another daemon, or of "
                       "the library that restores it, does not know of: upgrade it");
    const int r = ledger_start_at(m->ledger, start, e);
    return r == SHD_OK ? model_core_anew(m, e) : r;
}

static int check_device(const struct spec *spec, const struct kern *kern, struct shd_err *e)
{
    if ((spec->codec != CODEC_NONE || spec->grad_codec != CODEC_NONE) && !kern->ops->codecs)
        return err_set(e, SHD_ENOTSUP,
                       "model '%s' has codes for what travels (codec: %s, grad_codec: %s), which "
                       "owners on %s do not know: give it none there, or owners in host memory",
                       spec->name, codec_name(spec->codec), codec_name(spec->grad_codec),
                       kern->ops->name);
    if (!spec->int8 || kern->ops->int8)
        return SHD_OK;
    return err_set(e, SHD_ENOTSUP,
                   "model '%s' has moments in 8 bits (optimizer.moments: int8), which owners on "
                   "%s do not have: give it f32 there, or owners in host memory",
                   spec->name, kern->ops->name);
}

int model_plan(struct spec *spec, const struct model_home *home, struct model **ret_model,
               struct shd_err *e)
{
    struct parts *parts = sys_calloc(1, sizeof *parts);
    if (parts == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for model '%s'", spec->name);
    struct model *m = &parts->m;
    m->hypers = &parts->hypers;
    m->ledger = &parts->ledger;
    m->fill = &parts->fill;
    m->fill->model = m;
    m->spill = &parts->spill;
    m->metrics = &parts->metrics;
    m->spec = spec;
    m->kern = home->kern;
    m->kept.keeper = home->keeper;
    m->kept.one_count = home->one_count;
    m->state = m->publish = m->board_segment = m->ledger_segment = SEGMENT_CLOSED;
    m->json.segment = SEGMENT_CLOSED;
    m->spill->segment = SEGMENT_CLOSED;
    m->backlog_last = &m->backlog_first;
    m->kept.spare_fd = -1;
    m->kept.next_fd = -1;
    const struct quota_maker maker = { home->maker.known, home->maker.uid, home->maker.gid };
    int r = check_device(spec, home->kern, e);
    if (r == SHD_OK)
        r = quota_begin(home->quota, &maker, spec->name, &m->kept.quota, e);
    if (r == SHD_OK)
        r = memory_init(m, e);
    if (r == SHD_OK)
        r = model_json_make(&m->json, spec, e);
    if (r == SHD_OK)
        r = shardmap_new(spec, home->owner, home->owners, &m->map, e);
    if (r == SHD_OK)
        r = make_units(m, e);
    if (r == SHD_OK && spec->guard_audit)
        r = metrics_audit(m->metrics, spec->unit_count, spec_returns(spec), e);
    if (r == SHD_OK) {
        *ret_model = m;
        return r;
    }
    m->spec = NULL; /* not taken */
    model_free(m);
    return r;
}

int model_new(struct spec *spec, const struct model_home *home, struct model **ret_model,
              struct shd_err *e)
{
    struct model *m = NULL;
    int r = model_plan(spec, home, &m, e);
    if (r != SHD_OK)
        return r;
    CHECK(m != NULL);
    r = make_kept(m, e);
    if (r == SHD_OK)
        r = model_core(m, e);
    if (r == SHD_OK) {
        *ret_model = m;
        return r;
    }
    m->spec = NULL; /* not taken */
    model_free(m);
    return r;
}

void model_adopted(struct model *m)
{
    memory_adopted(m);
}

int model_take(const struct model *m, uint64_t bytes, const char *what, struct shd_err *e)
{
    return quota_take(m->kept.quota, bytes, what, e);
}

void model_have(const struct model *m, uint64_t bytes)
{
    quota_have(m->kept.quota, bytes);
}

void model_give(const struct model *m, uint64_t bytes)
{
    quota_give(m->kept.quota, bytes);
}

void model_settle(const struct model *m, uint64_t asked, uint64_t got)
{
    quota_settle(m->kept.quota, asked, got);
}

void model_free(struct model *m)
{
    if (m == NULL)
        return;
    for (uint32_t u = 0; m->units != NULL && m->map != NULL && u < m->map->units; u++) {
        free(m->units[u].runs);
        free(m->units[u].whole);
    }
    free(m->units);
    free(m->core);
    free_lease(m->lease);
    metrics_model_deinit(m->metrics);
    segment_close(&m->spill->segment);
    memory_free(m);
    model_json_free(&m->json);
    quota_end(m->kept.quota);
    shardmap_free(m->map);
    spec_free(m->spec);
    free(m);
}

float *model_array(const struct model *m, uint32_t array, uint32_t unit)
{
    return (float *)m->state.base + shardmap_array_elem(m->map, array, unit);
}

struct kern_array model_state(const struct model *m, uint32_t array, uint32_t unit)
{
    return (struct kern_array){ model_array(m, array, unit), spec_array_quant(m->spec, array) };
}

static struct hypers_set *find_hypers(struct model_hypers *h, const struct step_action *a)
{
    for (uint32_t i = 0; i < STEP_APPLY_AHEAD; i++)
        if (h->sets[i].step == a->step && h->sets[i].updates == a->updates)
            return &h->sets[i];
    return NULL;
}

static struct hypers_set *free_hypers(struct model_hypers *h)
{
    for (uint32_t i = 0; i < STEP_APPLY_AHEAD; i++) {
        struct hypers_set *set = &h->sets[h->next++ % STEP_APPLY_AHEAD];
        if (set->users == 0)
            return set;
    }
    return NULL;
}

const struct kern_hyper *model_hypers(struct model *m, const struct step_action *a)
{
    struct hypers_set *set = find_hypers(m->hypers, a);
    if (set == NULL) {
        set = free_hypers(m->hypers);
        CHECK(set != NULL); /* the core lets no more updates run */
        set->step = a->step;
        set->updates = a->updates;
        runs_hypers(m->spec, &step_record(m->core)->decision, a->updates, set->of_group);
    }
    set->users++;
    return set->of_group;
}

struct kern_ema model_ema(const struct model *m, const struct step_action *a)
{
    if (!spec_unit_ema(m->spec, a->unit))
        return (struct kern_ema){ 0 };
    return (struct kern_ema){ .average = model_array(m, spec_ema_array(m->spec), a->unit),
                              .rest = runs_ema_rest(m->spec, a->updates),
                              .first_chunk = m->units[a->unit].ema_chunk };
}

struct kern_whole model_whole(const struct model *m, uint32_t unit)
{
    if (m->units[unit].whole == NULL)
        return (struct kern_whole){ 0 };
    struct kern_whole whole = *m->units[unit].whole;
    whole.scratch = (float *)m->state.base + shardmap_scratch_elem(m->map);
    return whole;
}

void model_hypers_done(struct model *m, const struct kern_hyper *hypers)
{
    struct hypers_set *set = m->hypers->sets;
    while (set->of_group != hypers)
        set++;
    CHECK(set->users > 0);
    set->users--;
}

uint64_t model_norm(const struct model *m, uint32_t unit, double *ret_norm)
{
    *ret_norm = m->units[unit].applied.norm;
    return m->units[unit].applied.step;
}

uint64_t model_change(const struct model *m, uint32_t unit, double *ret_update, double *ret_weight)
{
    *ret_update = m->units[unit].changed.update;
    *ret_weight = m->units[unit].changed.weight;
    return m->units[unit].changed.step;
}

int model_set(struct model *m, const struct settings_bytes *change, uint64_t at, uint64_t id,
              uint64_t *ret_from, struct shd_err *e)
{
    struct settings asked;
    if (m->map->owner != 0)
        return err_set(e, SHD_EINVAL, "settings are owner 0's, this is owner %" PRIu32,
                       m->map->owner);
    int r = settings_unpack(change, /* change= */ true, &asked, e);
    if (r == SHD_OK && asked.count == 0)
        r = err_set(e, SHD_EINVAL, "no setting is given");
    if (r == SHD_OK)
        r = settings_check(m->spec, &asked, /* change= */ true, e);
    if (r == SHD_OK)
        r = step_set(m->core, &asked, at, id, ret_from, e);
    if (r == SHD_OK)
        log_info("op=set model=%s from=%" PRIu64, m->spec->name, *ret_from);
    return r;
}

void model_tell_settings(const struct step_prepared *p, struct wire_prepared *ret_prepared)
{
    if (p->settings == NULL)
        return;
    const struct settings_bytes b = settings_pack(p->settings);
    ret_prepared->settings = (struct wire_bytes){ b.old, b.old_bytes };
    ret_prepared->settings_more = (struct wire_bytes){ b.more, b.more_bytes };
}

uint32_t model_room(const struct model *m)
{
    return m->ledger->chosen != NULL ? m->spec->micro_batches : 0;
}

bool model_stopped(const struct model *m, struct step_stopped *ret_stopped)
{
    return step_stopped(m->core, ret_stopped);
}

bool model_cause(const struct model *m, uint64_t step, struct step_cause *ret_cause)
{
    return step_cause(m->core, step, ret_cause);
}

uint64_t model_gone_back(const struct model *m)
{
    return step_gone_back(m->core);
}

int model_go_on(struct model *m, struct shd_err *e)
{
    if (m->map->owner != 0)
        return err_set(e, SHD_EINVAL, "a guard is owner 0's, this is owner %" PRIu32,
                       m->map->owner);
    const int r = step_go_on(m->core, e);
    if (r == SHD_OK)
        log_info("op=go_on model=%s step=%" PRIu64, m->spec->name, step_collecting(m->core));
    return r;
}

int model_settings(const struct model *m, uint64_t step, char **ret_json, struct shd_err *e)
{
    struct settings_kept room;
    const struct settings_kept *kept = step_settings_kept(m->core, &room);
    *ret_json = NULL;
    return kept != NULL && settings_any(kept) ? settings_json(m->spec, kept, step, ret_json, e)
                                              : SHD_OK;
}

bool model_settings_new(const struct model *m)
{
    struct settings_kept room;
    const struct settings_kept *kept = step_settings_kept(m->core, &room);
    return kept != NULL && settings_kept_new(kept);
}

int model_take_settings(struct model *m, const char *json, struct shd_err *e)
{
    if (json == NULL || m->map->owner != 0)
        return SHD_OK;
    struct settings_kept kept;
    if (!ledger_settings_room(m->ledger))
        return err_set(e, SHD_ENOTSUP,
                       "the checkpoint has settings, which the build of another daemon, or of the "
                       "library that restores it, does not know of: upgrade it");
    const int r = settings_read(m->spec, json, strlen(json), &kept, e);
    return r == SHD_OK ? ledger_settings_keep(m->ledger, &kept, e) : r;
}

uint8_t *model_published(const struct model *m, uint32_t unit)
{
    return (uint8_t *)m->publish.base + shardmap_publish_offset_bytes(m->map, unit);
}

struct kern_op model_publish(const struct model *m, uint64_t first_elem, uint64_t elems)
{
    const float *params = m->state.base; /* they come first */
    const struct shardmap *map = m->map;
    if (map->codec == CODEC_NONE)
        return (struct kern_op){ KERN_CAST,
                                 { .cast = { .out = (uint8_t *)m->publish.base +
                                                    first_elem * dtype_bytes(map->publish),
                                             .out_dtype = map->publish,
                                             .in = params + first_elem,
                                             .elems = elems } } };
    return (struct kern_op){ KERN_ENCODE,
                             { .encode = { .in = params,
                                           .out = m->publish.base,
                                           .codec = map->codec,
                                           .first_elem = first_elem,
                                           .elems = elems,
                                           .first_of = map->base_elem,
                                           .bytes_of = map->code_base,
                                           .slices = map->units } } };
}

uint64_t model_spill_bytes(const struct model *m)
{
    const uint64_t bytes = spec_returns(m->spec) * m->map->train_elems * sizeof(float);
    return bytes > 0 ? bytes : SHD_PAGE_BYTES;
}

void *model_spilled(const struct model *m, uint32_t unit, uint32_t micro)
{
    CHECK(m->spill->segment.base != NULL);
    return (float *)m->spill->segment.base + micro * m->map->train_elems + m->map->train_base[unit];
}

static void piece_done(struct kern_done *done, int status)
{
    struct model_fill *f = (void *)((char *)done - offsetof(struct model_fill, piece));
    if (status != SHD_OK)
        atomic_store(&f->status, status);
    if (atomic_fetch_sub_explicit(&f->left, 1, memory_order_acq_rel) == 1)
        task_post(&f->task, atomic_load(&f->status));
}

static int queue_fill(struct model *m, uint32_t tensor, uint64_t *ret_elems)
{
    const uint32_t u = m->spec->tensors[tensor].unit;
    struct kern_fill fill;
    struct shd_err e;
    if (!runs_fill(m->spec, tensor, m->map->slice[u], model_array(m, SHARDMAP_PARAM, u), &fill))
        return SHD_OK;
    *ret_elems = fill.elems;
    return kern_fill(m->kern, &fill, &m->fill->piece, &e);
}

/* The average of a unit's parameters begins as these. */
static int queue_ema(struct model *m, uint32_t unit, uint64_t *ret_elems)
{
    struct shd_err e;
    const uint64_t elems = m->map->slice[unit].elems;
    if (!spec_unit_ema(m->spec, unit) || elems == 0)
        return SHD_OK;
    const struct kern_copy copy = { .to = model_array(m, spec_ema_array(m->spec), unit),
                                    .from = model_array(m, SHARDMAP_PARAM, unit),
                                    .bytes = elems * sizeof(float) };
    *ret_elems = elems;
    return kern_copy(m->kern, &copy, &m->fill->piece, &e);
}

static int queue_cast(struct model *m, uint64_t *ret_elems)
{
    const struct kern_op op = model_publish(m, 0, m->map->elems);
    struct shd_err e;
    if (m->map->elems == 0)
        return SHD_OK;
    *ret_elems = m->map->elems;
    return m->kern->ops->submit(m->kern, &op, &m->fill->piece, &e);
}

/* One of what is to be filled: the tensors, then the units' averages, then the published copy. */
static int queue_one(struct model *m, uint32_t index, uint64_t *ret_elems)
{
    const uint32_t tensors = m->spec->tensor_count;
    if (index < tensors)
        return queue_fill(m, index, ret_elems);
    return index < tensors + m->spec->unit_count ? queue_ema(m, index - tensors, ret_elems)
                                                 : queue_cast(m, ret_elems);
}

/* Queue the next of it; false when nothing is left. What others queue waits for no more than one
 * batch. */
static bool init_next(struct model *m)
{
    struct model_fill *f = m->fill;
    uint64_t elems = 0;
    uint32_t pieces = 0;
    int r = SHD_OK;
    atomic_store(&f->left, 1);
    atomic_store(&f->status, SHD_OK);
    while (f->next <= m->spec->tensor_count + m->spec->unit_count && pieces < FILL_PIECES_MAX &&
           elems < FILL_ELEMS) {
        uint64_t more = 0;
        atomic_fetch_add(&f->left, 1);
        r = queue_one(m, f->next, &more);
        if (r != SHD_OK || more == 0)
            atomic_fetch_sub(&f->left, 1); /* no piece */
        if (r != SHD_OK)
            break;
        f->next++;
        pieces += more > 0;
        elems += more;
    }
    memory_passed(m, elems * sizeof(float));
    f->waits = r == SHD_EBUSY && pieces == 0;
    if (f->waits)
        m->daemon->kernel_full = true;
    else if (pieces > 0 || r != SHD_OK) /* a device that refuses: as if the work had failed */
        piece_done(&f->piece, r == SHD_EBUSY ? SHD_OK : r);
    return pieces > 0 || r != SHD_OK;
}

static void init_stepped(struct task *task)
{
    struct model *m = ((struct model_fill *)task)->model;
    if (task->status != SHD_OK) {
        struct shd_err why;
        m->last_status = kern_explain(m->kern, task->status, &why, "making initial values");
        log_error("op=init model=%s status=%s why=\"%s\" do=\"restart the daemon and open it "
                  "again\"",
                  m->spec->name, status_name(task->status), why.text);
    } else if (init_next(m)) {
        return;
    }
    FAIL_POINT("model:filled");
    m->fill->done(m);
}

void model_retry(struct model *m)
{
    if (m->fill->waits)
        init_next(m);
}

/* Places follow one another, so that a dropped model's has another one late. */
static uint32_t new_handle(struct daemon *d)
{
    for (;;) {
        const uint32_t serial = d->metrics->models++;
        const uint32_t handle = serial / MODEL_PLACES << 8 | (serial % MODEL_PLACES + 1);
        bool taken = false;
        for (uint32_t i = 0; i < d->model_count; i++)
            taken = taken || model_place(d->models[i]->handle) == model_place(handle);
        if (!taken)
            return handle;
    }
}

void model_register(struct daemon *d, struct model *m)
{
    CHECK(d->model_count < DAEMON_MODELS_MAX);
    m->daemon = d;
    m->handle = new_handle(d);
    d->models[d->model_count++] = m;
    m->metrics->daemon = d->metrics;
    m->metrics->place = model_place(m->handle);
    memory_registered(m);
}

void model_unregister(struct model *m)
{
    struct daemon *d = m->daemon;
    uint32_t i = 0;
    while (d->models[i] != m)
        i++;
    d->model_count--;
    memmove(&d->models[i], &d->models[i + 1], (d->model_count - i) * sizeof(struct model *));
    d->models[d->model_count] = NULL;
    m->handle = 0;
}

void model_fill(struct daemon *d, struct model *m, void (*on_filled)(struct model *m))
{
    m->daemon = d;
    m->fill->done = on_filled;
    m->fill->piece.fn = piece_done;
    task_init(&m->fill->task, d->tasks, init_stepped);
    task_post(&m->fill->task, SHD_OK); /* begin */
}

void model_serve(struct daemon *d, struct model *m)
{
    const uint64_t step = step_now(m->core);
    model_register(d, m);
    for (uint32_t u = 0; u < m->spec->unit_count; u++)
        board_begin(m->board, u, step);
    board_set_step(m->board, step, STEP_OPEN);
    m->ready = m->last_status == SHD_OK;
}

void model_begin(struct daemon *d, struct model *m)
{
    if (m->last_status == SHD_OK) {
        FAIL_POINT("model:ready:before");
        atomic_store_explicit(&m->ledger->head->ready, 1, memory_order_release);
        FAIL_POINT("model:ready:after");
    }
    model_serve(d, m);
    m->metrics->opened_ns = uv_hrtime();
}

struct model *model_find(struct daemon *d, const char *name)
{
    if (name[0] == '\0')
        return d->model_count == 1 ? d->models[0] : NULL;
    for (uint32_t i = 0; i < d->model_count; i++)
        if (strcmp(d->models[i]->spec->name, name) == 0)
            return d->models[i];
    return NULL;
}

int model_of(struct op *op, uint32_t handle)
{
    const struct daemon *d = op->daemon;
    uint32_t i = 0;
    while (i < d->model_count && d->models[i]->handle != handle)
        i++;
    if (handle == 0 || i == d->model_count || !d->models[i]->ready)
        return err_set(&op->err, SHD_ENOENT, "no open model with handle %" PRIu32 " here", handle);
    if (d->models[i]->use.rewinding) {
        op->reply.retry_ms = OPS_RETRY_MS;
        return err_set(&op->err, SHD_EBUSY, "model '%s' goes back to an earlier step: ask again",
                       d->models[i]->spec->name);
    }
    op->model = d->models[i];
    return SHD_OK;
}

void model_wait(struct model *m, struct op *op)
{
    op->next = m->waits.phase;
    m->waits.phase = op;
}

void model_wake(struct model *m)
{
    op_again(&m->waits.phase);
}

/* Take the requests of session s out of *list. The others stay in it, in their order. */
static struct op *take_session_ops(struct op **list, const struct session *s)
{
    struct op *gone = NULL, **gone_last = &gone;
    while (*list != NULL) {
        struct op *op = *list;
        if (op->session != s) {
            list = &op->next;
            continue;
        }
        *list = op->next;
        op->next = NULL;
        *gone_last = op;
        gone_last = &op->next;
    }
    return gone;
}

static void finish_gone(struct op *gone, const struct shd_err *why)
{
    while (gone != NULL) {
        struct op *next = gone->next;
        gone->next = NULL;
        if (gone->inbox != NULL) /* a gradient that had come by a link, and was held */
            inbox_unref(gone->inbox);
        gone->inbox = NULL;
        gone->err = *why;
        op_finish(gone, why->code);
        gone = next;
    }
}

void model_forget_session(struct model *m, const struct session *s)
{
    struct op **const lists[] = { &m->waits.phase, &m->waits.lease, &m->waits.meet,
                                  &m->waits.held };
    const struct shd_err why = { SHD_EGONE, "session ended" };
    for (size_t i = 0; i < ARRAY_SIZE(lists); i++)
        finish_gone(take_session_ops(lists[i], s), &why);
}

void model_refuse(struct model *m, const struct shd_err *why)
{
    struct op **const lists[] = { &m->waits.phase, &m->waits.lease, &m->waits.meet,
                                  &m->waits.held };
    for (size_t i = 0; i < ARRAY_SIZE(lists); i++) {
        struct op *gone = *lists[i];
        *lists[i] = NULL;
        finish_gone(gone, why);
    }
}
