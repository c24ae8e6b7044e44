/* The board: shared words by which a daemon tells every worker what can be read, with no message.
 *
 * One writer (the daemon), any number of readers that map it read-only. Each word has a cache
 * line of its own. A unit's version is the step its published parameters belong to; it is stored
 * (release) after the last byte it vouches for, then sleepers are woken. Readers spin briefly,
 * then sleep in FUTEX_WAIT on the low half of the word (works on a read-only mapping). One that has
 * a ring (ring.h) can sleep for other things as well, and is woken by its side channel.
 *
 * A reader trusts nothing: the header is checked once, indices are its own, and versions are only
 * compared.
 */
#ifndef SHD_BOARD_H
#define SHD_BOARD_H

#include <stdint.h>

#include "proto/base/decision.h"

#define BOARD_MAGIC UINT64_C(0x316472616f626873) /* "shboard1" */

struct shd_err;

struct board_word {
    _Alignas(64) _Atomic uint64_t value;
};

struct board {
    _Alignas(64) uint64_t magic;
    uint32_t units;
    uint32_t layout;             /* layout epoch: 0; owners added and removed later */
    _Atomic uint64_t attempt;    /* 1 + the resets of open steps so far; 0: never said */
    _Atomic uint64_t tried;      /* the step that was open when attempt was said */
    _Atomic uint64_t rewound_to; /* the step that the last rewind went back to, */
    _Atomic uint64_t rewound;    /* and the attempt that began with it; 0: there was none */
    struct board_word step;      /* open step */
    struct board_word phase;     /* enum step_phase */
    struct board_word version[]; /* [units] */
};

uint64_t board_bytes(uint32_t units);

/* Daemon: lay out an empty board in zeroed memory of board_bytes(units). Versions start at
 * UINT64_MAX ("nothing published"). */
void board_init(struct board *b, uint32_t units);

/* Reader: check a mapped board of `bytes` bytes for `units` units. SHD_ESEGMENT with the values. */
int board_check(const struct board *b, uint64_t bytes, uint32_t units, struct shd_err *e);

/* Daemon: say that the model went back to `step`, whose attempt `attempt` begins with that: before
 * the versions of that step are published. Reader: what was said, newest; 0: nothing. */
void board_set_rewound(struct board *b, uint64_t step, uint64_t attempt);
uint64_t board_rewound(const struct board *b, uint64_t *ret_step);

/* Daemon: nothing of any unit can be read from here on. */
void board_unpublish(struct board *b);

/* Daemon: store (release) and wake all waiters. */
void board_publish(struct board *b, uint32_t unit, uint64_t version);

/* Daemon: store; nobody sleeps on these words. */
void board_set_step(struct board *b, uint64_t step, uint64_t phase);
void board_set_attempt(struct board *b, uint64_t step, uint64_t attempt);

/* Reader: the step whose gradients are collected, which is the next one while one is applied. It
 * may be told of a moment later, never before. */
uint64_t board_collecting(const struct board *b);

/* Daemon: store, of a board that nobody has been given yet. */
void board_begin(struct board *b, uint32_t unit, uint64_t version);

/* What a worker awaits in its ring (ring.h) that sleeps until this unit of the model with this
 * handle is published: never 0. */
uint64_t board_awaited(uint32_t model, uint32_t unit);

/* Reader: has unit reached version (acquire)? UINT64_MAX counts as not reached. */
int board_reached(const struct board *b, uint32_t unit, uint64_t version);
uint64_t board_version(const struct board *b, uint32_t unit);

/* What was said of attempts while `step` was open, or before; 0 where a later one was reset since.
 */
uint64_t board_attempt(const struct board *b, uint64_t step);

/* Reader: the same as board_version(), or UINT64_MAX while the unit's parameters may be changing.
 * As in a seqlock, what was read between two calls with the same answer (but that one) is whole, of
 * that version. */
uint64_t board_stable_version(const struct board *b, uint32_t unit);

/* Reader: wait until reached, at most timeout_ns (0: only look). Returns SHD_OK or SHD_ETIMEDOUT
 * (no text: the caller knows whom it waited for and looks after it between slices). */
int board_wait(const struct board *b, uint32_t unit, uint64_t version, uint64_t timeout_ns);

/* Reader: the same, and ends with SHD_ECANCELED when *stop, a word of this process, is not 0 any
 * more. Sleeps on both words at once where the kernel can (futex_waitv: Linux 5.16); else it looks
 * at *stop every 2 ms. */
int board_wait_or(const struct board *b, uint32_t unit, uint64_t version,
                  const _Atomic uint32_t *stop, uint64_t timeout_ns);

/* Store 1 in *stop, and wake who waits so. */
void board_stop(_Atomic uint32_t *stop);

#endif
