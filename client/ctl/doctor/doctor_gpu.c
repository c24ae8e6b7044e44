/* See doctor_gpu.h. */
#include "client/ctl/doctor/doctor_gpu.h"

#include <dirent.h>
#include <dlfcn.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/ctl/base/text.h"
#include "client/ctl/doctor/doctor_fatbin.h"
#include "client/ctl/doctor/doctor_look.h"
#include "proto/gpu/cuda.h"

#define COMPUTE_MIN 90 /* what kernels/cuda is compiled for: PTX for 9.0 runs on all later ones */
#define DEVICES_MAX 16

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
    for (int i = 0; i < count && i < DEVICES_MAX; i++) {
        struct device d = { 0 };
        if (look_at(cuda, i, &d))
            fprintf(out, "%d %d %d %" PRIu64 " %" PRIu64 " %s|", d.compute, d.vmm, d.posix,
                    d.free_bytes, d.total_bytes, d.name);
    }
    fputc('\n', out);
}

static void probe_nccl(FILE *out)
{
    void *library = doctor_library((const char *[]){ "libnccl.so.2", NULL });
    int (*get_version)(int *);
    int v = 0;
    if (library == NULL)
        return;
    *(void **)&get_version = dlsym(library, "ncclGetVersion");
    if (get_version != NULL && get_version(&v) == 0)
        fprintf(out, "%d.%d.%d\n", v / 10000, v / 100 % 100, v % 100);
}

static void probe_cublas(FILE *out)
{
    void *library = doctor_library((const char *[]){ "libcublas.so.13", "libcublas.so.12", NULL });
    int (*get_property)(int, int *);
    int major = 0, minor = 0;
    if (library == NULL)
        return;
    *(void **)&get_property = dlsym(library, "cublasGetProperty");
    if (get_property != NULL && get_property(0, &major) == 0 && get_property(1, &minor) == 0)
        fprintf(out, "%d.%d\n", major, minor);
}

/* -- The checks -------------------------------------------------------------------------------- */

/* By its process: the pipe directory may be anywhere. */
static bool mps_runs(void)
{
    DIR *dir = opendir("/proc");
    const struct dirent *entry;
    bool found = false;
    while (dir != NULL && !found && (entry = readdir(dir)) != NULL) {
        char name[32];
        const int pid = atoi(entry->d_name);
        found = pid > 0 && doctor_process_name(pid, name, sizeof(name)) &&
                strncmp(name, "nvidia-cuda-mps", 15) == 0;
    }
    if (dir != NULL)
        closedir(dir);
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
    char text[DEVICES_MAX * 160], *rest = NULL;
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

/* shardd as `run` and `up` would start it: $SHARDD_BIN, else beside us. */
static bool find_shardd(char *buf, size_t bytes)
{
    const char *wanted = getenv("SHARDD_BIN");
    char self[PATH_MAX];
    if (wanted != NULL && wanted[0] != '\0')
        return snprintf(buf, bytes, "%s", wanted) < (int)bytes;
    const ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    self[n > 0 ? n : 0] = '\0';
    char *slash = strrchr(self, '/');
    if (slash == NULL)
        return false;
    *slash = '\0';
    return snprintf(buf, bytes, "%s/shardd", self) < (int)bytes;
}

static void check_kernels(struct doctor *d, bool devices)
{
    char path[PATH_MAX], archs[200];
    if (!find_shardd(path, sizeof(path)) || !doctor_fatbin(path, archs, sizeof(archs)))
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
        doctor_ok(d, "no libnccl.so.2: not needed on one host");
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
