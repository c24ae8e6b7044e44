/* linear.c: see linear.h. */
#include "examples/gpt/linear.h"

#include <stddef.h>
#include <string.h>

#include "examples/gpt/gemm.h"

/* Tiles large enough that packing costs little, small enough that a 256-wide layer has several
 * per core: a matrix that has many is cut into larger ones. A function of its shape alone, as tiles
 * are part of the numerics: another size may round differently. */
#define LINEAR_TILE_ROWS 128
#define LINEAR_TILE_COLS 256
#define LINEAR_TILES_MIN 8 /* a larger tile leaves so many */
#define LINEAR_BIAS_COLS 256

/* A weight is laid out for the product where at least so many rows use the copy. */
#define LINEAR_LAY_ROWS 256
#define LINEAR_LAY_TASK 64 /* its rows of a task */
#define LINEAR_LINE     (64 / sizeof(real))
#define LINEAR_WAY      (4096 / sizeof(real))

/* A [rows, cols] matrix cut into tiles, numbered along the rows first. */
struct linear_grid {
    uint64_t rows, cols, tile_rows, tile_cols;
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
    return (uint32_t)(linear_blocks(g.rows, g.tile_rows) * linear_blocks(g.cols, g.tile_cols));
}

static struct linear_grid grid_cut(uint64_t rows, uint64_t cols)
{
    const struct linear_grid small = { rows, cols, LINEAR_TILE_ROWS, LINEAR_TILE_COLS };
    const struct linear_grid wide = { rows, cols, LINEAR_TILE_ROWS, 2 * LINEAR_TILE_COLS };
    const struct linear_grid large = { rows, cols, 2 * LINEAR_TILE_ROWS, 2 * LINEAR_TILE_COLS };
    if (grid_tiles(large) >= LINEAR_TILES_MIN)
        return large;
    return grid_tiles(wide) >= LINEAR_TILES_MIN ? wide : small;
}

static struct linear_tile grid_tile(struct linear_grid g, uint32_t index)
{
    const uint64_t down = linear_blocks(g.rows, g.tile_rows);
    struct linear_tile t = { .row = index % down * g.tile_rows, .col = index / down * g.tile_cols };
    t.rows = g.rows - t.row < g.tile_rows ? g.rows - t.row : g.tile_rows;
    t.cols = g.cols - t.col < g.tile_cols ? g.cols - t.col : g.tile_cols;
    return t;
}

/* -- The weight as a product reads it -------------------------------------------------------- */

/* The right factor of a product with a weight: [k, n], or its transpose. */
struct linear_right {
    struct gemm_in factor;
    uint64_t k, n;
};

static struct gemm_in right_tile(struct gemm_in factor, uint64_t col)
{
    factor.data += factor.transposed ? col * factor.stride : col;
    return factor;
}

/* Rows of a copy begin at cache lines. Distances of a multiple of 4 KiB put a column of them all
 * into one set of the first cache: such rows are one line longer. */
static uint64_t lay_stride(uint64_t cols)
{
    const uint64_t stride = linear_blocks(cols, LINEAR_LINE) * LINEAR_LINE;
    return stride % LINEAR_WAY == 0 ? stride + LINEAR_LINE : stride;
}

uint64_t linear_scratch(uint64_t in, uint64_t out)
{
    const uint64_t plain = in * lay_stride(out), turned = out * lay_stride(in);
    return plain > turned ? plain : turned;
}

struct lay_job {
    const struct vec_ops *vec;
    struct linear_right right;
    real *out;
    uint64_t stride; /* of out */
};

/* Rows of the weight as it lies: of k if it is plain, of n if transposed. */
static void lay_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct lay_job *job = ctx;
    const struct gemm_in *from = &job->right.factor;
    const uint64_t rows = from->transposed ? job->right.n : job->right.k;
    const uint64_t cols = from->transposed ? job->right.k : job->right.n;
    const uint64_t row = (uint64_t)task * LINEAR_LAY_TASK;
    const uint64_t count = rows - row < LINEAR_LAY_TASK ? rows - row : LINEAR_LAY_TASK;
    const real *x = from->data + row * from->stride;
    if (from->transposed)
        job->vec->transpose(job->out + row, job->stride, x,
                            (struct vec_tile){ count, cols, from->stride });
    for (uint64_t i = 0; i < count && !from->transposed; i++)
        memcpy(job->out + (row + i) * job->stride, x + i * from->stride, cols * sizeof(real));
}

/* A product reads rows of n fastest whose distance is no multiple of 4 KiB. A weight that lies
 * otherwise is copied once for all tiles, by all threads: an element costs less than a cycle, and
 * is used for every row of the batch. Values and the order of sums stay what they are. The native
 * 16-bit product makes its own copies of everything. */
static struct gemm_in linear_lay(struct pool *pool, const struct linear *lin,
                                 struct linear_right right)
{
    const struct gemm_in *from = &right.factor;
    if (lin->scratch == NULL || lin->rows < LINEAR_LAY_ROWS || lin->gemm == GEMM_BF16_NATIVE ||
        (!from->transposed && from->stride % LINEAR_WAY != 0))
        return *from;
    struct lay_job job = {
        .vec = vec_pick(), .right = right, .out = lin->scratch, .stride = lay_stride(right.n)
    };
    pool_run(pool, (uint32_t)linear_blocks(from->transposed ? right.n : right.k, LINEAR_LAY_TASK),
             lay_task, &job);
    return gemm_plain(lin->scratch, job.stride);
}

static uint64_t x_stride(const struct linear *lin)
{
    return lin->x_stride > 0 ? lin->x_stride : lin->in;
}

static uint64_t y_stride(const struct linear *lin)
{
    return lin->y_stride > 0 ? lin->y_stride : lin->out;
}

/* -- Products -------------------------------------------------------------------------------- */

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
    struct linear_grid grid;
    struct gemm_in weight; /* [in, out] */
    const real *x;
    real *y, *other;
    enum linear_then then;
};

static void linear_forward_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct linear_forward_job *job = ctx;
    const struct linear *lin = job->lin;
    const struct linear_tile t = grid_tile(job->grid, task);
    const uint64_t from = x_stride(lin), to = y_stride(lin), at = t.row * to + t.col;
    gemm_run(lin->gemm, (struct gemm_size){ t.rows, t.cols, lin->in },
             gemm_plain(job->x + t.row * from, from), right_tile(job->weight, t.col),
             lin->add ? 1 : 0, job->y + at, to);
    linear_add(lin, lin->plus, t, job->y + at, lin->out);

    const struct vec_tile tile = { t.rows, t.cols, to };
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
    const struct gemm_in weight = lin->transposed ? gemm_transposed(lin->weight, lin->in)
                                                  : gemm_plain(lin->weight, lin->out);
    struct linear_forward_job job = {
        .lin = lin,
        .vec = vec_pick(),
        .grid = grid_cut(lin->rows, lin->out),
        .weight = linear_lay(pool, lin, (struct linear_right){ weight, lin->in, lin->out }),
        .x = x,
        .y = y,
        .other = other,
        .then = then,
    };
    pool_run(pool, grid_tiles(job.grid), linear_forward_task, &job);
}

struct linear_backward_job {
    const struct linear *lin;
    const struct vec_ops *vec;
    const struct linear_grads *g;
    struct linear_grid input_grid, weight_grid;
    struct gemm_in weight; /* [out, in] */
    uint32_t input_tiles, weight_tiles;
};

/* dx = dy W^T, (x gelu'). */
static void linear_input_tile(const struct linear_backward_job *job, uint32_t index)
{
    const struct linear *lin = job->lin;
    const struct linear_tile t = grid_tile(job->input_grid, index);
    const uint64_t from = y_stride(lin), to = x_stride(lin), at = t.row * to + t.col;
    gemm_run(lin->gemm, (struct gemm_size){ t.rows, t.cols, lin->out },
             gemm_plain(job->g->dy + t.row * from, from), right_tile(job->weight, t.col),
             lin->add ? 1 : 0, job->g->dx + at, to);
    linear_add(lin, job->g->plus, t, job->g->dx + at, lin->in);
    if (job->g->slope != NULL)
        job->vec->gelu_grad(job->g->dx + at, job->g->slope + at,
                            (struct vec_tile){ t.rows, t.cols, to });
}

/* dW = x^T dy, or dy^T x when transposed. */
static void linear_weight_tile(const struct linear_backward_job *job, uint32_t index)
{
    const struct linear *lin = job->lin;
    const struct linear_grid grid = job->weight_grid;
    const struct linear_tile t = grid_tile(grid, index);
    const real *left = lin->transposed ? job->g->dy : job->g->x;
    const real *right = lin->transposed ? job->g->x : job->g->dy;
    const uint64_t x = x_stride(lin), y = y_stride(lin);
    gemm_run(lin->gemm, (struct gemm_size){ t.rows, t.cols, lin->rows },
             gemm_transposed(left + t.row, lin->transposed ? y : x),
             gemm_plain(right + t.col, lin->transposed ? x : y), 0,
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
                       (struct vec_tile){ job->lin->rows, cols, y_stride(job->lin) });
}

void linear_backward(struct pool *pool, const struct linear *lin, const struct linear_grads *g)
{
    const struct gemm_in weight = lin->transposed ? gemm_plain(lin->weight, lin->in)
                                                  : gemm_transposed(lin->weight, lin->out);
    struct linear_backward_job job = {
        .lin = lin,
        .vec = vec_pick(),
        .g = g,
        .input_grid = grid_cut(lin->rows, lin->in),
        .weight_grid = lin->transposed ? grid_cut(lin->out, lin->in) : grid_cut(lin->in, lin->out),
    };
    if (g->dx != NULL) {
        job.weight = linear_lay(pool, lin, (struct linear_right){ weight, lin->out, lin->in });
        job.input_tiles = grid_tiles(job.input_grid);
    }
    if (g->dweight != NULL)
        job.weight_tiles = grid_tiles(job.weight_grid);
    const uint32_t bias_tiles = g->dbias != NULL
                                    ? (uint32_t)linear_blocks(lin->out, LINEAR_BIAS_COLS)
                                    : 0;
    pool_run(pool, job.input_tiles + job.weight_tiles + bias_tiles, linear_backward_task, &job);
}
