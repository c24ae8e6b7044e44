/* See model.h. */
#include "daemon/model.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/daemon.h"
#include "daemon/dispatch.h"
#include "daemon/log.h"
#include "daemon/open.h"
#include "kernels/runs.h"
#include "proto/check.h"
#include "proto/sys.h"

/* MemAvailable of /proc/meminfo in bytes; UINT64_MAX when it cannot be read. */
static uint64_t memory_available_bytes(void)
{
    FILE *f = fopen("/proc/meminfo", "re");
    if (f == NULL)
        return UINT64_MAX;
    char line[128];
    uint64_t kib = UINT64_MAX / 1024;
    while (fgets(line, sizeof line, f) != NULL)
        if (sscanf(line, "MemAvailable: %" SCNu64 " kB", &kib) == 1)
            break;
    fclose(f);
    return kib * 1024;
}

static int check_memory(const struct model *m, struct shd_err *e)
{
    const uint64_t needed = shardmap_state_bytes(m->map) + shardmap_publish_bytes(m->map);
    const uint64_t available = memory_available_bytes();
    if (needed <= available)
        return SHD_OK;
    return err_set(e, SHD_ENOMEM,
                   "model '%s' needs %" PRIu64 " MiB on this owner (1 of %" PRIu32 "), %" PRIu64
                   " MiB are available: use more owners",
                   m->spec->name, needed >> 20, m->map->owners, available >> 20);
}

static int make_segments(struct model *m, struct shd_err *e)
{
    const struct shardmap *map = m->map;
    int r = segment_new("shardd-state", SEGMENT_STATE, shardmap_state_bytes(map), &m->state, e);
    if (r == SHD_OK)
        r = segment_new("shardd-publish", SEGMENT_PUBLISH, shardmap_publish_bytes(map), &m->publish,
                        e);
    if (r == SHD_OK)
        r = segment_new("shardd-board", SEGMENT_BOARD, board_bytes(m->spec->unit_count),
                        &m->board_segment, e);
    if (r == SHD_OK) {
        m->board = m->board_segment.base;
        board_init(m->board, m->spec->unit_count);
    }
    return r;
}

static int make_core(struct model *m, struct shd_err *e)
{
    const uint32_t units = m->spec->unit_count, micros = spec_returns(m->spec);
    if ((uint64_t)units * micros > STEP_CELLS_MAX)
        return err_set(e, SHD_ERANGE, "%" PRIu32 " units x %" PRIu32 " gradients exceed %" PRIu64,
                       units, micros, STEP_CELLS_MAX);
    m->core_memory = sys_malloc(step_bytes(units, micros));
    m->units = sys_calloc(units, sizeof *m->units);
    if (m->core_memory == NULL || m->units == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the step state of %" PRIu32 " units", units);
    m->core = step_init(m->core_memory, units, micros);
    for (uint32_t u = 0; u < units; u++) {
        m->units[u].model = m;
        m->units[u].unit = u;
        if (m->spec->units[u].frozen)
            step_freeze(m->core, u);
        const int r = runs_new(m->spec, u, m->map->slice[u], &m->units[u].runs,
                               &m->units[u].run_count, e);
        if (r != SHD_OK)
            return r;
    }
    return SHD_OK;
}

int model_new(struct spec *spec, uint32_t owner, uint32_t owners, struct model **ret_model,
              struct shd_err *e)
{
    struct model *m = sys_calloc(1, sizeof *m);
    if (m == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for model '%s'", spec->name);
    m->spec = spec;
    m->state = m->publish = m->board_segment = SEGMENT_CLOSED;
    m->backlog_last = &m->backlog_first;
    int r = spec_dump(spec, &m->spec_json, e);
    if (r == SHD_OK)
        r = shardmap_new(spec, owner, owners, &m->map, e);
    if (r == SHD_OK)
        r = check_memory(m, e);
    if (r == SHD_OK)
        r = make_core(m, e);
    if (r == SHD_OK)
        r = make_segments(m, e);
    if (r != SHD_OK) {
        m->spec = NULL; /* not taken */
        model_free(m);
        return r;
    }
    *ret_model = m;
    return SHD_OK;
}

void model_free(struct model *m)
{
    if (m == NULL)
        return;
    for (uint32_t u = 0; m->units != NULL && m->map != NULL && u < m->map->units; u++)
        free(m->units[u].runs);
    free(m->units);
    free(m->core_memory);
    segment_close(&m->board_segment);
    segment_close(&m->publish);
    segment_close(&m->state);
    shardmap_free(m->map);
    free(m->spec_json);
    free(m->blob);
    spec_free(m->spec);
    free(m);
}

float *model_array(const struct model *m, enum shardmap_array array, uint32_t unit)
{
    return (float *)m->state.base + shardmap_array_elem(m->map, array, unit);
}

uint8_t *model_published(const struct model *m, uint32_t unit)
{
    return (uint8_t *)m->publish.base + shardmap_publish_offset_bytes(m->map, unit);
}

/* Queue the next tensor's initial values, one piece of work at a time; after the last tensor of a
 * unit its published copy; false when nothing is left. */
static bool init_next(struct model *m)
{
    struct kern *kern = m->daemon->kern;
    struct shd_err e;
    while (m->init_tensor < m->spec->tensor_count) {
        const uint32_t t = m->init_tensor++;
        const uint32_t u = m->spec->tensors[t].unit;
        struct kern_fill fill;
        if (!runs_fill(m->spec, t, m->map->slice[u], model_array(m, SHARDMAP_PARAM, u), &fill))
            continue;
        const int r = kern->ops->fill(kern, &fill, &m->init_task.done, &e);
        CHECK(r == SHD_OK); /* arguments are ours, and the queue has room for one */
        return true;
    }
    if (m->init_tensor++ > m->spec->tensor_count || m->map->elems == 0)
        return false;
    const struct kern_cast cast = { .out = m->publish.base,
                                    .out_dtype = m->spec->publish,
                                    .in = m->state.base, /* the parameters come first */
                                    .elems = m->map->elems };
    const int r = kern->ops->cast(kern, &cast, &m->init_task.done, &e);
    CHECK(r == SHD_OK);
    return true;
}

static void init_stepped(struct task *task)
{
    struct model *m = (struct model *)((char *)task - offsetof(struct model, init_task));
    if (task->status != SHD_OK) {
        m->last_status = task->status;
        log_error("op=init model=%s status=%s", m->spec->name, status_name(task->status));
    } else if (init_next(m)) {
        return;
    }
    for (uint32_t u = 0; u < m->spec->unit_count; u++)
        board_publish(m->board, u, 0);
    board_set_step(m->board, 0, STEP_OPEN);
    m->ready = m->last_status == SHD_OK;
    open_model_ready(m);
}

void model_start(struct daemon *d, struct model *m)
{
    CHECK(d->model_count < DAEMON_MODELS_MAX);
    m->daemon = d;
    d->models[d->model_count] = m;
    m->handle = ++d->model_count;
    task_init(&m->init_task, d->tasks, init_stepped);
    task_post(&m->init_task, SHD_OK); /* begin */
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

void model_wait(struct model *m, struct op *op)
{
    op->next = m->waiting;
    m->waiting = op;
}

void model_wake(struct model *m)
{
    struct op *op = m->waiting;
    m->waiting = NULL; /* those who must wait on join a new list */
    while (op != NULL) {
        struct op *next = op->next;
        op->next = NULL;
        dispatch_again(op);
        op = next;
    }
}

void model_forget_session(struct model *m, const struct session *s)
{
    struct op *op = m->waiting, *gone = NULL;
    m->waiting = NULL;
    while (op != NULL) {
        struct op *next = op->next;
        struct op **list = op->session == s ? &gone : &m->waiting;
        op->next = *list;
        *list = op;
        op = next;
    }
    while (gone != NULL) {
        struct op *next = gone->next;
        gone->next = NULL;
        op_finish(gone, err_set(&gone->err, SHD_EGONE, "session ended"));
        gone = next;
    }
}
