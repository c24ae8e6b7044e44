/* What tests ask of the shim beside CUDA: its own symbols in libcuda.so.1, found with dlsym(). */
#ifndef SHD_TESTS_SHIM_CUDA_H
#define SHD_TESTS_SHIM_CUDA_H

#include <stdint.h>

/* Make calls fail from now on; all counts start again. "cuMemCreate@3:2,copy@1:700": the third
 * cuMemCreate returns 2, the first copy fails while it runs, and what is called later says 700.
 * Work: copy, memset, kernel. Without a number: out of memory. NULL or "": nothing fails. */
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

#endif
