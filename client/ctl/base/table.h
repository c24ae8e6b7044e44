/* Text tables with columns as wide as their widest cell. */
#ifndef SHD_CTL_TABLE_H
#define SHD_CTL_TABLE_H

#include <stdio.h>

#define TABLE_COLUMNS_MAX    12u
#define TABLE_ROWS_MAX       4096u
#define TABLE_CELL_BYTES_MAX 40u

struct table {
    unsigned columns;
    unsigned rows;                                          /* heading included */
    char (*cells)[TABLE_COLUMNS_MAX][TABLE_CELL_BYTES_MAX]; /* owned, [rows] */
};

/* headings: columns of them, borrowed during the call. */
void table_init(struct table *t, const char *const *headings, unsigned columns);

/* Append a row; cells: t->columns of them, copied, cut when too long. Rows beyond TABLE_ROWS_MAX
 * or out of memory are dropped; 0 then, else 1. */
int table_row(struct table *t, const char *const *cells);

/* Print with an indent; nothing when there is no row behind the heading. */
void table_print(const struct table *t, const char *indent, FILE *out);
void table_deinit(struct table *t);

#endif
