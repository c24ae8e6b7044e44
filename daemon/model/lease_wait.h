/* LEASE requests for which there is no work yet. Who gets what lease.h decides; they are asked
 * again when gradients come in, the step goes on, a session ends, or time has passed. Loop thread.
 */
#ifndef SHD_LEASE_WAIT_H
#define SHD_LEASE_WAIT_H

#include <stdint.h>

#include "daemon/core/lease.h"

struct daemon;
struct model;
struct op;
struct session;

void lease_wait_init(struct daemon *d); /* the daemon's timer, on its loop */

/* Ask for work for op's session; LEASE_WAIT: op waits, its handler is called again; if it wants
 * none of that (Lease.now), there is nothing. */
enum lease_answer lease_wait_ask(struct op *op, uint32_t *ret_group);

/* op's session gives a group back. */
void lease_wait_take_back(struct op *op);

/* Ask again for those who wait for work of this model, or for each other (meet.h): now, or within a
 * millisecond where it may happen often. */
void lease_wait_wake(struct model *m);
void lease_wait_soon(struct model *m);

/* A session ended: what it had can be handed out again. */
void lease_wait_forget_session(struct model *m, const struct session *s);

#endif
