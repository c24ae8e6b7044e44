/* See text.h. */
#include "client/ctl/base/text.h"

#include <langinfo.h>
#include <locale.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <wchar.h>

#include "proto/base/check.h"

#define COUNT_MAX 1e15 /* whole numbers above are shown rounded */

void text_init(void)
{
    setlocale(LC_CTYPE, "");
}

bool text_is_utf8(void)
{
    return strcmp(nl_langinfo(CODESET), "UTF-8") == 0;
}

/* The character at s, whose bytes are *ret_bytes; 0 for what is no UTF-8 (one byte of it). */
static uint32_t decode(const unsigned char *s, size_t *ret_bytes)
{
    static const uint32_t least[] = { 0, 0, 0x80, 0x800, 0x10000 };
    const size_t bytes = s[0] < 0x80       ? 1
                         : s[0] >> 5 == 6  ? 2
                         : s[0] >> 4 == 14 ? 3
                         : s[0] >> 3 == 30 ? 4
                                           : 0;
    uint32_t c = bytes <= 1 ? s[0] : s[0] & (0xffu >> (bytes + 1));
    *ret_bytes = 1;
    if (bytes == 0)
        return 0;
    for (size_t i = 1; i < bytes; i++) {
        if (s[i] >> 6 != 2)
            return 0;
        c = c << 6 | (s[i] & 0x3fu);
    }
    if (c < least[bytes] || c > 0x10ffff || (c >= 0xd800 && c < 0xe000))
        return 0;
    *ret_bytes = bytes;
    return c;
}

/* Marks that reorder or hide what is around them. */
static bool is_trick(uint32_t c)
{
    return (c >= 0x200b && c <= 0x200f) || (c >= 0x2028 && c <= 0x202e) ||
           (c >= 0x2060 && c <= 0x206f) || c == 0xfeff || (c >= 0xe0000 && c <= 0xe0fff);
}

static bool is_printable(uint32_t c)
{
    if (c < 0x80)
        return c >= 0x20 && c != 0x7f;
    return c >= 0xa0 && text_is_utf8() && !is_trick(c) && wcwidth((wchar_t)c) > 0;
}

const char *text_clean(const char *src, char *buf, size_t bytes)
{
    CHECK(bytes > 0);
    size_t used = 0, n;
    for (const unsigned char *s = (const unsigned char *)src; *s != '\0'; s += n) {
        const bool keep = is_printable(decode(s, &n));
        const size_t wanted = keep ? n : 1;
        if (used + wanted >= bytes)
            break;
        if (keep)
            memcpy(buf + used, s, n);
        else
            buf[used] = '?';
        used += wanted;
    }
    buf[used] = '\0';
    return buf;
}

unsigned text_width(const char *text)
{
    unsigned width = 0;
    size_t n;
    for (const unsigned char *s = (const unsigned char *)text; *s != '\0'; s += n) {
        const uint32_t c = decode(s, &n);
        const int columns = c < 0x80 ? 1 : wcwidth((wchar_t)c);
        width += columns > 0 ? (unsigned)columns : 1;
    }
    return width;
}

void text_quote(const char *text, FILE *out)
{
    for (; *text != '\0'; text++)
        if (*text == '\'')
            fputs("'\\''", out);
        else
            fputc(*text, out);
}

const char *text_count(double n, char *buf)
{
    if (!isfinite(n))
        snprintf(buf, TEXT_BYTES, "-");
    else
        snprintf(buf, TEXT_BYTES, fabs(n) < COUNT_MAX ? "%.0f" : "%.3g", n);
    return buf;
}

const char *text_number(double x, char *buf)
{
    if (!isfinite(x))
        snprintf(buf, TEXT_BYTES, "-");
    else
        snprintf(buf, TEXT_BYTES, "%.4g", x);
    return buf;
}

const char *text_bytes(double bytes, char *buf)
{
    static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB" };
    if (!isfinite(bytes) || bytes < 0)
        return text_count(NAN, buf);
    double n = bytes;
    size_t unit = 0;
    for (; n >= 1024 && unit + 1 < ARRAY_SIZE(units); unit++)
        n /= 1024;
    if (n >= 1e6)
        snprintf(buf, TEXT_BYTES, "%.3g %s", n, units[unit]);
    else
        snprintf(buf, TEXT_BYTES, unit == 0 || n >= 100 ? "%.0f %s" : "%.1f %s", n, units[unit]);
    return buf;
}

const char *text_size(uint64_t bytes, char *buf)
{
    return text_bytes((double)bytes, buf);
}

const char *text_time(double s, char *buf)
{
    if (!isfinite(s) || s > 1e12)
        return text_count(NAN, buf);
    const unsigned long long whole = s > 0 ? (unsigned long long)s : 0;
    if (s < 100)
        snprintf(buf, TEXT_BYTES, "%.1f s", s > 0 ? s : 0);
    else if (whole < 3600)
        snprintf(buf, TEXT_BYTES, "%llu:%02llu", whole / 60, whole % 60);
    else if (whole < 86400)
        snprintf(buf, TEXT_BYTES, "%llu:%02llu:%02llu", whole / 3600, whole / 60 % 60, whole % 60);
    else
        snprintf(buf, TEXT_BYTES, "%llu d %llu h", whole / 86400, whole / 3600 % 24);
    return buf;
}

/* -- Tables ------------------------------------------------------------------------------------ */

void table_init(struct table *t, const char *const *headings, unsigned columns)
{
    CHECK(columns > 0 && columns <= TABLE_COLUMNS_MAX);
    *t = (struct table){ .columns = columns };
    table_row(t, headings);
}

int table_row(struct table *t, const char *const *cells)
{
    void *grown = t->rows < TABLE_ROWS_MAX
                      ? realloc(t->cells, ((size_t)t->rows + 1) * sizeof(*t->cells))
                      : NULL;
    if (grown == NULL)
        return 0;
    t->cells = grown;
    for (unsigned i = 0; i < t->columns; i++)
        snprintf(t->cells[t->rows][i], TABLE_CELL_BYTES_MAX, "%s", cells[i]);
    t->rows++;
    return 1;
}

void table_print(const struct table *t, const char *indent, FILE *out)
{
    if (t->rows < 2)
        return;
    int width[TABLE_COLUMNS_MAX] = { 0 };
    for (unsigned r = 0; r < t->rows; r++)
        for (unsigned c = 0; c < t->columns; c++)
            if ((int)text_width(t->cells[r][c]) > width[c])
                width[c] = (int)text_width(t->cells[r][c]);
    for (unsigned r = 0; r < t->rows; r++) {
        fputs(indent, out);
        for (unsigned c = 0; c + 1 < t->columns; c++)
            fprintf(out, "%s%*s  ", t->cells[r][c], width[c] - (int)text_width(t->cells[r][c]), "");
        fprintf(out, "%s\n", t->cells[r][t->columns - 1]);
    }
}

void table_deinit(struct table *t)
{
    free(t->cells);
    *t = (struct table){ 0 };
}
