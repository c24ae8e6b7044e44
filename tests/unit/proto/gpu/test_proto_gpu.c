/* The tables of libcuda.so.1 and libnccl.so.2, what their results mean, and memory by descriptors:
 * on the stand-ins of tests/cuda, and where it says nothing else on a real driver, too. */
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/gpu/cuda.h"
#include "proto/gpu/nccl.h"
#include "tests/cuda/shim_cuda.h"
#include "tests/lib/child.h"
#include "tests/lib/test.h"

#define SEGMENT_BYTES (UINT64_C(2) << 20)

static const struct cuda *driver(void)
{
    const struct cuda *c = NULL;
    struct shd_err e = { 0 };
    NEEDS_SHIM();
    EXPECT_OK(cuda_load(&c, &e), &e);
    return c;
}

static const struct nccl *nccl(void)
{
    const struct nccl *n = NULL;
    struct shd_err e = { 0 };
    NEEDS_SHIM();
    EXPECT_OK(nccl_load(&n, &e), &e);
    return n;
}

static uint64_t live(const char *kind)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    shim_cuda_live_fn *fn = NULL;
    *(void **)&fn = dlsym(library, "shim_cuda_live");
    CHECK(fn != NULL);
    return fn(kind);
}

/* -- The driver ------------------------------------------------------------------------------- */

/* In a process of its own with the variable set: the driver does not load. */
static void expect_no_driver(const char *name, const char *value, const char *text)
{
    const pid_t pid = test_fork();
    if (pid == 0) {
        const struct cuda *c = NULL;
        struct shd_err e = { 0 };
        setenv(name, value, 1);
        const int r = cuda_load(&c, &e);
        if (r != SHD_ENOTSUP || e.code != SHD_ENOTSUP || strstr(e.text, text) == NULL)
            fprintf(stderr, "%s=%s: %s '%s'\n", name, value, status_name(r), e.text);
        _exit(r == SHD_ENOTSUP && strstr(e.text, text) != NULL && c == NULL ? 0 : 1);
    }
    expect_well(pid);
}

/* Before the others: a child of a process that has the driver has it, too. */
TEST(a_driver_that_does_not_start_says_what_to_do)
{
    NEEDS_SHIM();
    expect_no_driver("SHIM_CUDA_DEVICES", "0", "nvidia-smi");
    expect_no_driver("SHIM_CUDA_FAIL", "cuInit:100", "CUDA_VISIBLE_DEVICES hides it");
    expect_no_driver("SHIM_CUDA_FAIL", "cuInit:802", "nvidia-fabricmanager");
    expect_no_driver("SHIM_CUDA_FAIL", "cuInit:803", "reboot, or reload the module");
    expect_no_driver("SHIM_CUDA_FAIL", "cuInit:999", "nvidia-modprobe");
}

/* Pointers of a table, each of them another function. */
static void expect_table(const void *table, size_t bytes)
{
    void *const *const at = table;
    for (size_t i = 0; i < bytes / sizeof *at; i++) {
        EXPECT(at[i] != NULL);
        for (size_t k = 0; k < i; k++)
            EXPECT(at[i] != at[k]);
    }
}

TEST(tables_have_every_function_once)
{
    const struct cuda *c = driver(), *again = NULL;
    struct shd_err e = { 0 };
    expect_table(c, sizeof *c);
    expect_table(nccl(), sizeof(struct nccl));
    EXPECT_OK(cuda_load(&again, &e), &e);
    EXPECT(again == c);
}

/* -- Results ---------------------------------------------------------------------------------- */

TEST(results_are_errors_that_name_call_and_reason)
{
    static const struct {
        CUresult result;
        int status;
    } cases[] = {
        { CUDA_ERROR_OUT_OF_MEMORY, SHD_ENOMEM },
        { CUDA_ERROR_NO_DEVICE, SHD_ENOTSUP },
        { CUDA_ERROR_NO_BINARY_FOR_GPU, SHD_ENOTSUP },
        { CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, SHD_ENOTSUP },
        { CUDA_ERROR_NOT_SUPPORTED, SHD_ENOTSUP },
        { CUDA_ERROR_INVALID_VALUE, SHD_EIO },
        { CUDA_ERROR_NOT_READY, SHD_EIO },
        { CUDA_ERROR_LAUNCH_FAILED, SHD_EIO },
        { CUDA_ERROR_UNKNOWN, SHD_EIO },
        { (CUresult)12345, SHD_EIO },
    };
    const struct cuda *c = driver();
    struct shd_err e = { .code = 77, .text = "as it was" };
    EXPECT_STATUS(cuda_result(c, CUDA_SUCCESS, &e, "not said"), SHD_OK);
    EXPECT(e.code == 77 && strcmp(e.text, "as it was") == 0);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char number[16];
        EXPECT_STATUS(cuda_result(c, cases[i].result, &e, "give %d bytes", 42), cases[i].status);
        EXPECT_EQ(e.code, cases[i].status);
        EXPECT_HAS(e.text, "give 42 bytes: ");
        snprintf(number, sizeof number, " %d (", (int)cases[i].result);
        EXPECT_HAS(e.text, number);
        EXPECT_STATUS(cuda_result(c, cases[i].result, NULL, "unasked"), cases[i].status);
    }
}

TEST(sticky_are_the_errors_that_end_a_process)
{
    static const CUresult sticky[] = { 4,   214, 220, 226, 700, 702, 709, 710,
                                       714, 715, 716, 717, 718, 719, 721, 999 };
    size_t found = 0;
    for (int i = 0; i < 1000; i++) {
        const bool is = found < ARRAY_SIZE(sticky) && sticky[found] == (CUresult)i;
        if (cuda_sticky((CUresult)i) != is)
            FAIL("error %d: sticky is %d", i, !is);
        found += is;
    }
    EXPECT_EQ(found, ARRAY_SIZE(sticky));
}

TEST(a_peer_that_is_gone_is_told_from_other_failures_of_nccl)
{
    static const struct {
        int result, status;
    } cases[] = {
        { NCCL_UNHANDLED_CUDA_ERROR, SHD_EIO }, { NCCL_SYSTEM_ERROR, SHD_EGONE },
        { NCCL_INTERNAL_ERROR, SHD_EIO },       { NCCL_INVALID_ARGUMENT, SHD_EIO },
        { NCCL_INVALID_USAGE, SHD_EIO },        { NCCL_REMOTE_ERROR, SHD_EGONE },
    };
    const struct nccl *n = nccl();
    struct shd_err e = { .code = 77 };
    EXPECT_STATUS(nccl_result(n, NCCL_SUCCESS, &e, "not said"), SHD_OK);
    EXPECT_STATUS(nccl_result(n, NCCL_IN_PROGRESS, &e, "not said"), SHD_OK);
    EXPECT_EQ(e.code, 77);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char text[48];
        EXPECT_STATUS(nccl_result(n, cases[i].result, &e, "send %d", 5), cases[i].status);
        snprintf(text, sizeof text, "send 5: NCCL error %d, ", cases[i].result);
        EXPECT_HAS(e.text, text);
    }
}

/* -- Memory by descriptors -------------------------------------------------------------------- */

static CUmemAllocationProp pinned(void)
{
    return (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
    };
}

#define WORKS(call) EXPECT_EQ(call, CUDA_SUCCESS)

static CUcontext enter(const struct cuda *c)
{
    CUcontext ctx = NULL;
    CUdevice device = -1;
    WORKS(c->cuDeviceGet(&device, 0));
    EXPECT_EQ(device, 0);
    WORKS(c->cuDevicePrimaryCtxRetain(&ctx, device));
    WORKS(c->cuCtxSetCurrent(ctx));
    return ctx;
}

/* Map all of an allocation for reading and writing, or for reading alone. */
static CUdeviceptr map(const struct cuda *c, CUmemGenericAllocationHandle handle, int access)
{
    const CUmemAccessDesc desc = { { CU_MEM_LOCATION_TYPE_DEVICE, 0 }, access };
    CUdeviceptr at = 0;
    WORKS(c->cuMemAddressReserve(&at, SEGMENT_BYTES, 0, 0, 0));
    EXPECT(at != 0 && at % 4096 == 0);
    WORKS(c->cuMemMap(at, SEGMENT_BYTES, 0, handle, 0));
    WORKS(c->cuMemSetAccess(at, SEGMENT_BYTES, &desc, 1));
    return at;
}

static void unmap(const struct cuda *c, CUdeviceptr at)
{
    WORKS(c->cuMemUnmap(at, SEGMENT_BYTES));
    WORKS(c->cuMemAddressFree(at, SEGMENT_BYTES));
}

static void copy(const struct cuda *c, CUstream stream, CUdeviceptr to, CUdeviceptr from,
                 size_t bytes)
{
    WORKS(c->cuMemcpyAsync(to, from, bytes, stream));
    WORKS(c->cuStreamSynchronize(stream));
}

static CUdeviceptr host(const void *p)
{
    return (CUdeviceptr)(uintptr_t)p;
}

TEST(a_descriptor_alone_keeps_memory_and_what_is_in_it)
{
    const struct cuda *c = driver();
    enter(c);
    const uint64_t before = live(NULL);
    const CUmemAllocationProp prop = pinned();
    CUmemGenericAllocationHandle made = 0, found = 0;
    size_t granule = 0;
    int fd = -1, type = 0;
    CUstream stream = NULL;
    char sent[] = "kept by its descriptor", got[sizeof sent] = "";
    WORKS(c->cuMemGetAllocationGranularity(&granule, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    EXPECT(granule > 0 && SEGMENT_BYTES % granule == 0);
    WORKS(c->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    WORKS(c->cuMemCreate(&made, SEGMENT_BYTES, &prop, 0));
    WORKS(c->cuMemExportToShareableHandle(&fd, made, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    EXPECT(fd >= 0 && fcntl(fd, F_GETFD) >= 0);
    CUdeviceptr at = map(c, made, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    WORKS(c->cuMemsetD8Async(at, 0x5a, SEGMENT_BYTES, stream));
    copy(c, stream, at + 100, host(sent), sizeof sent);
    WORKS(c->cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at + 100));
    EXPECT_EQ(type, CU_MEMORYTYPE_DEVICE);
    unmap(c, at);
    WORKS(c->cuMemRelease(made));
    WORKS(c->cuMemImportFromShareableHandle(&found, (void *)(intptr_t)fd,
                                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(fd);
    at = map(c, found, CU_MEM_ACCESS_FLAGS_PROT_READ);
    copy(c, stream, host(got), at + 100, sizeof got);
    EXPECT_STR(got, sent);
    copy(c, stream, host(got), at + SEGMENT_BYTES - 1, 1);
    EXPECT_EQ(got[0], 0x5a);
    unmap(c, at);
    WORKS(c->cuMemRelease(found));
    WORKS(c->cuStreamDestroy(stream));
    EXPECT_EQ(live(NULL), before);
    WORKS(c->cuDevicePrimaryCtxRelease(0));
}

TEST(what_is_no_descriptor_of_memory_is_not_imported)
{
    const struct cuda *c = driver();
    enter(c);
    CUmemGenericAllocationHandle found = 0;
    struct shd_err e = { 0 };
    const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    const CUresult r = c->cuMemImportFromShareableHandle(&found, (void *)(intptr_t)fd,
                                                         CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    EXPECT(r != CUDA_SUCCESS);
    EXPECT(cuda_result(c, r, &e, "import descriptor %d", fd) != SHD_OK);
    EXPECT_HAS(e.text, "import descriptor ");
    close(fd);
    WORKS(c->cuDevicePrimaryCtxRelease(0));
}

TEST(events_say_when_work_is_over)
{
    const struct cuda *c = driver();
    enter(c);
    const uint64_t before = live(NULL);
    CUstream stream = NULL;
    CUevent event = NULL;
    CUdeviceptr at = 0;
    void *from = NULL;
    uint8_t got[64] = { 0 };
    WORKS(c->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    WORKS(c->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    WORKS(c->cuMemAlloc(&at, sizeof got));
    WORKS(c->cuMemHostAlloc(&from, sizeof got, 0));
    memset(from, 0xc3, sizeof got);
    WORKS(c->cuMemcpyAsync(at, host(from), sizeof got, stream));
    WORKS(c->cuEventRecord(event, stream));
    EXPECT_SOON(c->cuEventQuery(event) != CUDA_ERROR_NOT_READY);
    WORKS(c->cuEventQuery(event));
    copy(c, stream, host(got), at, sizeof got);
    EXPECT(memcmp(got, from, sizeof got) == 0);
    WORKS(c->cuMemFree(at));
    WORKS(c->cuMemFreeHost(from));
    WORKS(c->cuEventDestroy(event));
    WORKS(c->cuStreamDestroy(stream));
    EXPECT_EQ(live(NULL), before);
    WORKS(c->cuDevicePrimaryCtxRelease(0));
}

TEST_MAIN()
