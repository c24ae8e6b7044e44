/* Reading what the owners hold: each copies its slice of an array into a stage, from where it is
 * copied to the caller's. All are of one step, or it is done again. */
#ifndef SHD_CLIENT_GET_H
#define SHD_CLIENT_GET_H

#include "client/paths/path.h"

/* control_ops slot. */
int get_unit(struct shd_model *m, const struct path_get *get, struct shd_err *e);

#endif
