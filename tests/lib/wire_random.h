/* Random valid requests and replies, and their comparison, for the tests of proto/wire/wire.h. */
#ifndef SHD_WIRE_RANDOM_H
#define SHD_WIRE_RANDOM_H

#include "proto/wire/wire.h"
#include "tests/lib/test.h"

/* name: storage for one name. */
struct wire_request random_request(uint64_t *seed, enum wire_request_type type,
                                   char name[WIRE_NAME_BYTES_MAX]);

struct wire_reply random_reply(uint64_t *seed, enum wire_reply_type type,
                               char name[WIRE_NAME_BYTES_MAX]);

/* An arena of exactly `bytes` bytes of heap, so that a checker sees every byte past its end. */
struct wire_arena arena_new(size_t bytes);

#endif
