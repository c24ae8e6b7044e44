/* A plan in figures, as text and as JSON. */
#ifndef SHD_CTL_PLAN_SHOW_H
#define SHD_CTL_PLAN_SHOW_H

#include <stdint.h>
#include <stdio.h>

#include <jansson.h>

#include "client/ctl/plan/plan_source.h"
#include "client/plan/plan.h"
#include "proto/base/status.h"
#include "proto/spec/spec.h"

struct plan_owners {
    uint64_t state_bytes_max, publish_bytes_max; /* of the daemon that holds most */
    uint64_t total_bytes;                        /* of all, both */
};
int plan_owners(const struct spec *spec, uint32_t daemons, struct plan_owners *ret_owners,
                struct shd_err *e);

int plan_print(const struct spec *spec, const struct plan_ask *ask, const struct plan *plan,
               FILE *out, struct shd_err *e);
int plan_print_json(const struct spec *spec, const struct plan_ask *ask, const struct plan *plan,
                    json_t *automatic, FILE *out, struct shd_err *e);

/* Every strategy on the same model, side by side. */
int plan_compare(const struct spec *spec, const struct plan_ask *ask, bool as_json, FILE *out,
                 struct shd_err *e);

#endif
