/* Kernels, one after the other: queue one operation and wait for it. For the client, whose work
 * is small or has nothing to overlap with. And several at once, where there are many small ones. */
#ifndef SHD_KERN_RUN_H
#define SHD_KERN_RUN_H

#include "kernels/kern.h"
#include "proto/spec/spec.h"

/* Queue op, and wait for it. */
int kern_run_op(struct kern *k, const struct kern_op *op, struct shd_err *e);

/* Elements that become zero. */
struct kern_op kern_zero(float *x, uint64_t elems);

/* Operations in flight, on any devices, and the wait for all of them. kern_batch_init(), any number
 * of the others, then always kern_batch_wait(): until it returns the devices refer to the batch and
 * to the arrays. One thread. */
struct kern_batch {
    struct kern_done done;
    uint32_t pending;  /* atomic futex word */
    int status;        /* atomic: the first failure */
    struct kern *kern; /* borrowed: of the last one, to say why it failed */
};

void kern_batch_init(struct kern_batch *b);
/* Queue one more; where the queue is full, once the batch has left it. */
int kern_batch_add(struct kern_batch *b, struct kern *k, const struct kern_op *op,
                   struct shd_err *e);

/* The status all of them ended with. The batch can be used again. */
int kern_batch_wait(struct kern_batch *b, struct shd_err *e);

#endif
