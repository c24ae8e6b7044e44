/* shardctl dashboard: the page of the daemons (proto/page) for all of a node, and their status
 * documents in one, over HTTP for a browser here.
 *
 * Each request for /status looks through the directory and asks all daemons beside each other, at
 * most every ASK_EVERY_NS whatever the number of browsers. A daemon that does not answer is
 * {device, error} in the answer. One thread serves; connections, their idle time and the size of a
 * request are bounded.
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
#include "client/ctl/watch/status_join.h"
#include "client/ctl/watch/status_node.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/page/page.h"
#include "proto/share/listen.h"

#define LISTEN_DEFAULT    "127.0.0.1:8440"
#define STATUS_SCHEMA     2
#define ASK_EVERY_NS      (UINT64_C(250) * 1000 * 1000)
#define CONNECTIONS_MAX   64u
#define CONNECTION_IDLE_S 5u
#define REQUEST_BYTES_MAX ((size_t)16 * 1024)

static const char dashboard_about[] = "Serve a page that shows all daemons of this machine: steps, "
                                      "shards, who waits for what, memory,\n"
                                      "workers. It follows them until it is ended (Ctrl-C).";

static const char dashboard_more[] = VERB_WHERE
    "\n"
    "examples:\n"
    "  shardctl dashboard --open\n"
    "  ssh -t -L 8440:127.0.0.1:8440 HOST shardctl dashboard   # another machine's, at localhost\n"
    "\n"
    "paths: /  the page; /status  {schema, daemons[]} (docs/status.md); /healthz  200 while it "
    "runs\n"
    "\n"
    "exit codes: 0 ended by a signal; 1 no daemon, or no place to listen; 2 wrong command line\n";

struct dashboard {
    struct node node;
    char *text; /* owned: the last answer; NULL: none yet */
    uint64_t asked_ns;
    bool allow_remote;
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
    node_scan(&b->node, NULL); /* without the directory, those known are asked in vain and say so */
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

static enum MHD_Result reply(struct MHD_Connection *c, unsigned code, const char *type,
                             struct MHD_Response *r)
{
    static const char *const headers[][2] = { { "Content-Security-Policy", PAGE_SECURITY_POLICY },
                                              { "X-Content-Type-Options", "nosniff" },
                                              { "Referrer-Policy", "no-referrer" },
                                              { "Cache-Control", "no-store" } };
    if (r == NULL)
        return MHD_NO; /* no memory: the connection is closed */
    enum MHD_Result added = MHD_add_response_header(r, "Content-Type", type);
    for (size_t i = 0; i < ARRAY_SIZE(headers) && added == MHD_YES; i++)
        added = MHD_add_response_header(r, headers[i][0], headers[i][1]);
    if (code == MHD_HTTP_METHOD_NOT_ALLOWED && added == MHD_YES)
        added = MHD_add_response_header(r, "Allow", "GET, HEAD");
    const enum MHD_Result queued = added == MHD_YES ? MHD_queue_response(c, code, r) : MHD_NO;
    MHD_destroy_response(r);
    return queued;
}

static struct MHD_Response *constant(const void *bytes, size_t count)
{
    return MHD_create_response_from_buffer(count, (void *)(uintptr_t)bytes, MHD_RESPMEM_PERSISTENT);
}

/* text is constant. */
static enum MHD_Result reply_text(struct MHD_Connection *c, unsigned code, const char *text)
{
    return reply(c, code, "text/plain; charset=utf-8", constant(text, strlen(text)));
}

static enum MHD_Result reply_status(struct dashboard *b, struct MHD_Connection *c)
{
    if (!refresh(b))
        return reply_text(c, MHD_HTTP_INTERNAL_SERVER_ERROR, "no memory for the status\n");
    return reply(c, MHD_HTTP_OK, "application/json",
                 MHD_create_response_from_buffer(strlen(b->text), b->text, MHD_RESPMEM_MUST_COPY));
}

/* MHD's handler; its one thread calls it first when the head is in, then for the body or its end.
 * What needs no body is answered at once. */
static enum MHD_Result handle(void *arg, struct MHD_Connection *c, const char *path,
                              const char *method, const char *version, const char *body,
                              size_t *body_bytes, void **request)
{
    static char seen;
    struct dashboard *b = arg;
    (void)version;
    (void)body;
    const char *host = MHD_lookup_connection_value(c, MHD_HEADER_KIND, MHD_HTTP_HEADER_HOST);
    if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0)
        return reply_text(c, MHD_HTTP_METHOD_NOT_ALLOWED, "this only shows\n");
    if (*request ==
        NULL) { /* MHD wants to be answered in the second call: the connection is kept */
        *request = &seen;
        return MHD_YES;
    }
    if (*body_bytes > 0) {
        *body_bytes = 0; /* a GET's body means nothing */
        return MHD_YES;
    }
    if (!b->allow_remote && (host == NULL || !listen_host_is_local(host)))
        return reply_text(c, MHD_HTTP_FORBIDDEN,
                          "the Host header does not name this machine: open it as localhost\n");
    if (strcmp(path, "/") == 0)
        return reply(c, MHD_HTTP_OK, PAGE_CONTENT_TYPE, constant(page_html, page_html_bytes));
    if (strcmp(path, "/status") == 0)
        return reply_status(b, c);
    if (strcmp(path, "/healthz") == 0)
        return reply_text(c, MHD_HTTP_OK, "ok\n");
    return reply_text(c, MHD_HTTP_NOT_FOUND, "there are /, /status and /healthz\n");
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

/* Serve on fd, which becomes MHD's, until SIGINT or SIGTERM. */
static int serve(struct dashboard *b, int fd, const char *url, bool show)
{
    sigset_t ends;
    int signal_number;
    signal(SIGCHLD, SIG_IGN); /* the browser's starter is nobody we wait for */
    sigemptyset(&ends);
    sigaddset(&ends, SIGINT);
    sigaddset(&ends, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &ends, NULL);
    struct MHD_Daemon *httpd = MHD_start_daemon(
        MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_AUTO, 0, NULL, NULL, handle, b,
        MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_CONNECTION_LIMIT, CONNECTIONS_MAX,
        MHD_OPTION_CONNECTION_TIMEOUT, CONNECTION_IDLE_S, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        REQUEST_BYTES_MAX, MHD_OPTION_END);
    if (httpd == NULL) {
        ctl_say("cannot start the HTTP server");
        close(fd);
        return CTL_FAILED;
    }
    printf("%s\n", url);
    fflush(stdout);
    if (show)
        open_browser(url);
    sigwait(&ends, &signal_number);
    MHD_stop_daemon(httpd);
    return CTL_OK;
}

struct dashboard_options {
    const char *dir, *listen, *socket;
    bool allow_remote, show;
};

/* name: of a TCP socket. */
static int listen_at(const struct dashboard_options *o, int *ret_fd, char name[LISTEN_NAME_BYTES],
                     struct shd_err *e)
{
    bool remote;
    if (o->socket != NULL)
        return listen_unix(o->socket, ret_fd, e);
    int r = listen_tcp(o->listen, o->allow_remote ? LISTEN_REMOTE : 0, ret_fd, &remote, e);
    if (r == SHD_EAUTH)
        return err_set(e, r,
                       "'%s' can be reached by other machines, and there is no password: whoever "
                       "gets there sees names and pids of all workers. From another machine "
                       "rather: ssh -L. To do it all the same: --allow-remote",
                       o->listen);
    if (r != SHD_OK)
        return r;
    r = listen_name(*ret_fd, name, e);
    if (r != SHD_OK)
        close(*ret_fd);
    return r;
}

static int dashboard(const struct dashboard_options *o)
{
    struct dashboard b = { .allow_remote = o->allow_remote };
    struct shd_err e = { 0 };
    char name[LISTEN_NAME_BYTES], url[LISTEN_NAME_BYTES + 16];
    int fd = -1;
    const int opened = node_open(o->dir, /* hosts= */ NULL, &b.node);
    if (opened != CTL_OK)
        return opened;
    b.node.keep_json = true;
    int code = CTL_FAILED;
    if (listen_at(o, &fd, name, &e) == SHD_OK) {
        snprintf(url, sizeof(url), o->socket != NULL ? "%s" : "http://%s/",
                 o->socket != NULL ? o->socket : name);
        code = serve(&b, fd, url, o->show);
        if (o->socket != NULL)
            unlink(o->socket);
    } else {
        ctl_say("%s", e.text);
    }
    node_close(&b.node);
    free(b.text);
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
