/* See top_table.h. */
#include "client/ctl/watch/top_table.h"

#include <string.h>

#include "proto/base/check.h"

#define GAP 1u

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
