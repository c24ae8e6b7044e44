/* Asking all owners what their parts of a tensor come to, and putting that together. All are of one
 * step (and, of gradients, of the same micro-batches), or they are asked again. */
#ifndef SHD_CLIENT_SHOW_H
#define SHD_CLIENT_SHOW_H

#include "client/paths/path.h"

/* control_ops slot. */
int show_range(struct shd_model *m, const struct path_show *show, struct path_shown *ret_shown,
               struct shd_err *e);

#endif
