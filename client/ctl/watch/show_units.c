/* See show_units.h. Asked at the daemons' status sockets, UNITS_AT_ONCE units at a time, of the
 * same steps. */
#include "client/ctl/watch/show_units.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/text.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/watch/show_draw.h"
#include "client/ctl/watch/status_node.h"
#include "client/ctl/watch/units_merge.h"

#define NAME_BYTES 128u

/* -- Asking --------------------------------------------------------------------------------------
 */

/* from: the first step; -1: as the owners like. */
static int ask(struct node *n, const struct show_units *o, json_int_t from, json_int_t unit,
               json_t **ret_part, struct shd_err *e)
{
    char query[900];
    size_t used = 0;
    query[0] = '\0';
    if (o->model != NULL)
        used += (size_t)snprintf(query, sizeof query, "&model=");
    for (const char *at = o->model; at != NULL && *at != '\0' && used + 80 < sizeof query; at++)
        used += (size_t)snprintf(query + used, sizeof query - used, "%%%02x", (unsigned char)*at);
    if (from >= 0)
        used += (size_t)snprintf(query + used, sizeof query - used, "&from=%" JSON_INTEGER_FORMAT,
                                 from);
    snprintf(query + used, sizeof query - used, "&unit=%" JSON_INTEGER_FORMAT, unit);
    return units_merge_ask(n, query, ret_part, e);
}

static json_int_t number(const json_t *o, const char *key)
{
    return json_integer_value(json_object_get(o, key));
}

static json_t *row_of(const json_t *part, json_int_t step)
{
    json_t *row;
    size_t i;
    json_array_foreach(json_object_get(part, "rows"), i, row)
    {
        if (number(row, "step") == step)
            return row;
    }
    return NULL;
}

/* More units behind those of the whole; a step that has them not is none any more. */
static void extend(json_t *whole, json_t *part)
{
    static const char *const lists[] = { "grad", "weight", "ratio", "bad" };
    json_t *rows = json_object_get(whole, "rows");
    json_array_extend(json_object_get(whole, "units"), json_object_get(part, "units"));
    for (size_t i = json_array_size(rows); i-- > 0;) {
        json_t *row = json_array_get(rows, i), *more = row_of(part, number(row, "step"));
        for (size_t k = 0; more != NULL && k < ARRAY_SIZE(lists); k++)
            json_array_extend(json_object_get(row, lists[k]), json_object_get(more, lists[k]));
        if (more == NULL)
            json_array_remove(rows, i);
    }
}

static int ask_all(struct node *n, const struct show_units *o, json_t **ret_whole,
                   struct shd_err *e)
{
    json_t *whole = NULL, *part = NULL;
    int r = ask(n, o, /* from= */ -1, 0, &whole, e);
    const json_int_t all = number(whole, "unit_count");
    const json_t *first = json_array_get(json_object_get(whole, "rows"), 0);
    while (r == SHD_OK && first != NULL &&
           (json_int_t)json_array_size(json_object_get(whole, "units")) < all) {
        const json_int_t had = (json_int_t)json_array_size(json_object_get(whole, "units"));
        r = ask(n, o, number(first, "step"), had, &part, e);
        if (r == SHD_OK && json_array_size(json_object_get(part, "units")) == 0)
            r = err_set(e, SHD_EPROTO, "no names of units from %" JSON_INTEGER_FORMAT " on", had);
        if (r == SHD_OK)
            extend(whole, part);
        json_decref(part);
        part = NULL;
        first = json_array_get(json_object_get(whole, "rows"), 0);
    }
    if (r == SHD_OK && first == NULL)
        r = err_set(e, SHD_ENOENT,
                    "no step of '%.60s' has been seen by all its owners since they were started",
                    json_string_value(json_object_get(whole, "model")));
    if (r == SHD_OK)
        *ret_whole = whole;
    else
        json_decref(whole);
    return r;
}

/* -- Showing -------------------------------------------------------------------------------------
 */

/* NaN: it is not known. */
static double at(const json_t *row, const char *key, size_t unit)
{
    const json_t *x = json_array_get(json_object_get(row, key), unit);
    return json_is_number(x) ? json_number_value(x) : (double)NAN;
}

static bool is_bad(const json_t *row, size_t unit)
{
    const json_t *bad = json_object_get(row, "bad"), *x;
    size_t i;
    json_array_foreach(bad, i, x)
    {
        if (json_integer_value(x) == (json_int_t)unit)
            return true;
    }
    return false;
}

/* A step, and the one at or before it whose update was measured (NULL: none). */
struct shown {
    const json_t *whole, *row, *measured;
    size_t units;
    double squares; /* of all units' gradients */
};

static bool is_measured(const json_t *row, size_t units)
{
    for (size_t u = 0; u < units; u++)
        if (!isnan(at(row, "ratio", u)))
            return true;
    return false;
}

static struct shown shown_of(const json_t *whole, size_t index)
{
    const json_t *rows = json_object_get(whole, "rows");
    struct shown s = { whole, json_array_get(rows, index), NULL,
                       json_array_size(json_object_get(whole, "units")), 0 };
    for (size_t i = index + 1; i-- > 0 && s.measured == NULL;)
        if (is_measured(json_array_get(rows, i), s.units))
            s.measured = json_array_get(rows, i);
    for (size_t u = 0; u < s.units; u++) {
        const double norm = at(s.row, "grad", u);
        s.squares += isnan(norm) ? 0 : norm * norm;
    }
    return s;
}

static const char *unit_name(const struct shown *s, size_t unit)
{
    const char *name = json_string_value(json_array_get(json_object_get(s->whole, "units"), unit));
    return name != NULL ? name : "?";
}

static json_t *unit_json(const struct shown *s, size_t u)
{
    const double norm = at(s->row, "grad", u);
    return json_pack(
        "{s:s, s:o, s:o, s:b, s:o, s:o}", "unit", unit_name(s, u), "grad_norm",
        isnan(norm) ? json_null() : json_real(norm), "share",
        isnan(norm) || s->squares == 0 ? json_null() : json_real(norm * norm / s->squares),
        "finite", (int)!is_bad(s->row, u), "update_ratio",
        isnan(at(s->measured, "ratio", u)) ? json_null() : json_real(at(s->measured, "ratio", u)),
        "weight_norm",
        isnan(at(s->measured, "weight", u)) ? json_null()
                                            : json_real(at(s->measured, "weight", u)));
}

static void print_json(const struct shown *s)
{
    json_t *units = json_array();
    for (size_t u = 0; u < s->units; u++)
        json_array_append_new(units, unit_json(s, u));
    verb_json(json_pack("{s:O, s:O, s:O, s:O, s:f, s:o, s:o}", "model",
                        json_object_get(s->whole, "model"), "step", json_object_get(s->row, "step"),
                        "skipped", json_object_get(s->row, "skipped"), "guard",
                        json_object_get(s->row, "guard"), "grad_norm", sqrt(s->squares),
                        "measured_step",
                        s->measured != NULL ? json_incref(json_object_get(s->measured, "step"))
                                            : json_null(),
                        "units", units),
              JSON_COMPACT, stdout);
}

static const char *number_or_dash(double x, char buf[DRAW_NUMBER_BYTES])
{
    return isnan(x) ? "-" : draw_number(x, buf);
}

static void print_unit(const struct shown *s, size_t u, int width)
{
    char name[NAME_BYTES], norm[DRAW_NUMBER_BYTES], ratio[DRAW_NUMBER_BYTES],
        weight[DRAW_NUMBER_BYTES], share[DRAW_NUMBER_BYTES] = "-";
    const double grad = at(s->row, "grad", u);
    if (!isnan(grad) && s->squares > 0)
        snprintf(share, sizeof share, "%.1f %%", 100 * grad * grad / s->squares);
    printf("%-*s  %13s  %8s  %13s  %13s%s\n", width, text_clean(unit_name(s, u), name, sizeof name),
           number_or_dash(grad, norm), share, number_or_dash(at(s->measured, "ratio", u), ratio),
           number_or_dash(at(s->measured, "weight", u), weight),
           is_bad(s->row, u) ? "  NOT FINITE" : "");
}

static void print_step(const struct shown *s)
{
    char model[NAME_BYTES], norm[DRAW_NUMBER_BYTES], guard[NAME_BYTES];
    const char *by = json_string_value(json_object_get(s->row, "guard"));
    int width = (int)strlen("unit");
    for (size_t u = 0; u < s->units; u++) {
        const int wide = (int)text_width(text_clean(unit_name(s, u), model, sizeof model));
        width = wide > width ? wide : width;
    }
    printf("model %s, step %" JSON_INTEGER_FORMAT ", gradient norm %s",
           text_clean(json_string_value(json_object_get(s->whole, "model")), model, sizeof model),
           number(s->row, "step"), draw_number(sqrt(s->squares), norm));
    if (json_is_true(json_object_get(s->row, "skipped")))
        printf(", SKIPPED: %s",
               by != NULL ? text_clean(by, guard, sizeof guard) : "the gradient is not finite");
    if (s->measured != NULL)
        printf("; update and parameters of step %" JSON_INTEGER_FORMAT,
               number(s->measured, "step"));
    printf("\n%-*s  %13s  %8s  %13s  %13s\n", width, "unit", "gradient norm", "share",
           "update/weight", "weight norm");
    for (size_t u = 0; u < s->units; u++)
        print_unit(s, u, width);
}

int show_units(const struct show_units *o)
{
    struct node n;
    struct shd_err e = { 0 };
    json_t *whole = NULL;
    const int opened = node_open(o->address, /* hosts= */ NULL, &n);
    if (opened != CTL_OK)
        return opened;
    text_init();
    const int r = ask_all(&n, o, &whole, &e);
    const size_t rows = json_array_size(json_object_get(whole, "rows"));
    const size_t last = o->last > 0 ? o->last : 1;
    for (size_t i = rows > last ? rows - last : 0; i < rows; i++) {
        const struct shown s = shown_of(whole, i);
        if (o->json)
            print_json(&s);
        else
            print_step(&s);
    }
    json_decref(whole);
    node_close(&n);
    return r == SHD_OK ? CTL_OK : ctl_fail("%s", e.text);
}
