/* block_cuda.c: a dense block on a GPU, plain or with adapters, and any block's attention; see
 * block_cuda.h, and model_layer.c for the formulas. A bias is added by the kernel that reads the
 * product next.
 */
#include "examples/gpt/cuda/block_cuda.h"

#include "examples/gpt/cuda/attention_cuda.h"

/* Sizes in multiples of dim; the bias is the tensor behind the weight, an adapter's second factor
 * the one behind its first. */
struct matrix_row {
    enum gpt_block_tensor weight;
    enum gpt_lora_tensor low;
    uint32_t in, out;
};

static const struct matrix_row matrices[GPU_MATRICES] = {
    [GPU_ATTN] = { BLOCK_ATTN_W, LORA_ATTN_A, 1, 3 },
    [GPU_PROJ] = { BLOCK_PROJ_W, LORA_PROJ_A, 1, 1 },
    [GPU_FC] = { BLOCK_FC_W, LORA_FC_A, 1, 4 },
    [GPU_MLP] = { BLOCK_MLP_W, LORA_MLP_A, 4, 1 },
};

static const void *block_param(const struct gpu_model *m, const struct gpu_block_arrays *a,
                               enum gpt_block_tensor tensor)
{
    return gpu_model_param(m, a->base, m->layout.at[GPT_BLOCK][tensor]);
}

static float *block_grad(const struct gpu_model *m, const struct gpu_block_arrays *a,
                         enum gpt_block_tensor tensor)
{
    return gpu_model_grad(a->grad, m->layout.at[GPT_BLOCK][tensor]);
}

/* Both factors of a matrix's adapter. */
struct adapter {
    const void *a, *b; /* T [in, r], [r, out] */
    float *a_grad, *b_grad;
};

static struct adapter adapter_of(const struct gpu_model *m, const struct gpu_block_arrays *a,
                                 const struct matrix_row *row)
{
    const uint64_t *at = m->layout.at[GPT_LORA];
    return (struct adapter){ .a = gpu_model_param(m, a->low, at[row->low]),
                             .b = gpu_model_param(m, a->low, at[row->low + 1]),
                             .a_grad = gpu_model_grad(a->low_grad, at[row->low]),
                             .b_grad = gpu_model_grad(a->low_grad, at[row->low + 1]) };
}

/* x A, where there are adapters. */
static void adapter_forward(struct gpu_model *m, struct gpu_acts *acts,
                            const struct gpu_block_arrays *a, enum gpu_matrix_name which,
                            const void *x)
{
    const uint64_t in = matrices[which].in * (uint64_t)m->shape.dim, rank = m->shape.rank;
    if (a->low == NULL)
        return;
    struct gpu_product p = { .m = m->rows, .n = rank, .k = in, .a = factor(m, x, in) };
    p.b = factor(m, adapter_of(m, a, &matrices[which]).a, rank);
    p.c = factor(m, acts->low[which], rank);
    gpu_multiply(&m->gpu, &p);
}

/* y = x W (+ (x A) B), without the bias. */
static void matrix_forward(struct gpu_model *m, struct gpu_acts *acts,
                           const struct gpu_block_arrays *a, enum gpu_matrix_name which,
                           const void *x, float *y)
{
    const struct matrix_row *row = &matrices[which];
    const uint64_t in = row->in * (uint64_t)m->shape.dim, out = row->out * (uint64_t)m->shape.dim;
    const uint64_t rank = m->shape.rank;
    struct gpu_product p = { .m = m->rows, .n = out, .k = in, .a = factor(m, x, in) };
    p.b = factor(m, block_param(m, a, row->weight), out);
    p.c = floats(y, out);
    gpu_multiply(&m->gpu, &p);
    adapter_forward(m, acts, a, which, x);
    if (a->low == NULL)
        return;
    p = (struct gpu_product){ .m = m->rows, .n = out, .k = rank, .add = true };
    p.a = factor(m, acts->low[which], rank);
    p.b = factor(m, adapter_of(m, a, row).b, out);
    p.c = floats(y, out);
    gpu_multiply(&m->gpu, &p);
}

/* Gradients of the two factors; leaves d(x A) in m->scratch.dlow. */
static void adapter_backward(struct gpu_model *m, const struct gpu_acts *acts,
                             const struct adapter *low, enum gpu_matrix_name which, const void *x,
                             const void *dy)
{
    const struct matrix_row *row = &matrices[which];
    const uint64_t in = row->in * (uint64_t)m->shape.dim, out = row->out * (uint64_t)m->shape.dim;
    const uint64_t rank = m->shape.rank;
    struct gpu_product p = { .m = rank, .n = out, .k = m->rows };
    p.a = factor_t(m, acts->low[which], rank);
    p.b = factor(m, dy, out);
    p.c = floats(low->b_grad, out);
    gpu_multiply(&m->gpu, &p);
    p = (struct gpu_product){ .m = m->rows, .n = rank, .k = out, .a = factor(m, dy, out) };
    p.b = factor_t(m, low->b, out);
    p.c = factor(m, m->scratch.dlow, rank);
    gpu_multiply(&m->gpu, &p);
    p = (struct gpu_product){ .m = in, .n = rank, .k = m->rows, .a = factor_t(m, x, in) };
    p.b = factor(m, m->scratch.dlow, rank);
    p.c = floats(low->a_grad, rank);
    gpu_multiply(&m->gpu, &p);
}

/* dW = x^T dy unless frozen, dx = dy W^T (+ d(x A) A^T). */
static void matrix_backward(struct gpu_model *m, const struct gpu_acts *acts,
                            const struct gpu_block_arrays *a, enum gpu_matrix_name which,
                            const void *x, const void *dy, float *dx)
{
    const struct matrix_row *row = &matrices[which];
    const uint64_t in = row->in * (uint64_t)m->shape.dim, out = row->out * (uint64_t)m->shape.dim;
    float *dweight = block_grad(m, a, row->weight);
    struct gpu_product p = { .m = in, .n = out, .k = m->rows, .a = factor_t(m, x, in) };
    p.b = factor(m, dy, out);
    p.c = floats(dweight, out);
    if (dweight != NULL)
        gpu_multiply(&m->gpu, &p);
    p = (struct gpu_product){ .m = m->rows, .n = in, .k = out, .a = factor(m, dy, out) };
    p.b = factor_t(m, block_param(m, a, row->weight), out);
    p.c = floats(dx, in);
    gpu_multiply(&m->gpu, &p);
    if (a->low == NULL)
        return;
    const struct adapter low = adapter_of(m, a, row);
    adapter_backward(m, acts, &low, which, x, dy);
    p = (struct gpu_product){ .m = m->rows, .n = in, .k = m->shape.rank, .add = true };
    p.a = factor(m, m->scratch.dlow, m->shape.rank);
    p.b = factor_t(m, low.a, m->shape.rank);
    p.c = floats(dx, in);
    gpu_multiply(&m->gpu, &p);
}

void gpu_model_gradient(struct gpu_model *m, const struct gpu_gradient *io)
{
    const uint64_t chunks = (io->rows + m->chunk_rows - 1) / m->chunk_rows;
    const struct gpu_columns a = { .d = io->d,
                                   .pre = io->pre,
                                   .out = io->out == io->d && io->pre == NULL ? NULL : io->out,
                                   .partial = io->dbias != NULL ? m->scratch.partial : NULL,
                                   .rows = io->rows,
                                   .cols = (uint32_t)io->cols,
                                   .chunk_rows = (uint32_t)m->chunk_rows,
                                   .out_dtype = m->dtype,
                                   .dim = m->shape.dim,
                                   .head_size = io->heads ? (uint32_t)m->head_size : 0,
                                   .seq = m->shape.seq };
    const struct gpu_columns_sum sum = { .partial = m->scratch.partial,
                                         .out = io->dbias,
                                         .cols = (uint32_t)(io->bias_cols > 0 ? io->bias_cols
                                                                              : io->cols),
                                         .chunks = (uint32_t)chunks,
                                         .stride = (uint32_t)io->cols };
    if (a.out == NULL && a.partial == NULL)
        return;
    gpu_launch(&m->gpu, GPU_KERNEL_columns, gpu_blocks_cols(io->cols, chunks), &a);
    gpu_model_columns_sum(m, &sum);
}

/* dx as a factor, and the gradient of a bias that was added to the stream. */
static const void *stream_gradient(struct gpu_model *m, float *dbias)
{
    gpu_model_gradient(m, &(struct gpu_gradient){ .d = m->scratch.dx,
                                                  .out = m->scratch.dx_factor,
                                                  .rows = m->rows,
                                                  .cols = m->shape.dim,
                                                  .dbias = dbias });
    return m->scratch.dx_factor;
}

static struct gpu_norm_io block_norm(const struct gpu_model *m, const struct gpu_acts *acts,
                                     const struct gpu_block_arrays *a, bool first)
{
    return (struct gpu_norm_io){ .x = first ? acts->x : acts->mid,
                                 .mean = first ? acts->mean1 : acts->mean2,
                                 .rstd = first ? acts->rstd1 : acts->rstd2,
                                 .weight = block_param(m, a, first ? BLOCK_LN1_W : BLOCK_LN2_W),
                                 .shift = block_param(m, a, first ? BLOCK_LN1_B : BLOCK_LN2_B),
                                 .full = !first && m->shape.experts > 0 };
}

void gpu_model_block_attention(struct gpu_model *m, struct gpu_acts *acts,
                               const struct gpu_block_arrays *a)
{
    const struct gpu_norm_io norm1 = block_norm(m, acts, a, true);
    const struct gpu_norm_io norm2 = block_norm(m, acts, a, false);
    const struct gpu_to_heads split = { .in = m->scratch.wide,
                                        .bias = block_param(m, a, BLOCK_ATTN_B),
                                        .out = acts->heads,
                                        .rows = m->rows,
                                        .dim = m->shape.dim,
                                        .parts = 3,
                                        .head_size = (uint32_t)m->head_size,
                                        .seq = m->shape.seq,
                                        .param_dtype = m->dtype,
                                        .out_dtype = m->dtype };
    gpu_model_norm(m, &norm1, NULL, NULL, NULL, acts->norm1);
    matrix_forward(m, acts, a, GPU_ATTN, acts->norm1, m->scratch.wide);
    gpu_launch(&m->gpu, GPU_KERNEL_to_heads, gpu_blocks_elems(3 * m->rows * m->shape.dim), &split);
    gpu_model_attention(m, acts);
    matrix_forward(m, acts, a, GPU_PROJ, acts->att, m->scratch.wide);
    gpu_model_norm(m, &norm2, m->scratch.wide, block_param(m, a, BLOCK_PROJ_B), acts->x,
                   acts->norm2);
}

/* All that backward reads, but the last matrix's adapter. */
static void inner_forward(struct gpu_model *m, struct gpu_acts *acts,
                          const struct gpu_block_arrays *a)
{
    const struct gpu_bias_gelu gelu = { .pre = acts->pre,
                                        .act = acts->act,
                                        .bias = block_param(m, a, BLOCK_FC_B),
                                        .elems = 4 * m->rows * m->shape.dim,
                                        .cols = 4 * m->shape.dim,
                                        .param_dtype = m->dtype,
                                        .act_dtype = m->dtype };
    gpu_model_block_attention(m, acts, a);
    matrix_forward(m, acts, a, GPU_FC, acts->norm2, acts->pre);
    gpu_launch(&m->gpu, GPU_KERNEL_bias_gelu, gpu_blocks_elems(gelu.elems), &gelu);
}

void gpu_model_block(struct gpu_model *m, uint32_t layer, const struct gpu_block_arrays *a)
{
    struct gpu_acts *acts = &m->blocks[layer];
    const uint64_t width = m->rows * m->shape.dim;
    const struct gpu_residual sum = { .x = gpu_model_stream(m, layer + 1),
                                      .raw = m->scratch.wide,
                                      .residual = acts->mid,
                                      .bias = block_param(m, a, BLOCK_MLP_B),
                                      .elems = width,
                                      .cols = m->shape.dim,
                                      .param_dtype = m->dtype };
    inner_forward(m, acts, a);
    m->held = layer;
    matrix_forward(m, acts, a, GPU_MLP, acts->act, m->scratch.wide);
    gpu_launch(&m->gpu, GPU_KERNEL_residual, gpu_blocks_elems(sum.elems), &sum);
}

void gpu_model_block_attention_backward(struct gpu_model *m, struct gpu_acts *acts,
                                        const struct gpu_block_arrays *a)
{
    const struct gpu_norm_io norm1 = block_norm(m, acts, a, true);
    const struct gpu_norm_io norm2 = block_norm(m, acts, a, false);
    gpu_model_norm_backward(m, &norm2, /* add= */ true, block_grad(m, a, BLOCK_LN2_W),
                            block_grad(m, a, BLOCK_LN2_B));
    const void *dy = stream_gradient(m, block_grad(m, a, BLOCK_PROJ_B));
    matrix_backward(m, acts, a, GPU_PROJ, acts->att, dy, m->scratch.d1);
    gpu_model_attention_backward(m, acts);
    gpu_model_gradient(m, &(struct gpu_gradient){ .d = m->scratch.dheads,
                                                  .out = m->scratch.wide_factor,
                                                  .rows = m->rows,
                                                  .cols = 3 * (uint64_t)m->shape.dim,
                                                  .dbias = block_grad(m, a, BLOCK_ATTN_B),
                                                  .heads = true });
    matrix_backward(m, acts, a, GPU_ATTN, acts->norm1, m->scratch.wide_factor, m->scratch.d1);
    gpu_model_norm_backward(m, &norm1, /* add= */ true, block_grad(m, a, BLOCK_LN1_W),
                            block_grad(m, a, BLOCK_LN1_B));
}

void gpu_model_block_backward(struct gpu_model *m, uint32_t layer, const struct gpu_block_arrays *a)
{
    struct gpu_acts *acts = &m->blocks[layer];
    if (m->recompute && m->held != layer) {
        inner_forward(m, acts, a);
        adapter_forward(m, acts, a, GPU_MLP, acts->act);
    }
    m->held = GPU_HELD_NONE; /* backward spoils them */
    const void *dy = stream_gradient(m, block_grad(m, a, BLOCK_MLP_B));
    matrix_backward(m, acts, a, GPU_MLP, acts->act, dy, m->scratch.wide);
    gpu_model_gradient(m, &(struct gpu_gradient){ .d = m->scratch.wide,
                                                  .pre = acts->pre,
                                                  .out = m->scratch.wide_factor,
                                                  .rows = m->rows,
                                                  .cols = 4 * (uint64_t)m->shape.dim,
                                                  .dbias = block_grad(m, a, BLOCK_FC_B) });
    matrix_backward(m, acts, a, GPU_FC, acts->norm2, m->scratch.wide_factor, m->scratch.d1);
    gpu_model_block_attention_backward(m, acts, a);
}
