/* How payloads cross between two relays that know each other by then: within the TLS connection of
 * their heads (bulk.c), or beside it. A table of functions for each way; an end is what one of two
 * relays has of it, one thread's. */
#ifndef SHD_RELAY_BULK_PATH_H
#define SHD_RELAY_BULK_PATH_H

#include <stdint.h>

#include "proto/base/status.h"

struct bulk_path {
    const char *name; /* of the cluster file */

    /* Up to bytes of a payload; the same ones again until *ret_done > 0 are over. Never waits:
     * SHD_PENDING none are. Errors: SHD_EGONE, SHD_ETIMEDOUT, SHD_EPROTO, SHD_EIO. */
    int (*send)(void *end, const uint8_t *data, uint64_t bytes, uint64_t *ret_done,
                struct shd_err *e);
    int (*receive)(void *end, uint8_t *to, uint64_t bytes, uint64_t *ret_done, struct shd_err *e);
};

#endif
