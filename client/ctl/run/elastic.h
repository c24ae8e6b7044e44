/* Workers that join and leave while the run goes on (`shardctl run --elastic`). */
#ifndef SHD_CTL_ELASTIC_H
#define SHD_CTL_ELASTIC_H

#include "client/ctl/run/run_state.h"

/* One worker more, or the newest asked to leave, within the limits. */
void elastic_join(struct run *r);
void elastic_leave(struct run *r);

#endif
