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
    free(v->behind);
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

const struct arbiter_behind *arbiter_view_behind(const struct arbiter_view *v, const char *host)
{
    for (uint32_t i = 0; i < v->behind_count; i++)
        if (strcmp(v->behind[i].host, host) == 0)
            return &v->behind[i];
    return NULL;
}

/* The lower, the longer it has been in. */
static uint64_t came_with(const struct arbiter_view *v, const char *host)
{
    const struct arbiter_behind *behind = arbiter_view_behind(v, host);
    return behind != NULL ? behind->since : 0;
}

bool arbiter_view_swaps(const struct arbiter_view *v, const char *first, const char *second)
{
    return came_with(v, second) < came_with(v, first);
}

/* -- The next one ------------------------------------------------------------------------------ */

/* v with room for one more of each, and another number. */
static int grow(const struct arbiter_view *v, uint64_t number, struct arbiter_view *ret_next,
                struct shd_err *e)
{
    struct arbiter_view next = { .number = number,
                                 .out_count = v->out_count,
                                 .behind_count = v->behind_count };
    next.out = sys_calloc(v->out_count + 1, sizeof *next.out);
    next.behind = sys_calloc(v->behind_count + 1, sizeof *next.behind);
    if (next.out == NULL || next.behind == NULL) {
        arbiter_view_free(&next);
        return no_memory(v->out_count + 1, e);
    }
    if (v->out_count > 0)
        memcpy(next.out, v->out, v->out_count * sizeof *next.out);
    if (v->behind_count > 0)
        memcpy(next.behind, v->behind, v->behind_count * sizeof *next.behind);
    *ret_next = next;
    return SHD_OK;
}

int arbiter_view_copy(const struct arbiter_view *v, struct arbiter_view *ret_copy,
                      struct shd_err *e)
{
    return grow(v, v->number, ret_copy, e);
}

static void take_behind_out(struct arbiter_view *v, const char *host)
{
    uint32_t left = 0;
    for (uint32_t i = 0; i < v->behind_count; i++)
        if (strcmp(v->behind[i].host, host) != 0)
            v->behind[left++] = v->behind[i];
    v->behind_count = left;
}

int arbiter_view_next(const struct arbiter_view *v, const char *host, struct arbiter_view *ret_next,
                      struct shd_err *e)
{
    struct arbiter_view next = { 0 };
    uint32_t at = 0;
    if (!arbiter_name_is_one(host))
        return not_a_name(host, e);
    if (arbiter_view_has(v, host))
        return err_set(e, SHD_EEXIST, "host '%s' is out already, in view %" PRIu64, host,
                       v->number);
    if (v->out_count >= ARBITER_HOSTS_MAX)
        return err_set(e, SHD_ERANGE, "%u hosts are out, and there can be no more",
                       ARBITER_HOSTS_MAX);
    const int r = grow(v, v->number + 1, &next, e);
    if (r != SHD_OK)
        return r;
    CHECK(next.out != NULL); /* grow()'s */
    take_behind_out(&next, host);
    while (at < v->out_count && strcmp(v->out[at], host) < 0)
        at++;
    memmove(next.out + at + 1, next.out + at, (v->out_count - at) * sizeof *next.out);
    memcpy(next.out[at], host, strlen(host) + 1);
    next.out_count++;
    *ret_next = next;
    return SHD_OK;
}

int arbiter_view_in(const struct arbiter_view *v, const char *host, struct arbiter_view *ret_next,
                    struct shd_err *e)
{
    struct arbiter_view next = { 0 };
    uint32_t at = 0;
    if (!arbiter_view_has(v, host))
        return err_set(e, SHD_ENOENT, "host '%.60s' is not out, in view %" PRIu64, host, v->number);
    const int r = grow(v, v->number + 1, &next, e);
    if (r != SHD_OK)
        return r;
    CHECK(next.out != NULL && next.behind != NULL); /* grow()'s */
    while (strcmp(next.out[at], host) != 0)
        at++;
    next.out_count--;
    memmove(next.out + at, next.out + at + 1, (next.out_count - at) * sizeof *next.out);
    struct arbiter_behind *behind = &next.behind[next.behind_count++];
    *behind = (struct arbiter_behind){ .since = next.number, .filling = true };
    memcpy(behind->host, host, strlen(host) + 1);
    *ret_next = next;
    return SHD_OK;
}

int arbiter_view_filled(const struct arbiter_view *v, const char *host,
                        struct arbiter_view *ret_next, struct shd_err *e)
{
    const struct arbiter_behind *behind = arbiter_view_behind(v, host);
    if (behind == NULL || !behind->filling)
        return err_set(e, SHD_ENOENT, "host '%.60s' is not being filled, in view %" PRIu64, host,
                       v->number);
    const int r = grow(v, v->number + 1, ret_next, e);
    if (r == SHD_OK)
        ret_next->behind[behind - v->behind].filling = false;
    return r;
}

/* -- Text -------------------------------------------------------------------------------------- */

static int check_behind(const struct arbiter_view *v, struct shd_err *e)
{
    for (uint32_t i = 0; i < v->behind_count; i++) {
        const struct arbiter_behind *b = &v->behind[i];
        const uint64_t least = i > 0 ? v->behind[i - 1].since + 1 : 1;
        if (!arbiter_name_is_one(b->host))
            return not_a_name(b->host, e);
        if (b->since < least || b->since > v->number)
            return err_set(e, SHD_ERANGE,
                           "behind[%" PRIu32 "] came with view %" PRIu64 ", not %" PRIu64
                           " to %" PRIu64,
                           i, b->since, least, v->number);
        if (arbiter_view_has(v, b->host) || arbiter_view_behind(v, b->host) != b)
            return err_set(e, SHD_EINVAL, "host '%s' is in it twice", b->host);
    }
    return SHD_OK;
}

static int check(const struct arbiter_view *v, struct shd_err *e)
{
    if (v->number > ARBITER_NUMBER_MAX)
        return err_set(e, SHD_ERANGE, "view %" PRIu64 ": the last number is %" PRIu64, v->number,
                       ARBITER_NUMBER_MAX);
    if (v->out_count > ARBITER_HOSTS_MAX || v->behind_count > ARBITER_HOSTS_MAX - v->out_count)
        return err_set(e, SHD_ERANGE, "%" PRIu32 " hosts are out, or were, at most %u can be",
                       v->out_count + v->behind_count, ARBITER_HOSTS_MAX);
    CHECK(v->out_count == 0 || v->out != NULL);
    CHECK(v->behind_count == 0 || v->behind != NULL);
    for (uint32_t i = 0; i < v->out_count; i++) {
        if (!arbiter_name_is_one(v->out[i]))
            return not_a_name(v->out[i], e);
        if (i > 0 && strcmp(v->out[i - 1], v->out[i]) >= 0)
            return err_set(e, SHD_EINVAL, "out[%" PRIu32 "] is '%s' behind '%s': they ascend", i,
                           v->out[i], v->out[i - 1]);
    }
    return check_behind(v, e);
}

static json_t *behind_json(const struct arbiter_view *v)
{
    json_t *array = json_array();
    for (uint32_t i = 0; array != NULL && i < v->behind_count; i++)
        json_array_append_new(array, json_pack("{s:s, s:I, s:b}", "host", v->behind[i].host, "view",
                                               (json_int_t)v->behind[i].since, "filling",
                                               v->behind[i].filling));
    return array;
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
    bool whole = root != NULL && json_array_size(out) == v->out_count;
    if (whole && v->behind_count > 0) {
        json_object_set_new(root, "behind", behind_json(v));
        whole = json_array_size(json_object_get(root, "behind")) == v->behind_count;
    }
    char *text = whole ? json_dumps(root, 0) : NULL;
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

static int take_one_behind(const json_t *item, struct arbiter_behind *ret_behind)
{
    const char *host = json_string_value(json_object_get(item, "host"));
    const json_t *since = json_object_get(item, "view"),
                 *filling = json_object_get(item, "filling");
    if (json_object_size(item) != 3 || host == NULL || strlen(host) >= sizeof ret_behind->host ||
        !json_is_integer(since) || json_integer_value(since) < 1 || !json_is_boolean(filling))
        return SHD_EINVAL;
    memcpy(ret_behind->host, host, strlen(host) + 1);
    ret_behind->since = (uint64_t)json_integer_value(since);
    ret_behind->filling = json_is_true(filling);
    return SHD_OK;
}

/* array: NULL: there is none. */
static int take_behind(const json_t *array, struct arbiter_view *v, struct shd_err *e)
{
    const size_t count = json_array_size(array);
    if (array != NULL && !json_is_array(array))
        return err_set(e, SHD_EINVAL, "its 'behind' is no array");
    if (count > ARBITER_HOSTS_MAX)
        return err_set(e, SHD_ERANGE, "its 'behind' has %zu hosts, at most %u", count,
                       ARBITER_HOSTS_MAX);
    v->behind = count > 0 ? sys_calloc(count, sizeof *v->behind) : NULL;
    if (count > 0 && v->behind == NULL)
        return no_memory(v->out_count, e);
    v->behind_count = (uint32_t)count;
    for (uint32_t i = 0; i < v->behind_count; i++)
        if (take_one_behind(json_array_get(array, i), &v->behind[i]) != SHD_OK)
            return err_set(e, SHD_EINVAL,
                           "its behind[%" PRIu32 "] is no object of host, view and filling", i);
    return SHD_OK;
}

static int take(const json_t *root, const char *cluster, struct arbiter_view *v, struct shd_err *e)
{
    const json_t *schema = json_object_get(root, "schema"), *number = json_object_get(root, "view");
    const char *name = json_string_value(json_object_get(root, "cluster"));
    if (!json_is_integer(schema) || json_integer_value(schema) != SCHEMA)
        return err_set(e, SHD_EINVAL, "its 'schema' is not %d: it is of another build", SCHEMA);
    const json_t *behind = json_object_get(root, "behind");
    if (json_object_size(root) != 4u + (behind != NULL) || name == NULL || !json_is_integer(number))
        return err_set(e, SHD_EINVAL,
                       "it is no object of schema, cluster, view, out and perhaps behind");
    if (strcmp(name, cluster) != 0)
        return err_set(e, SHD_EINVAL, "it is of cluster '%.80s', not of '%s'", name, cluster);
    const json_int_t value = json_integer_value(number);
    if (value < 1 || (uint64_t)value > ARBITER_NUMBER_MAX)
        return err_set(e, SHD_ERANGE, "its 'view' is %" JSON_INTEGER_FORMAT ", not 1 to %" PRIu64,
                       value, ARBITER_NUMBER_MAX);
    v->number = (uint64_t)value;
    int r = take_out(json_object_get(root, "out"), v, e);
    if (r == SHD_OK)
        r = take_behind(behind, v, e);
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
