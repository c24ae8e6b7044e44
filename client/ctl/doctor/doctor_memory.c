/* How much memory there is for state, and in which pages. */
#include <inttypes.h>
#include <string.h>

#include "client/ctl/doctor/doctor.h"

/* A GPT of a million parameters with AdamW is 20 MB: below this only toys fit. */
#define AVAILABLE_MIN (UINT64_C(512) << 20)

static void check_available(struct doctor *d)
{
    char available[24], total[24];
    const uint64_t bytes = doctor_meminfo("MemAvailable");
    if (bytes == 0) {
        doctor_ok(d, "/proc/meminfo cannot be read here");
        return;
    }
    doctor_bytes(bytes, available);
    doctor_bytes(doctor_meminfo("MemTotal"), total);
    /* fp32 masters, two moments, gradient sum, and the published copy. */
    const double parameters = (double)bytes / 20e6;
    if (bytes < AVAILABLE_MIN)
        doctor_warn(d, "end what uses it, or train on a larger machine",
                    "%s of %s available: about %.0f M parameters with AdamW in fp32", available,
                    total, parameters);
    else
        doctor_ok(d,
                  "%s of %s available: about %.0f M parameters with AdamW in fp32 (memfd: the "
                  "size of /dev/shm does not matter)",
                  available, total, parameters);
}

/* This process's cgroup under the unified hierarchy ("0::/path"); false when there is none. */
static bool cgroup_path(char *buf, size_t bytes)
{
    char line[400];
    FILE *f = fopen("/proc/self/cgroup", "re");
    bool found = false;
    while (f != NULL && !found && fgets(line, sizeof(line), f) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        found = strncmp(line, "0::", 3) == 0;
    }
    if (f != NULL)
        fclose(f);
    if (found)
        snprintf(buf, bytes, "/sys/fs/cgroup%s/memory.max",
                 strcmp(line + 3, "/") != 0 ? line + 3 : "");
    return found;
}

static void check_cgroup(struct doctor *d)
{
    char path[450], text[24];
    uint64_t max;
    if (!cgroup_path(path, sizeof(path)) || !doctor_read_u64(path, &max))
        return; /* no limit: nothing to say */
    if (max < doctor_meminfo("MemTotal"))
        doctor_warn(d, "raise MemoryMax= (systemd) or --memory (container) if state is to fit",
                    "this process's cgroup may use %s: shared memory counts",
                    doctor_bytes(max, text));
}

static void check_huge_pages(struct doctor *d)
{
    static const char path[] = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    char line[128], chosen[32] = "";
    if (!doctor_read_line(path, line, sizeof(line))) {
        doctor_ok(d, "transparent huge pages for shared memory: %s is not there", path);
        return;
    }
    sscanf(line, "%*[^[][%31[^]]", chosen); /* "always within_size [never]" */
    if (chosen[0] == '\0')
        sscanf(line, "[%31[^]]", chosen);
    /* No remedy: whether huge pages are faster has not been measured here. */
    if (strcmp(chosen, "always") == 0 || strcmp(chosen, "within_size") == 0)
        doctor_ok(d, "shared memory in transparent huge pages (%s)", chosen);
    else
        doctor_ok(d, "shared memory in 4 KiB pages (transparent_hugepage/shmem_enabled: %s)",
                  chosen);
}

void doctor_memory(struct doctor *d)
{
    check_available(d);
    check_cgroup(d);
    check_huge_pages(d);
}
