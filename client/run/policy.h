/* What a model's policy means for its session: which reader, which memory. */
#ifndef SHD_POLICY_H
#define SHD_POLICY_H

#include "client/shd.h"

/* Gradient slots this model needs: as asked for, else by its plan. */
int policy_slots(const struct shd_model *m, uint32_t *ret_slots, struct shd_err *e);

/* A model is open that was given its session's reader: where memory cannot be read in place it will
 * be copied. */
void policy_opened(struct shd_model *m);

/* Before the first fetch: make what the reader needs, unless it is there. Whether by copies alone
 * or by NCCL too is decided here. Errors: those of plan_build() and copy_new(). */
int policy_reader(struct shd_model *m, struct shd_err *e);

/* Before the first gradient of a model: make what the policy needs for them; from then on it
 * stays as it is. Once only. Errors: those of plan_build(); SHD_ENOMEM. */
int policy_start(struct shd_model *m, struct shd_err *e);

/* A knob for benches and tests; exported, but in no installed header. Copy path: each fetch takes
 * delay_ns longer, as over a slow link. Before shd_set_policy(). */
SHD_API void shd_bench_delay_fetches(shd_model *m, uint64_t delay_ns);

#endif
