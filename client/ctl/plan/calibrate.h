/* `shardctl plan --calibrate`: the rates of this machine (client/plan/plan_time.h), measured with
 * the real thing: private daemons, one after the other, models made for the purpose, this process
 * as their worker, and the daemons' traces. Takes some seconds and 150 MB. */
#ifndef SHD_CTL_PLAN_CALIBRATE_H
#define SHD_CTL_PLAN_CALIBRATE_H

#include "client/plan/plan_time.h"
#include "proto/base/status.h"

/* Errors: those of starting a daemon and training with it. */
int calibrate(struct plan_rates *ret_rates, struct shd_err *e);

#endif
