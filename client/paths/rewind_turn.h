/* A rewind by one session over N owners: whom it asks what, and what follows. Pure, so that a
 * simulator runs it as a session does: what the boards say and the owners answer comes in, requests
 * go out.
 *
 *     HOLD, owner 0 ─▶ HOLD, the others ─▶ GO, owner 0 ─▶ FOLLOW, all ─▶ done
 *
 * rewind_turn_begin(), then rewind_turn_next() names owners that may be asked at once, in any
 * order; the caller asks each of them turn.ask and gives rewind_turn_answered() the reply, until
 * all have answered. From owner 0's answer to GO on nothing can be taken back, and whoever sees on
 * the boards that the owners are apart goes on with it: rewind_turn_follow().
 *
 * Failure: an owner refuses (another session rewinds the model; there is no snapshot): nothing was
 * done, and the turn is only good for beginning anew. An owner that dies is asked again. */
#ifndef SHD_REWIND_TURN_H
#define SHD_REWIND_TURN_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"
#include "proto/wire/wire.h"

/* What an owner's board says of its last rewind; attempt 0: there was none. */
struct rewind_seen {
    uint64_t attempt; /* that began with it */
    uint64_t step;    /* where it went */
};

/* The newest of boards[count]. *ret_apart: some owner has not gone along with it yet. */
struct rewind_seen rewind_newest_of(const struct rewind_seen *boards, uint32_t count,
                                    bool *ret_apart);

/* What all owners are asked for one step of is of one run only if they had all gone along with the
 * same rewind when they were asked, and none went back before all had answered. */
struct rewind_mark {
    uint64_t attempt;
    bool apart;
};
struct rewind_mark rewind_mark_of(const struct rewind_seen *boards, uint32_t count);
bool rewind_between(const struct rewind_mark *asked, const struct rewind_mark *answered);

struct rewind_turn {
    uint32_t owners;
    uint32_t from, end, answers; /* owners that are asked now, and have answered */
    struct wire_rewind ask;      /* without the model */
    struct wire_rewound last;    /* the last answer */
};

/* Go back to what->step, from what is known of rewinds before: what->attempt. */
void rewind_turn_begin(struct rewind_turn *t, uint32_t owners, const struct wire_rewind *what);

/* Have all owners go along with one that was begun. */
void rewind_turn_follow(struct rewind_turn *t, uint32_t owners, struct rewind_seen rewind);

/* Owners from <= … < end are to be asked t->ask; false: all of it is done. */
bool rewind_turn_next(const struct rewind_turn *t, uint32_t *ret_from, uint32_t *ret_end);

/* One of them has answered; each once. Errors: SHD_EPROTO it says that it has not followed. */
int rewind_turn_answered(struct rewind_turn *t, uint32_t owner, const struct wire_rewound *answer,
                         struct shd_err *e);

#endif
