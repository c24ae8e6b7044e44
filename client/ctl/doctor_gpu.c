/* NVIDIA's driver and libraries. None of them is needed for host memory. */
#include <dirent.h>
#include <dlfcn.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/ctl/doctor.h"

/* The version without cuInit(): nothing is started on the GPU. */
static void probe_cuda(FILE *out)
{
    void *library = doctor_library((const char *[]){ "libcuda.so.1", NULL });
    int (*get_version)(int *);
    int version = 0;
    if (library == NULL)
        return;
    *(void **)&get_version = dlsym(library, "cuDriverGetVersion");
    if (get_version != NULL && get_version(&version) == 0)
        fprintf(out, "%d.%d\n", version / 1000, version % 1000 / 10);
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

void doctor_gpu(struct doctor *d)
{
    char line[200], version[32], text[64];
    if (!doctor_read_line("/proc/driver/nvidia/version", line, sizeof(line))) {
        doctor_ok(d, "no NVIDIA driver: state is in host memory");
        return;
    }
    driver_version(line, version);
    if (doctor_probe(probe_cuda, text, sizeof(text)))
        doctor_ok(d, "NVIDIA driver %s, CUDA up to %s", version, text);
    else
        doctor_warn(d, "install the driver's user libraries of the same version",
                    "NVIDIA driver %s, but libcuda.so.1 cannot be loaded", version);
    if (doctor_probe(probe_nccl, text, sizeof(text)))
        doctor_ok(d, "NCCL %s", text);
    else
        doctor_ok(d, "no libnccl.so.2: needed for GPUs without peer mapping only");
    if (mps_runs())
        doctor_warn(d, "stop it: echo quit | nvidia-cuda-mps-control",
                    "MPS runs: a fault of one process ends all on its GPU, daemons among them");
    else
        doctor_ok(d, "MPS does not run");
}
