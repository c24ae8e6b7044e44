/* A model without a spec: the header of a safetensors file. */
#ifndef SHD_CTL_PLAN_SAFETENSORS_H
#define SHD_CTL_PLAN_SAFETENSORS_H

#include "client/ctl/plan/plan_ask.h"
#include "proto/base/status.h"
#include "proto/spec/spec.h"

/* The spec in a safetensors file's header: its tensors wrapped into units. The file is not
 * trusted. */
int plan_safetensors(const struct plan_ask *ask, struct spec **ret_spec, struct shd_err *e);

#endif
