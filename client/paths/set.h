/* Settings of a model: at owner 0, or in this process. */
#ifndef SHD_SET_H
#define SHD_SET_H

#include "client/paths/path.h"

/* control_ops slots. */
int set_owner(struct shd_model *m, const struct path_set *set, struct shd_err *e);
int set_local(struct shd_model *m, const struct path_set *set, struct shd_err *e);

#endif
