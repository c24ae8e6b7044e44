/* What operations, strategies and prefetches are called: in policies, plans and messages. */
#ifndef SHD_PLAN_NAMES_H
#define SHD_PLAN_NAMES_H

#include "client/plan/plan.h"

const char *plan_op_name(enum plan_op_kind kind);
const char *plan_strategy_name(enum plan_strategy strategy); /* "zero3" ... */
const char *plan_prefetch_name(enum plan_backward_prefetch prefetch);

/* The strategy / prefetch called name; -1 when there is none. */
int plan_strategy_parse(const char *name);
int plan_prefetch_parse(const char *name);

#endif
