/* The state of a model as `shardctl replay` compares it, and what is set in a fork so that it is
 * trained as the run was. */
#ifndef SHD_CTL_REPLAY_STATE_H
#define SHD_CTL_REPLAY_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include "client/shd.h"

#define REPLAY_ARRAYS 4u /* parameters, two moments, the average */

struct replay_state {
    bool known;
    char digest[65]; /* shd_digest() */
    uint32_t units;
    uint64_t *hashes; /* owned, [units * REPLAY_ARRAYS]: which of them differ */
};

/* Of a model that nobody trains. Errors: those of shd_digest() and shd_get(); SHD_ENOMEM. */
int replay_state_read(shd_model *m, struct replay_state *ret_state, struct shd_err *e);
void replay_state_free(struct replay_state *state); /* zeroed: a no-op */

/* The first unit that is other in the two; UINT32_MAX: none, counts alone are. */
uint32_t replay_state_unit(const struct replay_state *a, const struct replay_state *b);

#define REPLAY_KEY_BYTES 200u

/* Set in fork, which was made of a snapshot of step `from`, what has been set in m since for a step
 * below `end`. Owners know the last value of a setting alone: ret_changed names one that was
 * changed since the snapshot, and may have been so more than once ("": none was). Errors:
 * SHD_ENOENT something has been in force there that is not any more, so it is not known from when
 * to when; those of shd_settings() and shd_model_set(). */
int replay_sets(shd_model *m, shd_model *fork, uint64_t from, uint64_t end,
                char ret_changed[REPLAY_KEY_BYTES], struct shd_err *e);

#endif
