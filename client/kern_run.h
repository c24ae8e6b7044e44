/* Kernels, one after the other: queue one operation and wait for it. For the client, whose work
 * is small or has nothing to overlap with. */
#ifndef SHD_KERN_RUN_H
#define SHD_KERN_RUN_H

#include "kernels/kern.h"
#include "proto/spec.h"

int kern_run_fill(struct kern *k, const struct kern_fill *a, struct shd_err *e);
int kern_run_cast(struct kern *k, const struct kern_cast *a, struct shd_err *e);
int kern_run_accumulate(struct kern *k, const struct kern_accumulate *a, struct shd_err *e);
int kern_run_sumsq(struct kern *k, const struct kern_sumsq *a, struct shd_err *e);
int kern_run_update(struct kern *k, const struct spec *spec, const struct kern_update *a,
                    struct shd_err *e);
int kern_run_hash(struct kern *k, const struct kern_hash *a, struct shd_err *e);

#endif
