/* See top_screen.h. */
#include "client/ctl/watch/top_screen.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/base/text.h"
#include "proto/base/check.h"

#define GAP 1u

int screen_init(struct screen *s, unsigned rows, unsigned cols)
{
    *s = (struct screen){ .rows = rows < SCREEN_ROWS_MAX ? rows : SCREEN_ROWS_MAX,
                          .cols = cols < SCREEN_COLS_MAX ? cols : SCREEN_COLS_MAX };
    const size_t cells = (size_t)s->rows * s->cols;
    s->cells = malloc((cells + 1) * sizeof(*s->cells));
    for (size_t i = 0; i < cells && s->cells != NULL; i++)
        s->cells[i] = (struct screen_cell){ .c = L' ' };
    return s->cells != NULL;
}

void screen_deinit(struct screen *s)
{
    free(s->cells);
    *s = (struct screen){ 0 };
}

static void set(struct screen *s, unsigned row, unsigned col, wchar_t c, enum screen_look look)
{
    if (row < s->rows && col < s->cols)
        s->cells[(size_t)row * s->cols + col] = (struct screen_cell){ c, look };
}

void screen_put(struct screen *s, unsigned row, unsigned col, unsigned width, enum screen_look look,
                const char *text)
{
    unsigned at = 0;
    mbstate_t state = { 0 };
    const unsigned room = col < s->cols ? s->cols - col : 0;
    if (width > room)
        width = room;
    while (*text != '\0' && at < width) {
        wchar_t c;
        const size_t n = mbrtowc(&c, text, MB_LEN_MAX, &state);
        const int columns = n == 0 || n > MB_LEN_MAX ? -1 : wcwidth(c);
        if (columns < 1 || at + (unsigned)columns > width)
            break; /* not cleaned, or no room for all of it */
        text += n;
        set(s, row, col + at++, c, look);
        for (int i = 1; i < columns; i++)
            set(s, row, col + at++, 0, look);
    }
    for (; at < width; at++)
        set(s, row, col + at, L' ', look);
}

void screen_put_right(struct screen *s, unsigned row, unsigned col, unsigned width,
                      enum screen_look look, const char *text)
{
    const unsigned wanted = text_width(text);
    const unsigned shift = wanted < width ? width - wanted : 0;
    screen_put(s, row, col, shift, look, "");
    screen_put(s, row, col + shift, width - shift, look, text);
}

void screen_look(struct screen *s, unsigned row, enum screen_look look)
{
    for (unsigned col = 0; row < s->rows && col < s->cols; col++)
        s->cells[(size_t)row * s->cols + col].look = look;
}

static unsigned used_cols(const struct screen *s, unsigned row)
{
    unsigned used = s->cols;
    while (used > 0 && s->cells[(size_t)row * s->cols + used - 1].c == L' ')
        used--;
    return used;
}

void screen_print(const struct screen *s, FILE *out)
{
    unsigned rows = s->rows;
    while (rows > 0 && used_cols(s, rows - 1) == 0)
        rows--;
    for (unsigned row = 0; row < rows; row++) {
        for (unsigned col = 0; col < used_cols(s, row); col++) {
            char bytes[MB_LEN_MAX];
            const wchar_t c = s->cells[(size_t)row * s->cols + col].c;
            const size_t n = c == 0 ? 0 : wcrtomb(bytes, c, &(mbstate_t){ 0 });
            if (n <= sizeof(bytes))
                fwrite(bytes, 1, n, out);
        }
        fputc('\n', out);
    }
}

/* -- Tables and bars -------------------------------------------------------------------------- */

static unsigned total(const struct top_layout *l)
{
    unsigned sum = 0;
    for (unsigned i = 0; i < l->count; i++)
        sum += l->width[i] > 0 ? l->width[i] + (sum > 0 ? GAP : 0) : 0;
    return sum;
}

static void drop_least(struct top_layout *l)
{
    unsigned least = l->count;
    for (unsigned i = 0; i < l->count; i++)
        if (l->width[i] > 0 &&
            (least == l->count || l->columns[i].priority > l->columns[least].priority))
            least = i;
    CHECK(least < l->count);
    l->width[least] = 0;
}

struct top_layout top_layout(const struct top_column *columns, unsigned count, unsigned cols)
{
    CHECK(count > 0 && count <= TOP_COLUMNS_MAX);
    struct top_layout l = { .columns = columns, .count = count };
    for (unsigned i = 0; i < count; i++)
        l.width[i] = columns[i].width;
    while (total(&l) > cols)
        drop_least(&l);
    unsigned left = cols - total(&l);
    for (bool grew = true; left > 0 && grew;) { /* column by column, so that they share */
        grew = false;
        for (unsigned i = 0; i < count && left > 0; i++) {
            if (l.width[i] == 0 || l.width[i] >= columns[i].width + columns[i].grow)
                continue;
            l.width[i]++;
            left--;
            grew = true;
        }
    }
    for (unsigned i = 0, at = 0; i < count; i++) {
        l.at[i] = at;
        at += l.width[i] > 0 ? l.width[i] + GAP : 0;
    }
    return l;
}

void top_cell(const struct top_layout *l, unsigned column, struct screen *s, unsigned row,
              enum screen_look look, const char *text)
{
    CHECK(column < l->count);
    if (l->width[column] == 0)
        return;
    if (l->columns[column].right)
        screen_put_right(s, row, l->at[column], l->width[column], look, text);
    else
        screen_put(s, row, l->at[column], l->width[column], look, text);
}

void top_heading(const struct top_layout *l, struct screen *s, unsigned row, enum screen_look look)
{
    screen_look(s, row, look);
    for (unsigned i = 0; i < l->count; i++)
        top_cell(l, i, s, row, look, l->columns[i].name);
}

const char *top_bar(const double *parts, unsigned count, double whole, unsigned width, bool utf8,
                    char buf[TOP_BAR_BYTES])
{
    static const char *const blocks[] = { "\u2588", "\u2593", "\u2592", "\u2591" };
    static const char *const letters[] = { "#", "=", "+", "-" };
    const char *const *shades = utf8 ? blocks : letters;
    double sum = 0;
    unsigned done = 0;
    CHECK(count <= 4);
    buf[0] = '\0';
    if (!(whole > 0) || width > (TOP_BAR_BYTES - 1) / 3)
        return buf;
    for (unsigned i = 0; i < count; i++) {
        sum += parts[i] > 0 ? parts[i] : 0;
        const double end = sum / whole * width;
        const unsigned upto = end < width ? (unsigned)(end + 0.5) : width;
        for (; done < upto; done++)
            strcat(buf, shades[i]); /* NOLINT: at most width of 3 bytes each */
    }
    for (; done < width; done++)
        strcat(buf, utf8 ? "\u00b7" : "."); /* NOLINT: likewise */
    return buf;
}
