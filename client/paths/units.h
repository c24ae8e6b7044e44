/* Asking all owners what units came to in one of the last steps (shd_unit_stats()), and adding that
 * exactly: the same numbers for any number of owners. */
#ifndef SHD_UNITS_H
#define SHD_UNITS_H

#include "client/paths/path.h"

/* control_ops slot. */
int units_ask(struct shd_model *m, struct path_units *units, struct shd_err *e);

#endif
