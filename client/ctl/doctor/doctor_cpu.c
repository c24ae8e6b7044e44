/* Which instructions this CPU has, and which of them the update kernels use. */
#include <string.h>

#include "client/ctl/doctor/doctor.h"
#include "kernels/cpu/isa.h"
#include "kernels/kern.h"
#include "proto/base/check.h"

/* As /proc/cpuinfo spells them; what the workers' matrix products may use as well. */
static const char *const known[] = { "avx2",     "fma",      "f16c",
                                     "avx512f",  "avx512bw", "avx512_bf16",
                                     "amx_tile", "amx_bf16", "avx512_fp16" };

static bool has_word(const char *line, const char *word)
{
    const size_t bytes = strlen(word);
    for (const char *p = strstr(line, word); p != NULL; p = strstr(p + bytes, word))
        if (p[-1] == ' ' && (p[bytes] == ' ' || p[bytes] == '\0' || p[bytes] == '\n'))
            return true;
    return false;
}

/* The flags of the first CPU, those of known[] alone. */
static void flags_found(char *buf, size_t bytes)
{
    char line[8192];
    FILE *f = fopen("/proc/cpuinfo", "re");
    bool found = false;
    buf[0] = '\0';
    while (f != NULL && !found && fgets(line, sizeof(line), f) != NULL)
        found = strncmp(line, "flags", 5) == 0;
    if (f != NULL)
        fclose(f);
    for (size_t i = 0; found && i < ARRAY_SIZE(known); i++)
        if (has_word(line, known[i])) {
            const size_t used = strlen(buf);
            snprintf(buf + used, bytes - used, "%s%s", used > 0 ? " " : "", known[i]);
        }
}

void doctor_cpu(struct doctor *d)
{
    char flags[200];
    flags_found(flags, sizeof(flags));
    const char *best = NULL;
    for (const char *const *isa = kern_cpu_isas(); *isa != NULL; isa++)
        best = *isa; /* worst first */
    CHECK(best != NULL);
    if (strcmp(best, "scalar") == 0)
        doctor_warn(d, "a CPU with AVX2 updates faster, to the same bits",
                    "update kernels: scalar (this CPU has: %s)",
                    flags[0] != '\0' ? flags : "none of theirs");
    else
        doctor_ok(d, "update kernels: %s (this CPU has: %s)", best,
                  flags[0] != '\0' ? flags : "flags cannot be read");
}
