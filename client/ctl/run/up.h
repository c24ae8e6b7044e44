/* shardctl up: daemons that stay, with a keeper. */
#ifndef SHD_CTL_UP_H
#define SHD_CTL_UP_H

/* argv[0] is the verb. Returns the exit code (base/say.h). */
int verb_up(int argc, char **argv);

#endif
