/* Owners that are daemons of this host. */
#ifndef SHD_REMOTE_H
#define SHD_REMOTE_H

#include "client/paths/path.h"

extern const struct control_ops control_remote;

#endif
