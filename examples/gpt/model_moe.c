/* model_moe.c: router and experts; see model_base.h.
 *
 * Each row (token) goes to one expert, the one with the largest router logit (ties: the lowest
 * number), without a limit on an expert's rows: y = mid + p[e] * mlp_e(norm2). The factor p[e], the
 * softmax probability, is how the router gets a gradient (Fedus et al., arXiv:2101.03961, section
 * 2.1). The choice itself is constant almost everywhere and has none.
 *
 * Rows are sorted by expert, ascending within one: a pure function of the logits, so tiles,
 * sums and bits do not depend on threads. The router's product stays in full precision: where a
 * row goes should not hang on how inputs are rounded.
 */
#include "examples/gpt/model_moe.h"

#include <stddef.h>
#include <string.h>

#include "examples/gpt/linear.h"
#include "examples/gpt/model_block.h"

#define MOE_ROWS 32 /* of a task */

/* -- Routing --------------------------------------------------------------------------------- */

static struct linear router_linear(const struct gpt *g, const real *params)
{
    const uint64_t *at = g->layout.at[GPT_BLOCK];
    return (struct linear){ .rows = g->rows,
                            .in = g->shape.dim,
                            .out = g->shape.experts,
                            .weight = params + at[BLOCK_ROUTER_W],
                            .bias = params + at[BLOCK_ROUTER_B],
                            .gemm = GEMM_FULL };
}

struct route_job {
    const struct gpt *g;
    struct block_acts *b;
};

/* Choose, then logits become probabilities. A NaN is never the largest: such a row goes to expert
 * 0, and its loss is NaN anyway. */
static void route_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct route_job *job = ctx;
    const uint64_t experts = job->g->shape.experts, begin = (uint64_t)task * MOE_ROWS;
    const uint64_t end = begin + model_min(job->g->rows - begin, MOE_ROWS);
    for (uint64_t row = begin; row < end; row++) {
        real *prob = job->b->moe.prob + row * experts;
        uint32_t best = 0;
        for (uint32_t x = 1; x < experts; x++)
            if (prob[x] > prob[best])
                best = x;
        job->b->moe.chosen[row] = best;
        /* With the first experts - 1 columns before the diagonal it is the whole row. */
        job->g->vec->softmax_causal(prob, (struct vec_tile){ 1, experts, experts }, experts - 1, 1);
    }
}

/* Counting sort. */
static void route_sort(const struct gpt *g, struct moe_acts *moe)
{
    const uint32_t experts = g->shape.experts;
    memset(moe->first, 0, (experts + 1) * sizeof *moe->first);
    for (uint64_t row = 0; row < g->rows; row++)
        moe->first[moe->chosen[row] + 1]++;
    for (uint32_t x = 0; x < experts; x++)
        moe->first[x + 1] += moe->first[x];
    uint32_t next[GPT_EXPERTS_MAX];
    memcpy(next, moe->first, experts * sizeof *next);
    for (uint32_t row = 0; row < g->rows; row++)
        moe->row[next[moe->chosen[row]]++] = row;
}

void router_forward(struct gpt *g, uint32_t layer, const real *params)
{
    struct block_acts *b = &g->blocks[layer];
    const struct block_arrays a = { .base = params };
    const struct linear router = router_linear(g, params);
    struct route_job job = { .g = g, .b = b };
    block_attention_forward(g, b, &a);
    g->held = layer; /* its experts' arrays, too, once they have run */
    linear_forward(g->pool, &router, b->norm2, b->moe.prob, LINEAR_PLAIN, NULL);
    pool_run(g->pool, (uint32_t)model_blocks(g->rows, MOE_ROWS), route_task, &job);
    route_sort(g, &b->moe);
}

/* dlogit[j] = dgate p[e] ((j == e) - p[j]), in place of p. */
static void router_grad_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct route_job *job = ctx;
    const uint64_t experts = job->g->shape.experts, begin = (uint64_t)task * MOE_ROWS;
    const uint64_t end = begin + model_min(job->g->rows - begin, MOE_ROWS);
    for (uint64_t row = begin; row < end; row++) {
        real *prob = job->b->moe.prob + row * experts;
        const uint32_t chosen = job->b->moe.chosen[row];
        const real scale = job->b->moe.dgate[row] * prob[chosen];
        for (uint32_t x = 0; x < experts; x++)
            prob[x] = scale * ((real)(x == chosen) - prob[x]);
    }
}

/* ln_2's output feeds the router (d1) and the row's expert (dnorm2). */
static void router_sum_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct route_job *job = ctx;
    const struct gpt *g = job->g;
    const uint64_t dim = g->shape.dim, begin = (uint64_t)task * MOE_ROWS;
    const uint64_t end = begin + model_min(g->rows - begin, MOE_ROWS);
    for (uint64_t i = begin * dim; i < end * dim; i++)
        g->d1[i] += g->dnorm2[i];
}

void router_backward(struct gpt *g, uint32_t layer, const real *params, real *grad)
{
    struct block_acts *b = &g->blocks[layer];
    const uint64_t *at = g->layout.at[GPT_BLOCK];
    const struct block_arrays a = { .base = params, .grad = grad };
    const struct vec_norm norm2 = block_norm(g, b, params, BLOCK_LN2_W);
    const struct linear router = router_linear(g, params);
    struct route_job job = { .g = g, .b = b };
    if (model_recomputes(g, layer))
        block_attention_forward(g, b, &a); /* where rows went was kept */
    g->held = MODEL_HELD_NONE;             /* backward spoils them */
    pool_run(g->pool, (uint32_t)model_blocks(g->rows, MOE_ROWS), router_grad_task, &job);
    linear_backward(g->pool, &router,
                    &(struct linear_grads){ .x = b->norm2,
                                            .dy = b->moe.prob,
                                            .dx = g->d1,
                                            .dweight = grad + at[BLOCK_ROUTER_W],
                                            .dbias = grad + at[BLOCK_ROUTER_B] });
    pool_run(g->pool, (uint32_t)model_blocks(g->rows, MOE_ROWS), router_sum_task, &job);
    norm_backward(g, &norm2, g->d1, grad + at[BLOCK_LN2_W], grad + at[BLOCK_LN2_B]);
    block_attention_backward(g, b, &a);
}

/* -- Experts --------------------------------------------------------------------------------- */

struct expert_job;
typedef void expert_row_fn(const struct expert_job *job, uint64_t packed, uint64_t row);

struct expert_job {
    struct gpt *g;
    struct block_acts *b;
    real *stream;         /* [R, C] the layer's output */
    uint32_t first, rows; /* packed */
    expert_row_fn *fn;    /* what expert_rows() does */
};

static struct expert_job expert_job(struct gpt *g, struct gpt_unit u)
{
    struct block_acts *b = &g->blocks[u.layer];
    const uint32_t first = b->moe.first[u.expert];
    return (struct expert_job){ .g = g,
                                .b = b,
                                .stream = model_stream(g, u.layer + 1),
                                .first = first,
                                .rows = b->moe.first[u.expert + 1] - first };
}

bool expert_has_rows(const struct gpt *g, struct gpt_unit u)
{
    const struct moe_acts *moe = &g->blocks[u.layer].moe;
    return moe->first[u.expert + 1] > moe->first[u.expert];
}

/* The two layers of an expert over its rows. */
struct expert_layers {
    struct linear fc, mlp;
};

static struct expert_layers expert_layers(const struct gpt *g, const real *params, uint64_t rows)
{
    const uint64_t dim = g->shape.dim, *at = g->layout.at[GPT_EXPERT];
    return (struct expert_layers){
        .fc = { .rows = rows,
                .in = dim,
                .out = 4 * dim,
                .weight = params + at[EXPERT_FC_W],
                .bias = params + at[EXPERT_FC_B],
                .gemm = g->gemm },
        .mlp = { .rows = rows,
                 .in = 4 * dim,
                 .out = dim,
                 .weight = params + at[EXPERT_MLP_W],
                 .bias = params + at[EXPERT_MLP_B],
                 .gemm = g->gemm },
    };
}

static void expert_rows_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct expert_job *job = ctx;
    const uint64_t begin = (uint64_t)task * MOE_ROWS;
    const uint64_t end = begin + model_min(job->rows - begin, MOE_ROWS);
    for (uint64_t i = begin; i < end; i++)
        job->fn(job, job->first + i, job->b->moe.row[job->first + i]);
}

/* fn for each row. */
static void expert_rows(struct expert_job *job, expert_row_fn *fn)
{
    job->fn = fn;
    pool_run(job->g->pool, (uint32_t)model_blocks(job->rows, MOE_ROWS), expert_rows_task, job);
}

static void expert_gather(const struct expert_job *job, uint64_t packed, uint64_t row)
{
    const uint64_t dim = job->g->shape.dim;
    memcpy(job->b->moe.in + packed * dim, job->b->norm2 + row * dim, dim * sizeof(real));
}

static real expert_gate(const struct expert_job *job, uint64_t row)
{
    return job->b->moe.prob[row * job->g->shape.experts + job->b->moe.chosen[row]];
}

static void expert_scatter(const struct expert_job *job, uint64_t packed, uint64_t row)
{
    const uint64_t dim = job->g->shape.dim;
    const real gate = expert_gate(job, row);
    const real *mid = job->b->mid + row * dim, *out = job->b->moe.out + packed * dim;
    for (uint64_t j = 0; j < dim; j++)
        job->stream[row * dim + j] = mid[j] + gate * out[j];
}

/* dout = gate * dy, dgate = dy . out. */
static void expert_gather_grad(const struct expert_job *job, uint64_t packed, uint64_t row)
{
    const uint64_t dim = job->g->shape.dim;
    const real gate = expert_gate(job, row);
    const real *dy = job->g->dx + row * dim, *out = job->b->moe.out + packed * dim;
    real dot = 0;
    for (uint64_t j = 0; j < dim; j++) {
        job->g->dout[packed * dim + j] = gate * dy[j];
        dot += dy[j] * out[j];
    }
    job->b->moe.dgate[row] = dot;
}

static void expert_scatter_grad(const struct expert_job *job, uint64_t packed, uint64_t row)
{
    const uint64_t dim = job->g->shape.dim;
    memcpy(job->g->dnorm2 + row * dim, job->g->d1 + packed * dim, dim * sizeof(real));
}

/* All that backward reads. */
static void expert_inner_forward(struct expert_job *job, const struct expert_layers *l)
{
    struct gpt *g = job->g;
    const uint64_t narrow = job->first * (uint64_t)g->shape.dim, wide = 4 * narrow;
    expert_rows(job, expert_gather);
    linear_forward(g->pool, &l->fc, job->b->moe.in + narrow, job->b->pre + wide, LINEAR_GELU,
                   job->b->act + wide);
    linear_forward(g->pool, &l->mlp, job->b->act + wide, job->b->moe.out + narrow, LINEAR_PLAIN,
                   NULL);
}

void expert_forward(struct gpt *g, struct gpt_unit u, const real *params)
{
    struct expert_job job = expert_job(g, u);
    const struct expert_layers l = expert_layers(g, params, job.rows);
    if (job.rows == 0)
        return;
    expert_inner_forward(&job, &l);
    expert_rows(&job, expert_scatter);
}

void expert_backward(struct gpt *g, struct gpt_unit u, const real *params, real *grad)
{
    struct expert_job job = expert_job(g, u);
    const struct expert_layers l = expert_layers(g, params, job.rows);
    const uint64_t narrow = job.first * (uint64_t)g->shape.dim, wide = 4 * narrow;
    const uint64_t *at = g->layout.at[GPT_EXPERT];
    if (job.rows == 0)
        return;
    if (model_recomputes(g, u.layer))
        expert_inner_forward(&job, &l);
    expert_rows(&job, expert_gather_grad);
    linear_backward(g->pool, &l.mlp,
                    &(struct linear_grads){ .x = job.b->act + wide,
                                            .dy = g->dout + narrow,
                                            .dx = g->d4 + wide,
                                            .pre = job.b->pre + wide,
                                            .dweight = grad + at[EXPERT_MLP_W],
                                            .dbias = grad + at[EXPERT_MLP_B] });
    linear_backward(g->pool, &l.fc,
                    &(struct linear_grads){ .x = job.b->moe.in + narrow,
                                            .dy = g->d4 + wide,
                                            .dx = g->d1 + narrow,
                                            .dweight = grad + at[EXPERT_FC_W],
                                            .dbias = grad + at[EXPERT_FC_B] });
    expert_rows(&job, expert_scatter_grad);
}
