/* See http_answer.h. */
#include "daemon/view/http_answer.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <microhttpd.h>
#include <uv.h>

#include "daemon/base/state.h"
#include "daemon/model/metrics.h"
#include "daemon/view/json.h"
#include "daemon/view/metrics_text.h"
#include "daemon/view/take.h"
#include "daemon/view/tensor.h"
#include "daemon/view/trace_json.h"
#include "daemon/view/units_json.h"
#include "daemon/view/view.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/page/page.h"

#define WAIT_NS         (195 * NS_PER_MS) /* a little less than http.c resumes after */
#define STUCK_NS        (2000 * NS_PER_MS)
#define TRACE_S_MAX     60
#define TRACE_S_DEFAULT 5
#define PLAIN           "text/plain; charset=utf-8"

static const char paths[] =
    "paths here: / /status /metrics /trace?seconds=N /tensor?name=T /units /healthz\n";

struct answer {
    unsigned code;
    const char *type;
    const char *policy; /* Content-Security-Policy, or NULL */
    char *text;         /* owned, or: */
    const void *fixed;
    size_t bytes;
};

static struct answer plain(unsigned code, const char *text)
{
    return (struct answer){ .code = code, .type = PLAIN, .fixed = text, .bytes = strlen(text) };
}

/* -- Sending ------------------------------------------------------------------------------------
 */

static void add_headers(struct MHD_Response *response, const struct answer *a)
{
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, a->type);
    MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
    MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
    if (a->policy != NULL)
        MHD_add_response_header(response, "Content-Security-Policy", a->policy);
    if (a->code == MHD_HTTP_METHOD_NOT_ALLOWED)
        MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
}

static enum http_next send_answer(struct MHD_Connection *connection, const struct answer *a)
{
    struct MHD_Response *response =
        a->text != NULL ? MHD_create_response_from_buffer(a->bytes, a->text, MHD_RESPMEM_MUST_FREE)
                        : MHD_create_response_from_buffer(a->bytes, (void *)(uintptr_t)a->fixed,
                                                          MHD_RESPMEM_PERSISTENT);
    if (response == NULL) {
        free(a->text);
        return HTTP_FAILED;
    }
    add_headers(response, a);
    const enum MHD_Result queued = MHD_queue_response(connection, a->code, response);
    MHD_destroy_response(response);
    return queued == MHD_YES ? HTTP_ANSWERED : HTTP_FAILED;
}

static struct answer no_memory(void)
{
    return plain(MHD_HTTP_SERVICE_UNAVAILABLE, "out of memory\n");
}

/* -- Snapshots ----------------------------------------------------------------------------------
 */

/* A snapshot taken since this was asked, or the last one once the wait was long enough. Else a
 * new one is asked for: *ret_wait. */
static struct view_snapshot *find_snapshot(struct http *h, struct http_conn *c, bool with_spans,
                                           bool *ret_wait)
{
    struct view *v = h->daemon->view;
    const uint64_t now_ns = uv_hrtime();
    bool fresh;
    struct view_snapshot *s = view_get(v, with_spans, c->wait_ns, &fresh);
    *ret_wait = c->wait_ns == 0 || (!fresh && now_ns - c->wait_ns < WAIT_NS);
    if (!*ret_wait)
        return s;
    view_unref(s);
    c->with_spans = with_spans;
    if (c->wait_ns == 0) {
        c->wait_ns = now_ns;
        view_request(v, with_spans);
    }
    return NULL;
}

static struct answer status_answer(const struct view_snapshot *s)
{
    struct answer a = { .code = MHD_HTTP_OK, .type = "application/json" };
    a.text = view_json(s, uv_hrtime(), SIZE_MAX, &a.bytes);
    return a.text != NULL ? a : no_memory();
}

static const char *argument(struct MHD_Connection *connection, const char *key)
{
    return MHD_lookup_connection_value(connection, MHD_GET_ARGUMENT_KIND, key);
}

/* ?units=1: of models with many units, too. */
static struct answer metrics_answer(const struct view_snapshot *s,
                                    struct MHD_Connection *connection)
{
    struct answer a = { .code = MHD_HTTP_OK, .type = "text/plain; version=0.0.4; charset=utf-8" };
    const char *units = argument(connection, "units");
    struct shd_err e;
    if (metrics_text(s, units != NULL && strcmp(units, "1") == 0, &a.text, &a.bytes, &e) != SHD_OK)
        return no_memory();
    return a;
}

/* -- Trace --------------------------------------------------------------------------------------
 */

static bool trace_seconds(struct MHD_Connection *connection, uint32_t *ret_seconds)
{
    const char *text = argument(connection, "seconds");
    if (text == NULL) {
        *ret_seconds = TRACE_S_DEFAULT;
        return true;
    }
    char *end;
    errno = 0;
    const long seconds = strtol(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || seconds < 1 || seconds > TRACE_S_MAX)
        return false;
    *ret_seconds = (uint32_t)seconds;
    return true;
}

static bool others_wait_for_spans(const struct http *h, const struct http_conn *c)
{
    for (uint32_t i = 0; i < ARRAY_SIZE(h->conns.items); i++) {
        const struct http_conn *other = &h->conns.items[i];
        if (other != c && other->connection != NULL && other->suspended && other->with_spans)
            return true;
    }
    return false;
}

static struct answer trace_answer(struct http *h, struct http_conn *c,
                                  const struct view_snapshot *s, uint32_t seconds)
{
    struct answer a = { .code = MHD_HTTP_OK, .type = "application/json" };
    struct shd_err e;
    if (trace_json(h->daemon->metrics->trace, s, seconds, &a.text, &a.bytes, &e) != SHD_OK)
        return no_memory();
    c->traces = true;
    h->conns.traces++;
    if (!others_wait_for_spans(h, c))
        view_forget_spans(h->daemon->view);
    return a;
}

/* -- Health -------------------------------------------------------------------------------------
 */

static struct answer health_answer(const struct http *h, const struct view_snapshot *s)
{
    char text[1024];
    const uint64_t stuck_ns = view_beat_age_ns(h->daemon->view);
    if (stuck_ns > STUCK_NS)
        snprintf(text, sizeof text, "the event loop has not turned for %.1f s\n",
                 (double)stuck_ns * S_PER_NS);
    else if (!view_trouble(h->daemon, s, text, sizeof text))
        return plain(MHD_HTTP_OK, "ok\n");
    char *copy = strdup(text);
    if (copy == NULL)
        return no_memory();
    return (struct answer){
        .code = MHD_HTTP_SERVICE_UNAVAILABLE, .type = PLAIN, .text = copy, .bytes = strlen(copy)
    };
}

/* -- Refusals in words ---------------------------------------------------------------------------
 */

static struct answer refusal(unsigned code, const struct shd_err *why)
{
    char *text = NULL;
    const int length = asprintf(&text, "%s\n", why->text);
    if (length < 0)
        return no_memory();
    return (struct answer){ .code = code, .type = PLAIN, .text = text, .bytes = (size_t)length };
}

/* -- Units --------------------------------------------------------------------------------------
 */

/* A number, or what was there where it was not given. */
static bool take_number(struct MHD_Connection *connection, const char *key, uint64_t *number)
{
    const char *text = argument(connection, key);
    char *end;
    if (text == NULL)
        return true;
    errno = 0;
    const unsigned long long x = strtoull(text, &end, 10);
    if (errno != 0 || *text < '0' || *text > '9' || *end != '\0')
        return false;
    *number = x;
    return true;
}

static struct answer units_answer(const struct view_snapshot *s, struct MHD_Connection *connection)
{
    struct units_question q = { .from = UINT64_MAX };
    struct answer a = { .code = MHD_HTTP_OK, .type = "application/json" };
    struct shd_err e;
    const char *model = argument(connection, "model"), *sums = argument(connection, "sums");
    if (!take_number(connection, "from", &q.from) || !take_number(connection, "unit", &q.unit) ||
        (model != NULL && strlen(model) >= sizeof q.model))
        return plain(MHD_HTTP_BAD_REQUEST,
                     "/units: of ?model=M, &from=STEP, &unit=NUMBER, &sums=1\n");
    snprintf(q.model, sizeof q.model, "%s", model != NULL ? model : "");
    q.sums = sums != NULL && strcmp(sums, "1") == 0;
    const int r = units_json(s, &q, &a.text, &a.bytes, &e);
    if (r == SHD_OK)
        return a;
    return r == SHD_ENOMEM ? no_memory() : refusal(MHD_HTTP_NOT_FOUND, &e);
}

/* -- A tensor -----------------------------------------------------------------------------------
 */

#define TENSOR_NS_MAX (TENSOR_WAIT_MS * NS_PER_MS + NS_PER_S)

/* model, name, array; what is left out is "", "" and param. */
static bool tensor_question(struct MHD_Connection *connection, struct tensor_question *ret)
{
    static const char *const arrays[] = { "param", "m", "v", "grad", "update", "ema" };
    const char *given[3] = { NULL };
    static const char *const keys[] = { "model", "name", "array" };
    for (size_t i = 0; i < ARRAY_SIZE(keys); i++)
        given[i] = argument(connection, keys[i]);
    *ret = (struct tensor_question){ .array = ARRAY_SIZE(arrays) };
    for (uint32_t i = 0; i < ARRAY_SIZE(arrays); i++)
        if (strcmp(given[2] != NULL ? given[2] : arrays[0], arrays[i]) == 0)
            ret->array = i;
    if (given[1] == NULL || strlen(given[1]) >= sizeof ret->tensor ||
        ret->array == ARRAY_SIZE(arrays) ||
        (given[0] != NULL && strlen(given[0]) >= sizeof ret->model))
        return false;
    snprintf(ret->tensor, sizeof ret->tensor, "%s", given[1]);
    snprintf(ret->model, sizeof ret->model, "%s", given[0] != NULL ? given[0] : "");
    return true;
}

static struct answer tensor_text(int status, char *json, size_t bytes, const struct shd_err *why)
{
    if (status == SHD_OK)
        return (struct answer){
            .code = MHD_HTTP_OK, .type = "application/json", .text = json, .bytes = bytes
        };
    const bool none = status == SHD_ENOENT || status == SHD_EINVAL || status == SHD_ENOTSUP;
    return refusal(none ? MHD_HTTP_NOT_FOUND : MHD_HTTP_SERVICE_UNAVAILABLE, why);
}

static enum http_next tensor_next(struct http *h, struct http_conn *c)
{
    struct tensor_view *t = h->daemon->view->tensor;
    struct tensor_question question;
    struct answer a = { .code = 0 };
    if (c->tensor == 0) {
        if (!tensor_question(c->connection, &question))
            a = plain(MHD_HTTP_BAD_REQUEST,
                      "/tensor?name=T: of ?model=M, &array=param, m, v, grad, "
                      "update or ema\n");
        else if ((c->tensor = tensor_ask(t, &question)) == 0)
            a = plain(MHD_HTTP_SERVICE_UNAVAILABLE, "another tensor is being counted: ask again\n");
        c->wait_ns = uv_hrtime();
        return a.code != 0 ? send_answer(c->connection, &a) : HTTP_WAIT;
    }
    char *json;
    size_t bytes = 0;
    int status;
    struct shd_err why;
    if (tensor_answer(t, c->tensor, &json, &bytes, &status, &why))
        a = tensor_text(status, json, bytes, &why);
    else if (uv_hrtime() - c->wait_ns > TENSOR_NS_MAX)
        a = plain(MHD_HTTP_SERVICE_UNAVAILABLE, "not counted in time: ask again\n");
    return a.code != 0 ? send_answer(c->connection, &a) : HTTP_WAIT;
}

/* -- Requests -----------------------------------------------------------------------------------
 */

enum what { PAGE, STATUS, METRICS, TRACE, HEALTH, TENSOR, UNITS, WHATS };

static enum what find_path(const char *url)
{
    static const char *const urls[WHATS] = { "/",        "/status", "/metrics", "/trace",
                                             "/healthz", "/tensor", "/units" };
    enum what what = PAGE;
    while (what < WHATS && strcmp(url, urls[what]) != 0)
        what++;
    return what;
}

/* A page from elsewhere can make a browser ask a loopback address under a name of its own. */
static bool is_host_allowed(const struct http *h, enum http_kind kind,
                            struct MHD_Connection *connection)
{
    const char *host = MHD_lookup_connection_value(connection, MHD_HEADER_KIND,
                                                   MHD_HTTP_HEADER_HOST);
    if (kind != HTTP_TCP || !h->servers[kind].loopback || host == NULL)
        return true;
    const size_t local = strlen("localhost");
    if (strncmp(host, "localhost", local) == 0 && (host[local] == ':' || host[local] == '\0'))
        return true;
    return host[0] == '[' || strspn(host, "0123456789.:") == strlen(host);
}

/* The answer that needs no snapshot; code 0: there is none. */
static struct answer answer_at_once(struct http *h, enum http_kind kind, const struct http_conn *c,
                                    enum what what, const char *method, uint32_t *ret_seconds)
{
    if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0)
        return plain(MHD_HTTP_METHOD_NOT_ALLOWED, "GET and HEAD only\n");
    if (!is_host_allowed(h, kind, c->connection))
        return plain(MHD_HTTP_FORBIDDEN, "ask by address or as localhost\n");
    if (what == WHATS)
        return plain(MHD_HTTP_NOT_FOUND, paths);
    if (what == PAGE)
        return (struct answer){ .code = MHD_HTTP_OK,
                                .type = PAGE_CONTENT_TYPE,
                                .policy = PAGE_SECURITY_POLICY,
                                .fixed = page_html,
                                .bytes = page_html_bytes };
    if (what == TRACE && !trace_seconds(c->connection, ret_seconds))
        return plain(MHD_HTTP_BAD_REQUEST, "seconds is a number from 1 to 60\n");
    if (what == TRACE && h->conns.traces >= HTTP_TRACES_MAX)
        return plain(MHD_HTTP_SERVICE_UNAVAILABLE, "other traces are being read: ask again\n");
    return (struct answer){ .code = 0 };
}

static struct answer answer_from(struct http *h, struct http_conn *c, enum what what,
                                 const struct view_snapshot *s, uint32_t seconds)
{
    if (what == HEALTH)
        return health_answer(h, s);
    if (s == NULL)
        return plain(MHD_HTTP_SERVICE_UNAVAILABLE,
                     "the event loop did not answer in time: ask again\n");
    if (what == STATUS)
        return status_answer(s);
    if (what == UNITS)
        return units_answer(s, c->connection);
    return what == METRICS ? metrics_answer(s, c->connection) : trace_answer(h, c, s, seconds);
}

enum http_next http_answer(struct http *h, enum http_kind kind, struct http_conn *c,
                           const char *url, const char *method)
{
    uint32_t seconds = 0;
    const enum what what = find_path(url);
    struct answer a = answer_at_once(h, kind, c, what, method, &seconds);
    if (a.code != 0)
        return send_answer(c->connection, &a);
    if (what == TENSOR)
        return tensor_next(h, c);
    bool wait = false;
    struct view_snapshot *s = find_snapshot(h, c, what == TRACE, &wait);
    if (wait)
        return HTTP_WAIT;
    a = answer_from(h, c, what, s, seconds);
    view_unref(s);
    return send_answer(c->connection, &a);
}
