/* batch.h: --batch auto: as many sequences in a micro-batch as there is memory for.
 *
 * A step has S sequences whatever a machine has: M micro-batches of S / M each, the fewest whose
 * activations there is room for. M is in the model's spec, so it is chosen once: by rank 0, where
 * no daemon has the model. Whoever comes later takes the model's. */
#ifndef GPT_BATCH_H
#define GPT_BATCH_H

#include <stdbool.h>
#include <stdint.h>

#include "examples/gpt/options.h"

/* The smallest M that divides `sequences`, is a multiple of `share` (which divides `sequences`) and
 * has S / M of at most `most`; 0: there is none. */
uint64_t batch_fewest(uint64_t sequences, uint64_t share, uint64_t most);

/* The sequences that activations of one micro-batch have room for in `bytes`; 0: not even one. */
uint64_t batch_most(const struct options *o, uint64_t bytes);

/* Set o->micro_batches and o->batch. Nothing to do without --batch auto. Waits for rank 0 to make
 * the model. Errors: those of shd_connect(); SHD_ENOMEM not one sequence has room; SHD_ESPEC the
 * model's M does not divide S; SHD_ETIMEDOUT nobody made it. */
int batch_choose(struct options *o, struct shd_err *e);

#endif
