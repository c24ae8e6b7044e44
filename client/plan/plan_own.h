/* A plan that somebody gives: read (plan_text.h), checked by the rules of every plan and those of
 * the strategy that it says it is (plan_check.h), and cut to what a worker has to do.
 *
 * A worker's share of a step varies: a predecessor's micro-batches are in already, the model's
 * number of them changes, leases come group by group. The first n micro-batches of a plan, with
 * what is held behind them freed, are a plan for n; a plan over and over again is one for more. */
#ifndef SHD_PLAN_OWN_H
#define SHD_PLAN_OWN_H

#include <stddef.h>

#include "client/plan/plan.h"

struct plan_own {
    struct plan_policy policy; /* as it says; PLAN_OWN: of no strategy */
    struct plan plan;          /* owned; micros > 0 */
};

/* Errors: those of plan_text_parse() and plan_check(); SHD_ESPEC the model's gradients are of
 * another dtype; SHD_ENOMEM. */
int plan_own_new(const struct spec *spec, const char *json, size_t bytes, struct plan_own **ret_own,
                 struct shd_err *e);
void plan_own_free(struct plan_own *own); /* NULL is a no-op */

/* What plans are built by where units do not run in the plan's order: its policy, zero3 for one of
 * no strategy. Every bound that the plan keeps can be met by it. */
struct plan_policy plan_own_policy(const struct plan_own *own);

/* The plan for `micros` micro-batches, a multiple of the model's accumulate: with their own number
 * the very operations that were given. It keeps the rules of every plan and the bounds, and holds
 * no more at once than all of it does. Errors: SHD_ENOMEM. */
int plan_own_fit(const struct plan_own *own, const struct spec *spec, uint32_t micros,
                 struct plan *ret_plan, struct shd_err *e);

#endif
