/* tune.c: see tune.h. */
#include "examples/gpt/tune.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "proto/base/check.h"
#include "proto/base/status.h"

/* In the order of the enums. */
static const char *const strategies[] = { "zero3", "zero2", "zero1", "ddp" };
static const char *const prefetches[] = { "pre", "post", "none" };

static int find_word(const json_t *object, const char *key, const char *const *words, size_t count)
{
    const char *word = json_string_value(json_object_get(object, key));
    for (size_t i = 0; word != NULL && i < count; i++)
        if (strcmp(words[i], word) == 0)
            return (int)i;
    return -1;
}

static bool is_tried(const struct tune *t, const struct shd_policy *p)
{
    for (uint32_t i = 0; i < t->count; i++)
        if (t->tries[i].policy.strategy == p->strategy &&
            t->tries[i].policy.backward_prefetch == p->backward_prefetch)
            return true;
    return false;
}

static int wrong_row(size_t index, const char *what, struct shd_err *e)
{
    return err_set(e, SHD_EINVAL, "tuned[%zu].%s is not what `shardctl plan --tune --json` prints",
                   index, what);
}

/* A row of it: rows are sorted, so a strategy's first one is its best. */
static int read_row(const json_t *row, size_t index, const struct shd_policy *given, struct tune *t,
                    struct shd_err *e)
{
    const json_t *p = json_object_get(row, "policy"),
                 *ahead = json_object_get(p, "forward_prefetch"),
                 *units = json_object_get(p, "max_live_units"),
                 *bytes = json_object_get(p, "max_live_bytes"),
                 *seconds = json_object_get(json_object_get(row, "time"), "step_s");
    const int strategy = find_word(p, "strategy", strategies, ARRAY_SIZE(strategies));
    const int prefetch = find_word(p, "backward_prefetch", prefetches, ARRAY_SIZE(prefetches));
    struct shd_policy policy = *given;
    if (strategy < 0)
        return wrong_row(index, "policy.strategy", e);
    if (prefetch < 0)
        return wrong_row(index, "policy.backward_prefetch", e);
    if (!json_is_integer(ahead) || json_integer_value(ahead) < 0 ||
        json_integer_value(ahead) > UINT32_MAX)
        return wrong_row(index, "policy.forward_prefetch", e);
    if (!json_is_integer(units) || json_integer_value(units) < 0 ||
        json_integer_value(units) > UINT32_MAX)
        return wrong_row(index, "policy.max_live_units", e);
    if (!json_is_integer(bytes) || json_integer_value(bytes) < 0)
        return wrong_row(index, "policy.max_live_bytes", e);
    if (!json_is_number(seconds) || !(json_number_value(seconds) > 0))
        return wrong_row(index, "time.step_s", e);
    policy.strategy = (enum shd_strategy)strategy;
    policy.backward_prefetch = (enum shd_backward_prefetch)prefetch;
    policy.forward_prefetch = (uint32_t)json_integer_value(ahead);
    policy.max_live_units = (uint32_t)json_integer_value(units);
    policy.max_live_bytes = (uint64_t)json_integer_value(bytes);
    if (!is_tried(t, &policy) && t->count < TUNE_TRIES)
        t->tries[t->count++] = (struct tune_try){ .policy = policy,
                                                  .predicted_s = json_number_value(seconds) };
    return SHD_OK;
}

int tune_read(const char *text, const struct shd_policy *given, struct tune *ret_tune,
              struct shd_err *e)
{
    struct tune t = { .count = 0 };
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    const json_t *rows = json_object_get(root, "tuned"), *row;
    size_t i;
    int r = SHD_OK;
    if (rows != NULL && (!json_is_array(rows) || json_array_size(rows) == 0))
        r = err_set(e, SHD_EINVAL, "\"tuned\" must be an array with policies");
    if (r == SHD_OK)
        json_array_foreach(rows, i, row)
        {
            r = read_row(row, i, given, &t, e);
            if (r != SHD_OK)
                break;
        }
    json_decref(root);
    if (r == SHD_OK)
        *ret_tune = t;
    return r;
}

static int shorter(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

bool tune_step(struct tune *t, double seconds)
{
    if (t->count == 0 || t->done)
        return false;
    t->seconds[t->steps++] = seconds;
    if (t->steps < TUNE_STEPS)
        return false;
    qsort(t->seconds + 1, TUNE_STEPS - 1, sizeof *t->seconds, shorter);
    t->tries[t->at].measured_s = t->seconds[TUNE_STEPS / 2];
    t->steps = 0;
    if (t->at + 1 < t->count) {
        t->at++;
        return true;
    }
    const uint32_t last = t->at;
    for (uint32_t i = 0; i < t->count; i++)
        if (t->tries[i].measured_s < t->tries[t->at].measured_s)
            t->at = i;
    t->done = true;
    return t->at != last;
}

const char *tune_name(const struct tune_try *try, char buf[TUNE_NAME_BYTES])
{
    const struct shd_policy *p = &try->policy;
    snprintf(buf, TUNE_NAME_BYTES, "%s, forward prefetch %u, backward prefetch %s",
             strategies[p->strategy], p->forward_prefetch, prefetches[p->backward_prefetch]);
    return buf;
}
