/* What units come to in each step, of the parts that all daemons of a node show at /units
 * (docs/status.md), added: the same numbers for any number of owners. */
#ifndef SHD_CTL_UNITS_MERGE_H
#define SHD_CTL_UNITS_MERGE_H

#include <jansson.h>

#include "client/ctl/watch/status_node.h"

/* Ask all daemons of the node for query, "&model=M&from=K&unit=U" or less, its values encoded.
 * *ret_answer is the caller's to release: as a daemon's answer, of all owners; steps that one of
 * them has not, or has no more, are left out. Errors: SHD_ENOENT what a daemon said (no such
 * model), or not all owners are here; SHD_EGONE one does not answer; SHD_EPROTO; SHD_ENOMEM. */
int units_merge_ask(struct node *n, const char *query, json_t **ret_answer, struct shd_err *e);

/* Add the owners' answers, parts[count]. */
int units_merge(json_t *const *parts, uint32_t count, json_t **ret_answer, struct shd_err *e);

#endif
