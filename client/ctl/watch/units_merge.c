/* See units_merge.h. What daemons say is not trusted: lists are as long as they have to be, texts
 * of sums are checked as they are read, and what is no part of the others is refused. */
#include "client/ctl/watch/units_merge.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/base/http.h"
#include "client/ctl/base/text.h"
#include "proto/base/check.h"
#include "proto/base/fixsum.h"
#include "proto/spec/layout.h"

#define PART_BYTES_MAX ((size_t)16 << 20)

static json_int_t number(const json_t *o, const char *key)
{
    return json_integer_value(json_object_get(o, key));
}

static json_t *real_or_null(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

/* -- Checking ------------------------------------------------------------------------------------
 */

static bool is_list(const json_t *list, size_t count)
{
    return json_is_array(list) && json_array_size(list) == count;
}

static bool row_is_sound(const json_t *row, size_t units)
{
    const json_t *sums = json_object_get(row, "sums");
    return json_is_integer(json_object_get(row, "step")) && number(row, "step") >= 0 &&
           json_is_number(json_object_get(row, "divisor")) &&
           json_number_value(json_object_get(row, "divisor")) > 0 &&
           json_is_array(json_object_get(row, "bad")) &&
           is_list(json_object_get(sums, "grad"), units) &&
           is_list(json_object_get(sums, "update"), units) &&
           is_list(json_object_get(sums, "weight"), units);
}

/* Rows ascend. */
static bool part_is_sound(const json_t *part)
{
    const json_t *units = json_object_get(part, "units"), *rows = json_object_get(part, "rows");
    const json_t *row;
    json_int_t last = -1;
    size_t i;
    if (!json_is_array(units) || !json_is_array(rows) ||
        !json_is_string(json_object_get(part, "model")) || number(part, "owners") < 1 ||
        number(part, "owners") > SHD_OWNERS_MAX || number(part, "owner") < 0 ||
        number(part, "owner") >= number(part, "owners"))
        return false;
    json_array_foreach(rows, i, row)
    {
        if (!row_is_sound(row, json_array_size(units)) || number(row, "step") <= last)
            return false;
        last = number(row, "step");
    }
    return true;
}

static bool is_alike(const json_t *a, const json_t *b)
{
    return json_equal(json_object_get(a, "model"), json_object_get(b, "model")) &&
           json_equal(json_object_get(a, "units"), json_object_get(b, "units")) &&
           number(a, "owners") == number(b, "owners") && number(a, "unit") == number(b, "unit") &&
           number(a, "unit_count") == number(b, "unit_count");
}

static int check(json_t *const *parts, uint32_t count, struct shd_err *e)
{
    bool seen[SHD_OWNERS_MAX] = { false };
    if (count == 0)
        return err_set(e, SHD_ENOENT, "no daemon is here");
    for (uint32_t i = 0; i < count; i++) {
        if (!part_is_sound(parts[i]) || seen[number(parts[i], "owner")] ||
            !is_alike(parts[0], parts[i]))
            return err_set(e, SHD_EPROTO,
                           "daemon %" PRIu32 " of %" PRIu32 " answers with what is no part of the "
                           "others' units",
                           i + 1, count);
        seen[number(parts[i], "owner")] = true;
    }
    if (count != (uint32_t)number(parts[0], "owners"))
        return err_set(e, SHD_ENOENT,
                       "%" PRIu32 " daemons are here, not all %" JSON_INTEGER_FORMAT " owners",
                       count, number(parts[0], "owners"));
    return SHD_OK;
}

/* -- Adding --------------------------------------------------------------------------------------
 */

/* The owners' rows of one step. */
struct merged_row {
    const json_t **of; /* owned, [count] */
    uint32_t count;
};

/* Of one unit. False: an owner's part is not known. */
static bool add(const struct merged_row *rows, const char *key, size_t unit, struct fixsum *ret_sum,
                bool *ret_sound)
{
    fixsum_init(ret_sum);
    for (uint32_t i = 0; i < rows->count; i++) {
        const json_t *sums = json_object_get(rows->of[i], "sums");
        const char *text = json_string_value(json_array_get(json_object_get(sums, key), unit));
        struct fixsum part;
        if (text == NULL)
            return false;
        if (!fixsum_parse(text, &part)) {
            *ret_sound = false;
            return false;
        }
        fixsum_merge(ret_sum, &part);
    }
    fixsum_carry(ret_sum);
    return true;
}

/* Units that are not finite at one owner at least, each once, ascending. */
static json_t *merge_bad(const struct merged_row *rows, json_int_t first, size_t units)
{
    json_t *bad = json_array();
    bool *is_bad = calloc(units + 1, sizeof *is_bad);
    for (uint32_t i = 0; is_bad != NULL && i < rows->count; i++) {
        const json_t *list = json_object_get(rows->of[i], "bad"), *unit;
        size_t k;
        json_array_foreach(list, k, unit)
        {
            const json_int_t at = json_integer_value(unit) - first;
            if (at >= 0 && (uint64_t)at < units)
                is_bad[at] = true;
        }
    }
    for (size_t u = 0; is_bad != NULL && u < units; u++)
        if (is_bad[u])
            json_array_append_new(bad, json_integer(first + (json_int_t)u));
    free(is_bad);
    return bad;
}

/* NULL: a daemon's sums are none. */
static json_t *merge_row(const struct merged_row *rows, json_int_t first, size_t units)
{
    json_t *grads = json_array(), *weights = json_array(), *ratios = json_array();
    const json_t *as = rows->of[0];
    const double divisor = json_number_value(json_object_get(as, "divisor"));
    bool sound = true;
    for (size_t u = 0; u < units; u++) {
        struct fixsum grad, update, weight;
        const bool has_grad = add(rows, "grad", u, &grad, &sound);
        const bool has_weight = add(rows, "weight", u, &weight, &sound);
        const bool has_ratio = has_weight && add(rows, "update", u, &update, &sound) &&
                               fixsum_value(&weight) > 0;
        json_array_append_new(grads, has_grad ? real_or_null(sqrt(fixsum_value(&grad)) / divisor)
                                              : json_null());
        json_array_append_new(weights,
                              has_weight ? real_or_null(sqrt(fixsum_value(&weight))) : json_null());
        json_array_append_new(ratios, has_ratio ? real_or_null(sqrt(fixsum_value(&update)) /
                                                               sqrt(fixsum_value(&weight)))
                                                : json_null());
    }
    json_t *row = json_pack("{s:O, s:O, s:O, s:O, s:o, s:o, s:o, s:o}", "step",
                            json_object_get(as, "step"), "skipped", json_object_get(as, "skipped"),
                            "guard", json_object_get(as, "guard"), "divisor",
                            json_object_get(as, "divisor"), "grad", grads, "weight", weights,
                            "ratio", ratios, "bad", merge_bad(rows, first, units));
    if (sound)
        return row;
    json_decref(row);
    return NULL;
}

/* The row of `step`, from *at on. */
static const json_t *find_row(const json_t *rows, size_t *at, json_int_t step)
{
    while (*at < json_array_size(rows) && number(json_array_get(rows, *at), "step") < step)
        ++*at;
    const json_t *row = json_array_get(rows, *at);
    return row != NULL && number(row, "step") == step ? row : NULL;
}

static json_t *merge_rows(json_t *const *parts, uint32_t count, struct shd_err *e)
{
    const size_t units = json_array_size(json_object_get(parts[0], "units"));
    CHECK(count > 0);
    struct merged_row rows = { .of = calloc(count, sizeof(const json_t *)), .count = count };
    size_t *at = calloc(count, sizeof *at);
    json_t *merged = json_array(), *row = NULL;
    const json_t *first;
    size_t k;
    bool sound = rows.of != NULL && at != NULL && merged != NULL;
    if (!sound)
        err_set(e, SHD_ENOMEM, "no memory for the norms of units");
    json_array_foreach(json_object_get(parts[0], "rows"), k, first)
    {
        bool all = sound;
        for (uint32_t i = 0; all && i < count; i++) {
            rows.of[i] = find_row(json_object_get(parts[i], "rows"), &at[i], number(first, "step"));
            all = rows.of[i] != NULL;
        }
        if (!all)
            continue;
        row = merge_row(&rows, number(parts[0], "unit"), units);
        sound = row != NULL && json_array_append_new(merged, row) == 0;
        if (!sound)
            err_set(e, SHD_EPROTO, "a daemon's sums of step %" JSON_INTEGER_FORMAT " are none",
                    number(first, "step"));
    }
    free(rows.of);
    free(at);
    if (sound)
        return merged;
    json_decref(merged);
    return NULL;
}

static json_int_t least(json_t *const *parts, uint32_t count, const char *key)
{
    json_int_t x = number(parts[0], key);
    for (uint32_t i = 1; i < count; i++)
        if (number(parts[i], key) < x)
            x = number(parts[i], key);
    return x;
}

int units_merge(json_t *const *parts, uint32_t count, json_t **ret_answer, struct shd_err *e)
{
    const int r = check(parts, count, e);
    if (r != SHD_OK)
        return r;
    struct shd_err why = { SHD_ENOMEM, "no memory for the norms of units" };
    json_t *rows = merge_rows(parts, count, &why);
    json_t *answer = rows != NULL ? json_pack("{s:O, s:I, s:I, s:I, s:I, s:I, s:I, s:O, s:I, s:O}",
                                              "model", json_object_get(parts[0], "model"), "owners",
                                              number(parts[0], "owners"), "step",
                                              least(parts, count, "step"), "kept",
                                              least(parts, count, "kept"), "every",
                                              least(parts, count, "every"), "unit_count",
                                              number(parts[0], "unit_count"), "unit",
                                              number(parts[0], "unit"), "units",
                                              json_object_get(parts[0], "units"), "next",
                                              least(parts, count, "next"), "rows", rows)
                                  : NULL;
    json_decref(rows);
    if (answer == NULL)
        return err_set(e, why.code, "%s", why.text);
    *ret_answer = answer;
    return SHD_OK;
}

/* -- Asking --------------------------------------------------------------------------------------
 */

static int take(const struct node_daemon *d, json_t **ret_part, struct shd_err *e)
{
    if (d->http == NULL)
        return err_set(e, SHD_ENOMEM, "no memory to ask %s", d->device);
    if (d->http->state != HTTP_DONE && d->http->err.code == SHD_ENOTSUP) { /* it says why */
        char line[160], clean[160];
        snprintf(line, sizeof line, "%.*s", (int)strcspn(d->http->body, "\n"), d->http->body);
        return err_set(e, SHD_ENOENT, "%s: %s", d->device, text_clean(line, clean, sizeof clean));
    }
    if (d->http->state != HTTP_DONE)
        return err_set(e, SHD_EGONE, "%s: %s", d->device, d->http->err.text);
    *ret_part = json_loadb(d->http->body, d->http->body_bytes, 0, NULL);
    return *ret_part != NULL ? SHD_OK
                             : err_set(e, SHD_EPROTO, "%s answers with what is no JSON", d->device);
}

int units_merge_ask(struct node *n, const char *query, json_t **ret_answer, struct shd_err *e)
{
    char target[1024], path[NODE_SOCKET_BYTES];
    json_t **parts = calloc(n->count + 1, sizeof(json_t *));
    int r = SHD_OK;
    if (parts == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the norms of units");
    snprintf(target, sizeof target, "/units?sums=1%s", query);
    for (uint32_t i = 0; i < n->count; i++) {
        node_socket(n, &n->daemons[i], path);
        n->daemons[i].http = http_start(&n->client, path, target, PART_BYTES_MAX, n->timeout_ms);
    }
    http_client_run(&n->client);
    for (uint32_t i = 0; i < n->count; i++) {
        if (r == SHD_OK)
            r = take(&n->daemons[i], &parts[i], e);
        http_free(n->daemons[i].http);
        n->daemons[i].http = NULL;
    }
    if (r == SHD_OK)
        r = units_merge(parts, n->count, ret_answer, e);
    for (uint32_t i = 0; i < n->count; i++)
        json_decref(parts[i]);
    free(parts);
    return r;
}
