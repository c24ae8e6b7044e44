/* Do two runs agree on what steps came to? What `shardctl replay` has in hand when its worker is
 * done, and the sentence that it makes of that. Numbers in, a finding out: no daemon is asked. */
#ifndef SHD_CTL_REPLAY_JUDGE_H
#define SHD_CTL_REPLAY_JUDGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/shd.h"

enum replay_verdict {
    REPLAY_AGREES,
    REPLAY_DIFFERS,
    REPLAY_UNKNOWN, /* the two were not made of the same, so their bits say nothing */
};

struct replay_finding {
    enum replay_verdict verdict;
    uint64_t step;    /* the first that differs, counted from 1 */
    const char *what; /* "norm", "loss", "skipped"; unknown: "put", "lr", "loss_scale", "guard" */
    double was, now;
};

/* Rows of the same steps, ascending, of the run and of its replay.
 * Norms and losses count, bit by bit; what depends on the clock does not. The first step in which
 * they differ tells: those behind it follow from it.
 *
 * REPLAY_UNKNOWN: rates or loss scales differ, so another command line was run; a put took the
 * place of a step in one of them; or a rule with a window skipped a step, whose window a fork does
 * not have. In the last step such a rule comes after the norm, which is compared all the same;
 * *ret_state says whether states can be, too. */
struct replay_finding replay_judge(const struct shd_step_row *was, const struct shd_step_row *now,
                                   uint32_t count, bool *ret_state);

/* A number of an array, whichever bits differ. */
uint64_t replay_hash(const float *values, uint64_t elems);

#endif
