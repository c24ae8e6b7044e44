/* model_layer.c: a layer of the model; see model_layer.h.
 *
 * An adapter (Hu et al., arXiv:2106.09685) adds (x A) B to x W: y = x W + (x A) B + bias. Its scale
 * alpha / r is 1. Backward: dB = (x A)^T dy, d(x A) = dy B^T, dA = x^T d(x A), and dx gains
 * d(x A) A^T; the frozen W gets none.
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
#include "examples/gpt/model_layer.h"

#include <stddef.h>
#include <string.h>

#include "examples/gpt/attention.h"
#include "examples/gpt/linear.h"

#define NORM_ROWS 32 /* of a task */
#define NORM_COLS 64
#define MOE_ROWS  32

/* True: the layer's forward runs again before its backward. */
static bool model_recomputes(const struct gpt *g, uint32_t layer)
{
    return g->recompute && g->held != layer;
}

/* -- Layer norm ------------------------------------------------------------------------------ */

struct norm_job {
    const struct vec_ops *vec;
    struct vec_norm norm;
    const real *dy;
    real *y, *dx, *dweight, *dbias;
    uint32_t row_tasks;
};

static struct vec_norm norm_rows(const struct norm_job *job, uint64_t row)
{
    struct vec_norm n = job->norm;
    n.rows = model_min(n.rows - row, NORM_ROWS);
    n.x += row * n.cols;
    n.mean += row;
    n.rstd += row;
    return n;
}

static void norm_forward_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct norm_job *job = ctx;
    const uint64_t row = (uint64_t)task * NORM_ROWS;
    const struct vec_norm n = norm_rows(job, row);
    job->vec->norm_forward(&n, job->y + row * n.cols);
}

void norm_forward(struct gpt *g, const struct vec_norm *n, real *y)
{
    struct norm_job job = { .vec = g->vec, .norm = *n, .y = y };
    pool_run(g->pool, model_tasks(n->rows, NORM_ROWS), norm_forward_task, &job);
}

static void norm_backward_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct norm_job *job = ctx;
    if (task < job->row_tasks) {
        const uint64_t row = (uint64_t)task * NORM_ROWS;
        const struct vec_norm n = norm_rows(job, row);
        job->vec->norm_backward(&n, job->dy + row * n.cols, job->dx + row * n.cols);
        return;
    }
    const uint64_t col = (uint64_t)(task - job->row_tasks) * NORM_COLS;
    job->vec->norm_params(&job->norm, job->dy, col, model_min(job->norm.cols - col, NORM_COLS),
                          job->dweight, job->dbias);
}

void norm_backward(struct gpt *g, const struct vec_norm *n, const real *dy, real *dweight,
                   real *dbias)
{
    struct norm_job job = {
        .vec = g->vec,
        .norm = *n,
        .dy = dy,
        .dx = g->dx,
        .dweight = dweight,
        .dbias = dbias,
        .row_tasks = model_tasks(n->rows, NORM_ROWS),
    };
    const uint32_t col_tasks = dweight != NULL ? model_tasks(n->cols, NORM_COLS) : 0;
    pool_run(g->pool, job.row_tasks + col_tasks, norm_backward_task, &job);
}

/* -- Dense blocks --------------------------------------------------------------------------- */

static struct vec_norm block_norm(const struct gpt *g, const struct block_acts *b,
                                  const real *params, enum gpt_block_tensor weight)
{
    const int first = weight == BLOCK_LN1_W;
    return (struct vec_norm){ .x = first ? b->x : b->mid,
                              .weight = params + g->layout.at[GPT_BLOCK][weight],
                              .bias = params + g->layout.at[GPT_BLOCK][weight + 1],
                              .mean = first ? b->mean1 : b->mean2,
                              .rstd = first ? b->rstd1 : b->rstd2,
                              .rows = g->rows,
                              .cols = g->shape.dim };
}

/* A block's tensor in its gradient; NULL when that is frozen. */
static real *block_grad(const struct gpt *g, const struct block_arrays *a,
                        enum gpt_block_tensor tensor)
{
    return a->grad != NULL ? a->grad + g->layout.at[GPT_BLOCK][tensor] : NULL;
}

/* g->dx += the gradient of d1 through the norm. */
static void block_norm_backward(struct gpt *g, const struct block_acts *b,
                                const struct block_arrays *a, enum gpt_block_tensor weight)
{
    const struct vec_norm norm = block_norm(g, b, a->base, weight);
    norm_backward(g, &norm, g->d1, block_grad(g, a, weight), block_grad(g, a, weight + 1));
}

static struct linear matrix_linear(const struct gpt *g, const struct block_arrays *a,
                                   const struct gpt_matrix_row *m)
{
    return (struct linear){ .rows = g->rows,
                            .in = m->in * (uint64_t)g->shape.dim,
                            .out = m->out * (uint64_t)g->shape.dim,
                            .weight = a->base + g->layout.at[GPT_BLOCK][m->weight],
                            .bias = a->base + g->layout.at[GPT_BLOCK][m->weight + 1],
                            .gemm = g->gemm,
                            .scratch = g->weight };
}

/* An adapter's factor as a layer of its own, [in, r] or [r, out]. */
static struct linear factor_linear(const struct gpt *g, const real *factor, uint64_t in,
                                   uint64_t out)
{
    return (
        struct linear){ .rows = g->rows, .in = in, .out = out, .weight = factor, .gemm = g->gemm };
}

/* x A, where there are adapters. */
static void adapter_forward(struct gpt *g, struct block_acts *b, const struct block_arrays *a,
                            enum gpt_matrix which, const real *x)
{
    const struct gpt_matrix_row *m = &gpt_matrices[which];
    if (a->low == NULL)
        return;
    const struct linear first = factor_linear(g, a->low + g->layout.at[GPT_LORA][m->low],
                                              m->in * (uint64_t)g->shape.dim, g->shape.rank);
    linear_forward(g->pool, &first, x, b->low[which], LINEAR_PLAIN, NULL);
}

static void matrix_forward(struct gpt *g, struct block_acts *b, const struct block_arrays *a,
                           enum gpt_matrix which, const real *x, real *y, enum linear_then then,
                           real *other)
{
    const struct gpt_matrix_row *m = &gpt_matrices[which];
    struct linear lin = matrix_linear(g, a, m);
    struct linear_plus plus;
    adapter_forward(g, b, a, which, x);
    if (a->low != NULL) {
        plus = (struct linear_plus){ .left = b->low[which],
                                     .right = a->low + g->layout.at[GPT_LORA][m->low + 1],
                                     .inner = g->shape.rank };
        lin.plus = &plus;
    }
    linear_forward(g->pool, &lin, x, y, then, other);
}

/* Gradients of the two factors; leaves d(x A) in g->dlow. */
static void adapter_backward(struct gpt *g, const struct block_acts *b,
                             const struct block_arrays *a, enum gpt_matrix which,
                             const struct linear_grads *io)
{
    const struct gpt_matrix_row *m = &gpt_matrices[which];
    const uint64_t *at = g->layout.at[GPT_LORA];
    const uint64_t in = m->in * (uint64_t)g->shape.dim, out = m->out * (uint64_t)g->shape.dim;
    const struct linear first = factor_linear(g, a->low + at[m->low], in, g->shape.rank);
    const struct linear second = factor_linear(g, a->low + at[m->low + 1], g->shape.rank, out);
    linear_backward(g->pool, &second,
                    &(struct linear_grads){ .x = b->low[which],
                                            .dy = io->dy,
                                            .dx = g->dlow,
                                            .dweight = a->low_grad + at[m->low + 1] });
    linear_backward(
        g->pool, &first,
        &(struct linear_grads){ .x = io->x, .dy = g->dlow, .dweight = a->low_grad + at[m->low] });
}

/* io: x, dy, dx and slope. */
static void matrix_backward(struct gpt *g, const struct block_acts *b, const struct block_arrays *a,
                            enum gpt_matrix which, struct linear_grads io)
{
    const struct gpt_matrix_row *m = &gpt_matrices[which];
    const struct linear lin = matrix_linear(g, a, m);
    struct linear_plus plus;
    io.dweight = block_grad(g, a, m->weight);
    io.dbias = block_grad(g, a, m->weight + 1);
    if (a->low != NULL) {
        adapter_backward(g, b, a, which, &io);
        plus = (struct linear_plus){ .left = g->dlow,
                                     .right = a->low + g->layout.at[GPT_LORA][m->low],
                                     .inner = g->shape.rank,
                                     .transposed = 1 };
        io.plus = &plus;
    }
    linear_backward(g->pool, &lin, &io);
}

struct attention block_attention(const struct gpt *g, const struct block_acts *b)
{
    return (struct attention){ .batch = g->batch,
                               .seq = g->shape.seq,
                               .heads = g->shape.heads,
                               .dim = g->shape.dim,
                               .qkv = b->qkv,
                               .prob = b->prob,
                               .gemm = g->gemm };
}

static void block_attention_forward(struct gpt *g, struct block_acts *b,
                                    const struct block_arrays *a)
{
    const struct vec_norm norm1 = block_norm(g, b, a->base, BLOCK_LN1_W);
    const struct vec_norm norm2 = block_norm(g, b, a->base, BLOCK_LN2_W);
    const struct attention attention = block_attention(g, b);
    norm_forward(g, &norm1, b->norm1);
    matrix_forward(g, b, a, GPT_ATTN, b->norm1, b->qkv, LINEAR_PLAIN, NULL);
    attention_forward(g->pool, &attention, b->att);
    matrix_forward(g, b, a, GPT_PROJ, b->att, b->mid, LINEAR_RESIDUAL, b->x);
    norm_forward(g, &norm2, b->norm2);
}

/* From d1, the gradient of norm2, and dx, mid's, to x's in dx. */
static void block_attention_backward(struct gpt *g, struct block_acts *b,
                                     const struct block_arrays *a)
{
    const struct attention attention = block_attention(g, b);
    block_norm_backward(g, b, a, BLOCK_LN2_W);
    matrix_backward(g, b, a, GPT_PROJ,
                    (struct linear_grads){ .x = b->att, .dy = g->dx, .dx = g->d1 });
    attention_backward(g->pool, &attention, g->d1, g->d3, g->scratch);
    matrix_backward(g, b, a, GPT_ATTN,
                    (struct linear_grads){ .x = b->norm1, .dy = g->d3, .dx = g->d1 });
    block_norm_backward(g, b, a, BLOCK_LN1_W);
}

/* The part of forward whose results backward reads, but for the last matrix's adapter. */
static void block_inner_forward(struct gpt *g, struct block_acts *b, const struct block_arrays *a)
{
    block_attention_forward(g, b, a);
    matrix_forward(g, b, a, GPT_FC, b->norm2, b->slope, LINEAR_GELU, b->act);
}

void block_forward(struct gpt *g, uint32_t layer, const struct block_arrays *a)
{
    struct block_acts *b = &g->blocks[layer];
    block_inner_forward(g, b, a);
    g->held = layer;
    matrix_forward(g, b, a, GPT_MLP, b->act, model_stream(g, layer + 1), LINEAR_RESIDUAL, b->mid);
}

void block_backward(struct gpt *g, uint32_t layer, const struct block_arrays *a)
{
    struct block_acts *b = &g->blocks[layer];
    if (model_recomputes(g, layer)) {
        block_inner_forward(g, b, a);
        adapter_forward(g, b, a, GPT_MLP, b->act);
    }
    g->held = MODEL_HELD_NONE; /* backward spoils them */
    matrix_backward(
        g, b, a, GPT_MLP,
        (struct linear_grads){ .x = b->act, .dy = g->dx, .dx = g->d4, .slope = b->slope });
    matrix_backward(g, b, a, GPT_FC,
                    (struct linear_grads){ .x = b->norm2, .dy = g->d4, .dx = g->d1 });
    block_attention_backward(g, b, a);
}

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

struct row_job;
typedef void row_fn(const struct row_job *job, uint64_t i);

/* fn for each of the rows [first, first + rows). */
struct row_job {
    struct gpt *g;
    struct block_acts *b;
    real *stream;         /* [R, C] the layer's output */
    uint32_t first, rows; /* of an expert packed ones, of the router all */
    row_fn *fn;
};

static void rows_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct row_job *job = ctx;
    const uint64_t begin = (uint64_t)task * MOE_ROWS;
    const uint64_t end = begin + model_min(job->rows - begin, MOE_ROWS);
    for (uint64_t i = begin; i < end; i++)
        job->fn(job, job->first + i);
}

static void rows_run(struct row_job *job, row_fn *fn)
{
    job->fn = fn;
    pool_run(job->g->pool, model_tasks(job->rows, MOE_ROWS), rows_task, job);
}

/* Choose, then logits become probabilities. A NaN is never the largest: such a row goes to expert
 * 0, and its loss is NaN anyway. */
static void route_row(const struct row_job *job, uint64_t row)
{
    const uint64_t experts = job->g->shape.experts;
    real *prob = job->b->moe.prob + row * experts;
    uint32_t best = 0;
    for (uint32_t x = 1; x < experts; x++)
        if (prob[x] > prob[best])
            best = x;
    job->b->moe.chosen[row] = best;
    /* With the first experts - 1 columns before the diagonal it is the whole row. */
    job->g->vec->softmax_causal(prob, (struct vec_tile){ 1, experts, experts }, experts - 1, 1);
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

void router_forward(struct gpt *g, uint32_t layer, const struct block_arrays *a)
{
    struct block_acts *b = &g->blocks[layer];
    const struct linear router = router_linear(g, a->base);
    struct row_job job = { .g = g, .b = b, .rows = (uint32_t)g->rows };
    block_attention_forward(g, b, a);
    g->held = layer; /* its experts' arrays, too, once they have run */
    linear_forward(g->pool, &router, b->norm2, b->moe.prob, LINEAR_PLAIN, NULL);
    rows_run(&job, route_row);
    route_sort(g, &b->moe);
}

/* dlogit[j] = dgate p[e] ((j == e) - p[j]), in place of p. */
static void router_grad_row(const struct row_job *job, uint64_t row)
{
    const uint64_t experts = job->g->shape.experts;
    real *prob = job->b->moe.prob + row * experts;
    const uint32_t chosen = job->b->moe.chosen[row];
    const real scale = job->b->moe.dgate[row] * prob[chosen];
    for (uint32_t x = 0; x < experts; x++)
        prob[x] = scale * ((real)(x == chosen) - prob[x]);
}

/* ln_2's output feeds the router (d1) and the row's expert (dnorm2). */
static void router_sum_row(const struct row_job *job, uint64_t row)
{
    const struct gpt *g = job->g;
    const uint64_t dim = g->shape.dim;
    for (uint64_t i = row * dim; i < (row + 1) * dim; i++)
        g->d1[i] += g->dnorm2[i];
}

void router_backward(struct gpt *g, uint32_t layer, const struct block_arrays *a)
{
    struct block_acts *b = &g->blocks[layer];
    const struct linear router = router_linear(g, a->base);
    struct row_job job = { .g = g, .b = b, .rows = (uint32_t)g->rows };
    if (model_recomputes(g, layer))
        block_attention_forward(g, b, a); /* where rows went was kept */
    g->held = MODEL_HELD_NONE;            /* backward spoils them */
    rows_run(&job, router_grad_row);
    linear_backward(g->pool, &router,
                    &(struct linear_grads){ .x = b->norm2,
                                            .dy = b->moe.prob,
                                            .dx = g->d1,
                                            .dweight = block_grad(g, a, BLOCK_ROUTER_W),
                                            .dbias = block_grad(g, a, BLOCK_ROUTER_B) });
    rows_run(&job, router_sum_row);
    block_attention_backward(g, b, a);
}

/* -- Experts --------------------------------------------------------------------------------- */

static struct row_job expert_job(struct gpt *g, struct gpt_unit u)
{
    struct block_acts *b = &g->blocks[u.layer];
    const uint32_t first = b->moe.first[u.expert];
    return (struct row_job){ .g = g,
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

/* One of an expert's two layers, over its rows; the bias is the tensor behind the weight. */
static struct linear expert_linear(const struct row_job *job, const real *params,
                                   enum gpt_expert_tensor weight)
{
    const struct gpt *g = job->g;
    const uint64_t dim = g->shape.dim, *at = g->layout.at[GPT_EXPERT];
    const bool first = weight == EXPERT_FC_W;
    return (struct linear){ .rows = job->rows,
                            .in = first ? dim : 4 * dim,
                            .out = first ? 4 * dim : dim,
                            .weight = params + at[weight],
                            .bias = params + at[weight + 1],
                            .gemm = g->gemm,
                            .scratch = g->weight };
}

static void expert_gather(const struct row_job *job, uint64_t packed)
{
    const uint64_t dim = job->g->shape.dim, row = job->b->moe.row[packed];
    memcpy(job->b->moe.in + packed * dim, job->b->norm2 + row * dim, dim * sizeof(real));
}

static real expert_gate(const struct row_job *job, uint64_t row)
{
    return job->b->moe.prob[row * job->g->shape.experts + job->b->moe.chosen[row]];
}

static void expert_scatter(const struct row_job *job, uint64_t packed)
{
    const uint64_t dim = job->g->shape.dim, row = job->b->moe.row[packed];
    const real gate = expert_gate(job, row);
    const real *mid = job->b->mid + row * dim, *out = job->b->moe.out + packed * dim;
    for (uint64_t j = 0; j < dim; j++)
        job->stream[row * dim + j] = mid[j] + gate * out[j];
}

/* dout = gate * dy, dgate = dy . out. */
static void expert_gather_grad(const struct row_job *job, uint64_t packed)
{
    const uint64_t dim = job->g->shape.dim, row = job->b->moe.row[packed];
    const real gate = expert_gate(job, row);
    const real *dy = job->g->dx + row * dim, *out = job->b->moe.out + packed * dim;
    real dot = 0;
    for (uint64_t j = 0; j < dim; j++) {
        job->g->dout[packed * dim + j] = gate * dy[j];
        dot += dy[j] * out[j];
    }
    job->b->moe.dgate[row] = dot;
}

static void expert_scatter_grad(const struct row_job *job, uint64_t packed)
{
    const uint64_t dim = job->g->shape.dim, row = job->b->moe.row[packed];
    memcpy(job->g->dnorm2 + row * dim, job->g->d1 + packed * dim, dim * sizeof(real));
}

/* The part of an expert's forward whose results backward reads. */
static void expert_inner_forward(struct row_job *job, const real *params)
{
    struct gpt *g = job->g;
    const struct linear fc = expert_linear(job, params, EXPERT_FC_W);
    const struct linear mlp = expert_linear(job, params, EXPERT_MLP_W);
    const uint64_t narrow = job->first * (uint64_t)g->shape.dim, wide = 4 * narrow;
    rows_run(job, expert_gather);
    linear_forward(g->pool, &fc, job->b->moe.in + narrow, job->b->slope + wide, LINEAR_GELU,
                   job->b->act + wide);
    linear_forward(g->pool, &mlp, job->b->act + wide, job->b->moe.out + narrow, LINEAR_PLAIN, NULL);
}

void expert_forward(struct gpt *g, struct gpt_unit u, const real *params)
{
    struct row_job job = expert_job(g, u);
    if (job.rows == 0)
        return;
    expert_inner_forward(&job, params);
    rows_run(&job, expert_scatter);
}

void expert_backward(struct gpt *g, struct gpt_unit u, const real *params, real *grad)
{
    struct row_job job = expert_job(g, u);
    const struct linear fc = expert_linear(&job, params, EXPERT_FC_W);
    const struct linear mlp = expert_linear(&job, params, EXPERT_MLP_W);
    const uint64_t narrow = job.first * (uint64_t)g->shape.dim, wide = 4 * narrow;
    const uint64_t *at = g->layout.at[GPT_EXPERT];
    if (job.rows == 0)
        return;
    if (model_recomputes(g, u.layer))
        expert_inner_forward(&job, params);
    rows_run(&job, expert_gather_grad);
    linear_backward(g->pool, &mlp,
                    &(struct linear_grads){ .x = job.b->act + wide,
                                            .dy = g->dout + narrow,
                                            .dx = g->d4 + wide,
                                            .slope = job.b->slope + wide,
                                            .dweight = grad + at[EXPERT_MLP_W],
                                            .dbias = grad + at[EXPERT_MLP_B] });
    linear_backward(g->pool, &fc,
                    &(struct linear_grads){ .x = job.b->moe.in + narrow,
                                            .dy = g->d4 + wide,
                                            .dx = g->d1 + narrow,
                                            .dweight = grad + at[EXPERT_FC_W],
                                            .dbias = grad + at[EXPERT_FC_B] });
    rows_run(&job, expert_scatter_grad);
}
