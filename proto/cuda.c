/* See cuda.h. The library is opened at the first cuda_load() that finds it usable and stays open:
 * a driver cannot be unloaded from a process that used it. */
#include "proto/cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "proto/check.h"

static const struct {
    const char *symbol;
    size_t offset;
} functions[] = {
#define CUDA_SYMBOL(member, symbol, arguments) { symbol, offsetof(struct cuda, member) },
    CUDA_FUNCTIONS(CUDA_SYMBOL)
#undef CUDA_SYMBOL
};

static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;
static struct cuda table;
static bool loaded; /* under load_lock */

static int find_functions(void *library, struct cuda *ret, struct shd_err *e)
{
    for (size_t i = 0; i < ARRAY_SIZE(functions); i++) {
        void *symbol = dlsym(library, functions[i].symbol);
        if (symbol == NULL) {
            err_set(e, SHD_ENOTSUP,
                    "the NVIDIA driver here has no %s: it is too old, install one for "
                    "CUDA 12.4 or newer",
                    functions[i].symbol);
            return SHD_ENOTSUP; /* err_set()'s result, which the analyzer does not know */
        }
        memcpy((char *)ret + functions[i].offset, &symbol, sizeof symbol);
    }
    return SHD_OK;
}

/* What to look at when the driver does not start. */
static const char *init_remedy(CUresult r)
{
    switch (r) {
    case CUDA_ERROR_NO_DEVICE:
        return "no GPU, or CUDA_VISIBLE_DEVICES hides it; see nvidia-smi";
    case CUDA_ERROR_SYSTEM_NOT_READY:
        return "GPUs joined by NVSwitch need the service nvidia-fabricmanager";
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
        return "libcuda and the kernel module differ: reboot, or reload the module";
    default:
        return "see nvidia-smi and /dev/nvidia*; without /dev/nvidia-uvm: nvidia-modprobe -c 0 -u";
    }
}

static int driver_init(const struct cuda *c, struct shd_err *e)
{
    const CUresult r = c->cuInit(0);
    if (r == CUDA_ERROR_OUT_OF_MEMORY)
        return cuda_result(c, r, e, "start the NVIDIA driver");
    if (r != CUDA_SUCCESS) {
        cuda_result(c, r, e, "start the NVIDIA driver (%s)", init_remedy(r));
        if (e != NULL)
            e->code = SHD_ENOTSUP;
        return SHD_ENOTSUP;
    }
    int count = 0;
    const int status = cuda_result(c, c->cuDeviceGetCount(&count), e, "count the GPUs");
    if (status == SHD_OK && count == 0)
        return err_set(e, SHD_ENOTSUP, "the NVIDIA driver has no device: %s",
                       init_remedy(CUDA_ERROR_NO_DEVICE));
    return status;
}

/* Under load_lock. */
static int load(struct shd_err *e)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return err_set(e, SHD_ENOTSUP, "no NVIDIA driver here (%s)", dlerror());
    struct cuda found = { 0 };
    int r = find_functions(library, &found, e);
    if (r == SHD_OK)
        r = driver_init(&found, e);
    if (r != SHD_OK) {
        dlclose(library);
        return r;
    }
    table = found;
    loaded = true;
    return SHD_OK;
}

int cuda_load(const struct cuda **ret_cuda, struct shd_err *e)
{
    pthread_mutex_lock(&load_lock);
    const int r = loaded ? SHD_OK : load(e);
    pthread_mutex_unlock(&load_lock);
    if (r == SHD_OK)
        *ret_cuda = &table;
    return r;
}

static int result_status(CUresult result)
{
    switch (result) {
    case CUDA_SUCCESS:
        return SHD_OK;
    case CUDA_ERROR_OUT_OF_MEMORY:
        return SHD_ENOMEM;
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_INVALID_DEVICE:
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_PEER_ACCESS_UNSUPPORTED:
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_SYSTEM_NOT_READY:
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
        return SHD_ENOTSUP;
    default:
        return SHD_EIO;
    }
}

int cuda_result(const struct cuda *cuda, CUresult result, struct shd_err *e, const char *fmt, ...)
{
    const int status = result_status(result);
    if (status == SHD_OK)
        return SHD_OK;
    char what[SHD_ERR_TEXT_BYTES];
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    const char *name = NULL, *text = NULL;
    if (cuda->cuGetErrorName(result, &name) != CUDA_SUCCESS || name == NULL)
        name = "unknown CUDA error";
    if (cuda->cuGetErrorString(result, &text) != CUDA_SUCCESS || text == NULL)
        text = "no description";
    return err_set(e, status, "%s: %s %d (%s)", what, name, (int)result, text);
}

/* By number, as in the driver's documentation: those after which "the process must be terminated
 * and relaunched". */
bool cuda_sticky(CUresult result)
{
    switch (result) {
    case CUDA_ERROR_DEINITIALIZED:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case 220: /* NVLINK_UNCORRECTABLE */
    case 226: /* CONTAINED */
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case 702: /* LAUNCH_TIMEOUT */
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case 710: /* ASSERT */
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case 715: /* ILLEGAL_INSTRUCTION */
    case 716: /* MISALIGNED_ADDRESS */
    case 717: /* INVALID_ADDRESS_SPACE */
    case 718: /* INVALID_PC */
    case CUDA_ERROR_LAUNCH_FAILED:
    case 721: /* TENSOR_MEMORY_LEAK */
    case CUDA_ERROR_UNKNOWN:
        return true;
    default:
        return false;
    }
}
