/* The relay in a daemon's stead: what another host's daemon publishes of a model, in memory that
 * this host's workers map as if it were the daemon's. One for all of them, so each slice crosses
 * the network once a step.
 *
 * A thread of its own fills it (feed.h has the other side). When that hangs up the mirror is dead
 * for good: sessions that have it end, and the next one makes another. */
#ifndef SHD_RELAY_MIRROR_H
#define SHD_RELAY_MIRROR_H

#include <stdint.h>

#include "proto/base/status.h"

struct mirror;
struct relay;
struct segment;
struct traffic;

struct mirror_key {
    const char *device, *model; /* borrowed */
    uint32_t owner, owners;
    uint64_t instance; /* Layout's */
};

enum mirror_state { MIRROR_FILLING, MIRROR_FILLED, MIRROR_DEAD };

/* The mirror of this model, one reference: one that lives, or a new one. Errors: SHD_ENOMEM,
 * SHD_EBUSY. */
int mirror_get(struct relay *relay, const struct mirror_key *key, struct mirror **ret_mirror,
               struct shd_err *e);
void mirror_put(struct mirror *mirror); /* NULL is a no-op */

/* Any thread. DEAD: the reason is in e. */
enum mirror_state mirror_state(struct mirror *mirror, struct shd_err *e);

/* Of one that is filled: its board says so from now on, unless it says something later. Any thread.
 */
void mirror_attempt(struct mirror *mirror, uint64_t attempt, uint64_t tried);

/* Of one that is filled: borrowed as long as the reference. */
const struct segment *mirror_publish(const struct mirror *mirror);
const struct segment *mirror_board(const struct mirror *mirror);
uint32_t mirror_units(const struct mirror *mirror);

/* Where what crosses of its model is counted; NULL: it is not. */
struct traffic *mirror_traffic(const struct mirror *mirror);

#endif
