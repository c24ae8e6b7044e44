/* attention_cuda.c: causal self-attention on a GPU; see attention_cuda.h, and attention.h for the
 * formula.
 *
 * A (sequence, head) pair is one product of a batch. Query rows go in blocks, a block's products
 * stop at its last row's key: so about half of the masked half is not computed. Softmax is a kernel
 * between the products.
 */
#include "examples/gpt/cuda/attention_cuda.h"

#include <math.h>

/* One block of query rows. */
struct rows_block {
    uint64_t first, rows, keys; /* keys: first + rows */
};

static struct rows_block rows_of(const struct gpu_model *m, uint64_t first)
{
    const uint64_t left = m->shape.seq - first;
    const uint64_t rows = left < GPU_ATTENTION_ROWS ? left : GPU_ATTENTION_ROWS;
    return (struct rows_block){ first, rows, first + rows };
}

static uint64_t pairs_of(const struct gpu_model *m)
{
    return m->batch * m->shape.heads;
}

/* [seq, S] of each pair, from row `first` on; of q, k, v (part 0, 1, 2) or of one array (0). */
static struct gpu_matrix heads_of(const struct gpu_model *m, void *heads, uint32_t dtype,
                                  uint32_t part, uint64_t first)
{
    const uint64_t at = part * m->rows * m->shape.dim + first * m->head_size;
    return (struct gpu_matrix){ .data = (const char *)heads + at * gpu_dtype_bytes(dtype),
                                .dtype = dtype,
                                .stride = m->head_size,
                                .next = m->shape.seq * m->head_size };
}

/* c = a b, or with add c += a b, of every pair. */
static void multiply_pairs(struct gpu_model *m, struct gpu_size s, struct gpu_matrix a,
                           struct gpu_matrix b, struct gpu_matrix c, bool add)
{
    const struct gpu_product p = { s.m, s.n, s.k, a, b, c, .add = add, .count = pairs_of(m) };
    gpu_multiply(&m->gpu, &p);
}

/* The rows of a block, as prob has them; and their scores, one block's at a time. */
static struct gpu_matrix prob_of(const struct gpu_model *m, const struct gpu_acts *acts,
                                 uint64_t first)
{
    return (struct gpu_matrix){ .data = gpu_model_at(m, acts->prob, first * m->stride),
                                .dtype = m->dtype,
                                .stride = m->stride,
                                .next = m->shape.seq * m->stride };
}

static struct gpu_matrix scores_of(const struct gpu_model *m)
{
    return (struct gpu_matrix){ m->scratch.scores, GPU_F32, m->stride,
                                GPU_ATTENTION_ROWS * m->stride, false };
}

void gpu_model_to_heads(struct gpu_model *m, const float *in, const void *bias, uint32_t parts,
                        void *out)
{
    const struct gpu_to_heads split = { .in = in,
                                        .bias = bias,
                                        .out = out,
                                        .rows = m->rows,
                                        .dim = m->shape.dim,
                                        .parts = parts,
                                        .head_size = (uint32_t)m->head_size,
                                        .seq = m->shape.seq,
                                        .param_dtype = m->dtype,
                                        .out_dtype = m->dtype };
    gpu_launch(&m->gpu, GPU_KERNEL_to_heads, gpu_blocks_elems(parts * m->rows * m->shape.dim),
               &split);
}

/* kernel: softmax, or softmax_grad. */
static void softmax(struct gpu_model *m, struct gpu_acts *acts, struct rows_block b,
                    enum gpu_kernel kernel)
{
    const struct gpu_softmax a = { .scores = m->scratch.scores,
                                   .prob = acts->prob,
                                   .score_pair = GPU_ATTENTION_ROWS * m->stride,
                                   .pairs = (uint32_t)pairs_of(m),
                                   .seq = m->shape.seq,
                                   .stride = (uint32_t)m->stride,
                                   .first = (uint32_t)b.first,
                                   .rows = (uint32_t)b.rows,
                                   .prob_dtype = m->dtype,
                                   .scale = (float)(1 / sqrt((double)m->head_size)) };
    gpu_launch(&m->gpu, kernel, gpu_blocks_rows(pairs_of(m) * b.rows), &a);
}

void gpu_model_attention(struct gpu_model *m, struct gpu_acts *acts)
{
    const uint64_t size = m->head_size;
    for (uint64_t first = 0; first < m->shape.seq; first += GPU_ATTENTION_ROWS) {
        const struct rows_block b = rows_of(m, first);
        multiply_pairs(m, (struct gpu_size){ b.rows, b.keys, size },
                       heads_of(m, acts->heads, m->dtype, 0, first),
                       transposed(heads_of(m, acts->heads, m->dtype, 1, 0)), scores_of(m), false);
        softmax(m, acts, b, GPU_KERNEL_softmax);
        multiply_pairs(m, (struct gpu_size){ b.rows, size, b.keys }, prob_of(m, acts, first),
                       heads_of(m, acts->heads, m->dtype, 2, 0),
                       heads_of(m, m->scratch.heads, m->dtype, 0, first), false);
    }
    const struct gpu_from_heads join = { .in = m->scratch.heads,
                                         .out = acts->att,
                                         .rows = m->rows,
                                         .dim = m->shape.dim,
                                         .head_size = (uint32_t)size,
                                         .seq = m->shape.seq,
                                         .dtype = m->dtype };
    gpu_launch(&m->gpu, GPU_KERNEL_from_heads, gpu_blocks_elems(m->rows * m->shape.dim), &join);
}

/* Blocks from the last to the first: the last one reaches all keys and writes dk and dv, the
 * others add to a prefix of them. */
static void attention_block_backward(struct gpu_model *m, struct gpu_acts *acts,
                                     struct rows_block b)
{
    const bool add = b.keys < m->shape.seq;
    const uint64_t size = m->head_size;
    const struct gpu_size to_scores = { b.rows, b.keys, size }, to_rows = { b.rows, size, b.keys };
    const struct gpu_size to_keys = { b.keys, size, b.rows };
    const struct gpu_matrix dy = heads_of(m, m->scratch.heads, m->dtype, 0, b.first);
    const struct gpu_matrix q = heads_of(m, acts->heads, m->dtype, 0, b.first);
    const struct gpu_matrix k = heads_of(m, acts->heads, m->dtype, 1, 0);
    const struct gpu_matrix v = heads_of(m, acts->heads, m->dtype, 2, 0);
    const struct gpu_matrix dq = heads_of(m, m->scratch.dheads, GPU_F32, 0, b.first);
    const struct gpu_matrix dk = heads_of(m, m->scratch.dheads, GPU_F32, 1, 0);
    const struct gpu_matrix dv = heads_of(m, m->scratch.dheads, GPU_F32, 2, 0);
    const struct gpu_matrix p = prob_of(m, acts, b.first); /* ds, once softmax_grad has run */
    multiply_pairs(m, to_scores, dy, transposed(v), scores_of(m), false); /* dp = dy v^T */
    multiply_pairs(m, to_keys, transposed(p), dy, dv, add);               /* dv += p^T dy */
    softmax(m, acts, b, GPU_KERNEL_softmax_grad);
    multiply_pairs(m, to_rows, p, k, dq, false);           /* dq = ds k */
    multiply_pairs(m, to_keys, transposed(p), q, dk, add); /* dk += ds^T q */
}

void gpu_model_attention_backward(struct gpu_model *m, struct gpu_acts *acts)
{
    gpu_model_to_heads(m, m->scratch.d1, NULL, 1, m->scratch.heads);
    const uint64_t blocks = (m->shape.seq + GPU_ATTENTION_ROWS - 1) / GPU_ATTENTION_ROWS;
    for (uint64_t i = blocks; i-- > 0;)
        attention_block_backward(m, acts, rows_of(m, i * GPU_ATTENTION_ROWS));
}
