/* See bulk_way.h. */
#include "bench/bulk_way.h"

#include "proto/base/clock.h"

uint64_t bulk_ring_at(const struct bulk_rings *rings, uint64_t position)
{
    return position % rings->ring_bytes;
}

double bulk_cpu_s(const struct rusage *u)
{
    return (double)(u->ru_utime.tv_sec + u->ru_stime.tv_sec) +
           (double)(u->ru_utime.tv_usec + u->ru_stime.tv_usec) * 1e-6;
}

double bulk_own_cpu_s(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return bulk_cpu_s(&u);
}

void bulk_begin(struct bulk_received *got)
{
    if (got->begin_ns > 0)
        return;
    got->begin_ns = clock_now_ns();
    got->begin_cpu_s = bulk_own_cpu_s();
}

void bulk_took(struct bulk_received *got, uint64_t bytes)
{
    got->done += bytes;
    if (got->done < got->rings->bytes)
        return;
    got->end_ns = clock_now_ns();
    got->cpu_s = bulk_own_cpu_s() - got->begin_cpu_s;
}

void bulk_count(struct bulk_way *way, double rate, double cpu_s, uint64_t bytes)
{
    stat_add(&way->rate, rate);
    stat_add(&way->cpu, cpu_s / ((double)bytes * 1e-9));
}

void bulk_count_transfer(struct bulk_way *way, const struct bulk_received *got)
{
    const uint64_t bytes = got->rings->bytes;
    bulk_count(way, (double)bytes / (double)(got->end_ns - got->begin_ns),
               got->cpu_s + got->rings->shared->cpu_s, bytes);
}
