/* See spec_tables.h. */
#include "proto/spec/spec_tables.h"

#include <stdio.h>
#include <stdlib.h>

const struct spec_init_row spec_init_rows[SPEC_INITS + 1] = {
    [SPEC_INIT_CONST] = { "const", 1 },
    [SPEC_INIT_NORMAL] = { "normal", 2 },
    [SPEC_INIT_UNIFORM] = { "uniform", 2 },
};

void spec_real_text(double x, char ret_text[32])
{
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(ret_text, 32, "%.*g", digits, x);
        if (strtod(ret_text, NULL) == x)
            return;
    }
}
