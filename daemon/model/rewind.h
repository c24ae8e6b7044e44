/* Going back to a snapshot (snapshots.h), at all owners or at none, while workers train.
 *
 * Happy path: REWIND hold, to owner 0 and then to the others: the snapshot of that step stays. GO,
 * to owner 0: its ledger says that it is under way (core/step_rewind.h): that store decides.
 * FOLLOW, to the others, by who asked, or by any worker that sees on the boards that one owner has
 * gone back and another has not; whoever opens the model does so first.
 *
 * Here: the gradients of the open step are given up, what a kernel is at is waited for, pins and
 * checkpoints copy what they still need, and the arrays are copied back and published by the kernel
 * queue. Then the ledger has that step, the core begins anew there, and the board says so.
 * Meanwhile requests of the model are to be asked again.
 *
 * A process that is killed in it is succeeded by one that finishes it first (snapshots.h).
 *
 * Failure: refused while nothing is decided. A kernel that fails: the model is not to be used, as
 * with any other; a successor copies the snapshot back. Loop thread. */
#ifndef SHD_DAEMON_REWIND_H
#define SHD_DAEMON_REWIND_H

struct op;

/* REWIND, of all kinds. */
int rewind_ask(struct op *op);

#endif
