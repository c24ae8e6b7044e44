/* Replicas: map->owners[owner_count + i] holds the same slice as owner i, on another host. It is
 * returned the same gradients and asked to commit the same steps, so it is at the same bits, or a
 * step behind for a moment. Parameters are read from owners alone.
 *
 * What is returned lies in the owner's inbox, where the worker has written it, and is copied to the
 * replica's when that is told. Where an owner is lost for good its replica's segments go over its
 * predecessor's as a successor's do (map.h), without a new session: what was returned to it counts.
 */
#ifndef SHD_REPLICA_H
#define SHD_REPLICA_H

#include "client/paths/map.h"
#include "client/paths/path.h"

extern const struct mover_ops mover_replica;

/* hub->members.succeed() of a session. False: an owner's replica has not done yet what the owner
 * may have published, and what is read must not go back. Errors are the link's fault. */
bool replica_succeed(void *ctx, uint32_t owner, bool gone);

/* After an OpenModel of all: does each replica have its owner's model? Errors: SHD_ESTEP. */
int replica_check(const struct shd_model *m, struct shd_err *e);

#endif
