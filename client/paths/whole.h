/* Owners' segments each mapped in one piece, where the worker or an owner is a GPU; see map.h.
 *
 * Side by side, as in host memory, they cannot be there: a GPU maps whole allocations. So a unit is
 * one array only if it has one owner, on the worker's GPU: then it is read and written in place
 * (path map). Else its slices are copied (path copy), each by the GPU at one of its ends; owners'
 * host memory is pinned for that.
 *
 *              | owner in host memory       | owner on a GPU
 *   host       | (side by side, if all are) | copied by the owner's GPU
 *   cuda:N     | copied by the worker's GPU | same GPU, only owner: in place; else copied by the
 *              |                            | worker's GPU, which imports the memory
 *
 * A daemon's successor. Its publish is mapped over the one before: addresses stay. Its inbox gets
 * an address of its own, and what lies in slots that are in use stays where it is, in the old one,
 * until the slot is handed out the next time.
 */
#ifndef SHD_WHOLE_H
#define SHD_WHOLE_H

#include "client/paths/map.h"
#include "client/paths/path.h"

extern const struct mover_ops mover_whole;

/* Once the layouts are known: is any memory in question a GPU's, so that segments cannot be placed
 * side by side? */
bool whole_decide(const struct shd_model *m);

/* Is an owner far: on another GPU than the worker's? */
bool whole_is_far(const struct shd_model *m, const struct map_owner *owner);

/* Can the model be read and written in place? Errors: SHD_ENOTSUP says why not. */
int whole_check_map(const struct shd_model *m, struct shd_err *e);

/* mover_ops slot, for owners that are far too. Segments of another GPU than the worker's are kept
 * unmapped until ready(): a host worker that only looks needs no driver, and a GPU that does not
 * reach the other one needs none of them. */
int whole_take(struct shd_model *m, struct map_owner *owner, const struct wire_segment *segment,
               int *fd, struct shd_err *e);

/* Unmap. */
void whole_close(struct map_owner *owner);

/* Where a slot of the only owner lies. */
float *whole_slot_array(const struct shd_model *m, uint32_t slot);

#endif
