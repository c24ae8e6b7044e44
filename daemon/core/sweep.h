/* A sweep: which bytes of an owner's publish segment are copied next, while updates change them in
 * an order of their own.
 *
 * In order, piece by piece, over all slices, which lie side by side; and apart from that what is
 * left of a unit that is about to be updated. Each byte is taken once, before the first update of
 * its unit. Pure. */
#ifndef SHD_SWEEP_H
#define SHD_SWEEP_H

#include <stdbool.h>
#include <stdint.h>

struct shd_err;
struct shardmap;
struct step;

enum sweep_when { SWEEP_OVER, SWEEP_NOW, SWEEP_TO_COME };

/* When a copy of `step` can begin: while it is open. Then no update is under way, and those to come
 * queue behind what is copied before them. */
enum sweep_when sweep_when(const struct step *core, uint64_t step);

struct sweep {
    const struct shardmap *map; /* borrowed */
    uint8_t *apart;             /* owned, [units]: taken apart, from where it was in order */
    uint32_t unit;              /* the next in order, */
    uint64_t unit_bytes;        /* of whose slice so many are taken */
};

struct sweep_range {
    uint64_t at_bytes, bytes;
};

/* Errors: SHD_ENOMEM. */
int sweep_init(struct sweep *s, const struct shardmap *map, struct shd_err *e);
void sweep_deinit(struct sweep *s); /* zeroed: a no-op */

/* From the first byte on. */
void sweep_begin(struct sweep *s);

/* The next range in order, of at most bytes_max > 0; false: nothing is left. It is taken by
 * sweep_took(), or asked for again. */
bool sweep_next(struct sweep *s, uint64_t bytes_max, struct sweep_range *ret_range);
void sweep_took(struct sweep *s, uint64_t bytes);

/* What is left of unit; bytes 0: nothing. Likewise. */
struct sweep_range sweep_rest(const struct sweep *s, uint32_t unit);
void sweep_took_rest(struct sweep *s, uint32_t unit);

#endif
