/* The choice of a strategy for a given memory. */
#ifndef SHD_CTL_PLAN_AUTO_H
#define SHD_CTL_PLAN_AUTO_H

#include <stdio.h>

#include <jansson.h>

#include "client/ctl/plan/plan_ask.h"
#include "proto/base/status.h"
#include "proto/spec/spec.h"

/* Choose ask->policy for ask->device_bytes by the usual decision tree and say why on out (NULL:
 * do not). *ret_json, when ret_json is not NULL, tells the same. SHD_ERANGE: nothing fits; the
 * text has the numbers. */
int plan_auto(const struct spec *spec, struct plan_ask *ask, FILE *out, json_t **ret_json,
              struct shd_err *e);

#endif
