/* shardctl trace: what daemons and workers did, for Perfetto. */
#ifndef SHD_CTL_TRACE_H
#define SHD_CTL_TRACE_H

/* argv[0] is the verb. Returns the exit code (base/say.h). */
int verb_trace(int argc, char **argv);

#endif
