/* What daemons say to us, their service manager: that they are ready, need longer, or end drained,
 * and what they want kept. */
#ifndef SHD_CTL_MESSAGES_H
#define SHD_CTL_MESSAGES_H

#include "client/ctl/run/run_state.h"

/* Take all messages that daemons have sent us up to now. */
void messages_take(struct run *r);

#endif
