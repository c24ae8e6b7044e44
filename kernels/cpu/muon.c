/* See muon.h. */
#include "kernels/cpu/muon.h"

#include <math.h>
#include <stdatomic.h>

#include "kernels/cpu/queue.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/spec/layout.h"

static const struct kern_change no_change = { .update.finite = true,
                                              .weight.finite = true,
                                              .whole = true };

static const struct cpu_isa *widest(const struct cpu_thread *t)
{
    return t->kern->timed.isa[CHOICE_WIDEST];
}

static int muon_begin(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    (void)op, (void)t, (void)r;
    return SHD_OK; /* of nothing: the leader then asks what is next */
}

static int job_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range tasks)
{
    (void)op;
    widest(t)->muon(&t->kern->muon.job, tasks);
    return SHD_OK;
}

static int direction_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    (void)op;
    widest(t)->lamb(&t->kern->muon.job, r, &t->change);
    return SHD_OK;
}

static int adafactor_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range tasks)
{
    (void)op;
    widest(t)->adafactor(&t->kern->muon.job, tasks);
    return SHD_OK;
}

static int adafactor_update_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    (void)op;
    widest(t)->adafactor_direction(&t->kern->muon.job, r, &t->change);
    return SHD_OK;
}

static int norm_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    (void)op;
    const struct muon_job *job = &t->kern->muon.job;
    widest(t)->sumsq(&(struct kern_sumsq){ .x = job->x, .elems = job->room.elems }, r, &t->sum);
    return SHD_OK;
}

/* Of rows and of SUM_LANES columns of each matrix; or of blocks of what is none. */
static uint64_t squares_tasks(const struct kern_matrix *m)
{
    const uint64_t rows = m->batch * m->rows;
    if (rows == 0)
        return (m->cols + SHD_BLOCK_ELEMS - 1) / SHD_BLOCK_ELEMS;
    return (rows + MUON_TASK_ROWS - 1) / MUON_TASK_ROWS +
           m->batch * ((m->cols + MUON_TASK_COLS - 1) / MUON_TASK_COLS);
}

uint64_t muon_tasks(const struct muon_job *job)
{
    const struct muon_product *p = &job->product;
    const uint64_t down = (p->rows + MUON_TILE - 1) / MUON_TILE;
    const uint64_t across = (p->cols + MUON_TILE - 1) / MUON_TILE;
    switch (job->pass) {
    case MUON_GRAM:
    case MUON_POLYNOMIAL:
        return down * (down + 1) / 2;
    case MUON_MULTIPLY:
        return down * across;
    case MUON_SQUARES:
        return squares_tasks(job->shape);
    case MUON_FACTOR: /* what is no matrix has nothing to divide by */
        return job->shape->rows > 0 ? job->shape->batch : 0;
    default:
        return (job->room.rows + MUON_TASK_ROWS - 1) / MUON_TASK_ROWS;
    }
}

/* -- The passes over elements ------------------------------------------------------------------ */

/* An update of elements, which is what is asked but for what the caller then changes. */
static struct kern_update *elements(struct muon_run *run, struct cpu_op *op)
{
    struct kern_update *u = &op->work.op.update;
    *u = run->asked;
    u->change = NULL;
    op->run = run->update;
    op->chunk = KERN_CHUNK_ELEMS;
    op->work.count = u->elems;
    op->work.sum = NULL;
    op->work.change = NULL;
    return u;
}

static void begin_others(struct muon_run *run, struct cpu_op *op)
{
    struct kern_update *u = elements(run, op);
    u->ema.average = NULL;
    if (run->change == NULL)
        return;
    run->others = no_change;
    u->change = op->work.change = &run->others;
}

/* The chunk words of a pass over whole tensors. Adafactor's, which has a slice alone, are the
 * first. */
enum { WORDS_MOMENTUM, WORDS_MOMENTS, WORDS_PARAMS };

static struct kern_update *wholes(struct muon_run *run, struct cpu_op *op, uint32_t words)
{
    struct kern_update *u = elements(run, op);
    u->runs = u->whole.runs;
    u->run_count = u->whole.count;
    u->trail.first_chunk = u->whole.first_chunk + words * kern_trail_chunks(u->elems);
    return u;
}

static float *out_of(const struct kern_update *u)
{
    return u->whole.scratch + whole_head_elems(u->whole.count);
}

/* In the parameters' place the momentum, of LAMB's both moments in those of parameters and
 * momentum; published is that where nobody reads. */
static void begin_moments(struct muon_run *run, struct cpu_op *op)
{
    const bool lamb = run->pass == MUON_MOMENTS;
    struct kern_update *u = wholes(run, op, lamb ? WORDS_MOMENTS : WORDS_MOMENTUM);
    u->kind = u->whole.only = lamb ? SPEC_LAMB : SPEC_MUON;
    u->param = run->asked.m;
    u->m = run->asked.v;
    u->publish = out_of(u);
    u->publish_dtype = SHD_F32;
    u->ema.average = NULL;
}

/* Adafactor's, which lie among the parameters; the means of squares are in the gradient's place. */
static void begin_statistics(struct muon_run *run, struct cpu_op *op)
{
    struct kern_update *u = wholes(run, op, WORDS_MOMENTUM);
    u->kind = SPEC_MUON;
    u->runs = u->whole.statistics;
    u->grad = out_of(u);
    u->grad_scale = 1; /* they are of scaled ones */
}

static struct kern_whole_head *head_of(const struct kern_update *u)
{
    return (void *)u->whole.scratch;
}

static struct kern_rates *rates_of(const struct kern_update *u)
{
    return (void *)((uint8_t *)u->whole.scratch + WHOLE_HEAD_BYTES);
}

_Static_assert(sizeof(struct kern_rates) <= WHOLE_RATES_BYTES, "there is room for them");
_Static_assert(sizeof(struct kern_whole_head) <= WHOLE_HEAD_BYTES, "and for this");

/* A predecessor had all that the last pass goes by. */
static bool is_known(const struct kern_update *u)
{
    const struct kern_whole_head *head = head_of(u);
    return u->trail.area != NULL &&
           atomic_load_explicit(&head->op, memory_order_relaxed) == u->trail.op &&
           head->first_chunk == u->whole.first_chunk;
}

/* Nothing is known of this operation, until all is. */
static void forget(const struct kern_update *u)
{
    atomic_store_explicit(&head_of(u)->op, 0, memory_order_relaxed);
    atomic_signal_fence(memory_order_seq_cst);
}

static void begin_params(struct muon_run *run, struct cpu_op *op)
{
    struct kern_update *u = wholes(run, op, WORDS_PARAMS);
    struct kern_whole_head *head = head_of(u);
    head->first_chunk = u->whole.first_chunk;
    if (u->trail.area != NULL)
        atomic_store_explicit(&head->op, u->trail.op, memory_order_release);
    FAIL_POINT("kern:known");
    u->kind = SPEC_MUON; /* LAMB's last line is the same */
    u->grad = out_of(u);
    u->whole.rates = rates_of(u);
    u->change = op->work.change = run->change;
    if (u->whole.statistics != NULL) /* what a change is of ends before them, at a block */
        op->work.count = u->whole.statistics[0].first_elem;
}

/* What all of it came to: the parameters' pass has seen all of them, as they are now. */
static void end(struct muon_run *run, struct cpu_op *op)
{
    struct kern_change *change = run->change;
    op->work.change = change;
    if (change == NULL || run->asked.run_count == 0)
        return;
    fixsum_merge(&change->update.sum, &run->others.update.sum);
    change->update.finite = change->update.finite && run->others.update.finite;
    change->whole = change->whole && run->others.whole;
}

/* -- The passes over a matrix ------------------------------------------------------------------ */

static void begin_tensor(struct muon_run *run)
{
    const struct kern_update *u = &run->asked;
    const struct kern_run *place = &u->whole.runs[run->matrix];
    const struct kern_matrix *matrix = &u->whole.matrices[run->matrix];
    const struct kern_hyper *hyper = &u->hypers[place->hyper];
    struct muon_job job = { .room = muon_room(matrix->rows, matrix->cols),
                            .shape = matrix,
                            .grad = u->grad + place->first_elem,
                            .grad_scale = u->grad_scale,
                            .hyper = &hyper->muon,
                            .x = out_of(u) + u->elems,
                            .out = out_of(u) + place->first_elem,
                            .elems = place->elems };
    if (u->m != NULL) /* Adafactor has none */
        job.m = u->m + place->first_elem;
    job.y = job.x + job.room.elems;
    job.gram = job.y + job.room.elems;
    job.poly = job.gram + job.room.gram_elems;
    if (matrix->kind == SPEC_ADAFACTOR) {
        const uint64_t first = u->whole.statistics[run->matrix].first_elem;
        job.p = u->param + place->first_elem;
        job.statistics = u->param + first;
        job.means = out_of(u) + first;
        job.eps1 = hyper->adafactor.eps1;
        job.eps1_square = hyper->adafactor.eps1_square;
    } else if (matrix->kind == SPEC_LAMB) {
        job.p = u->param + place->first_elem;
        job.v = u->v + place->first_elem;
        job.rates = kern_rates_of(SPEC_LAMB, hyper, u->grad_scale);
    } else {
        rates_of(u)[run->matrix] = kern_muon_rates(&hyper->muon, matrix->ratio);
    }
    run->job = job;
    run->step = 0;
}

/* Adafactor's: relative to the root mean square of the parameters, and clipped to one of d. */
static struct kern_rates adafactor_rates(const struct kern_adafactor *h, uint64_t elems,
                                         double update, double weight)
{
    const double root = sqrt((double)elems), size = weight / root, over = update / (root * h->d);
    const double alpha = (size < h->eps2 ? h->eps2 : size) * h->rho;
    return (struct kern_rates){ .scale = 1,
                                .keep = h->keep,
                                .rate = (float)(-alpha / (over < 1 ? 1 : over)) };
}

/* Norms of the whole tensor; one that is 0 leaves LAMB's rate as it is. */
static void end_direction(struct muon_run *run)
{
    const struct kern_update *u = &run->asked;
    const float lr = u->hypers[u->whole.runs[run->matrix].hyper].lr;
    struct kern_change *n = &run->norms;
    fixsum_carry(&n->update.sum);
    fixsum_carry(&n->weight.sum);
    const double update = n->update.finite ? sqrt(fixsum_value(&n->update.sum)) : (double)NAN;
    const double weight = n->weight.finite ? sqrt(fixsum_value(&n->weight.sum)) : (double)NAN;
    const uint32_t i = run->matrix;
    if (u->whole.matrices[i].kind == SPEC_ADAFACTOR) {
        const struct kern_hyper *h = &u->hypers[u->whole.runs[i].hyper];
        rates_of(u)[i] = adafactor_rates(&h->adafactor, u->whole.runs[i].elems, update, weight);
        return;
    }
    const double trust = update == 0 || weight == 0 ? 1 : weight / update;
    rates_of(u)[run->matrix] = (struct kern_rates){ .scale = 1,
                                                    .keep = 1,
                                                    .rate = (float)-((double)lr * trust) };
}

static float divisor_of(const struct kern_sum *sum, float eps)
{
    struct fixsum carried = sum->sum;
    fixsum_carry(&carried);
    const float norm = sum->finite ? (float)sqrt(fixsum_value(&carried)) : (float)NAN;
    return norm < eps ? eps : norm;
}

static struct muon_product product_of(const struct muon_job *job)
{
    const struct muon_room *room = &job->room;
    const float *c = job->hyper->coefficients;
    struct muon_product p = { .a = job->x,
                              .b = job->x,
                              .c = job->gram,
                              .rows = room->rows,
                              .cols = room->rows,
                              .depth = room->cols,
                              .a_stride = room->stride,
                              .b_stride = room->stride,
                              .c_stride = room->gram_stride,
                              .transposed = true,
                              .symmetric = true };
    if (job->pass == MUON_GRAM)
        return p;
    p.transposed = false;
    p.depth = room->rows;
    p.a_stride = room->gram_stride;
    if (job->pass == MUON_POLYNOMIAL) {
        p.a = p.b = p.add = job->gram;
        p.b_stride = room->gram_stride;
        p.c = job->poly;
        p.scale = c[2];
        p.add_scale = c[1];
        return p;
    }
    p.a = job->poly;
    p.add = job->x;
    p.c = job->y;
    p.cols = room->cols;
    p.c_stride = room->stride;
    p.scale = 1;
    p.add_scale = c[0];
    p.symmetric = false;
    return p;
}

static void begin_job(struct muon_run *run, struct cpu_op *op)
{
    struct muon_job *job = &run->job;
    job->pass = run->pass;
    if (run->pass >= MUON_GRAM && run->pass <= MUON_MULTIPLY)
        job->product = product_of(job);
    op->run = job_run;
    op->chunk = 1;
    op->work.count = muon_tasks(job);
    op->work.sum = NULL;
    op->work.change = NULL;
    if (run->pass == MUON_SQUARES || run->pass == MUON_FACTOR)
        op->run = adafactor_run;
    if (run->pass == MUON_DIRECTION || run->pass == MUON_UPDATE) {
        run->norms = no_change;
        op->run = run->pass == MUON_UPDATE ? adafactor_update_run : direction_run;
        op->chunk = KERN_CHUNK_ELEMS;
        op->work.count = job->elems;
        op->work.change = &run->norms;
    }
    if (run->pass != MUON_NORM)
        return;
    run->norm = (struct kern_sum){ .finite = true };
    fixsum_init(&run->norm.sum);
    op->run = norm_run;
    op->chunk = KERN_CHUNK_ELEMS;
    op->work.count = job->room.elems;
    op->work.sum = &run->norm;
}

/* -- From one to the next ---------------------------------------------------------------------- */

static bool has_kind(const struct kern_whole *w, enum spec_optimizer kind)
{
    for (uint32_t i = 0; i < w->count; i++)
        if (w->matrices[i].kind == kind)
            return true;
    return false;
}

/* The first pass over the tensor that is next, or the last one over all. */
static enum muon_pass tensor_pass(const struct muon_run *run)
{
    if (run->matrix == run->asked.whole.count)
        return MUON_PARAMS;
    if (run->asked.whole.matrices[run->matrix].kind == SPEC_ADAFACTOR)
        return MUON_FACTOR;
    return run->asked.whole.matrices[run->matrix].kind == SPEC_LAMB ? MUON_DIRECTION : MUON_MIX;
}

/* The pass behind the one that is over. */
static enum muon_pass pass_after(struct muon_run *run)
{
    const struct kern_whole *w = &run->asked.whole;
    struct muon_job *job = &run->job;
    float *const x = job->x;
    switch (run->pass) {
    case MUON_BEGIN:
        if (run->asked.run_count > 0)
            return MUON_OTHERS;
        /* fall through */
    case MUON_OTHERS:
        if (has_kind(w, SPEC_MUON))
            return MUON_MOMENTUM;
        /* fall through */
    case MUON_MOMENTUM:
        if (has_kind(w, SPEC_LAMB))
            return MUON_MOMENTS;
        /* fall through */
    case MUON_MOMENTS:
        if (w->statistics != NULL && !is_known(&run->asked))
            return MUON_SQUARES;
        /* fall through */
    case MUON_STATISTICS:
        if (is_known(&run->asked))
            return MUON_PARAMS;
        forget(&run->asked);
        return tensor_pass(run);
    case MUON_SQUARES:
        if (++run->matrix < w->count)
            return MUON_SQUARES;
        run->matrix = 0;
        return MUON_STATISTICS;
    case MUON_NORM:
        job->divisor = divisor_of(&run->norm, job->hyper->eps);
        break;
    case MUON_MULTIPLY:
        job->x = job->y;
        job->y = x;
        return ++run->step < job->hyper->steps ? MUON_GRAM : MUON_UNPACK;
    case MUON_DIRECTION:
    case MUON_UPDATE:
        end_direction(run);
        /* fall through */
    case MUON_UNPACK:
        run->matrix++;
        return tensor_pass(run);
    default:
        break;
    }
    return run->pass + 1;
}

bool muon_next(struct cpu_kern *k, struct cpu_op *op)
{
    struct muon_run *run = &k->muon;
    if (op->run == muon_begin) {
        run->pass = MUON_BEGIN;
        run->matrix = 0;
        run->asked = op->work.op.update;
        run->change = op->work.change;
    }
    FAIL_POINT("kern:pass");
    if (run->pass == MUON_PARAMS) {
        end(run, op);
        return false;
    }
    run->pass = pass_after(run);
    switch (run->pass) {
    case MUON_OTHERS:
        begin_others(run, op);
        break;
    case MUON_MOMENTUM:
    case MUON_MOMENTS:
        begin_moments(run, op);
        break;
    case MUON_PARAMS:
        begin_params(run, op);
        break;
    case MUON_STATISTICS:
        begin_statistics(run, op);
        break;
    case MUON_MIX:
    case MUON_DIRECTION:
    case MUON_SQUARES:
    case MUON_FACTOR:
        begin_tensor(run);
        begin_job(run, op);
        break;
    default:
        begin_job(run, op);
        break;
    }
    return true;
}

void muon_init(struct cpu_op *op)
{
    op->run = muon_begin;
    op->next = muon_next;
    op->chunk = 1;
    op->work.count = 0;
}
