/* Looking at daemons: blob, history, digest leaves, status. */
#ifndef SHD_LOOK_H
#define SHD_LOOK_H

#include "client/paths/digest.h"
#include "client/session/session.h"

struct path_history;

/* control_ops slots. */
int look_status(struct shd_session *s, uint32_t owner, char **ret_json, struct shd_err *e);
int look_blob(struct shd_model *m, uint32_t owner, void *buf, size_t capacity, size_t *ret_bytes,
              struct shd_err *e);
int look_history(struct shd_model *m, struct path_history *history, struct shd_err *e);
uint32_t look_range_units(const struct shd_model *m);
int look_leaves(void *ctx, const struct digest_part *part, uint8_t (*ret_leaves)[32],
                struct digest_stamp *stamp, struct shd_err *e);

/* By its board, now: the step whose state an owner has or is about to have, and that of the
 * furthest. A hint, it changes any time. */
uint64_t look_step(const struct shd_model *m, uint32_t owner);
uint64_t look_furthest(const struct shd_model *m);

#endif
