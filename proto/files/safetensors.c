/* See safetensors.h. */
#include "proto/files/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"
#include "proto/spec/layout.h"

static const struct {
    const char *name;
    uint64_t bytes;
} dtypes[] = {
    [SAFETENSORS_F32] = { "F32", 4 },         [SAFETENSORS_BF16] = { "BF16", 2 },
    [SAFETENSORS_F16] = { "F16", 2 },         [SAFETENSORS_F64] = { "F64", 8 },
    [SAFETENSORS_F8_E4M3] = { "F8_E4M3", 1 }, [SAFETENSORS_F8_E5M2] = { "F8_E5M2", 1 },
    [SAFETENSORS_I64] = { "I64", 8 },         [SAFETENSORS_I32] = { "I32", 4 },
    [SAFETENSORS_I16] = { "I16", 2 },         [SAFETENSORS_I8] = { "I8", 1 },
    [SAFETENSORS_U64] = { "U64", 8 },         [SAFETENSORS_U32] = { "U32", 4 },
    [SAFETENSORS_U16] = { "U16", 2 },         [SAFETENSORS_U8] = { "U8", 1 },
    [SAFETENSORS_BOOL] = { "BOOL", 1 },
};

const char *safetensors_dtype_name(enum safetensors_dtype dtype)
{
    CHECK((size_t)dtype < ARRAY_SIZE(dtypes));
    return dtypes[dtype].name;
}

uint64_t safetensors_dtype_bytes(enum safetensors_dtype dtype)
{
    CHECK((size_t)dtype < ARRAY_SIZE(dtypes));
    return dtypes[dtype].bytes;
}

/* -- Numbers ------------------------------------------------------------------------------------
 */

static float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static float from_half(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16;
    const uint32_t exponent = h >> 10 & 0x1f, mantissa = h & 0x3ff;
    if (exponent == 0x1f)
        return from_bits(sign | 0x7f800000 | mantissa << 13);
    if (exponent == 0) { /* exact: mantissa * 2^-24 is normal in fp32 */
        const float x = (float)mantissa * 0x1p-24f;
        return sign != 0 ? -x : x;
    }
    return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

void safetensors_to_f32(enum safetensors_dtype dtype, const void *raw, uint64_t elems, float *ret_x)
{
    CHECK(dtype <= SAFETENSORS_F64);
    const uint16_t *halves = raw;
    const double *doubles = raw;
    if (dtype == SAFETENSORS_F32)
        memcpy(ret_x, raw, elems * sizeof *ret_x);
    for (uint64_t i = 0; dtype == SAFETENSORS_BF16 && i < elems; i++)
        ret_x[i] = from_bits((uint32_t)halves[i] << 16);
    for (uint64_t i = 0; dtype == SAFETENSORS_F16 && i < elems; i++)
        ret_x[i] = from_half(halves[i]);
    for (uint64_t i = 0; dtype == SAFETENSORS_F64 && i < elems; i++)
        ret_x[i] = (float)doubles[i];
}

/* -- Tensors of a header ------------------------------------------------------------------------
 */

static int bad(struct shd_err *e, const char *name, const char *what)
{
    return err_set(e, SHD_EINVAL, "tensor '%.120s': %s", name, what);
}

static bool get_u64(const json_t *v, uint64_t *ret_value)
{
    if (!json_is_integer(v) || json_integer_value(v) < 0)
        return false;
    *ret_value = (uint64_t)json_integer_value(v);
    return true;
}

static bool find_dtype(const json_t *v, enum safetensors_dtype *ret_dtype)
{
    const char *name = json_is_string(v) ? json_string_value(v) : "";
    for (size_t i = 0; i < ARRAY_SIZE(dtypes); i++)
        if (strcmp(dtypes[i].name, name) == 0) {
            *ret_dtype = (enum safetensors_dtype)i;
            return true;
        }
    return false;
}

static int read_shape(const json_t *shape, struct safetensors_tensor *t, struct shd_err *e)
{
    if (!json_is_array(shape) || json_array_size(shape) > SAFETENSORS_RANK_MAX)
        return bad(e, t->name, "shape is not an array of at most 8 numbers");
    t->rank = (uint32_t)json_array_size(shape);
    t->elems = 1;
    bool empty = false;
    for (uint32_t d = 0; d < t->rank; d++) {
        if (!get_u64(json_array_get(shape, d), &t->shape[d]) ||
            t->shape[d] > SHD_MODEL_ELEMS_MAX / t->elems)
            return bad(e, t->name, "shape has a size that is not from 0 to 2^48 elements in all");
        if (t->shape[d] == 0)
            empty = true;
        else
            t->elems *= t->shape[d];
    }
    if (empty)
        t->elems = 0;
    return SHD_OK;
}

static int read_place(const json_t *offsets, uint64_t data_bytes, struct safetensors_tensor *t,
                      struct shd_err *e)
{
    uint64_t begin, end;
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 ||
        !get_u64(json_array_get(offsets, 0), &begin) || !get_u64(json_array_get(offsets, 1), &end))
        return bad(e, t->name, "data_offsets is not [begin, end]");
    t->bytes = t->elems * safetensors_dtype_bytes(t->dtype);
    if (begin > end || end - begin != t->bytes)
        return err_set(e, SHD_EINVAL,
                       "tensor '%.80s': data_offsets %" PRIu64 " to %" PRIu64
                       ", its shape and dtype need %" PRIu64 " bytes",
                       t->name, begin, end, t->bytes);
    if (end > data_bytes)
        return err_set(e, SHD_ERANGE,
                       "tensor '%.80s' ends at byte %" PRIu64 " of %" PRIu64 ": the file is cut",
                       t->name, end, data_bytes);
    t->at_bytes = begin;
    return SHD_OK;
}

static int read_tensor(struct safetensors *file, const char *name, const json_t *v,
                       uint64_t data_bytes, struct shd_err *e)
{
    struct safetensors_tensor t = { .name = name };
    if (!find_dtype(json_object_get(v, "dtype"), &t.dtype))
        return bad(e, name, "dtype is not known");
    int r = read_shape(json_object_get(v, "shape"), &t, e);
    if (r == SHD_OK)
        r = read_place(json_object_get(v, "data_offsets"), data_bytes, &t, e);
    if (r == SHD_OK && file->count == SHD_TENSORS_MAX)
        r = err_set(e, SHD_ERANGE, "more than %u tensors", SHD_TENSORS_MAX);
    if (r == SHD_OK)
        file->tensors[file->count++] = t;
    return r;
}

static int by_place(const void *a, const void *b)
{
    const struct safetensors_tensor *x = a, *y = b;
    if (x->at_bytes != y->at_bytes)
        return x->at_bytes < y->at_bytes ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

static int by_name(const void *a, const void *b)
{
    const struct safetensors_tensor *x = a, *y = b;
    return strcmp(x->name, y->name);
}

static int check_overlap(struct safetensors *file, struct shd_err *e)
{
    qsort(file->tensors, file->count, sizeof *file->tensors, by_place);
    for (uint32_t i = 1; i < file->count; i++) {
        const struct safetensors_tensor *last = &file->tensors[i - 1], *t = &file->tensors[i];
        if (t->at_bytes < last->at_bytes + last->bytes)
            return err_set(e, SHD_EINVAL, "tensors '%.90s' and '%.90s' overlap", last->name,
                           t->name);
    }
    return SHD_OK;
}

static int read_tensors(struct safetensors *file, uint64_t data_bytes, struct shd_err *e)
{
    json_t *root = file->document, *v;
    const char *name;
    const size_t count = json_object_size(root);
    int r = SHD_OK;
    file->tensors = sys_calloc(count + 1, sizeof *file->tensors);
    if (file->tensors == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %zu tensors", count);
    json_object_foreach(root, name, v)
    {
        if (r == SHD_OK && strcmp(name, "__metadata__") != 0)
            r = read_tensor(file, name, v, data_bytes, e);
    }
    if (r == SHD_OK)
        r = check_overlap(file, e);
    if (r == SHD_OK)
        qsort(file->tensors, file->count, sizeof *file->tensors, by_name);
    return r;
}

int safetensors_parse(const char *json, size_t bytes, uint64_t data_bytes,
                      struct safetensors **ret_file, struct shd_err *e)
{
    json_error_t why;
    struct safetensors *file = sys_calloc(1, sizeof *file);
    if (file == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a header");
    int r = SHD_OK;
    file->document = json_loadb(json, bytes, JSON_REJECT_DUPLICATES, &why);
    if (file->document == NULL)
        r = err_set(e, SHD_EINVAL, "header, line %d column %d: %s", why.line, why.column,
                    json_error_code(&why) == json_error_duplicate_key
                        ? "duplicate key"
                        : "not well-formed"); /* jansson's own text quotes the file */
    else if (!json_is_object((json_t *)file->document))
        r = err_set(e, SHD_EINVAL, "header is not a JSON object");
    else
        r = read_tensors(file, data_bytes, e);
    if (r == SHD_OK)
        *ret_file = file;
    else
        safetensors_free(file);
    return r;
}

void safetensors_free(struct safetensors *file)
{
    if (file == NULL)
        return;
    json_decref(file->document);
    free(file->tensors);
    free(file);
}

const struct safetensors_tensor *safetensors_find(const struct safetensors *file, const char *name)
{
    const struct safetensors_tensor key = { .name = name };
    if (file->count == 0)
        return NULL;
    return bsearch(&key, file->tensors, file->count, sizeof key, by_name);
}

/* -- The file -----------------------------------------------------------------------------------
 */

static bool read_at(int fd, void *buf, size_t bytes, uint64_t at)
{
    size_t done = 0;
    while (done < bytes) {
        const ssize_t n = pread(fd, (char *)buf + done, bytes - done, (off_t)(at + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        done += (size_t)n;
    }
    return true;
}

static void place_behind(struct safetensors *file, uint64_t data_at)
{
    for (uint32_t i = 0; i < file->count; i++)
        file->tensors[i].at_bytes += data_at;
}

static int read_json(int fd, uint64_t header_bytes, uint64_t data_bytes,
                     struct safetensors **ret_file, struct shd_err *e)
{
    char *text = sys_malloc(header_bytes + 1);
    if (text == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a header of %" PRIu64 " bytes", header_bytes);
    int r = SHD_OK;
    if (!read_at(fd, text, header_bytes, 8))
        r = err_set(e, SHD_EIO, "cannot read the header");
    else
        r = safetensors_parse(text, header_bytes, data_bytes, ret_file, e);
    free(text);
    if (r == SHD_OK)
        place_behind(*ret_file, 8 + header_bytes);
    return r;
}

int safetensors_read(int fd, struct safetensors **ret_file, struct shd_err *e)
{
    uint8_t size[8];
    struct stat st;
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))
        return err_set(e, SHD_EINVAL, "not a regular file");
    if (st.st_size < (off_t)sizeof size)
        return err_set(e, SHD_EINVAL, "has %jd bytes, too few for a header", (intmax_t)st.st_size);
    if (!read_at(fd, size, sizeof size, 0))
        return err_sys(e, SHD_EIO, "read");
    uint64_t bytes = 0;
    for (unsigned i = 0; i < sizeof size; i++)
        bytes |= (uint64_t)size[i] << (8 * i);
    const uint64_t rest = (uint64_t)st.st_size - sizeof size;
    if (bytes > SAFETENSORS_HEADER_BYTES_MAX || bytes > rest) /* how many are bytes of the file */
        return err_set(e, SHD_ERANGE,
                       "is cut, or no safetensors file: its header claims more than the %" PRIu64
                       " bytes behind its size, or than the limit of %" PRIu64,
                       rest, SAFETENSORS_HEADER_BYTES_MAX);
    return read_json(fd, bytes, rest - bytes, ret_file, e);
}

/* -- Writing ------------------------------------------------------------------------------------
 */

static json_t *dump_tensor(const struct safetensors_tensor *t)
{
    json_t *shape = json_array();
    for (uint32_t d = 0; d < t->rank; d++)
        json_array_append_new(shape, json_integer((json_int_t)t->shape[d]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", safetensors_dtype_name(t->dtype), "shape",
                     shape, "data_offsets", (json_int_t)t->at_bytes,
                     (json_int_t)t->at_bytes + (json_int_t)t->bytes);
}

static char *dump_header(struct safetensors_tensor *tensors, uint32_t count)
{
    json_t *root = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    uint64_t at = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct safetensors_tensor *t = &tensors[i];
        CHECK(t->rank <= SAFETENSORS_RANK_MAX);
        t->elems = 1;
        for (uint32_t d = 0; d < t->rank; d++)
            t->elems *= t->shape[d];
        t->at_bytes = at;
        t->bytes = t->elems * safetensors_dtype_bytes(t->dtype);
        at += t->bytes;
        json_object_set_new(root, t->name, dump_tensor(t));
    }
    char *text = root != NULL ? json_dumps(root, JSON_COMPACT | JSON_PRESERVE_ORDER) : NULL;
    json_decref(root);
    return text;
}

int safetensors_header(struct safetensors_tensor *tensors, uint32_t count,
                       struct safetensors_header *ret_header, struct shd_err *e)
{
    char *text = dump_header(tensors, count);
    const uint64_t bytes = text != NULL ? strlen(text) : 0;
    const uint64_t whole = layout_align(8 + bytes, SAFETENSORS_DATA_ALIGN);
    char *data = text != NULL && whole - 8 <= SAFETENSORS_HEADER_BYTES_MAX ? sys_malloc(whole)
                                                                           : NULL;
    int r = SHD_OK;
    if (text != NULL && whole - 8 > SAFETENSORS_HEADER_BYTES_MAX)
        r = err_set(e, SHD_ERANGE, "header of %" PRIu32 " tensors has %" PRIu64 " bytes", count,
                    bytes);
    else if (data == NULL)
        r = err_set(e, SHD_ENOMEM, "no memory for a header of %" PRIu32 " tensors", count);
    if (r == SHD_OK) {
        CHECK(data != NULL && text != NULL);
        memset(data, ' ', whole);
        for (unsigned i = 0; i < 8; i++)
            data[i] = (char)((whole - 8) >> (8 * i));
        memcpy(data + 8, text, bytes); /* NOLINT(bugprone-not-null-terminated-result): no string */
        for (uint32_t i = 0; i < count; i++)
            tensors[i].at_bytes += whole;
        const struct safetensors_tensor *last = count > 0 ? &tensors[count - 1] : NULL;
        *ret_header = (struct safetensors_header){ data, whole,
                                                   last != NULL ? last->at_bytes + last->bytes
                                                                : whole };
    }
    free(text);
    return r;
}

/* -- Sets of files ------------------------------------------------------------------------------
 */

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

static int open_flags(const struct safeset_ask *ask)
{
    return (ask->writable ? O_RDWR : O_RDONLY) | (ask->links ? 0 : O_NOFOLLOW);
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
    int r = ckpt_open_file(dir_fd, name, open_flags(ask), &file->fd, e);
    if (r != SHD_OK)
        return r;
    r = safetensors_read(file->fd, &file->header, e);
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
        return err_set(e, SHD_EINVAL, "%s, line %d: not well-formed", name, why.line);
    r = open_indexed(dir_fd, index, ask, ret_set, e);
    json_decref(index);
    return r == SHD_OK ? r : err_prefix(e, "%s", name);
}

/* A set of one file. */
static int open_one(int dir_fd, const char *name, const struct safeset_ask *ask,
                    struct safeset **ret_set, struct shd_err *e)
{
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

int safeset_open_at(int dir_fd, const struct safeset_ask *ask, struct safeset **ret_set,
                    struct shd_err *e)
{
    char name[160];
    snprintf(name, sizeof name, "%s.safetensors.index.json", ask->stem);
    if (faccessat(dir_fd, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0)
        return open_by_index(dir_fd, name, ask, ret_set, e);
    snprintf(name, sizeof name, "%s.safetensors", ask->stem);
    return open_one(dir_fd, name, ask, ret_set, e);
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
    return open_one(AT_FDCWD, path, &ask, ret_set, e);
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
