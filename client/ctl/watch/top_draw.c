/* See top_draw.h. From the top: a line about the node, one for each model, the daemons, the
 * workers, who waits, and the keys. The bottom keeps its place; the lists share what is left. */
#include "client/ctl/watch/top_draw.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "client/ctl/base/text.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

#define LINE_BYTES     512u
#define MODELS_MAX     4u /* lines of them */
#define SMALL_ROWS     18u
#define WAIT_LINES_MAX 10u
#define HELP_INDENT    9u

/* -- The node and its models ----------------------------------------------------------------- */

/* A model of the node: what its owners say, put together. */
struct model_sum {
    const struct doc_model *m;                          /* of the first owner */
    double step_min, step_max, steps_per_s, loss, norm; /* loss and norm: owner 0's */
};

static double max_of(double a, double b)
{
    return isnan(a) || b > a ? b : a;
}

static void sum_model(struct model_sum *sum, const struct doc_model *m)
{
    if (sum->m == NULL)
        *sum = (struct model_sum){
            .m = m, .step_min = m->step, .step_max = m->step, .steps_per_s = NAN, .loss = NAN
        };
    if (m->step < sum->step_min)
        sum->step_min = m->step;
    sum->step_max = max_of(sum->step_max, m->step);
    sum->steps_per_s = max_of(sum->steps_per_s, m->steps_per_s);
    if (isnan(sum->loss) || m->owner == 0) {
        sum->loss = m->loss;
        sum->norm = m->norm;
    }
}

/* The first MODELS_MAX models; returns how many there are. */
static unsigned sum_models(const struct node *n, struct model_sum sums[MODELS_MAX])
{
    unsigned count = 0;
    for (uint32_t i = 0; i < n->count; i++) {
        const struct doc *d = n->daemons[i].doc;
        for (uint32_t k = 0; n->daemons[i].up && k < d->model_count; k++) {
            unsigned at = 0;
            while (at < count && at < MODELS_MAX &&
                   strcmp(sums[at].m->name, d->models[k].name) != 0)
                at++;
            if (at == MODELS_MAX)
                continue;
            if (at == count)
                sums[count++] = (struct model_sum){ 0 };
            sum_model(&sums[at], &d->models[k]);
        }
    }
    return count;
}

/* Put a part behind what is in line if it fits into so many columns: half a number says something
 * else than the whole one. The first part is there in any case. */
static void add_part(char line[LINE_BYTES], unsigned cols, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static void add_part(char line[LINE_BYTES], unsigned cols, const char *fmt, ...)
{
    char part[LINE_BYTES];
    va_list args;
    const size_t used = strlen(line);
    va_start(args, fmt);
    vsnprintf(part, sizeof(part), fmt, args);
    va_end(args);
    const unsigned width = text_width(line) + (used > 0 ? 2 : 0) + text_width(part);
    if (used == 0 || width <= cols)
        snprintf(line + used, LINE_BYTES - used, "%s%s", used > 0 ? "  " : "", part);
}

static void draw_model(const struct model_sum *sum, struct screen *s, unsigned row)
{
    char line[LINE_BYTES] = "", b[TEXT_BYTES];
    const struct doc_model *m = sum->m;
    add_part(line, s->cols, "%s  step %s", m->name, text_count(sum->step_max, b));
    if (sum->step_min < sum->step_max) /* NAN: neither */
        add_part(line, s->cols, "(one daemon: %s)", text_count(sum->step_min, b));
    add_part(line, s->cols, "%s steps/s", text_number(sum->steps_per_s, b));
    if (isfinite(sum->loss))
        add_part(line, s->cols, "loss %s", text_number(sum->loss, b));
    if (isfinite(sum->norm))
        add_part(line, s->cols, "grad norm %s", text_number(sum->norm, b));
    add_part(line, s->cols, "%s units", text_count(m->units, b));
    if (m->checkpoint[0] != '\0')
        add_part(line, s->cols, "checkpoint: %s", m->checkpoint);
    screen_put(s, row, 0, s->cols, LOOK_MARK, line);
}

static void draw_header(const struct top_picture *p, unsigned models, struct screen *s)
{
    char line[LINE_BYTES] = "", clock[16] = "", dir[120];
    struct tm tm;
    const time_t now = time(NULL);
    const uint32_t up = node_up(p->node);
    if (localtime_r(&now, &tm) != NULL)
        strftime(clock, sizeof(clock), "%T", &tm);
    const unsigned room = s->cols > 10 ? s->cols - 10 : 0;
    add_part(line, room, "shardctl top");
    add_part(line, room, "%" PRIu32 "/%" PRIu32 " daemons up", up, p->node->count);
    if (p->paused)
        add_part(line, room, "PAUSED");
    add_part(line, room, "%s%u model%s", models == MODELS_MAX ? ">=" : "", models,
             models == 1 ? "" : "s");
    add_part(line, room, "%" PRIu32 " worker%s", p->join->worker_count,
             p->join->worker_count == 1 ? "" : "s");
    add_part(line, room, "%s", text_clean(p->node->dir, dir, sizeof(dir)));
    screen_look(s, 0, LOOK_HEAD);
    screen_put(s, 0, 0, room, LOOK_HEAD, line);
    screen_put_right(s, 0, s->cols > 9 ? s->cols - 9 : 0, 8, LOOK_HEAD, clock);
}

/* -- Daemons --------------------------------------------------------------------------------- */

enum { D_DEVICE, D_PID, D_PHASE, D_STEP, D_BAR, D_IN, D_MEMORY, D_TOTAL, D_RATE, D_STALE, D_COUNT };
static const struct top_column daemon_columns[D_COUNT] = {
    [D_DEVICE] = { "DEVICE", 6, 0, 8, false },  [D_PID] = { "PID", 7, 4, 0, true },
    [D_PHASE] = { "PHASE", 8, 2, 0, false },    [D_STEP] = { "STEP", 6, 1, 4, true },
    [D_BAR] = { "GRADS", 7, 5, 24, false },     [D_IN] = { "OF ALL", 7, 3, 4, true },
    [D_MEMORY] = { "MEMORY", 8, 7, 24, false }, [D_TOTAL] = { "TOTAL", 8, 6, 2, true },
    [D_RATE] = { "GRAD/S", 9, 8, 2, true },     [D_STALE] = { "STALE", 5, 9, 3, true },
};

/* Returned and expected gradients of all models of a daemon. */
static void sum_returned(const struct doc *d, double *ret_returned, double *ret_expected)
{
    *ret_returned = *ret_expected = 0;
    for (uint32_t i = 0; i < d->model_count; i++) {
        const struct doc_model *m = &d->models[i];
        *ret_returned += m->returned > 0 ? m->returned : 0;
        *ret_expected += m->expected > 0 ? m->expected : 0;
    }
}

static void draw_memory(const struct top_picture *p, const struct doc *d,
                        const struct top_layout *l, double largest, struct screen *s, unsigned row)
{
    char bar[TOP_BAR_BYTES], total[TEXT_BYTES];
    double kinds[DOC_MEMORY];
    const double sum = doc_bytes(d, kinds);
    const double parts[4] = { kinds[DOC_STATE], kinds[DOC_PUBLISH], kinds[DOC_INBOX],
                              sum - kinds[DOC_STATE] - kinds[DOC_PUBLISH] - kinds[DOC_INBOX] };
    top_cell(l, D_MEMORY, s, row, LOOK_PLAIN,
             top_bar(parts, 4, largest, l->width[D_MEMORY], p->utf8, bar));
    top_cell(l, D_TOTAL, s, row, LOOK_PLAIN, text_bytes(sum, total));
}

static void draw_progress(const struct top_picture *p, const struct doc *d,
                          const struct top_layout *l, struct screen *s, unsigned row)
{
    char bar[TOP_BAR_BYTES], b[2][TEXT_BYTES], of[2 * TEXT_BYTES];
    double returned, expected;
    sum_returned(d, &returned, &expected);
    top_cell(l, D_BAR, s, row, LOOK_GOOD,
             top_bar(&returned, 1, expected, l->width[D_BAR], p->utf8, bar));
    snprintf(of, sizeof(of), "%s/%s", text_count(returned, b[0]), text_count(expected, b[1]));
    top_cell(l, D_IN, s, row, LOOK_PLAIN, of);
}

/* "0.1s", short for a narrow column. */
static const char *stale_text(double ms, char *buf)
{
    if (!(ms >= 0))
        snprintf(buf, TEXT_BYTES, "-");
    else if (ms < 99950)
        snprintf(buf, TEXT_BYTES, "%.1fs", ms / 1000);
    else
        snprintf(buf, TEXT_BYTES, "%.0fs", ms < 1e9 ? ms / 1000 : 1e6);
    return buf;
}

/* A daemon that does not answer, or whose loop is stuck: the reason in place of its numbers. */
static void draw_down(const struct top_picture *p, const struct node_daemon *d, const char *why,
                      const struct top_layout *l, struct screen *s, unsigned row)
{
    char line[LINE_BYTES], since[TEXT_BYTES], pid[TEXT_BYTES];
    const unsigned at = l->width[D_DEVICE] + 1;
    const uint64_t from = d->down_ns != 0 && d->down_ns < p->now_ns ? d->down_ns : p->now_ns;
    text_count(d->doc != NULL ? d->doc->pid : NAN, pid);
    if (d->up)
        snprintf(line, sizeof(line), "pid %s: %s", pid, why);
    else if (!d->asked)
        snprintf(line, sizeof(line), "asking");
    else
        snprintf(line, sizeof(line), "unreachable for %s%s%s: %s",
                 text_time((double)(p->now_ns - from) / NS_PER_S, since),
                 d->doc != NULL ? ", was pid " : "", d->doc != NULL ? pid : "", why);
    const enum screen_look look = d->asked ? LOOK_BAD : LOOK_FAINT;
    top_cell(l, D_DEVICE, s, row, look, d->device);
    screen_put(s, row, at, s->cols > at ? s->cols - at : 0, look, line);
}

static void draw_daemon(const struct top_picture *p, const struct node_daemon *d,
                        const struct top_layout *l, double largest, struct screen *s, unsigned row)
{
    char why[DOC_TEXT_BYTES], b[TEXT_BYTES], rate[TEXT_BYTES];
    const bool well = node_healthy(d, why, sizeof(why));
    if (!d->up || d->doc->stale_ms > NODE_STALE_MS) {
        draw_down(p, d, why, l, s, row);
        return;
    }
    const struct doc_model *m = doc_main_model(d->doc);
    top_cell(l, D_DEVICE, s, row, well ? LOOK_PLAIN : LOOK_WARN, d->device);
    top_cell(l, D_PID, s, row, LOOK_PLAIN, text_count(d->doc->pid, b));
    top_cell(l, D_PHASE, s, row, LOOK_PLAIN, m != NULL ? m->phase : "no model");
    top_cell(l, D_STEP, s, row, LOOK_PLAIN, text_count(m != NULL ? m->step : NAN, b));
    draw_progress(p, d->doc, l, s, row);
    draw_memory(p, d->doc, l, largest, s, row);
    top_cell(l, D_RATE, s, row, LOOK_PLAIN, text_bytes(m != NULL ? m->bytes_per_s : NAN, rate));
    top_cell(l, D_STALE, s, row, LOOK_FAINT, stale_text(d->doc->stale_ms, b));
}

static double largest_memory(const struct node *n)
{
    double largest = 0, kinds[DOC_MEMORY];
    for (uint32_t i = 0; i < n->count; i++)
        if (n->daemons[i].up)
            largest = fmax(largest, doc_bytes(n->daemons[i].doc, kinds));
    return largest;
}

/* -- Lists ----------------------------------------------------------------------------------- */

/* Bring list's first row into its bounds, and show them at the right end of its heading. */
static void place_list(struct top_picture *p, enum top_list list, unsigned count, unsigned rows,
                       struct screen *s, unsigned heading)
{
    char where[64];
    const unsigned last = count > rows ? count - rows : 0;
    if (p->first[list] > last)
        p->first[list] = last;
    p->page[list] = rows;
    if (last == 0)
        return;
    snprintf(where, sizeof(where), " %u-%u of %u ", p->first[list] + 1, p->first[list] + rows,
             count);
    const unsigned width = text_width(where);
    if (s->cols > width)
        screen_put(s, heading, s->cols - width, width, LOOK_HEAD, where);
}

static enum screen_look heading_look(const struct top_picture *p, enum top_list list)
{
    return p->focus == list ? LOOK_HEAD : LOOK_MARK;
}

/* As wide as the names are (HOST:PORT of daemons elsewhere), up to a quarter of the screen. */
static unsigned device_width(const struct node *n, unsigned cols)
{
    unsigned width = daemon_columns[D_DEVICE].width;
    for (uint32_t i = 0; i < n->count; i++)
        while (width < text_width(n->daemons[i].device) && width < cols / 4)
            width++;
    return width;
}

static void draw_daemons(struct top_picture *p, struct screen *s, unsigned row, unsigned rows)
{
    struct top_column columns[D_COUNT];
    memcpy(columns, daemon_columns, sizeof(columns));
    columns[D_DEVICE].width = device_width(p->node, s->cols);
    const struct top_layout l = top_layout(columns, D_COUNT, s->cols);
    const double largest = largest_memory(p->node);
    top_heading(&l, s, row, heading_look(p, TOP_DAEMONS));
    place_list(p, TOP_DAEMONS, p->node->count, rows, s, row);
    for (unsigned i = 0; i < rows && p->first[TOP_DAEMONS] + i < p->node->count; i++)
        draw_daemon(p, &p->node->daemons[p->first[TOP_DAEMONS] + i], &l, largest, s, row + 1 + i);
}

/* -- Workers --------------------------------------------------------------------------------- */

enum { W_NAME, W_PID, W_STATE, W_NOW, W_SINCE, W_BAR, W_SLOTS, W_HELD, W_COUNT };
static const struct top_column worker_columns[W_COUNT] = {
    [W_NAME] = { "WORKER", 10, 1, 14, false }, [W_PID] = { "PID", 7, 0, 0, true },
    [W_STATE] = { "STATE", 8, 2, 0, false },   [W_NOW] = { "DOES NOW", 18, 3, 40, false },
    [W_SINCE] = { "SINCE", 7, 4, 0, true },    [W_BAR] = { "SLOTS", 6, 6, 10, false },
    [W_SLOTS] = { "USED", 5, 5, 2, true },     [W_HELD] = { "HOLDS UP", 9, 7, 4, true },
};

static enum screen_look worker_look(const struct join_worker *w)
{
    if (strcmp(w->s.state, "stopped") == 0 || strcmp(w->s.state, "gone") == 0)
        return LOOK_BAD;
    return w->waited_s >= 1 ? LOOK_WARN : LOOK_PLAIN;
}

static void draw_worker(const struct top_picture *p, const struct join_worker *w,
                        const struct top_layout *l, struct screen *s, unsigned row)
{
    char b[2][TEXT_BYTES], now[DOC_TEXT_BYTES], bar[TOP_BAR_BYTES], pair[2 * TEXT_BYTES + 8];
    const enum screen_look look = worker_look(w);
    top_cell(l, W_NAME, s, row, look, w->s.name);
    top_cell(l, W_PID, s, row, look, text_count(w->s.pid, b[0]));
    top_cell(l, W_STATE, s, row, look, w->s.state);
    top_cell(l, W_NOW, s, row, LOOK_PLAIN, join_now(&w->s.now, now, sizeof(now)));
    top_cell(l, W_SINCE, s, row, LOOK_PLAIN, text_time(w->s.now.since_s, b[0]));
    top_cell(l, W_BAR, s, row, LOOK_GOOD,
             top_bar(&w->s.slots_waiting, 1, w->s.slots, l->width[W_BAR], p->utf8, bar));
    snprintf(pair, sizeof(pair), "%s/%s", text_count(w->s.slots_waiting, b[0]),
             text_count(w->s.slots, b[1]));
    top_cell(l, W_SLOTS, s, row, LOOK_PLAIN, pair);
    if (w->waited_for > 0) {
        snprintf(pair, sizeof(pair), "%s: %s", text_count(w->waited_for, b[0]),
                 text_time(w->waited_s, b[1]));
        top_cell(l, W_HELD, s, row, look, pair);
    }
}

static void draw_workers(struct top_picture *p, struct screen *s, unsigned row, unsigned rows)
{
    const struct top_layout l = top_layout(worker_columns, W_COUNT, s->cols);
    const struct join *j = p->join;
    top_heading(&l, s, row, heading_look(p, TOP_WORKERS));
    place_list(p, TOP_WORKERS, j->worker_count, rows, s, row);
    for (unsigned i = 0; i < rows && p->first[TOP_WORKERS] + i < j->worker_count; i++)
        draw_worker(p, &j->workers[p->first[TOP_WORKERS] + i], &l, s, row + 1 + i);
    if (j->worker_count == 0)
        screen_put(s, row + 1, 0, s->cols, LOOK_FAINT, "none is attached");
}

/* -- The bottom ------------------------------------------------------------------------------ */

/* The worst of the node's troubles; "": none. */
static const char *trouble(const struct top_picture *p, char *buf, size_t bytes)
{
    char why[DOC_TEXT_BYTES];
    buf[0] = '\0';
    if (p->trouble != NULL)
        snprintf(buf, bytes, "%s", p->trouble);
    else if (p->join->held_up)
        snprintf(buf, bytes, "%.250s; %.240s", p->join->headline.text, p->join->headline.remedy);
    for (uint32_t i = 0; i < p->node->count && buf[0] == '\0'; i++)
        if (p->node->daemons[i].asked && !node_healthy(&p->node->daemons[i], why, sizeof(why)))
            snprintf(buf, bytes, "%s: %s", p->node->daemons[i].device, why);
    return buf;
}

/* A sentence over as many rows as it needs, at most rows, all but the first indented; returns how
 * many. */
static unsigned draw_wrapped(struct screen *s, unsigned row, unsigned rows, unsigned indent,
                             const char *text)
{
    char part[LINE_BYTES];
    unsigned used = 0;
    size_t from = 0;
    const size_t bytes = strlen(text);
    for (; used < rows && from < bytes; used++) {
        const size_t room = s->cols > 2 * indent ? s->cols - (used > 0 ? indent : 0) : 1;
        size_t n = bytes - from < room ? bytes - from : room;
        if (from + n < bytes && used + 1 < rows) /* back to a blank, if there is one */
            while (n > room / 2 && text[from + n] != ' ')
                n--;
        snprintf(part, sizeof(part), "%*s%.*s", used > 0 ? (int)indent : 0, "", (int)n,
                 text + from);
        screen_put(s, row + used, 0, s->cols, LOOK_PLAIN, part);
        from += n + (text[from + n] == ' ');
    }
    return used;
}

static void draw_waits(const struct top_picture *p, struct screen *s, unsigned row, unsigned lines)
{
    char line[LINE_BYTES], since[TEXT_BYTES];
    const struct join *j = p->join;
    unsigned used = 0;
    screen_look(s, row, LOOK_MARK);
    snprintf(line, sizeof(line), "WAITS, the longest first: %" PRIu32, j->wait_count);
    screen_put(s, row, 0, s->cols, LOOK_MARK, line);
    for (unsigned i = 0; used < lines && i < j->wait_count; i++) {
        const struct doc_wait *w = &j->waits[i].w;
        if (w->text[0] != '\0')
            snprintf(line, sizeof(line), "%s", w->text);
        else
            snprintf(line, sizeof(line), "a wait for %s for %s", w->kind,
                     text_time(w->since_s, since));
        used += draw_wrapped(s, row + 1 + used, lines - used, 2, line);
    }
    if (trouble(p, line, sizeof(line))[0] != '\0')
        screen_put(s, row + 1 + lines, 0, s->cols, LOOK_BAD, line);
}

static void draw_keys(const struct top_picture *p, struct screen *s)
{
    char line[LINE_BYTES] = "";
    add_part(line, s->cols, "q quit");
    add_part(line, s->cols, "h help");
    add_part(line, s->cols, "s sort: %s", join_sort_name(p->sort));
    add_part(line, s->cols, "p %s", p->paused ? "go on" : "pause");
    add_part(line, s->cols, "Tab list");
    add_part(line, s->cols, "arrows PgUp PgDn scroll");
    screen_put(s, s->rows - 1, 0, s->cols, LOOK_FAINT, line);
}

static void draw_help(const struct top_picture *p, struct screen *s)
{
    static const char *const lines[] = {
        "q        quit; any key goes back from here",
        "s        next order of the workers",
        "p        pause, or go on",
        "Tab      which list the keys scroll: arrows j k, PgUp PgDn, Home, End",
        "",
        "GRADS    summed in the open step, of all (units x micro-batches)",
        "MEMORY   of the daemon, against the largest one's: state, publish, inbox, other",
        "GRAD/S   bytes of gradients taken, over the last 10 s",
        "STALE    age of what the daemon said; above 2 s its event loop is stuck",
        "SLOTS    gradients of the worker that its daemons have not taken yet",
        "HOLDS UP how many workers wait for this one, and how long",
        "loss     of the last step: the first number that workers report, mean of a micro-batch",
        "WAITS    below 1 s they are normal; below them is who holds training up, and what to do",
    };
    char bar[LINE_BYTES];
    unsigned row = 1;
    for (unsigned i = 0; i < ARRAY_SIZE(lines) && row < s->rows; i++)
        row += lines[i][0] == '\0' ? 1 : draw_wrapped(s, row, s->rows - row, HELP_INDENT, lines[i]);
    snprintf(bar, sizeof(bar), "bars:    %s",
             p->utf8 ? "\u2588 state  \u2593 publish  \u2592 inbox  "
                       "\u2591 other"
                     : "# state  = publish  + inbox  - other");
    if (row < s->rows)
        screen_put(s, row, 0, s->cols, LOOK_PLAIN, bar);
}

/* -- All of it ------------------------------------------------------------------------------- */

/* Lines of waits at the bottom: always as many, so that nothing jumps. */
static unsigned wait_lines(unsigned rows)
{
    const unsigned lines = rows < SMALL_ROWS ? 1 : rows / 7;
    return lines < WAIT_LINES_MAX ? lines : WAIT_LINES_MAX;
}

/* Share rows between the lists: the daemons get a third, or what the workers leave. */
static void share(unsigned rows, unsigned daemons, unsigned workers, unsigned ret_rows[TOP_LISTS])
{
    unsigned d = daemons;
    if (d + workers > rows) {
        const unsigned left = rows > workers ? rows - workers : 0;
        d = d < rows / 3 ? d : rows / 3;
        if (left > d)
            d = left < daemons ? left : daemons;
    }
    ret_rows[TOP_DAEMONS] = d;
    ret_rows[TOP_WORKERS] = rows - d;
}

void top_draw(struct top_picture *p, struct screen *s)
{
    struct model_sum sums[MODELS_MAX];
    unsigned rows[TOP_LISTS];
    const unsigned models = sum_models(p->node, sums);
    if (s->rows < 2 || s->cols < 2)
        return;
    draw_header(p, models, s);
    if (p->help) {
        draw_help(p, s);
        return;
    }
    const unsigned lines = models < MODELS_MAX && s->rows >= SMALL_ROWS ? models : models > 0;
    for (unsigned i = 0; i < lines; i++)
        draw_model(&sums[i], s, 1 + i);
    const unsigned waits = wait_lines(s->rows);
    const unsigned fixed = 1 + lines + 2 + (waits + 2) + 1;
    share(s->rows > fixed ? s->rows - fixed : 0, p->node->count, p->join->worker_count, rows);
    unsigned row = 1 + lines;
    draw_daemons(p, s, row, rows[TOP_DAEMONS]);
    row += 1 + rows[TOP_DAEMONS];
    draw_workers(p, s, row, rows[TOP_WORKERS]);
    draw_waits(p, s, row + 1 + rows[TOP_WORKERS], waits);
    draw_keys(p, s);
}
