/* See trace_read.h. */
#include "client/ctl/plan/trace_read.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/base/http.h"
#include "proto/base/sys.h"
#include "proto/spec/spec.h"

#define BYTES_MAX  ((size_t)512 * 1024 * 1024)
#define TIMEOUT_MS 30000
#define NS_OF_US   1e3

int trace_read(const char *path, uint32_t seconds, json_t **ret_events, struct shd_err *e)
{
    struct http_client client;
    char target[40];
    int r = http_client_init(&client, e);
    if (r != SHD_OK)
        return r;
    snprintf(target, sizeof target, "/trace?seconds=%u", (unsigned)seconds);
    struct http *h = http_start(&client, path, target, BYTES_MAX, TIMEOUT_MS);
    http_client_run(&client);
    json_t *root = NULL;
    if (h == NULL)
        r = err_set(e, SHD_ENOMEM, "no memory to ask '%s'", path);
    else if (h->state != HTTP_DONE)
        r = err_copy(&h->err, e);
    else
        root = json_loadb(h->body, h->body_bytes, 0, NULL);
    json_t *events = json_object_get(root, "traceEvents");
    if (r == SHD_OK && !json_is_array(events))
        r = err_set(e, SHD_EPROTO, "'%s' answers no trace", path);
    if (r == SHD_OK)
        *ret_events = json_incref(events);
    json_decref(root);
    http_free(h);
    http_client_deinit(&client);
    return r;
}

/* -- Times ------------------------------------------------------------------------------------- */

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *values, size_t count)
{
    if (count == 0)
        return 0;
    qsort(values, count, sizeof *values, by_size);
    return values[count / 2];
}

static bool named(const json_t *event, const char *name)
{
    const char *text = json_string_value(json_object_get(event, "name"));
    return text != NULL && strcmp(text, name) == 0 && json_object_get(event, "dur") != NULL;
}

static double number_of(const json_t *event, const char *field)
{
    return json_number_value(json_object_get(event, field));
}

/* Operations of one step, added up. */
struct busy {
    double us;
    size_t ops;
    json_int_t step;
};

static void next_step(struct busy *b, json_int_t step, double *took, size_t *used)
{
    if (b->ops > 0)
        took[(*used)++] = b->us / (double)b->ops * NS_OF_US;
    *b = (struct busy){ .step = step };
}

double trace_service_ns(const json_t *events, const char *name, int micro, int more)
{
    const size_t count = json_array_size(events);
    double *took = sys_calloc(count + 1, sizeof *took), before_us = 0;
    struct busy busy = { .step = -1 };
    size_t used = 0;
    for (size_t i = 0; took != NULL && i < count; i++) {
        const json_t *event = json_array_get(events, i), *args = json_object_get(event, "args");
        if (!named(event, "sum") && !named(event, "update") && !named(event, "sum of squares"))
            continue;
        const double begin_us = number_of(event, "ts"), end_us = begin_us + number_of(event, "dur");
        const json_int_t of = json_integer_value(json_object_get(args, "micro"));
        const json_int_t step = json_integer_value(json_object_get(args, "step"));
        if (step != busy.step)
            next_step(&busy, step, took, &used);
        if (named(event, name) && (micro < 0 || (more != 0 ? of >= micro : of == micro))) {
            busy.ops++;
            busy.us += end_us - (begin_us > before_us ? begin_us : before_us);
        }
        before_us = end_us > before_us ? end_us : before_us;
    }
    if (took != NULL)
        next_step(&busy, /* step= */ -1, took, &used);
    const double result = took != NULL ? median(took, used) : 0;
    free(took);
    return result;
}

struct span {         /* of a worker */
    const char *unit; /* borrowed of the event */
    double ns;
};

/* The forwards, or backwards, of all workers; the caller's. */
static struct span *find_spans(const json_t *events, const char *name, size_t *ret_count)
{
    const size_t room = json_array_size(events);
    struct span *spans = sys_calloc(room + 1, sizeof *spans);
    size_t used = 0;
    for (size_t i = 0; spans != NULL && i < room; i++) {
        const json_t *event = json_array_get(events, i);
        const char *unit = json_string_value(
            json_object_get(json_object_get(event, "args"), "unit"));
        if (unit != NULL && named(event, name))
            spans[used++] = (struct span){ unit, number_of(event, "dur") * NS_OF_US };
    }
    *ret_count = used;
    return spans;
}

/* A worker keeps its last 1,024 spans. Where those do not reach a unit, one of the same size
 * stands for it: layers are alike. */
static bool fill_gap(const struct spec *spec, uint32_t unit, double *ns)
{
    for (uint32_t u = 0; u < spec->unit_count && ns[unit] == 0; u++)
        if (spec->units[u].elems == spec->units[unit].elems)
            ns[unit] = ns[u];
    return ns[unit] > 0;
}

static int find_times(const json_t *events, const char *name, const struct spec *spec,
                      double *ret_ns, struct shd_err *e)
{
    size_t count;
    struct span *spans = find_spans(events, name, &count);
    double *room = sys_calloc(count + 1, sizeof *room);
    int r = SHD_OK;
    if (spans == NULL || room == NULL) {
        free(spans);
        free(room);
        return err_set(e, SHD_ENOMEM, "no memory to read a trace");
    }
    for (uint32_t u = 0; r == SHD_OK && u < spec->unit_count; u++) {
        size_t used = 0;
        for (size_t i = 0; i < count; i++)
            if (strcmp(spans[i].unit, spec->units[u].name) == 0)
                room[used++] = spans[i].ns;
        ret_ns[u] = median(room, used);
    }
    for (uint32_t u = 0; r == SHD_OK && u < spec->unit_count; u++)
        if (!fill_gap(spec, u, ret_ns))
            r = err_set(e, SHD_ENOENT, "no worker has lately computed a %s of unit '%.40s'", name,
                        spec->units[u].name);
    free(spans);
    free(room);
    return r;
}

int trace_compute(const json_t *events, const struct spec *spec, double *ret_forward_ns,
                  double *ret_backward_ns, struct shd_err *e)
{
    const int r = find_times(events, "forward", spec, ret_forward_ns, e);
    return r == SHD_OK ? find_times(events, "backward", spec, ret_backward_ns, e) : r;
}
