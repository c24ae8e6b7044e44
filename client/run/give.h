/* Gradients handed out and given to the owners: shd_grad() and shd_return() without what they check
 * first, and without a stream's order.
 *
 * An array is a slot's, which the owners read in place, or one of this process's own (grads.h),
 * whose sum is written into a slot when it is complete. What broke off can be repeated.
 */
#ifndef SHD_RUN_GIVE_H
#define SHD_RUN_GIVE_H

#include <stdbool.h>
#include <stdint.h>

struct shd_err;
struct shd_model;

/* The array for a gradient, as shd_grad(). *ret_fresh: it was not handed out before. */
int give_open(struct shd_model *m, uint32_t micro, uint32_t unit, float **ret_grad, bool *ret_fresh,
              struct shd_err *e);

/* Is an array handed out for the gradient of unit in micro-batch micro? */
bool give_is_open(struct shd_model *m, uint32_t micro, uint32_t unit);

/* Can it be returned, also once more where that broke off? Errors: SHD_EINVAL. */
int give_check(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e);

/* Its return broke off: it is written, and owners may read it. */
bool give_began(struct shd_model *m, uint32_t micro, uint32_t unit);

int give_return(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e);
int give_none(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e);

#endif
