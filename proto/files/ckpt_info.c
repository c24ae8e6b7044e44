/* See ckpt_info.h. */
#include "proto/files/ckpt_info.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <jansson.h>
#include <openssl/evp.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"
#include "proto/wire/wire.h"

#define INFO_BYTES_MAX (UINT64_C(16) << 20)

/* -- Writing ------------------------------------------------------------------------------------
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
    return json_pack("{s:b, s:f, s:f, s:f, s:I}", "skip", d->skip, "scale", (double)d->scale, "lr",
                     d->lr, "loss_scale", d->loss_scale, "good_steps", (json_int_t)d->good_steps);
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
    char *text = root != NULL ? json_dumps(root, JSON_INDENT(1) | JSON_PRESERVE_ORDER) : NULL;
    json_decref(root);
    if (text == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for " CKPT_INFO);
    *ret_json = text;
    return SHD_OK;
}

/* -- Reading ------------------------------------------------------------------------------------
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
        !isfinite((float)scale))
        return bad_field(e, "decision");
    d->skip = json_is_true(json_object_get(o, "skip"));
    d->scale = (float)scale;
    d->good_steps = (uint32_t)good_steps;
    return SHD_OK;
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
        r = get_number(root, "updates", info->step, &info->updates, e);
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
    if (r == SHD_OK)
        r = read_blob(root, info, e);
    if (r == SHD_OK)
        r = read_spec(root, info, e);
    return r == SHD_OK ? check_files(dir_fd, root, info, e) : r;
}

int ckpt_info_read(int dir_fd, struct ckpt_info *ret_info, struct shd_err *e)
{
    char *text;
    size_t bytes;
    json_error_t why;
    int r = ckpt_read_text(dir_fd, CKPT_INFO, /* links= */ false, INFO_BYTES_MAX, &text, &bytes, e);
    if (r != SHD_OK)
        return r;
    struct ckpt_info info = { 0 };
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &why);
    free(text);
    if (root == NULL)
        return err_set(e, SHD_EINVAL, CKPT_INFO ", line %d: %s", why.line, why.text);
    r = take_fields(dir_fd, root, &info, e);
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
