/* Every message's limits, as data; see wire_message.h. */
#ifndef SHD_WIRE_TABLES_H
#define SHD_WIRE_TABLES_H

#include "proto/wire/wire_message.h"

/* Both in the order of the body's tags in shd.proto. */
extern const struct wire_message wire_requests[WIRE_REQUEST_TYPES];
extern const struct wire_message wire_replies[WIRE_REPLY_TYPES]; /* none of WIRE_REPLY_NONE */

#endif
