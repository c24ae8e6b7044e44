/* How payloads cross between two relays that know each other by then: within the TLS connection of
 * their heads (bulk.c), or beside it (bulk_ucx.h). A table of functions for each way; an end is
 * what one of two relays has of it, one thread's. */
#ifndef SHD_RELAY_BULK_PATH_H
#define SHD_RELAY_BULK_PATH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

#define BULK_HELLO_BYTES 8192u

struct bulk_hello { /* what the other end has to know, told within TLS: its path's own */
    uint8_t data[BULK_HELLO_BYTES];
    size_t bytes;
};

struct bulk_path {
    const char *name; /* of the cluster file */
    const char *said; /* of /status */

    /* Those of the path within TLS, which has nothing to make or to say, are NULL down to close. */

    /* Once, before the process has threads. Errors: SHD_ENOTSUP this host cannot. */
    int (*load)(struct shd_err *e);
    /* Errors: SHD_ENOMEM, SHD_EIO. */
    int (*open)(void **ret_end, struct bulk_hello *ret_own, struct shd_err *e);
    /* What the other end has said, who it is being known. Errors: SHD_EPROTO, SHD_EIO. */
    int (*join)(void *end, const struct bulk_hello *peer, struct shd_err *e);
    /* Go on with what is under way; SHD_OK: there is nothing to do before fd() has events. */
    int (*turn)(void *end);
    int (*fd)(const void *end);
    /* gently: what was sent may still be on its way. NULL is a no-op. */
    void (*close)(void *end, bool gently);

    /* Up to bytes of a payload; the same ones again until *ret_done > 0 are over. Never waits:
     * SHD_PENDING none are. Errors: SHD_EGONE, SHD_ETIMEDOUT, SHD_EPROTO, SHD_EIO. */
    int (*send)(void *end, const uint8_t *data, uint64_t bytes, uint64_t *ret_done,
                struct shd_err *e);
    int (*receive)(void *end, uint8_t *to, uint64_t bytes, uint64_t *ret_done, struct shd_err *e);
};

#endif
