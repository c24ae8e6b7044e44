/* All strategies side by side. */
#ifndef SHD_CTL_PLAN_COMPARE_H
#define SHD_CTL_PLAN_COMPARE_H

#include <stdbool.h>
#include <stdio.h>

#include "client/ctl/plan/plan_ask.h"
#include "proto/base/status.h"
#include "proto/spec/spec.h"

int plan_compare(const struct spec *spec, const struct plan_ask *ask, bool as_json, FILE *out,
                 struct shd_err *e);

#endif
