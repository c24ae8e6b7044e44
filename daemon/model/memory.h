/* A model's memory: all of its segments at once, or none; the part of them that outlives this
 * process is the keeper's, too.
 *
 * Happy path: under the lock of proto/share/reserve.h, see that there is room for everything, a
 * successor's needs included (spare.h), and take it; then tell the keeper.
 *
 * Failure modes: no room: SHD_ENOMEM with the numbers, and what was taken is given back by
 * memory_free().
 */
#ifndef SHD_MODEL_MEMORY_H
#define SHD_MODEL_MEMORY_H

#include <stdint.h>

struct ledger_shape;
struct model;
struct shd_err;

/* Nothing is there yet. Errors: SHD_ENOMEM. */
int memory_init(struct model *m, struct shd_err *e);

/* State, ledger, publish, board, spare. Waits for the keeper. Errors: SHD_ENOMEM, SHD_EIO,
 * SHD_ERANGE, SHD_ETIMEDOUT. */
int memory_make(struct model *m, const struct ledger_shape *shape, struct shd_err *e);

/* Once the state is mapped: what says which pages of one on a file are in memory (paging.h).
 * Errors: SHD_ENOMEM. */
int memory_page(struct model *m, struct shd_err *e);

/* As paging_passed(). */
void memory_passed(struct model *m, uint64_t bytes);

/* Publish and board of an adopted model, out of its predecessor's spare memory. Errors: SHD_ENOMEM,
 * SHD_EIO. */
int memory_share_again(struct model *m, struct shd_err *e);

/* Of an adopted one, once nothing may fail: what it had already counts, whatever is allowed, and
 * what was kept for it to publish in is in use. */
void memory_adopted(struct model *m);

/* The daemon has it: of an adopted one what its own successor needs is taken in a while. */
void memory_registered(struct model *m);

/* All of it; of a model that was never complete, which is of no use to a successor, the keeper's,
 * too; of one that was dropped it is the host's when this returns. May wait for the keeper. */
void memory_free(struct model *m);

#endif
