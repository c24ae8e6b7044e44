/* NVIDIA's driver, loaded at run time: shardd and its clients run on hosts without it, and build
 * on hosts without the CUDA Toolkit. What is declared here is the driver's binary interface, as in
 * its cuda.h of CUDA 12 and 13 (tests/cuda/test_cuda_abi.cpp holds the two together where there is
 * one).
 *
 * cuda_load() opens libcuda.so.1 once per process. cuda_* functions below it turn results into
 * errors; everything else calls through the table, whose members have the driver's own names.
 *
 * A *sticky* error (an illegal address, a hardware fault) leaves the process's context useless:
 * every later call fails. What such a process holds is safe only with others, so a daemon ends
 * (kern_ops.health says why).
 */
#ifndef SHD_CUDA_H
#define SHD_CUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef unsigned long long CUmemGenericAllocationHandle;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEINITIALIZED = 4,
    CUDA_ERROR_DEVICE_UNAVAILABLE = 46,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    CUDA_ERROR_ECC_UNCORRECTABLE = 214,
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HARDWARE_STACK_ERROR = 714,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_SYSTEM_NOT_READY = 802,
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803,
    CUDA_ERROR_UNKNOWN = 999,
};

enum { /* CUdevice_attribute */
       CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
       CU_DEVICE_ATTRIBUTE_COMPUTE_MODE = 20,
       CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
       CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
       CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
       CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
       CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED = 113,
};
enum {
    CU_MEM_ALLOCATION_TYPE_PINNED = 1,
    CU_MEM_LOCATION_TYPE_DEVICE = 1,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
    CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
    CU_MEMHOSTREGISTER_PORTABLE = 1,
    CU_MEMHOSTREGISTER_DEVICEMAP = 2,
    CU_MEMHOSTREGISTER_READ_ONLY = 8,
    CU_STREAM_NON_BLOCKING = 1,
    CU_EVENT_BLOCKING_SYNC = 1,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_COMPUTEMODE_DEFAULT = 0,
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
    CU_MEMORYTYPE_DEVICE = 2,
};

typedef struct {
    char bytes[16];
} CUuuid;

typedef struct {
    int type; /* CU_MEM_LOCATION_TYPE_DEVICE */
    int id;   /* CUdevice */
} CUmemLocation;

typedef struct {
    int type;                 /* CU_MEM_ALLOCATION_TYPE_PINNED */
    int requestedHandleTypes; /* CU_MEM_HANDLE_TYPE_... */
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType, gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;

typedef struct {
    CUmemLocation location;
    int flags; /* CU_MEM_ACCESS_FLAGS_... */
} CUmemAccessDesc;

/* X(member, symbol, arguments): symbol has the version suffix of what is declared. */
#define CUDA_FUNCTIONS(X)                                                                         \
    X(cuInit, "cuInit", (unsigned flags))                                                         \
    X(cuDriverGetVersion, "cuDriverGetVersion", (int *version))                                   \
    X(cuGetErrorName, "cuGetErrorName", (CUresult error, const char **name))                      \
    X(cuGetErrorString, "cuGetErrorString", (CUresult error, const char **text))                  \
    X(cuDeviceGetCount, "cuDeviceGetCount", (int *count))                                         \
    X(cuDeviceGet, "cuDeviceGet", (CUdevice * device, int ordinal))                               \
    X(cuDeviceGetName, "cuDeviceGetName", (char *name, int len, CUdevice device))                 \
    X(cuDeviceGetUuid, "cuDeviceGetUuid_v2", (CUuuid * uuid, CUdevice device))                    \
    X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int *value, int attribute, CUdevice device)) \
    X(cuDeviceTotalMem, "cuDeviceTotalMem_v2", (size_t * bytes, CUdevice device))                 \
    X(cuDeviceCanAccessPeer, "cuDeviceCanAccessPeer", (int *can, CUdevice device, CUdevice peer)) \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext * ctx, CUdevice device))   \
    X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (CUdevice device))               \
    X(cuCtxSetCurrent, "cuCtxSetCurrent", (CUcontext ctx))                                        \
    X(cuCtxSynchronize, "cuCtxSynchronize", (void))                                               \
    X(cuModuleLoadData, "cuModuleLoadData", (CUmodule * module, const void *image))               \
    X(cuModuleUnload, "cuModuleUnload", (CUmodule module))                                        \
    X(cuModuleGetFunction, "cuModuleGetFunction",                                                 \
      (CUfunction * function, CUmodule module, const char *name))                                 \
    X(cuFuncLoad, "cuFuncLoad", (CUfunction function))                                            \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor, "cuOccupancyMaxActiveBlocksPerMultiprocessor", \
      (int *blocks, CUfunction function, int block_threads, size_t shared_bytes))                 \
    X(cuLaunchKernel, "cuLaunchKernel",                                                           \
      (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,  \
       unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **params, \
       void **extra))                                                                             \
    X(cuStreamCreate, "cuStreamCreate", (CUstream * stream, unsigned flags))                      \
    X(cuStreamDestroy, "cuStreamDestroy_v2", (CUstream stream))                                   \
    X(cuStreamSynchronize, "cuStreamSynchronize", (CUstream stream))                              \
    X(cuStreamWaitEvent, "cuStreamWaitEvent", (CUstream stream, CUevent event, unsigned flags))   \
    X(cuEventCreate, "cuEventCreate", (CUevent * event, unsigned flags))                          \
    X(cuEventDestroy, "cuEventDestroy_v2", (CUevent event))                                       \
    X(cuEventRecord, "cuEventRecord", (CUevent event, CUstream stream))                           \
    X(cuEventQuery, "cuEventQuery", (CUevent event))                                              \
    X(cuEventSynchronize, "cuEventSynchronize", (CUevent event))                                  \
    X(cuEventElapsedTime, "cuEventElapsedTime", (float *ms, CUevent start, CUevent end))          \
    X(cuMemGetInfo, "cuMemGetInfo_v2", (size_t * free_bytes, size_t * total_bytes))               \
    X(cuMemAlloc, "cuMemAlloc_v2", (CUdeviceptr * ptr, size_t bytes))                             \
    X(cuMemFree, "cuMemFree_v2", (CUdeviceptr ptr))                                               \
    X(cuMemHostAlloc, "cuMemHostAlloc", (void **ptr, size_t bytes, unsigned flags))               \
    X(cuMemFreeHost, "cuMemFreeHost", (void *ptr))                                                \
    X(cuMemHostRegister, "cuMemHostRegister_v2", (void *ptr, size_t bytes, unsigned flags))       \
    X(cuMemHostUnregister, "cuMemHostUnregister", (void *ptr))                                    \
    X(cuPointerGetAttribute, "cuPointerGetAttribute",                                             \
      (void *value, int attribute, CUdeviceptr ptr))                                              \
    X(cuMemcpyAsync, "cuMemcpyAsync",                                                             \
      (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))                          \
    X(cuMemsetD8Async, "cuMemsetD8Async",                                                         \
      (CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream))                       \
    X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity",                             \
      (size_t * granularity, const CUmemAllocationProp *prop, int option))                        \
    X(cuMemCreate, "cuMemCreate",                                                                 \
      (CUmemGenericAllocationHandle * handle, size_t bytes, const CUmemAllocationProp *prop,      \
       unsigned long long flags))                                                                 \
    X(cuMemRelease, "cuMemRelease", (CUmemGenericAllocationHandle handle))                        \
    X(cuMemExportToShareableHandle, "cuMemExportToShareableHandle",                               \
      (void *shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long flags)) \
    X(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle",                           \
      (CUmemGenericAllocationHandle * handle, void *shareable, int type))                         \
    X(cuMemAddressReserve, "cuMemAddressReserve",                                                 \
      (CUdeviceptr * ptr, size_t bytes, size_t alignment, CUdeviceptr addr,                       \
       unsigned long long flags))                                                                 \
    X(cuMemAddressFree, "cuMemAddressFree", (CUdeviceptr ptr, size_t bytes))                      \
    X(cuMemMap, "cuMemMap",                                                                       \
      (CUdeviceptr ptr, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,         \
       unsigned long long flags))                                                                 \
    X(cuMemUnmap, "cuMemUnmap", (CUdeviceptr ptr, size_t bytes))                                  \
    X(cuMemSetAccess, "cuMemSetAccess",                                                           \
      (CUdeviceptr ptr, size_t bytes, const CUmemAccessDesc *desc, size_t count))

struct cuda {
/* NOLINTNEXTLINE(bugprone-macro-parentheses): a declaration */
#define CUDA_MEMBER(member, symbol, arguments) CUresult(*member) arguments;
    CUDA_FUNCTIONS(CUDA_MEMBER)
#undef CUDA_MEMBER
};

/* The driver, initialised. Thread-safe; the table is the process's. Errors: SHD_ENOTSUP no
 * libcuda.so.1, a driver too old (the symbol it lacks is named), or no device; with what to do. */
int cuda_load(const struct cuda **ret_cuda, struct shd_err *e);

/* A result as an error: "cuMemCreate of 2097152 bytes: CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
 * CUDA_SUCCESS: SHD_OK, e untouched. Out of memory: SHD_ENOMEM; not supported here: SHD_ENOTSUP;
 * else SHD_EIO. fmt: what was called, with its values. */
int cuda_result(const struct cuda *cuda, CUresult result, struct shd_err *e, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* True for results after which every call of this process fails. */
bool cuda_sticky(CUresult result);

#endif
