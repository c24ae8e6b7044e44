/* Where daemons are: the one rule, which libshd and every verb of shardctl follow.
 *
 *   1. the address that was given (shd_options.address, --address)
 *   2. $SHARDD_ADDRESS
 *   3. the only `shardctl up` or `shardctl run` of this user that goes on
 *   4. /run/shardd
 *
 * Empty is as not given. Several of the third kind are an error that names them, whether or not
 * there are daemons in /run/shardd: which was meant is not for us to guess.
 *
 * Each `run`, and each keeper of an `up`, has a directory of its own in the first of
 * $XDG_RUNTIME_DIR, /run (root) and ~/.cache/shardd that is its user's (where_base()). In it is a
 * file "lock", which is locked as long as the owner lives, and says the address. rundir.h makes
 * them.
 */
#ifndef SHD_WHERE_H
#define SHD_WHERE_H

#include <stdbool.h>
#include <stddef.h>

#include "proto/base/status.h"

#define WHERE_ENV     "SHARDD_ADDRESS"
#define WHERE_DEFAULT "/run/shardd"
#define WHERE_BYTES   17408u /* an address with 1,024 devices */

#define WHERE_RUN_PREFIX "shardd-run-"
#define WHERE_UP_PREFIX  "shardd-up-"
#define WHERE_LOCK       "lock"

enum where_by { WHERE_GIVEN, WHERE_BY_ENV, WHERE_ONLY, WHERE_BY_DEFAULT };

struct where {
    char address[WHERE_BYTES]; /* as address.h has it */
    enum where_by by;
};

/* Errors: SHD_EINVAL several go on; SHD_ERANGE the address is too long. */
int where_find(const char *given, struct where *ret_where, struct shd_err *e);

/* For errors, behind the address: " (the default: ...)", " ($SHARDD_ADDRESS)"; "" where it was
 * given. */
const char *where_said(enum where_by by);

/* The index-th place for directories of our own, "" where this user has none of the kind; false
 * behind the last. */
bool where_base(unsigned index, char *buf, size_t bytes);

/* Call fn with the path of each directory in base that a `run` or `up` of this user has made. */
void where_each(const char *base, void (*fn)(const char *path, void *arg), void *arg);

#endif
