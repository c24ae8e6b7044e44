/* Replacing what owners hold: the values of all arrays go into a segment at each owner, the owners
 * keep them, and a commit at owner 0, then at the others, lets them take effect. See
 * daemon/model/put.h for why that is all owners or none. */
#ifndef SHD_CLIENT_PUT_H
#define SHD_CLIENT_PUT_H

#include "client/paths/path.h"

/* control_ops slot. */
int put_values(struct shd_model *m, const struct path_put *put, bool *ret_counts,
               struct shd_err *e);

/* The decision of a put with this origin (> 0) in the open step. */
struct decision put_decision(const struct shd_model *m, const struct path_put *put,
                             uint64_t origin);

/* Fill an array of a unit, by its number in the state: values[unit elements], gaps zeroed.
 * SHD_EINTERNAL: fill gave up. */
int put_fill(const struct shd_model *m, const struct path_put *put, uint32_t unit, uint32_t array,
             float *values, struct shd_err *e);

#endif
