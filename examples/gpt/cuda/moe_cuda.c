/* moe_cuda.c: router and experts on a GPU; see moe_cuda.h, and model_layer.c for the formulas.
 *
 * The host's routing: a row goes to the expert with the largest logit, packed rows are sorted by
 * expert and ascending within one. The router's products stay fp32, also with --math tf32 and in 16
 * bits: where a row goes should not hang on how inputs are rounded. It may still differ from the
 * host's, where two logits are as close as their sums' rounding.
 *
 * An expert's products are over its rows alone, so their number must be known here: the router
 * copies each expert's first packed row to m->routes, E + 1 numbers a layer. Who calls waits for
 * the stream after each unit anyway, before libshd asks for the next one.
 */
#include "examples/gpt/cuda/moe_cuda.h"

#include <assert.h>

static_assert(GPT_EXPERTS_MAX <= GPU_THREADS, "a thread of a block for each expert");

/* -- Router ---------------------------------------------------------------------------------- */

static uint32_t *routes_of(const struct gpu_model *m, uint32_t layer)
{
    return m->routes + layer * ((uint64_t)m->shape.experts + 1);
}

static const void *router_param(const struct gpu_model *m, const struct gpu_block_arrays *a,
                                enum gpt_block_tensor tensor)
{
    return gpu_model_param(m, a->base, m->layout.at[GPT_BLOCK][tensor]);
}

/* [C, E] in fp32. */
static struct gpu_matrix router_matrix(struct gpu_model *m, const struct gpu_block_arrays *a)
{
    const struct gpu_widen widen = { .in = router_param(m, a, BLOCK_ROUTER_W),
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
                                     .bias = router_param(m, a, BLOCK_ROUTER_B),
                                     .chosen = moe->chosen,
                                     .rows = m->rows,
                                     .experts = m->shape.experts,
                                     .stride = (uint32_t)m->experts_stride,
                                     .param_dtype = m->dtype };
    struct gpu_product p = { .m = m->rows, .n = experts, .k = dim, .full = true };
    gpu_model_block_attention(m, acts, a);
    m->held = layer; /* its experts' arrays, too, once they have run */
    p.a = floats(acts->norm2, dim);
    p.b = router_matrix(m, a);
    p.c = floats(moe->prob, m->experts_stride);
    gpu_multiply(&m->gpu, &p);
    gpu_launch(&m->gpu, GPU_KERNEL_route, gpu_blocks_rows(m->rows), &route);
    route_sort(m, moe);
    gpu_copy(&m->gpu, routes_of(m, layer), moe->first, (experts + 1) * sizeof *moe->first);
}

/* Gradients of the router's matrix and bias from those of its logits. */
static void router_gradients(struct gpu_model *m, const struct gpu_acts *acts, float *grad)
{
    const uint64_t dim = m->shape.dim, experts = m->shape.experts;
    const uint64_t *at = m->layout.at[GPT_BLOCK];
    struct gpu_product p = { .m = dim, .n = experts, .k = m->rows, .full = true };
    p.a = floats(acts->norm2, dim);
    p.a.transposed = true;
    p.b = floats(acts->moe.prob, m->experts_stride);
    p.c = floats(gpu_model_grad(grad, at[BLOCK_ROUTER_W]), experts);
    gpu_multiply(&m->gpu, &p);
    gpu_model_gradient(m, &(struct gpu_gradient){ .d = acts->moe.prob,
                                                  .rows = m->rows,
                                                  .cols = m->experts_stride,
                                                  .dbias = gpu_model_grad(grad, at[BLOCK_ROUTER_B]),
                                                  .bias_cols = experts });
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
    struct gpu_product p = { .m = m->rows, .n = dim, .k = experts, .add = true, .full = true };
    if (m->recompute && m->held != layer)
        gpu_model_block_attention(m, acts, a); /* where rows went was kept */
    m->held = GPU_HELD_NONE;                   /* backward spoils them */
    gpu_launch(&m->gpu, GPU_KERNEL_route_grad, gpu_blocks_rows(m->rows), &route);
    if (a->grad != NULL)
        router_gradients(m, acts, a->grad);
    p.a = floats(acts->moe.prob, m->experts_stride);
    p.b = router_matrix(m, a);
    p.b.transposed = true;
    p.c = floats(m->scratch.d1, dim);
    gpu_multiply(&m->gpu, &p);
    gpu_model_block_attention_backward(m, acts, a);
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

/* y = x W. */
static void expert_layer(struct gpu_model *m, uint64_t rows, const void *x, uint64_t in,
                         const void *weight, float *y, uint64_t out)
{
    struct gpu_product p = { .m = rows, .n = out, .k = in, .a = factor(m, x, in) };
    p.b = factor(m, weight, out);
    p.c = floats(y, out);
    gpu_multiply(&m->gpu, &p);
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

/* All that backward reads. */
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
    expert_layer(m, x->rows, x->in, dim, expert_param(m, params, EXPERT_FC_W), x->pre, wide);
    gpu_launch(&m->gpu, GPU_KERNEL_bias_gelu, gpu_blocks_elems(gelu.elems), &gelu);
    expert_layer(m, x->rows, x->act, wide, expert_param(m, params, EXPERT_MLP_W), x->out, dim);
}

void gpu_model_expert(struct gpu_model *m, struct gpt_unit u, const void *params)
{
    const struct expert x = expert_of(m, u);
    if (x.rows == 0)
        return;
    expert_inner(m, u, &x, params);
    expert_combine(m, u, &x, expert_param(m, params, EXPERT_MLP_B));
}

/* dW = x^T dy and dx = dy W^T. */
struct expert_layer_grad {
    const void *x, *dy, *weight; /* T */
    float *dweight, *dx;
    uint64_t in, out;
};

static void expert_layer_backward(struct gpu_model *m, uint64_t rows,
                                  const struct expert_layer_grad *io)
{
    struct gpu_product p = { .m = io->in, .n = io->out, .k = rows };
    p.a = factor_t(m, io->x, io->in);
    p.b = factor(m, io->dy, io->out);
    p.c = floats(io->dweight, io->out);
    gpu_multiply(&m->gpu, &p);
    p = (struct gpu_product){ .m = rows, .n = io->in, .k = io->out };
    p.a = factor(m, io->dy, io->out);
    p.b = factor_t(m, io->weight, io->out);
    p.c = floats(io->dx, io->in);
    gpu_multiply(&m->gpu, &p);
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
    const uint64_t dim = m->shape.dim, *at = m->layout.at[GPT_EXPERT];
    float *dout = m->scratch.dheads, *din = m->scratch.dheads + m->rows * dim;
    void *dout_factor = m->dtype == GPU_F32 ? (void *)dout : m->scratch.heads;
    const struct gpu_gradient narrow = { .d = dout,
                                         .out = dout_factor,
                                         .rows = x.rows,
                                         .cols = dim,
                                         .dbias = gpu_model_grad(grad, at[EXPERT_MLP_B]) };
    const struct gpu_gradient wide = { .d = m->scratch.wide,
                                       .pre = x.pre,
                                       .out = m->scratch.wide_factor,
                                       .rows = x.rows,
                                       .cols = 4 * dim,
                                       .dbias = gpu_model_grad(grad, at[EXPERT_FC_B]) };
    const struct gpu_expert_scatter scatter = {
        .in = din, .row = x.row, .out = m->scratch.d1, .elems = x.rows * dim, .cols = m->shape.dim
    };
    struct expert_layer_grad layer = { .x = x.act,
                                       .dy = dout_factor,
                                       .weight = expert_param(m, params, EXPERT_MLP_W),
                                       .dweight = gpu_model_grad(grad, at[EXPERT_MLP_W]),
                                       .dx = m->scratch.wide,
                                       .in = 4 * dim,
                                       .out = dim };
    if (x.rows == 0)
        return;
    if (m->recompute && m->held != u.layer)
        expert_inner(m, u, &x, params);
    expert_split(m, u, &x, expert_param(m, params, EXPERT_MLP_B), dout);
    gpu_model_gradient(m, &narrow);
    expert_layer_backward(m, x.rows, &layer);
    gpu_model_gradient(m, &wide);
    layer = (struct expert_layer_grad){ .x = x.in,
                                        .dy = m->scratch.wide_factor,
                                        .weight = expert_param(m, params, EXPERT_FC_W),
                                        .dweight = gpu_model_grad(grad, at[EXPERT_FC_W]),
                                        .dx = din,
                                        .in = dim,
                                        .out = 4 * dim };
    expert_layer_backward(m, x.rows, &layer);
    gpu_launch(&m->gpu, GPU_KERNEL_expert_scatter, gpu_blocks_elems(scatter.elems), &scatter);
}
