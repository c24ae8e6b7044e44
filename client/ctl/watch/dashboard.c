/* shardctl dashboard: the page of the daemons (proto/page) for all of a node, and their status
 * documents in one, over HTTP for a browser here.
 *
 * Each request for /status looks through the directory and asks all daemons beside each other, at
 * most every ASK_EVERY_NS whatever the number of browsers. A daemon that does not answer is
 * {device, error} in the answer.
 *
 * Failure modes: no daemon, or no place to listen: an error at the start. Later, only answers fail.
 */
#include "client/ctl/watch/dashboard.h"

#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>
#include <microhttpd.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/text.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/watch/serve.h"
#include "client/ctl/watch/status_join.h"
#include "client/ctl/watch/status_node.h"
#include "client/ctl/watch/tensor_merge.h"
#include "client/ctl/watch/units_merge.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/page/page.h"

#define LISTEN_DEFAULT "127.0.0.1:8440"
#define STATUS_SCHEMA  2
#define ASK_EVERY_NS   (UINT64_C(250) * 1000 * 1000)

static const char dashboard_about[] = "Serve a page that shows all daemons of this machine: steps, "
                                      "shards, who waits for what, memory,\n"
                                      "workers. It follows them until it is ended (Ctrl-C).";

static const char dashboard_more[] = VERB_WHERE
    "\n"
    "examples:\n"
    "  shardctl dashboard --open\n"
    "  ssh -t -L 8440:127.0.0.1:8440 HOST shardctl dashboard   # another machine's, at localhost\n"
    "\n"
    "paths: /  the page; /status  {schema, daemons[]} (docs/status.md); /tensor, /units  of all "
    "owners;\n/healthz  200 while it runs\n"
    "\n"
    "exit codes: 0 ended by a signal; 1 no daemon, or no place to listen; 2 wrong command line\n";

struct dashboard {
    struct node node;
    const struct serve *serve; /* borrowed */
    char *said;                /* owned: the last answer about a tensor or units; NULL: none */
    char *text;                /* owned: the last answer; NULL: none yet */
    uint64_t asked_ns;
};

/* -- All daemons' documents in one ------------------------------------------------------------ */

static json_t *daemon_json(const struct node_daemon *d)
{
    if (d->up)
        return json_incref(d->json);
    return json_pack("{s:s, s:s}", "device", d->device, "error",
                     d->asked ? d->why.text : "not asked yet");
}

/* Who holds training up, over all of them; null: nobody. */
static json_t *headline_json(const struct node *n)
{
    struct join j;
    join_make(n, &j);
    const struct headline *h = &j.headline;
    json_t *json = j.held_up ? json_pack("{s:s, s:s, s:I, s:f, s:b}", "text", h->text, "remedy",
                                         h->remedy, "pid", (json_int_t)h->pid, "since_s",
                                         h->since_s, "halted", (int)h->halted)
                             : NULL;
    join_free(&j);
    return json != NULL ? json : json_null();
}

/* Ask, unless that was just done. False: no memory. */
static bool refresh(struct dashboard *b)
{
    const uint64_t now_ns = clock_now_ns();
    if (b->text != NULL && now_ns - b->asked_ns < ASK_EVERY_NS)
        return true;
    if (node_scan(&b->node, NULL) == SHD_OK) /* else those known are asked in vain and say so */
        node_forget_gone(&b->node);
    node_ask_once(&b->node);
    json_t *daemons = json_array();
    for (uint32_t i = 0; i < b->node.count; i++)
        json_array_append_new(daemons, daemon_json(&b->node.daemons[i]));
    json_t *root = json_pack("{s:i, s:o, s:o}", "schema", STATUS_SCHEMA, "daemons", daemons,
                             "headline", headline_json(&b->node));
    char *text = root != NULL ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    if (text == NULL)
        return false;
    free(b->text);
    b->text = text;
    b->asked_ns = clock_now_ns();
    return true;
}

/* -- HTTP ------------------------------------------------------------------------------------- */

static void answer_status(struct dashboard *b, struct serve_answer *a)
{
    if (!refresh(b))
        *a = serve_text(MHD_HTTP_INTERNAL_SERVER_ERROR, "no memory for the status\n");
    else
        *a = (struct serve_answer){ MHD_HTTP_OK, "application/json", b->text, strlen(b->text),
                                    .changes = true };
}

/* "&key=value", or nothing where it was not given. False: it is too long. */
static bool add_argument(const struct dashboard *b, const char *key, char *query, size_t bytes)
{
    const char *value = serve_argument(b->serve, key);
    size_t used = strlen(query);
    if (value == NULL)
        return true;
    used += (size_t)snprintf(query + used, bytes - used, "&%s=", key);
    for (; *value != '\0' && used + 4 < bytes; value++)
        used += (size_t)snprintf(query + used, bytes - used, "%%%02x", (unsigned char)*value);
    return *value == '\0';
}

/* What b->said is, or why there is nothing to say. */
static void answer_said(struct dashboard *b, int status, const struct shd_err *why,
                        struct serve_answer *a)
{
    *a = (struct serve_answer){ MHD_HTTP_OK, "application/json", b->said, 0, .changes = true };
    if (status != SHD_OK) {
        b->said = strdup(why->text);
        *a = (struct serve_answer){ status == SHD_ENOENT ? MHD_HTTP_NOT_FOUND
                                                         : MHD_HTTP_SERVICE_UNAVAILABLE,
                                    NULL, b->said, 0, .changes = true };
    }
    a->bytes = b->said != NULL ? strlen(b->said) : 0;
}

/* Each owner counts its part; their answer is here the one of all. */
static void answer_tensor(struct dashboard *b, struct serve_answer *a)
{
    char query[900] = "";
    struct shd_err e = { 0 };
    free(b->said);
    b->said = NULL;
    if (serve_argument(b->serve, "name") == NULL ||
        !add_argument(b, "model", query, sizeof query) ||
        !add_argument(b, "name", query, sizeof query) ||
        !add_argument(b, "array", query, sizeof query)) {
        *a = serve_text(MHD_HTTP_BAD_REQUEST, "/tensor?name=T: of ?model=M, &array=A\n");
        return;
    }
    node_scan(&b->node, NULL);
    const int r = tensor_merge_ask(&b->node, query, &b->said, &e);
    answer_said(b, r, &e, a);
}

/* Of a number that was not given, too. */
static bool is_number(const struct dashboard *b, const char *key)
{
    const char *value = serve_argument(b->serve, key);
    return value == NULL || (*value != '\0' && strspn(value, "0123456789") == strlen(value));
}

/* Norms of units, likewise. */
static void answer_units(struct dashboard *b, struct serve_answer *a)
{
    char query[900] = "";
    struct shd_err e = { 0 };
    json_t *units = NULL;
    free(b->said);
    b->said = NULL;
    if (!is_number(b, "from") || !is_number(b, "unit") ||
        !add_argument(b, "model", query, sizeof query) ||
        !add_argument(b, "from", query, sizeof query) ||
        !add_argument(b, "unit", query, sizeof query)) {
        *a = serve_text(MHD_HTTP_BAD_REQUEST, "/units: of ?model=M, &from=STEP, &unit=NUMBER\n");
        return;
    }
    node_scan(&b->node, NULL);
    int r = units_merge_ask(&b->node, query, &units, &e);
    b->said = r == SHD_OK ? json_dumps(units, JSON_COMPACT) : NULL;
    json_decref(units);
    if (r == SHD_OK && b->said == NULL)
        r = err_set(&e, SHD_ENOMEM, "no memory for the norms of units");
    answer_said(b, r, &e, a);
}

static void answer(void *ctx, const char *path, struct serve_answer *ret_answer)
{
    if (strcmp(path, "/") == 0)
        *ret_answer = (struct serve_answer){ MHD_HTTP_OK, PAGE_CONTENT_TYPE, page_html,
                                             page_html_bytes, .changes = false };
    else if (strcmp(path, "/status") == 0)
        answer_status(ctx, ret_answer);
    else if (strcmp(path, "/tensor") == 0)
        answer_tensor(ctx, ret_answer);
    else if (strcmp(path, "/units") == 0)
        answer_units(ctx, ret_answer);
    else if (strcmp(path, "/healthz") == 0)
        *ret_answer = serve_text(MHD_HTTP_OK, "ok\n");
}

/* -- The verb --------------------------------------------------------------------------------- */

static void open_browser(const char *url)
{
    char program[] = "xdg-open", address[LISTEN_NAME_BYTES + 16];
    char *argv[] = { program, address, NULL };
    posix_spawnattr_t attr;
    sigset_t none;
    pid_t pid;
    snprintf(address, sizeof(address), "%s", url);
    sigemptyset(&none);
    posix_spawnattr_init(&attr);
    posix_spawnattr_setsigmask(&attr, &none);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK);
    const int r = posix_spawnp(&pid, program, NULL, &attr, argv, environ);
    posix_spawnattr_destroy(&attr);
    if (r != 0)
        ctl_say("--open: %s: %s; open the address yourself", program, strerror(r));
}

struct dashboard_options {
    const char *dir, *listen, *socket, *url;
    bool allow_remote, show;
};

static void begun(void *arg)
{
    const struct dashboard_options *o = arg;
    printf("%s\n", o->url);
    fflush(stdout);
    if (o->show)
        open_browser(o->url);
}

static int dashboard(struct dashboard_options *o)
{
    struct dashboard b = { .text = NULL };
    struct serve serve = { .answer = answer,
                           .ctx = &b,
                           .paths = "there are /, /status, /tensor?name=T, /units and /healthz\n",
                           .seen = "names and pids of all workers",
                           .allow_remote = o->allow_remote };
    struct shd_err e = { 0 };
    char name[LISTEN_NAME_BYTES], url[LISTEN_NAME_BYTES + 16];
    int fd = -1;
    const int opened = node_open(o->dir, /* hosts= */ NULL, &b.node);
    if (opened != CTL_OK)
        return opened;
    b.node.keep_json = true;
    b.serve = &serve;
    int code = CTL_FAILED;
    if (serve_listen(&serve, o->listen, o->socket, &fd, name, &e) == SHD_OK) {
        snprintf(url, sizeof(url), o->socket != NULL ? "%s" : "http://%s/",
                 o->socket != NULL ? o->socket : name);
        o->url = url;
        signal(SIGCHLD, SIG_IGN); /* the browser's starter is nobody we wait for */
        code = serve_until_signal(&serve, fd, begun, o);
        if (o->socket != NULL)
            unlink(o->socket);
    } else {
        ctl_say("%s", e.text);
    }
    node_close(&b.node);
    free(b.text);
    free(b.said);
    return code;
}

int verb_dashboard(int argc, char **argv)
{
    struct dashboard_options o = { .listen = NULL };
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(o.dir),
        { "listen", 'l', FLAG_STRING, "HOST:PORT", "where to listen (" LISTEN_DEFAULT ")",
          &o.listen, 0, 0 },
        { "socket", 's', FLAG_STRING, "PATH", "listen at this Unix socket (0600) instead",
          &o.socket, 0, 0 },
        { "open", 'o', FLAG_BOOL, NULL, "open it in a browser", &o.show, 0, 0 },
        { "allow-remote", 0, FLAG_BOOL, NULL,
          "let other machines see it: there is no password and no encryption", &o.allow_remote, 0,
          0 },
    };
    const struct flags flags = VERB_FLAGS(dashboard, "shardctl dashboard [FLAGS]", table);
    const int code = verb_start(&flags, argc, argv, /* ret_rest= */ NULL);
    if (code >= 0)
        return code;
    if (o.socket != NULL && (o.listen != NULL || o.show))
        return ctl_usage("--socket: neither --listen nor --open goes with it");
    if (o.listen == NULL)
        o.listen = LISTEN_DEFAULT;
    text_init();
    return dashboard(&o);
}
