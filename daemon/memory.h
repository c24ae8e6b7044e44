/* How much memory is left on this host. */
#ifndef SHD_MEMORY_H
#define SHD_MEMORY_H

#include <stdint.h>

/* MemAvailable of /proc/meminfo in bytes; UINT64_MAX when it cannot be read. */
uint64_t memory_available_bytes(void);

#endif
