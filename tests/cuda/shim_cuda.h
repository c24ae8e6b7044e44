/* What tests ask of the shim beside CUDA: its own symbols in libcuda.so.1, found with dlsym(). */
#ifndef SHD_TESTS_SHIM_CUDA_H
#define SHD_TESTS_SHIM_CUDA_H

#include <dirent.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

/* Make calls fail from now on; all counts start again. "cuMemCreate@3:2,copy@1:700": the third
 * cuMemCreate returns 2, the first copy fails while it runs, and what is called later says 700.
 * Work: copy, memset, kernel. Without a number: out of memory. "copy@3:kill": the process is killed
 * with half of the third copy done (of a memset, too). NULL or "": nothing fails. */
typedef void shim_cuda_fail_fn(const char *spec);

/* Times the function was called since then. */
typedef uint64_t shim_cuda_calls_fn(const char *name);

/* Of one kind alive in this process: "context", "module", "stream", "event", "allocation" (with
 * handles or mappings), "handle", "range" (reserved addresses), "map", "pin", "host". NULL: all. */
typedef uint64_t shim_cuda_live_fn(const char *kind);

/* Forget a sticky error, which only a new process could. */
typedef void shim_cuda_reset_fn(void);

/* Wait so long before each piece of work. */
typedef void shim_cuda_delay_fn(uint64_t delay_us);

/* For shims of libraries that work on streams: shim_cuda_call() queues fn(ctx) as a piece of work,
 * in which shim_cuda_copy() reaches the device's memory (a CUresult). */
struct CUstream_st;
typedef void shim_cuda_call_fn(struct CUstream_st *stream, void (*fn)(void *ctx), void *ctx);
typedef int shim_cuda_copy_fn(uint64_t to, uint64_t from, uint64_t bytes);

/* -- For tests that may also run on a GPU -------------------------------------------------------
 */

/* Whether the libcuda.so.1 here is the shim. Initialises nothing, so that a process may fork
 * afterwards. With TEST_NO_SHIM in the environment: no, whatever is here; that is how a run on a
 * GPU is tried without one. */
__attribute__((unused)) static bool shim_is_there(void)
{
    if (getenv("TEST_NO_SHIM") != NULL)
        return false;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return library != NULL && dlsym(library, "shim_cuda_live") != NULL; /* it stays open: no driver
                                                                         * is made to be unloaded */
}

/* GPUs that there are: of the shim two in any case (the test asks for so many). */
__attribute__((unused)) static unsigned shim_gpu_count(void)
{
    unsigned count = 0;
    if (shim_is_there())
        return 2;
    DIR *dir = opendir("/proc/driver/nvidia/gpus");
    const struct dirent *entry;
    while (dir != NULL && (entry = readdir(dir)) != NULL)
        count += entry->d_name[0] != '.';
    if (dir != NULL)
        closedir(dir);
    return count > 0 ? count : 1;
}

#define NEEDS_SHIM()                                                         \
    do {                                                                     \
        if (!shim_is_there())                                                \
            SKIP("this driver is not the shim: it cannot be made to do so"); \
    } while (0)

#endif
