/* Which GPUs a program has kernels for. */
#ifndef SHD_CTL_DOCTOR_FATBIN_H
#define SHD_CTL_DOCTOR_FATBIN_H

#include <stdbool.h>
#include <stddef.h>

/* The GPUs a program has kernels for, "sm_90, compute_90 (PTX)"; empty: for none. False: the file
 * cannot be read. */
bool doctor_fatbin(const char *path, char *buf, size_t bytes);

#endif
