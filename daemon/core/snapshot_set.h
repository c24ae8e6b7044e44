/* The snapshots of a model that an owner has: which steps are kept, which goes when another comes,
 * and what of them a rewind (step_rewind.h) leaves. Pure: the shell has their memory, by the same
 * indices, and does what is said here.
 *
 *     NONE ─ memory is made ─▶ FREE ─ snapshot_set_begin() ─▶ COPYING ─▶ READY
 *                               ▲                               │          │
 *                               └───────── given up ────────────┴──────────┘
 *
 * One is copied at a time. What is READY is durable: it says so in its memory. A successor finds
 * those; one that was being copied is none. */
#ifndef SHD_SNAPSHOT_SET_H
#define SHD_SNAPSHOT_SET_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/core/ledger.h"

struct step;

#define SNAPSHOT_NO_ITEM UINT32_MAX

enum snapshot_state { SNAPSHOT_NONE, SNAPSHOT_FREE, SNAPSHOT_COPYING, SNAPSHOT_READY };

struct snapshot_item {
    enum snapshot_state state;
    uint64_t step;
    uint32_t lent; /* so many read it: its memory stays as it is, also when it is given up */
};

static inline bool snapshot_item_is_free(const struct snapshot_item *item)
{
    return item->state == SNAPSHOT_FREE && item->lent == 0;
}

struct snapshot_set {
    struct snapshot_item items[LEDGER_SNAPSHOTS];
    uint64_t want;    /* a step that was asked for; UINT64_MAX: none */
    uint32_t copying; /* item; SNAPSHOT_NO_ITEM: none */
};

void snapshot_set_init(struct snapshot_set *s);

/* What the ledger says: of steps that are a multiple of `every` (0: none) there are snapshots, and
 * so many of all are kept. */
uint64_t snapshot_set_every(const struct ledger *l);
uint32_t snapshot_set_keep(const struct ledger *l);
void snapshot_set_options(struct ledger *l, uint64_t every, uint32_t keep);

/* The one of this step that is there; an item in this state, which nobody reads. SNAPSHOT_NO_ITEM:
 * none. */
uint32_t snapshot_set_find(const struct snapshot_set *s, uint64_t step);
uint32_t snapshot_set_in(const struct snapshot_set *s, enum snapshot_state state);

/* Does anybody read one? */
bool snapshot_set_lent(const struct snapshot_set *s);

/* A snapshot of `step` is asked for. SHD_OK: it is there. SHD_EBUSY: it is copied, or will be when
 * that step is open; ask again. SHD_ESTEP: too late. */
int snapshot_set_ask(struct snapshot_set *s, const struct step *core, uint64_t step);

/* Is the open step to be copied now, and into which item? Then snapshot_set_begin() says that its
 * copy is queued, before any update of that step, and snapshot_set_copied() that it is done.
 * SNAPSHOT_NO_ITEM: not now. */
uint32_t snapshot_set_next(const struct snapshot_set *s, const struct ledger *l,
                           const struct step *core);
void snapshot_set_begin(struct snapshot_set *s, uint32_t item, uint64_t step);

/* The copy is over. True: it is to be made durable; then it is READY. Else it is given up: it has
 * failed, or its step was given up meanwhile by a rewind that is under way. */
bool snapshot_set_copied(struct snapshot_set *s, const struct ledger *l, bool good,
                         uint32_t *ret_item);

/* There are more than are kept: the one that is to be given up now. One that a rewind holds stays.
 * SNAPSHOT_NO_ITEM: none. */
uint32_t snapshot_set_excess(const struct snapshot_set *s, const struct ledger *l);

/* One whose memory is not needed, as there is that of another for the next snapshot. */
uint32_t snapshot_set_spare(const struct snapshot_set *s);

/* The model goes back to `step`: one that is later, and is to be given up. What was asked for is
 * asked for no more. */
uint32_t snapshot_set_later(struct snapshot_set *s, uint64_t step);

#endif
