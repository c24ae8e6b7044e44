/* Field by field comparison of requests and replies, for the round trips of test_proto_wire.c. */
#ifndef SHD_WIRE_SAME_H
#define SHD_WIRE_SAME_H

#include "proto/wire/wire.h"

bool same_request(const struct wire_request *a, const struct wire_request *b);

bool same_reply(const struct wire_reply *a, const struct wire_reply *b);

#endif
