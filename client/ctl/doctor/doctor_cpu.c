/* See doctor_cpu.h. */
#include "client/ctl/doctor/doctor_cpu.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/doctor/doctor.h"
#include "client/ctl/doctor/doctor_look.h"
#include "kernels/cpu/isa.h"
#include "kernels/kern.h"
#include "proto/base/check.h"

/* -- Instructions ------------------------------------------------------------------------------ */

/* Which instructions this CPU has, and which of them the update kernels use. */

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

/* -- Matrix products --------------------------------------------------------------------------- */

/* The libraries of the workers' matrix products, when they are there: they choose their own
 * instructions, and OpenBLAS is known to choose badly on new CPUs. */

/* dnnl_version_t of oneDNN 2 and 3, as far as it is used. */
struct dnnl_version {
    int major, minor, patch;
};

/* enum dnnl_cpu_isa_t, worst first. */
static const char *dnnl_isa_name(int isa)
{
    static const struct {
        int isa;
        const char *name;
    } names[] = { { 0x1, "sse41" },
                  { 0x3, "avx" },
                  { 0x7, "avx2" },
                  { 0xf, "avx2_vnni" },
                  { 0x1f, "avx2_vnni_2" },
                  { 0x27, "avx512_core" },
                  { 0x67, "avx512_core_vnni" },
                  { 0xe7, "avx512_core_bf16" },
                  { 0x1ef, "avx512_core_fp16" },
                  { 0xfef, "avx512_core_amx" },
                  { 0x1fef, "avx512_core_amx_fp16" } };
    for (size_t i = 0; i < ARRAY_SIZE(names); i++)
        if (names[i].isa == isa)
            return names[i].name;
    return NULL;
}

static void probe_dnnl(FILE *out)
{
    void *library = doctor_library((const char *[]){ "libdnnl.so.3", "libdnnl.so.2", NULL });
    if (library == NULL)
        return;
    const struct dnnl_version *(*version)(void);
    int (*isa)(void);
    *(void **)&version = dlsym(library, "dnnl_version");
    *(void **)&isa = dlsym(library, "dnnl_get_effective_cpu_isa");
    if (version == NULL || isa == NULL)
        return;
    const char *name = dnnl_isa_name(isa());
    const struct dnnl_version *v = version();
    fprintf(out, "oneDNN %d.%d.%d, instructions ", v->major, v->minor, v->patch);
    if (name != NULL)
        fprintf(out, "%s\n", name);
    else
        fprintf(out, "0x%x\n", (unsigned)isa());
}

static void probe_openblas(FILE *out)
{
    void *library = doctor_library((const char *[]){ "libopenblas.so.0", NULL });
    const char *(*core)(void);
    if (library == NULL)
        return;
    *(void **)&core = dlsym(library, "openblas_get_corename");
    if (core != NULL)
        fprintf(out, "%s\n", core());
}

static bool cpu_has_avx512(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");
}

void doctor_gemm(struct doctor *d)
{
    char text[200], core[100];
    const bool dnnl = doctor_probe(probe_dnnl, text, sizeof(text));
    const bool blas = doctor_probe(probe_openblas, core, sizeof(core));
    if (dnnl)
        doctor_ok(d, "%s", text);
    if (blas && cpu_has_avx512() && strcmp(core, "Haswell") == 0)
        doctor_warn(d, "OPENBLAS_CORETYPE=SkylakeX in the workers' environment",
                    "OpenBLAS takes its kernels for %s on a CPU with AVX-512", core);
    else if (blas)
        doctor_ok(d, "OpenBLAS, kernels for %s", core);
    if (!dnnl && !blas)
        doctor_ok(d, "neither oneDNN nor OpenBLAS here: daemons need none, shd-gpt needs oneDNN");
}
