/* device.h: a GPU for benchmarks and gpu_probe, and processes that meet in shared memory. Errors
 * end the process (bench_check()).
 */
#ifndef SHD_BENCH_DEVICE_H
#define SHD_BENCH_DEVICE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "kernels/kern.h"
#include "proto/gpu/cuda.h"

#define DEVICE_WAIT_S 60u /* for another process */

/* A device, current in this thread. */
struct device {
    struct kern *k;
    const struct cuda *cuda;
    CUdevice device;
    CUstream stream;
};
void device_open(struct device *d, uint32_t ordinal);
void device_check(const struct device *d, CUresult result, const char *what);

static inline CUdeviceptr device_address(const void *p)
{
    return (CUdeviceptr)(uintptr_t)p;
}

/* Queue a copy by the driver; wait for what it has queued. */
void device_queue_copy(const struct device *d, void *to, const void *from, uint64_t bytes);
void device_wait(const struct device *d);

/* Memory of the device, pinned memory of the host; a segment of the device's, and one mapped. */
void *device_alloc(const struct device *d, uint64_t bytes);
void *device_pinned(const struct device *d, uint64_t bytes);
struct segment device_segment(const struct device *d, enum segment_kind kind, uint64_t bytes);
struct segment device_map(const struct device *d, int fd, enum segment_kind kind, uint64_t bytes);

/* acc += grad in fp32, or acc = grad; done as kern_ops has it. */
void device_add(const struct device *d, float *acc, const float *grad, uint64_t elems, bool first,
                struct kern_done *done);

/* Fill with one value, or by a key with numbers of [low, high); wait. */
void device_fill(struct kern *k, float *out, uint64_t elems, float value);
void device_fill_random(struct kern *k, float *out, uint64_t elems, uint64_t key, float low,
                        float high);

/* Wait for an operation that was queued with w->done; it has succeeded. */
void device_done(struct kern_waiter *w, const char *what);

uint64_t device_free_bytes(const struct device *d);

/* -- Processes: they have not touched CUDA, their children do --------------------------------- */

/* Zeroed memory that children share. */
void *process_shared(uint64_t bytes);

/* fn(arg) in a child, which ends with its code; it dies with its parent. */
pid_t process_fork(int (*fn)(void *arg), void *arg);

/* Wait for a child, or end it first: its exit code, or 128 + the signal that ended it. */
int process_wait(pid_t pid);
int process_kill(pid_t pid);

/* The descriptor of a SEGMENT_STATE over a socket pair (SOCK_SEQPACKET). */
void process_send(int socket, const struct segment *s);
int process_receive(int socket);

/* Until *word is at least value: true; false when that takes DEVICE_WAIT_S, or pid has ended. */
bool process_until(const _Atomic uint64_t *word, uint64_t value, pid_t pid);

#endif
