/* model_base.c: see model_base.h. */
#include "examples/gpt/model_base.h"

#define GPT_NORM_ROWS 32
#define GPT_NORM_COLS 64

uint64_t model_blocks(uint64_t count, uint64_t block)
{
    return (count + block - 1) / block;
}

uint64_t model_min(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

real *model_stream(struct gpt *g, uint32_t layer)
{
    return layer < g->shape.layers ? g->blocks[layer].x : g->out;
}

bool model_recomputes(const struct gpt *g, uint32_t layer)
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
    n.rows = model_min(n.rows - row, GPT_NORM_ROWS);
    n.x += row * n.cols;
    n.mean += row;
    n.rstd += row;
    return n;
}

static void norm_forward_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct norm_job *job = ctx;
    const uint64_t row = (uint64_t)task * GPT_NORM_ROWS;
    const struct vec_norm n = norm_rows(job, row);
    job->vec->norm_forward(&n, job->y + row * n.cols);
}

void norm_forward(struct gpt *g, const struct vec_norm *n, real *y)
{
    struct norm_job job = { .vec = g->vec, .norm = *n, .y = y };
    pool_run(g->pool, (uint32_t)model_blocks(n->rows, GPT_NORM_ROWS), norm_forward_task, &job);
}

static void norm_backward_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct norm_job *job = ctx;
    if (task < job->row_tasks) {
        const uint64_t row = (uint64_t)task * GPT_NORM_ROWS;
        const struct vec_norm n = norm_rows(job, row);
        job->vec->norm_backward(&n, job->dy + row * n.cols, job->dx + row * n.cols);
        return;
    }
    const uint64_t col = (uint64_t)(task - job->row_tasks) * GPT_NORM_COLS;
    job->vec->norm_params(&job->norm, job->dy, col, model_min(job->norm.cols - col, GPT_NORM_COLS),
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
        .row_tasks = (uint32_t)model_blocks(n->rows, GPT_NORM_ROWS),
    };
    const uint32_t col_tasks = dweight != NULL ? (uint32_t)model_blocks(n->cols, GPT_NORM_COLS) : 0;
    pool_run(g->pool, job.row_tasks + col_tasks, norm_backward_task, &job);
}
