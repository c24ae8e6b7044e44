/* Values that a session puts in the place of what an open model has: parameters and moments, of one
 * unit or of all, at all owners or at none.
 *
 * Happy path: CREATE put makes a segment (proto/share/putmap.h), which the session writes; put_full
 * gives it to the keeper; COMMIT with a decision that names its origin, to owner 0 and then to the
 * others, is the put: a step of its own, recorded in the ledger. Its update of a unit is copies out
 * of the segment. They can be repeated, so a successor of who was killed in them begins anew.
 * When the last unit is done the segment goes.
 *
 * All owners or none. Owner 0's commit is what counts; before it, all of them were full. Owner 0's
 * replica is asked next, then the others. Who learns of it passes it on, as any decision
 * (client/paths/turn.h), and finds the values there: those that are full stay when their session
 * dies, but at owner 0. They go when their step is over otherwise,
 * or when a session that has owner 0's consent begins another put.
 *
 * Failure: no room, or no keeper takes it: the request fails, and nothing has changed. Loop thread,
 * but for making the segment and giving it away. */
#ifndef SHD_PUT_H
#define SHD_PUT_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

struct daemon;
struct keeper_group;
struct ledger;
struct model;
struct op;
struct put;
struct session;
struct step_actions;

/* The requests. */
int put_begin(struct op *op);
int put_full(struct op *op);
int put_drop(struct op *op);

/* Whether a Commit of the step that is collected says of puts what the ledger can hold; before
 * put_commit(). SHD_EINVAL. */
int put_check(struct op *op);

/* A COMMIT that may be one: SHD_OK: go on. SHD_PENDING: gradients of its step are being dropped:
 * carry the actions out and ask again, without any when the model's phase has changed. SHD_ENOENT:
 * its values are not here. SHD_EBUSY: gradients of its step are (owner 0). */
int put_commit(struct op *op, struct step_actions *ret_actions);

/* Bits of the unit's arrays that wait for the put that is being applied; 0: none. */
uint8_t put_arrays(const struct model *m, uint32_t unit);

/* The slice of an array of those. */
const float *put_slice(const struct model *m, uint32_t array, uint32_t unit);

/* The model is at another step than before. */
void put_step_over(struct model *m);

/* The model goes back to an earlier step: values that wait go. False: not now, ask again. */
bool put_make_room(struct model *m);

/* The model is dropped: nobody claims the segment any more. put_free() follows, once no work runs.
 */
void put_unclaim(struct model *m);

void put_forget_session(struct daemon *d, const struct session *s);

/* A predecessor's, if the keeper has one. Errors: SHD_ESEGMENT: it is needed, and not there, or not
 * what it should be; SHD_ENOMEM. One that is neither needed nor of any use is nobody's. */
int put_adopt(struct model *m, const struct keeper_group *g, struct shd_err *e);

/* The model is adopted: what put_adopt() did not take goes, the keeper's too. */
void put_adopted(const struct model *m, struct keeper_group *g);

/* Give it back: what was adopted is the group's still. */
void put_unadopt(struct model *m);

void put_free(struct model *m);

#endif
