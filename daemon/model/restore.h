/* Reading a checkpoint, or weights of another tool, into a new model.
 *
 * Two requests: the first makes the model where nobody sees it, reads its slices, checks them and
 * *parks* it; the second (`open`) opens it. So a coordinator that asks all owners twice opens the
 * model everywhere or, when one cannot read its part, nowhere. A parked model goes with its
 * session, or when the session asks for another one. One at a time per daemon.
 *
 * Happy path: parse and plan on libuv's pool; several pool threads read piece after piece straight
 * into the state segment and compare each leaf with leaves.bin; the loop has the published copy
 * made; parked. Failure: the first error counts and names tensor, elements and file; no model is
 * left. One that is open already is in the way, or replaced (replace.h), or moves away meanwhile
 * (moved.h): it may be there while this is read, and has to be gone when it is opened.
 */
#ifndef SHD_RESTORE_H
#define SHD_RESTORE_H

struct daemon;
struct op;
struct session;

/* op is the first request of the two, or the second. */
int restore_begin(struct op *op);
int restore_open(struct op *op);

/* The session ends: so does what it restores. */
void restore_forget_session(struct daemon *d, const struct session *s);

/* Go on when the kernel queue may have room again. */
void restore_retry(struct daemon *d);

/* At shutdown, when no work runs any more. */
void restore_abandon(struct daemon *d);

#endif
