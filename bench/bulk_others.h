/* Others that bring bytes over TCP on loopback, for bench_bulk: each transfers rings->bytes once,
 * in messages of a frame, and adds its rate and the processor time of both ends to `way`. Errors:
 * SHD_EGONE a program that failed, with what it said; SHD_EIO, SHD_EPROTO. */
#ifndef SHD_BENCH_BULK_OTHERS_H
#define SHD_BENCH_BULK_OTHERS_H

#include <stdbool.h>

#include "bench/bulk_way.h"

/* Can it be started? */
bool bulk_has(const char *program, const char *flag);
bool bulk_has_curve(void);

/* PUSH and PULL between two processes; curve: under CURVE, with keys for this transfer. */
int bulk_zmq(const struct bulk_rings *rings, bool curve, struct bulk_way *way, struct shd_err *e);

/* ucx_perftest's tagged messages, by UCX's own TCP transport; port: one that nobody has. */
int bulk_ucx(const struct bulk_rings *rings, const char *port, struct bulk_way *way,
             struct shd_err *e);

int bulk_iperf(const struct bulk_rings *rings, const char *port, struct bulk_way *way,
               struct shd_err *e);

#endif
