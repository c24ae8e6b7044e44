/* OpenModel, the layout that a daemon answers, and the segments that it offers in it. */
#ifndef SHD_CLIENT_LAYOUT_H
#define SHD_CLIENT_LAYOUT_H

#include "client/paths/map.h"
#include "client/session/link.h"
#include "client/session/spec_out.h"

struct layout_opening { /* what a model is asked for by */
    struct shd_model *m;
    const struct spec_out *json; /* borrowed; NULL: attach to name */
    const char *name;            /* borrowed; "": the only one */
    uint32_t slots;
    struct map_layout *ret_layout; /* where the answer goes; NULL: owner->layout */
    uint64_t origin;               /* as owner 0 has it, once `settled`: it has answered */
    bool settled;
    bool one_count; /* as wire_open_model */
};

/* OpenModel to one or to every daemon. */
int layout_ask(struct layout_opening *o, struct link *link, struct shd_err *e);
int layout_ask_all(struct layout_opening *o, struct shd_err *e);

/* What a member's model was made of, the same at all members: the restore, or the start values. One
 * that was filled (client/checkpoint/refill.h) has it as the number of its restore, though that was
 * of its host alone. Not 0. */
uint64_t layout_source(const struct shd_model *m, const struct map_layout *layout);

/* On a link that comes up: the model's layout at the successor. */
int layout_exchange(struct shd_model *m, struct link *link, uint32_t slots,
                    struct map_layout *ret_layout, struct shd_err *e);

/* The spec of an owner's layout, if it is in a segment: the model's, or compared with that. Errors
 * as segments_take(). */
int layout_take_spec(struct shd_model *m, struct link *link, struct map_layout *layout,
                     struct shd_err *e);

/* Claim an owner's segments, each kind once, and map those of the wanted kinds (bits); over what
 * was mapped before, if anything was. What is taken already is left as it is. SHD_EGONE: the layout
 * is of a connection that is lost, or was taken when the link came up again: ask once more. */
int segments_take(struct shd_model *m, struct link *link, struct map_layout *layout,
                  unsigned wanted, struct shd_err *e);

#endif
