/* SHA-256 leaves of several small tensors, of one unit or some, with all their arrays, for one
 * request. Their elements are copied behind whatever the device works on, so they are those of the
 * step that is there when that is queued; they are hashed on libuv's pool. */
#ifndef SHD_DIGEST_RANGE_H
#define SHD_DIGEST_RANGE_H

#include <stdint.h>

struct op;

/* Of op, a DIGEST of `tensors` tensors of a model where no step is being applied; what it is as of
 * goes with the reply. Errors:
 * SHD_ERANGE, SHD_EINVAL with the values; SHD_EBUSY (to be asked again), SHD_ENOMEM. */
int digest_range(struct op *op, uint64_t step, uint64_t updates);

#endif
