/* The simulated model: how large it is, what its batches give, and the states that it must go
 * through; see sim.h.
 *
 * States are kept as a line: of each step the decision and what is there after it. A model that
 * goes back (sim_back.h) begins another line, which has that of before up to the step where it
 * went. Owners that have not gone yet are on the line of before; no two owners are further apart
 * than that.
 */
#ifndef SHD_SIM_MODEL_H
#define SHD_SIM_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "client/paths/turn.h"
#include "proto/base/decision.h"
#include "proto/base/fixsum.h"

#define SIM_UNITS       4u
#define SIM_MICROS      6u
#define SIM_BLOCKS      5u
#define SIM_STEPS       512u
#define SIM_HISTORY     64u
#define SIM_WINDOW_ROWS 5u /* one more than the window of rules of units */

struct sim;

/* The data of a step. In a model that went back they are others than before, so that what was made
 * before is told from what must be there. */
struct sim_batch {
    uint64_t step, salt;
    uint32_t micros;
};

struct sim_version {
    uint64_t param[SIM_UNITS][SIM_BLOCKS];
    uint64_t updates[1 + SIM_UNITS]; /* of the model, and of each unit */
    uint64_t stopped;       /* 1 + the last step at which a guard stopped training; 0: none */
    bool counts;            /* for a guard's windows: the step changed values */
    double norm[SIM_UNITS]; /* of its mean gradient, then */
};

struct sim_line {
    uint64_t attempt, base; /* that began with its rewind, and where it went; 0: there was none */
    uint64_t decided;       /* steps with a decision */
    struct decision decision[SIM_STEPS];
    struct sim_version version[SIM_STEPS + 1];
    uint64_t salt[SIM_STEPS];
};

/* Micro-batches of a step behind this decision (NULL: the first one): as that says, else by the
 * ramp. And of one of a line that is decided, or the next to be. */
uint32_t sim_micros_after(const struct sim *s, uint64_t step, const struct decision *last);
uint32_t sim_micros(const struct sim *s, const struct sim_line *line, uint64_t step);
struct sim_batch sim_batch_of(const struct sim *s, const struct sim_line *line, uint64_t step);

/* Hashes in the place of numbers. */
uint64_t sim_mix(uint64_t a, uint64_t b);
bool sim_none(const struct sim *s, struct sim_batch at, uint32_t micro, uint32_t unit);
uint64_t sim_tag(const struct sim *s, struct sim_batch at, uint32_t micro, uint32_t unit);
uint64_t sim_add(uint64_t acc, bool first, uint64_t tag, uint32_t block);
uint64_t sim_update(uint64_t param, uint64_t decision, uint64_t acc);
uint64_t sim_mean(uint64_t acc, uint32_t took);
void sim_square(const struct sim *s, uint64_t step, uint64_t acc, struct fixsum *sum, bool *finite);
uint64_t sim_decision_hash(const struct decision *d);

/* The sum of a unit's block over micro-batches below `next`; 0 when none took part. */
uint64_t sim_sum(const struct sim *s, struct sim_batch at, uint32_t unit, uint32_t block,
                 uint32_t next);

double sim_metric(const struct sim *s, struct sim_batch at, uint32_t micro);
uint32_t sim_first_block(const struct sim *s, uint32_t owner, uint32_t unit);
struct turn_update sim_update_of(const struct sim *s, uint64_t step, uint32_t job,
                                 const struct decision *last);

/* A put: whether step is to be one, its decision, the values it brings. */
bool sim_is_put(const struct sim *s, uint64_t step);
struct decision sim_put_of(const struct sim *s, uint64_t step, const struct decision *last);
bool sim_put_has(uint64_t put, uint32_t unit);
uint64_t sim_put_value(uint64_t put, uint32_t unit, uint32_t block);
/* As step_put_updates(), [SIM_UNITS]; false: NULL. */
bool sim_put_updates(uint64_t put, uint64_t ret_updates[SIM_UNITS]);

/* What an owner says of a step, and what a worker of this job makes of that. which: of settings, as
 * sim_settings(). False: it cannot be. */
struct wire_prepared sim_prepared(const struct sim *s, struct sim_batch at, uint32_t owner,
                                  uint32_t owners);
bool sim_expected(const struct sim *s, uint64_t step, uint32_t job, uint32_t which,
                  struct decision *ret_decision, double *ret_norm);
/* Likewise of a put, whoever makes it. */
bool sim_expected_put(const struct sim *s, uint64_t step, uint32_t job, uint32_t which,
                      struct decision *ret_decision, double *ret_norm);

void sim_begin_model(struct sim *s);

/* Of what an owner has of a version, by sim_hash_of() (sim_guest.h). */
uint64_t sim_version_hash(const struct sim *s, const struct sim_line *line, uint64_t step,
                          uint32_t owner);

/* The next decision is known: so is the state after it. */
void sim_decide_next(struct sim *s, const struct decision *decision, double norm);

/* Of the last state; and of a run on the same data that nothing disturbed, and that never went
 * back: computed, not simulated. */
uint64_t sim_digest(const struct sim *s);
uint64_t sim_undisturbed(const struct sim *s);

#endif
