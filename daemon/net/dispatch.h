/* The request table: which handler serves a request, who may send it. */
#ifndef SHD_DISPATCH_H
#define SHD_DISPATCH_H

#include <stddef.h>
#include <stdint.h>

#include "daemon/core/step.h"
#include "daemon/net/op.h"

struct daemon;
struct model;

/* Serve one frame from identity. Loop thread; never blocks. */
void dispatch_frame(struct daemon *d, const uint8_t *identity, uint32_t identity_bytes,
                    const void *frame, size_t bytes);

/* Call the handlers of those in *list again: they waited for something that has happened. Who must
 * wait on joins a new list. */
void dispatch_again(struct op **list);

/* Handlers, one file each. Loop thread; a status, or SHD_PENDING with op_finish() to come. */
int op_hello(struct op *op);
int op_open_model(struct op *op);
int op_return_grad(struct op *op);
int op_prepare(struct op *op);
int op_commit(struct op *op);
int op_get_blob(struct op *op);
int op_digest(struct op *op);
int op_status(struct op *op);
int op_detach(struct op *op);
int op_checkpoint(struct op *op);
int op_restore(struct op *op);
int op_lease(struct op *op);
int op_drain(struct op *op);
int op_join(struct op *op);
int op_fetch(struct op *op);

/* Ask again for those who wait for work of this model: now, or within a millisecond where it may
 * happen often. */
void op_lease_wake(struct model *m);
void op_lease_soon(struct model *m);
void op_lease_init(struct daemon *d); /* the daemon's timer, on its loop */

/* A recorded decision as replies carry it. */
struct wire_decision dispatch_decision(const struct step_decision *d);

/* The open model a request's handle names: sets op->model. SHD_ENOENT else. */
int op_find_model(struct op *op, uint32_t handle);

#endif
