/* What a tensor comes to, of the parts that all daemons of a node show at /tensor
 * (docs/status.md). */
#ifndef SHD_CTL_TENSOR_MERGE_H
#define SHD_CTL_TENSOR_MERGE_H

#include "client/ctl/watch/status_node.h"

/* Ask all daemons of the node for query, "model=M&name=T&array=A" with its values encoded.
 * *ret_text is one JSON object, the caller's to free(). Errors: what a daemon said; SHD_ENOENT not
 * all owners are here; SHD_ESTEP they are at different steps: ask again; SHD_EPROTO, SHD_ENOMEM. */
int tensor_merge_ask(struct node *n, const char *query, char **ret_text, struct shd_err *e);

#endif
