/* attention.h: causal self-attention over [q | k | v] rows, one task per sequence and head.
 *
 * Vaswani et al., arXiv:1706.03762: y_i = sum_j<=i softmax_j(q_i k_j / sqrt(size)) v_j. Query
 * rows go in blocks of ATTENTION_BLOCK, so that about half of the masked half is not computed.
 */
#ifndef GPT_ATTENTION_H
#define GPT_ATTENTION_H

#include <stdint.h>

#include "examples/gpt/gemm.h"
#include "examples/gpt/pool.h"
#include "examples/gpt/real.h"

#define ATTENTION_BLOCK 64

struct attention {
    uint64_t batch, seq, heads, dim; /* dim / heads = size of a head */
    const real *qkv;                 /* [batch, seq, 3 * dim] */
    real *prob;                      /* [batch, heads, seq, seq]; forward writes, backward spoils */
    enum gemm_kind gemm;
};

/* y: [batch, seq, dim], overwritten. */
void attention_forward(struct pool *pool, const struct attention *a, real *y);

/* dqkv: as qkv, overwritten. scratch: [pool_threads, ATTENTION_BLOCK, seq]. */
void attention_backward(struct pool *pool, const struct attention *a, const real *dy, real *dqkv,
                        real *scratch);

#endif
