/* What bench_bulk measures of a way to bring bytes from one process to another. */
#ifndef SHD_BENCH_BULK_WAY_H
#define SHD_BENCH_BULK_WAY_H

#include <stdint.h>
#include <sys/resource.h>

#include "bench/bench.h"
#include "proto/base/clock.h"
#include "proto/base/status.h"

#define BULK_MEET_NS (20 * NS_PER_S) /* both ends find each other until then */

struct bulk_way {
    const char *name;
    struct stat_series rate, cpu; /* GB/s; s/GB */
};

struct bulk_rings {
    uint64_t bytes, frame_bytes, ring_bytes; /* of a transfer; multiples of the first two */
    uint8_t *from, *to;                      /* rings, mapped */
    struct bulk_shared *shared;              /* with children */
};

struct bulk_received { /* by this process */
    const struct bulk_rings *rings;
    uint64_t placed, done, begin_ns, end_ns;
    double begin_cpu_s, cpu_s;
};

struct bulk_shared {
    double cpu_s;             /* of the child that sends */
    struct bulk_received got; /* of one that receives, where it is no thread of the parent's */
};

uint64_t bulk_ring_at(const struct bulk_rings *rings, uint64_t position);
double bulk_cpu_s(const struct rusage *u);
double bulk_own_cpu_s(void);

/* The first byte of a transfer is there: once it counts, then it is a no-op. */
void bulk_begin(struct bulk_received *got);

/* So many bytes more are in place. */
void bulk_took(struct bulk_received *got, uint64_t bytes);

/* Add a transfer that is over: of this process and of the child that has sent. */
void bulk_count_transfer(struct bulk_way *way, const struct bulk_received *got);

/* Add what was measured elsewhere: GB/s, and seconds of both ends for `bytes`. */
void bulk_count(struct bulk_way *way, double rate, double cpu_s, uint64_t bytes);

#endif
