/* See spec_guard.h. */
#include "proto/spec/spec_guard.h"

#include <float.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/spec/guard.h"
#include "proto/spec/spec.h"
#include "proto/spec/spec_node.h"
#include "proto/spec/spec_optimizer.h"

/* Kinds of rules that a spec has fields for. */
#define FIELDS_END (GUARD_LOSS_ZSCORE + 1)

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
    for (uint32_t what = GUARD_NONE + 1; what < FIELDS_END; what++) {
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

static int add_pattern(const struct node *n, struct guard_rule *rule, struct shd_err *e)
{
    const size_t at = strlen(rule->units);
    const char *pattern;
    const int r = node_text(n, &pattern, e);
    if (r != SHD_OK)
        return r;
    if (*pattern == '\0' || strpbrk(pattern, " \t\n") != NULL)
        return err_set(e, SHD_EINVAL,
                       "%s is '%.40s': a name of units, with * and ? for what differs",
                       node_path(n).text, pattern);
    if (at + strlen(pattern) + 2 > sizeof rule->units)
        return err_set(e, SHD_ERANGE, "%s: patterns of a rule have at most %zu characters together",
                       node_path(n).text, sizeof rule->units - 2);
    snprintf(rule->units + at, sizeof rule->units - at, "%s%s", at > 0 ? " " : "", pattern);
    return SHD_OK;
}

/* "h.*", or several in a list. */
static int parse_rule_units(const struct node *n, struct guard_rule *rule, struct shd_err *e)
{
    uint32_t count = 0;
    if (n->json == NULL)
        return SHD_OK;
    if (rule->what == GUARD_LOSS_ZSCORE)
        return err_set(e, SHD_EINVAL, "%s: a loss is of no unit", node_path(n).text);
    rule->what = rule->what == GUARD_NORM_ZSCORE ? GUARD_UNIT_ZSCORE : GUARD_UNIT_ABOVE;
    if (n->json->kind != TEXT_ARRAY)
        return add_pattern(n, rule, e);
    int r = node_array(n, 1, UINT16_MAX, &count, e);
    struct node item = r == SHD_OK ? node_item(n, 0) : *n;
    for (uint32_t i = 0; r == SHD_OK && i < count; i++, item = node_next(&item))
        r = add_pattern(&item, rule, e);
    return r;
}

static int parse_rule(const struct node *n, struct guard_rule *rule, struct shd_err *e)
{
    const char *known[FIELDS_END + 2] = { "window", "action", "units" };
    for (uint32_t what = GUARD_NONE + 1; what < FIELDS_END; what++)
        known[what + 2] = guard_name(what);
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
    const struct node units = node_field(n, "units");
    if (r == SHD_OK)
        r = parse_rule_units(&units, rule, e);
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

static bool matches(const char *patterns, const char *name)
{
    char all[GUARD_UNITS_BYTES], *rest = all;
    memcpy(all, patterns, sizeof all);
    for (const char *one; (one = strsep(&rest, " ")) != NULL;)
        if (fnmatch(one, name, 0) == 0)
            return true;
    return false;
}

/* Of units that rules with a window look at what is kept for these. */
static int give_columns(const struct spec *spec, struct guard *guard, struct shd_err *e)
{
    uint8_t windowed = 0;
    uint32_t window = 0;
    for (uint32_t i = 0; i < guard->count; i++) {
        if (!guard_unit_windowed(&guard->rules[i]))
            continue;
        windowed |= (uint8_t)(1u << i);
        window = guard->rules[i].window > window ? guard->rules[i].window : window;
    }
    if (windowed == 0)
        return SHD_OK;
    guard->column = sys_calloc(spec->unit_count, sizeof *guard->column);
    if (guard->column == NULL)
        return node_no_memory(e);
    for (uint32_t u = 0; u < spec->unit_count; u++)
        if ((guard->watched[u] & windowed) != 0)
            guard->column[u] = ++guard->columns;
    guard->rows = window + 1;
    if (guard->columns <= GUARD_COLUMNS_MAX &&
        (uint64_t)guard->columns * guard->rows <= GUARD_NORMS_MAX)
        return SHD_OK;
    return err_set(e, SHD_ERANGE,
                   "guard: norm_zscore of %" PRIu32 " units with a window of %" PRIu32
                   ", at most %u units and %" PRIu64
                   " norms of them: name fewer units, or take a shorter window",
                   guard->columns, window, GUARD_COLUMNS_MAX, GUARD_NORMS_MAX);
}

int spec_guard_units(struct spec *spec, struct shd_err *e)
{
    struct guard *guard = spec->guard;
    bool any = false;
    for (uint32_t i = 0; guard != NULL && i < guard->count; i++)
        any = any || guard->rules[i].units[0] != '\0';
    if (!any)
        return SHD_OK;
    guard->watched = sys_calloc(spec->unit_count, 1);
    if (guard->watched == NULL)
        return node_no_memory(e);
    for (uint32_t i = 0; i < guard->count; i++) {
        uint32_t found = 0;
        const char *patterns = guard->rules[i].units;
        for (uint32_t u = 0; patterns[0] != '\0' && u < spec->unit_count; u++) {
            const struct spec_unit *unit = &spec->units[u];
            if (unit->frozen || unit->mean || !matches(patterns, unit->name))
                continue;
            guard->watched[u] |= (uint8_t)(1u << i);
            found++;
        }
        if (patterns[0] != '\0' && found == 0)
            return err_set(e, SHD_EINVAL,
                           "guard[%" PRIu32 "].units '%.80s' is no unit with a gradient; there is "
                           "'%.80s'",
                           i, patterns, spec->units[0].name);
    }
    return give_columns(spec, guard, e);
}

static json_t *patterns_json(const char *patterns)
{
    char all[GUARD_UNITS_BYTES], *rest = all;
    json_t *list = json_array();
    memcpy(all, patterns, sizeof all);
    for (const char *one; (one = strsep(&rest, " ")) != NULL;)
        json_array_append_new(list, json_string(one));
    return list;
}

json_t *spec_guard_json(const struct guard *guard)
{
    json_t *array = json_array();
    for (uint32_t i = 0; array != NULL && i < guard->count; i++) {
        const struct guard_rule *rule = &guard->rules[i];
        const enum guard_what field = rule->what == GUARD_UNIT_ABOVE    ? GUARD_NORM_ABOVE
                                      : rule->what == GUARD_UNIT_ZSCORE ? GUARD_NORM_ZSCORE
                                                                        : rule->what;
        json_t *o = json_pack("{s:f}", guard_name(field), rule->threshold);
        if (rule->window > 0)
            o = spec_json_with(o, "window", json_integer((json_int_t)rule->window));
        if (rule->units[0] != '\0')
            o = spec_json_with(o, "units", patterns_json(rule->units));
        o = spec_json_with(o, "action", json_string(guard_action(rule)));
        if (json_array_append_new(array, o) != 0) {
            json_decref(array);
            array = NULL;
        }
    }
    return array;
}
