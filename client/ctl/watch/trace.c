/* shardctl trace: the last seconds of all daemons and workers of a node as one file for Perfetto,
 * and how much of each worker's waiting was hidden behind its computing. */
#include "client/ctl/watch/trace.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client/ctl/base/http.h"
#include "client/ctl/base/say.h"
#include "client/ctl/base/text.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/watch/status_node.h"
#include "client/ctl/watch/trace_merge.h"
#include "proto/base/check.h"

#define TRACE_BYTES_MAX  ((size_t)512 * 1024 * 1024)
#define TRACE_TIMEOUT_MS 30000
#define TRACE_FILE       "shardd-trace.json"

static const char trace_about[] =
    "Write what all daemons and workers of this host did in the last seconds into one file in\n"
    "Chrome's trace format, a process for each, and print how much of each worker's fetching and\n"
    "returning was hidden behind its computing. Open the file at https://ui.perfetto.dev (\"Open\n"
    "trace file\"; it stays on your machine) or at chrome://tracing.";

static const char trace_more[] = VERB_WHERE
    "\n"
    "hidden: share of the time in which parameters were on their way to the worker (owners update\n"
    "them, the worker waits for them), or its gradients on their way to the owners, while the\n"
    "worker computed. 100 %: it never waited.\n"
    "\n"
    "example:\n"
    "  shardctl trace --seconds 10 -o run.json\n"
    "  shardctl trace --json | jq '.workers[] | {pid, fetch_hidden, return_hidden}'\n"
    "\n"
    "exit codes: 0 done; 1 a daemon's trace is missing (the others' are written), or nothing "
    "could\n"
    "be written; 2 the command line was wrong\n";

struct trace_options {
    const char *address, *hosts, *file;
    uint32_t seconds;
    bool as_json;
};

/* -- Asking ---------------------------------------------------------------------------------- */

static void ask(struct node *n, uint32_t seconds)
{
    char path[NODE_SOCKET_BYTES], target[40];
    snprintf(target, sizeof(target), "/trace?seconds=%" PRIu32, seconds);
    for (uint32_t i = 0; i < n->count; i++) {
        struct node_daemon *d = &n->daemons[i];
        node_socket(n, d, path);
        if (d->up)
            d->http = http_start(&n->client, path, target, TRACE_BYTES_MAX, TRACE_TIMEOUT_MS);
    }
    http_client_run(&n->client);
}

/* Returns how many daemons are missing in the merged trace. */
static uint32_t merge_all(struct node *n, struct merge *m)
{
    uint32_t missing = 0;
    char text[DOC_TEXT_BYTES];
    for (uint32_t i = 0; i < n->count; i++)
        if (n->daemons[i].up)
            merge_daemon(m, n->daemons[i].doc->pid);
    for (uint32_t i = 0; i < n->count; i++) {
        struct node_daemon *d = &n->daemons[i];
        struct shd_err e = d->why;
        if (d->up && d->http == NULL)
            err_set(&e, SHD_ENOMEM, "no memory to ask for its trace");
        else if (d->up)
            e = d->http->err;
        if (d->http != NULL && d->http->state == HTTP_DONE)
            merge_add(m, d->device, d->http->body, d->http->body_bytes, &e);
        if (e.code == SHD_OK)
            continue;
        ctl_say("%s: %s", d->device, text_clean(e.text, text, sizeof(text)));
        missing++;
    }
    merge_end(m);
    return missing;
}

/* -- Writing --------------------------------------------------------------------------------- */

/* Beside the file and then in its place: a half one is none. */
static int write_file(const struct merge *m, const char *path)
{
    char part[4096];
    json_t *root = json_pack("{s:O, s:s}", "traceEvents", m->events, "displayTimeUnit", "ms");
    if (root == NULL || snprintf(part, sizeof(part), "%s.part", path) >= (int)sizeof(part)) {
        ctl_say("cannot write '%s'", path);
        json_decref(root);
        return CTL_FAILED;
    }
    int failed = json_dump_file(root, part, JSON_COMPACT | JSON_ENSURE_ASCII);
    json_decref(root);
    failed = failed != 0 || rename(part, path) != 0;
    if (!failed)
        return CTL_OK;
    ctl_say("cannot write '%s': %s", path, strerror(errno));
    unlink(part);
    return CTL_FAILED;
}

static json_t *real_or_null(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

static json_t *worker_json(const struct merge_worker *w)
{
    const struct merge_overlap o = merge_overlap(w);
    return json_pack("{s:I, s:s, s:f, s:f, s:o, s:f, s:o}", "pid", (json_int_t)w->pid, "name",
                     w->name, "compute_ms", o.compute_ms, "fetch_ms", o.fetch_ms, "fetch_hidden",
                     real_or_null(o.fetch_hidden), "return_ms", o.return_ms, "return_hidden",
                     real_or_null(o.return_hidden));
}

static void print_json(const struct merge *m, const struct trace_options *o, uint32_t missing)
{
    json_t *workers = json_array();
    for (uint32_t i = 0; i < m->worker_count; i++)
        json_array_append_new(workers, worker_json(&m->workers[i]));
    json_t *root = json_pack(
        "{s:s, s:I, s:I, s:I, s:I, s:o}", "file", o->file, "seconds", (json_int_t)o->seconds,
        "events", (json_int_t)json_array_size(m->events), "repeated", (json_int_t)m->repeated,
        "missing", (json_int_t)missing, "workers", workers);
    verb_json(root, JSON_INDENT(2) | JSON_ENSURE_ASCII, stdout);
}

static const char *percent(double share, char *buf)
{
    if (isfinite(share))
        snprintf(buf, TEXT_BYTES, "%.0f %%", share * 100);
    else
        snprintf(buf, TEXT_BYTES, "-");
    return buf;
}

static void print_table(const struct merge *m, const struct trace_options *o)
{
    static const char *const headings[] = { "WORKER", "PID",       "COMPUTE MS", "FETCH MS",
                                            "HIDDEN", "RETURN MS", "HIDDEN" };
    struct table t;
    table_init(&t, headings, ARRAY_SIZE(headings));
    for (uint32_t i = 0; i < m->worker_count; i++) {
        char b[6][TEXT_BYTES];
        const struct merge_worker *w = &m->workers[i];
        const struct merge_overlap x = merge_overlap(w);
        table_row(&t,
                  (const char *[]){ w->name[0] != '\0' ? w->name : "-", text_count(w->pid, b[0]),
                                    text_count(x.compute_ms, b[1]), text_count(x.fetch_ms, b[2]),
                                    percent(x.fetch_hidden, b[3]), text_count(x.return_ms, b[4]),
                                    percent(x.return_hidden, b[5]) });
    }
    table_print(&t, "", stdout);
    table_deinit(&t);
    printf("%zu events in %s: open it at https://ui.perfetto.dev\n", json_array_size(m->events),
           o->file);
}

/* -- The verb -------------------------------------------------------------------------------- */

static int trace_node(struct node *n, const struct trace_options *o, struct shd_err *e)
{
    struct merge m;
    const int r = merge_init(&m, e);
    if (r != SHD_OK)
        return r;
    node_ask_once(n);
    ask(n, o->seconds);
    const uint32_t missing = merge_all(n, &m);
    const bool written = missing < n->count && write_file(&m, o->file) == CTL_OK;
    if (written && o->as_json)
        print_json(&m, o, missing);
    else if (written)
        print_table(&m, o);
    merge_deinit(&m);
    return written && missing == 0 ? CTL_OK : CTL_FAILED;
}

int verb_trace(int argc, char **argv)
{
    struct trace_options o = { .seconds = 5, .file = TRACE_FILE };
    const struct flag table[] = {
        { "seconds", 's', FLAG_U32, "N", "how far back, 1 to 60 (5)", &o.seconds, 1, 60 },
        { "output", 'o', FLAG_STRING, "FILE", "where to write it (" TRACE_FILE ")", &o.file, 0, 0 },
        VERB_ADDRESS_FLAGS(o.address),
        HOST_FLAG(o.hosts),
        { "json", 'j', FLAG_BOOL, NULL, "the summary as one JSON object", &o.as_json, 0, 0 },
    };
    const struct flags flags = VERB_FLAGS(trace, "shardctl trace [FLAGS]", table);
    int code = verb_start(&flags, argc, argv, /* ret_rest= */ NULL);
    if (code >= 0)
        return code;
    text_init();
    struct node n;
    struct shd_err e = { 0 };
    code = node_open(o.address, o.hosts, &n);
    if (code != CTL_OK)
        return code;
    code = trace_node(&n, &o, &e);
    node_close(&n);
    return code >= 0 ? code : node_fail(code, &e);
}
