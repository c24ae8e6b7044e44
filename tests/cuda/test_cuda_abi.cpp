/* The driver's interface as proto/gpu/cuda.h declares it, against the CUDA Toolkit's own header,
 * and its symbols against the Toolkit's stub of the driver. Built only where there is a Toolkit. */
#define __CUDA_API_VERSION_INTERNAL /* every version of a function under its own name */
#include <cuda.h>

#include <cstdio>
#include <cstring>
#include <dlfcn.h>

#include "tests/cuda/abi.h"

/* Types only: there is no driver to link with. */
// clang-format off
#define REAL(symbol) { #symbol, abi_signature(static_cast<decltype(&(symbol))>(nullptr)) }
static const struct abi_function real_functions[] = {
    REAL(cuInit),
    REAL(cuDriverGetVersion),
    REAL(cuGetErrorName),
    REAL(cuGetErrorString),
    REAL(cuDeviceGetCount),
    REAL(cuDeviceGet),
    REAL(cuDeviceGetName),
    REAL(cuDeviceGetUuid_v2),
    REAL(cuDeviceGetAttribute),
    REAL(cuDeviceTotalMem_v2),
    REAL(cuDeviceCanAccessPeer),
    REAL(cuDevicePrimaryCtxRetain),
    REAL(cuDevicePrimaryCtxRelease_v2),
    REAL(cuCtxSetCurrent),
    REAL(cuCtxSynchronize),
    REAL(cuModuleLoadData),
    REAL(cuModuleUnload),
    REAL(cuModuleGetFunction),
    REAL(cuFuncLoad),
    REAL(cuOccupancyMaxActiveBlocksPerMultiprocessor),
    REAL(cuLaunchKernel),
    REAL(cuStreamCreate),
    REAL(cuStreamDestroy_v2),
    REAL(cuStreamSynchronize),
    REAL(cuStreamWaitEvent),
    REAL(cuEventCreate),
    REAL(cuEventDestroy_v2),
    REAL(cuEventRecord),
    REAL(cuEventQuery),
    REAL(cuEventSynchronize),
    REAL(cuEventElapsedTime),
    REAL(cuMemGetInfo_v2),
    REAL(cuMemAlloc_v2),
    REAL(cuMemFree_v2),
    REAL(cuMemHostAlloc),
    REAL(cuMemFreeHost),
    REAL(cuMemHostRegister_v2),
    REAL(cuMemHostUnregister),
    REAL(cuPointerGetAttribute),
    REAL(cuMemcpyAsync),
    REAL(cuMemsetD8Async),
    REAL(cuMemGetAllocationGranularity),
    REAL(cuMemCreate),
    REAL(cuMemRelease),
    REAL(cuMemExportToShareableHandle),
    REAL(cuMemImportFromShareableHandle),
    REAL(cuMemAddressReserve),
    REAL(cuMemAddressFree),
    REAL(cuMemMap),
    REAL(cuMemUnmap),
    REAL(cuMemSetAccess),
};
// clang-format on

static const struct abi_value real_values[] = { ABI_VALUES{ nullptr, 0 } };

static int check_function(const struct abi_function *ours, void *stub)
{
    if (stub != nullptr && dlsym(stub, ours->symbol) == nullptr)
        return std::printf("%s is no symbol of the driver\n", ours->symbol);
    for (const struct abi_function &real : real_functions) {
        if (std::strcmp(real.symbol, ours->symbol) != 0)
            continue;
        if (real.signature == ours->signature)
            return 0;
        return std::printf("%s is %s, cuda.h has %s\n", ours->symbol, ours->signature.c_str(),
                           real.signature.c_str());
    }
    return std::printf("%s is not compared here\n", ours->symbol);
}

int main(int argc, char **argv)
{
    int wrong = 0, functions = 0, values = 0;
    void *stub = argc > 1 && argv[1][0] != '\0' ? dlopen(argv[1], RTLD_LAZY) : nullptr;
    if (argc > 1 && argv[1][0] != '\0' && stub == nullptr)
        wrong += std::printf("%s\n", dlerror()) > 0;
    for (const struct abi_function *f = abi_ours; f->symbol != nullptr; f++, functions++)
        wrong += check_function(f, stub) > 0;
    for (; abi_our_values[values].name != nullptr; values++) {
        const struct abi_value *ours = &abi_our_values[values], *real = &real_values[values];
        if (ours->value != real->value)
            wrong += std::printf("%s is %ld, in cuda.h %ld\n", ours->name, ours->value,
                                 real->value) > 0;
    }
    std::printf("%d functions, %d values, %d wrong\n", functions, values, wrong);
    return wrong > 0;
}
