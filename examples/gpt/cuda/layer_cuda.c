/* layer_cuda.c: a layer on a GPU; see layer_cuda.h, and model_layer.c for the formulas. A bias is
 * added by the kernel that reads the product next.
 *
 * The host's routing: a row goes to the expert with the largest logit, packed rows are sorted by
 * expert and ascending within one. The router's products stay fp32, also with --math tf32 and in 16
 * bits: where a row goes should not hang on how inputs are rounded. It may still differ from the
 * host's, where two logits are as close as their sums' rounding.
 *
 * An expert's products are over its rows alone, so their number must be known here: the router
 * copies each expert's first packed row to m->routes, E + 1 numbers a layer. The caller waits for
 * the stream after each unit anyway, before libshd asks for the next one.
 */
#include "examples/gpt/cuda/layer_cuda.h"

#include <assert.h>

#include "examples/gpt/cuda/attention_cuda.h"

static_assert(GPT_EXPERTS_MAX <= GPU_THREADS, "a thread of a block for each expert");

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
                                 enum gpt_matrix which)
{
    const struct gpt_matrix_row *row = &gpt_matrices[which];
    const uint64_t *at = m->layout.at[GPT_LORA];
    return (struct adapter){ .a = gpu_model_param(m, a->low, at[row->low]),
                             .b = gpu_model_param(m, a->low, at[row->low + 1]),
                             .a_grad = gpu_model_grad(a->low_grad, at[row->low]),
                             .b_grad = gpu_model_grad(a->low_grad, at[row->low + 1]) };
}

/* y = x W, of so many rows; T [rows, in], [in, out]. */
static void product(struct gpu_model *m, struct gpu_size s, const void *x, const void *weight,
                    struct gpu_matrix y)
{
    multiply(m, s, factor(m, x, s.k), factor(m, weight, s.n), y, PRODUCT);
}

/* dW = x^T dy unless it is NULL; x [rows, in], dy [rows, out] of T. */
static void weight_gradient(struct gpu_model *m, struct gpu_size s, const void *x, const void *dy,
                            float *dweight)
{
    if (dweight != NULL)
        multiply(m, s, factor_t(m, x, s.m), factor(m, dy, s.n), floats(dweight, s.n), PRODUCT);
}

/* x A, where there are adapters. */
static void adapter_forward(struct gpu_model *m, struct gpu_acts *acts,
                            const struct gpu_block_arrays *a, enum gpt_matrix which, const void *x)
{
    const uint64_t in = gpt_matrices[which].in * (uint64_t)m->shape.dim, rank = m->shape.rank;
    if (a->low != NULL)
        product(m, (struct gpu_size){ m->rows, rank, in }, x, adapter_of(m, a, which).a,
                factor(m, acts->low[which], rank));
}

/* y = x W (+ (x A) B), without the bias. */
static void matrix_forward(struct gpu_model *m, struct gpu_acts *acts,
                           const struct gpu_block_arrays *a, enum gpt_matrix which, const void *x,
                           float *y)
{
    const struct gpt_matrix_row *row = &gpt_matrices[which];
    const uint64_t in = row->in * (uint64_t)m->shape.dim, out = row->out * (uint64_t)m->shape.dim;
    const uint64_t rank = m->shape.rank;
    product(m, (struct gpu_size){ m->rows, out, in }, x, block_param(m, a, row->weight),
            floats(y, out));
    adapter_forward(m, acts, a, which, x);
    if (a->low != NULL)
        multiply(m, (struct gpu_size){ m->rows, out, rank }, factor(m, acts->low[which], rank),
                 factor(m, adapter_of(m, a, which).b, out), floats(y, out), PRODUCT_ADD);
}

/* dW = x^T dy unless frozen, dx = dy W^T (+ d(x A) A^T). */
static void matrix_backward(struct gpu_model *m, const struct gpu_acts *acts,
                            const struct gpu_block_arrays *a, enum gpt_matrix which, const void *x,
                            const void *dy, float *dx)
{
    const struct gpt_matrix_row *row = &gpt_matrices[which];
    const uint64_t in = row->in * (uint64_t)m->shape.dim, out = row->out * (uint64_t)m->shape.dim;
    const uint64_t rank = m->shape.rank, rows = m->rows;
    void *dlow = m->scratch.dlow;
    weight_gradient(m, (struct gpu_size){ in, out, rows }, x, dy, block_grad(m, a, row->weight));
    multiply(m, (struct gpu_size){ rows, in, out }, factor(m, dy, out),
             factor_t(m, block_param(m, a, row->weight), out), floats(dx, in), PRODUCT);
    if (a->low == NULL)
        return;
    const struct adapter low = adapter_of(m, a, which);
    weight_gradient(m, (struct gpu_size){ rank, out, rows }, acts->low[which], dy, low.b_grad);
    multiply(m, (struct gpu_size){ rows, rank, out }, factor(m, dy, out), factor_t(m, low.b, out),
             factor(m, dlow, rank), PRODUCT);
    weight_gradient(m, (struct gpu_size){ in, rank, rows }, x, dlow, low.a_grad);
    multiply(m, (struct gpu_size){ rows, in, rank }, factor(m, dlow, rank),
             factor_t(m, low.a, rank), floats(dx, in), PRODUCT_ADD);
}

/* A gradient [rows, cols] of a matrix's output: its bias's gradient, and itself as a factor. */
struct gpu_gradient {
    const float *d, *pre; /* d may be of heads; pre NULL, or: times gelu'(pre) */
    void *out;            /* T; NULL: no factor is wanted */
    uint64_t rows, cols;  /* rows at most R */
    float *dbias;         /* NULL: frozen */
    uint64_t bias_cols;   /* of dbias: the first ones; 0: cols */
    bool heads;
};

static void gradient(struct gpu_model *m, const struct gpu_gradient *io)
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
    gradient(m, &(struct gpu_gradient){ .d = m->scratch.dx,
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

static void block_attention(struct gpu_model *m, struct gpu_acts *acts,
                            const struct gpu_block_arrays *a)
{
    const struct gpu_norm_io norm1 = block_norm(m, acts, a, true);
    const struct gpu_norm_io norm2 = block_norm(m, acts, a, false);
    gpu_model_norm(m, &norm1, NULL, NULL, NULL, acts->norm1);
    matrix_forward(m, acts, a, GPT_ATTN, acts->norm1, m->scratch.wide);
    gpu_model_to_heads(m, m->scratch.wide, block_param(m, a, BLOCK_ATTN_B), 3, acts->heads);
    gpu_model_attention(m, acts);
    matrix_forward(m, acts, a, GPT_PROJ, acts->att, m->scratch.wide);
    gpu_model_norm(m, &norm2, m->scratch.wide, block_param(m, a, BLOCK_PROJ_B), acts->x,
                   acts->norm2);
}

/* The part of forward whose results backward reads, but for the last matrix's adapter. */
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
    block_attention(m, acts, a);
    matrix_forward(m, acts, a, GPT_FC, acts->norm2, acts->pre);
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
    matrix_forward(m, acts, a, GPT_MLP, acts->act, m->scratch.wide);
    gpu_launch(&m->gpu, GPU_KERNEL_residual, gpu_blocks_elems(sum.elems), &sum);
}

static void block_attention_backward(struct gpu_model *m, struct gpu_acts *acts,
                                     const struct gpu_block_arrays *a)
{
    const struct gpu_norm_io norm1 = block_norm(m, acts, a, true);
    const struct gpu_norm_io norm2 = block_norm(m, acts, a, false);
    gpu_model_norm_backward(m, &norm2, /* add= */ true, block_grad(m, a, BLOCK_LN2_W),
                            block_grad(m, a, BLOCK_LN2_B));
    const void *dy = stream_gradient(m, block_grad(m, a, BLOCK_PROJ_B));
    matrix_backward(m, acts, a, GPT_PROJ, acts->att, dy, m->scratch.d1);
    gpu_model_attention_backward(m, acts);
    gradient(m, &(struct gpu_gradient){ .d = m->scratch.dheads,
                                        .out = m->scratch.wide_factor,
                                        .rows = m->rows,
                                        .cols = 3 * (uint64_t)m->shape.dim,
                                        .dbias = block_grad(m, a, BLOCK_ATTN_B),
                                        .heads = true });
    matrix_backward(m, acts, a, GPT_ATTN, acts->norm1, m->scratch.wide_factor, m->scratch.d1);
    gpu_model_norm_backward(m, &norm1, /* add= */ true, block_grad(m, a, BLOCK_LN1_W),
                            block_grad(m, a, BLOCK_LN1_B));
}

void gpu_model_block_backward(struct gpu_model *m, uint32_t layer, const struct gpu_block_arrays *a)
{
    struct gpu_acts *acts = &m->blocks[layer];
    if (m->recompute && m->held != layer) {
        inner_forward(m, acts, a);
        adapter_forward(m, acts, a, GPT_MLP, acts->act);
    }
    m->held = GPU_HELD_NONE; /* backward spoils them */
    const void *dy = stream_gradient(m, block_grad(m, a, BLOCK_MLP_B));
    matrix_backward(m, acts, a, GPT_MLP, acts->act, dy, m->scratch.wide);
    gradient(m, &(struct gpu_gradient){ .d = m->scratch.wide,
                                        .pre = acts->pre,
                                        .out = m->scratch.wide_factor,
                                        .rows = m->rows,
                                        .cols = 4 * (uint64_t)m->shape.dim,
                                        .dbias = block_grad(m, a, BLOCK_FC_B) });
    matrix_backward(m, acts, a, GPT_FC, acts->norm2, m->scratch.wide_factor, m->scratch.d1);
    block_attention_backward(m, acts, a);
}

/* -- Router ---------------------------------------------------------------------------------- */

static uint32_t *routes_of(const struct gpu_model *m, uint32_t layer)
{
    return m->routes + layer * ((uint64_t)m->shape.experts + 1);
}

/* [C, E] in fp32. */
static struct gpu_matrix router_matrix(struct gpu_model *m, const struct gpu_block_arrays *a)
{
    const struct gpu_widen widen = { .in = block_param(m, a, BLOCK_ROUTER_W),
                                     .out = m->scratch.router,
                                     .elems = (uint64_t)m->shape.dim * m->shape.experts,
                                     .dtype = m->dtype };
    if (m->dtype == GPU_F32)
        return floats(widen.in, m->shape.experts);
    gpu_launch(&m->gpu, GPU_KERNEL_widen, gpu_blocks_elems(widen.elems), &widen);
    return floats(m->scratch.router, m->shape.experts);
}

static void route_sort(struct gpu_model *m, const struct gpu_moe *moe)
{
    const uint32_t experts = m->shape.experts;
    const struct gpu_route_count count = { .chosen = moe->chosen,
                                           .counts = m->scratch.counts,
                                           .rows = m->rows,
                                           .experts = experts,
                                           .chunk_rows = (uint32_t)m->chunk_rows };
    const struct gpu_route_first first = { .counts = m->scratch.counts,
                                           .first = moe->first,
                                           .experts = experts,
                                           .chunks = (uint32_t)m->chunks };
    const struct gpu_route_place place = { .chosen = moe->chosen,
                                           .places = m->scratch.counts,
                                           .row = moe->row,
                                           .rows = m->rows,
                                           .experts = experts,
                                           .chunk_rows = (uint32_t)m->chunk_rows };
    gpu_launch(&m->gpu, GPU_KERNEL_route_count, m->chunks, &count);
    gpu_launch(&m->gpu, GPU_KERNEL_route_first, 1, &first);
    gpu_launch(&m->gpu, GPU_KERNEL_route_place, m->chunks, &place);
}

void gpu_model_router(struct gpu_model *m, uint32_t layer, const struct gpu_block_arrays *a)
{
    struct gpu_acts *acts = &m->blocks[layer];
    const struct gpu_moe *moe = &acts->moe;
    const uint64_t dim = m->shape.dim, experts = m->shape.experts;
    const struct gpu_route route = { .prob = moe->prob,
                                     .bias = block_param(m, a, BLOCK_ROUTER_B),
                                     .chosen = moe->chosen,
                                     .rows = m->rows,
                                     .experts = m->shape.experts,
                                     .stride = (uint32_t)m->experts_stride,
                                     .param_dtype = m->dtype };
    block_attention(m, acts, a);
    m->held = layer; /* its experts' arrays, too, once they have run */
    multiply(m, (struct gpu_size){ m->rows, experts, dim }, floats(acts->norm2, dim),
             router_matrix(m, a), floats(moe->prob, m->experts_stride), PRODUCT_FULL);
    gpu_launch(&m->gpu, GPU_KERNEL_route, gpu_blocks_rows(m->rows), &route);
    route_sort(m, moe);
    gpu_copy(&m->gpu, routes_of(m, layer), moe->first, (experts + 1) * sizeof *moe->first);
}

/* The experts have left the gradient of ln_2's output in d1 and that of their gates in dgate. */
void gpu_model_router_backward(struct gpu_model *m, uint32_t layer,
                               const struct gpu_block_arrays *a)
{
    struct gpu_acts *acts = &m->blocks[layer];
    const uint64_t dim = m->shape.dim, experts = m->shape.experts;
    const struct gpu_route_grad route = { .prob = acts->moe.prob,
                                          .dgate = m->scratch.dgate,
                                          .chosen = acts->moe.chosen,
                                          .rows = m->rows,
                                          .experts = m->shape.experts,
                                          .stride = (uint32_t)m->experts_stride };
    const struct gpu_matrix dlogits = floats(acts->moe.prob, m->experts_stride);
    float *dweight = block_grad(m, a, BLOCK_ROUTER_W);
    if (m->recompute && m->held != layer)
        block_attention(m, acts, a); /* where rows went was kept */
    m->held = GPU_HELD_NONE;         /* backward spoils them */
    gpu_launch(&m->gpu, GPU_KERNEL_route_grad, gpu_blocks_rows(m->rows), &route);
    if (dweight != NULL)
        multiply(m, (struct gpu_size){ dim, experts, m->rows },
                 transposed(floats(acts->norm2, dim)), dlogits, floats(dweight, experts),
                 PRODUCT_FULL);
    gradient(m, &(struct gpu_gradient){ .d = acts->moe.prob,
                                        .rows = m->rows,
                                        .cols = m->experts_stride,
                                        .dbias = block_grad(m, a, BLOCK_ROUTER_B),
                                        .bias_cols = experts });
    multiply(m, (struct gpu_size){ m->rows, dim, experts }, dlogits,
             transposed(router_matrix(m, a)), floats(m->scratch.d1, dim),
             PRODUCT_ADD | PRODUCT_FULL);
    block_attention_backward(m, acts, a);
}

/* -- Experts --------------------------------------------------------------------------------- */

uint64_t gpu_model_expert_rows(const struct gpu_model *m, struct gpt_unit u)
{
    const uint32_t *first = routes_of(m, u.layer);
    return first[u.expert + 1] - first[u.expert];
}

/* An expert's part of its layer's packed arrays. */
struct expert {
    uint64_t rows;
    const uint32_t *row; /* [rows] */
    const float *prob;   /* the layer's */
    void *in, *act;      /* T [rows, C], [rows, 4C] */
    float *pre, *out;    /* [rows, 4C], [rows, C] */
};

static struct expert expert_of(const struct gpu_model *m, struct gpt_unit u)
{
    const struct gpu_acts *acts = &m->blocks[u.layer];
    const uint64_t first = routes_of(m, u.layer)[u.expert], at = first * m->shape.dim;
    return (struct expert){ .rows = gpu_model_expert_rows(m, u),
                            .row = acts->moe.row + first,
                            .prob = acts->moe.prob,
                            .in = gpu_model_at(m, acts->moe.in, at),
                            .act = gpu_model_at(m, acts->act, 4 * at),
                            .pre = acts->pre + 4 * at,
                            .out = acts->moe.out + at };
}

static const void *expert_param(const struct gpu_model *m, const void *params,
                                enum gpt_expert_tensor tensor)
{
    return gpu_model_param(m, params, m->layout.at[GPT_EXPERT][tensor]);
}

static void expert_combine(struct gpu_model *m, struct gpt_unit u, const struct expert *x,
                           const void *bias)
{
    const struct gpu_expert_combine a = { .x = gpu_model_stream(m, u.layer + 1),
                                          .out = x->out,
                                          .mid = m->blocks[u.layer].mid,
                                          .prob = x->prob,
                                          .bias = bias,
                                          .row = x->row,
                                          .elems = x->rows * m->shape.dim,
                                          .cols = m->shape.dim,
                                          .expert = u.expert,
                                          .stride = (uint32_t)m->experts_stride,
                                          .param_dtype = m->dtype };
    gpu_launch(&m->gpu, GPU_KERNEL_expert_combine, gpu_blocks_elems(a.elems), &a);
}

/* The part of an expert's forward whose results backward reads. */
static void expert_inner(struct gpu_model *m, struct gpt_unit u, const struct expert *x,
                         const void *params)
{
    const uint64_t dim = m->shape.dim, wide = 4 * dim;
    const struct gpu_expert_gather gather = { .x = m->blocks[u.layer].norm2,
                                              .row = x->row,
                                              .out = x->in,
                                              .elems = x->rows * dim,
                                              .cols = m->shape.dim,
                                              .out_dtype = m->dtype };
    const struct gpu_bias_gelu gelu = { .pre = x->pre,
                                        .act = x->act,
                                        .bias = expert_param(m, params, EXPERT_FC_B),
                                        .elems = x->rows * wide,
                                        .cols = (uint32_t)wide,
                                        .param_dtype = m->dtype,
                                        .act_dtype = m->dtype };
    gpu_launch(&m->gpu, GPU_KERNEL_expert_gather, gpu_blocks_elems(gather.elems), &gather);
    product(m, (struct gpu_size){ x->rows, wide, dim }, x->in, expert_param(m, params, EXPERT_FC_W),
            floats(x->pre, wide));
    gpu_launch(&m->gpu, GPU_KERNEL_bias_gelu, gpu_blocks_elems(gelu.elems), &gelu);
    product(m, (struct gpu_size){ x->rows, dim, wide }, x->act,
            expert_param(m, params, EXPERT_MLP_W), floats(x->out, dim));
}

void gpu_model_expert(struct gpu_model *m, struct gpt_unit u, const void *params)
{
    const struct expert x = expert_of(m, u);
    if (x.rows == 0)
        return;
    expert_inner(m, u, &x, params);
    expert_combine(m, u, &x, expert_param(m, params, EXPERT_MLP_B));
}

/* dx to dout, packed, and dgate. */
static void expert_split(struct gpu_model *m, struct gpt_unit u, const struct expert *x,
                         const void *bias, float *dout)
{
    const struct gpu_expert_split a = { .dx = m->scratch.dx,
                                        .out = x->out,
                                        .prob = x->prob,
                                        .bias = bias,
                                        .row = x->row,
                                        .dout = dout,
                                        .dgate = m->scratch.dgate,
                                        .rows = x->rows,
                                        .cols = m->shape.dim,
                                        .expert = u.expert,
                                        .stride = (uint32_t)m->experts_stride,
                                        .param_dtype = m->dtype };
    gpu_launch(&m->gpu, GPU_KERNEL_expert_split, gpu_blocks_rows(x->rows), &a);
}

/* Attention's scratch holds what is packed; d1 gets each row's gradient of ln_2's output. */
void gpu_model_expert_backward(struct gpu_model *m, struct gpt_unit u, const void *params,
                               float *grad)
{
    const struct expert x = expert_of(m, u);
    const uint64_t dim = m->shape.dim, wide = 4 * dim, *at = m->layout.at[GPT_EXPERT];
    float *dout = m->scratch.dheads, *din = m->scratch.dheads + m->rows * dim;
    void *dy = m->dtype == GPU_F32 ? (void *)dout : m->scratch.heads;
    void *dact = m->scratch.wide_factor;
    const struct gpu_expert_scatter scatter = {
        .in = din, .row = x.row, .out = m->scratch.d1, .elems = x.rows * dim, .cols = m->shape.dim
    };
    if (x.rows == 0)
        return;
    if (m->recompute && m->held != u.layer)
        expert_inner(m, u, &x, params);
    expert_split(m, u, &x, expert_param(m, params, EXPERT_MLP_B), dout);
    gradient(m, &(struct gpu_gradient){ .d = dout,
                                        .out = dy,
                                        .rows = x.rows,
                                        .cols = dim,
                                        .dbias = gpu_model_grad(grad, at[EXPERT_MLP_B]) });
    weight_gradient(m, (struct gpu_size){ wide, dim, x.rows }, x.act, dy,
                    gpu_model_grad(grad, at[EXPERT_MLP_W]));
    multiply(m, (struct gpu_size){ x.rows, wide, dim }, factor(m, dy, dim),
             factor_t(m, expert_param(m, params, EXPERT_MLP_W), dim), floats(m->scratch.wide, wide),
             PRODUCT);
    gradient(m, &(struct gpu_gradient){ .d = m->scratch.wide,
                                        .pre = x.pre,
                                        .out = dact,
                                        .rows = x.rows,
                                        .cols = wide,
                                        .dbias = gpu_model_grad(grad, at[EXPERT_FC_B]) });
    weight_gradient(m, (struct gpu_size){ dim, wide, x.rows }, x.in, dact,
                    gpu_model_grad(grad, at[EXPERT_FC_W]));
    multiply(m, (struct gpu_size){ x.rows, dim, wide }, factor(m, dact, wide),
             factor_t(m, expert_param(m, params, EXPERT_FC_W), wide), floats(din, dim), PRODUCT);
    gpu_launch(&m->gpu, GPU_KERNEL_expert_scatter, gpu_blocks_elems(scatter.elems), &scatter);
}
