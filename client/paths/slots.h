/* Gradient slots on daemons: filled, returned, credited, free again. */
#ifndef SHD_SLOTS_H
#define SHD_SLOTS_H

#include "client/paths/path.h"

/* control_ops slots. */
int slots_wait(struct shd_model *m, struct shd_err *e);
int slots_ready(struct shd_model *m, uint32_t slot, struct shd_err *e);
float *slots_array(const struct shd_model *m, uint32_t slot, uint32_t unit);
int slots_fill(struct shd_model *m, uint32_t slot, uint32_t unit, const float *grad,
               enum shd_dtype dtype, struct shd_err *e);
int slots_give(struct shd_model *m, const struct path_return *ret, struct shd_err *e);

#endif
