/* The passes over an update's whole tensors, Muon's, LAMB's and Adafactor's, one after the other:
 * kern.h (struct kern_whole) says why there are several, op_muon.h what those between the
 * elementwise ones compute.
 *
 *     others       the elements of no such tensor, by their optimizer
 *     momentum     of all of Muon's matrices
 *     moments      of all of LAMB's tensors
 *     squares      of each of Adafactor's tensors, in scratch: means of rows and columns
 *     statistics   of all of these
 *     of each matrix, in scratch, tasks of rows or tiles:
 *       mix        the matrix, lying so that it has no more rows than columns
 *       norm       its sum of squares, by blocks
 *       divide     by its norm
 *       gram, polynomial, multiply    as often as the iteration has steps
 *       unpack     the matrix, as its tensor lies
 *     of each of LAMB's tensors, in scratch, blocks:
 *       direction  what it changes by, and the norms that its rate is of
 *     of each of Adafactor's, likewise:
 *       factor     what rows and columns are divided by
 *       update     what it changes by, and norms
 *     params       of all of them, and the average behind them
 *
 * The leader goes from pass to pass (queue.h: cpu_op.next); within one any thread does any task,
 * which is of elements that no other task has. */
#ifndef SHD_KERNELS_CPU_MUON_H
#define SHD_KERNELS_CPU_MUON_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/kern.h"
#include "proto/spec/muon.h"

struct cpu_kern;
struct cpu_op;
struct cpu_range;
struct cpu_thread;

enum muon_pass {
    MUON_BEGIN,
    MUON_OTHERS,
    MUON_MOMENTUM,
    MUON_MOMENTS,
    MUON_SQUARES,
    MUON_STATISTICS,
    MUON_MIX,
    MUON_NORM,
    MUON_DIVIDE,
    MUON_GRAM,
    MUON_POLYNOMIAL,
    MUON_MULTIPLY,
    MUON_UNPACK,
    MUON_DIRECTION,
    MUON_FACTOR,
    MUON_UPDATE,
    MUON_PARAMS,
};

/* c = scale * (a b) + add_scale * add, fp32. a: [rows, depth], b: [depth, cols], or its transpose;
 * add as c, or NULL. Rows are stride elements apart, b's and c's columns padded to 32 with what no
 * result depends on. */
struct muon_product {
    const float *a, *b, *add;
    float *c;
    uint64_t rows, cols, depth;
    uint64_t a_stride, b_stride, c_stride;
    float scale, add_scale;
    bool transposed; /* b is given as [cols, depth] */
    bool symmetric;  /* c is, and add: half of it is computed */
};

struct muon_job { /* of one tensor, as tasks see it */
    enum muon_pass pass;
    struct muon_room room;
    const struct kern_matrix *shape; /* borrowed: the update's */
    const float *grad, *m;           /* of the tensor */
    float grad_scale;
    const struct kern_muon *hyper; /* borrowed: the update's */
    float *x, *y, *gram, *poly;    /* scratch */
    float *out;                    /* scratch, of the matrix: as the tensor lies */
    float divisor;
    struct muon_product product;

    /* LAMB's. */
    const float *p, *v;
    uint64_t elems;
    struct kern_rates rates;

    /* Adafactor's. */
    const float *statistics; /* of the tensor: rows of all matrices, then columns; or elements */
    float *means;            /* scratch, likewise: the new squares', then what is divided by */
    float eps1, eps1_square;
};

#define MUON_TASK_ROWS 32u /* of the matrix as it lies in scratch */
#define MUON_TASK_COLS 32u /* of Adafactor's means: lanes of a sum */
#define MUON_TILE      96u /* rows and columns of a product's task */

/* Tasks of the job's pass. */
uint64_t muon_tasks(const struct muon_job *job);

struct muon_run { /* of the update that the leader is at */
    /* A range of an update's elements, as the device does it. */
    int (*update)(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r);
    enum muon_pass pass;
    uint32_t matrix; /* index */
    uint32_t step;   /* of the iteration */
    struct kern_update asked;
    struct kern_change *change;
    struct kern_change others; /* what the first pass came to */
    struct kern_change norms;  /* of a direction, and of the parameters it is of */
    struct kern_sum norm;
    struct muon_job job;
};

/* Does it take passes, so that it is not done here and now? */
static inline bool muon_has(const struct kern_op *op)
{
    return op->kind == KERN_UPDATE && op->update.whole.count > 0;
}

/* Make the first pass of such an op, which is of nothing, and what comes after it. */
void muon_init(struct cpu_op *op);

/* cpu_op.next of it. */
bool muon_next(struct cpu_kern *k, struct cpu_op *op);

#endif
