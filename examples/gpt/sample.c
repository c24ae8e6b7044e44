/* sample.c: see sample.h. */
#include "examples/gpt/sample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "examples/gpt/linear.h"
#include "examples/gpt/rng.h"
#include "examples/gpt/vec.h"
#include "proto/base/status.h"

struct sampler {
    struct gpt_shape shape;
    struct gpt_layout layout;
    struct pool *pool;          /* borrowed */
    const float *const *params; /* borrowed */
    const struct vec_ops *vec;
    uint32_t used;             /* positions in the window */
    uint8_t *window;           /* [seq] */
    float *memory;             /* owned: all arrays below */
    float *keys, *values;      /* [layers, seq, dim] */
    float *x, *y, *norm, *att; /* [dim] */
    float *qkv, *wide, *act;   /* [3 dim], [4 dim], [4 dim] */
    float *low, *router;       /* [rank], [experts] */
    float *weights;            /* [seq] attention of one head */
    float logits[GPT_VOCAB];
};

static float *take(float **next, uint64_t count)
{
    float *piece = *next;
    *next += count;
    return piece;
}

int sampler_new(const struct gpt_shape *shape, const struct gpt_layout *layout, struct pool *pool,
                const float *const *params, struct sampler **ret_sampler, struct shd_err *e)
{
    const uint64_t dim = shape->dim, cache = (uint64_t)shape->layers * shape->seq * dim;
    const uint64_t floats = 2 * cache + 15 * dim + shape->seq + shape->rank + shape->experts;
    struct sampler *s = calloc(1, sizeof *s);
    float *memory = calloc(floats, sizeof *memory);
    uint8_t *window = calloc(shape->seq, 1);
    if (s == NULL || memory == NULL || window == NULL) {
        free(s);
        free(memory);
        free(window);
        return err_set(e, SHD_ENOMEM, "no memory for %ju floats to sample with", (uintmax_t)floats);
    }
    *s = (struct sampler){ .shape = *shape,
                           .layout = *layout,
                           .pool = pool,
                           .params = params,
                           .vec = vec_pick(),
                           .window = window,
                           .memory = memory };
    float *next = memory;
    s->keys = take(&next, cache);
    s->values = take(&next, cache);
    s->x = take(&next, dim);
    s->y = take(&next, dim);
    s->norm = take(&next, dim);
    s->att = take(&next, dim);
    s->qkv = take(&next, 3 * dim);
    s->wide = take(&next, 4 * dim);
    s->act = take(&next, 4 * dim);
    s->weights = take(&next, shape->seq);
    s->low = take(&next, shape->rank);
    s->router = take(&next, shape->experts);
    *ret_sampler = s;
    return SHD_OK;
}

void sampler_free(struct sampler *s)
{
    if (s == NULL)
        return;
    free(s->memory);
    free(s->window);
    free(s);
}

static void sampler_norm(struct sampler *s, const float *weight, const float *bias)
{
    float mean, rstd;
    const struct vec_norm n = { .x = s->x,
                                .weight = weight,
                                .bias = bias,
                                .mean = &mean,
                                .rstd = &rstd,
                                .rows = 1,
                                .cols = s->shape.dim };
    s->vec->norm_forward(&n, s->norm);
}

/* One head of one layer at the newest position: the softmax over all positions so far. */
static void sampler_head(struct sampler *s, uint32_t layer, uint32_t head)
{
    const uint64_t dim = s->shape.dim, size = dim / s->shape.heads, at = head * size;
    const float *keys = s->keys + (uint64_t)layer * s->shape.seq * dim + at;
    const float *values = s->values + (uint64_t)layer * s->shape.seq * dim + at;
    const float scale = (float)(1 / sqrt((double)size));
    for (uint64_t t = 0; t <= s->used; t++) {
        float dot = 0;
        for (uint64_t j = 0; j < size; j++)
            dot += s->qkv[at + j] * keys[t * dim + j];
        s->weights[t] = dot;
    }
    const uint64_t count = (uint64_t)s->used + 1;
    s->vec->softmax_causal(s->weights, (struct vec_tile){ 1, count, count }, s->used, scale);
    for (uint64_t j = 0; j < size; j++) {
        float sum = 0;
        for (uint64_t t = 0; t < count; t++)
            sum += s->weights[t] * values[t * dim + j];
        s->att[at + j] = sum;
    }
}

static const float *sampler_params(const struct sampler *s, struct gpt_unit unit)
{
    return s->params[gpt_unit_find(&s->shape, unit)];
}

/* A linear layer of one row; `at`: of its tensors in params, the bias behind the weight. */
static struct linear sampler_layer(const float *params, const uint64_t *at, uint64_t in,
                                   uint64_t out)
{
    return (struct linear){
        .rows = 1, .in = in, .out = out, .weight = params + at[0], .bias = params + at[1]
    };
}

/* A matrix of a block, with its adapter if there is one. */
static void sampler_linear(struct sampler *s, uint32_t layer, enum gpt_matrix which, const float *x,
                           float *y, enum linear_then then, float *other)
{
    const struct gpt_matrix_row *m = &gpt_matrices[which];
    const float *block = sampler_params(s, (struct gpt_unit){ GPT_BLOCK, layer, 0 });
    const uint64_t *at = s->layout.at[GPT_BLOCK], *low_at = &s->layout.at[GPT_LORA][m->low];
    const uint64_t dim = s->shape.dim;
    struct linear lin = sampler_layer(block, &at[m->weight], m->in * dim, m->out * dim);
    struct linear_plus plus;
    if (s->shape.rank > 0) {
        const float *low = sampler_params(s, (struct gpt_unit){ GPT_LORA, layer, 0 });
        struct linear first = sampler_layer(low, low_at, m->in * dim, s->shape.rank);
        first.bias = NULL;
        linear_forward(s->pool, &first, x, s->low, LINEAR_PLAIN, NULL);
        plus = (struct linear_plus){ .left = s->low,
                                     .right = low + low_at[1],
                                     .inner = s->shape.rank };
        lin.plus = &plus;
    }
    linear_forward(s->pool, &lin, x, y, then, other);
}

static uint32_t largest(const float *x, uint32_t count)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < count; i++)
        if (x[i] > x[best])
            best = i;
    return best;
}

/* x += p[e] mlp_e(norm) for the likeliest expert e. */
static void sampler_experts(struct sampler *s, uint32_t layer, const float *block)
{
    const uint64_t dim = s->shape.dim, experts = s->shape.experts;
    const uint64_t *at = s->layout.at[GPT_BLOCK], *expert_at = s->layout.at[GPT_EXPERT];
    const struct linear router = sampler_layer(block, &at[BLOCK_ROUTER_W], dim, experts);
    linear_forward(s->pool, &router, s->norm, s->router, LINEAR_PLAIN, NULL);
    const uint32_t best = largest(s->router, (uint32_t)experts);
    s->vec->softmax_causal(s->router, (struct vec_tile){ 1, experts, experts }, experts - 1, 1);
    const float *expert = sampler_params(s, (struct gpt_unit){ GPT_EXPERT, layer, best });
    const struct linear fc = sampler_layer(expert, &expert_at[EXPERT_FC_W], dim, 4 * dim);
    const struct linear mlp = sampler_layer(expert, &expert_at[EXPERT_MLP_W], 4 * dim, dim);
    linear_forward(s->pool, &fc, s->norm, s->wide, LINEAR_GELU, s->act);
    linear_forward(s->pool, &mlp, s->act, s->y, LINEAR_PLAIN, NULL);
    for (uint64_t j = 0; j < dim; j++)
        s->x[j] += s->router[best] * s->y[j];
}

static void sampler_block(struct sampler *s, uint32_t layer)
{
    const uint64_t dim = s->shape.dim;
    const uint64_t at = ((uint64_t)layer * s->shape.seq + s->used) * dim;
    const float *p = sampler_params(s, (struct gpt_unit){ GPT_BLOCK, layer, 0 });
    const uint64_t *offset = s->layout.at[GPT_BLOCK];

    sampler_norm(s, p + offset[BLOCK_LN1_W], p + offset[BLOCK_LN1_B]);
    sampler_linear(s, layer, GPT_ATTN, s->norm, s->qkv, LINEAR_PLAIN, NULL);
    memcpy(s->keys + at, s->qkv + dim, dim * sizeof(float));
    memcpy(s->values + at, s->qkv + 2 * dim, dim * sizeof(float));
    for (uint32_t head = 0; head < s->shape.heads; head++)
        sampler_head(s, layer, head);
    sampler_linear(s, layer, GPT_PROJ, s->att, s->y, LINEAR_RESIDUAL, s->x);
    memcpy(s->x, s->y, dim * sizeof(float));

    sampler_norm(s, p + offset[BLOCK_LN2_W], p + offset[BLOCK_LN2_B]);
    if (s->shape.experts > 0) {
        sampler_experts(s, layer, p);
        return;
    }
    sampler_linear(s, layer, GPT_FC, s->norm, s->wide, LINEAR_GELU, s->act);
    sampler_linear(s, layer, GPT_MLP, s->act, s->y, LINEAR_RESIDUAL, s->x);
    memcpy(s->x, s->y, dim * sizeof(float));
}

/* One position through the model; the window has room. */
static void sampler_step(struct sampler *s, uint8_t byte)
{
    const uint64_t dim = s->shape.dim;
    const float *embed = s->params[GPT_UNIT_EMBED], *head = s->params[gpt_units(&s->shape) - 1];
    const float *wte = embed + s->layout.at[GPT_EMBED][EMBED_WTE];
    const float *wpe = embed + s->layout.at[GPT_EMBED][EMBED_WPE];
    for (uint64_t j = 0; j < dim; j++)
        s->x[j] = wte[byte * dim + j] + wpe[s->used * dim + j];
    for (uint32_t layer = 0; layer < s->shape.layers; layer++)
        sampler_block(s, layer);
    sampler_norm(s, head + s->layout.at[GPT_HEAD][HEAD_LN_W],
                 head + s->layout.at[GPT_HEAD][HEAD_LN_B]);
    const struct linear lin = {
        .rows = 1, .in = dim, .out = GPT_VOCAB, .weight = wte, .transposed = 1
    };
    linear_forward(s->pool, &lin, s->norm, s->logits, LINEAR_PLAIN, NULL);
    s->window[s->used++] = byte;
}

const float *sampler_feed(struct sampler *s, uint8_t byte)
{
    const uint32_t seq = s->shape.seq;
    if (s->used == seq) {
        const uint32_t kept = seq / 2;
        s->used = 0;
        for (uint32_t i = 0; i < kept; i++)
            sampler_step(s, s->window[seq - kept + i]); /* reads ahead of what it writes */
    }
    sampler_step(s, byte);
    return s->logits;
}

static uint8_t sampler_draw(const float *logits, double temperature, double unit)
{
    const uint32_t best = largest(logits, GPT_VOCAB);
    if (temperature <= 0)
        return (uint8_t)best;
    double weight[GPT_VOCAB], sum = 0;
    for (uint32_t i = 0; i < GPT_VOCAB; i++) {
        weight[i] = exp(((double)logits[i] - (double)logits[best]) / temperature);
        sum += weight[i];
    }
    double left = unit * sum;
    for (uint32_t i = 0; i < GPT_VOCAB; i++) {
        left -= weight[i];
        if (left < 0)
            return (uint8_t)i;
    }
    return (uint8_t)best; /* rounding, or NaN logits */
}

void sampler_text(struct sampler *s, const struct sample_options *options, uint8_t *ret_text,
                  uint64_t count)
{
    const uint64_t key = rng_absorb(rng_absorb(0, RNG_SAMPLE), options->seed);
    uint8_t last = options->first;
    for (uint64_t i = 0; i < count; i++) {
        const float *logits = sampler_feed(s, last);
        last = sampler_draw(logits, options->temperature, rng_unit(rng_absorb(key, i)));
        ret_text[i] = last;
    }
}
