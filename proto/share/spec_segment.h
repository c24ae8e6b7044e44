/* A spec that no message holds: its JSON at the beginning of a segment (SEGMENT_SPEC), which is
 * passed over the side channel.
 *
 *   to a daemon    the client makes it and passes it under a ticket of its own; the request that
 *                  needs the spec names ticket, bytes and sum
 *   from a daemon  a segment of Layout, claimed as the others
 *
 * Whoever receives it copies it before anything else looks at it: its maker may write to it at any
 * time. Pure but for memory and the descriptor. */
#ifndef SHD_SPEC_SEGMENT_H
#define SHD_SPEC_SEGMENT_H

#include <stdint.h>

#include "proto/share/segment.h"

#define SPEC_SUM_BYTES         32u   /* SHA-256 */
#define SPEC_SEGMENT_BYTES_MIN 4096u /* less is in its message, in builds to come as well */

/* What a spec's bytes are checked by. */
struct spec_stub {
    uint64_t bytes; /* of the JSON */
    uint8_t sum[SPEC_SUM_BYTES];
};

/* Of json[bytes]. Errors: SHD_EINTERNAL. */
int spec_stub_of(const char *json, uint64_t bytes, struct spec_stub *ret_stub, struct shd_err *e);

/* A segment with json[bytes], SPEC_SEGMENT_BYTES_MIN to SPEC_JSON_BYTES_MAX. Errors: SHD_ERANGE,
 * SHD_ENOMEM, SHD_EIO. */
int spec_segment_new(const char *json, uint64_t bytes, struct segment *ret_segment,
                     struct shd_err *e);

/* Whether a segment that a peer has passed can have a JSON of so many bytes: its size, and that it
 * is a sealed memfd, which cannot block who reads it. Errors: SHD_ERANGE, SHD_ESEGMENT. */
int spec_segment_check(int fd, uint64_t bytes, struct shd_err *e);

/* Copy the JSON out of a checked one to ret_json[bytes] (no NUL). Errors: SHD_EIO, SHD_ESEGMENT. */
int spec_segment_read(int fd, uint64_t bytes, char *ret_json, struct shd_err *e);

/* Whether json[stub->bytes] is what stub is of. Errors: SHD_ESEGMENT with both sums,
 * SHD_EINTERNAL. */
int spec_stub_check(const struct spec_stub *stub, const char *json, struct shd_err *e);

#endif
