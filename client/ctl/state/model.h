/* shardctl restore, digest, drop and fork: daemons open a model from a checkpoint or from weights;
 * SHA-256 over an open one; an end of it; a second one of it. */
#ifndef SHD_CTL_MODEL_H
#define SHD_CTL_MODEL_H

int verb_restore(int argc, char **argv);
int verb_digest(int argc, char **argv);
int verb_drop(int argc, char **argv);
int verb_fork(int argc, char **argv);

#endif
