/* Replacing what the owner in this process holds: the values are copied aside first, so that it is
 * all of them or none. */
#ifndef SHD_LOCAL_PUT_H
#define SHD_LOCAL_PUT_H

#include "client/paths/path.h"

/* control_ops slot. */
int local_put(struct shd_model *m, const struct path_put *put, bool *ret_counts, struct shd_err *e);

#endif
