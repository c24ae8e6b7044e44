/* See files.h. */
#include "client/checkpoint/files.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <jansson.h>

#include "client/checkpoint/dir.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"
#include "proto/files/safetensors.h"

uint64_t checkpoint_file_bytes_max = UINT64_C(5000000000);

/* -- Making ------------------------------------------------------------------------------------ */

struct making {                     /* of one array's files */
    struct checkpoint_files *files; /* borrowed */
    int dir_fd;
    const struct spec *spec;
    uid_t uid;
    uint32_t array;
    uint32_t file, file_count;          /* the next one, of so many */
    struct safetensors_tensor *tensors; /* owned, [tensor_count]: of the next file */
    uint32_t tensor_count;
    json_t *map;          /* owned: weight_map */
    uint64_t total_bytes; /* of tensors */
};

static int add_name(struct checkpoint_files *files, const char *name, uint64_t bytes,
                    struct shd_err *e)
{
    char *copy = sys_strdup(name);
    struct ckpt_file *grown = copy != NULL ? sys_realloc(files->items,
                                                         (files->count + 1) * sizeof *files->items)
                                           : NULL;
    if (grown == NULL) {
        free(copy);
        return err_set(e, SHD_ENOMEM, "no memory for the name of a file");
    }
    files->items = grown;
    files->items[files->count++] = (struct ckpt_file){ copy, bytes };
    files->bytes += bytes;
    return SHD_OK;
}

/* errno says why it has not its size: where there is no room, the sentence says how much there is.
 */
static int err_room(const struct making *k, const char *name, uint64_t bytes, struct shd_err *e)
{
    struct statvfs st;
    const int why = errno;
    if (why == ENOSPC && fstatvfs(k->dir_fd, &st) == 0)
        return err_set(e, SHD_EIO, "make '%s' of %" PRIu64 " bytes: %s: %ju are free", name, bytes,
                       strerror(why), (uintmax_t)st.f_bavail * st.f_frsize);
    errno = why;
    return err_sys(e, SHD_EIO, "make '%s' of %" PRIu64 " bytes", name, bytes);
}

/* A new file has its full size at once, so that a full disk shows now, not after an hour. */
static int make_file(const struct making *k, const char *name, const void *head,
                     uint64_t head_bytes, uint64_t bytes, struct shd_err *e)
{
    int fd = -1;
    int r = checkpoint_create(k->dir_fd, name, bytes, k->uid, &fd, e);
    if (r != SHD_OK)
        return r;
    if (bytes > 0 && fallocate(fd, 0, 0, (off_t)bytes) != 0 &&
        (errno != EOPNOTSUPP || ftruncate(fd, (off_t)bytes) != 0))
        r = err_room(k, name, bytes, e);
    if (r == SHD_OK)
        r = ckpt_pwrite(fd, head, head_bytes, 0, name, e);
    close(fd);
    return r == SHD_OK ? add_name(k->files, name, bytes, e) : r;
}

static int make_safetensors(struct making *k, struct shd_err *e)
{
    char name[64];
    struct safetensors_header header;
    const char *stem = ckpt_stem(k->spec, k->array);
    if (k->file_count == 1)
        snprintf(name, sizeof name, "%s.safetensors", stem);
    else
        snprintf(name, sizeof name, "%s-%05" PRIu32 "-of-%05" PRIu32 ".safetensors", stem,
                 k->file + 1, k->file_count);
    int r = safetensors_header(k->tensors, k->tensor_count, &header, e);
    if (r != SHD_OK)
        return r;
    r = make_file(k, name, header.data, header.bytes, header.file_bytes, e);
    free(header.data);
    for (uint32_t i = 0; i < k->tensor_count; i++) {
        json_object_set_new(k->map, k->tensors[i].name, json_string(name));
        k->total_bytes += k->tensors[i].bytes;
    }
    k->file++;
    k->tensor_count = 0;
    return r;
}

/* Of one that is cut: of all its tiles. */
static uint64_t unit_bytes(const struct spec *spec, uint32_t unit)
{
    const struct spec_unit *u = &spec->units[unit];
    uint64_t elems = 0;
    for (uint32_t t = u->first_tensor; t < u->first_tensor + u->tensor_count; t++)
        elems += spec_whole_elems(&spec->tensors[t]);
    return elems * sizeof(float);
}

static bool in_array(const struct spec *spec, uint32_t unit, uint32_t array)
{
    return array < spec_unit_arrays(spec, unit);
}

static void add_unit(struct making *k, uint32_t unit)
{
    const struct spec_unit *u = &k->spec->units[unit];
    for (uint32_t t = u->first_tensor; t < u->first_tensor + u->tensor_count; t++) {
        const struct spec_tensor *from = &k->spec->tensors[t];
        struct safetensors_tensor *to = &k->tensors[k->tensor_count++];
        *to = (struct safetensors_tensor){ .name = spec_whole_name(from),
                                           .dtype = SAFETENSORS_F32,
                                           .rank = from->rank };
        for (uint32_t d = 0; d < from->rank; d++)
            to->shape[d] = spec_whole_size(from, d);
    }
}

/* Split units into files, in order; the tiles of one are its rows, and there with the first.
 * count_only: only k->file_count is found. */
static int split_units(struct making *k, bool count_only, struct shd_err *e)
{
    uint64_t bytes = 0;
    int r = SHD_OK;
    k->file = 0;
    for (uint32_t u = 0; r == SHD_OK && u < k->spec->unit_count; u++) {
        if (!in_array(k->spec, u, k->array) || k->spec->units[u].tile > 0)
            continue;
        const uint64_t more = unit_bytes(k->spec, u);
        if (bytes > 0 && bytes + more > checkpoint_file_bytes_max) {
            if (count_only)
                k->file++;
            else
                r = make_safetensors(k, e);
            bytes = 0;
        }
        bytes += more;
        if (!count_only)
            add_unit(k, u);
    }
    if (count_only)
        k->file_count = k->file + 1;
    else if (r == SHD_OK)
        r = make_safetensors(k, e);
    return r;
}

static int make_index(struct making *k, struct shd_err *e)
{
    char name[80];
    snprintf(name, sizeof name, "%s.safetensors.index.json", ckpt_stem(k->spec, k->array));
    json_t *root = json_pack("{s:{s:I}, s:O}", "metadata", "total_size", (json_int_t)k->total_bytes,
                             "weight_map", k->map);
    char *text = root != NULL ? json_dumps(root, JSON_INDENT(1) | JSON_PRESERVE_ORDER) : NULL;
    json_decref(root);
    if (text == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for '%s'", name);
    const int r = make_file(k, name, text, strlen(text), strlen(text), e);
    free(text);
    return r;
}

static int make_array(struct making *k, struct shd_err *e)
{
    k->tensors = sys_calloc(k->spec->tensor_count, sizeof *k->tensors);
    k->map = json_object();
    int r = k->tensors == NULL || k->map == NULL
                ? err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " tensors", k->spec->tensor_count)
                : split_units(k, /* count_only= */ true, e);
    if (r == SHD_OK)
        r = split_units(k, /* count_only= */ false, e);
    if (r == SHD_OK)
        r = make_index(k, e);
    free(k->tensors);
    json_decref(k->map);
    return r;
}

int checkpoint_files_make(struct checkpoint_files *files, int dir_fd, const struct spec *spec,
                          uid_t uid, struct shd_err *e)
{
    uint64_t *first, leaves = 0;
    int r = ckpt_leaf_index(spec, &first, &leaves, e);
    if (r != SHD_OK)
        return r;
    free(first);
    for (uint32_t a = 0; r == SHD_OK && a < spec_arrays(spec); a++) {
        struct making k = { files, dir_fd, spec, uid, .array = a };
        r = make_array(&k, e);
    }
    const struct making k = { files, dir_fd, spec, uid, .array = 0 };
    return r == SHD_OK ? make_file(&k, CKPT_LEAVES, "", 0, leaves * CKPT_LEAF_BYTES, e) : r;
}

void checkpoint_files_deinit(struct checkpoint_files *files)
{
    for (uint32_t i = 0; i < files->count; i++)
        free((char *)files->items[i].name);
    free(files->items);
    *files = (struct checkpoint_files){ .items = NULL };
}

/* -- Ending ------------------------------------------------------------------------------------ */

int checkpoint_files_sync(const struct checkpoint_files *files, int dir_fd, struct shd_err *e)
{
    for (uint32_t i = 0; i < files->count; i++) {
        const char *name = files->items[i].name;
        const int fd = openat(dir_fd, name, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
        const int synced = fd >= 0 ? fsync(fd) : -1;
        const int r = synced != 0 ? err_sys(e, SHD_EIO, "sync '%s'", name) : SHD_OK;
        if (fd >= 0)
            close(fd);
        if (r != SHD_OK)
            return r;
    }
    return SHD_OK;
}

struct leaf_file {
    const struct spec *spec;
    const uint64_t *first;
    int fd;
    uint64_t step, updates;
};

static int read_leaves(void *ctx, const struct digest_part *part, uint8_t (*ret_leaves)[32],
                       struct digest_stamp *stamp, struct shd_err *e)
{
    const struct leaf_file *f = ctx;
    const uint64_t at = f->first[part->tensor] +
                        part->array * ckpt_leaf_count(&f->spec->tensors[part->tensor]) +
                        part->first_leaf;
    const int r = ckpt_pread(f->fd, ret_leaves, part->leaves * CKPT_LEAF_BYTES,
                             at * CKPT_LEAF_BYTES, CKPT_LEAVES, e);
    return r == SHD_OK ? digest_stamp_take(stamp, f->step, f->updates, e) : r;
}

int checkpoint_files_digest(int dir_fd, const struct spec *spec, uint64_t step, uint64_t updates,
                            char ret_hex[DIGEST_HEX_BYTES], struct shd_err *e)
{
    int fd;
    uint64_t *first, at;
    int r = ckpt_open_leaves(dir_fd, spec, /* writable= */ false, &fd, &first, e);
    if (r != SHD_OK)
        return r;
    struct leaf_file f = { spec, first, fd, step, updates };
    const struct digest_source source = { .leaves = read_leaves, .ctx = &f };
    r = digest_run(spec, &source, ret_hex, &at, e);
    close(fd);
    free(first);
    return r;
}
