/* Internal to spec*.c: the names of a spec's choices, one table for parsing, dumping, comparing. */
#ifndef SHD_SPEC_TABLES_H
#define SHD_SPEC_TABLES_H

#include "proto/spec/spec.h"

struct spec_init_row {
    const char *kind;
    uint32_t numbers; /* that follow the kind: 1 or 2 */
};

#define SPEC_INITS 3 /* ids 1..3 */
extern const struct spec_init_row spec_init_rows[SPEC_INITS + 1];

/* The shortest decimal that reads back as x. */
void spec_real_text(double x, char ret_text[32]);

#endif
