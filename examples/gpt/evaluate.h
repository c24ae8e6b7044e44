/* evaluate.h: held-out loss, sample and digest, by the worker that prints. */
#ifndef GPT_EVALUATE_H
#define GPT_EVALUATE_H

#include "examples/gpt/compute.h"
#include "examples/gpt/progress.h"

/* Print the held-out loss at the open step. The caller has returned none of its micro-batches of
 * that step, so the step cannot close and the parameters cannot move. */
int evaluate_loss(struct compute *c, struct progress *p, struct shd_err *e);

/* Beside training, by a session that only reads: print the held-out loss of the latest step and,
 * with --follow, of every --eval-every'th one until --steps; each step is pinned meanwhile. */
int evaluate_beside(struct compute *c, struct progress *p, struct shd_err *e);

/* After the last step, when nobody updates the model any more: loss, sample, digest. */
int evaluate_finish(struct compute *c, struct progress *p, struct shd_err *e);

#endif
