/* merge.c: see merge.h. */
#include "examples/gpt/merge.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "proto/base/status.h"

/* -- Options ----------------------------------------------------------------------------------- */

static int check_unused(const struct options_local *l, struct shd_err *e)
{
    const char *given = l->group != NULL        ? "--group"
                        : l->outer != NULL      ? "--outer"
                        : l->outer_name != NULL ? "--outer-name"
                        : l->joined > 0         ? "--joined"
                        : l->lr > 0             ? "--outer-lr"
                        : l->momentum > 0       ? "--outer-momentum"
                        : l->average            ? "--average"
                                                : NULL;
    return given == NULL
               ? SHD_OK
               : err_set(e, SHD_EINVAL, "%s without --local-steps: nothing is merged", given);
}

static int parse_group(struct options_local *l, struct shd_err *e)
{
    int end = 0;
    const char *text = l->group;
    if (strspn(text, "0123456789/") != strlen(text) ||
        sscanf(text, "%9u/%9u%n", &l->index, &l->groups, &end) != 2 || text[end] != '\0' ||
        (l->index >= l->groups && l->joined == 0))
        return err_set(
            e, SHD_EINVAL,
            "--group '%s' is not I/N, with I from 0 to N - 1: 0/2 and 1/2 are two groups", text);
    return SHD_OK;
}

int merge_check(struct options *o, const int *words, struct shd_err *e)
{
    (void)words;
    struct options_local *l = &o->local;
    if (l->steps == 0)
        return check_unused(l, e);
    if (l->group == NULL || l->outer == NULL)
        return err_set(e, SHD_EINVAL,
                       "--local-steps without %s: which group is this, and where is the model that "
                       "all merge into",
                       l->group == NULL ? "--group" : "--outer");
    if (o->evaluate)
        return err_set(e, SHD_EINVAL, "--local-steps with --evaluate: it trains nothing");
    if (l->average && (l->lr > 0 || l->momentum > 0))
        return err_set(
            e, SHD_EINVAL,
            "--average with --outer-lr or --outer-momentum: they are of an optimizer, and "
            "a mean has none");
    if (o->steps % l->steps != 0)
        return err_set(
            e, SHD_EINVAL,
            "--steps %ju is not a multiple of --local-steps %ju: the last steps would be "
            "merged with nobody's; %ju would be right",
            (uintmax_t)o->steps, (uintmax_t)l->steps,
            (uintmax_t)((o->steps / l->steps + 1) * l->steps));
    return parse_group(l, e);
}

/* -- Steps ------------------------------------------------------------------------------------- */

bool merge_is_due(const struct options *o, uint64_t step)
{
    return o->local.steps > 0 && step % (o->local.steps + 1) == 0;
}

uint64_t merge_trained(const struct options *o, uint64_t step)
{
    const uint64_t every = o->local.steps;
    return every > 0 ? step - (step + every) / (every + 1) : step;
}

/* -- The outer model --------------------------------------------------------------------------- */

/* With --elastic anybody may be gone at any time: all merge, and the first counts. */
struct shd_merge_options merge_options(const struct options *o)
{
    const struct options_local *l = &o->local;
    return (struct shd_merge_options){ .size = sizeof(struct shd_merge_options),
                                       .every = l->steps,
                                       .group = l->index,
                                       .groups = l->groups,
                                       .joined = l->joined,
                                       .lr = l->lr,
                                       .momentum = l->momentum,
                                       .average = l->average,
                                       .follows = !o->elastic && o->rank > 0 };
}

int merge_open(const struct options *o, shd_model *inner, int (*idle)(void *ctx), void *ctx,
               shd_session **ret_session, shd_model **ret_outer, struct shd_err *e)
{
    const struct shd_merge_options merge = merge_options(o);
    const struct shd_options options = { .size = sizeof options,
                                         .address = o->local.outer,
                                         .name = "shd-gpt",
                                         .idle = idle,
                                         .idle_ctx = ctx };
    if (o->local.steps == 0 || merge.follows)
        return SHD_OK;
    const int r = shd_connect(&options, ret_session, e);
    return r == SHD_OK
               ? shd_outer_open(*ret_session, inner, o->local.outer_name, &merge, ret_outer, e)
               : err_prefix(e, "--outer");
}
