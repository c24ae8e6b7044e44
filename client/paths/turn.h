/* A turn: one worker's commit of one step over N owners. The client's protocol core: pure, so that
 * a simulator runs it as the session does. Events in, requests out; no I/O, no clock, and no
 * allocation after turn_init().
 *
 * Happy path: turn_next() names an owner to ask Prepare, the caller asks and says turn_asked();
 * replies come by turn_prepared(), in any order. When all are in the turn decides (decide.h);
 * turn_next() then names owner 0 to ask Commit, with turn_decision(), and turn_committed() takes
 * its reply; then owner 0's replica, then the others. Of a step that it skips it asks all owners
 * Prepare once more (turn_unit_sums()) before it commits, for what the step came from (cause.h); an
 * owner that does not know leaves it unnamed. Workers that decide otherwise (another learning rate)
 * all get what owner 0 has on record, so that the others, which are named then, get one decision.
 * DONE: every owner has it.
 *
 * Replicas: turn's owner `owners + i` holds the slice of owner i, was returned the same gradients,
 * and is asked the same, behind owner 0. Its sum must be that owner's, and counts once. It takes
 * the owner's place where that is lost (turn_succeed()); one that is lost is waited for no more
 * (turn_lose()), until it comes back with all that the others have (turn_join()). Where either
 * happens before owner 0, or its replica in its place, has the decision on record, all that are
 * left are asked Prepare once more.
 *
 * Failure: when a connection goes the caller asks again what was not answered, with the decision of
 * then; what was answered stays, for an owner's successor has on record what its predecessor said.
 * A decision that any owner has recorded is passed on verbatim; that of a put as soon as it is
 * known, for what others still collect is dropped, and to who wanted to commit gradients the step
 * is over. An owner that says `over` ends the turn as OVER: it sealed the step after, so another
 * worker had finished this one on all owners. Owners that contradict each other are SHD_EINTERNAL.
 * After an error the turn is only good for turn_begin().
 */
#ifndef SHD_TURN_H
#define SHD_TURN_H

#include <stdbool.h>
#include <stdint.h>

#include "client/paths/decide.h"
#include "proto/base/status.h"
#include "proto/wire/wire.h"

enum turn_state {
    TURN_PREPARING,
    TURN_COMMITTING,
    TURN_DONE, /* turn_decided() tells */
    TURN_OVER, /* committed long ago, nothing else is known */
};

enum turn_kind { TURN_PREPARE, TURN_COMMIT };

struct turn;

/* Memory of a turn over so many owners, aligned as malloc() does, and a turn in it. `members`:
 * owners, or twice as many: the others are their replicas. */
uint64_t turn_bytes(uint32_t members);
struct turn *turn_init(void *memory, uint32_t owners, uint32_t members);

/* The member is a replica, and lost for good: it is asked nothing more, in later turns either. As
 * the last answer would, this may end the state; or the turn is PREPARING again. */
void turn_lose(struct turn *t, uint32_t member);

/* The owner is lost for good: its replica has its place, with what it has answered, and the replica
 * is the one that is lost. */
void turn_succeed(struct turn *t, uint32_t owner);

/* A member that is lost is there again, from the next turn_begin() on: until then nothing is asked.
 */
void turn_join(struct turn *t, uint32_t member);
bool turn_has_lost(const struct turn *t, uint32_t member);

struct turn_update {
    struct decide_args args; /* without prepared and owners: the turn's own */
    bool recorded_only;      /* derive nothing: some owner must have the decision on record; OVER,
                              * where one is lost and none has it */
    uint32_t units; /* of the model: where a step is skipped, find out by which; 0: do not */
    const uint8_t *watched; /* [units]: as in struct guard; borrowed; NULL: no rule is of units */
    uint32_t groups;        /* likewise, of the step: of a model with guard_audit; else 0 */
    const uint32_t *column; /* [units]: likewise; borrowed; NULL: none has one */
    double *norms;          /* [columns]: borrowed, the turn's as long as it lasts */
    uint32_t columns;
};

/* Forget what was and begin with this step. */
void turn_begin(struct turn *t, uint64_t step, const struct turn_update *update);

/* An owner to be asked what, or false: nothing to ask now. Until turn_asked() it is the same. */
bool turn_next(const struct turn *t, uint32_t *ret_owner, enum turn_kind *ret_kind);
void turn_asked(struct turn *t, uint32_t owner, enum turn_kind kind);

/* How often a loss had it ask all once more, in this turn and before. What was asked until then is
 * to be answered no more: a Prepare of before would be taken for the one that asks for units. */
uint32_t turn_anew(const struct turn *t);

/* What Prepare is to ask for: as in wire_prepare. */
uint32_t turn_unit_sums(const struct turn *t);
uint32_t turn_part_sums(const struct turn *t);

/* A member's reply. Repeated and late ones are dropped. Errors: SHD_EPROTO a step that was not
 * asked for; SHD_EINTERNAL owners contradict each other; with the last Prepared those of decide(),
 * and SHD_EINTERNAL where a record was needed and none is there. */
int turn_prepared(struct turn *t, uint32_t owner, const struct wire_prepared *prepared,
                  struct shd_err *e);
int turn_committed(struct turn *t, uint32_t owner, const struct wire_committed *committed,
                   struct shd_err *e);

enum turn_state turn_state(const struct turn *t);
uint64_t turn_step(const struct turn *t);

/* What to commit: from COMMITTING on. It stays where the turn is OVER, or a loss has it PREPARING
 * again: what is on its way may be asked once more in that moment. As long as nobody has committed
 * it may still change to one that an owner had recorded. */
const struct decision *turn_decision(const struct turn *t);

double turn_norm(const struct turn *t); /* of the step's mean gradient, then */

/* What owner 0 is to keep of units, then: update.norms, or NULL. Of a decision that is on record as
 * owner 0 has them, so that its replica gets them, too. */
const double *turn_unit_norms(const struct turn *t);

/* The result: DONE, or OVER (then only `over` says anything). */
struct decided turn_decided(const struct turn *t);

#endif
