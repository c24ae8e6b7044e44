/* The gradient of a RETURN with a turn, which a worker on another GPU sends over the session's NCCL
 * link. The next transfer is behind this one, whatever becomes of the gradient later. */
#ifndef SHD_RECEIVE_H
#define SHD_RECEIVE_H

struct inbox;
struct op;

/* Receive it into its slot: SHD_PENDING, and the request is dispatched again when it is there
 * (op->received). Errors: no such link, nothing to be sent, no slot. */
int receive_grad(struct op *op, struct inbox *inbox);

#endif
