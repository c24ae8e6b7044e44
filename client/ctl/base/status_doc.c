/* See status_doc.h. */
#include "client/ctl/base/status_doc.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/ctl/base/text.h"
#include "proto/base/check.h"

/* -- Fields ---------------------------------------------------------------------------------- */

static double value(const json_t *v)
{
    return json_is_number(v) ? json_number_value(v) : NAN;
}

static double number(const json_t *object, const char *key)
{
    return value(json_object_get(object, key));
}

static void text(const json_t *object, const char *key, char *buf, size_t bytes)
{
    const char *s = json_string_value(json_object_get(object, key));
    text_clean(s != NULL ? s : "", buf, bytes);
}
#define TEXT(object, key, field) text(object, key, field, sizeof(field))

/* -- Models ---------------------------------------------------------------------------------- */

static void read_checkpoint(const json_t *c, struct doc_model *m)
{
    char state[DOC_WORD_BYTES], step[TEXT_BYTES];
    if (!json_is_object(c))
        return;
    TEXT(c, "state", state);
    const double share = number(c, "bytes_done") / number(c, "bytes_total");
    const int n = snprintf(m->checkpoint, sizeof(m->checkpoint), "%s step %.12s", state,
                           text_count(number(c, "step"), step));
    if (share >= 0 && share <= 1 && n < (int)sizeof(m->checkpoint))
        snprintf(m->checkpoint + n, sizeof(m->checkpoint) - (size_t)n, " %.0f %%", share * 100);
}

static void add_setting(struct doc_model *m, const char *key, const json_t *value, const char *how,
                        double step)
{
    char name[DOC_TEXT_BYTES], x[TEXT_BYTES] = "spec";
    const size_t used = strlen(m->settings);
    if (json_is_number(value))
        snprintf(x, sizeof x, "%.6g", json_number_value(value));
    snprintf(m->settings + used, sizeof m->settings - used, "%s%s=%s %s %.0f", used > 0 ? ", " : "",
             text_clean(key, name, sizeof name), x, how, step);
}

/* Those in force, then those that wait. */
static void read_settings(const json_t *s, struct doc_model *m)
{
    const json_t *next = json_object_get(s, "next");
    const char *key;
    json_t *v;
    size_t i;
    json_object_foreach(json_object_get(s, "now"), key, v)
    {
        add_setting(m, key, json_object_get(v, "value"), "since step", number(v, "from"));
    }
    json_object_foreach(json_object_get(next, "settings"), key, v)
    {
        add_setting(m, key, v, "from step", number(next, "from"));
    }
    json_array_foreach(json_object_get(s, "later"), i, next)
    {
        json_object_foreach(json_object_get(next, "settings"), key, v)
        {
            add_setting(m, key, v, "from step", number(next, "from"));
        }
    }
}

static void read_verified(const json_t *j, struct doc_model *m)
{
    const json_t *last = json_array_get(json_object_get(j, "recent"), 0);
    const json_t *workers = json_object_get(last, "workers");
    const json_t *a = json_array_get(workers, 0), *b = json_array_get(workers, 1);
    char name[2][DOC_NAME_BYTES], unit[DOC_NAME_BYTES];
    m->compared = number(j, "compared");
    m->differences = number(j, "differences");
    if (last == NULL)
        return;
    TEXT(a, "name", name[0]);
    TEXT(b, "name", name[1]);
    TEXT(last, "unit", unit);
    const double wrong = number(last, "wrong_pid");
    const int used = snprintf(m->differ, sizeof(m->differ),
                              "%.24s (pid %.0f) and %.24s (pid %.0f) differ in unit %s, "
                              "micro-batch %.0f of step %.0f",
                              name[0], number(a, "pid"), name[1], number(b, "pid"), unit,
                              number(last, "micro"), number(last, "step"));
    if (!isnan(wrong) && used > 0 && (size_t)used < sizeof(m->differ))
        snprintf(m->differ + used, sizeof(m->differ) - (size_t)used, ": pid %.0f is wrong", wrong);
}

static void read_model(const json_t *j, const json_t *none, void *item)
{
    struct doc_model *m = item;
    const json_t *checkpoint = json_object_get(j, "checkpoint");
    (void)none;
    static const char *const kinds[DOC_MEMORY] = { "state", "publish", "inbox",
                                                   "board", "ledger",  "spill" };
    static const char *const on_files[DOC_FILES] = { "state_on_files", "publish_on_files",
                                                     "snapshots_on_files" };
    const json_t *bytes = json_object_get(j, "bytes"), *rates = json_object_get(j, "rates");
    const json_t *units = json_object_get(j, "units"); /* or how many there are */
    TEXT(j, "name", m->name);
    TEXT(j, "phase", m->phase);
    read_checkpoint(checkpoint, m);
    m->written = number(checkpoint, "bytes_done");
    m->to_write = number(checkpoint, "bytes_total");
    m->saved_step = number(json_object_get(j, "saved"), "step");
    m->saved_s = number(json_object_get(j, "saved"), "age_s");
    m->step = number(j, "step");
    m->owner = number(j, "owner");
    m->owners = number(j, "owners");
    m->units = json_is_array(units) ? (double)json_array_size(units) : number(j, "units");
    m->hold_step = number(j, "hold_step");
    m->micro_batches = number(j, "micro_batches");
    m->expected = number(j, "expected");
    m->returned = number(j, "returned");
    m->waiting = number(j, "waiting");
    for (unsigned i = 0; i < DOC_MEMORY; i++)
        m->bytes[i] = number(bytes, kinds[i]);
    for (unsigned i = 0; i < DOC_FILES; i++)
        m->files[i] = number(bytes, on_files[i]);
    m->steps_per_s = number(rates, "steps_per_s");
    m->returns_per_s = number(rates, "returns_per_s");
    m->bytes_per_s = number(rates, "bytes_per_s");
    m->loss = number(j, "loss");
    m->norm = number(j, "grad_norm");
    read_settings(json_object_get(j, "settings"), m);
    read_verified(json_object_get(j, "verify"), m);
    m->stopped[0] = '\0';
    m->skipped[0] = '\0';
    TEXT(json_object_get(json_object_get(j, "stopped"), "cause"), "text", m->stopped);
    if (m->stopped[0] == '\0') /* of a daemon that knows no cause */
        TEXT(json_object_get(json_object_get(j, "stopped"), "guard"), "text", m->stopped);
    TEXT(json_object_get(j, "last_cause"), "text", m->skipped);
}

double doc_bytes(const struct doc *d, double ret_kinds[DOC_MEMORY])
{
    double sum = 0;
    for (unsigned i = 0; i < DOC_MEMORY; i++) {
        ret_kinds[i] = 0;
        for (uint32_t m = 0; m < d->model_count; m++)
            if (d->models[m].bytes[i] >= 0)
                ret_kinds[i] += d->models[m].bytes[i];
        sum += ret_kinds[i];
    }
    return sum;
}

const struct doc_model *doc_main_model(const struct doc *d)
{
    const struct doc_model *best = d->model_count > 0 ? &d->models[0] : NULL;
    for (uint32_t i = 1; i < d->model_count; i++)
        if (d->models[i].returns_per_s > best->returns_per_s)
            best = &d->models[i];
    return best;
}

/* -- Sessions and waits ---------------------------------------------------------------------- */

/* A unit's name, found by its index among units (NULL: it is not known which model's). */
static void read_unit(const json_t *now, const json_t *units, struct doc_now *s)
{
    char buf[TEXT_BYTES];
    const json_t *unit = json_object_get(now, "unit");
    const double index = number(now, "unit");
    if (json_is_string(unit))
        TEXT(now, "unit", s->unit);
    else if (index >= 0 && index < (double)json_array_size(units))
        TEXT(json_array_get(units, (size_t)index), "name", s->unit);
    else if (json_is_number(unit))
        snprintf(s->unit, sizeof(s->unit), "%s", text_count(index, buf));
}

static void read_session(const json_t *j, const json_t *units, void *item)
{
    struct doc_session *s = item;
    const json_t *now = json_object_get(j, "now");
    TEXT(j, "name", s->name);
    TEXT(j, "role", s->role);
    TEXT(j, "state", s->state);
    TEXT(j, "path", s->path);
    TEXT(now, "what", s->now.what);
    read_unit(now, units, &s->now);
    s->id = number(j, "id");
    s->pid = number(j, "pid");
    s->uid = number(j, "uid");
    s->age_s = number(j, "age_s");
    s->slots = number(j, "slots");
    s->slots_waiting = number(j, "slots_waiting");
    s->now.micro = number(now, "micro");
    s->now.step = number(now, "step");
    s->now.since_s = number(now, "since_s");
}

static void read_peer(const json_t *j, struct doc_peer *p)
{
    p->pid = number(j, "pid");
    TEXT(j, "name", p->name);
    TEXT(j, "state", p->state);
}

static void read_wait(const json_t *j, const json_t *none, void *item)
{
    struct doc_wait *w = item;
    (void)none;
    const json_t *on = json_object_get(j, "on");
    read_peer(json_object_get(j, "who"), &w->who);
    TEXT(j, "kind", w->kind);
    TEXT(j, "text", w->text);
    w->since_s = number(j, "since_s");
    for (size_t i = 0; i < json_array_size(on) && w->on_count < DOC_ON_MAX; i++)
        read_peer(json_array_get(on, i), &w->on[w->on_count++]);
}

/* -- The document ---------------------------------------------------------------------------- */

/* The objects of a list, at most max of them, each read into an item of size bytes; NULL: none, or
 * no memory. Entries that are no objects are left out. units: the model's, for names. */
static void *read_list(const json_t *list, uint32_t max, size_t size,
                       void (*read)(const json_t *entry, const json_t *units, void *item),
                       const json_t *units, uint32_t *ret_count)
{
    const size_t most = json_array_size(list) < max ? json_array_size(list) : max;
    char *items = most > 0 ? calloc(most, size) : NULL;
    uint32_t count = 0;
    for (size_t i = 0; i < json_array_size(list) && items != NULL && count < most; i++)
        if (json_is_object(json_array_get(list, i)))
            read(json_array_get(list, i), units, items + size * count++);
    *ret_count = count;
    return items;
}

/* Of a tool: an administrator's, or our own. */
static bool is_tool(const json_t *session)
{
    const char *role = json_string_value(json_object_get(session, "role"));
    const json_t *pid = json_object_get(session, "pid");
    return (role != NULL && strcmp(role, "admin") == 0) ||
           (json_is_integer(pid) && json_integer_value(pid) == (json_int_t)getpid());
}

static void hide_tools(json_t *root)
{
    json_t *sessions = json_object_get(root, "sessions");
    for (size_t i = json_array_size(sessions); i > 0; i--)
        if (is_tool(json_array_get(sessions, i - 1)))
            json_array_remove(sessions, i - 1);
}

static void read_lists(const json_t *root, struct doc *d)
{
    const json_t *models = json_object_get(root, "models");
    const json_t *sessions = json_object_get(root, "sessions");
    const json_t *waits = json_object_get(root, "waits");
    const json_t *units = json_array_size(models) == 1
                              ? json_object_get(json_array_get(models, 0), "units")
                              : NULL;
    d->models = read_list(models, DOC_MODELS_MAX, sizeof(*d->models), read_model, NULL,
                          &d->model_count);
    d->sessions = read_list(sessions, DOC_SESSIONS_MAX, sizeof(*d->sessions), read_session, units,
                            &d->session_count);
    d->waits = read_list(waits, DOC_WAITS_MAX, sizeof(*d->waits), read_wait, NULL, &d->wait_count);
}

/* Models that failed, or were refused, and the last warning. */
static void read_troubles(const json_t *root, struct doc *d)
{
    const json_t *errors = json_object_get(root, "errors");
    const json_t *models = json_object_get(root, "models");
    const json_t *refused = json_array_get(
        json_object_get(json_object_get(root, "adopted"), "refused"), 0);
    char name[DOC_NAME_BYTES], why[DOC_TEXT_BYTES];
    if (json_array_size(errors) > 0)
        TEXT(json_array_get(errors, json_array_size(errors) - 1), "text", d->error);
    for (size_t i = 0; i < json_array_size(models) && d->refused[0] == '\0'; i++) {
        TEXT(json_array_get(models, i), "name", name);
        TEXT(json_array_get(models, i), "status", why);
        if (why[0] != '\0' && strcmp(why, "SHD_OK") != 0)
            snprintf(d->refused, sizeof(d->refused), "model '%s' has failed: %.60s", name, why);
    }
    if (refused == NULL)
        return;
    TEXT(refused, "name", name);
    TEXT(refused, "why", why);
    snprintf(d->refused, sizeof(d->refused), "model '%s' was not adopted: %.150s", name, why);
}

/* What was timed, in words; what does not fit is left out. */
static void read_kernels(const json_t *kernels, struct doc *d)
{
    size_t used = 0;
    for (size_t i = 0; i < json_array_size(kernels); i++) {
        const json_t *k = json_array_get(kernels, i);
        char work[DOC_NAME_BYTES], isa[DOC_WORD_BYTES], beside[DOC_WORD_BYTES],
            item[DOC_TEXT_BYTES];
        TEXT(k, "work", work);
        TEXT(k, "isa", isa);
        TEXT(k, "beside", beside);
        const int n = snprintf(item, sizeof(item), "%s%s %s (%.2f of %s)", i > 0 ? ", " : "", work,
                               isa, number(k, "ratio"), beside);
        if (n < 0 || (size_t)n >= sizeof(d->kernels) - used)
            return;
        memcpy(d->kernels + used, item, (size_t)n + 1);
        used += (size_t)n;
    }
}

/* Lists that are something else: the rest would make no sense either. */
static int check_root(const json_t *root, struct shd_err *e)
{
    static const char *const lists[] = { "models", "sessions", "waits", "errors" };
    if (!json_is_object(root) || !json_is_integer(json_object_get(root, "schema")))
        return err_set(e, SHD_EPROTO, "the answer is no status: it has no schema number");
    for (size_t i = 0; i < ARRAY_SIZE(lists); i++) {
        const json_t *list = json_object_get(root, lists[i]);
        if (list != NULL && !json_is_array(list))
            return err_set(e, SHD_EPROTO, "the answer is no status: '%s' is no list", lists[i]);
    }
    return SHD_OK;
}

static struct doc *doc_new(const json_t *root)
{
    struct doc *d = calloc(1, sizeof(*d));
    if (d == NULL)
        return NULL;
    TEXT(root, "device", d->device);
    TEXT(root, "version", d->version);
    TEXT(root, "isa", d->isa);
    TEXT(root, "keeper", d->keeper);
    read_kernels(json_object_get(root, "kernels"), d);
    d->schema = number(root, "schema");
    d->pid = number(root, "pid");
    d->uptime_s = number(root, "uptime_s");
    d->threads = number(root, "threads");
    d->stale_ms = number(root, "stale_ms");
    d->read = number(json_object_get(root, "restore"), "bytes_done");
    d->to_read = number(json_object_get(root, "restore"), "bytes_total");
    read_lists(root, d);
    read_troubles(root, d);
    return d;
}

int doc_parse(const char *json, size_t bytes, bool with_tools, struct doc **ret_doc,
              json_t **ret_json, struct shd_err *e)
{
    json_error_t why;
    char reason[120];
    json_t *root = json_loadb(json, bytes, JSON_ALLOW_NUL, &why);
    if (root == NULL)
        return err_set(e, SHD_EPROTO, "the answer is no JSON: %s",
                       text_clean(why.text, reason, sizeof(reason)));
    const int r = check_root(root, e);
    if (r == SHD_OK && !with_tools)
        hide_tools(root);
    struct doc *d = r == SHD_OK ? doc_new(root) : NULL;
    if (d == NULL) {
        json_decref(root);
        return r != SHD_OK ? r : err_set(e, SHD_ENOMEM, "no memory for a status");
    }
    if (ret_json != NULL)
        *ret_json = root;
    else
        json_decref(root);
    *ret_doc = d;
    return SHD_OK;
}

void doc_free(struct doc *d)
{
    if (d == NULL)
        return;
    free(d->models);
    free(d->sessions);
    free(d->waits);
    free(d);
}
