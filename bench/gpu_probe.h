/* The parts that gpu_probe's questions share: processes that meet in shared memory, and one device.
 */
#ifndef SHD_BENCH_GPU_PROBE_H
#define SHD_BENCH_GPU_PROBE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "kernels/kern.h"
#include "proto/gpu/cuda.h"

#define PROBE_WAIT_S 60u /* for another process */

struct probe_options {
    uint32_t device;
    uint64_t bytes;  /* of the memory in question */
    uint32_t tenths; /* of a second: how long a phase of overlap takes */
};

/* Each question: prints figures as JSON lines and "answer: ..."; returns an exit code. The calling
 * process has not touched CUDA, and does not: its children do, by probe_fork(). */
int probe_keep(const struct probe_options *o);
int probe_queued(const struct probe_options *o);
int probe_overlap(const struct probe_options *o);
int probe_readonly(const struct probe_options *o);

/* -- gpu_probe.c ------------------------------------------------------------------------------ */

/* This process ends with code 1 and e's text when r is not SHD_OK. */
void probe_check(int r, const struct shd_err *e);
void probe_check_cuda(const struct cuda *cuda, CUresult result, const char *what);

/* Zeroed memory that children share. */
void *probe_shared(uint64_t bytes);

/* fn(arg) in a child, which ends with its code; it dies with its parent. */
pid_t probe_fork(int (*fn)(void *arg), void *arg);

/* Wait for a child: its exit code, or 128 + the signal that ended it. */
int probe_wait(pid_t pid);

/* Until *word is at least value: true; false when that takes PROBE_WAIT_S, or pid has ended. */
bool probe_until(const _Atomic uint64_t *word, uint64_t value, pid_t pid);

/* Descriptors over a socket pair. */
void probe_send_fd(int socket, int fd);
int probe_receive_fd(int socket);

/* The device, current in this thread. */
struct probe_device {
    struct kern *k;
    const struct cuda *cuda;
    CUdevice device;
    CUstream stream;
};
void probe_open(struct probe_device *d, uint32_t ordinal);

/* Fill with one value, or by a key; wait. */
void probe_fill(struct probe_device *d, float *out, uint64_t elems, float value);
void probe_fill_random(struct probe_device *d, float *out, uint64_t elems, uint64_t key);
/* One copy by the driver, waited for. */
void probe_copy(struct probe_device *d, void *to, const void *from, uint64_t bytes);

uint64_t probe_free_bytes(const struct probe_device *d);

void probe_figure(const char *name, const char *unit, double value);

#endif
