/* shardctl logs: what the keeper of `shardctl up` and its daemons have written. */
#ifndef SHD_CTL_LOGS_H
#define SHD_CTL_LOGS_H

/* argv[0] is the verb. Returns the exit code (base/say.h). */
int verb_logs(int argc, char **argv);

#endif
