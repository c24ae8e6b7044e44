/* See trace_merge.h. */
#include "client/ctl/watch/trace_merge.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/base/text.h"

#define KEY_BYTES 256u

/* -- Spans ----------------------------------------------------------------------------------- */

/* No-op for an empty or a senseless span, or without memory. */
static void spans_add(struct spans *s, double begin, double end)
{
    if (!isfinite(begin) || !isfinite(end) || end <= begin)
        return;
    if (s->count == s->capacity) {
        const size_t capacity = s->capacity * 2 + 64;
        struct span *grown = realloc(s->items, capacity * sizeof(*grown));
        if (grown == NULL)
            return;
        s->items = grown;
        s->capacity = capacity;
    }
    s->items[s->count++] = (struct span){ begin, end };
}

static void spans_free(struct spans *s)
{
    free(s->items);
    *s = (struct spans){ 0 };
}

static int compare_spans(const void *a, const void *b)
{
    const double x = ((const struct span *)a)->begin, y = ((const struct span *)b)->begin;
    return x < y ? -1 : x > y;
}

/* Sort, and join what overlaps. Before the next two. */
static void spans_unite(struct spans *s)
{
    size_t to = 0;
    if (s->count < 2)
        return;
    qsort(s->items, s->count, sizeof(*s->items), compare_spans);
    for (size_t i = 1; i < s->count; i++) {
        if (s->items[i].begin > s->items[to].end)
            s->items[++to] = s->items[i];
        else if (s->items[i].end > s->items[to].end)
            s->items[to].end = s->items[i].end;
    }
    s->count = to + 1;
}

static double spans_sum(const struct spans *s)
{
    double sum = 0;
    for (size_t i = 0; i < s->count; i++)
        sum += s->items[i].end - s->items[i].begin;
    return sum;
}

static double spans_common(const struct spans *a, const struct spans *b)
{
    double sum = 0;
    for (size_t i = 0, k = 0; i < a->count && k < b->count;) {
        const double begin = fmax(a->items[i].begin, b->items[k].begin);
        const double end = fmin(a->items[i].end, b->items[k].end);
        sum += end > begin ? end - begin : 0;
        if (a->items[i].end < b->items[k].end)
            i++;
        else
            k++;
    }
    return sum;
}

/* -- A merged trace -------------------------------------------------------------------------- */

int merge_init(struct merge *m, struct shd_err *e)
{
    *m = (struct merge){ .events = json_array(),
                         .seen = json_object(),
                         .flows = json_object(),
                         .daemons = json_object(),
                         .workers = calloc(MERGE_WORKERS_MAX, sizeof(*m->workers)) };
    if (m->events != NULL && m->seen != NULL && m->flows != NULL && m->daemons != NULL &&
        m->workers != NULL)
        return SHD_OK;
    merge_deinit(m);
    return err_set(e, SHD_ENOMEM, "no memory to merge traces");
}

void merge_deinit(struct merge *m)
{
    for (uint32_t i = 0; m->workers != NULL && i < m->worker_count; i++) {
        spans_free(&m->workers[i].compute);
        spans_free(&m->workers[i].fetch);
        spans_free(&m->workers[i].giving);
    }
    spans_free(&m->updates);
    free(m->workers);
    json_decref(m->events);
    json_decref(m->seen);
    json_decref(m->flows);
    json_decref(m->daemons);
    *m = (struct merge){ 0 };
}

/* -- Events ---------------------------------------------------------------------------------- */

static double number(const json_t *event, const char *key)
{
    const json_t *v = json_object_get(event, key);
    return json_is_number(v) ? json_number_value(v) : NAN;
}

static const char *string(const json_t *event, const char *key)
{
    const char *s = json_string_value(json_object_get(event, key));
    return s != NULL ? s : "";
}

static bool begins(const char *text, const char *start)
{
    return strncmp(text, start, strlen(start)) == 0;
}

static void pid_key(double pid, char key[32])
{
    snprintf(key, 32, "%.17g", pid);
}

void merge_daemon(struct merge *m, double pid)
{
    char key[32];
    pid_key(pid, key);
    json_object_set_new(m->daemons, key, json_true());
}

static bool is_daemon(const struct merge *m, double pid)
{
    char key[32];
    pid_key(pid, key);
    return json_object_get(m->daemons, key) != NULL;
}

static struct merge_worker *worker_of(struct merge *m, double pid)
{
    if (isnan(pid) || is_daemon(m, pid))
        return NULL;
    for (uint32_t i = 0; i < m->worker_count; i++)
        if (m->workers[i].pid == pid)
            return &m->workers[i];
    if (m->worker_count == MERGE_WORKERS_MAX)
        return NULL;
    m->workers[m->worker_count] = (struct merge_worker){ .pid = pid,
                                                         .begin = INFINITY,
                                                         .end = -INFINITY };
    return &m->workers[m->worker_count++];
}

/* True for an event that another daemon has told before. Only those of workers are told by several.
 */
static bool is_repeated(struct merge *m, const json_t *event)
{
    char key[KEY_BYTES];
    const double pid = number(event, "pid");
    if (isnan(pid) || is_daemon(m, pid))
        return false;
    snprintf(key, sizeof(key), "%.2s %.17g %.17g %.17g %.17g %.60s %.60s", string(event, "ph"), pid,
             number(event, "tid"), number(event, "ts"), number(event, "dur"), string(event, "name"),
             string(event, "id"));
    if (json_object_get(m->seen, key) != NULL)
        return true;
    json_object_set_new_nocheck(m->seen, key, json_true());
    return false;
}

/* -- What it means for the workers ----------------------------------------------------------- */

static void take_span(struct merge *m, const json_t *event)
{
    const char *name = string(event, "name");
    const double begin = number(event, "ts"), end = begin + number(event, "dur");
    struct merge_worker *w = worker_of(m, number(event, "pid"));
    if (w == NULL && (begins(name, "apply") || begins(name, "publish") || begins(name, "update")))
        spans_add(&m->updates, begin, end);
    if (w == NULL)
        return;
    w->begin = fmin(w->begin, begin);
    w->end = fmax(w->end, end);
    if (begins(name, "forward") || begins(name, "backward"))
        spans_add(&w->compute, begin, end);
    else if (begins(name, "wait unit") || begins(name, "fetch"))
        spans_add(&w->fetch, begin, end);
    else if (begins(name, "wait slot") || begins(name, "return"))
        spans_add(&w->giving, begin, end);
}

/* From a worker to a daemon: a gradient under way. */
static void take_flow(struct merge *m, const json_t *event, bool is_end)
{
    const char *id = string(event, "id");
    if (!is_end) {
        json_object_set_nocheck(m->flows, id, (json_t *)event); /* jansson counts references */
        return;
    }
    const json_t *from = json_object_get(m->flows, id);
    struct merge_worker *w = from != NULL ? worker_of(m, number(from, "pid")) : NULL;
    if (w != NULL && begins(string(from, "name"), "return"))
        spans_add(&w->giving, number(from, "ts"), number(event, "ts"));
}

static void take_name(struct merge *m, const json_t *event)
{
    struct merge_worker *w = worker_of(m, number(event, "pid"));
    if (w != NULL && strcmp(string(event, "name"), "process_name") == 0)
        text_clean(string(json_object_get(event, "args"), "name"), w->name, sizeof(w->name));
}

static void take_meaning(struct merge *m, const json_t *event)
{
    const char *ph = string(event, "ph");
    if (strcmp(ph, "X") == 0)
        take_span(m, event);
    else if (strcmp(ph, "s") == 0 || strcmp(ph, "f") == 0)
        take_flow(m, event, ph[0] == 'f');
    else if (strcmp(ph, "M") == 0)
        take_name(m, event);
}

/* -- Traces ---------------------------------------------------------------------------------- */

/* "7" of cpu0 becomes "cpu0:7". */
static void name_id(json_t *event, const char *device)
{
    char id[KEY_BYTES];
    const json_t *v = json_object_get(event, "id");
    if (json_is_string(v))
        snprintf(id, sizeof(id), "%.40s:%.100s", device, json_string_value(v));
    else if (json_is_integer(v))
        snprintf(id, sizeof(id), "%.40s:%" JSON_INTEGER_FORMAT, device, json_integer_value(v));
    else
        return;
    json_object_set_new_nocheck(event, "id", json_string_nocheck(id));
}

int merge_add(struct merge *m, const char *device, const char *text, size_t bytes,
              struct shd_err *e)
{
    json_error_t why;
    char reason[120];
    json_t *event, *root = json_loadb(text, bytes, 0, &why);
    size_t i;
    if (root == NULL)
        return err_set(e, SHD_EPROTO, "its trace is no JSON: %s",
                       text_clean(why.text, reason, sizeof(reason)));
    json_t *events = json_object_get(root, "traceEvents");
    if (!json_is_array(events)) {
        json_decref(root);
        return err_set(e, SHD_EPROTO, "its trace has no list of events");
    }
    json_array_foreach(events, i, event)
    {
        if (!json_is_object(event))
            continue;
        name_id(event, device);
        if (is_repeated(m, event)) {
            m->repeated++;
            continue;
        }
        take_meaning(m, event);
        json_array_append(m->events, event);
    }
    json_decref(root);
    return SHD_OK;
}

void merge_end(struct merge *m)
{
    for (uint32_t i = 0; i < m->worker_count; i++) {
        struct merge_worker *w = &m->workers[i];
        /* A unit that the owners update is on its way to the workers. */
        for (size_t k = 0; k < m->updates.count; k++)
            spans_add(&w->fetch, fmax(m->updates.items[k].begin, w->begin),
                      fmin(m->updates.items[k].end, w->end));
        spans_unite(&w->compute);
        spans_unite(&w->fetch);
        spans_unite(&w->giving);
    }
}

static double share(const struct spans *under_way, const struct spans *compute)
{
    const double sum = spans_sum(under_way);
    return sum > 0 ? spans_common(under_way, compute) / sum : NAN;
}

struct merge_overlap merge_overlap(const struct merge_worker *w)
{
    return (struct merge_overlap){ .compute_ms = spans_sum(&w->compute) / 1000,
                                   .fetch_ms = spans_sum(&w->fetch) / 1000,
                                   .fetch_hidden = share(&w->fetch, &w->compute),
                                   .return_ms = spans_sum(&w->giving) / 1000,
                                   .return_hidden = share(&w->giving, &w->compute) };
}
