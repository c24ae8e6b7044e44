/* Counting what this owner has of a tensor, beside training.
 *
 * Happy path: a piece of the range is copied aside on the device, behind whatever it works on, and
 * counted on libuv's pool; then the next one, until the range is done. So an update waits for one
 * copy of at most SHOW_PIECE_BYTES, never for the counting, and a GPU's memory is looked at as the
 * host's is. Failure: pieces are of one state or it is an error: SHD_ESTEP when the model went on
 * (or, of gradients, one was summed) between two of them. Loop thread.
 */
#ifndef SHD_SHOW_H
#define SHD_SHOW_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"
#include "proto/share/tally.h"

struct model;
struct show;

#define SHOW_GRAD        3u
#define SHOW_UPDATE      4u /* the last update of the parameters */
#define SHOW_EMA         5u
#define SHOW_VALUES_MAX  131072u
#define SHOW_PIECE_BYTES (UINT64_C(1536) * 1024) /* of all arrays together */

struct show_ask {
    struct model *model; /* borrowed; ready */
    uint32_t tensor;     /* of the model, with a range inside of it */
    uint32_t array;      /* SHARDMAP_PARAM, _M or _V, or one of those above */
    uint64_t first, elems;
    bool values; /* these as well: elems is at most SHOW_VALUES_MAX */
};

/* What it is as of, and what was counted. */
struct shown {
    uint64_t step, updates; /* updates: of the unit */
    uint64_t of_step;       /* of gradients, with the next */
    uint32_t groups;
    uint64_t elems; /* of the range that are here; 0: none, and no tally */
    struct tally tally;
    const float *values; /* [elems]; NULL: not asked for */
};

/* Begin, while no step is being applied. SHD_PENDING: done(ctx, status, e) follows. SHD_OK: nothing
 * of the range is here, shown_of() has the rest already. The show is the caller's to free(), but
 * not while it is pending. Errors: SHD_EINVAL, SHD_ENOENT, SHD_ENOTSUP there is no such array
 * (now), and why; SHD_EBUSY to be asked again in OPS_RETRY_MS; SHD_ENOMEM; then *ret_show is NULL.
 */
struct show_done {
    void (*fn)(void *ctx, int status, const struct shd_err *e);
    void *ctx;
};
int show_begin(const struct show_ask *ask, const struct show_done *done, struct show **ret_show,
               struct shd_err *e);

const struct shown *shown_of(const struct show *show);

#endif
