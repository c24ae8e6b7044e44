/* Inside the shim: a libcuda.so.1 for hosts without a GPU, for tests alone.
 *
 * Device memory is memfds; its addresses are PROT_NONE for the host, but while a kernel runs, so
 * that host code which reads device memory crashes as it would on hardware (where it would read an
 * address that is not mapped at all). Copies go by a second mapping that nobody else knows. An
 * exported handle is the memfd itself. A stream is a thread that does its work in order. Kernels
 * are those of tests/cuda/emulate.h.
 *
 * It is as strict as the driver, where that was found out or its header says so, or stricter: a
 * thread's context is alive; streams, events and launches are of one context; what a device may do
 * with mapped memory is what cuMemSetAccess() said for that very device; memory is exported only
 * as it was made for; copies from and to pageable memory of the host are over when the call
 * returns, and those that begin in registered memory end there.
 *
 * Environment, read once:
 *
 *     SHIM_CUDA_DEVICES=n      devices (1); 0: there is none
 *     SHIM_CUDA_BYTES=n        memory of a device, for cuMemCreate and cuMemAlloc of one process
 *     SHIM_CUDA_FAIL=spec      see shim_cuda.h
 *     SHIM_CUDA_DELAY_US=n     see shim_cuda.h
 *     SHIM_CUDA_ATTRIBUTE=a:v  cuDeviceGetAttribute(a) is v; several with commas
 *     SHIM_CUDA_NO_PEER=       devices say that they do not reach each other's memory
 *     SHIM_CUDA_OPEN=          the host may use device memory as the first device may: for programs
 *                              whose own kernels are the host's
 *     CUDA_VISIBLE_DEVICES     as the driver's, by number
 */
#ifndef SHD_TESTS_SHIM_H
#define SHD_TESTS_SHIM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "proto/gpu/cuda.h"
#include "tests/cuda/shim_cuda.h"

#define SHIM_API __attribute__((visibility("default")))

/* Every function under the name that the table asks for, and of the type it has there. */
#define SHIM_DECLARE(member, symbol, arguments) SHIM_API CUresult member arguments __asm__(symbol);
CUDA_FUNCTIONS(SHIM_DECLARE)
#undef SHIM_DECLARE

enum shim_needs { NEEDS_NOTHING, NEEDS_INIT, NEEDS_CONTEXT };

/* Begin every function: counts the call and says what it is to return at once, if not success: the
 * failure that was asked for, an earlier sticky error, no initialisation (in a child too), no
 * context. */
CUresult shim_enter(const char *name, enum shim_needs needs);

/* The failure asked for of a piece of work that runs now, or CUDA_SUCCESS; SHIM_KILL: it is to do
 * half of it, and end by shim_kill(). */
#define SHIM_KILL (-9)
CUresult shim_work_fault(const char *kind);
_Noreturn void shim_kill(void);

/* The thread's, and which device it is of. */
CUcontext shim_context(void);
CUdevice shim_device(CUcontext ctx);

/* From now on every call returns this. */
void shim_stick(CUresult result);
CUresult shim_stuck(void);
void shim_delay(void);

/* Things alive, for shim_cuda_live(). */
enum shim_kind {
    SHIM_CONTEXT,
    SHIM_MODULE,
    SHIM_STREAM,
    SHIM_EVENT,
    SHIM_ALLOCATION,
    SHIM_HANDLE,
    SHIM_RANGE,
    SHIM_MAP,
    SHIM_PIN,
    SHIM_HOST,
    SHIM_KINDS
};
void shim_count(enum shim_kind kind, int delta);

/* Where device i's memory ends. */
uint64_t shim_device_bytes(void);
bool shim_device_valid(CUdevice device);
#define SHIM_DEVICES_MAX 16

/* shim_memory.c: the work of streams of a device; they lock what they need. Kernels run between the
 * latter two, one at a time. */
CUresult shim_copy(CUdevice device, CUdeviceptr to, CUdeviceptr from, uint64_t bytes);
CUresult shim_memset(CUdevice device, CUdeviceptr to, unsigned char value, uint64_t bytes);
/* That arguments of work to come are sane: device addresses that are mapped. */
CUresult shim_check(CUdeviceptr ptr, uint64_t bytes);
bool shim_on_device(CUdeviceptr ptr);
void shim_open_memory(CUdevice device);
void shim_close_memory(void);

/* shim_cuda.c: how much of [ptr, ptr + bytes) is pinned memory of the host. Ends the process when
 * pages were registered there and others are mapped there now: the driver would go on with those
 * that it pinned. */
enum shim_pinned { SHIM_PAGEABLE, SHIM_PINNED, SHIM_PINNED_PARTLY };
enum shim_pinned shim_pinned(uint64_t ptr, uint64_t bytes);

/* Whether it is known to be memory of this process alone, and of no file. */
bool shim_private(uint64_t base, uint64_t bytes);

#endif
