/* See units_json.h. */
#include "daemon/view/units_json.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "daemon/model/norms.h"
#include "daemon/view/snapshot.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/spec/guard.h"

#define CELLS_AT_ONCE 256u /* copied: some 10 us */

/* What is asked for, within what there is. */
struct window {
    const struct view_model *vm;
    uint32_t unit, units; /* [unit, unit + units) */
    uint64_t from, end;   /* steps */
    bool sums;
    struct norms_cell *cells; /* owned, [units]: of the step at hand */
};

static const struct view_model *find_model(const struct view_snapshot *s, const char *name,
                                           struct shd_err *e)
{
    const struct view_model *found = NULL;
    for (uint32_t i = 0; i < s->model_count; i++) {
        const struct view_model *vm = &s->models[i];
        if (name[0] != '\0' ? strcmp(vm->spec->name, name) != 0 : false)
            continue;
        if (found != NULL) {
            err_set(e, SHD_ENOENT, "several models are open here: which one?");
            return NULL;
        }
        found = vm;
    }
    if (found == NULL && name[0] == '\0')
        err_set(e, SHD_ENOENT, "no model is open here: a worker makes one");
    else if (found == NULL)
        err_set(e, SHD_ENOENT, "no open model '%.100s' here", name);
    return found;
}

static uint64_t earlier(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Steps whose updates are done, and whose rows are not being written over. */
static int make_window(const struct view_snapshot *s, const struct units_question *q,
                       struct window *ret, struct shd_err *e)
{
    const struct view_model *vm = find_model(s, q->model, e);
    if (vm == NULL)
        return SHD_ENOENT;
    const uint32_t all = vm->spec->unit_count;
    const uint64_t kept = norms_steps(vm->metrics.norms) - 1, step = vm->step;
    if (q->unit >= all)
        return err_set(e, SHD_ERANGE, "unit %" PRIu64 ": model '%.80s' has %" PRIu32, q->unit,
                       vm->spec->name, all);
    *ret = (struct window){ .vm = vm, .unit = (uint32_t)q->unit, .sums = q->sums };
    ret->units = (uint32_t)earlier(all - q->unit, UNITS_AT_ONCE);
    const uint64_t rows = earlier(kept, UNITS_CELLS_MAX / ret->units);
    const uint64_t oldest = step > kept ? step - kept : 0, last = step > rows ? step - rows : 0;
    ret->from = q->from == UINT64_MAX ? last : q->from > oldest ? earlier(q->from, step) : oldest;
    ret->end = earlier(ret->from + rows, step);
    ret->cells = sys_calloc(ret->units, sizeof *ret->cells);
    return ret->cells != NULL ? SHD_OK : err_set(e, SHD_ENOMEM, "out of memory");
}

/* -- Rows ---------------------------------------------------------------------------------------
 */

static json_t *real_or_null(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

static json_t *sum_text(const struct fixsum *sum)
{
    char text[FIXSUM_TEXT_BYTES];
    fixsum_text(sum, text);
    return json_string_nocheck(text);
}

/* Numbers of one step, each [units]. */
struct lists {
    json_t *grad, *weight, *ratio, *bad;        /* bad: indices of units */
    json_t *grad_sum, *update_sum, *weight_sum; /* NULL: not asked for */
};

static void add_cell(const struct window *w, uint32_t i, double divisor, const struct lists *to)
{
    const struct norms_cell *c = &w->cells[i];
    const bool grad = c->gradient == NORMS_FINITE, change = c->change == NORMS_FINITE;
    const double update = fixsum_value(&c->update), weight = fixsum_value(&c->weight);
    json_array_append_new(to->grad, grad ? real_or_null(sqrt(fixsum_value(&c->grad)) / divisor)
                                         : json_null());
    json_array_append_new(to->weight, change ? json_real(sqrt(weight)) : json_null());
    json_array_append_new(
        to->ratio, change && weight > 0 ? real_or_null(sqrt(update) / sqrt(weight)) : json_null());
    if (c->gradient == NORMS_NOT_FINITE || c->change == NORMS_NOT_FINITE)
        json_array_append_new(to->bad, json_integer((json_int_t)w->unit + i));
    if (!w->sums)
        return;
    json_array_append_new(to->grad_sum, grad ? sum_text(&c->grad) : json_null());
    json_array_append_new(to->update_sum, change ? sum_text(&c->update) : json_null());
    json_array_append_new(to->weight_sum, change ? sum_text(&c->weight) : json_null());
}

static json_t *row_json(const struct window *w, const struct norms_step *step)
{
    const struct lists to = {
        .grad = json_array(),
        .weight = json_array(),
        .ratio = json_array(),
        .bad = json_array(),
        .grad_sum = w->sums ? json_array() : NULL,
        .update_sum = w->sums ? json_array() : NULL,
        .weight_sum = w->sums ? json_array() : NULL,
    };
    for (uint32_t i = 0; i < w->units; i += CELLS_AT_ONCE) {
        const uint32_t count = w->units - i < CELLS_AT_ONCE ? w->units - i : CELLS_AT_ONCE;
        norms_get_cells(w->vm->metrics.norms, step->step, w->unit + i, count, &w->cells[i]);
    }
    for (uint32_t i = 0; i < w->units; i++)
        add_cell(w, i, step->divisor, &to);
    json_t *row = json_pack("{s:I, s:b, s:o, s:f, s:o, s:o, s:o, s:o}", "step",
                            (json_int_t)step->step, "skipped", (int)step->skipped, "guard",
                            step->guard != 0 ? json_string(guard_name(step->guard)) : json_null(),
                            "divisor", step->divisor, "grad", to.grad, "weight", to.weight, "ratio",
                            to.ratio, "bad", to.bad);
    if (w->sums && row != NULL)
        json_object_set_new(row, "sums",
                            json_pack("{s:o, s:o, s:o}", "grad", to.grad_sum, "update",
                                      to.update_sum, "weight", to.weight_sum));
    return row;
}

static json_t *rows_json(const struct window *w)
{
    json_t *rows = json_array();
    for (uint64_t step = w->from; step < w->end; step++) {
        struct norms_step of;
        if (norms_get_step(w->vm->metrics.norms, step, &of))
            json_array_append_new(rows, row_json(w, &of));
    }
    return rows;
}

static json_t *names_json(const struct window *w)
{
    json_t *names = json_array();
    for (uint32_t i = 0; i < w->units; i++)
        json_array_append_new(names, json_string(w->vm->spec->units[w->unit + i].name));
    return names;
}

int units_json(const struct view_snapshot *s, const struct units_question *q, char **ret_text,
               size_t *ret_bytes, struct shd_err *e)
{
    struct window w = { .units = 0 };
    const int r = make_window(s, q, &w, e);
    if (r != SHD_OK)
        return r;
    const struct view_model *vm = w.vm;
    CHECK(vm != NULL);
    json_t *root = json_pack(
        "{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:I, s:o}", "model", vm->spec->name, "owner",
        (json_int_t)vm->owner, "owners", (json_int_t)vm->owners, "step", (json_int_t)vm->step,
        "kept", (json_int_t)norms_steps(vm->metrics.norms) - 1, "every", (json_int_t)NORMS_EVERY,
        "unit_count", (json_int_t)vm->spec->unit_count, "unit", (json_int_t)w.unit, "units",
        names_json(&w), "next", (json_int_t)w.end, "rows", rows_json(&w));
    char *text = root != NULL ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    free(w.cells);
    if (text == NULL)
        return err_set(e, SHD_ENOMEM, "out of memory");
    *ret_text = text;
    *ret_bytes = strlen(text);
    return SHD_OK;
}
