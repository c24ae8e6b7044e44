/* A screen as an array of cells: drawn into without a terminal, then put on one (top_term.h) or
 * printed as lines. */
#ifndef SHD_CTL_TOP_SCREEN_H
#define SHD_CTL_TOP_SCREEN_H

#include <stdbool.h>
#include <stdio.h>
#include <wchar.h>

#define SCREEN_ROWS_MAX 400u
#define SCREEN_COLS_MAX 1000u

enum screen_look { LOOK_PLAIN, LOOK_HEAD, LOOK_FAINT, LOOK_GOOD, LOOK_WARN, LOOK_BAD, LOOK_MARK };

struct screen_cell {
    wchar_t c; /* 0: covered by the wide character on its left */
    enum screen_look look;
};

struct screen {
    unsigned rows, cols;
    struct screen_cell *cells; /* owned, [rows][cols] */
};

/* All blanks; sizes beyond the limits are cut. Returns 0 when out of memory, else 1. */
int screen_init(struct screen *s, unsigned rows, unsigned cols);
void screen_deinit(struct screen *s);

/* Put cleaned text at a place, into at most width columns, padded with blanks up to it; what is
 * outside the screen is left out. */
void screen_put(struct screen *s, unsigned row, unsigned col, unsigned width, enum screen_look look,
                const char *text);
void screen_put_right(struct screen *s, unsigned row, unsigned col, unsigned width,
                      enum screen_look look, const char *text);

/* Give a whole row another look. */
void screen_look(struct screen *s, unsigned row, enum screen_look look);

/* The rows as lines of text, up to the last that is not blank. */
void screen_print(const struct screen *s, FILE *out);

/* -- Tables on a screen -------------------------------------------------------------------------
 */

/* Columns are dropped, the least important first, until the rest fits; some may take what is left
 * over. */
#define TOP_COLUMNS_MAX 12u

struct top_column {
    const char *name;
    unsigned width;    /* at least */
    unsigned priority; /* the highest number is dropped first */
    unsigned grow;     /* how much wider it may become */
    bool right;        /* flush right */
};

struct top_layout {
    const struct top_column *columns; /* borrowed */
    unsigned count;
    unsigned width[TOP_COLUMNS_MAX]; /* 0: dropped */
    unsigned at[TOP_COLUMNS_MAX];
};

/* Fit columns into cols. */
struct top_layout top_layout(const struct top_column *columns, unsigned count, unsigned cols);

/* The row of names. */
void top_heading(const struct top_layout *l, struct screen *s, unsigned row, enum screen_look look);

/* One cell; nothing when its column was dropped. */
void top_cell(const struct top_layout *l, unsigned column, struct screen *s, unsigned row,
              enum screen_look look, const char *text);

/* A bar of parts[count] (sum at most whole) over width columns; each part in its own shade. */
#define TOP_BAR_BYTES 256u
const char *top_bar(const double *parts, unsigned count, double whole, unsigned width, bool utf8,
                    char buf[TOP_BAR_BYTES]);

#endif
