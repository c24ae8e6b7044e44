/* The relay beside daemons: what one of them publishes of a model, by a reader's session of the
 * relay's own. Of one thread. */
#ifndef SHD_RELAY_SOURCE_H
#define SHD_RELAY_SOURCE_H

#include <stdint.h>

#include "proto/base/status.h"

struct board;
struct source;

struct source_key { /* borrowed */
    const char *dir, *device, *model;
    uint32_t owner, owners;
};

/* Attach at dir/DEVICE.sock, open the model by its name, map what is published. Errors: as of
 * attach_open(), SHD_ENOENT no such model, SHD_ENOTSUP it is in a GPU's memory, SHD_ENOMEM. */
int source_open(const struct source_key *key, struct source **ret_source, struct shd_err *e);
void source_close(struct source *source); /* NULL is a no-op */

const struct board *source_board(const struct source *source, uint32_t *ret_units);
uint64_t source_instance(const struct source *source);
uint64_t source_publish_bytes(const struct source *source);

/* A unit's slice, at any time perhaps about to change, and where in publish it is. */
const void *source_slice(const struct source *source, uint32_t unit, uint64_t *ret_at,
                         uint64_t *ret_bytes);

/* Readable when the daemon has ended the session. */
int source_fd(const struct source *source);

#endif
