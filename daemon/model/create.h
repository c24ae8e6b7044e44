/* A model whose start values a session puts, unit by unit, and which nobody sees before it is whole
 * on all owners.
 *
 * Happy path: CREATE begin makes the model and a stage, host memory that the session writes; each
 * PUT copies the slice that lies there into the state; CREATE full, once every unit is in, makes
 * the published copy; CREATE open, to owner 0 and then to the others, opens it. FORK in the place
 * of all PUTs copies state and record of an open model, exactly as of one step: in the kernel
 * queue, between two updates of that one, or out of a snapshot.
 *
 * All owners or none. Owner 0's opening is what counts: its ledger's `ready`. Before, the model
 * goes with its session, and with this process. The others' part of a model that is full stays when
 * either dies, for owner 0 may have opened its own: `origin`, a random number of the attempt,
 * tells. Whoever opens the model next has that of owner 0's model: with the same one here it is
 * opened, else it is dropped. One creator at a time is owner 0's doing, too: to the others a
 * session that begins has owner 0's consent, and what was begun before with another origin is
 * dropped.
 *
 * Failure: an error answers the request; the model stays as it was, or goes. Loop thread, but for
 * making models. */
#ifndef SHD_CREATE_H
#define SHD_CREATE_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/model/moved.h"

struct create;
struct daemon;
struct model;
struct op;
struct session;

/* The requests. */
int create_begin(struct op *op);
int create_full(struct op *op);
int create_open(struct op *op);
int create_drop(struct op *op);
int create_put(struct op *op);
int create_fork(struct op *op);

/* OPEN_MODEL of this name ("": the only one) comes: what waits here for owner 0's word is opened or
 * dropped, by what the request says of it. SHD_ENOENT: a session is still making it; SHD_EBUSY with
 * retry_ms: the request does not say. */
int create_settle(struct op *op, const char *name);

/* A model of this name is to be dropped, and none is open. SHD_OK: nor is one being made any more,
 * but for one that waits for owner 0's word, which goes with it: create_gone(). SHD_EBUSY: a
 * session is at it. */
int create_give_way(struct op *op, const char *name);

/* Owner 0 has dropped its model, of instance `first`. */
void create_gone(struct daemon *d, const char *name, uint64_t first);

/* May a model of this name be made, which is not open? Errors: SHD_EMOVED it has other owners now;
 * SHD_EBUSY, with retry_ms, it is being restored. */
int create_check_name(struct op *op, const char *name, struct moved_seat seat);

/* Whether the daemon may have one model more than are open, or being made. */
bool create_has_room(const struct daemon *d);

/* Of an open model: what a Layout says; 0: its values are the spec's, or were read from files. */
uint64_t create_origin(const struct model *m);

/* A predecessor's, full, not opened. */
void create_adopted(struct daemon *d, struct model *m);

void create_forget_session(struct daemon *d, const struct session *s);

/* At shutdown, when no work runs any more. */
void create_abandon(struct daemon *d);

#endif
