/* widen.h: published parameters as the fp32 the model computes with.
 *
 * An fp32 array is handed through as it is; bf16 and fp16 are widened, exactly, into a buffer that
 * belongs to a slot and lasts until the slot's next use. So a worker that reads 16-bit parameters
 * holds one unit (and the one it uses) in fp32 besides.
 */
#ifndef GPT_WIDEN_H
#define GPT_WIDEN_H

#include <stdint.h>

#include "client/shd.h"
#include "examples/gpt/pool.h"

enum widen_slot { WIDEN_UNIT, WIDEN_USED, WIDEN_SLOTS };

struct widen {
    enum shd_dtype dtype;
    struct pool *pool;          /* borrowed */
    uint64_t elems_max;         /* of a unit */
    float *buffer[WIDEN_SLOTS]; /* owned; NULL with fp32 */
};

/* SHD_ENOMEM, naming the bytes. */
int widen_init(struct widen *w, enum shd_dtype dtype, uint64_t elems_max, struct pool *pool,
               struct shd_err *e);
void widen_deinit(struct widen *w);

/* params[elems] of the dtype, elems at most elems_max. */
const float *widen(struct widen *w, enum widen_slot slot, const void *params, uint64_t elems);

/* Into the caller's out[elems], also from fp32. */
void widen_into(const struct widen *w, const void *params, uint64_t elems, float *out);

#endif
