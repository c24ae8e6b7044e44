/* `shardctl show --units`: what the units of a model came to in its last steps. */
#ifndef SHD_CTL_SHOW_UNITS_H
#define SHD_CTL_SHOW_UNITS_H

#include <stdbool.h>
#include <stdint.h>

#define SHOW_UNITS_STEPS_MAX 256u /* NORMS_STEPS_MAX: what owners keep */

struct show_units {
    const char *address, *model; /* NULL: not given */
    uint32_t last;               /* steps; 0: one */
    bool json;
};

/* Returns the exit code (say.h). */
int show_units(const struct show_units *o);

#endif
