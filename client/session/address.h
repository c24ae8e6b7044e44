/* Addresses: where the daemons of a session are.
 *
 *   "DIR"            every daemon in runtime directory DIR: each DEVICE.sock in it, in natural
 *                    order (cpu2 before cpu10)
 *   "DIR?cpu0,cpu1"  these daemons of it, in this order
 *   "DIR?cpu0+cpu2,cpu3+cpu1"  pairs: the second of each holds the same slice as the first
 *   "local:"         none: owners inside this process
 *
 * Position in the list is the owner index, so it decides which slice each daemon holds.
 */
#ifndef SHD_ADDRESS_H
#define SHD_ADDRESS_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

/* Where the service manager of a directory's daemons listens for what they say, `shardctl run` and
 * `up` that is; systemd does elsewhere. Not *.sock: those are daemons. */
#define ADDRESS_NOTIFY "notify"

struct address {
    bool local;
    char *dir;      /* owned; NULL when local */
    char **devices; /* owned, [count], each owned: the owners' first, then their replicas' */
    uint32_t count;
    uint32_t owners; /* == count, or half of it: device owners + i holds the slice of device i */
};

/* Parse text (NULL: what where_find() says) and, for a bare DIR, list the directory. Errors:
 * SHD_EINVAL malformed, or a bare DIR of pairs; SHD_ENOENT no such directory or no daemon in it;
 * SHD_EAUTH directory not readable; SHD_ERANGE too many daemons or path too long; SHD_ENOMEM. */
int address_parse(const char *text, struct address *ret_address, struct shd_err *e);
void address_free(struct address *address); /* leaves it empty; empty is a no-op */

/* Order of device names: runs of digits compare as numbers. As strcmp(). */
int address_compare(const char *a, const char *b);

#endif
