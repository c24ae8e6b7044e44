/* shardctl host: this host's part of a cluster, in the foreground. */
#ifndef SHD_CTL_HOST_H
#define SHD_CTL_HOST_H

/* argv[0] is the verb. Returns the exit code (base/say.h). */
int verb_host(int argc, char **argv);

#endif
