/* See checkpoint_out.h. */
#include "daemon/model/checkpoint_out.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/status.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt_info.h"
#include "proto/files/safetensors.h"
#include "proto/spec/spec.h"

static struct checkpoint_place *place_of(const struct checkpoint_out *out, uint32_t tensor,
                                         uint32_t array)
{
    return &out->places[(size_t)tensor * CKPT_ARRAYS_MAX + array];
}

static int find_place(struct checkpoint_out *out, uint32_t tensor, uint32_t array,
                      struct shd_err *e)
{
    const struct spec_tensor *t = &out->spec->tensors[tensor];
    struct safeset_place found;
    if (!safeset_find(out->sets[array], spec_whole_name(t), &found))
        return err_set(e, SHD_EINVAL, "no tensor '%.100s' in the files '%s'", t->name,
                       ckpt_stem(out->spec, array));
    if (found.tensor->dtype != SAFETENSORS_F32 ||
        !spec_whole_is(t, found.tensor->rank, found.tensor->shape))
        return err_set(e, SHD_EINVAL, "tensor '%.100s' in '%.80s' has another dtype or shape",
                       t->name, found.file->name);
    *place_of(out, tensor, array) = (struct checkpoint_place){
        found.file->fd, found.file->name,
        found.tensor->at_bytes + spec_whole_first(t) * sizeof(float)
    };
    return SHD_OK;
}

static int find_places(struct checkpoint_out *out, struct shd_err *e)
{
    out->places = sys_calloc((size_t)out->spec->tensor_count * CKPT_ARRAYS_MAX,
                             sizeof *out->places);
    if (out->places == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the places of %" PRIu32 " tensors",
                       out->spec->tensor_count);
    int r = SHD_OK;
    for (uint32_t t = 0; r == SHD_OK && t < out->spec->tensor_count; t++)
        for (uint32_t a = 0; r == SHD_OK && a < ckpt_arrays(out->spec, &out->spec->tensors[t]); a++)
            r = find_place(out, t, a, e);
    return r;
}

static int open_sets(struct checkpoint_out *out, int dir_fd, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t a = 0; r == SHD_OK && a < out->arrays; a++) {
        const struct safeset_ask ask = { .stem = ckpt_stem(out->spec, a), .writable = true };
        r = safeset_open_at(dir_fd, &ask, &out->sets[a], e);
    }
    return r;
}

/* Its coordinator writes shardd.json last: from then on nothing in it changes. */
static int check_unfinished(int dir_fd, const char *path, struct shd_err *e)
{
    if (faccessat(dir_fd, CKPT_INFO, F_OK, AT_SYMLINK_NOFOLLOW) != 0)
        return SHD_OK;
    return err_set(e, SHD_EEXIST, "'%.150s' is a finished checkpoint and stays as it is", path);
}

int checkpoint_out_open(struct checkpoint_out *out, const char *path, const struct spec *spec,
                        struct shd_err *e)
{
    int dir_fd;
    int r = ckpt_open_dir(path, &dir_fd, e);
    if (r != SHD_OK)
        return r;
    out->spec = spec;
    out->arrays = spec_arrays(spec);
    r = check_unfinished(dir_fd, path, e);
    if (r == SHD_OK)
        r = open_sets(out, dir_fd, e);
    if (r == SHD_OK)
        r = find_places(out, e);
    if (r == SHD_OK)
        r = ckpt_open_leaves(dir_fd, spec, /* writable= */ true, &out->leaves_fd, &out->first_leaf,
                             e);
    close(dir_fd);
    return r;
}

void checkpoint_out_close(struct checkpoint_out *out)
{
    for (uint32_t a = 0; a < CKPT_ARRAYS_MAX; a++)
        safeset_free(out->sets[a]);
    if (out->leaves_fd >= 0)
        close(out->leaves_fd);
    free(out->first_leaf);
    free(out->places);
    *out = CHECKPOINT_OUT_CLOSED;
}

/* -- Writing ------------------------------------------------------------------------------------
 */

static int write_leaves(const struct checkpoint_out *out, const struct ckpt_part *part,
                        uint32_t array, const float *x, struct ckpt_hasher *hasher,
                        struct shd_err *e)
{
    const struct spec_tensor *t = &out->spec->tensors[part->tensor];
    uint8_t(*leaves)[CKPT_LEAF_BYTES] = sys_malloc(part->leaves * CKPT_LEAF_BYTES);
    if (leaves == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu64 " leaves", part->leaves);
    const uint64_t first = out->first_leaf[part->tensor] + array * ckpt_leaf_count(t) +
                           part->first_leaf;
    int r = ckpt_hash_part(hasher, part, x, leaves)
                ? SHD_OK
                : err_set(e, SHD_EINTERNAL, "libcrypto's SHA-256 failed");
    if (r == SHD_OK)
        r = ckpt_pwrite(out->leaves_fd, leaves, part->leaves * CKPT_LEAF_BYTES,
                        first * CKPT_LEAF_BYTES, CKPT_LEAVES, e);
    free(leaves);
    return r;
}

static int write_part(const struct checkpoint_out *out, const struct ckpt_part *part,
                      uint32_t array, const float *x, struct ckpt_hasher *hasher, struct shd_err *e)
{
    const struct checkpoint_place *place = place_of(out, part->tensor, array);
    const uint64_t in_tensor = part->first_elem - out->spec->tensors[part->tensor].offset_elems;
    FAIL_POINT("checkpoint:write:before");
    const int r = ckpt_pwrite(place->fd, x, part->elems * sizeof *x,
                              place->at_bytes + in_tensor * sizeof *x, place->name, e);
    FAIL_POINT("checkpoint:write:after");
    return r == SHD_OK ? write_leaves(out, part, array, x, hasher, e) : r;
}

int checkpoint_out_write(const struct checkpoint_out *out, const struct ckpt_piece *piece,
                         const float *data, uint64_t *ret_bytes, struct shd_err *e)
{
    const struct spec_unit *unit = &out->spec->units[piece->unit];
    const struct slice slice = { piece->first_elem, piece->elems };
    struct ckpt_hasher *hasher;
    uint64_t bytes = 0;
    int r = ckpt_hasher_new(&hasher, e);
    if (r != SHD_OK)
        return r;
    for (uint32_t t = unit->first_tensor;
         r == SHD_OK && t < unit->first_tensor + unit->tensor_count; t++) {
        struct ckpt_part part;
        if (!ckpt_part_of(out->spec, t, slice, &part))
            continue;
        r = write_part(out, &part, piece->array, data + (part.first_elem - piece->first_elem),
                       hasher, e);
        bytes += part.elems * sizeof *data + part.leaves * CKPT_LEAF_BYTES;
    }
    ckpt_hasher_free(hasher);
    if (r == SHD_OK)
        *ret_bytes = bytes;
    return r;
}

int checkpoint_out_sync(const struct checkpoint_out *out, struct shd_err *e)
{
    FAIL_POINT("checkpoint:sync:before");
    for (uint32_t a = 0; a < out->arrays; a++)
        for (uint32_t i = 0; i < out->sets[a]->count; i++)
            if (fdatasync(out->sets[a]->files[i].fd) != 0)
                return err_sys(e, SHD_EIO, "sync '%s'", out->sets[a]->files[i].name);
    if (fdatasync(out->leaves_fd) != 0)
        return err_sys(e, SHD_EIO, "sync '" CKPT_LEAVES "'");
    FAIL_POINT("checkpoint:sync:after");
    return SHD_OK;
}
