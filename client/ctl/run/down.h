/* shardctl down: stop what `up` started. */
#ifndef SHD_CTL_DOWN_H
#define SHD_CTL_DOWN_H

/* argv[0] is the verb. Returns the exit code (base/say.h). */
int verb_down(int argc, char **argv);

#endif
