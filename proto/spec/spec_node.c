/* See spec_node.h. */
#include "proto/spec/spec_node.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "proto/base/flags.h"
#include "proto/base/sys.h"
#include "proto/spec/spec.h"

struct node node_field(const struct node *object, const char *key)
{
    struct node n = { .json = json_object_get(object->json, key) };
    const bool top = strcmp(object->path, "spec") == 0;
    snprintf(n.path, sizeof n.path, "%.60s%s%.40s", top ? "" : object->path, top ? "" : ".", key);
    return n;
}

struct node node_item(const struct node *array, size_t index)
{
    struct node n = { .json = json_array_get(array->json, index) };
    snprintf(n.path, sizeof n.path, "%.80s[%zu]", array->path, index);
    return n;
}

static const char *type_name(const json_t *json)
{
    switch (json_typeof(json)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a real number";
    case JSON_TRUE:
    case JSON_FALSE:
        return "a boolean";
    case JSON_NULL:
        return "null";
    }
    return "?";
}

int node_wrong_type(const struct node *n, const char *wanted, struct shd_err *e)
{
    if (n->json == NULL)
        return err_set(e, SHD_EINVAL, "%s is missing", n->path);
    return err_set(e, SHD_EINVAL, "%s must be %s, is %s", n->path, wanted, type_name(n->json));
}

int node_no_memory(struct shd_err *e)
{
    return err_set(e, SHD_ENOMEM, "out of memory while reading the spec");
}

int node_object(const struct node *n, const char *const *known, size_t count, struct shd_err *e)
{
    if (!json_is_object(n->json))
        return node_wrong_type(n, "an object", e);
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)n->json, key, value)
    {
        size_t i = 0;
        while (i < count && (known[i] == NULL || strcmp(key, known[i]) != 0))
            i++;
        char near[100];
        if (i == count)
            return err_set(e, SHD_EINVAL, "%s is not a known field%s", node_field(n, key).path,
                           suggest(key, known, count, "", near, sizeof near));
    }
    return SHD_OK;
}

int node_array(const struct node *n, uint32_t min, uint32_t max, uint32_t *ret_count,
               struct shd_err *e)
{
    if (!json_is_array(n->json))
        return node_wrong_type(n, "an array", e);
    const size_t count = json_array_size(n->json);
    if (count < min || count > max)
        return err_set(e, SHD_ERANGE, "%s has %zu entries, must be %" PRIu32 " to %" PRIu32,
                       n->path, count, min, max);
    *ret_count = (uint32_t)count;
    return SHD_OK;
}

int node_u64(const struct node *n, uint64_t min, uint64_t max, uint64_t *ret_value,
             struct shd_err *e)
{
    if (!json_is_integer(n->json))
        return node_wrong_type(n, "an integer", e);
    const int64_t value = json_integer_value(n->json);
    if (value < 0 || (uint64_t)value < min || (uint64_t)value > max)
        return err_set(e, SHD_ERANGE, "%s is %" PRId64 ", must be %" PRIu64 " to %" PRIu64, n->path,
                       value, min, max);
    *ret_value = (uint64_t)value;
    return SHD_OK;
}

int node_bool(const struct node *n, bool *ret_value, struct shd_err *e)
{
    if (!json_is_boolean(n->json))
        return node_wrong_type(n, "true or false", e);
    *ret_value = json_is_true(n->json);
    return SHD_OK;
}

/* Reals are doubles here, but kernels use them as fp32: the ranges are such that neither infinity
 * nor a beta of 1 can come of that. */
int node_real(const struct node *n, struct node_range range, double *ret_value, struct shd_err *e)
{
    if (!json_is_number(n->json))
        return node_wrong_type(n, "a number", e);
    const double value = json_number_value(n->json);
    if (!(value >= range.min && value <= range.max)) {
        char text[32];
        spec_real_text(value, text);
        return err_set(e, SHD_ERANGE, "%s is %s, must be %.9g to %.9g", n->path, text, range.min,
                       range.max);
    }
    *ret_value = value + 0.0; /* -0 becomes 0: equal values have one spelling */
    return SHD_OK;
}

int node_text(const struct node *n, const char **ret_text, struct shd_err *e)
{
    if (!json_is_string(n->json))
        return node_wrong_type(n, "a string", e);
    *ret_text = json_string_value(n->json);
    return SHD_OK;
}

static int name_check(const char *path, const char *name, struct shd_err *e)
{
    const size_t bytes = strlen(name);
    if (bytes == 0 || bytes >= SPEC_NAME_BYTES_MAX)
        return err_set(e, SHD_ERANGE, "%s has %zu bytes, must be 1 to %u", path, bytes,
                       SPEC_NAME_BYTES_MAX - 1);
    for (size_t i = 0; i < bytes; i++) {
        const unsigned char c = (unsigned char)name[i];
        if (c <= 0x20 || c >= 0x7f || strchr("/\"\\", c) != NULL)
            return err_set(e, SHD_EINVAL,
                           "%s has byte %#x at %zu: names are printable ASCII without space, "
                           "'/', '\"' and '\\'",
                           path, c, i);
    }
    if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0) /* names become file names */
        return err_set(e, SHD_EINVAL, "%s is '%s', which names a directory", path, name);
    return SHD_OK;
}

int node_name(const struct node *n, char **slot, struct shd_err *e)
{
    const char *name = "";
    int r = node_text(n, &name, e);
    if (r == SHD_OK)
        r = name_check(n->path, name, e);
    if (r != SHD_OK)
        return r;
    *slot = sys_strdup(name);
    return *slot != NULL ? SHD_OK : node_no_memory(e);
}

int node_unique(const struct node *n, const char *what, json_t *dictionary, uint32_t index,
                char **slot, struct shd_err *e)
{
    const int r = node_name(n, slot, e);
    if (r != SHD_OK)
        return r;
    const json_t *other = json_object_get(dictionary, *slot);
    if (other != NULL)
        return err_set(e, SHD_EINVAL, "%s '%.60s' is the name of %s %" JSON_INTEGER_FORMAT " too",
                       n->path, *slot, what, json_integer_value(other));
    if (json_object_set_new(dictionary, *slot, json_integer(index)) != 0)
        return node_no_memory(e);
    return SHD_OK;
}

int node_reference(const struct node *n, const char *what, const json_t *dictionary,
                   uint32_t *ret_index, struct shd_err *e)
{
    const char *name = "";
    const int r = node_text(n, &name, e);
    if (r != SHD_OK)
        return r;
    const json_t *index = json_object_get(dictionary, name);
    if (index == NULL)
        return err_set(e, SHD_EINVAL, "%s is '%.60s', there is no such %s", n->path, name, what);
    *ret_index = (uint32_t)json_integer_value(index);
    return SHD_OK;
}
