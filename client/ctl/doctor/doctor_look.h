/* What doctor's checks share: small files of the kernel, and a child for what may crash. */
#ifndef SHD_CTL_DOCTOR_LOOK_H
#define SHD_CTL_DOCTOR_LOOK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

/* The first line of a file, without its end; false when it cannot be read. */
bool doctor_read_line(const char *path, char *buf, size_t bytes);

/* A whole number in a file. */
bool doctor_read_u64(const char *path, uint64_t *ret_n);

/* The field "key:  N kB" of /proc/meminfo, in bytes; 0 when it is not there. */
uint64_t doctor_meminfo(const char *key);

/* The name of a process; false when it is gone. */
bool doctor_process_name(pid_t pid, char *buf, size_t bytes);

/* Run fn in a child, which may crash or hang (foreign libraries do), and take the line it prints.
 * False: it crashed, hung (10 s) or printed nothing. */
bool doctor_probe(void (*fn)(FILE *out), char *buf, size_t bytes);

/* dlopen() the first of these names (NULL-terminated); NULL: none is there. For doctor_probe(). */
void *doctor_library(const char *const *names);

#endif
