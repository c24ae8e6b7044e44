/* The owner inside this process ("local:"); see local_step.h. */
#ifndef SHD_LOCAL_H
#define SHD_LOCAL_H

#include "client/paths/path.h"

extern const struct control_ops control_local;
extern const struct reader_ops reader_local;

#endif
