/* GPUs as a session uses them: the worker's own, and those of owners whose memory a host worker
 * reads and writes by copies. */
#ifndef SHD_CLIENT_GPU_H
#define SHD_CLIENT_GPU_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

struct kern;
struct shd_session;

#define GPU_UUID_BYTES 16u

struct owner_gpu {
    uint8_t uuid[GPU_UUID_BYTES];
    struct kern *kern; /* owned */
};

/* shd_options.device. NULL, "host": *ret_on_gpu is false. "cuda:N": true, and its ordinal. Errors:
 * SHD_EINVAL. */
int gpu_parse(const char *device, bool *ret_on_gpu, uint32_t *ret_ordinal, struct shd_err *e);

/* Errors: kern_cuda_new()'s. */
int gpu_open(uint32_t ordinal, struct kern **ret_kern, struct shd_err *e);

/* The session's device for memory of the GPU with this UUID: the worker's GPU where it has one
 * (which then needs access to that one), else that GPU, started at first use. Errors: SHD_ENOTSUP
 * no driver, or no such GPU is visible here. */
int gpu_for(struct shd_session *s, const uint8_t uuid[GPU_UUID_BYTES], struct kern **ret_kern,
            struct shd_err *e);

/* Can the worker's GPU read and write that one's memory itself? A GPU that this process does not
 * see: no. */
bool gpu_reaches(const struct shd_session *s, const uint8_t uuid[GPU_UUID_BYTES]);

/* Free what gpu_for() started. */
void gpu_close(struct shd_session *s);

/* "GPU-01234567-89ab-cdef-0123-456789abcdef", as nvidia-smi -L has it. */
#define GPU_NAME_BYTES 41u
void gpu_name(const uint8_t uuid[GPU_UUID_BYTES], char ret_name[GPU_NAME_BYTES]);

#endif
