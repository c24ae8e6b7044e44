/* Bytes from and to owners that are far: by NCCL. See nccl_join.h for who is, and how they are
 * joined. */
#ifndef SHD_PATH_NCCL_H
#define SHD_PATH_NCCL_H

#include "client/paths/path.h"

struct nccl_model;

extern const struct reader_ops reader_nccl;
extern const struct mover_ops mover_nccl;

/* Make it the model's (NULL: none is): far owners' slices move by it, or as anybody's. Returns the
 * one there was. */
struct nccl_model *nccl_use(struct shd_model *m, struct nccl_model *n);

/* Wait until nothing comes into slots that were let go of. Errors: SHD_ETIMEDOUT. */
int nccl_settle(struct shd_model *m, struct shd_err *e);

#endif
