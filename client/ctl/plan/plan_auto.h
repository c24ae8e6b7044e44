/* shardctl plan --auto: the strategy for a device's memory, with the figures of a model. */
#ifndef SHD_CTL_PLAN_AUTO_H
#define SHD_CTL_PLAN_AUTO_H

#include <stdio.h>

#include <jansson.h>

#include "client/ctl/plan/plan_source.h"
#include "proto/base/status.h"
#include "proto/spec/spec.h"

/* Choose ask->policy for ask->device_bytes and say why on out (NULL: do not). *ret_json tells the
 * same. SHD_ERANGE: nothing fits; the text has the numbers. */
int plan_auto(const struct spec *spec, struct plan_ask *ask, FILE *out, json_t **ret_json,
              struct shd_err *e);

#endif
