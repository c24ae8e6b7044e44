/* `shardctl plan --hosts H --gpus G`: a step of H hosts that are alike, with G daemons and G
 * workers each and a relay (docs/hosts.md): what the network carries for the busiest of them, how
 * long, and what its relay holds; beside the same without relays. Computed, by the sizes that the
 * owners lay their memory out by: nothing runs. */
#ifndef SHD_CTL_PLAN_SCALE_H
#define SHD_CTL_PLAN_SCALE_H

#include <stdio.h>

#include <jansson.h>

#include "client/ctl/plan/plan_source.h"
#include "client/plan/plan.h"
#include "proto/base/status.h"
#include "proto/spec/spec.h"

/* Both or neither of --hosts and --gpus; ask's daemons and workers become H * G. Errors:
 * SHD_EINVAL names the flag. */
int plan_scale_parse(struct plan_ask *ask, struct shd_err *e);

/* Nothing where --hosts is not given. Errors: SHD_ENOMEM, SHD_ERANGE. */
int plan_scale_print(const struct spec *spec, const struct plan_ask *ask, const struct plan *plan,
                     FILE *out, struct shd_err *e);
/* NULL where --hosts is not given. */
int plan_scale_json(const struct spec *spec, const struct plan_ask *ask, const struct plan *plan,
                    json_t **ret_json, struct shd_err *e);

#endif
