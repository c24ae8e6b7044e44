/* See show_draw.h. */
#include "client/ctl/watch/show_draw.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "proto/base/check.h"

#define BAR_COLUMNS 24
#define EXP_MIN     (-149) /* of bin 0 */

static const char *const quantile_names[SHD_STATS_QUANTILES] = { "1%",  "5%",  "25%", "50%",
                                                                 "75%", "95%", "99%" };

const char *draw_number(double x, char buf[DRAW_NUMBER_BYTES])
{
    if (isnan(x))
        return "nan";
    snprintf(buf, DRAW_NUMBER_BYTES, "%.6g", x);
    return buf;
}

json_t *draw_json_number(double x)
{
    if (isfinite(x))
        return json_real(x);
    return json_string(isnan(x) ? "nan" : x > 0 ? "inf" : "-inf");
}

void draw_stats(const struct shd_tensor_stats *s, FILE *out)
{
    char a[DRAW_NUMBER_BYTES], b[DRAW_NUMBER_BYTES], c[DRAW_NUMBER_BYTES], d[DRAW_NUMBER_BYTES];
    fprintf(out, "  min %s  max %s  mean %s  rms %s\n", draw_number(s->min, a),
            draw_number(s->max, b), draw_number(s->mean, c), draw_number(s->rms, d));
    fprintf(out, "  zeros %" PRIu64 "  nan %" PRIu64 "  inf %" PRIu64 "\n", s->zeros, s->nans,
            s->infs);
    if (isnan(s->min))
        return;
    fprintf(out, " ");
    for (uint32_t i = 0; i < SHD_STATS_QUANTILES; i++)
        fprintf(out, " %s %s%s", quantile_names[i], draw_number(s->quantiles[i], a),
                i + 1 < SHD_STATS_QUANTILES ? " " : "\n");
}

/* -- Histogram ----------------------------------------------------------------------------------
 */

struct row {
    int from, to; /* exponents: magnitudes from 2^from up to 2^to */
    uint64_t below, above;
};

struct rows { /* the largest magnitudes first */
    struct row items[DRAW_ROWS_MAX];
    uint32_t count;
    uint64_t most;
};

static void add_bin(struct rows *rows, uint32_t bin, uint64_t below, uint64_t above)
{
    const int from = (int)bin + EXP_MIN;
    if (rows->count < DRAW_ROWS_MAX)
        rows->items[rows->count++] = (struct row){ .from = from, .to = from + 1 };
    struct row *row = &rows->items[rows->count - 1];
    row->from = from;
    row->below += below;
    row->above += above;
    rows->most = row->below > rows->most ? row->below : rows->most;
    rows->most = row->above > rows->most ? row->above : rows->most;
}

static bool bin_is_empty(const struct shd_tensor_stats *s, uint32_t bin)
{
    return s->below[bin] + s->above[bin] == 0;
}

/* From the first bin that holds something to the last one: empty ones between them are rows, too.
 */
static void find_rows(const struct shd_tensor_stats *s, struct rows *ret_rows)
{
    uint32_t low = 0, high = SHD_STATS_BINS;
    memset(ret_rows, 0, sizeof *ret_rows);
    while (low < high && bin_is_empty(s, low))
        low++;
    while (high > low && bin_is_empty(s, high - 1))
        high--;
    for (uint32_t bin = high; bin-- > low;)
        add_bin(ret_rows, bin, s->below[bin], s->above[bin]);
}

/* What there is shows at least one mark. */
static int bar(uint64_t count, uint64_t most)
{
    const double share = most > 0 ? (double)count / (double)most : 0;
    const int marks = (int)(share * BAR_COLUMNS + 0.5);
    return marks == 0 && count > 0 ? 1 : marks;
}

void draw_histogram(const struct shd_tensor_stats *s, FILE *out)
{
    static const char marks[BAR_COLUMNS + 1] = "########################";
    struct rows rows;
    find_rows(s, &rows);
    if (rows.count == 0)
        return;
    fprintf(out, "  %*s  %-15s  above zero\n", BAR_COLUMNS + 13, "below zero", "  magnitude");
    for (uint32_t i = 0; i < rows.count; i++) {
        const struct row *row = &rows.items[i];
        char from[16], to[16];
        snprintf(from, sizeof from, "2^%d", row->from);
        snprintf(to, sizeof to, "2^%d", row->to);
        fprintf(out, "  %12" PRIu64 " %*.*s  %6s .. %-6s %-*.*s %" PRIu64 "\n", row->below,
                BAR_COLUMNS, bar(row->below, rows.most), marks, from, to, BAR_COLUMNS,
                bar(row->above, rows.most), marks, row->above);
    }
}

/* -- JSON ---------------------------------------------------------------------------------------
 */

static void set_number(json_t *o, const char *name, double x)
{
    json_object_set_new(o, name, draw_json_number(x));
}

void draw_json(const struct shd_tensor_stats *s, json_t *o)
{
    json_t *quantiles = json_object(), *rows = json_array();
    json_object_set_new(o, "elems", json_integer((json_int_t)s->elems));
    json_object_set_new(o, "zeros", json_integer((json_int_t)s->zeros));
    json_object_set_new(o, "nan", json_integer((json_int_t)s->nans));
    json_object_set_new(o, "inf", json_integer((json_int_t)s->infs));
    set_number(o, "min", s->min);
    set_number(o, "max", s->max);
    set_number(o, "mean", s->mean);
    set_number(o, "rms", s->rms);
    for (uint32_t i = 0; i < SHD_STATS_QUANTILES; i++)
        set_number(quantiles, quantile_names[i], s->quantiles[i]);
    json_object_set_new(o, "quantiles", quantiles);
    for (uint32_t i = 0; i < SHD_STATS_BINS; i++)
        if (!bin_is_empty(s, i))
            json_array_append_new(
                rows, json_pack("{s:f, s:f, s:I, s:I}", "from", ldexp(1, (int)i + EXP_MIN), "to",
                                ldexp(1, (int)i + EXP_MIN + 1), "below", (json_int_t)s->below[i],
                                "above", (json_int_t)s->above[i]));
    json_object_set_new(o, "histogram", rows);
}
