/* kernels.cu: what is computed between the matrix products; see args.h for what each does.
 *
 * The formulas are those of vec_isa.c, with the same intermediate types: fp32, and fp64 for the log
 * of a loss. Sums have another order than there, so results agree within a tolerance and not to the
 * bit; run to run they are the same bits.
 *
 * Rows are sorted by expert by a counting sort in chunks: each chunk's rows of each expert are
 * counted, one block turns the counts into places, and each chunk puts its rows there, ascending. A
 * thread stands for an expert and looks at all rows of its chunk, so nothing depends on which comes
 * first.
 */
#include "examples/gpt/cuda/lanes.cuh"

#define NORM_EPS 1e-5f

/* -- Embedding ------------------------------------------------------------------------------- */

KERNEL(gpt_gpu_embed, struct gpu_embed)
{
    const uint64_t at = lanes_element();
    if (at >= a.elems)
        return;
    const uint64_t row = at / a.dim;
    const uint32_t col = (uint32_t)(at % a.dim);
    const uint64_t position = row % a.seq;
    const struct lanes8 token = lanes_load(a.wte, (uint64_t)a.tokens[row] * a.dim + col,
                                           a.param_dtype);
    struct lanes8 x = lanes_load(a.wpe, position * a.dim + col, a.param_dtype);
    lanes_add(&x, &token);
    lanes_store(a.x, at, GPU_F32, &x);
}

KERNEL(gpt_gpu_embed_tokens, struct gpu_embed_tokens)
{
    __shared__ float shared[GPU_WARPS * GPU_COLS];
    const struct lanes_tile c = lanes_columns(a.dim);
    const uint32_t warp = threadIdx.x / 32;
    const struct gpu_segment s = a.segments[c.chunk];
    struct lanes8 sum = { { 0 } };
    for (uint32_t i = s.begin + warp; i < s.end && c.col < a.dim; i += GPU_WARPS) {
        const struct lanes8 dx = lanes_load_f32(a.dx, (uint64_t)a.sorted[i] * a.dim + c.col);
        lanes_add(&sum, &dx);
    }
    const float total = lanes_fold(shared, &sum);
    if (c.mine < a.dim)
        a.partial[(uint64_t)c.chunk * a.dim + c.mine] = total;
}

KERNEL(gpt_gpu_embed_sum, struct gpu_embed_sum)
{
    const uint64_t at = lanes_element();
    if (at >= (uint64_t)GPU_VOCAB * a.dim)
        return;
    const uint32_t token = (uint32_t)(at / a.dim), col = (uint32_t)(at % a.dim);
    struct lanes8 sum = lanes_load_f32(a.dwte, at);
    for (uint32_t s = a.first[token]; s < a.first[token + 1]; s++) {
        const struct lanes8 part = lanes_load_f32(a.partial, (uint64_t)s * a.dim + col);
        lanes_add(&sum, &part);
    }
    lanes_store(a.dwte, at, GPU_F32, &sum);
}

KERNEL(gpt_gpu_embed_positions, struct gpu_embed_positions)
{
    const uint64_t at = lanes_element(), stride = (uint64_t)a.seq * a.dim;
    if (at >= stride)
        return;
    struct lanes8 sum = lanes_load_f32(a.dx, at);
    for (uint32_t b = 1; b < a.batch; b++) {
        const struct lanes8 dx = lanes_load_f32(a.dx, b * stride + at);
        lanes_add(&sum, &dx);
    }
    lanes_store(a.dwpe, at, GPU_F32, &sum);
}

/* -- Layer norm ------------------------------------------------------------------------------ */

/* x = residual + (raw + bias) of the elements at `at`, those of a row from col on. */
DEVICE struct lanes8 residual_sum(float *to, const float *residual, const float *raw,
                                  const void *bias, uint32_t param_dtype, uint64_t at, uint32_t col)
{
    const struct lanes8 shift = lanes_load(bias, col, param_dtype);
    struct lanes8 sum = lanes_load_f32(raw, at);
    struct lanes8 x = lanes_load_f32(residual, at);
    lanes_add(&sum, &shift);
    lanes_add(&x, &sum);
    lanes_store(to, at, GPU_F32, &x);
    return x;
}

/* x of a row's elements at col; stored when it is a new sum. */
DEVICE struct lanes8 norm_input(const struct gpu_norm *a, uint64_t at, uint32_t col)
{
    if (a->raw == NULL)
        return lanes_load_f32(a->x, at);
    return residual_sum(a->x, a->residual, a->raw, a->bias, a->param_dtype, at, col);
}

KERNEL(gpt_gpu_norm, struct gpu_norm)
{
    const uint64_t row = lanes_row();
    const uint32_t lane = threadIdx.x % 32;
    if (row >= a.rows)
        return;
    float sum = 0, squares = 0;
    for (uint32_t col = lane * GPU_LANE; col < a.cols; col += GPU_COLS) {
        const struct lanes8 x = norm_input(&a, row * a.cols + col, col);
        for (int i = 0; i < 8; i++)
            sum += x.v[i];
    }
    const float mean = lanes_sum(sum) / (float)a.cols;
    for (uint32_t col = lane * GPU_LANE; col < a.cols; col += GPU_COLS) {
        const struct lanes8 x = lanes_load_f32(a.x, row * a.cols + col);
        for (int i = 0; i < 8; i++)
            squares = fmaf(x.v[i] - mean, x.v[i] - mean, squares);
    }
    const float rstd = 1.0f / sqrtf(lanes_sum(squares) / (float)a.cols + NORM_EPS);
    for (uint32_t col = lane * GPU_LANE; col < a.cols; col += GPU_COLS) {
        struct lanes8 x = lanes_load_f32(a.x, row * a.cols + col);
        const struct lanes8 weight = lanes_load(a.weight, col, a.param_dtype);
        const struct lanes8 shift = lanes_load(a.shift, col, a.param_dtype);
        for (int i = 0; i < 8; i++)
            x.v[i] = fmaf((x.v[i] - mean) * rstd, weight.v[i], shift.v[i]);
        lanes_store(a.y, row * a.cols + col, a.y_dtype, &x);
    }
    if (lane == 0) {
        a.mean[row] = mean;
        a.rstd[row] = rstd;
    }
}

/* With h = (x - mean) rstd and g = dy weight: dx = rstd (g - mean(g) - h mean(g h)). */
KERNEL(gpt_gpu_norm_grad, struct gpu_norm_grad)
{
    const uint64_t row = lanes_row();
    const uint32_t lane = threadIdx.x % 32;
    if (row >= a.rows)
        return;
    const float mean = a.mean[row], rstd = a.rstd[row];
    float sum_g = 0, sum_gh = 0;
    for (uint32_t col = lane * GPU_LANE; col < a.cols; col += GPU_COLS) {
        const struct lanes8 x = lanes_load_f32(a.x, row * a.cols + col);
        const struct lanes8 dy = lanes_load_f32(a.dy, row * a.cols + col);
        const struct lanes8 weight = lanes_load(a.weight, col, a.param_dtype);
        for (int i = 0; i < 8; i++) {
            const float g = dy.v[i] * weight.v[i];
            sum_g += g;
            sum_gh = fmaf(g, (x.v[i] - mean) * rstd, sum_gh);
        }
    }
    const float mean_g = lanes_sum(sum_g) / (float)a.cols;
    const float mean_gh = lanes_sum(sum_gh) / (float)a.cols;
    for (uint32_t col = lane * GPU_LANE; col < a.cols; col += GPU_COLS) {
        const uint64_t at = row * a.cols + col;
        const struct lanes8 x = lanes_load_f32(a.x, at);
        const struct lanes8 dy = lanes_load_f32(a.dy, at);
        const struct lanes8 weight = lanes_load(a.weight, col, a.param_dtype);
        struct lanes8 dx;
        for (int i = 0; i < 8; i++)
            dx.v[i] = rstd * ((dy.v[i] * weight.v[i] - mean_g) - (x.v[i] - mean) * rstd * mean_gh);
        if (a.add) {
            const struct lanes8 old = lanes_load_f32(a.dx, at);
            lanes_add(&dx, &old);
        }
        lanes_store(a.dx, at, GPU_F32, &dx);
    }
}

KERNEL(gpt_gpu_norm_columns, struct gpu_norm_columns)
{
    __shared__ float shared[GPU_WARPS * GPU_COLS];
    const struct lanes_tile c = lanes_columns(a.cols);
    const uint32_t chunk = c.chunk, col = c.col;
    const uint64_t begin = (uint64_t)chunk * a.chunk_rows;
    const uint64_t end = begin + a.chunk_rows < a.rows ? begin + a.chunk_rows : a.rows;
    struct lanes8 weight = { { 0 } }, shift = weight;
    for (uint64_t row = begin + threadIdx.x / 32; row < end && col < a.cols; row += GPU_WARPS) {
        const float mean = a.mean[row], rstd = a.rstd[row];
        const struct lanes8 x = lanes_load_f32(a.x, row * a.cols + col);
        const struct lanes8 dy = lanes_load_f32(a.dy, row * a.cols + col);
        for (int i = 0; i < 8; i++) {
            weight.v[i] = fmaf(dy.v[i], (x.v[i] - mean) * rstd, weight.v[i]);
            shift.v[i] += dy.v[i];
        }
    }
    const float total_weight = lanes_fold(shared, &weight);
    const float total_shift = lanes_fold(shared, &shift);
    if (c.mine >= a.cols)
        return;
    a.partial[(uint64_t)chunk * a.cols + c.mine] = total_weight;
    a.partial[(uint64_t)(a.chunks + chunk) * a.cols + c.mine] = total_shift;
}

/* -- Linear layers: what is before and after the product ----------------------------------------
 */

/* gelu(x) = x/2 (1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3); (1 + tanh u) / 2 =
 * 1 / (1 + exp(-2u)). */
DEVICE float gelu_gate(float x)
{
    const float two_u = 1.5957691216057308f * fmaf(0.044715f * x, x * x, x);
    return 1.0f / (1.0f + expf(-two_u));
}

DEVICE float gelu_slope(float x)
{
    const float s = gelu_gate(x);
    const float two_du = 1.5957691216057308f * fmaf(3 * 0.044715f, x * x, 1.0f);
    return fmaf(x * (s * (1.0f - s)), two_du, s);
}

KERNEL(gpt_gpu_bias_gelu, struct gpu_bias_gelu)
{
    const uint64_t at = lanes_element();
    if (at >= a.elems)
        return;
    const struct lanes8 bias = lanes_load(a.bias, at % a.cols, a.param_dtype);
    struct lanes8 x = lanes_load_f32(a.pre, at);
    lanes_add(&x, &bias);
    lanes_store(a.pre, at, GPU_F32, &x);
    for (int i = 0; i < 8; i++)
        x.v[i] *= gelu_gate(x.v[i]);
    lanes_store(a.act, at, a.act_dtype, &x);
}

KERNEL(gpt_gpu_residual, struct gpu_residual)
{
    const uint64_t at = lanes_element();
    if (at >= a.elems)
        return;
    residual_sum(a.x, a.residual, a.raw, a.bias, a.param_dtype, at, (uint32_t)(at % a.cols));
}

/* The index of [row, col] of rows in the order by heads of gpu_to_heads. */
DEVICE uint64_t head_place(uint64_t row, uint32_t col, uint64_t rows, uint32_t dim, uint32_t size,
                           uint32_t seq)
{
    const uint32_t part = col / dim, head = col % dim / size, k = col % size;
    const uint64_t sequence = row / seq, position = row % seq;
    return part * rows * dim + ((sequence * (dim / size) + head) * seq + position) * size + k;
}

KERNEL(gpt_gpu_columns, struct gpu_columns)
{
    __shared__ float shared[GPU_WARPS * GPU_COLS];
    const struct lanes_tile c = lanes_columns(a.cols);
    const uint32_t chunk = c.chunk, col = c.col;
    const uint64_t begin = (uint64_t)chunk * a.chunk_rows;
    const uint64_t end = begin + a.chunk_rows < a.rows ? begin + a.chunk_rows : a.rows;
    struct lanes8 sum = { { 0 } };
    for (uint64_t row = begin + threadIdx.x / 32; row < end && col < a.cols; row += GPU_WARPS) {
        const uint64_t at = row * a.cols + col;
        struct lanes8 d = lanes_load_f32(
            a.d, a.head_size > 0 ? head_place(row, col, a.rows, a.dim, a.head_size, a.seq) : at);
        if (a.pre != NULL) {
            const struct lanes8 pre = lanes_load_f32(a.pre, at);
            for (int i = 0; i < 8; i++)
                d.v[i] *= gelu_slope(pre.v[i]);
        }
        lanes_add(&sum, &d);
        if (a.out != NULL)
            lanes_store(a.out, at, a.out_dtype, &d);
    }
    if (a.partial == NULL)
        return;
    const float total = lanes_fold(shared, &sum);
    if (c.mine < a.cols)
        a.partial[(uint64_t)chunk * a.cols + c.mine] = total;
}

KERNEL(gpt_gpu_columns_sum, struct gpu_columns_sum)
{
    __shared__ float shared[GPU_WARPS * 32];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t col = blockIdx.x * 32 + lane;
    float sum = 0;
    for (uint32_t chunk = warp; chunk < a.chunks && col < a.cols; chunk += GPU_WARPS)
        sum += a.partial[(uint64_t)chunk * a.stride + col];
    shared[warp * 32 + lane] = sum;
    __syncthreads();
    if (warp > 0 || col >= a.cols)
        return;
    for (uint32_t w = 1; w < GPU_WARPS; w++)
        sum += shared[w * 32 + lane];
    a.out[col] = sum;
}

/* -- Attention ------------------------------------------------------------------------------- */

KERNEL(gpt_gpu_to_heads, struct gpu_to_heads)
{
    const uint64_t at = lanes_element(), cols = (uint64_t)a.parts * a.dim;
    if (at >= a.rows * cols)
        return;
    const uint64_t row = at / cols;
    const uint32_t col = (uint32_t)(at % cols);
    struct lanes8 x = lanes_load_f32(a.in, at);
    if (a.bias != NULL) {
        const struct lanes8 bias = lanes_load(a.bias, col, a.param_dtype);
        lanes_add(&x, &bias);
    }
    lanes_store(a.out, head_place(row, col, a.rows, a.dim, a.head_size, a.seq), a.out_dtype, &x);
}

KERNEL(gpt_gpu_from_heads, struct gpu_from_heads)
{
    const uint64_t at = lanes_element();
    if (at >= a.rows * a.dim)
        return;
    const uint64_t row = at / a.dim;
    const uint32_t col = (uint32_t)(at % a.dim);
    const struct lanes8 x = lanes_load(
        a.in, head_place(row, col, a.rows, a.dim, a.head_size, a.seq), a.dtype);
    lanes_store(a.out, at, a.dtype, &x);
}

/* Maximum and sum in one pass: the sum so far is rescaled when the maximum grows (Milakov and
 * Gimelshein, arXiv:1805.02867). A maximum of -FLT_MAX stands for no element yet; a NaN among the
 * scores passes the comparison but not the sum. */
KERNEL(gpt_gpu_softmax, struct gpu_softmax)
{
    const uint64_t index = lanes_row();
    const uint32_t lane = threadIdx.x % 32;
    if (index >= (uint64_t)a.pairs * a.rows)
        return;
    const uint64_t pair = index / a.rows;
    const uint32_t i_row = (uint32_t)(index % a.rows), row = a.first + i_row;
    const float *scores = a.scores + pair * a.score_pair + (uint64_t)i_row * a.stride;
    const uint64_t out = (pair * a.seq + row) * a.stride;
    float max = -3.402823466e38f, sum = 0;
    for (uint32_t j = lane * GPU_LANE; j <= row; j += GPU_COLS) {
        const struct lanes8 x = lanes_load_f32(scores, j);
        float here = max;
        for (uint32_t i = 0; i < 8; i++)
            here = j + i <= row && x.v[i] > here ? x.v[i] : here;
        sum *= expf((max - here) * a.scale);
        for (uint32_t i = 0; i < 8; i++)
            sum += j + i <= row ? expf((x.v[i] - here) * a.scale) : 0.0f;
        max = here;
    }
    const float top = lanes_max(max);
    const float inverse = 1.0f / lanes_sum(sum * expf((max - top) * a.scale));
    for (uint32_t j = lane * GPU_LANE; j < a.first + a.rows; j += GPU_COLS) {
        struct lanes8 x = lanes_load_f32(scores, j);
        for (uint32_t i = 0; i < 8; i++)
            x.v[i] = j + i <= row ? expf((x.v[i] - top) * a.scale) * inverse : 0.0f;
        lanes_store(a.prob, out + j, a.prob_dtype, &x);
    }
}

KERNEL(gpt_gpu_softmax_grad, struct gpu_softmax)
{
    const uint64_t index = lanes_row();
    const uint32_t lane = threadIdx.x % 32;
    if (index >= (uint64_t)a.pairs * a.rows)
        return;
    const uint64_t pair = index / a.rows;
    const uint32_t i_row = (uint32_t)(index % a.rows), row = a.first + i_row;
    const float *dp = a.scores + pair * a.score_pair + (uint64_t)i_row * a.stride;
    const uint64_t at = (pair * a.seq + row) * a.stride;
    float dot = 0;
    for (uint32_t j = lane * GPU_LANE; j <= row; j += GPU_COLS) {
        const struct lanes8 p = lanes_load(a.prob, at + j, a.prob_dtype);
        const struct lanes8 d = lanes_load_f32(dp, j);
        for (uint32_t i = 0; i < 8; i++)
            dot = j + i <= row ? fmaf(p.v[i], d.v[i], dot) : dot;
    }
    dot = lanes_sum(dot);
    for (uint32_t j = lane * GPU_LANE; j <= row; j += GPU_COLS) {
        struct lanes8 p = lanes_load(a.prob, at + j, a.prob_dtype);
        const struct lanes8 d = lanes_load_f32(dp, j);
        for (uint32_t i = 0; i < 8; i++)
            p.v[i] = j + i <= row ? a.scale * (p.v[i] * (d.v[i] - dot)) : 0.0f;
        lanes_store(a.prob, at + j, a.prob_dtype, &p);
    }
}

/* -- Loss ------------------------------------------------------------------------------------ */

KERNEL(gpt_gpu_cross_entropy, struct gpu_cross_entropy)
{
    const uint64_t row = lanes_row();
    const uint32_t lane = threadIdx.x % 32;
    if (row >= a.rows)
        return;
    const uint64_t at = row * GPU_VOCAB + lane * GPU_LANE;
    const uint32_t target = a.targets[row];
    const float at_target = a.logits[row * GPU_VOCAB + target];
    struct lanes8 x = lanes_load_f32(a.logits, at);
    float max = x.v[0], sum = 0;
    for (int i = 1; i < 8; i++)
        max = x.v[i] > max ? x.v[i] : max;
    max = lanes_max(max); /* and all have read the logits: grad may overwrite them */
    for (int i = 0; i < 8; i++) {
        x.v[i] = expf(x.v[i] - max);
        sum += x.v[i];
    }
    sum = lanes_sum(sum);
    const float scale = a.scale / sum;
    for (uint32_t i = 0; i < 8; i++) {
        x.v[i] *= scale;
        x.v[i] = lane * GPU_LANE + i == target ? x.v[i] - a.scale : x.v[i];
    }
    lanes_store(a.grad, at, a.grad_dtype, &x);
    if (lane == 0)
        a.losses[row] = log((double)sum) - (double)(at_target - max);
}

/* -- Routing --------------------------------------------------------------------------------- */

DEVICE float moe_infinity(void)
{
    return f32_of_bits(0x7f800000u);
}

DEVICE float moe_load(const void *p, uint64_t at, uint32_t dtype)
{
    return dtype == GPU_F32 ? ((const float *)p)[at] : from_half(((const uint16_t *)p)[at], dtype);
}

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
