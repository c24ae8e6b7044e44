/* See weights.h. */
#include "client/ctl/state/weights.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/session/session.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"
#include "proto/share/reserve.h"

static enum safetensors_dtype dtype_of(enum shd_dtype dtype)
{
    return dtype == SHD_BF16  ? SAFETENSORS_BF16
           : dtype == SHD_F16 ? SAFETENSORS_F16
                              : SAFETENSORS_F32;
}

int weights_new(const shd_model *m, struct weights *ret_weights, struct shd_err *e)
{
    const struct spec *spec = m->spec;
    struct weights w = { .model = m, .tensors = sys_calloc(spec->tensor_count, sizeof *w.tensors) };
    if (w.tensors == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " tensors", spec->tensor_count);
    uint32_t count = 0;
    for (uint32_t t = 0; t < spec->tensor_count; t++) {
        const struct spec_tensor *from = &spec->tensors[t];
        if (from->statistics || !spec_whole_begins(from)) /* an optimizer's; rows of one before */
            continue;
        struct safetensors_tensor *to = &w.tensors[count++];
        *to = (struct safetensors_tensor){ .name = spec_whole_name(from),
                                           .dtype = dtype_of(spec->publish),
                                           .rank = from->rank };
        for (uint32_t d = 0; d < from->rank; d++)
            to->shape[d] = spec_whole_size(from, d);
    }
    const int r = safetensors_header(w.tensors, count, &w.header, e);
    if (r == SHD_OK)
        *ret_weights = w;
    else
        free(w.tensors);
    return r;
}

void weights_free(struct weights *w)
{
    free(w->tensors);
    free(w->header.data);
    *w = (struct weights){ 0 };
}

/* *next: of the tensors, the one behind the last unit's. A tile has rows of those that the first
 * tile began. */
static int write_unit(const struct weights *w, uint32_t unit, uint32_t *next, int fd,
                      const char *name, struct shd_err *e)
{
    const struct spec *spec = w->model->spec;
    const struct spec_unit *u = &spec->units[unit];
    const uint8_t *pinned = shd_pinned(w->model, unit);
    const uint64_t size = dtype_bytes(spec->publish);
    int r = SHD_OK;
    if (u->tile > 0)
        *next -= u->tensor_count;
    for (uint32_t t = u->first_tensor; r == SHD_OK && t < u->first_tensor + u->tensor_count; t++) {
        const struct spec_tensor *from = &spec->tensors[t];
        if (from->statistics)
            continue;
        const struct safetensors_tensor *to = &w->tensors[(*next)++];
        r = ckpt_pwrite(fd, pinned + from->offset_elems * size, from->elems * size,
                        to->at_bytes + spec_whole_first(from) * size, name, e);
    }
    return r;
}

int weights_write(const struct weights *w, int fd, const char *name, struct shd_err *e)
{
    int r = ckpt_pwrite(fd, w->header.data, w->header.bytes, 0, name, e);
    uint32_t next = 0;
    for (uint32_t u = 0; r == SHD_OK && u < w->model->spec->unit_count; u++)
        r = write_unit(w, u, &next, fd, name, e);
    return r;
}

int weights_memory(const struct weights *w, const char *name, int *ret_fd, struct shd_err *e)
{
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL;
    const int fd = sys_memfd(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return err_sys(e, SHD_EIO, "make '%s' in memory", name);
    /* A file system has these pages when they are written; memory that is missing then would end
     * this process. They are taken before, up to the last byte: a reader of the format refuses a
     * file with bytes behind the data. */
    int r = reserve_pages(fd, 0, w->header.file_bytes, NULL, e);
    if (r == SHD_OK)
        r = weights_write(w, fd, name, e);
    if (r == SHD_OK && fcntl(fd, F_ADD_SEALS, seals) != 0)
        r = err_sys(e, SHD_EIO, "seal '%s'", name);
    if (r == SHD_OK)
        *ret_fd = fd;
    else
        close(fd);
    return r;
}
