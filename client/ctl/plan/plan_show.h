/* A plan in figures, as text and as JSON. */
#ifndef SHD_CTL_PLAN_SHOW_H
#define SHD_CTL_PLAN_SHOW_H

#include <stdint.h>
#include <stdio.h>

#include <jansson.h>

#include "client/ctl/plan/plan_source.h"
#include "client/plan/plan.h"
#include "proto/base/status.h"
#include "proto/share/owner_bytes.h"
#include "proto/spec/spec.h"

struct plan_clock;

struct plan_owners {
    struct owner_bytes max;         /* of the daemon that holds most */
    struct owner_gpu_bytes gpu_max; /* likewise, were they on GPUs */
    uint64_t total_bytes;           /* of all, what each holds in memory */
    uint64_t total_file_bytes;      /* and on files */
};

/* The memory of `daemons` owners (0: as asked) that ask's workers train on, with so many slots each
 * (0: with none yet). */
int plan_owners(const struct spec *spec, const struct plan_ask *ask, uint32_t daemons,
                uint32_t slots, struct plan_owners *ret_owners, struct shd_err *e);

int plan_print(const struct spec *spec, const struct plan_ask *ask, const struct plan *plan,
               const struct plan_clock *clock, FILE *out, struct shd_err *e);
int plan_print_json(const struct spec *spec, const struct plan_ask *ask, const struct plan *plan,
                    const struct plan_clock *clock, json_t *automatic, FILE *out,
                    struct shd_err *e);

/* Parts of the document. NULL: no memory. */
json_t *plan_json_policy(const struct plan_policy *p);
json_t *plan_json_cost(const struct plan_cost *c);
json_t *plan_json_model(const struct spec *spec);

/* Every strategy on the same model, side by side. */
int plan_compare(const struct spec *spec, const struct plan_ask *ask,
                 const struct plan_clock *clock, bool as_json, FILE *out, struct shd_err *e);

#endif
