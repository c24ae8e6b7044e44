/* The waits in a snapshot: who waits for what, since when, and on whom as far as that is known. */
#ifndef SHD_WAITS_H
#define SHD_WAITS_H

#include <jansson.h>

struct view_snapshot;

enum view_wait_kind {
    VIEW_WAIT_GRADIENTS,
    VIEW_WAIT_WORKERS,
    VIEW_WAIT_TURN,
    VIEW_WAIT_UNIT,
    VIEW_WAIT_SLOT,
    VIEW_WAIT_COMMIT,
    VIEW_WAIT_TRANSFER,
    VIEW_WAIT_JOIN,
    VIEW_WAIT_KINDS,
};
const char *view_wait_kind_name(enum view_wait_kind kind);
/* The waits of all models, longest first. longest: per kind in seconds. *ret_headline: who holds
 * them up, or JSON's null; NULL: not wanted. */
json_t *view_waits(const struct view_snapshot *s, double ret_longest_s[VIEW_WAIT_KINDS],
                   json_t **ret_headline);

#endif
