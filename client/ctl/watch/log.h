/* shardctl log: what each step came to. */
#ifndef SHD_CTL_LOG_H
#define SHD_CTL_LOG_H

/* argv[0] is the verb. Returns the exit code (base/say.h). */
int verb_log(int argc, char **argv);

#endif
