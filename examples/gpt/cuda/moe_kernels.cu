/* moe_kernels.cu: routing of rows to experts, and what is around an expert's products; see args.h
 * for what each does, and model_layer.c for the formulas.
 *
 * Rows are sorted by a counting sort in chunks: each chunk's rows of each expert are counted, one
 * block turns the counts into places, and each chunk puts its rows there, ascending. A thread
 * stands for an expert and looks at all rows of its chunk, so nothing depends on who comes first.
 */
#include "examples/gpt/cuda/lanes.cuh"

DEVICE float moe_infinity(void)
{
    return f32_of_bits(0x7f800000u);
}

DEVICE float moe_load(const void *p, uint64_t at, uint32_t dtype)
{
    return dtype == GPU_F32 ? ((const float *)p)[at] : from_half(((const uint16_t *)p)[at], dtype);
}

/* -- Routing --------------------------------------------------------------------------------- */

/* As route_row() has it: a NaN is never the largest, but who begins with one stays with expert 0.
 */
DEVICE float moe_key(float logit, uint32_t expert)
{
    if (logit == logit)
        return logit;
    return expert == 0 ? moe_infinity() : -moe_infinity();
}

KERNEL(gpt_gpu_route, struct gpu_route)
{
    const uint64_t row = lanes_row();
    const uint32_t lane = threadIdx.x % 32;
    if (row >= a.rows)
        return;
    float *prob = a.prob + row * a.stride;
    float best = -moe_infinity(), sum = 0;
    uint32_t chosen = 0xffffffffu; /* none yet: behind every expert */
    for (uint32_t x = lane; x < a.experts; x += 32) {
        const float logit = prob[x] + moe_load(a.bias, x, a.param_dtype);
        const float key = moe_key(logit, x);
        prob[x] = logit;
        chosen = key > best || chosen == 0xffffffffu ? x : chosen;
        best = key > best ? key : best;
    }
    for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, best, step);
        const uint32_t its = __shfl_xor_sync(0xffffffffu, chosen, step);
        chosen = other > best || (other == best && its < chosen) ? its : chosen;
        best = other > best ? other : best;
    }
    for (uint32_t x = lane; x < a.experts; x += 32) {
        prob[x] = expf(prob[x] - best);
        sum += prob[x];
    }
    const float inverse = 1.0f / lanes_sum(sum);
    for (uint32_t x = lane; x < a.stride; x += 32)
        prob[x] = x < a.experts ? prob[x] * inverse : 0.0f;
    if (lane == 0)
        a.chosen[row] = chosen;
}

/* End of the block's chunk. */
DEVICE uint64_t moe_chunk_end(uint64_t rows, uint32_t chunk_rows)
{
    const uint64_t end = ((uint64_t)blockIdx.x + 1) * chunk_rows;
    return end < rows ? end : rows;
}

KERNEL(gpt_gpu_route_count, struct gpu_route_count)
{
    const uint32_t expert = threadIdx.x;
    const uint64_t end = moe_chunk_end(a.rows, a.chunk_rows);
    uint32_t count = 0;
    for (uint64_t row = (uint64_t)blockIdx.x * a.chunk_rows; row < end; row++)
        count += a.chosen[row] == expert ? 1 : 0;
    if (expert < a.experts)
        a.counts[blockIdx.x * a.experts + expert] = count;
}

KERNEL(gpt_gpu_route_first, struct gpu_route_first)
{
    __shared__ uint32_t totals[GPU_THREADS];
    const uint32_t expert = threadIdx.x;
    uint32_t total = 0, at = 0;
    for (uint32_t chunk = 0; chunk < a.chunks && expert < a.experts; chunk++)
        total += a.counts[chunk * a.experts + expert];
    totals[expert] = total;
    __syncthreads();
    if (expert >= a.experts)
        return;
    for (uint32_t before = 0; before < expert; before++)
        at += totals[before];
    a.first[expert] = at;
    if (expert + 1 == a.experts)
        a.first[a.experts] = at + total;
    for (uint32_t chunk = 0; chunk < a.chunks; chunk++) {
        const uint32_t count = a.counts[chunk * a.experts + expert];
        a.counts[chunk * a.experts + expert] = at;
        at += count;
    }
}

KERNEL(gpt_gpu_route_place, struct gpu_route_place)
{
    const uint32_t expert = threadIdx.x;
    const uint64_t end = moe_chunk_end(a.rows, a.chunk_rows);
    uint32_t at = expert < a.experts ? a.places[blockIdx.x * a.experts + expert] : 0;
    for (uint64_t row = (uint64_t)blockIdx.x * a.chunk_rows; row < end; row++)
        if (a.chosen[row] == expert)
            a.row[at++] = (uint32_t)row;
}

KERNEL(gpt_gpu_route_grad, struct gpu_route_grad)
{
    const uint64_t row = lanes_row();
    const uint32_t lane = threadIdx.x % 32;
    if (row >= a.rows)
        return;
    float *prob = a.prob + row * a.stride;
    const uint32_t chosen = a.chosen[row];
    const float scale = a.dgate[row] * prob[chosen];
    __syncwarp(); /* all have read prob[chosen] before one overwrites it */
    for (uint32_t x = lane; x < a.stride; x += 32)
        prob[x] = x < a.experts ? scale * ((x == chosen ? 1.0f : 0.0f) - prob[x]) : 0.0f;
}

KERNEL(gpt_gpu_widen, struct gpu_widen)
{
    const uint64_t at = lanes_element();
    if (at >= a.elems)
        return;
    const struct lanes8 x = lanes_load(a.in, at, a.dtype);
    lanes_store(a.out, at, GPU_F32, &x);
}

/* -- An expert's rows ------------------------------------------------------------------------ */

KERNEL(gpt_gpu_expert_gather, struct gpu_expert_gather)
{
    const uint64_t at = lanes_element();
    if (at >= a.elems)
        return;
    const uint64_t row = a.row[at / a.cols];
    const struct lanes8 x = lanes_load_f32(a.x, row * a.cols + at % a.cols);
    lanes_store(a.out, at, a.out_dtype, &x);
}

KERNEL(gpt_gpu_expert_combine, struct gpu_expert_combine)
{
    const uint64_t at = lanes_element();
    if (at >= a.elems)
        return;
    const uint64_t row = a.row[at / a.cols], col = at % a.cols, to = row * a.cols + col;
    const float gate = a.prob[row * a.stride + a.expert];
    const struct lanes8 bias = lanes_load(a.bias, col, a.param_dtype);
    const struct lanes8 out = lanes_load_f32(a.out, at);
    struct lanes8 x = lanes_load_f32(a.mid, to);
    for (int i = 0; i < 8; i++)
        x.v[i] = fmaf(gate, out.v[i] + bias.v[i], x.v[i]);
    lanes_store(a.x, to, GPU_F32, &x);
}

KERNEL(gpt_gpu_expert_split, struct gpu_expert_split)
{
    const uint64_t packed = lanes_row();
    const uint32_t lane = threadIdx.x % 32;
    if (packed >= a.rows)
        return;
    const uint64_t row = a.row[packed];
    const float gate = a.prob[row * a.stride + a.expert];
    float dot = 0;
    for (uint32_t col = lane * GPU_LANE; col < a.cols; col += GPU_COLS) {
        const struct lanes8 out = lanes_load_f32(a.out, packed * a.cols + col);
        const struct lanes8 bias = lanes_load(a.bias, col, a.param_dtype);
        struct lanes8 dx = lanes_load_f32(a.dx, row * a.cols + col);
        for (int i = 0; i < 8; i++) {
            dot = fmaf(dx.v[i], out.v[i] + bias.v[i], dot);
            dx.v[i] *= gate;
        }
        lanes_store(a.dout, packed * a.cols + col, GPU_F32, &dx);
    }
    dot = lanes_sum(dot);
    if (lane == 0)
        a.dgate[row] = dot;
}

KERNEL(gpt_gpu_expert_scatter, struct gpu_expert_scatter)
{
    const uint64_t at = lanes_element();
    if (at >= a.elems)
        return;
    const uint64_t row = a.row[at / a.cols];
    const struct lanes8 x = lanes_load_f32(a.in, at);
    lanes_store(a.out, row * a.cols + at % a.cols, GPU_F32, &x);
}
