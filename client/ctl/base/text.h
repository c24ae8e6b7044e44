/* Text for people's terminals: names from outside, numbers, tables.
 *
 * What a daemon sends may hold names that somebody chose: nothing of it goes to a terminal but
 * through text_clean(), which lets printable characters of the terminal's own character set pass
 * and turns the rest (control characters, escapes, direction marks) into '?'.
 */
#ifndef SHD_CTL_TEXT_H
#define SHD_CTL_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define TEXT_BYTES 40u /* room for what the functions below make of a number */

/* Take the terminal's character set from the environment. Once, before the rest. */
void text_init(void);
bool text_is_utf8(void);

/* src, cleaned, cut at a whole character to fit buf[bytes]. Returns buf. */
const char *text_clean(const char *src, char *buf, size_t bytes);

/* Columns that a cleaned text takes. */
unsigned text_width(const char *text);

/* Put text between single quotes of a shell onto out, which has the quotes already. */
void text_quote(const char *text, FILE *out);

/* Numbers; NAN, "not known", is "-". Return buf[TEXT_BYTES]. */
const char *text_count(double n, char *buf);      /* "128", "1.3e+20" */
const char *text_bytes(double bytes, char *buf);  /* "1.5 MiB" */
const char *text_size(uint64_t bytes, char *buf); /* likewise */
const char *text_time(double s, char *buf);       /* "0.3 s", "4:07", "3:12:09", "12 d 3 h" */
const char *text_number(double x, char *buf);     /* "2.413" */

/* -- Tables: columns as wide as their widest cell ---------------------------------------------- */

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
