/* shardctl run: a command as workers beside daemons of its own, on this host. */
#ifndef SHD_CTL_RUN_H
#define SHD_CTL_RUN_H

/* argv[0] is the verb. Returns the exit code (base/say.h). */
int verb_run(int argc, char **argv);

#endif
