/* shardctl checkpoint: save a model, once or as training goes on; list, verify. */
#ifndef SHD_CTL_CHECKPOINT_H
#define SHD_CTL_CHECKPOINT_H

#include "proto/base/status.h"

struct shd_session;

/* argv[0] is the verb. Returns the exit code (base/say.h). */
int verb_checkpoint(int argc, char **argv);

struct checkpoint_save {
    const char *address; /* of s; for lines of progress */
    const char *model;   /* NULL: the only one there is */
    const char *dir;
};

/* Save it as `shardctl checkpoint DIR` does, by s. */
int checkpoint_save(struct shd_session *s, const struct checkpoint_save *what, struct shd_err *e);

#endif
