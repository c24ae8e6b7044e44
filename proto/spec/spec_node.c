/* See spec_node.h. */
#include "proto/spec/spec_node.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/flags.h"
#include "proto/base/sys.h"
#include "proto/spec/spec.h"

struct node node_field(const struct node *object, const char *key)
{
    return (struct node){ .json = text_member(object->json, key), .parent = object, .key = key };
}

/* json: that of item `from`, or behind the last one. */
static struct node item_at(const struct node *array, const struct text_value *json, uint32_t from,
                           uint32_t index)
{
    const uint32_t count = array->json != NULL && array->json->kind == TEXT_ARRAY
                               ? array->json->count
                               : 0;
    for (; from < index && from < count; from++)
        json += json->span;
    return (struct node){ .json = index < count ? json : NULL, .parent = array, .index = index };
}

struct node node_item(const struct node *array, uint32_t index)
{
    return item_at(array, array->json != NULL ? array->json + 1 : NULL, 0, index);
}

struct node node_next(const struct node *item)
{
    return item_at(item->parent, item->json, item->index, item->index + 1);
}

struct node_path node_path(const struct node *n)
{
    struct node_path path = { "spec" };
    if (n->parent == NULL)
        return path;
    const struct node_path parent = node_path(n->parent);
    const bool top = n->parent->parent == NULL;
    if (n->key == NULL)
        snprintf(path.text, sizeof path.text, "%.80s[%" PRIu32 "]", parent.text, n->index);
    else
        snprintf(path.text, sizeof path.text, "%.60s%s%.40s", top ? "" : parent.text,
                 top ? "" : ".", n->key);
    return path;
}

static const char *type_name(const struct text_value *json)
{
    static const char *const names[] = {
        [TEXT_OBJECT] = "an object",   [TEXT_ARRAY] = "an array",     [TEXT_STRING] = "a string",
        [TEXT_INTEGER] = "an integer", [TEXT_REAL] = "a real number", [TEXT_TRUE] = "a boolean",
        [TEXT_FALSE] = "a boolean",    [TEXT_NULL] = "null",
    };
    return names[json->kind];
}

static bool is_a(const struct node *n, enum text_kind kind)
{
    return n->json != NULL && n->json->kind == kind;
}

int node_wrong_type(const struct node *n, const char *wanted, struct shd_err *e)
{
    if (n->json == NULL)
        return err_set(e, SHD_EINVAL, "%s is missing", node_path(n).text);
    return err_set(e, SHD_EINVAL, "%s must be %s, is %s", node_path(n).text, wanted,
                   type_name(n->json));
}

int node_no_memory(struct shd_err *e)
{
    return err_set(e, SHD_ENOMEM, "out of memory while reading the spec");
}

int node_object(const struct node *n, const char *const *known, size_t count, struct shd_err *e)
{
    if (!is_a(n, TEXT_OBJECT))
        return node_wrong_type(n, "an object", e);
    const struct text_value *key = n->json + 1;
    for (uint32_t k = 0; k < n->json->count; k++, key += 1 + key[1].span) {
        size_t i = 0;
        while (i < count && (known[i] == NULL || strcmp(key->at, known[i]) != 0))
            i++;
        char near[100];
        if (i == count)
            return err_set(e, SHD_EINVAL, "%s is not a known field%s",
                           node_path(&(struct node){ NULL, n, key->at, 0 }).text,
                           suggest(key->at, known, count, "", near, sizeof near));
    }
    return SHD_OK;
}

int node_array(const struct node *n, uint32_t min, uint32_t max, uint32_t *ret_count,
               struct shd_err *e)
{
    if (!is_a(n, TEXT_ARRAY))
        return node_wrong_type(n, "an array", e);
    const uint32_t count = n->json->count;
    if (count < min || count > max)
        return err_set(e, SHD_ERANGE, "%s has %" PRIu32 " entries, must be %" PRIu32 " to %" PRIu32,
                       node_path(n).text, count, min, max);
    *ret_count = count;
    return SHD_OK;
}

int node_u64(const struct node *n, uint64_t min, uint64_t max, uint64_t *ret_value,
             struct shd_err *e)
{
    if (!is_a(n, TEXT_INTEGER))
        return node_wrong_type(n, "an integer", e);
    const int64_t value = strtoll(n->json->at, NULL, 10);
    if (value < 0 || (uint64_t)value < min || (uint64_t)value > max)
        return err_set(e, SHD_ERANGE, "%s is %" PRId64 ", must be %" PRIu64 " to %" PRIu64,
                       node_path(n).text, value, min, max);
    *ret_value = (uint64_t)value;
    return SHD_OK;
}

int node_bool(const struct node *n, bool *ret_value, struct shd_err *e)
{
    if (!is_a(n, TEXT_TRUE) && !is_a(n, TEXT_FALSE))
        return node_wrong_type(n, "true or false", e);
    *ret_value = n->json->kind == TEXT_TRUE;
    return SHD_OK;
}

/* Reals are doubles here, but kernels use them as fp32: the ranges are such that neither infinity
 * nor a beta of 1 can come of that. */
int node_real(const struct node *n, struct node_range range, double *ret_value, struct shd_err *e)
{
    if (!is_a(n, TEXT_INTEGER) && !is_a(n, TEXT_REAL))
        return node_wrong_type(n, "a number", e);
    const double value = is_a(n, TEXT_REAL) ? text_real(n->json)
                                            : (double)strtoll(n->json->at, NULL, 10);
    if (!(value >= range.min && value <= range.max)) {
        char text[32];
        spec_real_text(value, text);
        return err_set(e, SHD_ERANGE, "%s is %s, must be %.9g to %.9g", node_path(n).text, text,
                       range.min, range.max);
    }
    *ret_value = value + 0.0; /* -0 becomes 0: equal values have one spelling */
    return SHD_OK;
}

int node_text(const struct node *n, const char **ret_text, struct shd_err *e)
{
    if (!is_a(n, TEXT_STRING))
        return node_wrong_type(n, "a string", e);
    *ret_text = n->json->at;
    return SHD_OK;
}

static int name_check(const struct node *n, const char *name, struct shd_err *e)
{
    const size_t bytes = strlen(name);
    if (bytes == 0 || bytes >= SPEC_NAME_BYTES_MAX)
        return err_set(e, SHD_ERANGE, "%s has %zu bytes, must be 1 to %u", node_path(n).text, bytes,
                       SPEC_NAME_BYTES_MAX - 1);
    for (size_t i = 0; i < bytes; i++) {
        const unsigned char c = (unsigned char)name[i];
        if (c <= 0x20 || c >= 0x7f || strchr("/\"\\", c) != NULL)
            return err_set(e, SHD_EINVAL,
                           "%s has byte %#x at %zu: names are printable ASCII without space, "
                           "'/', '\"' and '\\'",
                           node_path(n).text, c, i);
    }
    if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0) /* names become file names */
        return err_set(e, SHD_EINVAL, "%s is '%s', which names a directory", node_path(n).text,
                       name);
    return SHD_OK;
}

int node_name(const struct node *n, char **slot, struct shd_err *e)
{
    const char *name = "";
    int r = node_text(n, &name, e);
    if (r == SHD_OK)
        r = name_check(n, name, e);
    if (r != SHD_OK)
        return r;
    *slot = sys_strdup(name);
    return *slot != NULL ? SHD_OK : node_no_memory(e);
}
