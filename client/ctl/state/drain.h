/* shardctl drain: end daemons between two steps. */
#ifndef SHD_CTL_DRAIN_H
#define SHD_CTL_DRAIN_H

/* argv[0] is the verb. Returns the exit code (base/say.h). */
int verb_drain(int argc, char **argv);

#endif
