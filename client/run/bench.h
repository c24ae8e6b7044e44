/* bench.h: a knob for benches and tests. Exported, but in no installed header. */
#ifndef SHD_RUN_BENCH_H
#define SHD_RUN_BENCH_H

#include "client/shd.h"

/* Copy path: each fetch takes delay_ns longer, as over a slow link. Before shd_set_policy(). */
SHD_API void shd_bench_delay_fetches(shd_model *m, uint64_t delay_ns);

#endif
