/* The format of a trail (kernels/kern.h), which lies in a model's kept segments: what must be the
 * same in a process and its successor. */
#ifndef SHD_TRAIL_H
#define SHD_TRAIL_H

#include <stdint.h>

#define KERN_CHUNK_ELEMS UINT64_C(65536) /* elements that a chunk word is about */
#define KERN_OP_MAX      ((UINT64_C(1) << 46) - 1)
#define KERN_TRAIL_BYTES UINT64_C(229376) /* of a host device's area, for any number of threads */

#endif
