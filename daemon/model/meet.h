/* Workers that wait for each other before one of them replaces values (put.h): LEASE with `meet`.
 *
 * Happy path: when so many sessions wait in the open step, all of them are answered, and from then
 * on nobody waits in that step. Owner 0 alone is asked.
 *
 * Nobody is waited for once something of the step is returned, for its worker does not come any
 * more; nor when the step is over. Nothing of this outlives the process: who waits asks the
 * successor again, which waits for those that were answered before until the step goes on. Loop
 * thread. */
#ifndef SHD_MEET_H
#define SHD_MEET_H

struct model;
struct op;

/* op waits, and is finished: now, or by meet_look(). */
void meet_ask(struct op *op);

/* The step goes on, or something of it came in: lease_wait_wake() asks so. */
void meet_look(struct model *m);

#endif
