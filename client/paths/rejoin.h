/* Hosts that come back: replicas (replica.h) that this session has let go of, and goes on with
 * again.
 *
 * Who fills a host (client/checkpoint/refill.h) makes a view with it and then has every model go
 * back to the step that it was filled at. So a session may go on without it for as long as no model
 * has gone back: what it commits meanwhile is given up. It looks who is in, therefore, when it has
 * opened a model, before it goes along with a rewind, and before it changes a model otherwise than
 * by a step, as what it changes at the others alone would be lost with them. A host that is in
 * again is connected to, its part of all models that are open is opened, and the rewind is waited
 * for where it is to come.
 *
 *     session                     who fills b
 *                                 claims view 7: b is in, and filled
 *     commits steps without b
 *                                 rewinds the model, at all members
 *     sees that on a board
 *     reads view 7, joins b
 *     settles at the step
 *                                 claims view 8: b has all
 *
 * Failure: a host that goes away while it is joined is put out as any other; so is one that is
 * filled without end, as who fills it has died. What else breaks a join off leaves the session as
 * it was, without the host. One thread.
 */
#ifndef SHD_PATHS_REJOIN_H
#define SHD_PATHS_REJOIN_H

#include "client/paths/layout.h"

/* Where nobody has looked since the model was opened, or since a rewind that its boards show: look
 * who is in, and join it. opening: of the one that is being opened; else NULL. *ret_again: members
 * are others than before, or have gone back meanwhile: ask all where they are. Errors: those of
 * hub_poll() and layout_ask(). */
int rejoin_look(struct shd_model *m, const struct layout_opening *opening, bool *ret_again,
                struct shd_err *e);

/* The same whatever its models have seen: of a session that may have none. */
int rejoin_session(struct shd_session *s, struct shd_err *e);

/* Is there a host that has to be taken in, for nobody else has what it has? Waits end by SHD_ERESET
 * until somebody looks. */
bool rejoin_is_due(const struct shd_model *m);

/* The same of a session whose models are all open: where it is due, it is done. Errors: as above.
 */
int rejoin_due(struct shd_session *s, struct shd_err *e);

/* What is known of who is in is of no use: the next look looks. False: there are no replicas. */
bool rejoin_forget(struct shd_model *m);

/* The same for who would not wait for an arbiter that cannot be reached: false there, too. */
bool rejoin_may_forget(struct shd_model *m);

#endif
