/* The open step begins again: because this worker says so (shd_reset_step()), or another one did.
 */
#ifndef SHD_RUN_RESET_H
#define SHD_RUN_RESET_H

struct shd_err;
struct shd_model;

/* Look whether the owners have begun the open step again. Where nothing of this worker's is lost by
 * that, it goes on. SHD_ERESET: something is; all that it had is forgotten, and it has to compute
 * its micro-batches again. */
int reset_look(struct shd_model *m, struct shd_err *e);

#endif
