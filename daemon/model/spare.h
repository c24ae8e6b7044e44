/* Spare memory: what a successor of this process needs to adopt a model, taken beforehand.
 *
 * A successor makes publish and board anew while workers still map the predecessor's, and a new
 * inbox for every session while its worker copies from the old one: for a moment there are two of
 * each. Where a cgroup limits the memory that moment must not be the one in which it is found
 * missing. So a model with a keeper has a memfd of as many bytes, which nobody maps and the keeper
 * holds. Before the same bytes are taken for something it is cut by them, under the lock of
 * proto/share/reserve.h: no other daemon gets in between.
 *
 *   opened    spare = publish + board; refused with the model if there is no room
 *   inbox     spare += inbox; refused with the inbox. After an adoption, until it is settled,
 *             the inbox is taken out of it instead
 *   adopted   spare -= publish + board
 *   settled   some seconds later, and when a session has ended: what it should be, if there is room
 *
 * What is published on a file needs no memory. A file of its size, the next one, is the keeper's
 * beside it, so that a disk which is full by then is in nobody's way: a successor publishes in that
 * one, and makes another once it has settled.
 *
 * Devices of their own memory have none: their drivers refuse, and kill nobody.
 *
 * Failure modes: no room to settle: said once in the log, and tried again.
 */
#ifndef SHD_SPARE_H
#define SHD_SPARE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

struct model;
struct segment;
struct uv_timer_s;

/* None yet. Errors: SHD_ENOMEM. */
int spare_new(struct model *m, struct shd_err *e);
void spare_free(struct model *m);

/* What a model has when no session is there, 0 without a keeper. Needs no segments. */
uint64_t spare_bytes_first(const struct model *m);

/* Take bytes more. Under the lock. Errors: SHD_ENOMEM, SHD_EIO; nothing has changed then. */
int spare_grow(struct model *m, uint64_t bytes, struct shd_err *e);

/* Give up to so many bytes back, to be taken again at once. Under the lock. */
void spare_give(struct model *m, uint64_t bytes);

/* The file that a successor publishes in, where that is to be on one and is not there yet. Takes
 * its time. Errors: SHD_ENOMEM with the numbers, SHD_EIO and others of segment_file_new(). */
int spare_next(struct model *m, struct shd_err *e);

/* It is published in: the keeper's no more. */
void spare_next_taken(struct model *m);

/* A session's inbox, and as much more for a successor. Takes the lock. Errors: SHD_ENOMEM with the
 * numbers, SHD_EIO. */
int spare_inbox(struct model *m, uint64_t bytes, struct segment *ret_segment, struct shd_err *e);
void spare_inbox_close(const struct model *m, struct segment *segment);

/* libuv's pool is not at it; its timer, or NULL: both for who ends it. */
bool spare_is_idle(const struct model *m);
struct uv_timer_s *spare_timer(struct model *m);

/* Something has changed, or was adopted: settle it in a while. Loop thread. */
void spare_watch(struct model *m);

#endif
