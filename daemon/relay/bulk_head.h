/* The head of a frame as it is on the wire. Pure. */
#ifndef SHD_RELAY_BULK_HEAD_H
#define SHD_RELAY_BULK_HEAD_H

#include <stdint.h>

#include "daemon/relay/bulk.h"
#include "proto/base/status.h"

#define BULK_PING 0u /* the type of a frame that says nothing */

void bulk_head_pack(const struct bulk_head *head, uint8_t out[BULK_HEAD_BYTES]);

/* Errors: SHD_EPROTO it is none, SHD_ERANGE its payload is too long. */
int bulk_head_unpack(const uint8_t in[BULK_HEAD_BYTES], struct bulk_head *ret_head,
                     struct shd_err *e);

#endif
