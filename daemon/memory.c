/* See memory.h. */
#include "daemon/memory.h"

#include <inttypes.h>
#include <stdio.h>

uint64_t memory_available_bytes(void)
{
    FILE *f = fopen("/proc/meminfo", "re");
    if (f == NULL)
        return UINT64_MAX;
    char line[128];
    uint64_t kib = UINT64_MAX / 1024;
    while (fgets(line, sizeof line, f) != NULL)
        if (sscanf(line, "MemAvailable: %" SCNu64 " kB", &kib) == 1)
            break;
    fclose(f);
    return kib * 1024;
}
