/* See plan_names.h. */
#include "client/plan/plan_names.h"

#include <stddef.h>
#include <string.h>

#include "proto/base/check.h"

static const char *const op_names[] = { "FETCH",  "WAIT", "FORWARD", "BACKWARD",
                                        "RETURN", "FREE", "PREPARE", "COMMIT" };
static const char *const strategy_names[] = { "zero3", "zero2", "zero1", "ddp", "hybrid" };
static const char *const prefetch_names[] = { "pre", "post", "none" };

static int find(const char *name, const char *const *names, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(names[i], name) == 0)
            return (int)i;
    return -1;
}

const char *plan_op_name(enum plan_op_kind kind)
{
    return (unsigned)kind < ARRAY_SIZE(op_names) ? op_names[kind] : "?";
}

const char *plan_strategy_name(enum plan_strategy strategy)
{
    return (unsigned)strategy < ARRAY_SIZE(strategy_names) ? strategy_names[strategy] : "?";
}

const char *plan_prefetch_name(enum plan_backward_prefetch prefetch)
{
    return (unsigned)prefetch < ARRAY_SIZE(prefetch_names) ? prefetch_names[prefetch] : "?";
}

int plan_strategy_parse(const char *name)
{
    return find(name, strategy_names, ARRAY_SIZE(strategy_names));
}

int plan_prefetch_parse(const char *name)
{
    return find(name, prefetch_names, ARRAY_SIZE(prefetch_names));
}
