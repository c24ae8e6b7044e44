/* See show_slice.h. */
#include "client/ctl/watch/show_slice.h"

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/watch/show_draw.h"
#include "proto/base/check.h"

/* A number at *text, or nothing: then *ret_number is left alone. */
static bool take_number(const char **text, uint64_t *ret_number)
{
    char *end;
    if (**text < '0' || **text > '9')
        return true;
    errno = 0;
    const unsigned long long number = strtoull(*text, &end, 10);
    *text = end;
    *ret_number = number;
    return errno == 0;
}

/* "A", "A:B", "A:", ":B" or ":". */
static int take_part(const char **text, struct show_slice *slice, uint32_t d, struct shd_err *e)
{
    const uint64_t size = slice->tensor->shape[d];
    const char *begin = *text;
    uint64_t from = 0, to = size;
    bool good = take_number(text, &from);
    if (good && **text == ':') {
        ++*text;
        good = take_number(text, &to);
    } else if (*text != begin) {
        to = from + 1;
    } else {
        good = false;
    }
    if (!good || (**text != ',' && **text != '\0'))
        return err_set(e, SHD_EINVAL,
                       "slice '%.40s': dimension %" PRIu32 " wants A:B, A:, :B, : or one index",
                       begin, d);
    if (from >= to || to > size)
        return err_set(e, SHD_ERANGE,
                       "slice %" PRIu64 ":%" PRIu64 " of dimension %" PRIu32 ", which has %" PRIu64,
                       from, to, d, size);
    slice->from[d] = from;
    slice->to[d] = to;
    return SHD_OK;
}

/* Elements of the tensor before the one with these indices. */
static uint64_t offset_of(const struct spec_tensor *t, const uint64_t *at)
{
    uint64_t offset = 0;
    for (uint32_t d = 0; d < t->rank; d++)
        offset = offset * t->shape[d] + at[d];
    return offset;
}

int slice_parse(const char *text, const struct spec_tensor *t, struct show_slice *ret_slice,
                struct shd_err *e)
{
    struct show_slice slice = { .tensor = t };
    uint64_t last[SPEC_RANK_MAX];
    uint32_t d = 0;
    int r = SHD_OK;
    for (uint32_t i = 0; i < t->rank; i++)
        slice.to[i] = t->shape[i];
    for (bool more = *text != '\0'; r == SHD_OK && more; d++) {
        if (d == t->rank)
            return err_set(e, SHD_ERANGE, "slice '%.40s' of a tensor with %" PRIu32 " dimensions",
                           text, t->rank);
        r = take_part(&text, &slice, d, e);
        more = r == SHD_OK && *text == ',';
        text += more;
    }
    if (r != SHD_OK)
        return r;
    for (uint32_t i = 0; i < t->rank; i++)
        last[i] = slice.to[i] - 1;
    slice.first = offset_of(t, slice.from);
    slice.elems = offset_of(t, last) - slice.first + 1;
    *ret_slice = slice;
    return SHD_OK;
}

/* The next row's indices; false: there is none. */
static bool next_row(const struct show_slice *slice, uint64_t *at)
{
    for (uint32_t d = slice->tensor->rank - 1; d-- > 0;) {
        if (++at[d] < slice->to[d])
            return true;
        at[d] = slice->from[d];
    }
    return false;
}

static uint64_t row_elems(const struct show_slice *slice)
{
    const uint32_t rank = slice->tensor->rank;
    return rank > 0 ? slice->to[rank - 1] - slice->from[rank - 1] : 1;
}

static void print_row(const struct show_slice *slice, const uint64_t *at, const float *row,
                      FILE *out)
{
    char number[DRAW_NUMBER_BYTES];
    fprintf(out, "  ");
    for (uint32_t d = 0; d + 1 < slice->tensor->rank; d++)
        fprintf(out, "%s%" PRIu64, d > 0 ? "," : "", at[d]);
    if (slice->tensor->rank > 1)
        fprintf(out, ": ");
    for (uint64_t i = 0; i < row_elems(slice); i++) {
        snprintf(number, sizeof number, "%.9g", (double)row[i]);
        fprintf(out, "%s%s", i > 0 ? " " : "", number);
    }
    fprintf(out, "\n");
}

static json_t *row_json(const struct show_slice *slice, const float *row)
{
    json_t *items = json_array();
    for (uint64_t i = 0; i < row_elems(slice); i++)
        json_array_append_new(items, draw_json_number((double)row[i]));
    return items;
}

/* To `rows` where it is not NULL, else printed. */
static void each_row(const struct show_slice *slice, const float *values, FILE *out, json_t *rows)
{
    uint64_t at[SPEC_RANK_MAX];
    memcpy(at, slice->from, sizeof at);
    do {
        const float *row = values + (offset_of(slice->tensor, at) - slice->first);
        if (rows != NULL)
            json_array_append_new(rows, row_json(slice, row));
        else
            print_row(slice, at, row, out);
    } while (slice->tensor->rank > 1 && next_row(slice, at));
}

void slice_print(const struct show_slice *slice, const float *values, FILE *out)
{
    each_row(slice, values, out, NULL);
}

json_t *slice_json(const struct show_slice *slice, const float *values)
{
    json_t *rows = json_array();
    each_row(slice, values, NULL, rows);
    return rows;
}
