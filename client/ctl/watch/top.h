/* shardctl top: the same on a full screen, live. */
#ifndef SHD_CTL_TOP_H
#define SHD_CTL_TOP_H

/* argv[0] is the verb. Returns the exit code (base/say.h). */
int verb_top(int argc, char **argv);

#endif
