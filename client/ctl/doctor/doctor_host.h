/* This host: system calls, limits of a process, memory. */
#ifndef SHD_CTL_DOCTOR_HOST_H
#define SHD_CTL_DOCTOR_HOST_H

#include "client/ctl/doctor/doctor_say.h"

void doctor_kernel(struct doctor *d); /* system calls */
void doctor_limits(struct doctor *d); /* mappings, descriptors, locked memory */
void doctor_memory(struct doctor *d); /* how much there is, huge pages */

#endif
