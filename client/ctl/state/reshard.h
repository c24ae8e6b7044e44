/* The verb reshard. */
#ifndef SHD_CTL_RESHARD_H
#define SHD_CTL_RESHARD_H

/* Exit codes of say.h. */
int verb_reshard(int argc, char **argv);

#endif
