/* See arbiter_view.h. */
#include "proto/files/arbiter_view.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "proto/base/check.h"
#include "proto/base/status.h"
#include "proto/base/sys.h"
#include "proto/share/cluster.h"

#define SCHEMA     1
#define NAME_CHARS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_."

_Static_assert(ARBITER_NAME_BYTES == CLUSTER_NAME_BYTES, "hosts are those of cluster files");
_Static_assert(ARBITER_HOSTS_MAX == CLUSTER_HOSTS_MAX, "hosts are those of cluster files");
/* A name, two quotes, a comma and a space. */
_Static_assert(ARBITER_TEXT_MAX > ARBITER_HOSTS_MAX * (ARBITER_NAME_BYTES + 4) + 256,
               "every view has a text");

void arbiter_view_free(struct arbiter_view *v)
{
    free(v->out);
    *v = (struct arbiter_view){ 0 };
}

bool arbiter_view_has(const struct arbiter_view *v, const char *host)
{
    for (uint32_t i = 0; i < v->out_count; i++)
        if (strcmp(v->out[i], host) == 0)
            return true;
    return false;
}

bool arbiter_name_is_one(const char *name)
{
    const size_t bytes = strlen(name);
    return bytes > 0 && bytes < ARBITER_NAME_BYTES && name[0] != '.' &&
           strspn(name, NAME_CHARS) == bytes;
}

static int not_a_name(const char *name, struct shd_err *e)
{
    return err_set(e, SHD_EINVAL,
                   "'%.80s' is no name: letters, digits, '-', '_' and '.' make one, at most %u, "
                   "and no '.' in front",
                   name, ARBITER_NAME_BYTES - 1);
}

static int no_memory(uint32_t count, struct shd_err *e)
{
    return err_set(e, SHD_ENOMEM, "no memory for a view with %" PRIu32 " hosts out", count);
}

int arbiter_view_next(const struct arbiter_view *v, const char *host, struct arbiter_view *ret_next,
                      struct shd_err *e)
{
    struct arbiter_view next = { .number = v->number + 1, .out_count = v->out_count + 1 };
    uint32_t at = 0;
    if (!arbiter_name_is_one(host))
        return not_a_name(host, e);
    if (arbiter_view_has(v, host))
        return err_set(e, SHD_EEXIST, "host '%s' is out already, in view %" PRIu64, host,
                       v->number);
    if (v->out_count >= ARBITER_HOSTS_MAX)
        return err_set(e, SHD_ERANGE, "%u hosts are out, and there can be no more",
                       ARBITER_HOSTS_MAX);
    next.out = sys_calloc(next.out_count, sizeof *next.out);
    if (next.out == NULL)
        return no_memory(next.out_count, e);
    while (at < v->out_count && strcmp(v->out[at], host) < 0)
        at++;
    if (at > 0)
        memcpy(next.out, v->out, at * sizeof *next.out);
    memcpy(next.out[at], host, strlen(host) + 1);
    if (at < v->out_count)
        memcpy(next.out + at + 1, v->out + at, (v->out_count - at) * sizeof *next.out);
    *ret_next = next;
    return SHD_OK;
}

/* -- Text -------------------------------------------------------------------------------------- */

static int check(const struct arbiter_view *v, struct shd_err *e)
{
    if (v->number > ARBITER_NUMBER_MAX)
        return err_set(e, SHD_ERANGE, "view %" PRIu64 ": the last number is %" PRIu64, v->number,
                       ARBITER_NUMBER_MAX);
    if (v->out_count > ARBITER_HOSTS_MAX)
        return err_set(e, SHD_ERANGE, "%" PRIu32 " hosts are out, at most %u can be", v->out_count,
                       ARBITER_HOSTS_MAX);
    CHECK(v->out_count == 0 || v->out != NULL);
    for (uint32_t i = 0; i < v->out_count; i++) {
        if (!arbiter_name_is_one(v->out[i]))
            return not_a_name(v->out[i], e);
        if (i > 0 && strcmp(v->out[i - 1], v->out[i]) >= 0)
            return err_set(e, SHD_EINVAL, "out[%" PRIu32 "] is '%s' behind '%s': they ascend", i,
                           v->out[i], v->out[i - 1]);
    }
    return SHD_OK;
}

int arbiter_view_write(const struct arbiter_view *v, const char *cluster, char **ret_text,
                       struct shd_err *e)
{
    const int r = check(v, e);
    if (r != SHD_OK)
        return r;
    json_t *out = json_array();
    for (uint32_t i = 0; out != NULL && i < v->out_count; i++)
        json_array_append_new(out, json_string(v->out[i]));
    json_t *root = json_pack("{s:i, s:s, s:I, s:o}", "schema", SCHEMA, "cluster", cluster, "view",
                             (json_int_t)v->number, "out", out);
    char *text = root != NULL && json_array_size(out) == v->out_count ? json_dumps(root, 0) : NULL;
    const size_t bytes = text != NULL ? strlen(text) : 0;
    char *line = text != NULL ? sys_malloc(bytes + 2) : NULL;
    if (line != NULL)
        snprintf(line, bytes + 2, "%s\n", text);
    free(text);
    json_decref(root);
    if (line == NULL)
        return no_memory(v->out_count, e);
    CHECK(bytes + 1 <= ARBITER_TEXT_MAX);
    *ret_text = line;
    return SHD_OK;
}

static int take_out(const json_t *array, struct arbiter_view *v, struct shd_err *e)
{
    if (!json_is_array(array))
        return err_set(e, SHD_EINVAL, "its 'out' is no array");
    if (json_array_size(array) > ARBITER_HOSTS_MAX)
        return err_set(e, SHD_ERANGE, "its 'out' has %zu names, at most %u", json_array_size(array),
                       ARBITER_HOSTS_MAX);
    v->out_count = (uint32_t)json_array_size(array);
    v->out = v->out_count > 0 ? sys_calloc(v->out_count, sizeof *v->out) : NULL;
    if (v->out_count > 0 && v->out == NULL)
        return no_memory(v->out_count, e);
    for (uint32_t i = 0; i < v->out_count; i++) {
        const char *name = json_string_value(json_array_get(array, i));
        if (name == NULL)
            return err_set(e, SHD_EINVAL, "its out[%" PRIu32 "] is no string", i);
        if (!arbiter_name_is_one(name))
            return not_a_name(name, e);
        memcpy(v->out[i], name, strlen(name) + 1);
    }
    return SHD_OK;
}

static int take(const json_t *root, const char *cluster, struct arbiter_view *v, struct shd_err *e)
{
    const json_t *schema = json_object_get(root, "schema"), *number = json_object_get(root, "view");
    const char *name = json_string_value(json_object_get(root, "cluster"));
    if (!json_is_integer(schema) || json_integer_value(schema) != SCHEMA)
        return err_set(e, SHD_EINVAL, "its 'schema' is not %d: it is of another build", SCHEMA);
    if (json_object_size(root) != 4 || name == NULL || !json_is_integer(number))
        return err_set(e, SHD_EINVAL, "it is no object of schema, cluster, view and out");
    if (strcmp(name, cluster) != 0)
        return err_set(e, SHD_EINVAL, "it is of cluster '%.80s', not of '%s'", name, cluster);
    const json_int_t value = json_integer_value(number);
    if (value < 1 || (uint64_t)value > ARBITER_NUMBER_MAX)
        return err_set(e, SHD_ERANGE, "its 'view' is %" JSON_INTEGER_FORMAT ", not 1 to %" PRIu64,
                       value, ARBITER_NUMBER_MAX);
    v->number = (uint64_t)value;
    const int r = take_out(json_object_get(root, "out"), v, e);
    return r == SHD_OK ? check(v, e) : r;
}

int arbiter_view_parse(const char *text, size_t bytes, const char *cluster,
                       struct arbiter_view *ret_view, struct shd_err *e)
{
    struct arbiter_view v = { 0 };
    json_error_t why;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &why);
    int r = root != NULL ? take(root, cluster, &v, e)
                         : err_set(e, SHD_EINVAL, "line %d: %s", why.line, why.text);
    json_decref(root);
    if (r == SHD_OK)
        *ret_view = v;
    else
        arbiter_view_free(&v);
    return r;
}
