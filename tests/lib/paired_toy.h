/* The toy in a pair: cpu0 of host a is its owner, cpu1 of host b the owner's replica, or the other
 * way round. */
#ifndef SHD_TESTS_PAIRED_TOY_H
#define SHD_TESTS_PAIRED_TOY_H

#include <stdbool.h>
#include <stdint.h>

#include "client/shd.h"

struct hub;

extern char paired_heard[4096]; /* lines of the sessions: what they wait for */

/* devices: "cpu0+cpu1". */
shd_session *paired_connect(const char *devices);

/* At step 2, of which something is kept by `keep`, of a session with both. patience:
 * $SHARDD_REPLICA_PATIENCE. starts: ";" for one successor, with another state. */
shd_model *paired_begin(const char *patience, const char *starts, void (*keep)(shd_model *m));

/* Goes on with that daemon alone to step 4, as if nothing had been; and all of it ends. */
void paired_end(shd_model *m, const char *device, uint32_t steps);

/* The session has let go of the other one. */
bool paired_has_one(const struct hub *hub);

/* Put a host out, and have the session read that at once: not at its next look, which is up to five
 * seconds away. */
void paired_lose(struct hub *hub, const char *host);

/* As `keep`. */
void paired_snapshot(shd_model *m);

/* At step 2, which is kept in memory, and b is out. */
shd_model *paired_without_b(const char *patience);

/* By another session, with these alone. */
void paired_rewind_alone(const char *devices, const char *name, uint64_t to);

#endif
