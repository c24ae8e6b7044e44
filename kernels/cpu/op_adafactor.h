/* Adafactor's passes over a tensor between the elementwise ones: means of squares of rows and
 * columns, what these are divided by, and what the tensor changes by. Included once per instruction
 * set, after op_sum.h and optimizers.h, whose adafactor_direction() is the formula.
 *
 * As torch.optim.Adafactor (torch/optim/_adafactor.py: _single_tensor_adafactor), but for sums,
 * which are in fp64 here, and rounded to fp32 once:
 *
 *     g = grad * scale
 *     row mean = sum over columns of g g / columns         lanes of op_sum.h, of the row's elements
 *     column mean = sum over rows of g g / rows            rows ascending
 *     mean = g * g                                         of what is no matrix, in fp32
 *     divisor = max(eps1, sum of the matrix's rows' statistics / rows)    ascending
 *
 * Neither the instruction set nor the number of threads can show in a sum. Squares of the update
 * and of the parameters are summed as op_lamb.h does it. */
#ifndef SHD_KERNELS_CPU_OP_ADAFACTOR_H
#define SHD_KERNELS_CPU_OP_ADAFACTOR_H

#include <stdint.h>
#include <string.h>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/muon.h"
#include "kernels/optimizers.h"
#include "proto/spec/layout.h"

_Static_assert(MUON_TASK_COLS == SUM_LANES, "a task of columns is the lanes of a sum");

KERN_FN vec adafactor_grad(const struct muon_job *job, uint64_t i, uint64_t left)
{
    const vec g = left >= VEC_LANES ? vec_load(job->grad + i)
                                    : vec_load_n(job->grad + i, (unsigned)left);
    return vec_mul(g, vec_set1(job->grad_scale));
}

static void squares_row(const struct muon_job *job, uint64_t row)
{
    const uint64_t cols = job->shape->cols;
    struct lanes l;
    double s[SUM_LANES];
    memset(&l, 0, sizeof l);
    for (uint64_t i = 0; i < cols; i += VEC_LANES)
        lanes_add(&l, (unsigned)(i / VEC_LANES % (SUM_LANES / VEC_LANES)),
                  adafactor_grad(job, row * cols + i, cols - i));
    lanes_get(&l, s);
    for (unsigned width = SUM_LANES / 2; width > 0; width /= 2)
        for (unsigned j = 0; j < width; j++)
            s[j] += s[j + width];
    job->means[row] = (float)(s[0] / (double)cols);
}

/* SUM_LANES columns of a matrix from `col` on, or what there is of them. */
static void squares_cols(const struct muon_job *job, uint64_t matrix, uint64_t col)
{
    const struct kern_matrix *shape = job->shape;
    const uint64_t left = shape->cols - col, count = left < SUM_LANES ? left : SUM_LANES;
    float *means = job->means + shape->batch * shape->rows + matrix * shape->cols + col;
    struct lanes l;
    double s[SUM_LANES];
    memset(&l, 0, sizeof l);
    for (uint64_t row = 0; row < shape->rows; row++) {
        const uint64_t first = (matrix * shape->rows + row) * shape->cols + col;
        for (uint64_t j = 0; j < count; j += VEC_LANES)
            lanes_add(&l, (unsigned)(j / VEC_LANES), adafactor_grad(job, first + j, count - j));
    }
    lanes_get(&l, s);
    for (uint64_t j = 0; j < count; j++)
        means[j] = (float)(s[j] / (double)shape->rows);
}

static void squares_elems(const struct muon_job *job, uint64_t first)
{
    const uint64_t left = job->elems - first;
    const uint64_t end = first + (left < SHD_BLOCK_ELEMS ? left : SHD_BLOCK_ELEMS);
    for (uint64_t i = first; i < end; i += VEC_LANES) {
        const vec g = adafactor_grad(job, i, end - i), square = vec_mul(g, g);
        if (end - i >= VEC_LANES)
            vec_store(job->means + i, square);
        else
            vec_store_n(job->means + i, square, (unsigned)(end - i));
    }
}

static void squares_task(const struct muon_job *job, uint64_t task)
{
    const struct kern_matrix *shape = job->shape;
    const uint64_t rows = shape->batch * shape->rows;
    const uint64_t row_tasks = (rows + MUON_TASK_ROWS - 1) / MUON_TASK_ROWS;
    const uint64_t panels = (shape->cols + SUM_LANES - 1) / SUM_LANES;
    if (rows == 0) {
        squares_elems(job, task * SHD_BLOCK_ELEMS);
        return;
    }
    if (task >= row_tasks) {
        task -= row_tasks;
        squares_cols(job, task / panels, task % panels * SUM_LANES);
        return;
    }
    const uint64_t first = task * MUON_TASK_ROWS;
    for (uint64_t row = first; row < rows && row < first + MUON_TASK_ROWS; row++)
        squares_row(job, row);
}

/* Behind the statistics' pass nobody needs the means of their rows. */
static void factor_task(const struct muon_job *job, uint64_t matrix)
{
    const uint64_t rows = job->shape->rows, first = matrix * rows;
    double sum = 0;
    for (uint64_t i = first; i < first + rows; i++)
        sum += (double)job->statistics[i];
    const float mean = (float)(sum / (double)rows);
    for (uint64_t i = first; i < first + rows; i++)
        job->means[i] = job->eps1 > mean ? job->eps1 : mean;
}

static void adafactor_tasks_run(const struct muon_job *job, struct cpu_range tasks)
{
    for (uint64_t task = tasks.first; task < tasks.first + tasks.count; task++)
        if (job->pass == MUON_SQUARES)
            squares_task(job, task);
        else
            factor_task(job, task);
}

/* Elements [i, i + count) of one row; or of what is no matrix. */
static void adafactor_span(const struct muon_job *job, uint64_t i, uint64_t count)
{
    const struct kern_matrix *shape = job->shape;
    const uint64_t row = i / shape->cols, col = i % shape->cols;
    const bool matrix = shape->rows > 0;
    const float *kept = job->statistics + i;
    if (matrix)
        kept = job->statistics + shape->batch * shape->rows + row / shape->rows * shape->cols + col;
    const vec of_row = vec_set1(matrix ? job->statistics[row] : 1);
    const vec divisor = vec_set1(matrix ? job->means[row] : 1);
    for (uint64_t j = 0; j < count; j += VEC_LANES) {
        const uint64_t left = count - j;
        const bool all = left >= VEC_LANES;
        vec v = all ? vec_load(kept + j) : vec_load_n(kept + j, (unsigned)left);
        if (matrix)
            v = vec_div(vec_mul(of_row, v), divisor);
        const vec u = adafactor_direction(job->eps1_square, adafactor_grad(job, i + j, left), v);
        if (all)
            vec_store(job->out + i + j, u);
        else
            vec_store_n(job->out + i + j, u, (unsigned)left);
    }
}

static void adafactor_block(const struct muon_job *job, uint64_t first, struct kern_change *part)
{
    const uint64_t left = job->elems - first, cols = job->shape->cols;
    const uint64_t end = first + (left < SHD_BLOCK_ELEMS ? left : SHD_BLOCK_ELEMS);
    for (uint64_t i = first, count; i < end; i += count) {
        count = cols - i % cols < end - i ? cols - i % cols : end - i;
        adafactor_span(job, i, count);
    }
    struct lanes update, weight;
    memset(&update, 0, sizeof update);
    memset(&weight, 0, sizeof weight);
    for (uint64_t i = first; i < end; i += VEC_LANES) {
        const unsigned n = end - i < VEC_LANES ? (unsigned)(end - i) : VEC_LANES;
        const unsigned at = (unsigned)((i - first) / VEC_LANES % (SUM_LANES / VEC_LANES));
        const bool all = n == VEC_LANES;
        lanes_add(&update, at, all ? vec_load(job->out + i) : vec_load_n(job->out + i, n));
        lanes_add(&weight, at, all ? vec_load(job->p + i) : vec_load_n(job->p + i, n));
    }
    block_add(&part->update, &update);
    block_add(&part->weight, &weight);
}

static void adafactor_range(const struct muon_job *job, struct cpu_range r,
                            struct kern_change *part)
{
    for (uint64_t i = r.first; i < r.first + r.count; i += SHD_BLOCK_ELEMS)
        adafactor_block(job, i, part);
}

#endif
