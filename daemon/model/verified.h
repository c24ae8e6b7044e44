/* Gradients of the group that is verified in a step (core/verify.h): hashed where they lie before
 * they count, then compared. Happy path: RETURN waits while its slot is hashed on libuv's pool
 * (SHA-256; a GPU's is copied to the host for it), then goes on as any other. Failure: what cannot
 * be hashed (no memory, a full kernel queue) counts all the same, and the worker's copy is not
 * compared as a whole. Loop thread. */
#ifndef SHD_VERIFIED_H
#define SHD_VERIFIED_H

#include <stdbool.h>
#include <stdint.h>

struct model;
struct op;

/* Is op, a RETURN whose place was checked, of a group that is being verified? */
bool verified_wants(const struct op *op);

/* SHD_PENDING: op's gradient, in the slot it has taken, is being hashed; its handler is called
 * again. SHD_OK: it was, or need not be. */
int verified_hash(struct op *op);

/* op is about to be given to the core. A difference is said in the log. */
void verified_take(struct op *op);

/* A Prepare of the step is being answered, or a put of it begins: what comes from now on may be of
 * other parameters; of a put also once the step was reset. */
void verified_prepared(struct model *m, uint64_t step);
void verified_put(struct model *m, uint64_t step);

#endif
