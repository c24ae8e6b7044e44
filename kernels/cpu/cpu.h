/* A host device: compute threads with FTZ|DAZ set, over memory of the host. */
#ifndef SHD_KERNELS_CPU_CPU_H
#define SHD_KERNELS_CPU_CPU_H

#include "kernels/kern.h"

/* Start a host device. Errors: SHD_EINVAL unknown isa or thread count; SHD_ENOTSUP isa not on
 * this CPU; SHD_ENOMEM. */
int kern_cpu_new(const struct kern_config *config, struct kern **ret_kern, struct shd_err *e);

#endif
