/* real.h: the number type of the model's arithmetic.
 *
 * The model is compiled twice from the same sources: as fp32, which trains, and with GPT_F64 as
 * fp64, which only the tests use: central differences need its digits. The fp64 names carry
 * `64`, so that one test program can hold both.
 */
#ifndef GPT_REAL_H
#define GPT_REAL_H

#ifdef GPT_F64
typedef double real;
#define attention_backward   gpt64_attention_backward
#define attention_forward    gpt64_attention_forward
#define block_attention      gpt64_block_attention
#define block_backward       gpt64_block_backward
#define block_forward        gpt64_block_forward
#define expert_backward      gpt64_expert_backward
#define expert_forward       gpt64_expert_forward
#define expert_has_rows      gpt64_expert_has_rows
#define gemm_describe        gpt64_gemm_describe
#define gemm_init            gpt64_gemm_init
#define gemm_run             gpt64_gemm_run
#define gpt_activation_bytes gpt64_activation_bytes
#define gpt_backward         gpt64_backward
#define gpt_bytes            gpt64_bytes
#define gpt_forward          gpt64_forward
#define gpt_free             gpt64_free
#define gpt_loss             gpt64_loss
#define gpt_new              gpt64_new
#define gpt_next             gpt64_next
#define gpt_row_losses       gpt64_row_losses
#define gpt_set_batch        gpt64_set_batch
#define gpt_set_gemm         gpt64_set_gemm
#define gpt_set_loss_scale   gpt64_set_loss_scale
#define linear_backward      gpt64_linear_backward
#define linear_forward       gpt64_linear_forward
#define linear_scratch       gpt64_linear_scratch
#define norm_backward        gpt64_norm_backward
#define norm_forward         gpt64_norm_forward
#define router_backward      gpt64_router_backward
#define router_forward       gpt64_router_forward
#define tile_backward        gpt64_tile_backward
#define tile_forward         gpt64_tile_forward
#define vec_base             gpt64_vec_base
#define vec_pick             gpt64_vec_pick
#define vec_variant          gpt64_vec_variant
#else
typedef float real;
#endif

#endif
