/* NVIDIA's driver, its devices, our kernels for them, libraries, MPS. None of it is needed for host
 * memory: a host without a driver is told so, as information. */
#ifndef SHD_CTL_DOCTOR_GPU_H
#define SHD_CTL_DOCTOR_GPU_H

#include "client/ctl/doctor/doctor_check.h"

void doctor_gpu(struct doctor *d);

#endif
