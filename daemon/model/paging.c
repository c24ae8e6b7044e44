/* See paging.h. */
#include "daemon/model/paging.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "daemon/base/homes.h"
#include "daemon/base/keeper.h"
#include "daemon/base/pager.h"
#include "daemon/base/state.h"
#include "daemon/base/task.h"
#include "daemon/model/model.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/owner_bytes.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec.h"

#define PASSED_BYTES (UINT64_C(64) << 20) /* of what is passed over, to be written back at once */
#define AHEAD_UNITS  2u
#define RANGES_MAX   4u /* arrays of a unit: parameters, two moments, their average */

enum { PART_SUM, PART_KEPT, PARTS };

struct list { /* first: the next to go */
    struct part *first, *last;
};

struct part {         /* of a unit */
    struct task task; /* of its being given up */
    struct paging *paging;
    uint64_t bytes; /* 0: the unit has none */
    uint32_t users; /* kernels that work on it, or are to */
    bool in;        /* memory; then it has users or is on a list */
    bool going;     /* being given up, although it may be in again */
    struct list *on;
    struct part *before, *after;
};

struct paging {
    struct model *model;
    uint64_t window_bytes; /* of the next two together */
    uint64_t in_bytes, going_bytes;
    uint32_t going, users; /* parts of which completions are to come */
    struct list over, rest;
    _Atomic uint64_t passed_bytes;
    struct part parts[]; /* [units * PARTS] */
};

/* For /status. */
static void count(struct paging *g)
{
    g->model->use.paged_bytes = g->in_bytes + g->going_bytes;
}

static struct pager *pager_of(const struct paging *g)
{
    return homes_pager(g->model->kept.keeper->homes);
}

/* -- Lists --------------------------------------------------------------------------------------
 */

static void append(struct list *l, struct part *p)
{
    CHECK(p->on == NULL);
    p->on = l;
    p->before = l->last;
    p->after = NULL;
    *(l->last != NULL ? &l->last->after : &l->first) = p;
    l->last = p;
}

static void take_out(struct part *p)
{
    struct list *l = p->on;
    if (l == NULL)
        return;
    *(p->before != NULL ? &p->before->after : &l->first) = p->after;
    *(p->after != NULL ? &p->after->before : &l->last) = p->before;
    p->on = NULL;
}

/* -- Parts --------------------------------------------------------------------------------------
 */

static struct part *part_of(struct paging *g, uint32_t unit, int kind)
{
    return &g->parts[(uint64_t)unit * PARTS + (unsigned)kind];
}

struct range { /* of the segment */
    uint64_t at, bytes;
};

static struct range range_of(const struct model *m, uint32_t array, uint32_t unit)
{
    return (struct range){ shardmap_array_elem(m->map, array, unit) * sizeof(float),
                           shardmap_array_bytes(m->map, array, unit) };
}

/* Where a part lies in the segment, a range of the unit's slice in each array. */
static uint32_t ranges_of(const struct model *m, uint32_t unit, int kind,
                          struct range ret[RANGES_MAX])
{
    const struct spec *spec = m->spec;
    uint32_t count = 0;
    if (m->map->slice[unit].elems == 0)
        return 0;
    if (kind == PART_SUM && spec->units[unit].frozen)
        return 0;
    if (kind == PART_SUM) {
        ret[count++] = range_of(m, SHARDMAP_ACC, unit);
        return count;
    }
    ret[count++] = range_of(m, SHARDMAP_PARAM, unit);
    for (uint32_t moment = 0; moment < spec_unit_moments(spec, unit); moment++)
        ret[count++] = range_of(m, SHARDMAP_M + moment, unit);
    if (spec_unit_ema(spec, unit))
        ret[count++] = range_of(m, spec_ema_array(spec), unit);
    return count;
}

static uint64_t part_bytes(const struct model *m, uint32_t unit, int kind)
{
    struct range ranges[RANGES_MAX];
    uint64_t bytes = 0;
    const uint32_t count = ranges_of(m, unit, kind, ranges);
    for (uint32_t i = 0; i < count; i++)
        bytes += ranges[i].bytes;
    return bytes;
}

static void gone(struct task *task)
{
    struct part *p = (struct part *)((char *)task - offsetof(struct part, task));
    p->going = false;
    p->paging->going_bytes -= p->bytes;
    p->paging->going--;
    count(p->paging);
}

static void give_up(struct paging *g, struct part *p)
{
    struct model *m = g->model;
    const uint64_t index = (uint64_t)(p - g->parts);
    const uint32_t unit = (uint32_t)(index / PARTS);
    struct range ranges[RANGES_MAX];
    const uint32_t count = ranges_of(m, unit, (int)(index % PARTS), ranges);
    take_out(p);
    p->in = false;
    p->going = true;
    g->in_bytes -= p->bytes;
    g->going_bytes += p->bytes;
    g->going++;
    task_init(&p->task, m->daemon->tasks, gone);
    for (uint32_t i = 0; i < count; i++)
        pager_behind(pager_of(g), &m->state, ranges[i].at, ranges[i].bytes,
                     i + 1 == count ? &p->task.done : NULL);
}

/* Give up what is on a list until no more than this is in memory. */
static void trim(struct paging *g, struct list *l, uint64_t bytes)
{
    struct part *next;
    for (struct part *p = l->first; p != NULL && g->in_bytes > bytes; p = next) {
        next = p->after;
        if (!p->going)
            give_up(g, p);
    }
}

static void bring(struct paging *g, uint32_t unit, int kind)
{
    struct part *p = part_of(g, unit, kind);
    struct range ranges[RANGES_MAX];
    const uint32_t count = ranges_of(g->model, unit, kind, ranges);
    if (p->in)
        return;
    p->in = true;
    g->in_bytes += p->bytes;
    for (uint32_t i = 0; i < count; i++)
        pager_ahead(pager_of(g), &g->model->state, ranges[i].at, ranges[i].bytes);
}

static uint64_t missing_bytes(struct paging *g, uint32_t unit, bool all)
{
    const struct part *sum = part_of(g, unit, PART_SUM), *kept = part_of(g, unit, PART_KEPT);
    return (sum->in ? 0 : sum->bytes) + (!all || kept->in ? 0 : kept->bytes);
}

static bool has_room(const struct paging *g, uint64_t bytes)
{
    return g->in_bytes + g->going_bytes + bytes <= g->window_bytes;
}

/* Those that are updated next, as far as there is room for them now. */
static void read_ahead(struct paging *g, uint32_t unit)
{
    uint32_t found = 0;
    for (uint32_t u = unit + 1; u < g->model->map->units && found < AHEAD_UNITS; u++) {
        if (part_of(g, u, PART_SUM)->bytes == 0)
            continue; /* nothing is updated */
        found++;
        if (!has_room(g, missing_bytes(g, u, /* all= */ true)))
            return;
        for (int kind = 0; kind < PARTS; kind++) {
            struct part *p = part_of(g, u, kind);
            const bool was_in = p->in;
            bring(g, u, kind);
            if (!was_in)
                append(&g->rest, p);
        }
    }
}

int paging_begin(struct model *m, uint32_t unit, bool all, struct shd_err *e)
{
    struct paging *g = m->kept.paging;
    if (g == NULL)
        return SHD_OK;
    const uint64_t missing = missing_bytes(g, unit, all);
    if (missing > 0 && !has_room(g, missing)) {
        const uint64_t half = g->window_bytes / 2;
        trim(g, &g->over, half > missing ? half - missing : 0);
        trim(g, &g->rest, half > missing ? half - missing : 0);
        if (g->going > 0 || g->users > 0)
            return err_set(e, SHD_EBUSY, "pages of the state are being written back");
    }
    for (int kind = PART_SUM; kind <= (all ? PART_KEPT : PART_SUM); kind++) {
        struct part *p = part_of(g, unit, kind);
        bring(g, unit, kind);
        take_out(p);
        p->users++;
        g->users++;
    }
    if (all)
        read_ahead(g, unit);
    count(g);
    return SHD_OK;
}

void paging_done(struct model *m, uint32_t unit, bool all, bool over)
{
    struct paging *g = m->kept.paging;
    if (g == NULL)
        return;
    for (int kind = PART_SUM; kind <= (all ? PART_KEPT : PART_SUM); kind++) {
        struct part *p = part_of(g, unit, kind);
        CHECK(p->users > 0 && g->users > 0);
        g->users--;
        if (--p->users == 0)
            append(over ? &g->over : &g->rest, p);
    }
    trim(g, &g->over, g->window_bytes / 2);
}

void paging_passed(struct model *m, uint64_t bytes)
{
    struct paging *g = m->kept.paging;
    if (g == NULL)
        return;
    if (atomic_fetch_add(&g->passed_bytes, bytes) + bytes < PASSED_BYTES)
        return;
    atomic_store(&g->passed_bytes, 0);
    pager_behind(pager_of(g), &m->state, 0, m->state.bytes, /* done= */ NULL);
}

/* -----------------------------------------------------------------------------------------------
 */

int paging_new(struct model *m, struct shd_err *e)
{
    const uint64_t parts = (uint64_t)m->map->units * PARTS;
    if (!m->state.file)
        return SHD_OK;
    struct paging *g = sys_calloc(1, sizeof *g + parts * sizeof *g->parts);
    if (g == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the pages of %u units", m->map->units);
    g->model = m;
    g->window_bytes = owner_window_bytes(m->map);
    for (uint64_t i = 0; i < parts; i++) {
        const uint32_t unit = (uint32_t)(i / PARTS);
        g->parts[i].paging = g;
        g->parts[i].bytes = part_bytes(m, unit, (int)(i % PARTS));
    }
    m->kept.paging = g;
    return SHD_OK;
}

void paging_free(struct model *m)
{
    free(m->kept.paging);
    m->kept.paging = NULL;
}

bool paging_is_idle(const struct model *m)
{
    return m->kept.paging == NULL || m->kept.paging->going == 0;
}
