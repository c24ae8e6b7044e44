/* model.h: forward and backward of the model, unit by unit, over arrays somebody else holds.
 *
 * One object holds the activations of one micro-batch. Use: gpt_set_batch(), gpt_forward() for
 * the units gpt_next() names, read gpt_loss(), gpt_backward() for the same units in reverse.
 *
 * With `recompute` only what each unit of a layer starts from is kept from its forward to its
 * backward: the layer's input; with experts also what the router gave them. The rest is held once,
 * for one layer, and a unit's backward computes it again, from that unit's parameters: the same
 * operations on the same inputs, so the same bits, and the same units in the same order. Nothing in
 * the model is random. Arrays that backward does not read are not computed again (the last product
 * of a dense layer), nor are those that still hold it (the last layer's).
 *
 * The model: x = wte[token] + wpe[position]; per block x += proj(attention(ln_1(x))) and then
 * x += mlp(ln_2(x)); logits = ln_f(x) wte^T; loss = mean cross-entropy in nats. (Radford et al.
 * 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.)
 */
#ifndef GPT_MODEL_H
#define GPT_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "client/shd.h"
#include "examples/gpt/gemm.h"
#include "examples/gpt/pool.h"
#include "examples/gpt/real.h"
#include "examples/gpt/shape.h"

struct gpt;

/* Allocate for batch sequences of shape->seq bytes. pool is borrowed until gpt_free().
 * Errors: SHD_ERANGE limits; SHD_ENOMEM, naming the bytes. */
int gpt_new(const struct gpt_shape *shape, const struct gpt_layout *layout, uint32_t batch,
            bool recompute, struct pool *pool, struct gpt **ret_gpt, struct shd_err *e);
void gpt_free(struct gpt *g);

/* Bytes of activations and scratch that gpt_new() would allocate; 0: no memory to tell. */
uint64_t gpt_bytes(const struct gpt_shape *shape, uint32_t batch, bool recompute, uint32_t threads);

/* Bytes of this model's activations and scratch, with or without recompute. */
uint64_t gpt_activation_bytes(const struct gpt *g, bool recompute);

/* Copy windows[batch, seq + 1]: inputs are each window's first seq bytes, targets its last. */
void gpt_set_batch(struct gpt *g, const uint8_t *windows);

/* Set the kind of matrix products, GEMM_FULL at first; the caller has called gemm_init(). */
void gpt_set_gemm(struct gpt *g, enum gemm_kind kind);

/* Gradients are those of the loss times scale, 1 at first. gpt_loss() is not scaled. */
void gpt_set_loss_scale(struct gpt *g, double scale);

/* The unit whose forward comes after unit's (GPT_UNIT_NONE: the first), or GPT_UNIT_NONE at the
 * end. Experts no token of the batch goes to are left out: valid up to the unit whose forward ran
 * last and the experts behind it. */
uint32_t gpt_next(const struct gpt *g, uint32_t unit);

/* params: the unit's array. used: that of gpt_unit_uses(), NULL if it uses none. */
void gpt_forward(struct gpt *g, uint32_t unit, const real *params, const real *used);

/* Write the unit's gradient of the mean loss to grad (NULL: the unit is frozen, the gradient only
 * flows through); gaps between tensors are left alone. used_grad: of the unit it uses, NULL if
 * that is frozen. The head runs first and overwrites wte's part of it; the backward of embed must
 * get the same array as grad: it adds its own part to wte and overwrites wpe. */
void gpt_backward(struct gpt *g, uint32_t unit, const real *params, real *grad, const real *used,
                  real *used_grad);

/* Mean loss of the batch in nats per byte, once the head's forward is done. */
double gpt_loss(const struct gpt *g);

/* The losses behind the mean, [batch, seq]. */
const double *gpt_row_losses(const struct gpt *g);

#endif
