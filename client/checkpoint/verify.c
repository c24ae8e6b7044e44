/* See verify.h. Every leaf is computed anew from the tensors' bytes, then the digest from the
 * leaves. */
#include "client/checkpoint/verify.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/checkpoint/dir.h"
#include "client/checkpoint/files.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"
#include "proto/files/ckpt_info.h"
#include "proto/files/safeset.h"
#include "proto/spec/spec_json.h"

#define WINDOW_ELEMS  (UINT64_C(512) * SHD_BLOCK_ELEMS)
#define WINDOW_LEAVES 513u /* of that many elements that begin anywhere */

struct verify {
    int dir_fd;
    struct ckpt_info info;
    struct spec *spec;                     /* owned */
    struct safeset *sets[CKPT_ARRAYS_MAX]; /* owned */
    struct ckpt_hasher *hasher;            /* owned */
    uint64_t *first_leaf;                  /* owned */
    int leaves_fd;                         /* owned */
    float *window;                         /* owned, [WINDOW_ELEMS] */
    uint8_t (*leaves)[CKPT_LEAF_BYTES];    /* owned, [2][WINDOW_LEAVES] */
};

static int differs(const struct verify *v, const struct ckpt_part *part, uint32_t array,
                   const char *file, struct shd_err *e)
{
    const struct spec_tensor *t = &v->spec->tensors[part->tensor];
    uint64_t leaf = 0;
    while (memcmp(v->leaves[leaf], v->leaves[WINDOW_LEAVES + leaf], CKPT_LEAF_BYTES) == 0)
        leaf++;
    uint64_t first = 0;
    const uint64_t elems = ckpt_leaf_elems(t, part->first_leaf + leaf, 1, &first);
    first -= t->offset_elems;
    return err_set(e, SHD_EINVAL,
                   "tensor '%.80s' in '%.60s', elements %" PRIu64 " to %" PRIu64 ", array %" PRIu32
                   ": not what was saved, the file is damaged",
                   t->name, file, first, first + elems - 1, array);
}

static int check_part(struct verify *v, const struct safeset_place *place,
                      const struct ckpt_part *part, uint32_t array, struct shd_err *e)
{
    const struct spec_tensor *t = &v->spec->tensors[part->tensor];
    const uint64_t at = place->tensor->at_bytes +
                        (part->first_elem - t->offset_elems) * sizeof(float);
    const uint64_t leaf = v->first_leaf[part->tensor] + array * ckpt_leaf_count(t) +
                          part->first_leaf;
    CHECK(v->leaves != NULL && part->leaves <= WINDOW_LEAVES);
    int r = ckpt_pread(place->file->fd, v->window, part->elems * sizeof(float), at,
                       place->file->name, e);
    if (r == SHD_OK)
        r = ckpt_pread(v->leaves_fd, v->leaves[WINDOW_LEAVES], part->leaves * CKPT_LEAF_BYTES,
                       leaf * CKPT_LEAF_BYTES, CKPT_LEAVES, e);
    if (r != SHD_OK)
        return r;
    if (!ckpt_hash_part(v->hasher, part, v->window, v->leaves))
        return err_set(e, SHD_EINTERNAL, "libcrypto's SHA-256 failed");
    if (memcmp(v->leaves[0], v->leaves[WINDOW_LEAVES], part->leaves * CKPT_LEAF_BYTES) != 0)
        return differs(v, part, array, place->file->name, e);
    return SHD_OK;
}

static int check_array(struct verify *v, uint32_t tensor, uint32_t array, struct shd_err *e)
{
    const struct spec_tensor *t = &v->spec->tensors[tensor];
    struct safeset_place place;
    if (!safeset_find(v->sets[array], t->name, &place) || place.tensor->dtype != SAFETENSORS_F32 ||
        place.tensor->elems != t->elems)
        return err_set(e, SHD_EINVAL, "tensor '%.100s' is not in the files '%s' as it was saved",
                       t->name, ckpt_stem(array));
    int r = SHD_OK;
    const uint64_t unit_elems = v->spec->units[t->unit].elems;
    for (uint64_t first = 0; r == SHD_OK && first < unit_elems; first += WINDOW_ELEMS) {
        struct ckpt_part part;
        const struct slice slice = { first, WINDOW_ELEMS };
        if (ckpt_part_of(v->spec, tensor, slice, &part))
            r = check_part(v, &place, &part, array, e);
    }
    return r;
}

static int open_parts(struct verify *v, struct shd_err *e)
{
    int r = ckpt_info_read(v->dir_fd, &v->info, e);
    if (r == SHD_OK)
        r = spec_parse(v->info.spec_json, strlen(v->info.spec_json), &v->spec, e);
    for (uint32_t a = 0; r == SHD_OK && a < 1 + spec_moments(v->spec); a++) {
        const struct safeset_ask ask = { .stem = ckpt_stem(a) };
        r = safeset_open_at(v->dir_fd, &ask, &v->sets[a], e);
    }
    if (r == SHD_OK)
        r = ckpt_open_leaves(v->dir_fd, v->spec, /* writable= */ false, &v->leaves_fd,
                             &v->first_leaf, e);
    if (r == SHD_OK)
        r = ckpt_hasher_new(&v->hasher, e);
    if (r != SHD_OK)
        return r;
    v->window = sys_malloc(WINDOW_ELEMS * sizeof *v->window);
    v->leaves = sys_malloc(2 * (size_t)WINDOW_LEAVES * CKPT_LEAF_BYTES);
    if (v->window == NULL || v->leaves == NULL)
        return err_set(e, SHD_ENOMEM, "no memory to verify");
    return SHD_OK;
}

static int check_digest(const struct verify *v, struct shd_err *e)
{
    char hex[DIGEST_HEX_BYTES];
    const int r = checkpoint_files_digest(v->dir_fd, v->spec, v->info.step, v->info.updates, hex,
                                          e);
    if (r == SHD_OK && strcmp(hex, v->info.digest) != 0)
        return err_set(e, SHD_EINVAL,
                       "digest of the leaves is %.16s..., " CKPT_INFO " says %.16s...: one of them "
                       "is damaged",
                       hex, v->info.digest);
    return r;
}

static void close_parts(struct verify *v)
{
    for (uint32_t a = 0; a < CKPT_ARRAYS_MAX; a++)
        safeset_free(v->sets[a]);
    ckpt_hasher_free(v->hasher);
    spec_free(v->spec);
    ckpt_info_deinit(&v->info);
    free(v->first_leaf);
    free(v->window);
    free(v->leaves);
    if (v->leaves_fd >= 0)
        close(v->leaves_fd);
    close(v->dir_fd);
}

int checkpoint_verify(const char *path, struct checkpoint_verified *ret_verified, struct shd_err *e)
{
    struct verify v = { .leaves_fd = -1 };
    char *found;
    int r = checkpoint_dir_resolve(path, &found, e);
    if (r != SHD_OK)
        return r;
    r = ckpt_open_dir(found, &v.dir_fd, e);
    free(found);
    if (r != SHD_OK)
        return r;
    r = open_parts(&v, e);
    for (uint32_t t = 0; r == SHD_OK && t < v.spec->tensor_count; t++)
        for (uint32_t a = 0; r == SHD_OK && a < ckpt_arrays(v.spec, &v.spec->tensors[t]); a++)
            r = check_array(&v, t, a, e);
    if (r == SHD_OK)
        r = check_digest(&v, e);
    if (r == SHD_OK) {
        *ret_verified = (struct checkpoint_verified){ .step = v.info.step,
                                                      .updates = v.info.updates,
                                                      .bytes = v.info.bytes };
        memcpy(ret_verified->digest, v.info.digest, sizeof ret_verified->digest);
        memcpy(ret_verified->model, v.spec->name, strlen(v.spec->name) + 1);
    }
    close_parts(&v);
    return r;
}
