/* Owners' segments each mapped in one piece, where the worker or an owner is a GPU; see path_map.h.
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
#ifndef SHD_PATH_MAP_WHOLE_H
#define SHD_PATH_MAP_WHOLE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/dtype.h"
#include "proto/base/status.h"
#include "proto/share/segment.h"

struct kern;
struct map_owner;
struct shd_model;
struct wire_segment;

struct whole_segment {
    struct segment segment; /* owned; base NULL: held, not mapped yet */
    bool pinned;
};

struct whole_inbox {
    struct whole_segment memory;
    struct whole_inbox *older; /* owned: predecessors', in which slots still lie; NULL: none */
};

struct map_whole { /* of an owner */
    struct kern
        *gpu; /* borrowed: what its memory is copied by; NULL: none yet, or it is the host's */
    struct whole_segment publish;
    struct whole_inbox *inbox; /* owned: today's, first; NULL: none yet */
    struct segment held;       /* owned: today's inbox of another GPU, not mapped */
    uint8_t **slots;           /* owned, [view_slots]: where each slot's slice lies */
};

/* Once the layouts are known: can segments be placed side by side (*ret_whole: no)? */
void whole_decide(const struct shd_model *m, bool *ret_whole);

/* Can the model be read and written in place? Errors: SHD_ENOTSUP says why not. */
int whole_check_map(const struct shd_model *m, struct shd_err *e);

/* A claimed publish or inbox, over what there was. *fd: taken where it is set to -1. Those of
 * another GPU than the worker's are kept unmapped until whole_ready(): a host worker that only
 * looks needs no driver, and a GPU that does not reach the other one needs none of them. */
int whole_take(struct shd_model *m, struct map_owner *owner, const struct wire_segment *segment,
               int *fd, struct shd_err *e);

/* Have all owners' segments mapped, but of those that are far (path_nccl.h). */
int whole_ready(struct shd_model *m, struct shd_err *e);

/* Unmap. */
void whole_close(struct map_owner *owner);

/* Where an owner's slice of a unit is published; whole_ready() first. */
const uint8_t *whole_published(const struct map_owner *owner, uint32_t unit);

/* path_ops slots. slot_array: path map only. */
int whole_ready_slot(struct shd_model *m, uint32_t slot, struct shd_err *e);
float *whole_slot_array(const struct shd_model *m, uint32_t slot);
int whole_fill_slot(struct shd_model *m, uint32_t slot, uint32_t unit, const float *grad,
                    enum shd_dtype dtype, struct shd_err *e);

/* As map_bring_slice(). */
int whole_bring_slice(struct shd_model *m, struct map_owner *owner, uint32_t slot,
                      struct shd_err *e);

#endif
