/* The request table: a handler each (op_*.c), with who may send the request. */
#ifndef SHD_REQUESTS_H
#define SHD_REQUESTS_H

#include "daemon/net/op.h"
#include "proto/wire/wire.h"

#define ANY_ROLE (REQUEST_ROLE(WIRE_TRAINER) | REQUEST_ROLE(WIRE_READER) | REQUEST_ROLE(WIRE_ADMIN))

#define REQUEST_EXTERN(NAME, name) extern const struct request request_##name;
WIRE_REQUEST_MAP(REQUEST_EXTERN)
#undef REQUEST_EXTERN

extern const struct request *const requests[WIRE_REQUEST_TYPES];

#endif
