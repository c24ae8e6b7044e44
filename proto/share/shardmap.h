/* The places of an owner's slices in its segments: the one place for this arithmetic, used by the
 * daemon that makes the segments and by the worker that maps them and checks their sizes.
 *
 * Owner `owner` of `owners` holds one slice of every unit: layout_slice(), or all or nothing of one
 * that an owner has whole (deal.h). Laid end to end in unit order the slices form its flat array of
 * `elems` elements; unit u starts at base_elem[u].
 *
 *   publish  flat array in the publish dtype; or, with a codec, of each slice its tiles
 *            (proto/base/dtype.h), padded to whole pages
 *   state    fp32 flat arrays one after the other: parameters; then, without frozen units, means
 *            and Adafactor's, first moment, second moment (AdamW only), the parameters' moving
 *            average (where the spec has one); without frozen units alone, gradient accumulator,
 *            the means and Adafactor's at its end; then, where tensors are updated whole (Muon,
 *            LAMB, Adafactor), room for an update of one unit, which keeps nothing between two
 *            updates. Moments may be in 8 bits (proto/spec/optimizer.h): then each unit's slice of
 *            one is whole pages of tiles, and an array has so many words of 4 bytes as these are
 *   inbox    `slots` slots of slot_bytes each; a unit's gradient slice (fp32) starts its slot. Then
 *            what the worker shows of itself (activity.h)
 *
 * Slices are whole pages in every dtype, so are all offsets. Pure but for one allocation.
 */
#ifndef SHD_SHARDMAP_H
#define SHD_SHARDMAP_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/dtype.h"

struct shd_err;
struct slice;
struct spec;

struct shardmap {
    uint32_t owner, owners;
    uint32_t units;
    uint32_t arrays;        /* of the state but the accumulator: spec_arrays() */
    uint32_t moments;       /* of these moments: spec_moments() */
    bool int8;              /* they are in 8 bits */
    enum shd_dtype publish; /* dtype of the published copy, */
    enum codec codec;       /* and how it travels */
    struct slice *slice;    /* owned, [units], in unit coordinates; elems may be 0 */
    uint64_t *base_elem;    /* owned, [units]: of the slice in the owner's flat array */
    uint64_t elems;         /* of the flat array: sum of slice elems */
    uint64_t *train_base;   /* owned, [units]: the same without frozen units, whose is unused, and
                             * with those without moments behind the others */
    uint64_t train_elems;
    uint64_t moment_elems;  /* of these, before the means: an array's, but the parameters' */
    uint64_t *quant_base;   /* owned, [units]: of a moment in 8 bits, in words; NULL: not int8 */
    uint64_t *code_base;    /* owned, [units]: of the slice in publish, in bytes; NULL: no codec */
    bool *coded_grads;      /* owned, [units]: gradients are returned in codes; NULL: none are */
    uint64_t code_bytes;    /* of all of them */
    uint64_t moment_words;  /* of a moment's array: moment_elems, or what it has in 8 bits */
    uint64_t scratch_elems; /* of that room */
    uint32_t trails;        /* of a slice: sets of chunk words (kern.h), each of its whole */
    uint64_t slot_bytes;    /* one gradient slot: the largest slice in fp32, at least a page */
};

/* Arrays of the state segment in order: those that spec_arrays() counts, by their numbers (the
 * moving average's is spec_ema_array()), then the accumulator, which has one that none of them has.
 */
enum shardmap_array { SHARDMAP_PARAM, SHARDMAP_M, SHARDMAP_V, SHARDMAP_ACC = 7 };

/* Compute the map of owner < owners. Errors: SHD_ERANGE owners beyond 1..SHD_OWNERS_MAX or owner
 * not below; SHD_ENOMEM. */
int shardmap_new(const struct spec *spec, uint32_t owner, uint32_t owners,
                 struct shardmap **ret_map, struct shd_err *e);
void shardmap_free(struct shardmap *map); /* NULL is a no-op */

/* Segment sizes: whole pages, at least one. slots in 1..SHD_SLOTS_MAX. */
uint64_t shardmap_publish_bytes(const struct shardmap *map);
uint64_t shardmap_state_bytes(const struct shardmap *map);
uint64_t shardmap_inbox_bytes(const struct shardmap *map, uint32_t slots);

/* Byte offset and size of unit's slice in the publish segment. */
uint64_t shardmap_publish_offset_bytes(const struct shardmap *map, uint32_t unit);
uint64_t shardmap_publish_slice_bytes(const struct shardmap *map, uint32_t unit);

/* Its beginning that says all of it: of codes, what is not padding. */
uint64_t shardmap_publish_sent_bytes(const struct shardmap *map, uint32_t unit);

/* Element offset of unit's slice of an array in the state segment, seen as one float array.
 * Frozen units have SHARDMAP_PARAM only, means SHARDMAP_ACC, too. And what the slice has there. */
uint64_t shardmap_array_elem(const struct shardmap *map, uint32_t array, uint32_t unit);

uint64_t shardmap_array_bytes(const struct shardmap *map, uint32_t array, uint32_t unit);

/* First element of the room for an update, seen likewise. */
uint64_t shardmap_scratch_elem(const struct shardmap *map);

/* There is a moving average of the parameters. */
bool shardmap_has_ema(const struct shardmap *map);

/* Bytes of all arrays but the accumulator: the state's beginning. And of their values in fp32. */
uint64_t shardmap_kept_bytes(const struct shardmap *map);
uint64_t shardmap_value_bytes(const struct shardmap *map);

/* Byte offset of struct activity in an inbox of so many slots. */
uint64_t shardmap_activity_offset_bytes(const struct shardmap *map, uint32_t slots);

/* Bytes of the slice of a gradient as it is returned, in dtype where it is not in codes. */
uint64_t shardmap_grad_bytes(const struct shardmap *map, uint32_t unit, enum shd_dtype dtype);

/* Byte offset of a slot in the inbox. */
uint64_t shardmap_slot_offset_bytes(const struct shardmap *map, uint32_t slot);

#endif
