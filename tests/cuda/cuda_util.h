/* Shared by the tests of the CUDA device: the shim's own functions, arrays of the device, and what
 * a process has open. */
#ifndef SHD_TESTS_CUDA_UTIL_H
#define SHD_TESTS_CUDA_UTIL_H

#include <sys/wait.h>
#include <unistd.h>

#include "kernels/cuda/cuda.h"
#include "tests/cuda/shim_cuda.h"
#include "tests/lib/kern_util.h"

struct shim {
    shim_cuda_fail_fn *fail;
    shim_cuda_calls_fn *calls;
    shim_cuda_live_fn *live;
    shim_cuda_reset_fn *reset;
    shim_cuda_delay_fn *delay;
};

__attribute__((unused)) static void *shim_symbol(const char *name)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        FAIL("no libcuda.so.1: %s", dlerror());
    NEEDS_SHIM();
    return dlsym(library, name);
}

__attribute__((unused)) static struct shim shim_find(void)
{
    struct shim s;
    void *symbols[] = { shim_symbol("shim_cuda_fail"), shim_symbol("shim_cuda_calls"),
                        shim_symbol("shim_cuda_live"), shim_symbol("shim_cuda_reset"),
                        shim_symbol("shim_cuda_delay") };
    _Static_assert(sizeof s == sizeof symbols, "a pointer per function");
    memcpy(&s, symbols, sizeof s);
    return s;
}

/* What is alive in the shim; of a driver nobody knows: 0. */
__attribute__((unused)) static uint64_t shim_live(void)
{
    return shim_is_there() ? shim_find().live(NULL) : 0;
}

__attribute__((unused)) static struct kern *cuda_new(void)
{
    struct kern *k = NULL;
    struct shd_err e = { 0 };
    EXPECT_OK(kern_cuda_new(0, &k, &e), &e);
    return k;
}

__attribute__((unused)) static void *cuda_array(struct kern *k, uint64_t bytes)
{
    void *p = k->ops->alloc(k, bytes);
    EXPECT(p != NULL);
    return p;
}

__attribute__((unused)) static void cuda_copy_now(struct kern *k, void *to, const void *from,
                                                  uint64_t bytes)
{
    EXPECT_RUNS(copy, k, (&(struct kern_copy){ to, from, bytes }));
}

/* Entries of a directory of /proc/self. */
__attribute__((unused)) static int entries_of(const char *path)
{
    int count = 0;
    DIR *d = opendir(path);
    EXPECT(d != NULL);
    while (readdir(d) != NULL)
        count++;
    closedir(d);
    return count;
}

#endif
