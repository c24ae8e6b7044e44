/* Counting what the owner in this process has of a tensor. */
#ifndef SHD_LOCAL_SHOW_H
#define SHD_LOCAL_SHOW_H

#include "client/paths/path.h"

/* control_ops slot. */
int local_show(struct shd_model *m, const struct path_show *show, struct path_shown *ret_shown,
               struct shd_err *e);

#endif
