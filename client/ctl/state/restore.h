/* shardctl restore: daemons open a model from a checkpoint or from weights. */
#ifndef SHD_CTL_RESTORE_H
#define SHD_CTL_RESTORE_H

/* argv[0] is the verb. Returns the exit code (base/say.h). */
int verb_restore(int argc, char **argv);

#endif
