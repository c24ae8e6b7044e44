/* See ramp.h. */
#include "proto/spec/ramp.h"

uint32_t ramp_at(const struct ramp *ramp, uint64_t step)
{
    uint32_t row = 0;
    while (row + 1 < ramp->count && ramp->rows[row + 1].from <= step)
        row++;
    return ramp->rows[row].micro_batches;
}

uint32_t ramp_max(const struct ramp *ramp)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < ramp->count; i++)
        if (ramp->rows[i].micro_batches > most)
            most = ramp->rows[i].micro_batches;
    return most;
}
