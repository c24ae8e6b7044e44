/* Publishing, where the owner is in this process. */
#ifndef SHD_LOCAL_PUBLISH_H
#define SHD_LOCAL_PUBLISH_H

#include "client/session/session.h"

/* What workers read of a unit becomes its parameters as they are: rounded to the model's dtype; or,
 * with a codec, encoded and decoded as between processes. Errors are the kernel's. */
int local_publish(struct shd_model *m, uint32_t unit, struct shd_err *e);

#endif
