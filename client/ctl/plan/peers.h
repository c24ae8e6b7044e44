/* What the knobs of other tools' configurations are here. */
#ifndef SHD_CTL_PLAN_PEERS_H
#define SHD_CTL_PLAN_PEERS_H

#include "client/ctl/plan/peer_config.h"

extern const struct peer_table peer_deepspeed, peer_fsdp;

#endif
