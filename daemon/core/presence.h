/* Whether a model is there: three words of its ledger, and what comes of them.
 *
 * All owners have a model or none does, whichever of them dies in the middle of making or dropping
 * it, and whether or not who asked for it lives. What counts is one store of owner 0, to `ready`.
 * The others write down beforehand what they go by:
 *
 *   made      full at the others (origin: of the attempt), then open at owner 0, then at the others
 *   dropped   held at the others (first: instance of owner 0's), then gone at owner 0, then there
 *
 * So one that missed the end of it is told by whoever comes next and has asked owner 0.
 *
 * A replica of owner 0 is one of the others, until it is asked as owner 0 itself: then its word
 * counts. It is full last of all, so that it may open what waits there; it is held, and gone, first
 * of the others, so that what it has is whole. And it goes by the instance of the one whose replica
 * it was, for that is what the others have written down.
 * Pure; each store has its fail points. */
#ifndef SHD_PRESENCE_H
#define SHD_PRESENCE_H

#include <stdbool.h>
#include <stdint.h>

struct ledger_head;

enum presence {
    PRESENCE_NONE,  /* never complete, or gone: a successor does away with it */
    PRESENCE_WAITS, /* full; whether it is open is owner 0's word */
    PRESENCE_OPEN,
};

/* What a predecessor left. */
enum presence presence_of(const struct ledger_head *h);

/* It is a replica; of owner 0: of one that goes by that instance; 0: not known yet. */
void presence_twin(struct ledger_head *h, uint64_t instance);

/* The instance of the owner that it was a replica of; 0: it was of none, or that is not known. */
uint64_t presence_first(const struct ledger_head *h);

/* All its values are in. */
void presence_fill(struct ledger_head *h, uint64_t origin);

/* It is there. Of owner 0: for all. */
void presence_open(struct ledger_head *h, uint64_t origin);

/* One that is not open is not to be. */
void presence_withdraw(struct ledger_head *h);

/* It is to be dropped with owner 0's of instance `first`; 0: that has none. Of owner 0 itself, and
 * no replica: nothing. */
void presence_hold(struct ledger_head *h, uint64_t first, bool replica);

/* It is gone. Of owner 0: for all. */
void presence_end(struct ledger_head *h);

/* Owner 0's of instance `first` is gone, and this goes with it. */
bool presence_goes_with(const struct ledger_head *h, uint64_t first);

enum presence_told {
    PRESENCE_KEEP, /* it is open, or to be opened now */
    PRESENCE_DROP, /* it is not: owner 0's is another one */
    PRESENCE_ASK,  /* who asks is to say first what owner 0 has */
};

struct presence_word { /* of who asks for the model: what owner 0 said of its own */
    bool told;         /* origin counts */
    uint64_t origin;
    uint64_t first; /* the instance that it goes by; 0: not told */
    bool own;       /* it is a replica's that is asked as owner 0 */
};

/* What becomes of one that waits or is open. */
enum presence_told presence_hear(const struct ledger_head *h, const struct presence_word *word);

#endif
