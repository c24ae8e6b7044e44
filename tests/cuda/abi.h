/* Both sides of test_cuda_abi.cpp are compiled against their own declarations of the driver's
 * interface, and compared as data. */
#ifndef SHD_TESTS_CUDA_ABI_H
#define SHD_TESTS_CUDA_ABI_H

#include <cstddef>
#include <string>

struct abi_function {
    const char *symbol;
    std::string signature; /* "4(p8p)": bytes of the result and of each argument; p: a pointer */
};

struct abi_value {
    const char *name;
    long value;
};

extern const struct abi_function abi_ours[];    /* ends with a NULL symbol */
extern const struct abi_value abi_our_values[]; /* ends with a NULL name */

template <typename T> struct abi_type {
    static std::string text()
    {
        return std::to_string(sizeof(T));
    }
};
template <typename T> struct abi_type<T *> {
    static std::string text()
    {
        return "p";
    }
};

template <typename R, typename... Args> std::string abi_signature(R (*)(Args...))
{
    std::string text = abi_type<R>::text() + "(";
    ((text += abi_type<Args>::text()), ...);
    return text + ")";
}

#define ABI_FIELD(type, field)                                  \
    { "sizeof " #type "." #field, sizeof(((type *)0)->field) }, \
        { "offset of " #type "." #field, offsetof(type, field) },
#define ABI_VALUE(name) { #name, (long)name },

/* The same names in both. */
#define ABI_VALUES                                                             \
    ABI_VALUE(CUDA_SUCCESS)                                                    \
    ABI_VALUE(CUDA_ERROR_INVALID_VALUE)                                        \
    ABI_VALUE(CUDA_ERROR_OUT_OF_MEMORY)                                        \
    ABI_VALUE(CUDA_ERROR_NOT_INITIALIZED)                                      \
    ABI_VALUE(CUDA_ERROR_DEINITIALIZED)                                        \
    ABI_VALUE(CUDA_ERROR_DEVICE_UNAVAILABLE)                                   \
    ABI_VALUE(CUDA_ERROR_NO_DEVICE)                                            \
    ABI_VALUE(CUDA_ERROR_INVALID_DEVICE)                                       \
    ABI_VALUE(CUDA_ERROR_INVALID_IMAGE)                                        \
    ABI_VALUE(CUDA_ERROR_INVALID_CONTEXT)                                      \
    ABI_VALUE(CUDA_ERROR_NO_BINARY_FOR_GPU)                                    \
    ABI_VALUE(CUDA_ERROR_ECC_UNCORRECTABLE)                                    \
    ABI_VALUE(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)                              \
    ABI_VALUE(CUDA_ERROR_INVALID_HANDLE)                                       \
    ABI_VALUE(CUDA_ERROR_NOT_FOUND)                                            \
    ABI_VALUE(CUDA_ERROR_NOT_READY)                                            \
    ABI_VALUE(CUDA_ERROR_ILLEGAL_ADDRESS)                                      \
    ABI_VALUE(CUDA_ERROR_CONTEXT_IS_DESTROYED)                                 \
    ABI_VALUE(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)                       \
    ABI_VALUE(CUDA_ERROR_HARDWARE_STACK_ERROR)                                 \
    ABI_VALUE(CUDA_ERROR_LAUNCH_FAILED)                                        \
    ABI_VALUE(CUDA_ERROR_NOT_SUPPORTED)                                        \
    ABI_VALUE(CUDA_ERROR_SYSTEM_NOT_READY)                                     \
    ABI_VALUE(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)                               \
    ABI_VALUE(CUDA_ERROR_UNKNOWN)                                              \
    ABI_VALUE(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)                        \
    ABI_VALUE(CU_DEVICE_ATTRIBUTE_COMPUTE_MODE)                                \
    ABI_VALUE(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)                    \
    ABI_VALUE(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)                    \
    ABI_VALUE(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)         \
    ABI_VALUE(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) \
    ABI_VALUE(CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED)           \
    ABI_VALUE(CU_MEM_ALLOCATION_TYPE_PINNED)                                   \
    ABI_VALUE(CU_MEM_LOCATION_TYPE_DEVICE)                                     \
    ABI_VALUE(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)                        \
    ABI_VALUE(CU_MEM_ACCESS_FLAGS_PROT_READ)                                   \
    ABI_VALUE(CU_MEM_ACCESS_FLAGS_PROT_READWRITE)                              \
    ABI_VALUE(CU_MEM_ALLOC_GRANULARITY_MINIMUM)                                \
    ABI_VALUE(CU_MEMHOSTREGISTER_PORTABLE)                                     \
    ABI_VALUE(CU_MEMHOSTREGISTER_DEVICEMAP)                                    \
    ABI_VALUE(CU_MEMHOSTREGISTER_READ_ONLY)                                    \
    ABI_VALUE(CU_STREAM_NON_BLOCKING)                                          \
    ABI_VALUE(CU_EVENT_BLOCKING_SYNC)                                          \
    ABI_VALUE(CU_EVENT_DISABLE_TIMING)                                         \
    ABI_VALUE(CU_COMPUTEMODE_DEFAULT)                                          \
    ABI_VALUE(CU_POINTER_ATTRIBUTE_MEMORY_TYPE)                                \
    ABI_VALUE(CU_MEMORYTYPE_DEVICE)                                            \
    ABI_VALUE(sizeof(CUuuid))                                                  \
    ABI_VALUE(sizeof(CUmemAllocationProp))                                     \
    ABI_VALUE(sizeof(CUmemAccessDesc))                                         \
    ABI_FIELD(CUmemLocation, type)                                             \
    ABI_FIELD(CUmemLocation, id)                                               \
    ABI_FIELD(CUmemAllocationProp, type)                                       \
    ABI_FIELD(CUmemAllocationProp, requestedHandleTypes)                       \
    ABI_FIELD(CUmemAllocationProp, location)                                   \
    ABI_FIELD(CUmemAllocationProp, win32HandleMetaData)                        \
    ABI_FIELD(CUmemAllocationProp, allocFlags)                                 \
    ABI_FIELD(CUmemAccessDesc, location)                                       \
    ABI_FIELD(CUmemAccessDesc, flags)

#endif
