/* See ckpt.h. */
#include "proto/files/ckpt.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>
#include <openssl/evp.h>

#include "proto/base/check.h"
#include "proto/base/status.h"
#include "proto/base/sys.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec_json.h"
#include "proto/wire/wire.h"

const char *ckpt_stem(uint32_t array)
{
    static const char *const stems[CKPT_ARRAYS_MAX] = { "model", "optimizer-m", "optimizer-v" };
    CHECK(array < CKPT_ARRAYS_MAX);
    return stems[array];
}

uint32_t ckpt_arrays(const struct spec *spec, const struct spec_tensor *tensor)
{
    return 1 + spec_unit_moments(spec, tensor->unit);
}

/* -- Leaves -------------------------------------------------------------------------------------
 */

uint64_t ckpt_leaf_count(const struct spec_tensor *tensor)
{
    CHECK(tensor->elems > 0);
    const uint64_t last = tensor->offset_elems + tensor->elems - 1;
    return last / SHD_BLOCK_ELEMS - tensor->offset_elems / SHD_BLOCK_ELEMS + 1;
}

uint64_t ckpt_leaf_elems(const struct spec_tensor *tensor, uint64_t first_leaf, uint64_t leaves,
                         uint64_t *ret_first)
{
    CHECK(leaves > 0 && first_leaf + leaves <= ckpt_leaf_count(tensor));
    const uint64_t first_block = tensor->offset_elems / SHD_BLOCK_ELEMS + first_leaf;
    const struct slice blocks = { first_block * SHD_BLOCK_ELEMS, leaves * SHD_BLOCK_ELEMS };
    return layout_intersect(blocks, tensor->offset_elems, tensor->elems, ret_first);
}

int ckpt_leaf_index(const struct spec *spec, uint64_t **ret_first, uint64_t *ret_total,
                    struct shd_err *e)
{
    uint64_t *first = sys_calloc(spec->tensor_count, sizeof *first);
    if (first == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " tensors", spec->tensor_count);
    uint64_t total = 0;
    for (uint32_t t = 0; t < spec->tensor_count; t++) {
        first[t] = total;
        total += ckpt_leaf_count(&spec->tensors[t]) * ckpt_arrays(spec, &spec->tensors[t]);
    }
    *ret_first = first;
    *ret_total = total;
    return SHD_OK;
}

int ckpt_open_leaves(int dir_fd, const struct spec *spec, bool writable, int *ret_fd,
                     uint64_t **ret_first, struct shd_err *e)
{
    struct stat st;
    uint64_t *first = NULL, total = 0;
    int r = ckpt_leaf_index(spec, &first, &total, e);
    if (r != SHD_OK)
        return r;
    int fd = -1;
    r = ckpt_open_file(dir_fd, CKPT_LEAVES, (writable ? O_RDWR : O_RDONLY) | O_NOFOLLOW, &fd, e);
    if (r == SHD_ENOENT)
        r = err_set(e, SHD_EIO, "there is no '" CKPT_LEAVES "'");
    else if (r == SHD_OK && fstat(fd, &st) != 0)
        r = err_sys(e, SHD_EIO, "open '" CKPT_LEAVES "'");
    else if (r == SHD_OK && (uint64_t)st.st_size != total * CKPT_LEAF_BYTES)
        r = err_set(e, SHD_EINVAL, "'" CKPT_LEAVES "' has %jd bytes, the spec makes it %" PRIu64,
                    (intmax_t)st.st_size, total * CKPT_LEAF_BYTES);
    if (r == SHD_OK) {
        *ret_fd = fd;
        *ret_first = first;
        return SHD_OK;
    }
    if (fd >= 0)
        close(fd);
    free(first);
    return r;
}

struct ckpt_hasher {
    EVP_MD_CTX *ctx; /* owned; initialized: re-initialization finds the algorithm there */
};

int ckpt_hasher_new(struct ckpt_hasher **ret_hasher, struct shd_err *e)
{
    struct ckpt_hasher *hasher = sys_calloc(1, sizeof *hasher);
    if (hasher == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a hash");
    hasher->ctx = EVP_MD_CTX_new();
    if (hasher->ctx == NULL || EVP_DigestInit_ex2(hasher->ctx, EVP_sha256(), NULL) != 1) {
        ckpt_hasher_free(hasher);
        return err_set(e, SHD_EINTERNAL, "libcrypto's SHA-256 failed");
    }
    *ret_hasher = hasher;
    return SHD_OK;
}

void ckpt_hasher_free(struct ckpt_hasher *hasher)
{
    if (hasher == NULL)
        return;
    EVP_MD_CTX_free(hasher->ctx);
    free(hasher);
}

bool ckpt_hash(struct ckpt_hasher *hasher, const float *x, uint64_t elems,
               uint8_t ret_leaf[CKPT_LEAF_BYTES])
{
    return EVP_DigestInit_ex2(hasher->ctx, NULL, NULL) == 1 &&
           EVP_DigestUpdate(hasher->ctx, x, elems * sizeof *x) == 1 &&
           EVP_DigestFinal_ex(hasher->ctx, ret_leaf, NULL) == 1;
}

bool ckpt_part_of(const struct spec *spec, uint32_t tensor, struct slice slice,
                  struct ckpt_part *ret_part)
{
    const struct spec_tensor *t = &spec->tensors[tensor];
    uint64_t first = 0;
    const uint64_t elems = layout_intersect(slice, t->offset_elems, t->elems, &first);
    if (elems == 0)
        return false;
    const uint64_t block = first / SHD_BLOCK_ELEMS;
    *ret_part = (struct ckpt_part){
        .tensor = tensor,
        .first_elem = first,
        .elems = elems,
        .first_leaf = block - t->offset_elems / SHD_BLOCK_ELEMS,
        .leaves = (first + elems - 1) / SHD_BLOCK_ELEMS - block + 1,
    };
    return true;
}

bool ckpt_hash_part(struct ckpt_hasher *hasher, const struct ckpt_part *part, const float *x,
                    uint8_t (*ret_leaves)[CKPT_LEAF_BYTES])
{
    uint64_t done = 0;
    for (uint64_t leaf = 0; leaf < part->leaves; leaf++) {
        const uint64_t room = SHD_BLOCK_ELEMS - (part->first_elem + done) % SHD_BLOCK_ELEMS;
        const uint64_t left = part->elems - done;
        const uint64_t elems = room < left ? room : left;
        if (!ckpt_hash(hasher, x + done, elems, ret_leaves[leaf]))
            return false;
        done += elems;
    }
    CHECK(done == part->elems);
    return true;
}

/* -- Files --------------------------------------------------------------------------------------
 */

int ckpt_open_dir(const char *path, int *ret_fd, struct shd_err *e)
{
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return err_sys(e, errno == ENOENT ? SHD_ENOENT : SHD_EIO, "open directory '%.150s'", path);
    *ret_fd = fd;
    return SHD_OK;
}

static int not_regular(const char *name, struct shd_err *e)
{
    return err_set(e, SHD_EINVAL, "'%s' is not a regular file", name);
}

int ckpt_open_file(int dir_fd, const char *name, int flags, int *ret_fd, struct shd_err *e)
{
    const int at = (flags & O_NOFOLLOW) != 0 ? AT_SYMLINK_NOFOLLOW : 0;
    struct stat st;
    if (fstatat(dir_fd, name, &st, at) == 0 && !S_ISREG(st.st_mode) && !S_ISLNK(st.st_mode))
        return not_regular(name, e);
    /* It may be another one by now: a FIFO must not hang us, a terminal not become ours. */
    const int fd = openat(dir_fd, name, flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return err_sys(e, errno == ENOENT ? SHD_ENOENT : SHD_EIO, "open '%s'", name);
    int r = SHD_OK;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode))
        r = not_regular(name, e);
    else if ((flags & O_ACCMODE) != O_RDONLY && st.st_nlink > 1)
        r = err_set(e, SHD_EINVAL, "'%s' has %ju names: it is another file, too", name,
                    (uintmax_t)st.st_nlink);
    if (r == SHD_OK)
        *ret_fd = fd;
    else
        close(fd);
    return r;
}

static int read_whole(int fd, const char *name, uint64_t bytes, char **ret_text, struct shd_err *e)
{
    char *text = sys_malloc(bytes + 1);
    if (text == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the %" PRIu64 " bytes of '%s'", bytes, name);
    const int r = ckpt_pread(fd, text, bytes, 0, name, e);
    if (r != SHD_OK) {
        free(text);
        return r;
    }
    text[bytes] = '\0';
    *ret_text = text;
    return SHD_OK;
}

int ckpt_read_text(int dir_fd, const char *name, bool links, uint64_t bytes_max, char **ret_text,
                   size_t *ret_bytes, struct shd_err *e)
{
    struct stat st;
    int fd = -1;
    int r = ckpt_open_file(dir_fd, name, O_RDONLY | (links ? 0 : O_NOFOLLOW), &fd, e);
    if (r != SHD_OK)
        return r;
    if (fstat(fd, &st) < 0)
        r = not_regular(name, e);
    else if ((uint64_t)st.st_size > bytes_max)
        r = err_set(e, SHD_ERANGE, "'%s' has %jd bytes, at most %" PRIu64, name,
                    (intmax_t)st.st_size, bytes_max);
    else
        r = read_whole(fd, name, (uint64_t)st.st_size, ret_text, e);
    close(fd);
    if (r == SHD_OK)
        *ret_bytes = (size_t)st.st_size;
    return r;
}

int ckpt_pread(int fd, void *buf, uint64_t bytes, uint64_t at, const char *name, struct shd_err *e)
{
    uint64_t done = 0;
    while (done < bytes) {
        const ssize_t n = pread(fd, (char *)buf + done, bytes - done, (off_t)(at + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return err_sys(e, SHD_EIO, "read '%s' at byte %" PRIu64, name, at + done);
        if (n == 0)
            return err_set(e, SHD_EIO, "'%s' ends at byte %" PRIu64 ", needed are %" PRIu64, name,
                           at + done, at + bytes);
        done += (uint64_t)n;
    }
    return SHD_OK;
}

int ckpt_pwrite(int fd, const void *buf, uint64_t bytes, uint64_t at, const char *name,
                struct shd_err *e)
{
    uint64_t done = 0;
    while (done < bytes) {
        const ssize_t n = pwrite(fd, (const char *)buf + done, bytes - done, (off_t)(at + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return err_sys(e, SHD_EIO, "write '%s' at byte %" PRIu64, name, at + done);
        done += (uint64_t)n;
    }
    return SHD_OK;
}

#define PUT_RESTORED   1u /* decision.put of a checkpoint: under which number it was is over */
#define INFO_BYTES_MAX ((UINT64_C(16) << 20) + SPEC_JSON_BYTES_MAX)
#define INDENTED_MAX \
    (UINT64_C(1) << 20) /* of a spec that people may read; a larger one takes less room */

/* -- shardd.json: its checksum ------------------------------------------------------------------
 *
 * The last member is SHA-256 of all bytes before it. Behind those the text is the same in every
 * file but for the digits, so no bit can change unseen: where the end is another one, the file must
 * be as builds wrote it that knew no checksum, with their members and none besides.
 */

#define SUM_BEGINS ",\n \"sha256\": \""
#define SUM_ENDS   "\"\n}"
#define SUM_HEX    64u
#define SUM_BYTES  (sizeof SUM_BEGINS - 1 + SUM_HEX + sizeof SUM_ENDS - 1)

static bool sum_of(const char *text, size_t bytes, char ret_hex[SUM_HEX + 1])
{
    unsigned char sum[SUM_HEX / 2];
    if (EVP_Digest(text, bytes, sum, NULL, EVP_sha256(), NULL) != 1)
        return false;
    for (size_t i = 0; i < sizeof sum; i++)
        snprintf(ret_hex + 2 * i, 3, "%02x", sum[i]);
    return true;
}

/* text is an object; its last brace, and the end of the line before it, come behind the sum. */
static int add_sum(const char *text, char **ret_text, struct shd_err *e)
{
    const size_t bytes = strlen(text);
    char hex[SUM_HEX + 1];
    CHECK(bytes > 2 && text[bytes - 1] == '}');
    const size_t covered = bytes - (text[bytes - 2] == '\n' ? 2 : 1);
    if (!sum_of(text, covered, hex))
        return err_set(e, SHD_EINTERNAL, "libcrypto's SHA-256 failed");
    char *whole = sys_malloc(covered + SUM_BYTES + 1);
    if (whole == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for " CKPT_INFO);
    sprintf(whole, "%.*s" SUM_BEGINS "%s" SUM_ENDS, (int)covered, text, hex);
    *ret_text = whole;
    return SHD_OK;
}

static bool has_sum(const char *text, size_t bytes)
{
    const char *end = text + bytes;
    return bytes > SUM_BYTES && memcmp(end - SUM_BYTES, SUM_BEGINS, sizeof SUM_BEGINS - 1) == 0 &&
           memcmp(end - (sizeof SUM_ENDS - 1), SUM_ENDS, sizeof SUM_ENDS - 1) == 0;
}

/* False in *ret_summed: the text has no checksum, check_members() must do. */
static int check_sum(const char *text, size_t bytes, bool *ret_summed, struct shd_err *e)
{
    char hex[SUM_HEX + 1];
    *ret_summed = has_sum(text, bytes);
    if (!*ret_summed)
        return SHD_OK;
    if (!sum_of(text, bytes - SUM_BYTES, hex))
        return err_set(e, SHD_EINTERNAL, "libcrypto's SHA-256 failed");
    if (memcmp(text + bytes - SUM_BYTES + sizeof SUM_BEGINS - 1, hex, SUM_HEX) == 0)
        return SHD_OK;
    return err_set(e, SHD_EINVAL, "the file is damaged: it is not what its own checksum is of");
}

static int check_members(const json_t *root, struct shd_err *e)
{
    static const char *const known[] = { "format",   "step", "updates", "digest", "spec",
                                         "decision", "blob", "files",   "time",   "version" };
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)root, name, v)
    {
        size_t i = 0;
        while (i < ARRAY_SIZE(known) && strcmp(known[i], name) != 0)
            i++;
        if (i == ARRAY_SIZE(known))
            return err_set(e, SHD_EINVAL,
                           "the file is damaged: it has more members than one without a checksum");
    }
    return SHD_OK;
}

/* -- shardd.json: writing
 * ------------------------------------------------------------------------------------
 */

static json_t *dump_blob(const struct ckpt_info *info)
{
    if (info->blob == NULL)
        return json_null();
    CHECK(info->blob_bytes <= WIRE_BLOB_BYTES_MAX);
    char *text = sys_malloc(info->blob_bytes / 3 * 4 + 5);
    if (text == NULL)
        return NULL;
    const int bytes = EVP_EncodeBlock((unsigned char *)text, info->blob, (int)info->blob_bytes);
    json_t *v = json_stringn(text, (size_t)bytes);
    free(text);
    return v;
}

/* loss_scale is a power of two, scale a float: a double holds each exactly. */
static json_t *dump_decision(const struct ckpt_info *info)
{
    const struct decision *d = &info->decision;
    if (!info->has_decision)
        return json_null();
    json_t *o = json_pack("{s:b, s:f, s:f, s:f, s:I}", "skip", d->skip, "scale", (double)d->scale,
                          "lr", d->lr, "loss_scale", d->loss_scale, "good_steps",
                          (json_int_t)d->good_steps);
    /* Builds that know neither read the checkpoints of models that use neither. */
    if (o != NULL && d->divisor > 0)
        json_object_set_new(o, "divisor", json_real(d->divisor));
    json_t *rates = o != NULL && d->rate_count > 0 ? json_array() : NULL;
    for (uint32_t i = 0; rates != NULL && i < d->rate_count; i++)
        json_array_append_new(rates, isnan(d->rates[i]) ? json_null() : json_real(d->rates[i]));
    if (rates != NULL)
        json_object_set_new(o, "rates", rates);
    if (o != NULL && d->puts > 0)
        json_object_set_new(o, "puts", json_integer((json_int_t)d->puts));
    if (o != NULL && d->put != 0)
        json_object_set_new(o, "put", json_true());
    return o;
}

int ckpt_info_dump(const struct ckpt_info *info, const struct ckpt_file *files, uint32_t count,
                   char **ret_json, struct shd_err *e)
{
    json_error_t why;
    json_t *list = json_array();
    for (uint32_t i = 0; i < count; i++)
        json_array_append_new(list, json_pack("{s:s, s:I}", "name", files[i].name, "bytes",
                                              (json_int_t)files[i].bytes));
    json_t *root = json_pack(
        "{s:i, s:I, s:I, s:s, s:o, s:o, s:o, s:o, s:I, s:s}", "format", CKPT_FORMAT, "step",
        (json_int_t)info->step, "updates", (json_int_t)info->updates, "digest", info->digest,
        "spec", json_loads(info->spec_json, 0, &why), "decision", dump_decision(info), "blob",
        dump_blob(info), "files", list, "time", (json_int_t)info->time, "version", info->version);
    const size_t form = strlen(info->spec_json) <= INDENTED_MAX ? JSON_INDENT(1) : JSON_COMPACT;
    char *text = root != NULL ? json_dumps(root, form | JSON_PRESERVE_ORDER) : NULL;
    json_decref(root);
    if (text == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for " CKPT_INFO);
    const int r = add_sum(text, ret_json, e);
    free(text);
    return r;
}

/* -- shardd.json: reading
 * ------------------------------------------------------------------------------------
 */

static int bad_field(struct shd_err *e, const char *field)
{
    return err_set(e, SHD_EINVAL, "field '%s' is missing or not what it must be", field);
}

static int get_number(const json_t *root, const char *field, uint64_t max, uint64_t *ret_value,
                      struct shd_err *e)
{
    const json_t *v = json_object_get(root, field);
    if (!json_is_integer(v) || json_integer_value(v) < 0 || (uint64_t)json_integer_value(v) > max)
        return bad_field(e, field);
    *ret_value = (uint64_t)json_integer_value(v);
    return SHD_OK;
}

static bool get_real(const json_t *o, const char *field, double *ret_value)
{
    const json_t *v = json_object_get(o, field);
    *ret_value = json_number_value(v);
    return json_is_number(v) && isfinite(*ret_value) && *ret_value >= 0;
}

/* Fields that are there where they say something. */
static bool read_more(const json_t *o, struct decision *d)
{
    const json_t *rates = json_object_get(o, "rates"), *v;
    size_t i;
    if (json_object_get(o, "divisor") != NULL && !get_real(o, "divisor", &d->divisor))
        return false;
    if (rates == NULL)
        return true;
    const size_t count = json_array_size(rates);
    if (count == 0 || count > ARRAY_SIZE(d->rates) || count % DECISION_RATES != 0)
        return false;
    d->rate_count = (uint32_t)count;
    json_array_foreach(rates, i, v)
    {
        d->rates[i] = json_is_null(v) ? (double)NAN : json_number_value(v);
        if (!json_is_null(v) && (!json_is_number(v) || !isfinite(d->rates[i]) || d->rates[i] < 0))
            return false;
    }
    return true;
}

static int read_decision(const json_t *root, struct ckpt_info *info, struct shd_err *e)
{
    const json_t *o = json_object_get(root, "decision");
    struct decision *d = &info->decision;
    double scale = 0;
    uint64_t good_steps = 0;
    info->has_decision = json_is_object(o);
    if (!info->has_decision)
        return json_is_null(o) && info->step == 0 ? SHD_OK : bad_field(e, "decision");
    if (!json_is_boolean(json_object_get(o, "skip")) || !get_real(o, "scale", &scale) ||
        !get_real(o, "lr", &d->lr) || !get_real(o, "loss_scale", &d->loss_scale) ||
        get_number(o, "good_steps", UINT32_MAX, &good_steps, NULL) != SHD_OK ||
        !isfinite((float)scale) || !read_more(o, d))
        return bad_field(e, "decision");
    d->skip = json_is_true(json_object_get(o, "skip"));
    d->scale = (float)scale;
    d->good_steps = (uint32_t)good_steps;
    d->put = json_is_true(json_object_get(o, "put")) ? PUT_RESTORED : 0;
    return json_object_get(o, "puts") == NULL ? SHD_OK
                                              : get_number(o, "puts", info->step, &d->puts, e);
}

static int read_blob(const json_t *root, struct ckpt_info *info, struct shd_err *e)
{
    const json_t *v = json_object_get(root, "blob");
    if (json_is_null(v))
        return SHD_OK;
    const size_t chars = json_string_length(v);
    if (!json_is_string(v) || chars % 4 != 0 || chars / 4 * 3 > WIRE_BLOB_BYTES_MAX + 2)
        return bad_field(e, "blob");
    const char *text = json_string_value(v);
    info->blob = sys_malloc(chars / 4 * 3 + 1);
    if (info->blob == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a blob");
    const int bytes = EVP_DecodeBlock(info->blob, (const unsigned char *)text, (int)chars);
    const size_t pad = chars == 0 ? 0 : (size_t)(text[chars - 1] == '=') + (text[chars - 2] == '=');
    if (bytes < 0 || (size_t)bytes - pad > WIRE_BLOB_BYTES_MAX)
        return bad_field(e, "blob");
    info->blob_bytes = (size_t)bytes - pad;
    return SHD_OK;
}

static int read_spec(const json_t *root, struct ckpt_info *info, struct shd_err *e)
{
    const json_t *v = json_object_get(root, "spec");
    if (!json_is_object(v))
        return bad_field(e, "spec");
    info->spec_json = json_dumps(v, JSON_COMPACT | JSON_PRESERVE_ORDER);
    return info->spec_json != NULL ? SHD_OK : err_set(e, SHD_ENOMEM, "no memory for a spec");
}

static int check_file(int dir_fd, const json_t *v, struct ckpt_info *info, struct shd_err *e)
{
    const char *name = json_string_value(json_object_get(v, "name"));
    uint64_t bytes = 0;
    struct stat st;
    if (name == NULL || strchr(name, '/') != NULL ||
        get_number(v, "bytes", INT64_MAX, &bytes, NULL) != SHD_OK)
        return bad_field(e, "files");
    if (fstatat(dir_fd, name, &st, AT_SYMLINK_NOFOLLOW) != 0)
        return err_sys(e, SHD_EIO, "file '%.100s'", name);
    if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size != bytes)
        return err_set(e, SHD_EINVAL, "file '%.100s' has %jd bytes, written were %" PRIu64, name,
                       (intmax_t)st.st_size, bytes);
    info->bytes += bytes;
    return SHD_OK;
}

static int check_files(int dir_fd, const json_t *root, struct ckpt_info *info, struct shd_err *e)
{
    const json_t *list = json_object_get(root, "files"), *v;
    size_t i;
    int r = json_is_array(list) ? SHD_OK : bad_field(e, "files");
    if (r == SHD_OK)
        json_array_foreach(list, i, v)
        {
            if (r == SHD_OK)
                r = check_file(dir_fd, v, info, e);
        }
    return r;
}

static int take_fields(int dir_fd, const json_t *root, struct ckpt_info *info, struct shd_err *e)
{
    uint64_t format = 0, time = 0;
    const char *digest = json_string_value(json_object_get(root, "digest"));
    const char *version = json_string_value(json_object_get(root, "version"));
    int r = get_number(root, "format", INT32_MAX, &format, e);
    if (r == SHD_OK && format != CKPT_FORMAT)
        return err_set(e, SHD_ENOTSUP, "is of format %" PRIu64 ", this build reads %d", format,
                       CKPT_FORMAT);
    if (r == SHD_OK)
        r = get_number(root, "step", INT64_MAX, &info->step, e);
    if (r == SHD_OK)
        r = get_number(root, "updates", INT64_MAX, &info->updates, e);
    if (r == SHD_OK)
        r = get_number(root, "time", INT64_MAX, &time, e);
    if (r != SHD_OK)
        return r;
    if (digest == NULL || strlen(digest) != sizeof info->digest - 1)
        return bad_field(e, "digest");
    info->time = (int64_t)time;
    memcpy(info->digest, digest, sizeof info->digest);
    if (version != NULL && strlen(version) < sizeof info->version)
        memcpy(info->version, version, strlen(version) + 1);
    r = read_decision(root, info, e);
    if (r == SHD_OK && info->updates > info->step && info->decision.puts == 0)
        r = bad_field(e, "updates"); /* a put may say how many count */
    if (r == SHD_OK)
        r = read_blob(root, info, e);
    if (r == SHD_OK)
        r = read_spec(root, info, e);
    return r == SHD_OK ? check_files(dir_fd, root, info, e) : r;
}

int ckpt_info_read(int dir_fd, struct ckpt_info *ret_info, struct shd_err *e)
{
    char *text = NULL;
    size_t bytes = 0;
    json_error_t why;
    int r = ckpt_read_text(dir_fd, CKPT_INFO, /* links= */ false, INFO_BYTES_MAX, &text, &bytes, e);
    if (r != SHD_OK)
        return r;
    struct ckpt_info info = { 0 };
    CHECK(text != NULL);
    r = check_sum(text, bytes, &info.summed, e);
    if (r == SHD_OK)
        r = spec_check_amount(text, bytes, e);
    json_t *root = r == SHD_OK ? json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &why) : NULL;
    free(text);
    if (r != SHD_OK)
        return err_prefix(e, CKPT_INFO);
    if (root == NULL) /* jansson would quote the file */
        return err_set(e, SHD_EINVAL, CKPT_INFO ", line %d: not well-formed", why.line);
    r = take_fields(dir_fd, root, &info, e);
    if (r == SHD_OK && !info.summed)
        r = check_members(root, e);
    json_decref(root);
    if (r == SHD_OK) {
        *ret_info = info;
        return SHD_OK;
    }
    ckpt_info_deinit(&info);
    return err_prefix(e, CKPT_INFO);
}

void ckpt_info_deinit(struct ckpt_info *info)
{
    free(info->spec_json);
    free(info->blob);
    *info = (struct ckpt_info){ 0 };
}
