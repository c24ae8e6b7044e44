/* What is left of a model that was dropped, until its memory is given back.
 *
 * Happy path: nothing new is begun for it (model_use.dropped). What the device has queued is
 * waited for by a piece of work behind it; then gradients that waited for their turn are let go
 * of, with the requests that brought them, and what libuv's pool is at is waited for: inboxes that
 * are closed, a checkpoint, spare memory. At the end nothing refers to the model. It is freed on
 * the pool, with its descriptors at the keeper.
 *
 * Failure: none. What does not end, as a disk that does not answer, keeps the memory, and is named.
 * Loop thread. */
#ifndef SHD_REMAINS_H
#define SHD_REMAINS_H

struct daemon;
struct model;
struct remains;

/* Take m apart, which is none of the daemon's models any more; gone(ctx) follows. Errors:
 * SHD_ENOMEM: nothing was begun. */
struct remains *remains_new(struct model *m, void (*gone)(void *ctx), void *ctx);

/* At shutdown, when no work runs any more, instead of what would follow. NULL is a no-op. */
void remains_free(struct remains *r);

#endif
