/* See safeset.h. */
#include "proto/files/safeset.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "proto/base/check.h"
#include "proto/base/status.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"
#include "proto/files/safetensors.h"

static int new_set(uint32_t capacity, struct safeset **ret_set, struct shd_err *e)
{
    struct safeset *set = sys_calloc(1, sizeof *set);
    if (set != NULL)
        set->files = sys_calloc(capacity, sizeof *set->files);
    if (set == NULL || set->files == NULL) {
        free(set);
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " files", capacity);
    }
    *ret_set = set;
    return SHD_OK;
}

void safeset_free(struct safeset *set)
{
    if (set == NULL)
        return;
    for (uint32_t i = 0; i < set->count; i++) {
        free(set->files[i].name);
        safetensors_free(set->files[i].header);
        if (set->files[i].fd >= 0)
            close(set->files[i].fd);
    }
    free(set->files);
    free(set);
}

/* O_NONBLOCK: a FIFO must not hang us before it is refused. */
static int open_flags(const struct safeset_ask *ask)
{
    return (ask->writable ? O_RDWR : O_RDONLY) | (ask->links ? 0 : O_NOFOLLOW) | O_CLOEXEC |
           O_NONBLOCK;
}

/* Append a file to a set that has room for it. */
static int add_file(struct safeset *set, int dir_fd, const char *name,
                    const struct safeset_ask *ask, struct shd_err *e)
{
    CHECK(set != NULL);
    struct safeset_file *file = &set->files[set->count];
    *file = (struct safeset_file){ .name = sys_strdup(name), .fd = -1 };
    set->count++; /* from here on safeset_free() knows it */
    if (file->name == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a file's name");
    file->fd = openat(dir_fd, name, open_flags(ask));
    if (file->fd < 0)
        return err_sys(e, errno == ENOENT ? SHD_ENOENT : SHD_EIO, "open '%s'", name);
    const int r = safetensors_read(file->fd, &file->header, e);
    return r == SHD_OK ? r : err_prefix(e, "%s", name);
}

/* -- By index -----------------------------------------------------------------------------------
 */

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Files named in the index, each once, in order of names. names has room for all entries. */
static int index_files(const json_t *map, const char **names, uint32_t *ret_count,
                       struct shd_err *e)
{
    size_t count = 0;
    const char *tensor;
    json_t *v;
    json_object_foreach((json_t *)map, tensor, v)
    {
        const char *name = json_is_string(v) ? json_string_value(v) : "";
        if (name[0] == '\0' || name[0] == '.' || strchr(name, '/') != NULL)
            return err_set(e, SHD_EINVAL, "file of tensor '%.80s' is no name of a file here",
                           tensor);
        names[count++] = name;
    }
    qsort(names, count, sizeof *names, by_text);
    uint32_t kept = 0;
    for (size_t i = 0; i < count; i++)
        if (kept == 0 || strcmp(names[i], names[kept - 1]) != 0) {
            if (kept == SAFESET_FILES_MAX)
                return err_set(e, SHD_ERANGE, "more than %u files", SAFESET_FILES_MAX);
            names[kept++] = names[i];
        }
    *ret_count = kept;
    return kept > 0 ? SHD_OK : err_set(e, SHD_EINVAL, "names no files");
}

static int open_indexed(int dir_fd, const json_t *index, const struct safeset_ask *ask,
                        struct safeset **ret_set, struct shd_err *e)
{
    const json_t *map = json_object_get(index, "weight_map");
    if (!json_is_object(map))
        return err_set(e, SHD_EINVAL, "has no object 'weight_map'");
    const char **names = sys_calloc(json_object_size(map) + 1, sizeof *names);
    if (names == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for an index");
    uint32_t count = 0;
    struct safeset *set = NULL;
    int r = index_files(map, names, &count, e);
    if (r == SHD_OK)
        r = new_set(count, &set, e);
    for (uint32_t i = 0; r == SHD_OK && i < count; i++)
        r = add_file(set, dir_fd, names[i], ask, e);
    free(names);
    if (r == SHD_OK)
        *ret_set = set;
    else
        safeset_free(set);
    return r;
}

static int open_by_index(int dir_fd, const char *name, const struct safeset_ask *ask,
                         struct safeset **ret_set, struct shd_err *e)
{
    char *text = NULL;
    size_t bytes = 0;
    json_error_t why;
    int r = ckpt_read_text(dir_fd, name, ask->links, SAFETENSORS_HEADER_BYTES_MAX, &text, &bytes,
                           e);
    if (r != SHD_OK)
        return r;
    json_t *index = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &why);
    free(text);
    if (index == NULL)
        return err_set(e, SHD_EINVAL, "%s, line %d: %s", name, why.line, why.text);
    r = open_indexed(dir_fd, index, ask, ret_set, e);
    json_decref(index);
    return r == SHD_OK ? r : err_prefix(e, "%s", name);
}

int safeset_open_at(int dir_fd, const struct safeset_ask *ask, struct safeset **ret_set,
                    struct shd_err *e)
{
    char name[160];
    snprintf(name, sizeof name, "%s.safetensors.index.json", ask->stem);
    if (faccessat(dir_fd, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0)
        return open_by_index(dir_fd, name, ask, ret_set, e);
    snprintf(name, sizeof name, "%s.safetensors", ask->stem);
    struct safeset *set = NULL;
    int r = new_set(1, &set, e);
    if (r != SHD_OK)
        return r;
    r = add_file(set, dir_fd, name, ask, e);
    if (r == SHD_OK)
        *ret_set = set;
    else
        safeset_free(set);
    return r;
}

int safeset_open(const char *path, struct safeset **ret_set, struct shd_err *e)
{
    const struct safeset_ask ask = { .stem = "model", .links = true };
    const int dir_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir_fd >= 0) {
        const int found = safeset_open_at(dir_fd, &ask, ret_set, e);
        close(dir_fd);
        return found == SHD_OK ? found : err_prefix(e, "%s", path);
    }
    if (errno != ENOTDIR)
        return err_sys(e, errno == ENOENT ? SHD_ENOENT : SHD_EIO, "open '%s'", path);
    struct safeset *set = NULL;
    int r = new_set(1, &set, e);
    if (r != SHD_OK)
        return r;
    r = add_file(set, AT_FDCWD, path, &ask, e);
    if (r == SHD_OK)
        *ret_set = set;
    else
        safeset_free(set);
    return r;
}

bool safeset_find(const struct safeset *set, const char *name, struct safeset_place *ret_place)
{
    for (uint32_t i = 0; i < set->count; i++) {
        const struct safetensors_tensor *t = safetensors_find(set->files[i].header, name);
        if (t == NULL)
            continue;
        *ret_place = (struct safeset_place){ &set->files[i], t };
        return true;
    }
    return false;
}
