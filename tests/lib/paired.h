/* Hosts of daemons that hold slices in pairs, as sessions with replicas read of them, and their
 * arbiter: files in a fixture's directory. */
#ifndef SHD_TESTS_PAIRED_H
#define SHD_TESTS_PAIRED_H

#include <stdbool.h>
#include <stdint.h>

#include "tests/lib/fixture.h"

#define PAIRED_HOSTS_MAX 3

extern char paired_dir[300]; /* the arbiter's */

/* Of hosts a, b and c, the first so many, each has that many of the fixture's devices, in order. */
void paired_make(const struct fixture *f, int hosts, int devices);

/* Daemons of their own, a host's each, whatever $SHD_TEST_PAIRS says; some of the hosts may have
 * none that runs. fail: NULL, fixture_start(); else of fixture_start_kept(). */
void paired_start(struct fixture *f, int count, int hosts, const char *fail);

/* What was made. Returns how many views were claimed. */
uint32_t paired_erase(const struct fixture *f);

/* The same; some view was claimed. */
void paired_remove(const struct fixture *f);

/* The next view: without this host; with it in again, to be filled; and filled. */
void paired_put_out(const char *host);
void paired_take_in(const char *host);
void paired_fill(const char *host);

#endif
