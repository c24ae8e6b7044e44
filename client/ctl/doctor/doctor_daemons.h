/* Daemons: who keeps them, their directory, whether they answer, what killed ones left. */
#ifndef SHD_CTL_DOCTOR_DAEMONS_H
#define SHD_CTL_DOCTOR_DAEMONS_H

#include "client/ctl/doctor/doctor_check.h"

void doctor_systemd(struct doctor *d);   /* manager, fd store, user */
void doctor_runtime(struct doctor *d);   /* directory and locks */
void doctor_daemons(struct doctor *d);   /* each socket, each daemon */
void doctor_leftovers(struct doctor *d); /* run directories, memory */

#endif
