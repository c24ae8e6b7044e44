/* The timeline of a plan: first laid out in columns by carrying out its operations against a link
 * and a compute lane, then printed, with the repeating middle of long models left out. */
#include "client/ctl/plan/plan_draw.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"

#define LINE_COLUMNS 100u /* characters */
#define LABEL_BYTES  10u

enum lane { LANE_FETCH, LANE_COMPUTE, LANE_RETURN };

struct timeline_mark {
    enum lane lane;
    enum plan_op_kind kind;
    uint32_t unit, start, columns;
};

/* -- Laying out ------------------------------------------------------------------------------ */

struct layout {
    const struct spec *spec; /* borrowed */
    struct timeline t;
    uint32_t column_capacity;
    uint32_t now, link_free; /* columns */
    uint32_t *ready;         /* owned, [units]: when the fetch under way is through */
    bool *grad;              /* owned, [units] */
    uint32_t live_units, live_grads;
    bool failed; /* out of memory */
};

static void put_mark(struct layout *l, enum lane lane, const struct plan_op *op, uint32_t start,
                     uint32_t columns)
{
    l->t.marks[l->t.mark_count++] = (struct timeline_mark){ lane, op->kind, op->unit, start,
                                                            columns };
}

static bool grow_columns(struct layout *l, uint32_t columns)
{
    if (columns <= l->column_capacity)
        return true;
    const uint32_t capacity = columns * 2;
    uint32_t *held = sys_realloc(l->t.held, capacity * sizeof *held);
    l->t.held = held != NULL ? held : l->t.held;
    uint32_t *grads = sys_realloc(l->t.grads, capacity * sizeof *grads);
    l->t.grads = grads != NULL ? grads : l->t.grads;
    if (held == NULL || grads == NULL)
        return false;
    l->column_capacity = capacity;
    return true;
}

static void advance(struct layout *l, uint32_t to)
{
    if (l->failed || !grow_columns(l, to + 1)) {
        l->failed = true;
        return;
    }
    CHECK(l->t.held != NULL);
    CHECK(l->t.grads != NULL);
    for (; l->now < to; l->now++) {
        l->t.held[l->now] = l->live_units;
        l->t.grads[l->now] = l->live_grads;
    }
}

/* A transfer takes one column of the link, from now on or when those before it are through. */
static uint32_t transfer(struct layout *l, enum lane lane, const struct plan_op *op)
{
    const uint32_t start = l->now > l->link_free ? l->now : l->link_free;
    put_mark(l, lane, op, start, 1);
    l->link_free = start + 1;
    return l->link_free;
}

static void begin_grad(struct layout *l, uint32_t unit)
{
    if (l->grad[unit] || l->spec->units[unit].frozen)
        return;
    l->grad[unit] = true;
    l->live_grads++;
}

static void lay_backward(struct layout *l, const struct plan_op *op)
{
    const struct spec_unit *su = &l->spec->units[op->unit];
    begin_grad(l, op->unit);
    for (uint32_t i = 0; i < su->uses_count; i++)
        begin_grad(l, su->uses[i]);
    put_mark(l, LANE_COMPUTE, op, l->now, 2);
    advance(l, l->now + 2);
}

static void lay_op(struct layout *l, const struct plan_op *op)
{
    switch (op->kind) {
    case PLAN_FETCH:
        l->ready[op->unit] = transfer(l, LANE_FETCH, op);
        l->live_units++;
        break;
    case PLAN_WAIT:
        l->t.idle += l->ready[op->unit] > l->now ? l->ready[op->unit] - l->now : 0;
        advance(l, l->ready[op->unit] > l->now ? l->ready[op->unit] : l->now);
        break;
    case PLAN_FORWARD:
        put_mark(l, LANE_COMPUTE, op, l->now, 1);
        advance(l, l->now + 1);
        break;
    case PLAN_BACKWARD:
        lay_backward(l, op);
        break;
    case PLAN_RETURN:
        transfer(l, LANE_RETURN, op);
        l->grad[op->unit] = false;
        l->live_grads--;
        break;
    case PLAN_FREE:
        l->live_units--;
        break;
    case PLAN_PREPARE:
        advance(l, l->link_free > l->now ? l->link_free : l->now);
        break;
    case PLAN_COMMIT:
        put_mark(l, LANE_COMPUTE, op, l->now, 1);
        advance(l, l->now + 1);
        break;
    }
}

int timeline_new(const struct plan *plan, const struct spec *spec, struct timeline *ret_timeline,
                 struct shd_err *e)
{
    struct layout l = { .spec = spec };
    l.ready = sys_calloc(spec->unit_count, sizeof *l.ready);
    l.grad = sys_calloc(spec->unit_count, sizeof *l.grad);
    l.t.marks = sys_calloc(plan->op_count, sizeof *l.t.marks);
    l.t.micro_start = sys_calloc((size_t)plan->micros + 1, sizeof *l.t.micro_start);
    l.failed = l.ready == NULL || l.grad == NULL || l.t.marks == NULL || l.t.micro_start == NULL;
    for (uint32_t i = 0, next = 0; i < plan->op_count && !l.failed; i++) {
        const struct plan_op *op = &plan->ops[i];
        for (; next < plan->micros && op->kind < PLAN_PREPARE && next <= op->micro; next++)
            l.t.micro_start[next] = l.now;
        lay_op(&l, op);
    }
    free(l.ready);
    free(l.grad);
    if (l.failed) {
        timeline_deinit(&l.t);
        return err_set(e, SHD_ENOMEM, "no memory to lay out %" PRIu32 " operations",
                       plan->op_count);
    }
    l.t.columns = l.now;
    l.t.micro_start[plan->micros] = l.now;
    *ret_timeline = l.t;
    return SHD_OK;
}

void timeline_deinit(struct timeline *t)
{
    free(t->marks);
    free(t->micro_start);
    free(t->held);
    free(t->grads);
    *t = (struct timeline){ 0 };
}

/* -- Drawing --------------------------------------------------------------------------------- */

struct window { /* one micro-batch */
    uint32_t first, end;
    uint32_t backward; /* its first column */
    uint32_t cells;    /* of the line at most */
    uint32_t width;    /* characters of a cell */
};

/* True for a column that is shown: of a long window its begin, the begin of backward, and its end.
 */
static bool shown(const struct window *w, uint32_t column)
{
    const uint32_t edge = w->cells / 4;
    if (w->end - w->first <= w->cells)
        return true;
    return column < w->first + edge || column + edge >= w->end ||
           (column + edge / 2 >= w->backward && column < w->backward + edge + edge / 2);
}

static struct window window_of(const struct timeline *t, const struct plan *plan,
                               const struct spec *spec, uint32_t micro)
{
    struct window w = { .first = t->micro_start[micro],
                        .end = t->micro_start[micro + 1],
                        .width = 3 };
    w.backward = w.end;
    for (uint32_t n = spec->unit_count - 1; n >= 10; n /= 10)
        w.width++;
    w.cells = (LINE_COLUMNS - LABEL_BYTES) / w.width;
    CHECK(micro < plan->micros);
    for (uint32_t i = t->mark_count; i-- > 0;)
        if (t->marks[i].kind == PLAN_BACKWARD && t->marks[i].start >= w.first &&
            t->marks[i].start < w.end)
            w.backward = t->marks[i].start;
    return w;
}

/* Print a line without the blanks at its end. */
static void print_line(char *line, FILE *out)
{
    size_t bytes = strlen(line);
    while (bytes > 0 && line[bytes - 1] == ' ')
        bytes--;
    line[bytes] = '\0';
    fprintf(out, "%s\n", line);
}

/* text[cells of the whole window][width] to one line, elided. */
static void print_cells(const struct window *w, const char *label, const char *text, FILE *out)
{
    char line[4 * LINE_COLUMNS];
    size_t used = (size_t)snprintf(line, sizeof line, "%-*s", (int)LABEL_BYTES, label);
    bool gap = false;
    for (uint32_t column = w->first; column < w->end; column++) {
        if (!shown(w, column)) {
            gap = true;
            continue;
        }
        const char *cell = text + (size_t)(column - w->first) * w->width;
        used += (size_t)snprintf(line + used, sizeof line - used, "%s%.*s", gap ? ".. " : "",
                                 (int)w->width, cell);
        gap = false;
        CHECK(used < sizeof line);
    }
    print_line(line, out);
}

static void write_cell(const struct window *w, char *text, uint32_t column, const char *cell)
{
    if (column < w->first || column >= w->end)
        return;
    char *place = text + (size_t)(column - w->first) * w->width;
    for (uint32_t i = 0; i < w->width && cell[i] != '\0'; i++)
        place[i] = cell[i];
}

/* "F3 ", "B3-" "-- ", "3  ", "C  " */
static void write_mark(const struct window *w, char *text, const struct timeline_mark *m)
{
    static const char letters[] = { [PLAN_FORWARD] = 'F', [PLAN_BACKWARD] = 'B' };
    char cell[16];
    if (m->kind == PLAN_COMMIT)
        snprintf(cell, sizeof cell, "C");
    else if (m->lane == LANE_COMPUTE)
        snprintf(cell, sizeof cell, "%c%" PRIu32, letters[m->kind], m->unit);
    else
        snprintf(cell, sizeof cell, "%" PRIu32, m->unit);
    for (uint32_t i = 0; i < m->columns; i++) {
        size_t bytes = strlen(cell);
        for (; i + 1 < m->columns && bytes < w->width; bytes++)
            cell[bytes] = '-';
        for (; i > 0 && bytes + 1 < w->width; bytes++)
            cell[bytes] = '-';
        cell[bytes] = '\0';
        write_cell(w, text, m->start + i, cell);
        cell[0] = '\0';
    }
}

static void draw_lane(const struct timeline *t, const struct window *w, enum lane lane,
                      const char *label, char *text, FILE *out)
{
    memset(text, ' ', (size_t)(w->end - w->first) * w->width);
    for (uint32_t column = w->first; column < w->end && lane == LANE_COMPUTE; column++)
        write_cell(w, text, column, ".");
    for (uint32_t i = 0; i < t->mark_count; i++)
        if (t->marks[i].lane == lane && t->marks[i].start < w->end &&
            t->marks[i].start + t->marks[i].columns > w->first)
            write_mark(w, text, &t->marks[i]);
    print_cells(w, label, text, out);
}

static void draw_counts(const struct window *w, const uint32_t *counts, const char *label,
                        char *text, FILE *out)
{
    memset(text, ' ', (size_t)(w->end - w->first) * w->width);
    for (uint32_t column = w->first; column < w->end; column++) {
        char cell[16];
        snprintf(cell, sizeof cell, "%" PRIu32, counts[column]);
        write_cell(w, text, column, cell);
    }
    print_cells(w, label, text, out);
}

static void draw_micro(const struct timeline *t, const struct plan *plan, const struct spec *spec,
                       uint32_t micro, FILE *out)
{
    const struct window w = window_of(t, plan, spec, micro);
    char *text = sys_malloc((size_t)(w.end - w.first) * w.width + 1);
    if (text == NULL) {
        fprintf(out, "(no memory to draw micro-batch %" PRIu32 ")\n", micro);
        return;
    }
    if (plan->micros > 1)
        fprintf(out, "micro-batch %" PRIu32 " of %" PRIu32 "\n", micro, plan->micros);
    draw_lane(t, &w, LANE_FETCH, "fetch", text, out);
    draw_lane(t, &w, LANE_COMPUTE, "compute", text, out);
    draw_lane(t, &w, LANE_RETURN, "return", text, out);
    draw_counts(&w, t->held, "units", text, out);
    draw_counts(&w, t->grads, "grads", text, out);
    free(text);
}

void timeline_draw(const struct timeline *t, const struct plan *plan, const struct spec *spec,
                   FILE *out)
{
    for (uint32_t micro = 0; micro < plan->micros; micro++) {
        if (micro > 0)
            fputc('\n', out);
        draw_micro(t, plan, spec, micro, out);
        if (micro == 0 && plan->micros > 3) {
            fprintf(out, "\n(micro-batches 1 to %" PRIu32 " left out)\n", plan->micros - 2);
            micro = plan->micros - 2;
        }
    }
    fprintf(out, "\ncompute waits in %" PRIu32 " of %" PRIu32 " columns for a fetch\n", t->idle,
            t->columns);
}
