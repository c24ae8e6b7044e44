/* Going along with a model to other owners (`shardctl reshard`). Internal to client/run.
 *
 * Its old owners end the sessions that have it open, with SHD_EMOVED. A call that finds so asks
 * them where it is, connects there, opens it beside what is open, and puts that in its place: what
 * the program has of parameters stays at its addresses, and shows those of the step that the new
 * owners have, an earlier one. So it is as if the model had gone back (rewind.h). One of them that
 * was killed meanwhile may only say that it has no such model; then owner 0 says why.
 *
 *     a call       hub: cpu0, cpu1      a hub at cpu0, cpu1, cpu2
 *     SHD_EMOVED ─▶ where is it?
 *                   "cpu0,cpu1,cpu2" ─▶ open it; what is mapped there moves to the old addresses
 *     SHD_ERESET ◀──────────────────────┘
 *
 * Failure: what cannot be reached leaves the model as it was, of no use, and the next call tries
 * again. Not: several models in one session, GPUs, copies; these end with SHD_EMOVED. One thread.
 */
#ifndef SHD_RUN_MOVE_H
#define SHD_RUN_MOVE_H

#include "proto/spec/spec.h"

struct shd_err;
struct shd_model;
struct shd_session;

/* What a call of an open model has come to, r and *e: those, but where it was because the model has
 * moved, and this worker is there now: SHD_ERESET, what it has of a step is forgotten. */
int move_along(struct shd_model *m, int r, struct shd_err *e);

/* SHD_EMOVED was the answer to opening the model of this name ("": the only one, whose name it
 * becomes): have the session, which has no other, there. SHD_EMOVED: it cannot be. */
int move_session(struct shd_session *s, char name[SPEC_NAME_BYTES_MAX], struct shd_err *e);

#endif
