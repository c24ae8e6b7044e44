/* See norms.h.
 *
 * A cell is its row's while it has the row's turn: rows need not be cleared. Numbers are copied
 * under a lock that is held for a few cells. */
#include "daemon/model/norms.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"

struct packed { /* a carried sum */
    uint32_t limb[FIXSUM_LIMBS];
};

struct gradient {
    uint32_t turn; /* of its row; 0: of none */
    uint32_t known;
    struct packed sum;
};

struct change {
    uint32_t turn, known;
    struct packed update, weight;
};

struct row {
    uint64_t step; /* plus 1; 0: of none */
    uint32_t turn;
    struct norms_step of; /* of gradients alone */
};

struct norms {
    _Atomic uint32_t refs;
    uint32_t units, steps, changed_steps;      /* rows of each ring */
    pthread_mutex_t mutex;                     /* guards the rest */
    uint32_t turn;                             /* the last row's that was begun */
    struct row *rows, *changed_rows;           /* owned, [steps], [changed_steps] */
    struct gradient *gradients;                /* owned, [steps][units] */
    struct change *changes;                    /* owned, [changed_steps][units] */
    struct kern_change running[NORMS_AT_ONCE]; /* the loop's and the kernels' */
    bool taken[NORMS_AT_ONCE];                 /* the loop's */
};

static uint32_t rows_of(uint32_t units, uint64_t cell_bytes)
{
    const uint64_t steps = NORMS_BYTES_MAX / (cell_bytes * (units > 0 ? units : 1));
    return steps < NORMS_STEPS_MIN   ? NORMS_STEPS_MIN
           : steps > NORMS_STEPS_MAX ? NORMS_STEPS_MAX
                                     : (uint32_t)steps;
}

struct norms *norms_new(uint32_t units)
{
    struct norms *n = sys_calloc(1, sizeof *n);
    if (n == NULL)
        return NULL;
    atomic_init(&n->refs, 1);
    pthread_mutex_init(&n->mutex, NULL);
    n->units = units;
    n->steps = rows_of(units, sizeof *n->gradients);
    n->changed_steps = n->steps / NORMS_EVERY + 1;
    n->rows = sys_calloc(n->steps, sizeof *n->rows);
    n->changed_rows = sys_calloc(n->changed_steps, sizeof *n->changed_rows);
    n->gradients = sys_calloc((size_t)n->steps * units + 1, sizeof *n->gradients);
    n->changes = sys_calloc((size_t)n->changed_steps * units + 1, sizeof *n->changes);
    if (n->rows != NULL && n->changed_rows != NULL && n->gradients != NULL && n->changes != NULL)
        return n;
    norms_unref(n);
    return NULL;
}

struct norms *norms_ref(struct norms *n)
{
    atomic_fetch_add_explicit(&n->refs, 1, memory_order_relaxed);
    return n;
}

void norms_unref(struct norms *n)
{
    if (n == NULL || atomic_fetch_sub_explicit(&n->refs, 1, memory_order_acq_rel) > 1)
        return;
    pthread_mutex_destroy(&n->mutex);
    free(n->rows);
    free(n->changed_rows);
    free(n->gradients);
    free(n->changes);
    free(n);
}

/* -- Writing ------------------------------------------------------------------------------------
 */

static void pack(struct packed *to, const struct fixsum *sum)
{
    CHECK(fixsum_is_carried(sum));
    for (uint32_t i = 0; i < FIXSUM_LIMBS; i++)
        to->limb[i] = (uint32_t)sum->limb[i];
}

/* The step's row, which is begun if it is another's. */
static struct row *row_for(struct norms *n, struct row *rows, uint32_t count, uint64_t step)
{
    struct row *row = &rows[step % count];
    if (row->step != step + 1) {
        n->turn += n->turn == UINT32_MAX ? 2 : 1; /* 0 is no row's */
        *row = (struct row){ .step = step + 1, .turn = n->turn };
    }
    return row;
}

void norms_put_gradient(struct norms *n, const struct norms_step *step, uint32_t unit,
                        const struct kern_sum *sum)
{
    CHECK(unit < n->units);
    pthread_mutex_lock(&n->mutex);
    struct row *row = row_for(n, n->rows, n->steps, step->step);
    struct gradient *g = &n->gradients[(uint64_t)(row - n->rows) * n->units + unit];
    row->of = *step;
    g->turn = row->turn;
    g->known = sum->finite ? NORMS_FINITE : NORMS_NOT_FINITE;
    pack(&g->sum, &sum->sum);
    pthread_mutex_unlock(&n->mutex);
}

static uint64_t changed_index(uint64_t step)
{
    return step / NORMS_EVERY;
}

struct kern_change *norms_take_change(struct norms *n, uint64_t step)
{
    for (uint32_t i = 0; step % NORMS_EVERY == 0 && i < NORMS_AT_ONCE; i++) {
        if (n->taken[i])
            continue;
        n->taken[i] = true;
        n->running[i] = (struct kern_change){ .update.finite = true,
                                              .weight.finite = true,
                                              .whole = true };
        return &n->running[i];
    }
    return NULL;
}

void norms_put_change(struct norms *n, uint64_t step, uint32_t unit, struct kern_change *change)
{
    CHECK(unit < n->units && change >= n->running && change < n->running + NORMS_AT_ONCE);
    n->taken[change - n->running] = false;
    if (!change->whole)
        return;
    pthread_mutex_lock(&n->mutex);
    struct row *row = row_for(n, n->changed_rows, n->changed_steps, changed_index(step));
    struct change *c = &n->changes[(uint64_t)(row - n->changed_rows) * n->units + unit];
    c->turn = row->turn;
    c->known = change->update.finite && change->weight.finite ? NORMS_FINITE : NORMS_NOT_FINITE;
    pack(&c->update, &change->update.sum);
    pack(&c->weight, &change->weight.sum);
    pthread_mutex_unlock(&n->mutex);
}

void norms_forget(struct norms *n, uint64_t from)
{
    pthread_mutex_lock(&n->mutex);
    for (uint32_t i = 0; i < n->steps; i++)
        if (n->rows[i].step > from)
            n->rows[i].step = 0;
    for (uint32_t i = 0; i < n->changed_steps; i++)
        if (n->changed_rows[i].step > 0 && (n->changed_rows[i].step - 1) * NORMS_EVERY >= from)
            n->changed_rows[i].step = 0;
    pthread_mutex_unlock(&n->mutex);
}

/* -- Looking ------------------------------------------------------------------------------------
 */

uint32_t norms_steps(const struct norms *n)
{
    return n->steps;
}

bool norms_get_step(struct norms *n, uint64_t step, struct norms_step *ret_step)
{
    pthread_mutex_lock(&n->mutex);
    const struct row *row = &n->rows[step % n->steps];
    const bool there = row->step == step + 1;
    if (there)
        *ret_step = row->of;
    pthread_mutex_unlock(&n->mutex);
    return there;
}

static void unpack(struct fixsum *to, const struct packed *from)
{
    fixsum_init(to);
    for (uint32_t i = 0; i < FIXSUM_LIMBS; i++)
        to->limb[i] = from->limb[i];
}

static void get_cell(const struct norms *n, uint64_t step, uint32_t unit, struct norms_cell *cell)
{
    const struct row *row = &n->rows[step % n->steps],
                     *changed = &n->changed_rows[changed_index(step) % n->changed_steps];
    const struct gradient *g = &n->gradients[(uint64_t)(row - n->rows) * n->units + unit];
    const struct change *c = &n->changes[(uint64_t)(changed - n->changed_rows) * n->units + unit];
    *cell = (struct norms_cell){ .gradient = NORMS_UNKNOWN };
    if (row->step == step + 1 && g->turn == row->turn) {
        cell->gradient = (enum norms_known)g->known;
        unpack(&cell->grad, &g->sum);
    }
    if (step % NORMS_EVERY == 0 && changed->step == changed_index(step) + 1 &&
        c->turn == changed->turn) {
        cell->change = (enum norms_known)c->known;
        unpack(&cell->update, &c->update);
        unpack(&cell->weight, &c->weight);
    }
}

void norms_get_cells(struct norms *n, uint64_t step, uint32_t first, uint32_t count,
                     struct norms_cell *ret_cells)
{
    CHECK(first <= n->units && count <= n->units - first);
    pthread_mutex_lock(&n->mutex);
    for (uint32_t i = 0; i < count; i++)
        get_cell(n, step, first + i, &ret_cells[i]);
    pthread_mutex_unlock(&n->mutex);
}
