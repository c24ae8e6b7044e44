/* Tables on a screen: columns that are dropped, the least important first, until the rest fits; one
 * may take what is left over. */
#ifndef SHD_CTL_TOP_TABLE_H
#define SHD_CTL_TOP_TABLE_H

#include <stdbool.h>

#include "client/ctl/watch/top_screen.h"

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
