/* Can checkpoints be written: not a look at permissions but a file, written, synced, removed. */
#ifndef SHD_CTL_DOCTOR_CHECKPOINT_H
#define SHD_CTL_DOCTOR_CHECKPOINT_H

#include "client/ctl/doctor/doctor_say.h"

void doctor_checkpoint(struct doctor *d);

#endif
