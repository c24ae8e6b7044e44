/* A peer's configuration: read, walked key by key, answered from a table, printed. */
#include "client/ctl/plan/peer_config.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "client/ctl/base/text.h"
#include "client/ctl/base/verb.h"
#include "proto/base/check.h"
#include "proto/base/flags.h"

#define FILE_BYTES_MAX (1u << 20)
#define ANSWERS_MAX    512u

static const char *const verdict_names[] = {
    [PEER_SETS] = "set",          [PEER_SAME] = "same", [PEER_SCRIPT] = "script",
    [PEER_NEEDLESS] = "needless", [PEER_OFF] = "off",   [PEER_REFUSED] = "refused",
};

void peer_say(struct peer_answer *a, enum peer_verdict verdict, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(a->text, sizeof a->text, fmt, args);
    va_end(args);
    a->verdict = verdict;
}

bool peer_is_on(const json_t *value)
{
    static const char *const off[] = { "", "none", "no", "false", "no_wrap", "no_prefetch" };
    if (json_is_string(value))
        for (size_t i = 0; i < ARRAY_SIZE(off); i++)
            if (strcasecmp(json_string_value(value), off[i]) == 0)
                return false;
    if (json_is_number(value))
        return json_number_value(value) != 0;
    return !json_is_false(value) && !json_is_null(value);
}

/* -- The table -------------------------------------------------------------------------------- */

/* Whether the knob stands for path; its own prefix may be left out of the last key. */
static bool knob_is(const struct peer_table *t, const struct peer_knob *k, const char *path)
{
    const char *last = strrchr(path, '.');
    const size_t head = last != NULL ? (size_t)(last + 1 - path) : 0;
    const size_t bytes = strlen(k->path), skip = t->prefix != NULL ? strlen(t->prefix) : 0;
    const size_t named = bytes > 2 && strcmp(k->path + bytes - 2, ".*") == 0 ? bytes - 2 : bytes;
    if (strlen(path) == named && strncasecmp(path, k->path, named) == 0)
        return true;
    return skip > 0 && strncasecmp(path + head, t->prefix, skip) == 0 &&
           strlen(path) - skip == named && strncasecmp(path, k->path, head) == 0 &&
           strncasecmp(path + head + skip, k->path + head, named - head) == 0;
}

static const struct peer_knob *knob_find(const struct peer_table *t, const char *path)
{
    for (size_t i = 0; i < t->count; i++)
        if (knob_is(t, &t->knobs[i], path))
            return &t->knobs[i];
    return NULL;
}

/* Whether knobs of the table lie below path. */
static bool is_group(const struct peer_table *t, const char *path)
{
    const size_t bytes = strlen(path);
    for (size_t i = 0; i < t->count; i++)
        if (strncasecmp(t->knobs[i].path, path, bytes) == 0 && t->knobs[i].path[bytes] == '.')
            return true;
    return false;
}

/* -- The walk --------------------------------------------------------------------------------- */

struct walk {
    const struct peer_table *table;
    struct peer_config *config;
};

static struct peer_answer *answer_new(struct peer_config *c, const char *path, const json_t *value)
{
    CHECK(c->count < ANSWERS_MAX);
    struct peer_answer *a = &c->answers[c->count++];
    char *text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
    *a = (struct peer_answer){ .verdict = PEER_REFUSED };
    text_clean(path, a->knob, sizeof a->knob);
    text_clean(text != NULL ? text : "?", a->value, sizeof a->value);
    free(text);
    return a;
}

static void say_unknown(const struct walk *w, struct peer_answer *a)
{
    const char *names[ANSWERS_MAX];
    char near[120];
    CHECK(w->table->count <= ARRAY_SIZE(names));
    for (size_t i = 0; i < w->table->count; i++)
        names[i] = w->table->knobs[i].path;
    suggest(a->knob, names, w->table->count, "", near, sizeof near);
    const bool found = strncmp(near, "; did", 5) == 0;
    peer_say(a, PEER_REFUSED, "not known as a knob of %s%s", w->table->tool, found ? near : "");
}

static void answer_knob(const struct walk *w, const struct peer_knob *k, const char *path,
                        const json_t *value)
{
    struct peer_answer *a = answer_new(w->config, path, value);
    const bool is_auto = json_is_string(value) && strcmp(json_string_value(value), "auto") == 0;
    if (k == NULL && is_group(w->table, path))
        peer_say(a, PEER_REFUSED, "must be an object of knobs, as {\"enabled\": true}");
    else if (k == NULL)
        say_unknown(w, a);
    else if (is_auto)
        peer_say(a, PEER_SCRIPT, "the trainer fills it in: ask with what it chose");
    else if (k->take == NULL && k->verdict == PEER_REFUSED && !peer_is_on(value))
        peer_say(a, PEER_OFF, "as here");
    else {
        peer_say(a, k->verdict, "%s", k->text);
        if (k->take != NULL)
            k->take(w->config, value, a);
    }
    w->config->refused += a->verdict == PEER_REFUSED ? 1 : 0;
}

/* Answer the knobs of group, whose path is `path` ("": the whole). Depth is that of the tables. */
static int walk_group(const struct walk *w, const char *path, json_t *group, unsigned depth,
                      struct shd_err *e)
{
    const char *key;
    json_t *value;
    int r = SHD_OK;
    json_object_foreach(group, key, value)
    {
        char below[256];
        const bool fits = (size_t)snprintf(below, sizeof below, "%s%s%s", path,
                                           path[0] != '\0' ? "." : "", key) < sizeof below;
        if (!fits || w->config->count == ANSWERS_MAX)
            return err_set(e, SHD_ERANGE, "%s: more than %u knobs, or one of more than %zu bytes",
                           w->config->from, ANSWERS_MAX, sizeof below - 1);
        const struct peer_knob *k = knob_find(w->table, below);
        const json_t *enabled = json_object_get(value, "enabled");
        const bool descends = k == NULL && json_is_object(value) && is_group(w->table, below);
        if (descends && enabled != NULL && !peer_is_on(enabled))
            peer_say(answer_new(w->config, below, value), PEER_OFF, "not enabled");
        else if (descends && depth > 0)
            r = walk_group(w, below, value, depth - 1, e);
        else
            answer_knob(w, k, below, value);
        if (r != SHD_OK)
            return r;
    }
    return SHD_OK;
}

/* -- What only several knobs say together ------------------------------------------------------ */

static void settle(struct peer_config *c)
{
    struct peer_sizes *s = &c->sizes;
    struct plan_ask *ask = c->ask;
    const bool all = s->step_batch > 0 && s->micro_batch > 0;
    if (all && s->accumulate > 0 && s->step_batch % (s->micro_batch * s->accumulate) == 0)
        ask->workers = (uint32_t)(s->step_batch / (s->micro_batch * s->accumulate));
    else if (all && s->accumulate == 0 && s->step_batch % (s->micro_batch * ask->workers) == 0)
        s->accumulate = s->step_batch / (s->micro_batch * ask->workers);
    if (s->accumulate > 0)
        ask->micros = (uint32_t)s->accumulate;
    if (s->live_elems > 0)
        ask->policy.max_live_bytes = s->live_elems *
                                     (ask->param_dtype != NULL
                                          ? dtype_bytes(dtype_parse(ask->param_dtype))
                                          : dtype_bytes(SHD_F32));
}

/* -- Reading ---------------------------------------------------------------------------------- */

/* "full_shard auto_wrap offload", as an object of the words. */
static json_t *from_words(const char *words)
{
    char copy[256];
    char *at = NULL;
    json_t *o = json_object();
    snprintf(copy, sizeof copy, "%s", words); /* what is cut off is no word that is known */
    for (char *w = strtok_r(copy, " ,", &at); w != NULL; w = strtok_r(NULL, " ,", &at))
        json_object_set_new(o, w, json_true());
    return o;
}

static int load(const struct peer_table *table, const char *from, json_t **ret, struct shd_err *e)
{
    char *text = NULL;
    size_t bytes;
    json_error_t error;
    const bool is_file = strchr(from, '.') != NULL || strchr(from, '/') != NULL;
    if (!is_file && table->has_words) {
        *ret = from_words(from);
        return *ret != NULL ? SHD_OK : err_set(e, SHD_ENOMEM, "no memory for '%s'", from);
    }
    const int r = verb_file(from, FILE_BYTES_MAX, &text, &bytes, e);
    if (r != SHD_OK)
        return r;
    *ret = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    free(text);
    if (*ret == NULL)
        return err_set(e, SHD_EINVAL,
                       "%s: line %d: %s (JSON is read; a YAML file must be written "
                       "as JSON first)",
                       from, error.line, error.text);
    if (json_is_object(*ret))
        return SHD_OK;
    json_decref(*ret);
    return err_set(e, SHD_EINVAL, "%s: not a JSON object of knobs", from);
}

int peer_read(const struct peer_table *table, const char *from, struct plan_ask *ask,
              struct peer_config *ret_config, struct shd_err *e)
{
    json_t *root;
    *ret_config = (struct peer_config){ .tool = table->tool, .from = from, .ask = ask };
    int r = load(table, from, &root, e);
    if (r != SHD_OK)
        return r;
    ret_config->answers = calloc(ANSWERS_MAX, sizeof *ret_config->answers);
    const struct walk w = { .table = table, .config = ret_config };
    r = ret_config->answers == NULL ? err_set(e, SHD_ENOMEM, "no memory for the answers")
                                    : walk_group(&w, "", root, 4, e);
    json_decref(root);
    if (r == SHD_OK)
        settle(ret_config);
    return r;
}

void peer_free(struct peer_config *c)
{
    free(c->answers);
    c->answers = NULL;
}

/* -- Printing --------------------------------------------------------------------------------- */

/* The flags of `shardctl plan` that say what the configuration set. */
static void print_flags(const struct peer_config *c, FILE *out)
{
    const struct plan_ask *a = c->ask;
    const struct plan_policy *p = &a->policy;
    fprintf(out, "--strategy %s --prefetch %s --forward-prefetch %" PRIu32,
            plan_strategy_name(p->strategy), plan_prefetch_name(p->backward_prefetch),
            p->forward_prefetch);
    if (p->max_live_bytes > 0)
        fprintf(out, " --max-live-bytes %" PRIu64, p->max_live_bytes);
    if (a->param_dtype != NULL)
        fprintf(out, " --param-dtype %s", a->param_dtype);
    if (p->grad_dtype != 0)
        fprintf(out, " --grad-dtype %s", dtype_name(p->grad_dtype));
    if (a->micros > 0)
        fprintf(out, " --micro-batches-per-worker %" PRIu32, a->micros);
    if (a->unit_elems_min > 0)
        fprintf(out, " --unit-elems-min %" PRIu32, a->unit_elems_min);
    if (a->workers > 1)
        fprintf(out, " --workers %" PRIu32, a->workers);
}

void peer_print(const struct peer_config *c, FILE *out)
{
    int knob = 4, value = 5;
    for (size_t i = 0; i < c->count; i++) {
        const int k = (int)text_width(c->answers[i].knob), v = (int)text_width(c->answers[i].value);
        knob = k > knob ? k : knob;
        value = v > value ? v : value;
    }
    fprintf(out, "%s as %s: %zu knob%s, %zu refused\n\n", c->from, c->tool, c->count,
            c->count == 1 ? "" : "s", c->refused);
    for (size_t i = 0; i < c->count; i++) {
        const struct peer_answer *a = &c->answers[i];
        fprintf(out, "  %-*s  %-*s  %-8s  %s\n", knob, a->knob, value, a->value,
                verdict_names[a->verdict], a->text);
    }
    fputs("\n  so: ", out);
    print_flags(c, out);
    fputs("\n\n", out);
}

json_t *peer_json(const struct peer_config *c)
{
    json_t *knobs = json_array();
    char *flags = NULL;
    size_t bytes;
    FILE *f = open_memstream(&flags, &bytes);
    if (f != NULL) {
        print_flags(c, f);
        fclose(f);
    }
    for (size_t i = 0; i < c->count; i++) {
        const struct peer_answer *a = &c->answers[i];
        json_array_append_new(knobs,
                              json_pack("{s:s, s:s, s:s, s:s}", "knob", a->knob, "value", a->value,
                                        "answer", verdict_names[a->verdict], "text", a->text));
    }
    json_t *all = json_pack("{s:s, s:s, s:I, s:o, s:s}", "tool", c->tool, "from", c->from,
                            "refused", (json_int_t)c->refused, "knobs", knobs, "flags",
                            flags != NULL ? flags : "");
    free(flags);
    return all;
}
