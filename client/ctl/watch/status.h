/* shardctl status: what each daemon holds, and who waits for whom. */
#ifndef SHD_CTL_STATUS_H
#define SHD_CTL_STATUS_H

/* argv[0] is the verb. Returns the exit code (base/say.h). */
int verb_status(int argc, char **argv);

#endif
