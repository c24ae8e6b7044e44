/* merge.h: --local-steps: groups of workers that merge now and then (shd_merge()). */
#ifndef GPT_MERGE_H
#define GPT_MERGE_H

#include <stdbool.h>
#include <stdint.h>

#include "client/shd.h"
#include "examples/gpt/options.h"

/* Check the options and fill o->local.index and .groups. Errors: SHD_EINVAL, SHD_ERANGE. */
int merge_check(struct options *o, const int *words, struct shd_err *e);

/* Steps of training before that step of the model, which has merges as well. */
uint64_t merge_trained(const struct options *o, uint64_t step);

/* Whether that step of the model is a merge. */
bool merge_is_due(const struct options *o, uint64_t step);

/* This worker's part in it. */
struct shd_merge_options merge_options(const struct options *o);

/* Attach to the outer model, where this worker merges; *ret_session is yours to close, NULL where
 * another one of the group does. idle breaks waits off (shd_options.idle). */
int merge_open(const struct options *o, shd_model *inner, int (*idle)(void *ctx), void *ctx,
               shd_session **ret_session, shd_model **ret_outer, struct shd_err *e);

#endif
