/* See bench.h. */
#include "client/run/bench.h"

#include "client/session/session.h"

void shd_bench_delay_fetches(shd_model *m, uint64_t delay_ns)
{
    m->policy.fetch_delay_ns = delay_ns;
}
