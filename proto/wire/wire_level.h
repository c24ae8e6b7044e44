/* What a peer of a lower feature level is not told. The levels are in wire.h, those of the fields
 * in wire_tables.c. */
#ifndef SHD_WIRE_LEVEL_H
#define SHD_WIRE_LEVEL_H

#include "proto/wire/wire_tables.h"

/* Take out of m, a message of t that is to be packed, what a peer of `level` does not know. Errors:
 * SHD_ENOTSUP, the message would say something else without it; it names field and levels. */
int level_fit(const struct wire_message *t, ProtobufCMessage *m, uint32_t level, struct shd_err *e);

#endif
