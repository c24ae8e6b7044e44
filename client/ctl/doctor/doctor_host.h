/* This host: system calls, limits of a process, memory, processors, and a place for checkpoints. */
#ifndef SHD_CTL_DOCTOR_HOST_H
#define SHD_CTL_DOCTOR_HOST_H

#include "client/ctl/doctor/doctor_check.h"

void doctor_kernel(struct doctor *d); /* system calls */
void doctor_limits(struct doctor *d); /* mappings, descriptors, locked memory */
void doctor_memory(struct doctor *d); /* how much there is, huge pages */
void doctor_cpu(struct doctor *d);    /* instruction sets */
void doctor_gemm(struct doctor *d);   /* libraries of the workers' matrix products */

/* A directory for checkpoints: a file is written there, synced and removed. Permissions alone would
 * not tell. */
void doctor_checkpoint(struct doctor *d);

#endif
