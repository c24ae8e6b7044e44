/* See cuda.h. */
#include "proto/gpu/cuda.h"

#include <stdarg.h>
#include <stdio.h>

#include "proto/base/check.h"
#include "proto/base/library.h"

static const struct library_function functions[] = {
#define CUDA_SYMBOL(member, symbol, arguments) { symbol, offsetof(struct cuda, member) },
    CUDA_FUNCTIONS(CUDA_SYMBOL)
#undef CUDA_SYMBOL
};

static struct cuda table;

/* A hint for whoever finds that the driver does not start. */
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

static int driver_init(struct shd_err *e)
{
    const struct cuda *c = &table;
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

static struct library driver = {
    .names = { "libcuda.so.1" },
    .absent = "no NVIDIA driver here",
    .called = "the NVIDIA driver here",
    .remedy = "it is too old, install one for CUDA 12.4 or newer",
    .functions = functions,
    .function_count = ARRAY_SIZE(functions),
    .table = &table,
    .start = driver_init,
    .lock = PTHREAD_MUTEX_INITIALIZER,
};

int cuda_load(const struct cuda **ret_cuda, struct shd_err *e)
{
    const int r = library_load(&driver, e);
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

/* The driver's documentation says of these, by number: "the process must be terminated and
 * relaunched". */
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
