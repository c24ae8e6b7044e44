/* Processors: their instructions, and the libraries that use them. */
#ifndef SHD_CTL_DOCTOR_CPU_H
#define SHD_CTL_DOCTOR_CPU_H

#include "client/ctl/doctor/doctor_say.h"

void doctor_cpu(struct doctor *d);  /* instruction sets */
void doctor_gemm(struct doctor *d); /* the workers' matrix products */

#endif
