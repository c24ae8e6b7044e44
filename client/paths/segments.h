/* Claiming an owner's segments, at first and from its successor. */
#ifndef SHD_SEGMENTS_H
#define SHD_SEGMENTS_H

#include "client/paths/map.h"
#include "client/session/link.h"

/* Claim an owner's segments, each kind once, and map those of the wanted kinds (bits); over what
 * was mapped before, if anything was. SHD_EGONE: the layout is of a connection that is lost. */
int segments_take(struct shd_model *m, struct link *link, const struct map_layout *layout,
                  unsigned wanted, struct shd_err *e);

#endif
