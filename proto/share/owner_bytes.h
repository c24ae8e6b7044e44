/* The memory that an owner needs for a model, segment by segment: the one function of it, which the
 * daemon admits by, `shardctl plan` predicts by, and /status agrees with to the byte.
 *
 * Of owners in host memory. A device's segments are rounded up to its granules, and its trail (kept
 * in the state) comes on top. Pure.
 */
#ifndef SHD_OWNER_BYTES_H
#define SHD_OWNER_BYTES_H

#include <stdbool.h>
#include <stdint.h>

struct shardmap;

struct owner_ask {
    uint64_t spec_bytes; /* of its canonical JSON, without NUL */
    uint32_t returns;    /* gradients of a unit in a step: spec_returns() */
    uint32_t sessions;   /* that train it, each with */
    uint32_t slots;      /* so many slots; 0: none */
    bool keeper;         /* a successor may adopt it: memory is kept spare for that */
};

struct owner_bytes {
    uint64_t state, ledger, publish, board; /* from the beginning */
    uint64_t inbox;                         /* of all sessions */
    uint64_t spare;
    uint64_t all;       /* of these */
    uint64_t spill_max; /* more, at most, while gradients wait for slow workers */
};

struct owner_bytes owner_bytes(const struct shardmap *map, const struct owner_ask *ask);

/* The ledger, whole pages (daemon/core/ledger.h lays it out). */
uint64_t owner_ledger_bytes(const struct shardmap *map, const struct owner_ask *ask);

#endif
