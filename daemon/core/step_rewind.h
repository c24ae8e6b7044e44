/* Going back to an earlier step of a model, of which a snapshot is kept: parameters and moments,
 * and what the ledger had beside them. Part of the step core (step.h).
 *
 *     step_rewind_take() .. into a snapshot, while the step is open ..
 *     step_rewind_hold(), at all owners → step_rewind_goes(), of owner 0
 *     step_rewind() → step_rewind_drop() until it says so → the arrays are copied back →
 *     step_rewind_done() → a core anew, by step_init()
 *
 * What decides is one store of owner 0, `under_way` in its ledger; the others follow. From then on
 * the snapshot is copied back until it is there, which can be begun anew at any point: a successor
 * does so before it looks at anything else. So an owner is at the one step or at the other.
 *
 * Steps go back, rounds never do: the attempt that begins (step_reset.h) is chosen so that its
 * round comes after each that any owner may have begun. What a worker sends of a step that was
 * given up carries an earlier attempt, and counts for nothing. */
#ifndef SHD_STEP_REWIND_H
#define SHD_STEP_REWIND_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/core/ledger.h"
#include "daemon/core/ledger_guard.h"
#include "proto/spec/settings.h"

struct step;
struct step_actions;

/* What a ledger says of a step, beside the counts of its units and the blob. */
struct rewind_record {
    uint64_t step; /* so many were committed; the rest says nothing where it is 0 */
    uint64_t put_at;
    struct ledger_record record;
    struct ledger_more more;
    struct settings_old_kept kept; /* of a ledger that has settings so */
    struct ledger_guarded guarded;
};

/* What it says beside that, from version 8 on. */
struct rewind_more {
    struct settings_kept kept;
    struct ledger_chosen chosen;
};

/* Bytes of that: of older versions none. */
uint64_t rewind_more_bytes(const struct ledger *l);

/* Of the open step, which is not being applied. *ret_more: only where that has bytes.
 * updates[units]; blob[LEDGER_BLOB_BYTES], of which record.blob_bytes count. */
void step_rewind_take(const struct step *s, struct rewind_record *ret_record,
                      struct rewind_more *ret_more, uint64_t *ret_updates, uint8_t *ret_blob);

/* Sessions agree first: whoever asks has all owners hold their snapshot of the step, owner 0 first,
 * and then owner 0 go. Of two that ask at once the later one counts, by owner 0's clock (UTC); a
 * rewind that is done ends what was held. */
struct rewind_ask {
    uint64_t step;
    uint64_t attempt;   /* that began with the last rewind the session knows of; 0: none */
    uint64_t consent;   /* of the hold at owner 0, by its clock; 0: to owner 0, which says when */
    bool keep_settings; /* those that are given after the snapshot stay (settings_keep()) */
};

/* What a guard's windows have of single units, beside that: bytes of it, as it is at the open step,
 * and given back, before step_rewind_done(). */
uint64_t step_rewind_window_bytes(const struct ledger *l);
void step_rewind_take_window(const struct step *s, void *ret_window);
void step_rewind_put_window(struct ledger *l, const void *window);

/* May the snapshot be held for this session? False: another one rewinds the model. Where nothing is
 * held consents are not compared: the last one may be of another owner 0's clock. */
bool step_rewind_may_hold(const struct ledger *l, const struct rewind_ask *ask);
void step_rewind_hold(struct ledger *l, const struct rewind_ask *ask);

/* Is what was held at all owners still held here, at owner 0? */
enum rewind_goes {
    REWIND_GOES,
    REWIND_GONE,       /* it is done */
    REWIND_BY_ANOTHER, /* session */
};
enum rewind_goes step_rewind_goes(const struct ledger *l, const struct rewind_ask *ask);

/* The attempt that began with the last rewind that is done, and where that went. 0: none was. */
uint64_t step_rewind_last(const struct ledger *l, uint64_t *ret_step);

/* Has this owner gone along with the rewind that this attempt began with? */
bool step_rewind_followed(const struct ledger *l, uint64_t attempt);

/* Begin: attempt 0 is owner 0's word, which chooses one; else it has chosen this one. more: the
 * snapshot's, for settings that stay; may be NULL where rewind_more_bytes() is 0: none do. SHD_OK:
 * it is under way. SHD_PENDING: an update runs, ask again. Errors: SHD_ENOTSUP a ledger of an older
 * version; SHD_ESTEP the model is not that far; SHD_ERANGE an attempt that cannot be, or settings
 * without room. */
int step_rewind(struct step *s, uint64_t step, uint64_t attempt, const struct rewind_more *more,
                struct shd_err *e);

/* Give up what the open step has; as step_put_clear(). */
int step_rewind_drop(struct step *s, struct step_actions *ret_actions);

/* Let a fresh ledger, of the same units, begin where a snapshot of another one is; go_on: that of
 * the other's guard. Nothing in the record is looked at: ledger_adopt() does that. Its settings are
 * not taken. */
void step_rewind_start(struct ledger *l, const struct rewind_record *record,
                       const struct ledger_chosen *chosen, uint64_t go_on, const uint64_t *updates,
                       const uint8_t *blob);

/* What a guard let go on up to there, as it was at that step. */
uint64_t step_rewind_go_on(const struct ledger *l, uint64_t step);

/* The arrays are there: so is the rest, and nothing is under way. blob[record->record.blob_bytes]
 */
void step_rewind_done(struct ledger *l, const struct rewind_record *record,
                      const struct rewind_more *more, const uint64_t *updates, const uint8_t *blob);

#endif
