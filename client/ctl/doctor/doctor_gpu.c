/* See doctor_gpu.h. */
#include "client/ctl/doctor/doctor_gpu.h"

#include <assert.h>
#include <elf.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/ctl/base/child.h"
#include "client/ctl/base/text.h"
#include "client/ctl/doctor/doctor_check.h"
#include "proto/base/dir.h"
#include "proto/gpu/cuda.h"

#define COMPUTE_MIN 90 /* what kernels/cuda is compiled for: PTX for 9.0 runs on all later ones */
#define GPUS_MAX    16

/* -- In a child: what drivers do in a process is not undone ------------------------------------ */

/* "13000" (the newest CUDA the driver knows, and its devices can be used), or why not. */
static void probe_driver(FILE *out)
{
    const struct cuda *cuda;
    struct shd_err e;
    int version = 0;
    if (cuda_load(&cuda, &e) != SHD_OK)
        fprintf(out, "%s\n", e.text);
    else if (cuda->cuDriverGetVersion(&version) == CUDA_SUCCESS)
        fprintf(out, "%d\n", version);
}

struct device {
    char name[64];
    int compute; /* 90 */
    int vmm, posix;
    uint64_t free_bytes, total_bytes;
};

static bool look_at(const struct cuda *cuda, int ordinal, struct device *ret)
{
    CUdevice device;
    CUcontext context;
    size_t free_bytes = 0, total = 0;
    int major = 0, minor = 0;
    if (cuda->cuDeviceGet(&device, ordinal) != CUDA_SUCCESS ||
        cuda->cuDeviceGetName(ret->name, sizeof(ret->name), device) != CUDA_SUCCESS)
        return false;
    cuda->cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
    cuda->cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
    cuda->cuDeviceGetAttribute(&ret->vmm, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                               device);
    cuda->cuDeviceGetAttribute(
        &ret->posix, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device);
    cuda->cuDeviceTotalMem(&total, device);
    if (cuda->cuDevicePrimaryCtxRetain(&context, device) == CUDA_SUCCESS &&
        cuda->cuCtxSetCurrent(context) == CUDA_SUCCESS)
        cuda->cuMemGetInfo(&free_bytes, &total);
    ret->compute = 10 * major + minor;
    ret->free_bytes = free_bytes;
    ret->total_bytes = total;
    return true;
}

/* A device each: "90 1 1 FREE TOTAL NAME|". */
static void probe_devices(FILE *out)
{
    const struct cuda *cuda;
    struct shd_err e;
    int count = 0;
    if (cuda_load(&cuda, &e) != SHD_OK || cuda->cuDeviceGetCount(&count) != CUDA_SUCCESS)
        return;
    for (int i = 0; i < count && i < GPUS_MAX; i++) {
        struct device d = { 0 };
        if (look_at(cuda, i, &d))
            fprintf(out, "%d %d %d %" PRIu64 " %" PRIu64 " %s|", d.compute, d.vmm, d.posix,
                    d.free_bytes, d.total_bytes, d.name);
    }
    fputc('\n', out);
}

static void probe_nccl(FILE *out)
{
    static const char *const names[] = { "libnccl.so.2", NULL };
    int (*get_version)(int *);
    int v = 0;
    *(void **)&get_version = doctor_symbol(names, "ncclGetVersion");
    if (get_version != NULL && get_version(&v) == 0)
        fprintf(out, "%d.%d.%d\n", v / 10000, v / 100 % 100, v % 100);
}

static void probe_cublas(FILE *out)
{
    static const char *const names[] = { "libcublas.so.13", "libcublas.so.12", NULL };
    int (*get_property)(int, int *);
    int major = 0, minor = 0;
    *(void **)&get_property = doctor_symbol(names, "cublasGetProperty");
    if (get_property != NULL && get_property(0, &major) == 0 && get_property(1, &minor) == 0)
        fprintf(out, "%d.%d\n", major, minor);
}

/* -- Kernels in a program ---------------------------------------------------------------------- */

/* Kernels are in section .nv_fatbin of a program, read here as cuobjdump -lelf would. NVIDIA does
 * not document the format. The parts that are read (a header of 16 bytes; of each entry kind, sizes
 * and architecture, in its first 32) have not changed since CUDA 5. */

#define FATBIN_MAGIC UINT32_C(0xba55ed50)
enum { FATBIN_PTX = 1, FATBIN_ELF = 2 };

struct fatbin_header {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes; /* behind the header */
};
struct fatbin_entry {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes; /* behind the header */
    uint32_t compressed_bytes, options;
    uint16_t minor, major;
    uint32_t arch; /* 90 */
};
static_assert(sizeof(struct fatbin_entry) == 32, "as in the file");

struct bytes {
    const uint8_t *at;
    uint64_t count;
};

static bool take(struct bytes b, uint64_t offset, void *out, size_t count)
{
    if (offset > b.count || count > b.count - offset)
        return false;
    memcpy(out, b.at + offset, count);
    return true;
}

static void add_arch(char *out, size_t bytes, const struct fatbin_entry *e)
{
    char word[32];
    snprintf(word, sizeof(word), e->kind == FATBIN_ELF ? "sm_%u" : "compute_%u (PTX)", e->arch);
    const size_t used = strlen(out);
    if (strstr(out, word) == NULL)
        snprintf(out + used, bytes - used, "%s%s", used > 0 ? ", " : "", word);
}

/* Fat binaries lie one behind the other, aligned to 8. */
static void list_archs(struct bytes section, char *out, size_t bytes)
{
    struct fatbin_header header;
    struct fatbin_entry entry;
    uint64_t at = 0;
    while (take(section, at, &header, sizeof(header)) && header.magic == FATBIN_MAGIC) {
        if (header.header_bytes < sizeof(header) ||
            header.bytes > section.count - at - sizeof(header))
            return;
        const uint64_t end = at + header.header_bytes + header.bytes;
        uint64_t entry_at = at + header.header_bytes;
        while (entry_at < end && take(section, entry_at, &entry, sizeof(entry)) &&
               entry.header_bytes >= sizeof(entry) && entry.bytes <= section.count) {
            if (entry.kind == FATBIN_ELF || entry.kind == FATBIN_PTX)
                add_arch(out, bytes, &entry);
            entry_at += entry.header_bytes + entry.bytes;
        }
        at = (end + 7) / 8 * 8;
    }
}

static bool find_section(struct bytes file, const char *name, struct bytes *ret_section)
{
    Elf64_Ehdr elf;
    Elf64_Shdr names, section;
    if (!take(file, 0, &elf, sizeof(elf)) || memcmp(elf.e_ident, ELFMAG, SELFMAG) != 0 ||
        elf.e_ident[EI_CLASS] != ELFCLASS64 || elf.e_shentsize != sizeof(section) ||
        !take(file, elf.e_shoff + (uint64_t)elf.e_shstrndx * sizeof(names), &names, sizeof(names)))
        return false;
    for (uint16_t i = 0; i < elf.e_shnum; i++) {
        char text[16];
        if (take(file, elf.e_shoff + (uint64_t)i * sizeof(section), &section, sizeof(section)) &&
            take(file, names.sh_offset + section.sh_name, text, strlen(name) + 1) &&
            memcmp(text, name, strlen(name) + 1) == 0 && section.sh_offset < file.count &&
            section.sh_size <= file.count - section.sh_offset) {
            *ret_section = (struct bytes){ file.at + section.sh_offset, section.sh_size };
            return true;
        }
    }
    return false;
}

/* "sm_90, compute_90 (PTX)"; empty: for none. False: the file cannot be read. */
static bool fatbin(const char *path, char *buf, size_t bytes)
{
    struct stat st;
    struct bytes section;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    const bool known = fstat(fd, &st) == 0 && st.st_size > 0;
    void *base = known ? mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0) : MAP_FAILED;
    close(fd);
    if (base == MAP_FAILED)
        return false;
    buf[0] = '\0';
    if (find_section((struct bytes){ base, (uint64_t)st.st_size }, ".nv_fatbin", &section))
        list_archs(section, buf, bytes);
    munmap(base, (size_t)st.st_size);
    return true;
}

/* -- The checks -------------------------------------------------------------------------------- */

/* By its process: the pipe directory may be anywhere. */
static bool mps_runs(void)
{
    DIR *dir = opendir("/proc");
    bool found = false;
    for (const char *entry = dir_next(&dir); entry != NULL; entry = dir_next(&dir)) {
        char name[32];
        const int pid = atoi(entry);
        found = found || (pid > 0 && doctor_process_name(pid, name, sizeof(name)) &&
                          strncmp(name, "nvidia-cuda-mps", 15) == 0);
    }
    return found;
}

/* "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul ..." */
static void driver_version(const char *line, char buf[32])
{
    const char *digits = strpbrk(line, "0123456789");
    while (digits != NULL && strspn(digits, "0123456789.") < 5) {
        digits += strspn(digits, "0123456789.");
        digits = strpbrk(digits, "0123456789");
    }
    snprintf(buf, 32, "%.*s", digits != NULL ? (int)strspn(digits, "0123456789.") : 1,
             digits != NULL ? digits : "?");
}

/* True when there are devices to look at. */
static bool check_driver(struct doctor *d)
{
    char line[200], kernel[32] = "", text[DOCTOR_TEXT_BYTES];
    if (doctor_read_line("/proc/driver/nvidia/version", line, sizeof(line)))
        driver_version(line, kernel);
    const bool answered = doctor_probe(probe_driver, text, sizeof(text));
    const int version = answered ? atoi(text) : 0;
    if (version > 0) {
        doctor_ok(d, "NVIDIA driver %s, CUDA up to %d.%d",
                  kernel[0] ? kernel : "(no /proc/driver/nvidia)", version / 1000,
                  version % 1000 / 10);
        return true;
    }
    if (kernel[0] == '\0' && (!answered || strstr(text, "libcuda.so.1: cannot open") != NULL))
        doctor_ok(d, "not here: no NVIDIA driver; state is in host memory");
    else if (kernel[0] == '\0')
        doctor_ok(d, "not here: %s", text);
    else if (answered)
        doctor_warn(d,
                    "install the driver's user libraries of the same version (libcuda1, or the "
                    "container's NVIDIA run time), and see that /dev/nvidia* can be opened",
                    "NVIDIA driver %s, but CUDA cannot be used: %s", kernel, text);
    else
        doctor_warn(d, "run nvidia-smi: if it hangs too, the driver or the GPU is in trouble",
                    "NVIDIA driver %s, but starting CUDA crashes or takes longer than 10 s",
                    kernel);
    return false;
}

static void check_device(struct doctor *d, int ordinal, const struct device *dev)
{
    char free_text[TEXT_BYTES], total_text[TEXT_BYTES];
    text_size(dev->free_bytes, free_text);
    text_size(dev->total_bytes, total_text);
    if (dev->compute < COMPUTE_MIN)
        doctor_warn(d, "use cpu0 and so on on this host: kernels are compiled for 9.0 and later",
                    "gpu%d: %s has compute capability %d.%d, no daemon can run on it", ordinal,
                    dev->name, dev->compute / 10, dev->compute % 10);
    else if (!dev->vmm || !dev->posix)
        doctor_warn(d, "not on vGPUs and in WSL: use the GPU itself, or host devices",
                    "gpu%d: %s cannot share memory between processes (virtual memory management "
                    "%s, POSIX descriptors %s)",
                    ordinal, dev->name, dev->vmm ? "yes" : "no", dev->posix ? "yes" : "no");
    else if (dev->free_bytes < dev->total_bytes / 10)
        doctor_warn(d, "nvidia-smi shows who holds the rest", "gpu%d: %s has %s free of %s",
                    ordinal, dev->name, free_text, total_text);
    else
        doctor_ok(d,
                  "gpu%d: %s, compute capability %d.%d, %s free of %s, shares memory by POSIX "
                  "descriptors",
                  ordinal, dev->name, dev->compute / 10, dev->compute % 10, free_text, total_text);
}

static void check_devices(struct doctor *d)
{
    char text[GPUS_MAX * 160], *rest = NULL;
    if (!doctor_probe(probe_devices, text, sizeof(text))) {
        doctor_warn(d, "run nvidia-smi: if it hangs too, the driver or a GPU is in trouble",
                    "the driver answers, its devices do not within 10 s");
        return;
    }
    int ordinal = 0;
    for (char *one = strtok_r(text, "|", &rest); one != NULL; one = strtok_r(NULL, "|", &rest)) {
        struct device dev = { 0 };
        int name_at = 0;
        if (sscanf(one, "%d %d %d %" SCNu64 " %" SCNu64 " %n", &dev.compute, &dev.vmm, &dev.posix,
                   &dev.free_bytes, &dev.total_bytes, &name_at) == 5) {
            snprintf(dev.name, sizeof(dev.name), "%s", one + name_at);
            check_device(d, ordinal++, &dev);
        }
    }
}

static void check_kernels(struct doctor *d, bool devices)
{
    char path[PATH_MAX], archs[200];
    if (child_find_shardd(path, sizeof(path), NULL) != SHD_OK || strchr(path, '/') == NULL ||
        !fatbin(path, archs, sizeof(archs)))
        return; /* shardd is not here: another check's business */
    if (archs[0] != '\0')
        doctor_ok(d, "shardd has GPU kernels: %s", archs);
    else if (devices)
        doctor_warn(d,
                    "build it where nvcc is (CUDA 13.0 is tried): cmake --preset release --fresh",
                    "shardd was built without GPU kernels: gpu0 and so on cannot be started");
    else
        doctor_ok(d, "shardd was built without GPU kernels");
}

static void check_libraries(struct doctor *d)
{
    char text[64];
    if (doctor_probe(probe_cublas, text, sizeof(text)))
        doctor_ok(d, "cuBLAS %s", text);
    else
        doctor_ok(d, "no libcublas.so.13 or .12: daemons need none, shd-gpt --device cuda:N does");
    if (doctor_probe(probe_nccl, text, sizeof(text)))
        doctor_ok(d, "NCCL %s", text);
    else
        doctor_ok(d, "no libnccl.so.2: needed between GPUs without peer access alone");
}

void doctor_gpu(struct doctor *d)
{
    const bool devices = check_driver(d);
    if (devices)
        check_devices(d);
    check_kernels(d, devices);
    if (!devices)
        return;
    check_libraries(d);
    if (mps_runs())
        doctor_warn(d, "stop it: echo quit | nvidia-cuda-mps-control",
                    "MPS runs: a fault of one process ends all on its GPU, daemons among them");
    else
        doctor_ok(d, "MPS does not run");
}
