/* See ckpt_info.h. */
#include "proto/files/ckpt_info.h"

#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <jansson.h>
#include <openssl/evp.h>

#include "proto/base/check.h"
#include "proto/base/status.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"
#include "proto/spec/guard.h"
#include "proto/spec/spec_json.h"
#include "proto/wire/wire.h"

#define PUT_RESTORED   1u /* decision.put of a checkpoint: under which number it was is over */
#define INFO_BYTES_MAX ((UINT64_C(16) << 20) + SPEC_JSON_BYTES_MAX)
#define INDENTED_MAX \
    (UINT64_C(1) << 20) /* of a spec that people may read; a larger one takes less room */

/* -- Its checksum -------------------------------------------------------------------------------
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

/* -- Writing ----------------------------------------------------------------------------------- */

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

static json_t *dump_guard(const struct decision_guard *g)
{
    json_t *value = isfinite(g->value) ? json_real(g->value) : json_null();
    return json_pack("{s:s, s:b, s:o, s:f}", "rule", guard_name(g->what), "stop", (int)g->stop,
                     "value", value, "bound", g->bound);
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
    if (o != NULL && d->micro_batches > 0)
        json_object_set_new(o, "micro_batches", json_integer((json_int_t)d->micro_batches));
    json_t *eps = o != NULL && d->eps_count > 0 ? json_array() : NULL;
    for (uint32_t g = 0; eps != NULL && g < d->eps_count; g++)
        json_array_append_new(eps, isnan(d->eps[g]) ? json_null() : json_real(d->eps[g]));
    if (eps != NULL)
        json_object_set_new(o, "eps", eps);
    if (o != NULL && d->guard.what != GUARD_NONE)
        json_object_set_new(o, "guard", dump_guard(&d->guard));
    return o;
}

static json_t *dump_unit_updates(const struct ckpt_info *info)
{
    json_t *list = json_array();
    for (uint32_t u = 0; u < info->unit_count; u++)
        json_array_append_new(list, json_integer((json_int_t)info->unit_updates[u]));
    return list;
}

static bool has_new_key(const json_t *settings)
{
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)settings, key, v)
    {
        if (strcmp(key, "micro_batches") == 0 || strncmp(key, "eps.", 4) == 0)
            return true;
    }
    return false;
}

/* Of settings, in what a build that reads CKPT_FORMAT_SET would leave out, or not know. */
static bool is_new(const json_t *settings)
{
    return json_object_get(settings, "later") != NULL ||
           has_new_key(json_object_get(settings, "now")) ||
           has_new_key(json_object_get(json_object_get(settings, "next"), "settings"));
}

static int format_of(const struct ckpt_info *info, const json_t *spec, const json_t *settings)
{
    const struct decision *d = &info->decision;
    const bool guarded = info->has_decision && d->guard.what != GUARD_NONE;
    if (is_new(settings) || (info->has_decision && (d->micro_batches > 0 || d->eps_count > 0)))
        return CKPT_FORMAT_CHOSEN;
    if (guarded || json_object_get(spec, "ema") != NULL)
        return CKPT_FORMAT_RULES;
    if (settings != NULL)
        return CKPT_FORMAT_SET;
    return info->unit_count > 0 ? CKPT_FORMAT_UNITS : CKPT_FORMAT;
}

int ckpt_info_dump(const struct ckpt_info *info, const struct ckpt_file *files, uint32_t count,
                   char **ret_json, struct shd_err *e)
{
    json_error_t why;
    json_t *list = json_array();
    for (uint32_t i = 0; i < count; i++)
        json_array_append_new(list, json_pack("{s:s, s:I}", "name", files[i].name, "bytes",
                                              (json_int_t)files[i].bytes));
    json_t *spec = json_loads(info->spec_json, 0, &why);
    json_t *settings = info->settings_json != NULL ? json_loads(info->settings_json, 0, &why)
                                                   : NULL;
    const int format = format_of(info, spec, settings);
    json_t *root = json_pack("{s:i, s:I, s:I, s:s, s:o, s:o, s:o, s:o, s:I, s:s}", "format", format,
                             "step", (json_int_t)info->step, "updates", (json_int_t)info->updates,
                             "digest", info->digest, "spec", spec, "decision", dump_decision(info),
                             "blob", dump_blob(info), "files", list, "time", (json_int_t)info->time,
                             "version", info->version);
    if (root != NULL && info->unit_count > 0)
        json_object_set_new(root, "unit_updates", dump_unit_updates(info));
    if (root != NULL && settings != NULL)
        json_object_set(root, "settings", settings);
    json_decref(settings);
    const size_t form = strlen(info->spec_json) <= INDENTED_MAX ? JSON_INDENT(1) : JSON_COMPACT;
    char *text = root != NULL ? json_dumps(root, form | JSON_PRESERVE_ORDER) : NULL;
    json_decref(root);
    if (text == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for " CKPT_INFO);
    const int r = add_sum(text, ret_json, e);
    free(text);
    return r;
}

/* -- Reading ----------------------------------------------------------------------------------- */

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

/* Likewise, of builds from CKPT_FORMAT_CHOSEN on. */
static bool read_chosen(const json_t *o, struct decision *d)
{
    const json_t *eps = json_object_get(o, "eps"), *v;
    uint64_t micro_batches = 0;
    size_t g;
    if (json_object_get(o, "micro_batches") != NULL &&
        get_number(o, "micro_batches", SHD_MICROS_MAX, &micro_batches, NULL) != SHD_OK)
        return false;
    d->micro_batches = (uint32_t)micro_batches;
    if (eps == NULL)
        return true;
    if (json_array_size(eps) == 0 || json_array_size(eps) > ARRAY_SIZE(d->eps))
        return false;
    d->eps_count = (uint32_t)json_array_size(eps);
    json_array_foreach(eps, g, v)
    {
        d->eps[g] = json_is_null(v) ? (double)NAN : json_number_value(v);
        if (!json_is_null(v) && (!json_is_number(v) || !isfinite(d->eps[g]) || d->eps[g] <= 0))
            return false;
    }
    return true;
}

/* Fields that are there where they say something. */
static bool read_more(const json_t *o, struct decision *d)
{
    const json_t *rates = json_object_get(o, "rates"), *v;
    size_t i;
    if (json_object_get(o, "divisor") != NULL && !get_real(o, "divisor", &d->divisor))
        return false;
    if (!read_chosen(o, d))
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

/* A value that is not finite was a loss; which one is not kept. */
static bool read_guard(const json_t *o, struct decision_guard *ret_guard)
{
    const json_t *rule = json_object_get(o, "rule"), *value = json_object_get(o, "value");
    const json_t *stop = json_object_get(o, "stop"), *bound = json_object_get(o, "bound");
    struct decision_guard g = { .stop = json_is_true(stop),
                                .value = json_is_null(value) ? (double)NAN
                                                             : json_number_value(value),
                                .bound = json_number_value(bound) };
    for (uint32_t what = GUARD_NONE + 1; what < GUARD_WHAT_END; what++)
        if (json_is_string(rule) && strcmp(json_string_value(rule), guard_name(what)) == 0)
            g.what = what;
    *ret_guard = g;
    return g.what != GUARD_NONE && json_is_boolean(stop) && json_is_number(bound) &&
           (json_is_null(value) || json_is_number(value)) && guard_plausible(&g, /* skip= */ true);
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
    const json_t *guard = json_object_get(o, "guard");
    if (guard != NULL && (!d->skip || !read_guard(guard, &d->guard)))
        return bad_field(e, "decision");
    d->scale = (float)scale;
    d->good_steps = (uint32_t)good_steps;
    d->put = json_is_true(json_object_get(o, "put")) ? PUT_RESTORED : 0;
    return json_object_get(o, "puts") == NULL ? SHD_OK
                                              : get_number(o, "puts", info->step, &d->puts, e);
}

/* Of the spec, whose JSON has those that are cut once (spec_tiles.h). What it says is not checked
 * yet. */
static uint64_t count_units(const json_t *root)
{
    const json_t *units = json_object_get(json_object_get(root, "spec"), "units"), *unit;
    uint64_t count = 0;
    size_t i;
    json_array_foreach(units, i, unit)
    {
        const json_int_t tiles = json_integer_value(json_object_get(unit, "tiles"));
        count += tiles > 1 && tiles <= SHD_UNITS_MAX ? (uint64_t)tiles : 1;
    }
    return count;
}

/* As many as the spec has units. */
static int read_unit_updates(const json_t *root, struct ckpt_info *info, struct shd_err *e)
{
    const json_t *list = json_object_get(root, "unit_updates"), *v;
    const size_t count = json_array_size(list);
    const uint64_t max = info->decision.puts > 0 ? INT64_MAX : info->step;
    size_t i;
    if (count == 0 || count > SHD_UNITS_MAX || count != count_units(root))
        return bad_field(e, "unit_updates");
    info->unit_updates = sys_calloc(count, sizeof *info->unit_updates);
    if (info->unit_updates == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %zu units", count);
    info->unit_count = (uint32_t)count;
    json_array_foreach(list, i, v)
    {
        if (!json_is_integer(v) || json_integer_value(v) < 0 ||
            (uint64_t)json_integer_value(v) > max)
            return bad_field(e, "unit_updates");
        info->unit_updates[i] = (uint64_t)json_integer_value(v);
    }
    return SHD_OK;
}

/* What they say is checked against the spec, where there is one. */
static int read_settings(const json_t *root, struct ckpt_info *info, struct shd_err *e)
{
    const json_t *v = json_object_get(root, "settings");
    if (!json_is_object(v))
        return bad_field(e, "settings");
    info->settings_json = json_dumps(v, JSON_COMPACT | JSON_PRESERVE_ORDER);
    return info->settings_json != NULL ? SHD_OK : err_set(e, SHD_ENOMEM, "no memory for settings");
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
    if (r == SHD_OK && (format < CKPT_FORMAT || format > CKPT_FORMAT_CHOSEN))
        return err_set(e, SHD_ENOTSUP, "is of format %" PRIu64 ", this build reads %d to %d",
                       format, CKPT_FORMAT, CKPT_FORMAT_CHOSEN);
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
    if (r == SHD_OK && (format == CKPT_FORMAT_UNITS ||
                        (format >= CKPT_FORMAT_SET && json_object_get(root, "unit_updates"))))
        r = read_unit_updates(root, info, e);
    if (r == SHD_OK && (format == CKPT_FORMAT_SET ||
                        (format >= CKPT_FORMAT_RULES && json_object_get(root, "settings"))))
        r = read_settings(root, info, e);
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
    free(info->unit_updates);
    free(info->blob);
    free(info->settings_json);
    *info = (struct ckpt_info){ 0 };
}
