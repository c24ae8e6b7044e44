/* Calls in the order of a stream of the program's: shd_set_stream(). A return waits in line
 * (client/paths/order.h) until its work is done; whatever call is made then gives it to the owners.
 * No thread does it meanwhile: the program's is in a call often enough, and in shd_commit() at
 * last.
 *
 * Everything here is nothing for a model without a stream.
 */
#ifndef SHD_RUN_STREAM_H
#define SHD_RUN_STREAM_H

#include <stdbool.h>
#include <stdint.h>

struct shd_err;
struct shd_model;

/* A return whose arguments are right: into the line, or at once. */
int stream_return(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e);

/* Give what is ready, without a wait. */
int stream_look(struct shd_model *m, struct shd_err *e);

/* These wait, within the session's limits: before an array is handed out, until that unit's earlier
 * returns are given and another array may be held; before a unit counts as one that took no part,
 * until the array that was handed out for it is not written to any more; for all returns; and for
 * all that the stream has been given. */
int stream_before_grad(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e);
int stream_before_none(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e);
int stream_returned(struct shd_model *m, struct shd_err *e);
int stream_done(struct shd_model *m, struct shd_err *e);

#endif
