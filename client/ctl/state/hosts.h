/* shardctl hosts: which hosts of a cluster with replicas are in and out. */
#ifndef SHD_CTL_HOSTS_H
#define SHD_CTL_HOSTS_H

/* argv[0] is the verb. Returns the exit code (base/say.h). */
int verb_hosts(int argc, char **argv);

#endif
