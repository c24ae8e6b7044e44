/* See gpu.h. */
#include "client/session/gpu.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/session/session.h"
#include "kernels/cuda/cuda.h"
#include "kernels/kern.h"
#include "proto/base/sys.h"
#include "proto/gpu/cuda.h"

#define ORDINAL_MAX 255u

int gpu_parse(const char *device, bool *ret_on_gpu, uint32_t *ret_ordinal, struct shd_err *e)
{
    static const char prefix[] = "cuda:";
    const size_t prefix_bytes = sizeof prefix - 1;
    *ret_on_gpu = false;
    if (device == NULL || strcmp(device, "host") == 0)
        return SHD_OK;
    uint32_t ordinal = 0;
    bool valid = strncmp(device, prefix, prefix_bytes) == 0 && device[prefix_bytes] != '\0';
    for (const char *c = device + prefix_bytes; valid && *c != '\0'; c++) {
        valid = *c >= '0' && *c <= '9';
        ordinal = 10 * ordinal + (uint32_t)(*c - '0');
        valid = valid && ordinal <= ORDINAL_MAX;
    }
    if (!valid)
        return err_set(e, SHD_EINVAL, "device is '%.40s': \"host\", or \"cuda:N\" with N up to %u",
                       device, ORDINAL_MAX);
    *ret_on_gpu = true;
    *ret_ordinal = ordinal;
    return SHD_OK;
}

int gpu_open(uint32_t ordinal, struct kern **ret_kern, struct shd_err *e)
{
    struct shd_err why = { 0 };
    const int r = kern_cuda_new(ordinal, ret_kern, &why);
    return r == SHD_OK ? SHD_OK : err_set(e, r, "device cuda:%" PRIu32 ": %s", ordinal, why.text);
}

void gpu_name(const uint8_t uuid[GPU_UUID_BYTES], char ret_name[GPU_NAME_BYTES])
{
    int used = snprintf(ret_name, GPU_NAME_BYTES, "GPU");
    for (uint32_t i = 0; i < GPU_UUID_BYTES; i++) {
        const bool dash = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
        used += snprintf(ret_name + used, GPU_NAME_BYTES - (size_t)used, "%s%02x", dash ? "-" : "",
                         uuid[i]);
    }
}

/* The GPU with this UUID has an ordinal only among those that this process sees. */
static int find_ordinal(const uint8_t uuid[GPU_UUID_BYTES], uint32_t *ret_ordinal,
                        struct shd_err *e)
{
    const struct cuda *cuda;
    int count = 0;
    int r = cuda_load(&cuda, e);
    if (r == SHD_OK)
        r = cuda_result(cuda, cuda->cuDeviceGetCount(&count), e, "cuDeviceGetCount");
    for (int i = 0; r == SHD_OK && i < count; i++) {
        CUdevice device;
        CUuuid found;
        r = cuda_result(cuda, cuda->cuDeviceGet(&device, i), e, "cuDeviceGet of %d", i);
        if (r == SHD_OK)
            r = cuda_result(cuda, cuda->cuDeviceGetUuid(&found, device), e, "cuDeviceGetUuid of %d",
                            i);
        if (r == SHD_OK && memcmp(found.bytes, uuid, GPU_UUID_BYTES) == 0) {
            *ret_ordinal = (uint32_t)i;
            return SHD_OK;
        }
    }
    if (r != SHD_OK)
        return r;
    return err_set(e, SHD_ENOTSUP,
                   "that GPU is hidden from this process, which sees %d: see CUDA_VISIBLE_DEVICES",
                   count);
}

bool gpu_reaches(const struct shd_session *s, const uint8_t uuid[GPU_UUID_BYTES])
{
    const struct cuda *cuda;
    CUdevice ours, theirs;
    uint32_t ordinal;
    int can = 0;
    if (find_ordinal(uuid, &ordinal, /* e= */ NULL) != SHD_OK || cuda_load(&cuda, NULL) != SHD_OK)
        return false;
    if (ordinal == s->ordinal)
        return true;
    return cuda->cuDeviceGet(&ours, (int)s->ordinal) == CUDA_SUCCESS &&
           cuda->cuDeviceGet(&theirs, (int)ordinal) == CUDA_SUCCESS &&
           cuda->cuDeviceCanAccessPeer(&can, ours, theirs) == CUDA_SUCCESS && can != 0;
}

static int open_owner_gpu(struct shd_session *s, const uint8_t uuid[GPU_UUID_BYTES],
                          struct shd_err *e)
{
    uint32_t ordinal = 0;
    struct owner_gpu *grown = sys_realloc(s->gpus, (s->gpu_count + 1) * sizeof *grown);
    if (grown == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a GPU");
    s->gpus = grown;
    struct owner_gpu *gpu = &s->gpus[s->gpu_count];
    int r = find_ordinal(uuid, &ordinal, e);
    if (r == SHD_OK)
        r = gpu_open(ordinal, &gpu->kern, e);
    if (r != SHD_OK)
        return r;
    memcpy(gpu->uuid, uuid, sizeof gpu->uuid);
    s->gpu_count++;
    return SHD_OK;
}

int gpu_for(struct shd_session *s, const uint8_t uuid[GPU_UUID_BYTES], struct kern **ret_kern,
            struct shd_err *e)
{
    if (s->on_gpu) {
        *ret_kern = s->kern;
        return SHD_OK;
    }
    for (uint32_t i = 0; i < s->gpu_count; i++)
        if (memcmp(s->gpus[i].uuid, uuid, GPU_UUID_BYTES) == 0) {
            *ret_kern = s->gpus[i].kern;
            return SHD_OK;
        }
    const int r = open_owner_gpu(s, uuid, e);
    if (r == SHD_OK)
        *ret_kern = s->gpus[s->gpu_count - 1].kern;
    return r;
}

void gpu_close(struct shd_session *s)
{
    for (uint32_t i = 0; i < s->gpu_count; i++)
        s->gpus[i].kern->ops->free(s->gpus[i].kern);
    free(s->gpus);
    s->gpus = NULL;
    s->gpu_count = 0;
}
