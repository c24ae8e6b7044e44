/* From a model's spec to kernel arguments: which elements of a slice belong to which parameter
 * group, the hyperparameters of an update, and initial values. Exists once, used by daemons and
 * by the in-process path, so that both give the same bits.
 *
 * All pure but for one allocation. A slice is given in unit coordinates (proto/spec/layout.h);
 * arrays and runs count from its first element. Gaps between tensors belong to no run.
 */
#ifndef SHD_RUNS_H
#define SHD_RUNS_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/kern.h"
#include "proto/base/decision.h"
#include "proto/base/status.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec.h"

/* Runs of `slice` of unit `unit` but for its matrices: one per tensor portion, neighbours of one
 * group without a gap between them joined; hyper = group index. *ret_runs (NULL when *ret_count is
 * 0) is the caller's to free(). Errors: SHD_ENOMEM. */
int runs_new(const struct spec *spec, uint32_t unit, struct slice slice, struct kern_run **ret_runs,
             uint32_t *ret_count, struct shd_err *e);

/* The matrices of `slice`, which is all of the unit or nothing where there are any. *ret_whole
 * (NULL when it has none) is one block, the caller's to free(), without scratch and chunk words.
 * Errors: SHD_ENOMEM. */
int runs_matrices(const struct spec *spec, uint32_t unit, struct slice slice,
                  struct kern_whole **ret_whole, struct shd_err *e);

/* Are these rates of the model's groups? count: of numbers, as decision.rate_count. Errors:
 * SHD_ERANGE, SHD_EINVAL; they name the group, the rate and its limits. */
int runs_check_rates(const struct spec *spec, const double *rates, uint32_t count,
                     struct shd_err *e);

/* Are a decision's rates, eps and number of micro-batches those of the model? Errors as above. */
int runs_check_decision(const struct spec *spec, const struct decision *decision,
                        struct shd_err *e);

/* Hyperparameters of every group, [spec->group_count], for an update as decided. The decision's
 * rates: runs_check_rates().
 * update: how many updates with this one have been applied, from 1 (skipped steps do not count):
 * the t of bias correction, computed in fp64. */
void runs_hypers(const struct spec *spec, const struct decision *decision, uint64_t update,
                 struct kern_hyper *ret_hypers);

/* What the parameters' moving average takes of the new ones in a unit's update-th update: 1 -
 * decay, in fp64, rounded once; 1 in the first, which it is the new ones after. With a warm-up
 * decay is at most (1 + n) / (10 + n), n being the updates before this one. The spec has an
 * average. */
float runs_ema_rest(const struct spec *spec, uint64_t update);

/* Initial values of tensor `tensor` inside `slice` of its unit. param: fp32 [slice.elems].
 * False when no element of the tensor lies in the slice (then *ret_fill is untouched). */
bool runs_fill(const struct spec *spec, uint32_t tensor, struct slice slice, float *param,
               struct kern_fill *ret_fill);

#endif
