/* See top_screen.h. */
#include "client/ctl/watch/top_screen.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/base/text.h"

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
