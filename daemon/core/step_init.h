/* A step core at the point where its ledger is: step 0 of a fresh one, or what a predecessor left.
 * Nothing is done here: step_resume() says what is left to be done. */
#ifndef SHD_STEP_INIT_H
#define SHD_STEP_INIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct guard;
struct ledger;
struct ramp;
struct shd_err;
struct step;

/* Bytes a core needs; units, micros > 0 and units * micros <= STEP_CELLS_MAX. */
size_t step_bytes(uint32_t units, uint32_t micros);

/* Lay out a core in memory of step_bytes() aligned to 16, at the point where the ledger (which it
 * borrows) is: step 0, OPEN, for a fresh one. frozen[units]: units that get no gradients and no
 * update, only new versions; NULL: none. At least one must be trainable. */
struct step *step_init(void *memory, const struct ledger *ledger, const bool *frozen);

/* Prepare's answer is that of the last committed step again, as after a crash. */
void step_recall_record(struct step *s);

/* The unit is not updated after a step that it took no part in: for which no micro-batch returned a
 * gradient of it. To be said before anything else. */
void step_skips_idle(struct step *s, uint32_t unit);

/* What is returned of the unit are values, which its mean is of: their squares are not in the
 * step's sum (that one of them is not finite counts), and it skips idle steps. Likewise. */
void step_means(struct step *s, uint32_t unit);

/* Its guard's rules, borrowed; NULL: none. Likewise. */
void step_guard(struct step *s, const struct guard *guard);

/* Steps have the spec's numbers of micro-batches (step_ramp.h), or what was set; ramp NULL: the
 * spec's is the most. It is borrowed; `accumulate` micro-batches make a gradient. Likewise. Errors:
 * SHD_ESEGMENT the ledger's numbers are not those of such a model. */
int step_ramp(struct step *s, const struct ramp *ramp, uint32_t accumulate, struct shd_err *e);

#endif
