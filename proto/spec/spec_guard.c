/* See spec_guard.h. */
#include "proto/spec/spec_guard.h"

#include <float.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/spec/guard.h"
#include "proto/spec/spec_node.h"
#include "proto/spec/spec_optimizer.h"

static int parse_action(const struct node *n, struct guard_rule *rule, struct shd_err *e)
{
    const char *action = "skip";
    const int r = n->json != NULL ? node_text(n, &action, e) : SHD_OK;
    if (r != SHD_OK)
        return r;
    rule->rewind = strcmp(action, "rewind") == 0;
    rule->stop = rule->rewind || strcmp(action, "stop") == 0;
    if (rule->stop || strcmp(action, "skip") == 0)
        return SHD_OK;
    return err_set(e, SHD_EINVAL, "%s is '%.40s', must be skip, stop or rewind", node_path(n).text,
                   action);
}

/* The one threshold that a rule has says what it is. */
static int parse_what(const struct node *n, struct guard_rule *rule, struct shd_err *e)
{
    for (uint32_t what = GUARD_NONE + 1; what < GUARD_WHAT_END; what++) {
        const struct node threshold = node_field(n, guard_name(what));
        if (threshold.json == NULL)
            continue;
        if (rule->what != GUARD_NONE)
            return err_set(e, SHD_EINVAL, "%s has %s and %s: give each a rule of its own",
                           node_path(n).text, guard_name(rule->what), guard_name(what));
        rule->what = (enum guard_what)what;
        const int r = node_real(&threshold, (struct node_range){ FLT_MIN, FLT_MAX },
                                &rule->threshold, e);
        if (r != SHD_OK)
            return r;
    }
    if (rule->what != GUARD_NONE)
        return SHD_OK;
    return err_set(e, SHD_EINVAL, "%s has none of norm_above, norm_zscore, loss_zscore",
                   node_path(n).text);
}

static int parse_rule(const struct node *n, struct guard_rule *rule, struct shd_err *e)
{
    const char *known[GUARD_WHAT_END + 1] = { "window", "action" };
    for (uint32_t what = GUARD_NONE + 1; what < GUARD_WHAT_END; what++)
        known[what + 1] = guard_name(what);
    int r = node_object(n, known, ARRAY_SIZE(known), e);
    if (r == SHD_OK)
        r = parse_what(n, rule, e);
    if (r != SHD_OK)
        return r;
    const struct node window = node_field(n, "window"), action = node_field(n, "action");
    uint64_t steps = guard_windowed(rule->what) ? GUARD_WINDOW_DEFAULT : 0;
    if (window.json != NULL && !guard_windowed(rule->what))
        return err_set(e, SHD_EINVAL, "%s: %s looks at one step, and has no window",
                       node_path(&window).text, guard_name(rule->what));
    if (window.json != NULL)
        r = node_u64(&window, GUARD_WINDOW_MIN, GUARD_WINDOW_MAX, &steps, e);
    rule->window = (uint32_t)steps;
    return r == SHD_OK ? parse_action(&action, rule, e) : r;
}

int spec_guard_parse(struct guard **ret_guard, const struct node *n, struct shd_err *e)
{
    struct guard guard = { 0 };
    if (n->json == NULL)
        return SHD_OK;
    int r = node_array(n, 1, GUARD_RULES_MAX, &guard.count, e);
    if (r != SHD_OK)
        return r;
    struct node item = node_item(n, 0);
    for (uint32_t i = 0; r == SHD_OK && i < guard.count; i++, item = node_next(&item))
        r = parse_rule(&item, &guard.rules[i], e);
    if (r != SHD_OK)
        return r;
    *ret_guard = sys_malloc(sizeof guard);
    if (*ret_guard == NULL)
        return node_no_memory(e);
    **ret_guard = guard;
    return SHD_OK;
}

json_t *spec_guard_json(const struct guard *guard)
{
    json_t *array = json_array();
    for (uint32_t i = 0; array != NULL && i < guard->count; i++) {
        const struct guard_rule *rule = &guard->rules[i];
        json_t *o = json_pack("{s:f}", guard_name(rule->what), rule->threshold);
        if (rule->window > 0)
            o = spec_json_with(o, "window", json_integer((json_int_t)rule->window));
        o = spec_json_with(o, "action", json_string(guard_action(rule)));
        if (json_array_append_new(array, o) != 0) {
            json_decref(array);
            array = NULL;
        }
    }
    return array;
}
