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
static struct gpu_matrix heads_of(const struct gpu_model *m, void *heads, uint32_t part,
                                  uint64_t first)
{
    const uint64_t at = part * m->rows * m->shape.dim + first * m->head_size;
    return (struct gpu_matrix){ .data = gpu_model_at(m, heads, at),
                                .dtype = m->dtype,
                                .stride = m->head_size,
                                .next = m->shape.seq * m->head_size };
}

static struct gpu_matrix heads_grad(const struct gpu_model *m, uint32_t part, uint64_t first)
{
    const uint64_t at = part * m->rows * m->shape.dim + first * m->head_size;
    return (struct gpu_matrix){ .data = m->scratch.dheads + at,
                                .dtype = GPU_F32,
                                .stride = m->head_size,
                                .next = m->shape.seq * m->head_size };
}

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
    return (struct gpu_matrix){ .data = m->scratch.scores,
                                .dtype = GPU_F32,
                                .stride = m->stride,
                                .next = GPU_ATTENTION_ROWS * m->stride };
}

static float scale_of(const struct gpu_model *m)
{
    return (float)(1 / sqrt((double)m->head_size));
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
                                   .scale = scale_of(m) };
    gpu_launch(&m->gpu, kernel, gpu_blocks_rows(pairs_of(m) * b.rows), &a);
}

void gpu_model_attention(struct gpu_model *m, struct gpu_acts *acts)
{
    for (uint64_t first = 0; first < m->shape.seq; first += GPU_ATTENTION_ROWS) {
        const struct rows_block b = rows_of(m, first);
        gpu_multiply(&m->gpu,
                     &(struct gpu_product){ .m = b.rows,
                                            .n = b.keys,
                                            .k = m->head_size,
                                            .a = heads_of(m, acts->heads, 0, first),
                                            .b = transposed(heads_of(m, acts->heads, 1, 0)),
                                            .c = scores_of(m),
                                            .count = pairs_of(m) });
        softmax(m, acts, b, GPU_KERNEL_softmax);
        gpu_multiply(&m->gpu, &(struct gpu_product){ .m = b.rows,
                                                     .n = m->head_size,
                                                     .k = b.keys,
                                                     .a = prob_of(m, acts, first),
                                                     .b = heads_of(m, acts->heads, 2, 0),
                                                     .c = heads_of(m, m->scratch.heads, 0, first),
                                                     .count = pairs_of(m) });
    }
    const struct gpu_from_heads join = { .in = m->scratch.heads,
                                         .out = acts->att,
                                         .rows = m->rows,
                                         .dim = m->shape.dim,
                                         .head_size = (uint32_t)m->head_size,
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
    const struct gpu_matrix dy = heads_of(m, m->scratch.heads, 0, b.first);
    const struct gpu_matrix p = prob_of(m, acts, b.first);
    struct gpu_product product = { .m = b.rows, .n = b.keys, .k = m->head_size, .a = dy };
    product.count = pairs_of(m);
    product.b = transposed(heads_of(m, acts->heads, 2, 0));
    product.c = scores_of(m);
    gpu_multiply(&m->gpu, &product); /* dp = dy v^T */

    struct gpu_product to_keys = { .m = b.keys, .n = m->head_size, .k = b.rows, .add = add };
    to_keys.count = pairs_of(m);
    to_keys.a = transposed(p);
    to_keys.b = dy;
    to_keys.c = heads_grad(m, 2, 0);
    gpu_multiply(&m->gpu, &to_keys); /* dv += p^T dy */

    softmax(m, acts, b, GPU_KERNEL_softmax_grad); /* p is ds from here on */

    product = (struct gpu_product){ .m = b.rows, .n = m->head_size, .k = b.keys, .a = p };
    product.count = pairs_of(m);
    product.b = heads_of(m, acts->heads, 1, 0);
    product.c = heads_grad(m, 0, b.first);
    gpu_multiply(&m->gpu, &product); /* dq = ds k */

    to_keys.b = heads_of(m, acts->heads, 0, b.first);
    to_keys.c = heads_grad(m, 1, 0);
    gpu_multiply(&m->gpu, &to_keys); /* dk += ds^T q */
}

void gpu_model_attention_backward(struct gpu_model *m, struct gpu_acts *acts)
{
    const struct gpu_to_heads split = { .in = m->scratch.d1,
                                        .out = m->scratch.heads,
                                        .rows = m->rows,
                                        .dim = m->shape.dim,
                                        .parts = 1,
                                        .head_size = (uint32_t)m->head_size,
                                        .seq = m->shape.seq,
                                        .param_dtype = m->dtype,
                                        .out_dtype = m->dtype };
    gpu_launch(&m->gpu, GPU_KERNEL_to_heads, gpu_blocks_elems(m->rows * m->shape.dim), &split);
    const uint64_t blocks = (m->shape.seq + GPU_ATTENTION_ROWS - 1) / GPU_ATTENTION_ROWS;
    for (uint64_t i = blocks; i-- > 0;)
        attention_block_backward(m, acts, rows_of(m, i * GPU_ATTENTION_ROWS));
}
