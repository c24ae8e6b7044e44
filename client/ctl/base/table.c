#include "client/ctl/base/table.h"

#include <stdlib.h>
#include <string.h>

#include "client/ctl/base/status_text.h"
#include "proto/base/check.h"

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
