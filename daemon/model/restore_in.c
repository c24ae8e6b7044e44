/* See restore_in.h. */
#include "daemon/model/restore_in.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/model/model.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"
#include "proto/files/safetensors.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec_json.h"

#define RETRY_US 1000u

static struct safeset_place *place_of(const struct restore_in *in, uint32_t tensor, uint32_t array)
{
    return &in->places[(size_t)tensor * CKPT_ARRAYS_MAX + array];
}

static uint32_t arrays_of(const struct restore_in *in, const struct spec *spec, uint32_t tensor)
{
    return in->weights ? 1 : ckpt_arrays(spec, &spec->tensors[tensor]);
}

/* -- Opening ------------------------------------------------------------------------------------
 */

/* Why this tensor's array cannot be read; NULL: it can. */
static const char *look_up(struct restore_in *in, const struct spec *spec, uint32_t tensor,
                           uint32_t array)
{
    const struct spec_tensor *t = &spec->tensors[tensor];
    struct safeset_place *place = place_of(in, tensor, array);
    if (in->weights && t->statistics)
        return NULL; /* they begin as zeros */
    if (!safeset_find(in->sets[array], spec_whole_name(t), place))
        return "is not in the files";
    const struct safetensors_tensor *found = place->tensor;
    if (!spec_whole_is(t, found->rank, found->shape))
        return "has another shape in the file";
    if (in->weights ? found->dtype > SAFETENSORS_F64 : found->dtype != SAFETENSORS_F32)
        return "has a dtype in the file that is not read";
    return NULL;
}

static int look_up_all(struct restore_in *in, const struct spec *spec, struct shd_err *e)
{
    uint32_t bad = 0;
    in->places = sys_calloc((size_t)spec->tensor_count * CKPT_ARRAYS_MAX, sizeof *in->places);
    if (in->places == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " tensors", spec->tensor_count);
    struct shd_err first = { 0 };
    for (uint32_t t = 0; t < spec->tensor_count; t++)
        for (uint32_t a = 0; a < arrays_of(in, spec, t); a++) {
            CHECK(a < CKPT_ARRAYS_MAX);
            const char *why = look_up(in, spec, t, a);
            if (why == NULL)
                continue;
            if (bad++ == 0)
                err_set(&first, SHD_EINVAL, "%s of tensor '%.100s': %s", ckpt_array_name(spec, a),
                        spec->tensors[t].name, why);
            break;
        }
    if (bad == 0)
        return SHD_OK;
    return err_set(e, SHD_EINVAL, "%s; %" PRIu32 " of %" PRIu32 " tensors cannot be read",
                   first.text, bad, spec->tensor_count);
}

/* The file is read with the daemon's rights: who asked may not see what is in it. */
static int check_spec(struct restore_in *in, const struct spec *spec, struct shd_err *e)
{
    int r = spec_parse(in->info.spec_json, strlen(in->info.spec_json), &in->saved, NULL);
    if (r == SHD_OK && spec_compare(in->saved, spec, NULL) != SHD_OK)
        r = spec_compare_untiled(in->saved, spec, NULL);
    return r == SHD_OK ? r : err_set(e, r, "the spec in " CKPT_INFO " is not the one asked for");
}

/* Counts of units as they were saved become those of units as they are: tiles of one were updated
 * together. Both have the same units, but for tiles, in one order. */
static int fit_counts(struct restore_in *in, const struct spec *spec, struct shd_err *e)
{
    struct ckpt_info *info = &in->info;
    if (info->unit_updates == NULL)
        return SHD_OK;
    if (info->unit_count != in->saved->unit_count)
        return err_set(e, SHD_EINVAL,
                       CKPT_INFO " has counts of %" PRIu32 " units, its spec has %" PRIu32,
                       info->unit_count, in->saved->unit_count);
    uint64_t *counts = sys_calloc(spec->unit_count, sizeof *counts);
    if (counts == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " counts", spec->unit_count);
    uint32_t next = 0, at = 0;
    for (uint32_t u = 0; u < spec->unit_count; u++) {
        if (spec->units[u].tile == 0) {
            CHECK(next < info->unit_count);
            at = next;
            next += in->saved->units[at].tiles > 0 ? in->saved->units[at].tiles : 1;
        }
        counts[u] = info->unit_updates[at];
    }
    free(info->unit_updates);
    info->unit_updates = counts;
    info->unit_count = spec->unit_count;
    return SHD_OK;
}

static int open_checkpoint(struct restore_in *in, const char *path, const struct spec *spec,
                           struct shd_err *e)
{
    int dir_fd;
    int r = ckpt_open_dir(path, &dir_fd, e);
    if (r != SHD_OK)
        return r;
    r = ckpt_info_read(dir_fd, &in->info, e);
    if (r == SHD_OK)
        r = check_spec(in, spec, e);
    if (r == SHD_OK)
        r = fit_counts(in, spec, e);
    for (uint32_t a = 0; r == SHD_OK && a < spec_arrays(spec); a++) {
        const struct safeset_ask ask = { .stem = ckpt_stem(spec, a) };
        r = safeset_open_at(dir_fd, &ask, &in->sets[a], e);
    }
    if (r == SHD_OK)
        r = ckpt_open_leaves(dir_fd, in->saved, /* writable= */ false, &in->leaves_fd,
                             &in->first_leaf, e);
    close(dir_fd);
    return r;
}

int restore_in_open(struct restore_in *in, const char *path, const struct spec *spec,
                    struct shd_err *e)
{
    const int r = in->weights ? safeset_open(path, &in->sets[0], e)
                              : open_checkpoint(in, path, spec, e);
    return r == SHD_OK ? look_up_all(in, spec, e) : r;
}

void restore_in_close(struct restore_in *in)
{
    for (uint32_t a = 0; a < CKPT_ARRAYS_MAX; a++)
        safeset_free(in->sets[a]);
    if (in->leaves_fd >= 0)
        close(in->leaves_fd);
    spec_free(in->saved);
    free(in->first_leaf);
    free(in->places);
    ckpt_info_deinit(&in->info);
    *in = RESTORE_IN_CLOSED;
}

/* -- Reading ------------------------------------------------------------------------------------
 */

static int read_floats(const struct safeset_place *place, uint64_t first, uint64_t elems,
                       float *ret_x, struct shd_err *e)
{
    const uint64_t elem_bytes = safetensors_dtype_bytes(place->tensor->dtype);
    const uint64_t at = place->tensor->at_bytes + first * elem_bytes;
    if (place->tensor->dtype == SAFETENSORS_F32)
        return ckpt_pread(place->file->fd, ret_x, elems * elem_bytes, at, place->file->name, e);
    void *raw = sys_malloc(elems * elem_bytes);
    if (raw == NULL)
        return err_set(e, SHD_ENOMEM, "no memory to convert %" PRIu64 " elements", elems);
    const int r = ckpt_pread(place->file->fd, raw, elems * elem_bytes, at, place->file->name, e);
    if (r == SHD_OK)
        safetensors_to_f32(place->tensor->dtype, raw, elems, ret_x);
    free(raw);
    return r;
}

static int differs(const struct spec *spec, const struct ckpt_part *part, uint32_t array,
                   uint64_t leaf, const char *file, struct shd_err *e)
{
    const struct spec_tensor *t = &spec->tensors[part->tensor];
    uint64_t first = 0;
    const uint64_t elems = ckpt_leaf_elems(t, part->first_leaf + leaf, 1, &first);
    first -= t->offset_elems;
    return err_set(e, SHD_EINVAL,
                   "%s of tensor '%.80s', elements %" PRIu64 " to %" PRIu64
                   ", in '%.60s' are not what was saved: the file is damaged",
                   ckpt_array_name(spec, array), t->name, first, first + elems - 1, file);
}

/* part: of the spec that was saved. */
static int check_leaves(const struct restore_in *in, const struct ckpt_part *part, uint32_t array,
                        const char *file, const float *x, struct ckpt_hasher *hasher,
                        struct shd_err *e)
{
    const struct spec_tensor *t = &in->saved->tensors[part->tensor];
    uint8_t(*leaves)[CKPT_LEAF_BYTES] = sys_malloc(2 * part->leaves * CKPT_LEAF_BYTES);
    if (leaves == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu64 " leaves", part->leaves);
    const uint64_t bytes = part->leaves * CKPT_LEAF_BYTES;
    const uint64_t first = in->first_leaf[part->tensor] + array * ckpt_leaf_count(t) +
                           part->first_leaf;
    int r = ckpt_pread(in->leaves_fd, leaves[part->leaves], bytes, first * CKPT_LEAF_BYTES,
                       CKPT_LEAVES, e);
    if (r == SHD_OK && !ckpt_hash_part(hasher, part, x, leaves))
        r = err_set(e, SHD_EINTERNAL, "libcrypto's SHA-256 failed");
    for (uint64_t i = 0; r == SHD_OK && i < part->leaves; i++)
        if (memcmp(leaves[i], leaves[part->leaves + i], CKPT_LEAF_BYTES) != 0)
            r = differs(in->saved, part, array, i, file, e);
    free(leaves);
    return r;
}

/* Elements of an array of a whole tensor. */
struct wanted {
    const struct safeset_place *place;
    uint32_t array;
    uint64_t first, elems;
};

/* Of them those in one tensor that was saved, whole leaves, which may be more: checked and, where
 * they are more, read anew. x: what was read of `wanted`. */
static int check_saved(const struct restore_in *in, uint32_t saved, const struct wanted *w,
                       float *x, struct ckpt_hasher *hasher, struct shd_err *e)
{
    const struct spec_tensor *t = &in->saved->tensors[saved];
    const struct slice rows = { spec_whole_first(t), t->elems };
    uint64_t first = 0;
    const uint64_t elems = layout_intersect(rows, w->first, w->elems, &first);
    if (elems == 0)
        return SHD_OK;
    float *at = x + (first - w->first), *more = NULL;
    first += t->offset_elems - rows.first_elem; /* in the unit that was saved */
    const uint64_t block = first / SHD_BLOCK_ELEMS * SHD_BLOCK_ELEMS;
    const struct slice blocks = { block, layout_align(first + elems, SHD_BLOCK_ELEMS) - block };
    struct ckpt_part part;
    const bool found = ckpt_part_of(in->saved, saved, blocks, &part);
    CHECK(found);
    int r = SHD_OK;
    if (part.first_elem != first || part.elems != elems) {
        more = sys_malloc(part.elems * sizeof *more);
        r = more != NULL
                ? read_floats(w->place, rows.first_elem + part.first_elem - t->offset_elems,
                              part.elems, more, e)
                : err_set(e, SHD_ENOMEM, "no memory for %" PRIu64 " elements", part.elems);
    }
    if (r == SHD_OK)
        r = check_leaves(in, &part, w->array, w->place->file->name, more != NULL ? more : at,
                         hasher, e);
    if (r == SHD_OK && more != NULL)
        memcpy(at, more + (first - part.first_elem), elems * sizeof *at);
    free(more);
    return r;
}

/* By the leaves of all that was saved of this tensor. */
static int check_whole(const struct restore_in *in, const char *name, const struct wanted *w,
                       float *x, struct ckpt_hasher *hasher, struct shd_err *e)
{
    char tile[SPEC_NAME_BYTES_MAX + 2];
    uint32_t first = 0;
    snprintf(tile, sizeof tile, "%s/0", name);
    const bool found = spec_find_tensor(in->saved, name, &first) ||
                       spec_find_tensor(in->saved, tile, &first);
    CHECK(found); /* the specs are alike */
    const uint32_t unit = in->saved->tensors[first].unit;
    const uint32_t tiles = in->saved->units[unit].tiles > 0 ? in->saved->units[unit].tiles : 1;
    int r = SHD_OK;
    for (uint32_t k = 0; r == SHD_OK && k < tiles; k++)
        r = check_saved(in,
                        in->saved->units[unit + k].first_tensor + first -
                            in->saved->units[unit].first_tensor,
                        w, x, hasher, e);
    return r;
}

/* Elements between tensors belong to none, and are zero in a fresh state. */
static int copy_to_state(struct model *m, const struct ckpt_piece *piece, uint32_t array,
                         const float *x, struct shd_err *e)
{
    const uint64_t at = piece->first_elem - m->map->slice[piece->unit].first_elem;
    const struct kern_op write = kern_write_of(model_state(m, array, piece->unit), at, piece->elems,
                                               x);
    struct kern_waiter w;
    int r;
    kern_waiter_init(&w);
    while ((r = m->kern->ops->submit(m->kern, &write, &w.done, e)) == SHD_EBUSY)
        usleep(RETRY_US); /* the queue is full of others' work */
    if (r == SHD_OK && (r = kern_wait(&w)) != SHD_OK)
        kern_explain(m->kern, r, e, "copying the state");
    return r;
}

int restore_in_read(const struct restore_in *in, struct model *m, const struct ckpt_piece *piece,
                    float *buffer, uint64_t *ret_bytes, struct shd_err *e)
{
    const struct spec_unit *unit = &m->spec->units[piece->unit];
    const struct slice slice = { piece->first_elem, piece->elems };
    struct ckpt_hasher *hasher = NULL;
    uint64_t bytes = 0;
    int r = ckpt_hasher_new(&hasher, e);
    memset(buffer, 0, piece->elems * sizeof *buffer);
    for (uint32_t t = unit->first_tensor;
         r == SHD_OK && t < unit->first_tensor + unit->tensor_count; t++) {
        struct ckpt_part part;
        if (!ckpt_part_of(m->spec, t, slice, &part) ||
            (in->weights && m->spec->tensors[t].statistics))
            continue;
        const struct spec_tensor *of = &m->spec->tensors[t];
        const struct wanted w = { place_of(in, t, piece->array), piece->array,
                                  spec_whole_first(of) + part.first_elem - of->offset_elems,
                                  part.elems };
        float *x = buffer + (part.first_elem - piece->first_elem);
        r = read_floats(w.place, w.first, w.elems, x, e);
        if (r == SHD_OK && !in->weights)
            r = check_whole(in, spec_whole_name(of), &w, x, hasher, e);
        bytes += part.elems * safetensors_dtype_bytes(w.place->tensor->dtype);
    }
    ckpt_hasher_free(hasher);
    if (r == SHD_OK)
        r = copy_to_state(m, piece, piece->array, buffer, e);
    if (r == SHD_OK && in->weights && spec_unit_ema(m->spec, piece->unit)) /* begins as these */
        r = copy_to_state(m, piece, spec_ema_array(m->spec), buffer, e);
    if (r == SHD_OK)
        *ret_bytes = bytes;
    return r;
}
