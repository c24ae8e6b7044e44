/* Completion scripts made from the verbs' own tables, so that they cannot lag behind. */
#ifndef SHD_CTL_COMPLETION_H
#define SHD_CTL_COMPLETION_H

#include <stddef.h>

#include "client/ctl/base/verb.h"

/* shardctl completion: print the script for these verbs. Returns the exit code. */
int completion(int argc, char **argv, const struct verb *verbs, size_t count);

#endif
