/* The status of a daemon that has no status socket, over its control connection. */
#ifndef SHD_CTL_STATUS_CONTROL_H
#define SHD_CTL_STATUS_CONTROL_H

#include "client/ctl/watch/status_node.h"

/* Ask all daemons of n that are down for the lack of a status socket, an older or a smaller
 * shardd's, over DEVICE.sock. Waits, at most a few seconds each; none for one that is dead. */
void control_ask(struct node *n);

#endif
