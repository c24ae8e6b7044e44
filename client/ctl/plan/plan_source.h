/* Where the model of `shardctl plan` comes from: an open model on daemons, a spec file, or the
 * header of a safetensors file. */
#ifndef SHD_CTL_PLAN_SOURCE_H
#define SHD_CTL_PLAN_SOURCE_H

#include "client/ctl/plan/plan_ask.h"
#include "proto/base/status.h"
#include "proto/spec/spec.h"

/* The model as asked for: what --param-dtype and --accumulate change is changed, micros is filled
 * in. Errors name the file or flag. */
int plan_source(struct plan_ask *ask, struct spec **ret_spec, struct shd_err *e);

#endif
