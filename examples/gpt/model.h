/* model.h: forward and backward of the model, unit by unit, over arrays somebody else holds.
 *
 * One object holds the activations of one micro-batch. Use: gpt_set_batch(), gpt_forward() for
 * units 0..layers+1, read gpt_loss(), gpt_backward() for the units in reverse.
 *
 * The model: x = wte[token] + wpe[position]; per block x += proj(attention(ln_1(x))) and then
 * x += mlp(ln_2(x)); logits = ln_f(x) wte^T; loss = mean cross-entropy in nats. (Radford et al.
 * 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.)
 */
#ifndef GPT_MODEL_H
#define GPT_MODEL_H

#include <stdint.h>

#include "client/shd.h"
#include "examples/gpt/pool.h"
#include "examples/gpt/real.h"
#include "examples/gpt/shape.h"

struct gpt;

/* Allocate for batch sequences of shape->seq bytes. pool is borrowed until gpt_free().
 * Errors: SHD_ERANGE limits; SHD_ENOMEM, naming the bytes. */
int gpt_new(const struct gpt_shape *shape, const struct gpt_layout *layout, uint32_t batch,
            struct pool *pool, struct gpt **ret_gpt, struct shd_err *e);
void gpt_free(struct gpt *g);

/* Copy windows[batch, seq + 1]: inputs are each window's first seq bytes, targets its last. */
void gpt_set_batch(struct gpt *g, const uint8_t *windows);

/* params: the unit's array. embed: unit 0's array, needed by the head (the tied matrix). */
void gpt_forward(struct gpt *g, uint32_t unit, const real *params, const real *embed);

/* Write the unit's gradient of the mean loss to grad; gaps between tensors are left alone.
 * embed, embed_grad: unit 0's arrays, for the head, which runs first: it overwrites wte's part
 * of embed_grad. The backward of unit 0 must get the same array as grad: it adds its own part
 * to wte and overwrites wpe. */
void gpt_backward(struct gpt *g, uint32_t unit, const real *params, real *grad, const real *embed,
                  real *embed_grad);

/* Mean loss of the batch in nats per byte, once the head's forward is done. */
double gpt_loss(const struct gpt *g);

/* The losses behind the mean, [batch, seq]. */
const double *gpt_row_losses(const struct gpt *g);

/* Forward and backward of the whole model over arrays of one process: params[units],
 * grads[units] (NULL: forward only). Returns the loss. */
double gpt_whole(struct gpt *g, const uint8_t *windows, const real *const *params,
                 real *const *grads);

#endif
