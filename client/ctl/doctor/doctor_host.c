/* See doctor_host.h. */
#include "client/ctl/doctor/doctor_host.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "client/ctl/base/text.h"
#include "client/ctl/doctor/doctor_check.h"
#include "kernels/cpu/isa.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/memory.h"
#include "proto/share/reserve.h"
#include "proto/share/segment.h"
#include "proto/spec/layout.h"

/* -- Kernel ------------------------------------------------------------------------------------ */

/* The system calls shardd lives on, tried: a version number does not tell of seccomp filters or of
 * kernels with parts left out. */

static const char upgrade[] = "use Linux 5.3 or later; in a container, allow this system call";

/* A page sealed as the board is: what was writable stays so, no new mapping is. */
static bool try_seals(int fd)
{
    return ftruncate(fd, SHD_PAGE_BYTES) == 0 &&
           fcntl(fd, F_ADD_SEALS,
                 F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) == 0;
}

/* Wait on a page that can only be read, for a value it does not have: comes back at once. */
static bool try_futex(int fd)
{
    void *page = mmap(NULL, SHD_PAGE_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        return false;
    const long r = syscall(SYS_futex, page, FUTEX_WAIT, 1, NULL, NULL, 0);
    const bool works = r < 0 && errno == EAGAIN;
    munmap(page, SHD_PAGE_BYTES);
    return works;
}

static bool try_write_refused(int fd)
{
    void *page = mmap(NULL, SHD_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        return errno == EPERM;
    munmap(page, SHD_PAGE_BYTES);
    return false;
}

static bool try_pidfd(int fd)
{
    (void)fd;
    const int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (pidfd >= 0)
        close(pidfd);
    return pidfd >= 0;
}

void doctor_kernel(struct doctor *d)
{
    static const struct {
        const char *name;
        bool (*works)(int fd); /* in this order, on one memfd */
    } features[] = {
        { "memfd seals with F_SEAL_FUTURE_WRITE", try_seals },
        { "futex on a read-only page", try_futex },
        { "F_SEAL_FUTURE_WRITE refuses writable mappings", try_write_refused },
        { "pidfd_open", try_pidfd },
    };
    struct utsname u;
    if (uname(&u) < 0)
        snprintf(u.release, sizeof(u.release), "?");
    const int fd = memfd_create("shardctl-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) {
        doctor_fail(d, upgrade, "Linux %.60s: memfd_create: %s", u.release, strerror(errno));
        return;
    }
    unsigned missing = 0;
    for (size_t i = 0; i < ARRAY_SIZE(features); i++) {
        if (features[i].works(fd))
            continue;
        missing++;
        doctor_fail(d, upgrade, "Linux %.60s: no %s", u.release, features[i].name);
    }
    close(fd);
    if (missing == 0)
        doctor_ok(d, "Linux %.60s: sealed memfd, futex on shared pages and pidfd work", u.release);
}

/* -- Limits ------------------------------------------------------------------------------------ */

/* Limits of one process: mappings, descriptors, locked memory. */

/* A worker has one of each daemon's part of each unit (only what is side by side in one daemon's
 * segment is one for several units), a few thousand for gradients and all else. Linux' default is
 * 65,530. */
#define MAPPINGS_MIN   UINT64_C(65530)
#define MAPPINGS_OTHER UINT64_C(4096)
#define MAPPINGS_LARGE UINT64_C(262144) /* the most units there may be, on 3 daemons */

/* A session takes 3 in the daemon, a model a handful; below this a few hundred workers do not fit.
 */
#define FILES_MIN 4096u

#define LOCKED_MIN (UINT64_C(64) << 20)

static void check_mappings(struct doctor *d)
{
    static const char raise[] = "sysctl -w vm.max_map_count=262144 (and in /etc/sysctl.d)";
    uint64_t max;
    if (!doctor_read_u64("/proc/sys/vm/max_map_count", &max)) {
        doctor_ok(d, "vm.max_map_count cannot be read here");
        return;
    }
    const uint64_t parts = max > MAPPINGS_OTHER ? max - MAPPINGS_OTHER : 0;
    const uint64_t two = parts / 2 < SHD_UNITS_MAX ? parts / 2 : SHD_UNITS_MAX;
    if (max < MAPPINGS_MIN)
        doctor_warn(d, raise,
                    "vm.max_map_count is %" PRIu64 ": a worker maps each daemon's part of a unit, "
                    "so models of %" PRIu64 " units on 2 daemons fit",
                    max, two);
    else if (max < MAPPINGS_LARGE)
        doctor_ok(d,
                  "vm.max_map_count %" PRIu64 ": models of %" PRIu64 " units on 2 daemons, %" PRIu64
                  " on 4; larger ones (at most %u units): %s",
                  max, two, parts / 4, SHD_UNITS_MAX, raise);
    else
        doctor_ok(d, "vm.max_map_count %" PRIu64 ": models of %" PRIu64 " units on 2 daemons", max,
                  two);
}

static const char *limit_text(rlim_t n, char buf[TEXT_BYTES])
{
    if (n == RLIM_INFINITY)
        snprintf(buf, 24, "unlimited");
    else
        snprintf(buf, 24, "%" PRIu64, (uint64_t)n);
    return buf;
}

static void check_files(struct doctor *d)
{
    struct rlimit files;
    char soft[TEXT_BYTES], hard[TEXT_BYTES];
    if (getrlimit(RLIMIT_NOFILE, &files) < 0)
        return;
    limit_text(files.rlim_cur, soft);
    limit_text(files.rlim_max, hard);
    if (files.rlim_max < FILES_MIN)
        doctor_warn(d, "raise the hard limit: LimitNOFILE= of the service, or `ulimit -Hn`",
                    "RLIMIT_NOFILE %s, at most %s: daemons need some for each session", soft, hard);
    else
        doctor_ok(d, "RLIMIT_NOFILE %s, daemons raise it to %s", soft, hard);
}

/* Only GPU daemons lock memory, so a small limit is no more than a remark. */
static void check_locked(struct doctor *d)
{
    struct rlimit locked;
    char text[TEXT_BYTES];
    if (getrlimit(RLIMIT_MEMLOCK, &locked) < 0)
        return;
    if (locked.rlim_cur == RLIM_INFINITY)
        doctor_ok(d, "RLIMIT_MEMLOCK unlimited");
    else
        doctor_ok(d, "RLIMIT_MEMLOCK %s%s", text_size(locked.rlim_cur, text),
                  locked.rlim_cur < LOCKED_MIN ? ": enough for cpu daemons, a GPU wants unlimited"
                                               : "");
}

void doctor_limits(struct doctor *d)
{
    check_mappings(d);
    check_files(d);
    check_locked(d);
}

/* -- Memory ------------------------------------------------------------------------------------ */

/* Memory that there is for state, and the pages it would be in. */

/* A GPT of a million parameters with AdamW is 20 MB: below this only toys fit. */
#define AVAILABLE_MIN (UINT64_C(512) << 20)

static void check_available(struct doctor *d)
{
    char available[TEXT_BYTES], total[TEXT_BYTES];
    const uint64_t bytes = doctor_meminfo("MemAvailable");
    if (bytes == 0) {
        doctor_ok(d, "/proc/meminfo cannot be read here");
        return;
    }
    text_size(bytes, available);
    text_size(doctor_meminfo("MemTotal"), total);
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

/* The tightest limit on the way from this process's cgroup to the root, of either version. */
static void check_cgroup(struct doctor *d)
{
    static const char raise[] = "raise MemoryMax= (systemd) or --memory (container) if state is to "
                                "fit: shared memory counts";
    const struct memory_room room = memory_room();
    char limit[TEXT_BYTES], used[TEXT_BYTES], left[TEXT_BYTES];
    if (room.ignored[0] != '\0')
        doctor_warn(d, "if it has a limit of memory, daemons do not see it", "cgroup: %s",
                    room.ignored);
    if (room.limit_bytes == UINT64_MAX) {
        doctor_ok(d, "no cgroup limits this process's memory");
        return;
    }
    text_size(room.limit_bytes, limit);
    text_size(room.used_bytes, used);
    text_size(room.cgroup_bytes, left);
    if (room.cgroup_bytes < AVAILABLE_MIN)
        doctor_warn(d, raise, "%s of %s of this cgroup are used, %s are left (%s)", used, limit,
                    left, room.limit_path);
    else
        doctor_ok(d, "%s of %s of this cgroup are used, %s are left (%s)", used, limit, left,
                  room.limit_path);
}

/* Whether a segment gets huge pages, by making one; false as well where none are left. */
static bool try_huge(void)
{
    struct segment s;
    struct shd_err e;
    if (segment_new("shardctl-doctor", SEGMENT_STATE, RESERVE_HUGE, &s, &e) != SHD_OK)
        return false;
    const bool huge = s.huge_bytes > 0;
    segment_close(&s);
    return huge;
}

static void check_huge_pages(struct doctor *d)
{
    static const char path[] = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    char line[128] = "", chosen[32] = "";
    doctor_read_line(path, line, sizeof(line));
    sscanf(line, "%*[^[][%31[^]]", chosen); /* "always within_size [never]" */
    if (chosen[0] == '\0')
        sscanf(line, "[%31[^]]", chosen);
    if (try_huge())
        doctor_ok(d, "models in huge pages of 2 MiB");
    else if (line[0] == '\0')
        doctor_ok(d, "models in 4 KiB pages: %s is not there", path);
    else if (strcmp(chosen, "always") == 0 || strcmp(chosen, "within_size") == 0)
        doctor_ok(d, "models in transparent huge pages (%s)", chosen);
    else
        doctor_warn(d,
                    "echo within_size >/sys/kernel/mm/transparent_hugepage/shmem_enabled; or Linux "
                    "6.1 or later, where any value but deny will do",
                    "models in 4 KiB pages, updates are slower (transparent_hugepage/"
                    "shmem_enabled: %s)",
                    chosen);
}

void doctor_memory(struct doctor *d)
{
    check_available(d);
    check_cgroup(d);
    check_huge_pages(d);
}

/* -- Instructions ------------------------------------------------------------------------------ */

/* Instructions of this CPU, and those of them that the update kernels use. */

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
        doctor_ok(d, "update kernels: %s%s (this CPU has: %s)", best,
                  strcmp(best, "avx512") == 0
                      ? ", and avx2 for what a daemon finds to be quicker so"
                      : "",
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
    static const char *const names[] = { "libdnnl.so.3", "libdnnl.so.2", NULL };
    const struct dnnl_version *(*version)(void);
    int (*isa)(void);
    *(void **)&version = doctor_symbol(names, "dnnl_version");
    *(void **)&isa = doctor_symbol(names, "dnnl_get_effective_cpu_isa");
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
    static const char *const names[] = { "libopenblas.so.0", NULL };
    const char *(*core)(void);
    *(void **)&core = doctor_symbol(names, "openblas_get_corename");
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

/* -- Checkpoints ------------------------------------------------------------------------------- */

#define FREE_MIN (UINT64_C(1) << 30)

static void check_space(struct doctor *d)
{
    struct statvfs fs;
    char text[TEXT_BYTES];
    if (statvfs(d->checkpoint, &fs) < 0)
        return;
    const uint64_t bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    text_size(bytes, text);
    if (bytes < FREE_MIN)
        doctor_warn(d, "make room: a checkpoint with optimizer state takes 12 bytes per parameter",
                    "%s: only %s free", d->checkpoint, text);
    else
        doctor_ok(d, "%s: can be written, %s free", d->checkpoint, text);
}

/* "" or what failed. */
static const char *try_write(const char *dir)
{
    char path[PATH_MAX];
    static const char byte = 0;
    const char *failed = "";
    if (snprintf(path, sizeof(path), "%s/.shardctl-doctor-XXXXXX", dir) >= (int)sizeof(path))
        return "name";
    const int fd = mkostemp(path, O_CLOEXEC);
    if (fd < 0)
        return "make a file";
    if (write(fd, &byte, 1) != 1)
        failed = "write";
    else if (fsync(fd) != 0)
        failed = "fsync";
    const int saved = errno;
    close(fd);
    unlink(path);
    errno = saved;
    return failed;
}

void doctor_checkpoint(struct doctor *d)
{
    struct stat st;
    if (d->checkpoint == NULL)
        return;
    const int r = stat(d->checkpoint, &st);
    if (r < 0 || !S_ISDIR(st.st_mode)) {
        doctor_fail(d, "make the directory, owned by who runs the daemons", "%s: %s", d->checkpoint,
                    r < 0 ? strerror(errno) : "not a directory");
        return;
    }
    const char *failed = try_write(d->checkpoint);
    if (failed[0] != '\0')
        doctor_fail(d, "give it to the daemons' user; under systemd also ReadWritePaths=",
                    "%s: cannot %s: %s", d->checkpoint, failed, strerror(errno));
    else
        check_space(d);
}
