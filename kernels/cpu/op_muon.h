/* The passes between Muon's elementwise ones (muon.h), of one matrix in scratch: tasks of rows, and
 * tiles of products. Included once per instruction set, after vec.h.
 *
 * As torch.optim.Muon (torch/optim/_muon.py: _single_tensor_muon, _zeropower_via_newtonschulz), but
 * in fp32 throughout, where torch goes on in bf16. Each line is one rounding:
 *
 *     g = grad * scale
 *     d = m - g                           m: after the momentum's pass
 *     u = fma(mu, d, g)                   nesterov: grad.lerp(buf, momentum), mu < 0.5
 *       = fma(mu - 1, d, m)               mu >= 0.5
 *       = m                               not nesterov
 *     x = u / max(norm, eps)              norm: root of the sum of squares, in fp64 (op_sum.h)
 *
 *     s = sum over k of x[i,k] x[j,k]     gram
 *     t = sum over k of s[i,k] s[k,j];    polynomial: b s + c s s
 *         w = b * s;  q = fma(c, t, w)
 *     y = sum over k of q[i,k] x[k,j];    multiply: a x + (b s + c s s) x
 *         w = a * x;  x = fma(1, y, w)
 *
 * A sum over k is one chain of fma, k ascending from 0: neither the instruction set nor the way a
 * product is cut into tiles and panels can show in it. gram and polynomial are symmetric, bit by
 * bit (the same products in the same order), so the lower half is copied from the upper one. */
#ifndef SHD_KERNELS_CPU_OP_MUON_H
#define SHD_KERNELS_CPU_OP_MUON_H

#include <stdint.h>
#include <string.h>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/muon.h"
#include "proto/base/check.h"

/* What a product keeps in registers: PANEL_ROWS x PANEL_COLS sums. */
#define PANEL_VECS 2u
#define PANEL_COLS (PANEL_VECS * VEC_LANES)
#if KERN_LANES == 16
#define PANEL_ROWS 12u
#elif KERN_LANES == 8
#define PANEL_ROWS 6u
#else
#define PANEL_ROWS 4u
#endif
#define PANEL_DEPTH 256u /* of k at a time: a packed panel of b is in the first cache */
_Static_assert(MUON_TILE % PANEL_ROWS == 0 && MUON_TILE % PANEL_COLS == 0, "tiles are of panels");
_Static_assert(PANEL_COLS <= MUON_TASK_ROWS, "padding of rows is a panel's");

/* -- Rows -------------------------------------------------------------------------------------- */

KERN_FN vec mix_vec(const struct muon_job *job, vec grad, vec m)
{
    const float mu = job->hyper->momentum;
    if (!job->hyper->nesterov)
        return m;
    const vec g = vec_mul(grad, vec_set1(job->grad_scale)), d = vec_sub(m, g);
    return mu < 0.5f ? vec_fma(vec_set1(mu), d, g) : vec_fma(vec_set1(mu - 1), d, m);
}

/* count elements of the tensor, from `first` on. */
static void mix_some(const struct muon_job *job, uint64_t first, uint64_t count, float *to)
{
    const float *grad = job->grad + first, *m = job->m + first;
    uint64_t i = 0;
    for (; count - i >= VEC_LANES; i += VEC_LANES)
        vec_store(to + i, mix_vec(job, vec_load(grad + i), vec_load(m + i)));
    const unsigned n = (unsigned)(count - i);
    if (n > 0)
        vec_store_n(to + i, mix_vec(job, vec_load_n(grad + i, n), vec_load_n(m + i, n)), n);
}

static uint64_t task_rows(const struct muon_job *job, uint64_t first)
{
    const uint64_t left = job->room.rows - first;
    return left < MUON_TASK_ROWS ? left : MUON_TASK_ROWS;
}

static void mix_task(const struct muon_job *job, uint64_t task)
{
    const struct muon_room *room = &job->room;
    const uint64_t first = task * MUON_TASK_ROWS, rows = task_rows(job, first);
    const uint64_t padding = room->stride - room->cols;
    float *x = job->x + first * room->stride;
    float column[MUON_TASK_ROWS];
    for (uint64_t i = 0; i < rows; i++) {
        if (!room->across)
            mix_some(job, (first + i) * room->cols, room->cols, x + i * room->stride);
        memset(x + i * room->stride + room->cols, 0, padding * sizeof *x);
    }
    for (uint64_t j = 0; room->across && j < room->cols; j++) {
        mix_some(job, j * room->rows + first, rows, column);
        for (uint64_t i = 0; i < rows; i++)
            x[i * room->stride + j] = column[i];
    }
    const uint64_t end = (first + rows) * room->stride;
    if (first + rows == room->rows)
        memset(job->x + end, 0, (room->elems - end) * sizeof *x); /* a last block's rest */
}

static void divide_task(const struct muon_job *job, uint64_t task)
{
    const uint64_t first = task * MUON_TASK_ROWS;
    float *x = job->x + first * job->room.stride;
    const uint64_t count = task_rows(job, first) * job->room.stride;
    const vec divisor = vec_set1(job->divisor);
    for (uint64_t i = 0; i < count; i += VEC_LANES)
        vec_store(x + i, vec_div(vec_load(x + i), divisor));
}

static void unpack_task(const struct muon_job *job, uint64_t task)
{
    const struct muon_room *room = &job->room;
    const uint64_t first = task * MUON_TASK_ROWS, rows = task_rows(job, first);
    const float *x = job->x + first * room->stride;
    for (uint64_t i = 0; !room->across && i < rows; i++)
        memcpy(job->out + (first + i) * room->cols, x + i * room->stride, room->cols * sizeof *x);
    for (uint64_t j = 0; room->across && j < room->cols; j++)
        for (uint64_t i = 0; i < rows; i++)
            job->out[j * room->rows + first + i] = x[i * room->stride + j];
}

/* -- Products ---------------------------------------------------------------------------------- */

/* b[k, k + depth) of columns [col, col + PANEL_COLS), row by row; 0 beyond the last column. */
static void pack_panel(const struct muon_product *p, uint64_t k, uint64_t depth, uint64_t col,
                       float *panel)
{
    if (!p->transposed) {
        const float *b = p->b + k * p->b_stride + col;
        for (uint64_t i = 0; i < depth; i++)
            for (unsigned v = 0; v < PANEL_VECS; v++)
                vec_store(panel + i * PANEL_COLS + (size_t)v * VEC_LANES,
                          vec_load(b + i * p->b_stride + (size_t)v * VEC_LANES));
        return;
    }
    for (unsigned j = 0; j < PANEL_COLS; j++) {
        const float *b = p->b + (col + j) * p->b_stride + k;
        for (uint64_t i = 0; i < depth; i++)
            panel[i * PANEL_COLS + j] = col + j < p->cols ? b[i] : 0;
    }
}

/* sums[rows, PANEL_COLS] of c go on by depth of k; first: from 0. */
KERN_FN void multiply_rows(const float *a, uint64_t a_stride, const float *panel, uint64_t depth,
                           float *c, uint64_t c_stride, bool first, const unsigned rows)
{
    vec sum[PANEL_ROWS][PANEL_VECS];
    for (unsigned i = 0; i < rows; i++)
        for (unsigned v = 0; v < PANEL_VECS; v++)
            sum[i][v] = first ? vec_set1(0) : vec_load(c + i * c_stride + (size_t)v * VEC_LANES);
    for (uint64_t k = 0; k < depth; k++) {
        const vec b0 = vec_load(panel + k * PANEL_COLS);
        const vec b1 = vec_load(panel + k * PANEL_COLS + VEC_LANES);
        for (unsigned i = 0; i < rows; i++) {
            const vec x = vec_set1(a[i * a_stride + k]);
            sum[i][0] = vec_fma(x, b0, sum[i][0]);
            sum[i][1] = vec_fma(x, b1, sum[i][1]);
        }
    }
    for (unsigned i = 0; i < rows; i++)
        for (unsigned v = 0; v < PANEL_VECS; v++)
            vec_store(c + i * c_stride + (size_t)v * VEC_LANES, sum[i][v]);
}

struct tile { /* of c; cols: whole panels */
    uint64_t row, rows, col, cols;
};

static void multiply_panel(const struct muon_product *p, const struct tile *t, uint64_t k,
                           uint64_t col)
{
    _Alignas(64) float panel[PANEL_DEPTH * PANEL_COLS];
    const uint64_t depth = p->depth - k < PANEL_DEPTH ? p->depth - k : PANEL_DEPTH;
    uint64_t i = t->row;
    pack_panel(p, k, depth, col, panel);
    for (; t->row + t->rows - i >= PANEL_ROWS; i += PANEL_ROWS)
        multiply_rows(p->a + i * p->a_stride + k, p->a_stride, panel, depth,
                      p->c + i * p->c_stride + col, p->c_stride, k == 0, PANEL_ROWS);
    for (; i < t->row + t->rows; i++)
        multiply_rows(p->a + i * p->a_stride + k, p->a_stride, panel, depth,
                      p->c + i * p->c_stride + col, p->c_stride, k == 0, 1);
}

static void scale_tile(const struct muon_product *p, const struct tile *t)
{
    const vec scale = vec_set1(p->scale), add_scale = vec_set1(p->add_scale);
    for (uint64_t i = t->row; p->add != NULL && i < t->row + t->rows; i++) {
        float *c = p->c + i * p->c_stride;
        const float *add = p->add + i * p->c_stride;
        for (uint64_t j = t->col; j < t->col + t->cols; j += VEC_LANES)
            vec_store(c + j,
                      vec_fma(scale, vec_load(c + j), vec_mul(add_scale, vec_load(add + j))));
    }
}

/* Tile `task`: of the upper half in order of rows, where c is symmetric. */
static struct tile tile_of(const struct muon_product *p, uint64_t task)
{
    const uint64_t across = (p->cols + MUON_TILE - 1) / MUON_TILE;
    uint64_t row = 0, col = task;
    if (p->symmetric) {
        for (; col >= across - row; row++)
            col -= across - row;
        col += row;
    } else {
        row = task / across;
        col = task % across;
    }
    struct tile t = { .row = row * MUON_TILE, .col = col * MUON_TILE };
    t.rows = p->rows - t.row < MUON_TILE ? p->rows - t.row : MUON_TILE;
    const uint64_t cols = p->cols - t.col < MUON_TILE ? p->cols - t.col : MUON_TILE;
    t.cols = (cols + PANEL_COLS - 1) / PANEL_COLS * PANEL_COLS;
    return t;
}

static void product_task(const struct muon_product *p, uint64_t task)
{
    const struct tile t = tile_of(p, task);
    for (uint64_t k = 0; k < p->depth; k += PANEL_DEPTH)
        for (uint64_t col = t.col; col < t.col + t.cols; col += PANEL_COLS)
            multiply_panel(p, &t, k, col);
    scale_tile(p, &t);
    for (uint64_t i = t.row; p->symmetric && t.col > t.row && i < t.row + t.rows; i++)
        for (uint64_t j = t.col; j < t.col + t.cols && j < p->cols; j++)
            p->c[j * p->c_stride + i] = p->c[i * p->c_stride + j];
}

static void muon_range(const struct muon_job *job, struct cpu_range tasks)
{
    for (uint64_t task = tasks.first; task < tasks.first + tasks.count; task++) {
        switch (job->pass) {
        case MUON_MIX:
            mix_task(job, task);
            break;
        case MUON_DIVIDE:
            divide_task(job, task);
            break;
        case MUON_UNPACK:
            unpack_task(job, task);
            break;
        default:
            product_task(&job->product, task);
            break;
        }
    }
}

#endif
