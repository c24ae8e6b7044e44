/* attention.c: see attention.h. */
#include "examples/gpt/attention.h"

#include <math.h>

#include "examples/gpt/gemm.h"
#include "examples/gpt/vec.h"

struct attention_job {
    const struct attention *a;
    const struct vec_ops *vec;
    const real *dy;
    real *y, *dqkv, *scratch;
    real scale; /* 1 / sqrt(size) */
};

/* The place of one (sequence, head) pair. */
struct attention_head {
    uint64_t size;   /* dim / heads */
    uint64_t at_qkv; /* of its first q in qkv; k is dim behind it, v 2 dim */
    uint64_t at_y;   /* of its first element in y */
    real *prob;      /* [seq, seq] */
};

static struct attention_head attention_find(const struct attention *a, uint32_t task)
{
    const uint64_t sequence = task / a->heads, head = task % a->heads;
    const uint64_t size = a->dim / a->heads;
    return (struct attention_head){
        .size = size,
        .at_qkv = sequence * a->seq * 3 * a->dim + head * size,
        .at_y = sequence * a->seq * a->dim + head * size,
        .prob = a->prob + (uint64_t)task * a->seq * a->seq,
    };
}

static uint64_t attention_rows(const struct attention *a, uint64_t row)
{
    return a->seq - row < ATTENTION_BLOCK ? a->seq - row : ATTENTION_BLOCK;
}

static void attention_forward_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct attention_job *job = ctx;
    const struct attention *a = job->a;
    const struct attention_head h = attention_find(a, task);
    const uint64_t dim = a->dim, wide = 3 * dim;
    const real *q = a->qkv + h.at_qkv, *k = q + dim, *v = k + dim;
    for (uint64_t row = 0; row < a->seq; row += ATTENTION_BLOCK) {
        const uint64_t rows = attention_rows(a, row), keys = row + rows;
        real *p = h.prob + row * a->seq;
        gemm_run(a->gemm, (struct gemm_size){ rows, keys, h.size },
                 gemm_plain(q + row * wide, wide), gemm_transposed(k, wide), 0, p, a->seq);
        job->vec->softmax_causal(p, (struct vec_tile){ rows, keys, a->seq }, row, job->scale);
        gemm_run(a->gemm, (struct gemm_size){ rows, h.size, keys }, gemm_plain(p, a->seq),
                 gemm_plain(v, wide), 0, job->y + h.at_y + row * dim, dim);
    }
}

/* Blocks from the last to the first: the last one reaches all keys and writes dk and dv, the
 * others add to a prefix of them. */
static void attention_backward_task(void *ctx, uint32_t task, uint32_t thread)
{
    const struct attention_job *job = ctx;
    const struct attention *a = job->a;
    const struct attention_head h = attention_find(a, task);
    const uint64_t dim = a->dim, wide = 3 * dim, seq = a->seq;
    const real *q = a->qkv + h.at_qkv, *k = q + dim, *v = k + dim;
    real *dq = job->dqkv + h.at_qkv, *dk = dq + dim, *dv = dk + dim;
    real *dp = job->scratch + (uint64_t)thread * ATTENTION_BLOCK * seq;
    const uint64_t blocks = (seq + ATTENTION_BLOCK - 1) / ATTENTION_BLOCK;
    for (uint64_t b = blocks; b-- > 0;) {
        const uint64_t row = b * ATTENTION_BLOCK, rows = attention_rows(a, row);
        const uint64_t keys = row + rows;
        const real beta = b + 1 == blocks ? 0 : 1;
        const real *dy = job->dy + h.at_y + row * dim;
        real *p = h.prob + row * seq;
        const struct gemm_size to_keys = { keys, h.size, rows };
        gemm_run(a->gemm, (struct gemm_size){ rows, keys, h.size }, gemm_plain(dy, dim),
                 gemm_transposed(v, wide), 0, dp, seq);
        gemm_run(a->gemm, to_keys, gemm_transposed(p, seq), gemm_plain(dy, dim), beta, dv, wide);
        job->vec->softmax_causal_grad(p, (struct vec_tile){ rows, keys, seq }, row, job->scale, dp,
                                      seq);
        gemm_run(a->gemm, (struct gemm_size){ rows, h.size, keys }, gemm_plain(p, seq),
                 gemm_plain(k, wide), 0, dq + row * wide, wide);
        gemm_run(a->gemm, to_keys, gemm_transposed(p, seq), gemm_plain(q + row * wide, wide), beta,
                 dk, wide);
    }
}

static void attention_run(struct pool *pool, struct attention_job job, pool_fn *task)
{
    const struct attention *a = job.a;
    job.vec = vec_pick();
    job.scale = (real)(1 / sqrt((double)a->dim / (double)a->heads));
    pool_run(pool, (uint32_t)(a->batch * a->heads), task, &job);
}

void attention_forward(struct pool *pool, const struct attention *a, real *y)
{
    attention_run(pool, (struct attention_job){ .a = a, .y = y }, attention_forward_task);
}

void attention_backward(struct pool *pool, const struct attention *a, const real *dy, real *dqkv,
                        real *scratch)
{
    const struct attention_job job = { .a = a, .dy = dy, .dqkv = dqkv, .scratch = scratch };
    attention_run(pool, job, attention_backward_task);
}
