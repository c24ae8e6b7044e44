/* shardctl checkpoint: save a model, once or as training goes on; list, verify. */
#ifndef SHD_CTL_CHECKPOINT_H
#define SHD_CTL_CHECKPOINT_H

#include "proto/base/status.h"

struct shd_session;

/* argv[0] is the verb. Returns the exit code (base/say.h). */
int verb_checkpoint(int argc, char **argv);

/* Save a model (NULL: the only one there is), as `shardctl checkpoint DIR` does, by s. */
int checkpoint_save(struct shd_session *s, const char *model, const char *dir, struct shd_err *e);

#endif
