/* Whether two requests, or replies, are the same, field by field. */
#ifndef SHD_TESTS_PROTO_SAME_H
#define SHD_TESTS_PROTO_SAME_H

#include "proto/wire/wire.h"

bool same_request(const struct wire_request *a, const struct wire_request *b);

bool same_reply(const struct wire_reply *a, const struct wire_reply *b);

#endif
