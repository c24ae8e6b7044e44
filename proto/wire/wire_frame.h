/* Between a frame and protobuf-c's generated structs, in the memory of an arena. */
#ifndef SHD_WIRE_FRAME_H
#define SHD_WIRE_FRAME_H

#include <protobuf-c/protobuf-c.h>

#include "proto/wire/wire.h"

/* Decode a frame into the arena. Errors: SHD_ERANGE too long or does not fit the arena, SHD_EPROTO
 * malformed; the arena is as before then. */
int frame_decode(const ProtobufCMessageDescriptor *descriptor, const void *frame, size_t bytes,
                 struct wire_arena *arena, ProtobufCMessage **ret_m, struct shd_err *e);

/* SHD_ERANGE when m would exceed capacity or WIRE_FRAME_BYTES_MAX. */
int frame_encode(const ProtobufCMessage *m, void *buf, size_t capacity, size_t *ret_bytes,
                 struct shd_err *e);

#endif
