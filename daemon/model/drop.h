/* Dropping an open model: at all of its owners or at none, whatever dies meanwhile.
 *
 * Happy path: DROP hold, to owner 0 and then to the others: while the session that asks is there,
 * or until it takes that back, nobody opens the model. DROP go, likewise: it is gone. Sessions that
 * have it open are told, and end. Then what is left of it is taken apart (remains.h); DROP wait is
 * answered when its memory is given back.
 *
 * All owners or none. What drops a model is one store, of owner 0: `ready` in its ledger is 0
 * again. A successor of this process finishes that, as it does away with any model that is not
 * ready (adopt.h). The others write down beforehand, when they are held, which instance of owner 0
 * theirs goes with (`first`). From then on whoever opens the model has to say which instance owner
 * 0 has: if it is that one the model is whole and is opened, else it was dropped there, and is
 * dropped here as well. So it does not matter whether who asked lives to tell the others.
 *
 * Refused: while somebody has gradient slots, saves or digests it, unless it is forced: then
 * trainers end when it is held.
 *
 * Loop thread. */
#ifndef SHD_DAEMON_DROP_H
#define SHD_DAEMON_DROP_H

#include <stdint.h>

struct daemon;
struct model;
struct op;
struct session;

/* DROP, of all four kinds. */
int drop_ask(struct op *op);

/* OPEN_MODEL of this name comes: SHD_OK: it may go on, where there is such a model still.
 * SHD_EBUSY: it is being dropped; with retry_ms: the request does not say yet which instance owner
 * 0 has. SHD_ENOTSUP: nor will it, for it is of an older build. */
int drop_settle(struct op *op, const char *name);

/* OPEN_MODEL of it has come to its end: that it is a replica is noted, as DROP hold does. And what
 * others go by, as a Layout says (presence.h). */
void drop_opened(const struct op *op, struct model *m);
uint64_t drop_first(const struct model *m);

/* A session makes a model of this name anew, with owner 0's consent: what was dropped there goes
 * here, too. */
void drop_orphan(struct op *op, const char *name);

/* SHD_EBUSY: op's request is to be sent again. */
int drop_ask_again(struct op *op);

/* A session ends: what it holds is free. */
void drop_forget_session(struct daemon *d, const struct session *s);

/* At shutdown, when no work runs any more. */
void drop_abandon(struct daemon *d);

#endif
