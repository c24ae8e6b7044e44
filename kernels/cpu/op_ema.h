/* The moving average behind an update: read the new parameters, which are in a cache then, and the
 * average once, write the average. Included once per instruction set, after vec.h.
 *
 * Slices are whole blocks and chunks whole groups, so there are no ends to handle.
 */
#ifndef SHD_KERNELS_CPU_OP_EMA_H
#define SHD_KERNELS_CPU_OP_EMA_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/trail.h"
#include "kernels/optimizers.h"

_Static_assert(TRAIL_GROUP_ELEMS % VEC_LANES == 0, "groups are whole vectors");

/* Of r, whole groups; a group's old values go into rec before it changes, if there is one. */
KERN_FN void ema_groups(const struct kern_update *a, struct cpu_range r, struct trail_record *rec)
{
    float *average = a->ema.average;
    const float *param = a->param, rest = a->ema.rest;
    for (uint64_t i = r.first; i < r.first + r.count; i += TRAIL_GROUP_ELEMS) {
        vec old[TRAIL_GROUP_ELEMS / VEC_LANES]; /* in registers: loaded once */
        for (unsigned j = 0; j < TRAIL_GROUP_ELEMS / VEC_LANES; j++) {
            old[j] = vec_load(average + i + (size_t)j * VEC_LANES);
            if (rec != NULL)
                vec_store(rec->old[0] + (size_t)j * VEC_LANES, old[j]);
        }
        if (rec != NULL)
            trail_mark(rec, i, TRAIL_GROUP_ELEMS);
        for (unsigned j = 0; j < TRAIL_GROUP_ELEMS / VEC_LANES; j++) {
            const uint64_t at = i + (uint64_t)j * VEC_LANES;
            vec_store(average + at, ema_step(rest, vec_load(param + at), old[j]));
        }
        if (rec != NULL)
            trail_mark(rec, i + TRAIL_GROUP_ELEMS, 0);
    }
}

static void ema_range(const struct kern_update *a, struct cpu_range r, struct trail_record *rec)
{
    if (rec == NULL)
        ema_groups(a, r, NULL);
    else
        ema_groups(a, r, rec);
}

#endif
