/* Parameters of frozen units, which nobody updates, once for a model and its forks: a segment of
 * their own, of which each of these models has a descriptor, and the keeper one for each.
 *
 *   state      [ p0 ·· p2 ·· | m0 m2 | v0 v2 | acc0 acc2 ]   ·· is a hole: it has no pages
 *                   ▲     ▲    mapped over them
 *   common        [ p1    p3 ]                               units 1 and 3 are frozen
 *
 * The segment is mapped over the places that these parameters have in each model's state: what
 * reads them finds them where they always are. The model that is forked first gives up its own
 * pages, once they are copied there; a fork gives up those that it was made with.
 *
 * Happy path: a FORK asks whether memory can be in common, and has libuv's pool see to it before
 * the state is copied. What is in the segment never changes. Parameters of a frozen unit change by
 * a put alone: before one begins, the model has pages of its own again. A model that goes back to a
 * snapshot writes the values that are there already: one that has snapshots, and had a put, takes
 * no part.
 *
 * Killed anywhere: the ledger's word `common` says where the parameters are. It is written when
 * they are at both places, and before one of these goes. A successor maps what the word says, and
 * makes the holes once more.
 *
 * Host memory alone, not a device's and no state on a file; not a ledger of an older build.
 *
 * Failure modes: no room, or a keeper that does not answer: the fork has all of its own, and the
 * log says why. */
#ifndef SHD_COMMON_H
#define SHD_COMMON_H

#include <stdbool.h>
#include <stdint.h>

struct common;
struct keeper_group;
struct model;
struct shd_err;

/* Bytes of the model's state segment that are holes. Loop thread, or before it is seen. */
uint64_t common_bytes(const struct model *m);

/* These bytes count as this model's, of all that have them. */
bool common_counts(const struct model *m);

/* Can a fork have them in common with its model, as things are now? Loop thread. */
bool common_can(const struct model *from, const struct model *to);

/* `to`, which is being made, is to be copied from `from`, with memory in common or without: is
 * there anything to be done before? Loop thread. */
bool common_due(const struct model *from, const struct model *to, bool can);

/* That: common_make() by libuv's pool, common_done() on the loop's thread, and common_end() by the
 * pool where that says so. Meanwhile neither model may be put or end. Errors of making: SHD_ENOMEM,
 * SHD_EIO, SHD_ETIMEDOUT; then `to` has all of its own, but for `broken`: it is of no use. */
struct common_work {
    struct model *from, *to; /* borrowed */
    bool can, broken;
    bool to_left;                     /* `to` had some in common with another state of `from` */
    struct common *from_has, *to_has; /* owned: new; NULL: as before */
};
int common_make(struct common_work *w, struct shd_err *e);
bool common_done(struct common_work *w);
void common_end(const struct common_work *w);

/* A put of such parameters comes. By libuv's pool: have pages of its own, also where no other model
 * of this process has these: one that a successor could not adopt yet may. *ret_left: there were
 * others, and common_left() is to follow on the loop's thread. Errors: SHD_ENOMEM with the numbers,
 * SHD_EIO: nothing has changed. */
int common_leave(struct model *m, bool *ret_left, struct shd_err *e);
void common_left(struct model *m);

/* A predecessor's: once its state is mapped, before anything looks at it. Errors: SHD_ESEGMENT it
 * is not there, or not what it should be; SHD_ENOMEM. Then the model is adopted, and what is of no
 * use goes; or it is not, and all is the group's still. */
int common_adopt(struct model *m, const struct keeper_group *g, struct shd_err *e);
void common_adopted(const struct model *m, struct keeper_group *g);
void common_unadopt(struct model *m);

void common_free(struct model *m); /* nothing in common: a no-op */

#endif
