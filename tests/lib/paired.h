/* Hosts of daemons that hold slices in pairs, as sessions with replicas read of them, and their
 * arbiter: files in a fixture's directory. */
#ifndef SHD_TESTS_PAIRED_H
#define SHD_TESTS_PAIRED_H

#include <stdbool.h>
#include <stdint.h>

#include "tests/lib/fixture.h"

#define PAIRED_HOSTS_MAX 3u

struct hub;

extern char paired_dir[300]; /* the arbiter's */

/* Hosts a, b and c, the first so many, have cpu0, cpu1 and cpu2. */
void paired_make(const struct fixture *f, uint32_t hosts);

/* What that made; some view was claimed. */
void paired_remove(const struct fixture *f);

/* The next view: without this host; with it in again, to be filled; and filled. */
void paired_put_out(const char *host);
void paired_take_in(const char *host);
void paired_fill(const char *host);

void poll_until(struct hub *hub, bool (*is_so)(const struct hub *hub));

#endif
