/* linear.c: see linear.h. */
#include "examples/gpt/linear.h"

#include <stddef.h>

#include "examples/gpt/gemm.h"

/* Tiles large enough that packing costs little, small enough that a 256-wide layer has several
 * per core. Part of the numerics: another size may round differently. */
#define LINEAR_TILE_ROWS 128
#define LINEAR_TILE_COLS 256
#define LINEAR_BIAS_COLS 256

/* A [rows, cols] matrix cut into tiles, numbered along the rows first. */
struct linear_grid {
    uint64_t rows, cols;
};

struct linear_tile {
    uint64_t row, col, rows, cols;
};

static uint64_t linear_blocks(uint64_t count, uint64_t block)
{
    return (count + block - 1) / block;
}

static uint32_t grid_tiles(struct linear_grid g)
{
    return (uint32_t)(linear_blocks(g.rows, LINEAR_TILE_ROWS) *
                      linear_blocks(g.cols, LINEAR_TILE_COLS));
}

static struct linear_tile grid_tile(struct linear_grid g, uint32_t index)
{
    const uint64_t down = linear_blocks(g.rows, LINEAR_TILE_ROWS);
    struct linear_tile t = { .row = index % down * LINEAR_TILE_ROWS,
                             .col = index / down * LINEAR_TILE_COLS };
    t.rows = g.rows - t.row < LINEAR_TILE_ROWS ? g.rows - t.row : LINEAR_TILE_ROWS;
    t.cols = g.cols - t.col < LINEAR_TILE_COLS ? g.cols - t.col : LINEAR_TILE_COLS;
    return t;
}

/* Add plus's tile t to y, whose rows are stride apart. */
static void linear_add(const struct linear *lin, const struct linear_plus *plus,
                       struct linear_tile t, real *y, uint64_t stride)
{
    if (plus == NULL)
        return;
    const struct gemm_in right = plus->transposed
                                     ? gemm_transposed(plus->right + t.col * plus->inner,
                                                       plus->inner)
                                     : gemm_plain(plus->right + t.col, stride);
    gemm_run(lin->gemm, (struct gemm_size){ t.rows, t.cols, plus->inner },
             gemm_plain(plus->left + t.row * plus->inner, plus->inner), right, 1, y, stride);
}

struct linear_forward_job {
    const struct linear *lin;
    const struct vec_ops *vec;
    const real *x;
    real *y, *other;
    enum linear_then then;
};

static void linear_forward_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct linear_forward_job *job = ctx;
    const struct linear *lin = job->lin;
    const struct linear_tile t = grid_tile((struct linear_grid){ lin->rows, lin->out }, task);
    const uint64_t at = t.row * lin->out + t.col;
    const struct gemm_in weight = lin->transposed
                                      ? gemm_transposed(lin->weight + t.col * lin->in, lin->in)
                                      : gemm_plain(lin->weight + t.col, lin->out);
    gemm_run(lin->gemm, (struct gemm_size){ t.rows, t.cols, lin->in },
             gemm_plain(job->x + t.row * lin->in, lin->in), weight, 0, job->y + at, lin->out);
    linear_add(lin, lin->plus, t, job->y + at, lin->out);

    const struct vec_tile tile = { t.rows, t.cols, lin->out };
    if (job->then == LINEAR_GELU)
        job->vec->bias_gelu(job->y + at, job->other + at, lin->bias + t.col, tile);
    else if (job->then == LINEAR_RESIDUAL)
        job->vec->bias_residual(job->y + at, lin->bias + t.col, job->other + at, tile);
    else if (lin->bias != NULL)
        job->vec->bias(job->y + at, lin->bias + t.col, tile);
}

void linear_forward(struct pool *pool, const struct linear *lin, const real *x, real *y,
                    enum linear_then then, real *other)
{
    struct linear_forward_job job = {
        .lin = lin, .vec = vec_pick(), .x = x, .y = y, .other = other, .then = then
    };
    pool_run(pool, grid_tiles((struct linear_grid){ lin->rows, lin->out }), linear_forward_task,
             &job);
}

struct linear_backward_job {
    const struct linear *lin;
    const struct vec_ops *vec;
    const struct linear_grads *g;
    uint32_t input_tiles, weight_tiles;
};

/* dx = dy W^T, (x gelu'). */
static void linear_input_tile(const struct linear_backward_job *job, uint32_t index)
{
    const struct linear *lin = job->lin;
    const struct linear_tile t = grid_tile((struct linear_grid){ lin->rows, lin->in }, index);
    const uint64_t at = t.row * lin->in + t.col;
    const struct gemm_in weight = lin->transposed
                                      ? gemm_plain(lin->weight + t.col, lin->in)
                                      : gemm_transposed(lin->weight + t.col * lin->out, lin->out);
    gemm_run(lin->gemm, (struct gemm_size){ t.rows, t.cols, lin->out },
             gemm_plain(job->g->dy + t.row * lin->out, lin->out), weight, 0, job->g->dx + at,
             lin->in);
    linear_add(lin, job->g->plus, t, job->g->dx + at, lin->in);
    if (job->g->pre != NULL)
        job->vec->gelu_grad(job->g->dx + at, job->g->pre + at,
                            (struct vec_tile){ t.rows, t.cols, lin->in });
}

static struct linear_grid linear_weight_grid(const struct linear *lin)
{
    return lin->transposed ? (struct linear_grid){ lin->out, lin->in }
                           : (struct linear_grid){ lin->in, lin->out };
}

/* dW = x^T dy, or dy^T x when transposed. */
static void linear_weight_tile(const struct linear_backward_job *job, uint32_t index)
{
    const struct linear *lin = job->lin;
    const struct linear_grid grid = linear_weight_grid(lin);
    const struct linear_tile t = grid_tile(grid, index);
    const real *left = lin->transposed ? job->g->dy : job->g->x;
    const real *right = lin->transposed ? job->g->x : job->g->dy;
    gemm_run(lin->gemm, (struct gemm_size){ t.rows, t.cols, lin->rows },
             gemm_transposed(left + t.row, grid.rows), gemm_plain(right + t.col, grid.cols), 0,
             job->g->dweight + t.row * grid.cols + t.col, grid.cols);
}

static void linear_backward_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct linear_backward_job *job = ctx;
    if (task < job->input_tiles) {
        linear_input_tile(job, task);
        return;
    }
    task -= job->input_tiles;
    if (task < job->weight_tiles) {
        linear_weight_tile(job, task);
        return;
    }
    task -= job->weight_tiles;
    const uint64_t out = job->lin->out, col = (uint64_t)task * LINEAR_BIAS_COLS;
    const uint64_t cols = out - col < LINEAR_BIAS_COLS ? out - col : LINEAR_BIAS_COLS;
    job->vec->col_sums(job->g->dbias + col, job->g->dy + col,
                       (struct vec_tile){ job->lin->rows, cols, out });
}

void linear_backward(struct pool *pool, const struct linear *lin, const struct linear_grads *g)
{
    struct linear_backward_job job = {
        .lin = lin,
        .vec = vec_pick(),
        .g = g,
        .input_tiles = g->dx != NULL ? grid_tiles((struct linear_grid){ lin->rows, lin->in }) : 0,
        .weight_tiles = g->dweight != NULL ? grid_tiles(linear_weight_grid(lin)) : 0,
    };
    const uint32_t bias_tiles = g->dbias != NULL
                                    ? (uint32_t)linear_blocks(lin->out, LINEAR_BIAS_COLS)
                                    : 0;
    pool_run(pool, job.input_tiles + job.weight_tiles + bias_tiles, linear_backward_task, &job);
}
