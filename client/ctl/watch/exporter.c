/* shardctl exporter: the metrics of all daemons of a node at one TCP address, for Prometheus, which
 * does not scrape Unix sockets.
 *
 * Each request for /metrics looks through the directory and asks all daemons beside each other, at
 * most every ASK_EVERY_NS. One that does not answer in time, or not as a daemon does, is
 * shardd_up{device=...} 0: also one that has left only its socket, and one that was named and has
 * never been there. It needs no daemon and no directory to begin with.
 *
 * Failure modes: no place to listen: an error at the start. Later, only answers fail.
 */
#include "client/ctl/watch/exporter.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <microhttpd.h>

#include "client/ctl/base/http.h"
#include "client/ctl/base/say.h"
#include "client/ctl/base/text.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/watch/metrics_merge.h"
#include "client/ctl/watch/serve.h"
#include "client/ctl/watch/status_node.h"
#include "proto/base/clock.h"

#define LISTEN_DEFAULT  "127.0.0.1:9464"
#define PROMETHEUS_TYPE "text/plain; version=0.0.4; charset=utf-8"
#define PAGE_BYTES_MAX  ((size_t)8 * 1024 * 1024)
#define ASK_EVERY_NS    (UINT64_C(250) * 1000 * 1000)

static const char exporter_about[] =
    "Serve the metrics of all daemons of this machine at one address, for Prometheus. Daemons "
    "come\n"
    "and go; one that is away is shardd_up 0. Name them (A is DIR?cpu0,cpu1) and one that could "
    "never\n"
    "start is, too. It goes on until it is ended (Ctrl-C).";

static const char exporter_more[] = VERB_WHERE
    "\n"
    "examples:\n"
    "  shardctl exporter --address /run/shardd\n"
    "  systemctl enable --now shardd-exporter            # of the package\n"
    "\n"
    "paths: /metrics; /healthz  200 while it runs\n"
    "\n"
    "exit codes: 0 ended by a signal; 1 no place to listen; 2 wrong command line\n";

struct exporter {
    struct node node;
    char *text; /* owned: the last answer; NULL: none yet */
    size_t bytes;
    uint64_t asked_ns;
    bool units; /* of models with many, too */
};

/* -- All daemons' metrics in one --------------------------------------------------------------- */

static void say_once(struct node_daemon *d, const char *why)
{
    char text[SHD_ERR_TEXT_BYTES];
    if (d->down_ns == 0)
        ctl_say("%s: %s", d->device, text_clean(why, text, sizeof(text)));
    d->down_ns = clock_now_ns();
}

static int take(struct metrics_merge *m, struct node_daemon *d, const struct http *http,
                struct shd_err *e)
{
    struct shd_err why = { 0 };
    int r = http == NULL ? err_set(&why, SHD_ENOMEM, "no memory to ask it")
            : http->state == HTTP_DONE
                ? metrics_merge_add(m, d->device, http->body, http->body_bytes, &why)
                : err_set(&why, SHD_EGONE, "%s", http->err.text);
    if (r == SHD_OK) {
        if (d->down_ns != 0)
            ctl_say("%s: answers again", d->device);
        d->down_ns = 0;
        return SHD_OK;
    }
    say_once(d, why.text);
    return metrics_merge_add_down(m, d->device, e);
}

static int ask_all(struct node *n, bool units, struct metrics_merge *m, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t i = 0; i < n->count; i++) {
        char path[NODE_SOCKET_BYTES];
        node_socket(n, &n->daemons[i], path);
        n->daemons[i].http = http_start(&n->client, path, units ? "/metrics?units=1" : "/metrics",
                                        PAGE_BYTES_MAX, n->timeout_ms);
    }
    http_client_run(&n->client);
    for (uint32_t i = 0; i < n->count; i++) {
        struct node_daemon *d = &n->daemons[i];
        if (r == SHD_OK)
            r = take(m, d, d->http, e);
        http_free(d->http);
        d->http = NULL;
    }
    return r;
}

/* Ask, unless that was just done. False: no memory. */
static bool refresh(struct exporter *x)
{
    if (x->text != NULL && clock_now_ns() - x->asked_ns < ASK_EVERY_NS)
        return true;
    struct metrics_merge *m = calloc(1, sizeof(*m));
    if (m == NULL)
        return false;
    char *text = NULL;
    size_t bytes = 0;
    (void)node_scan(&x->node, NULL); /* its directory may be yet to come */
    node_forget_gone(&x->node);
    int r = ask_all(&x->node, x->units, m, NULL);
    if (r == SHD_OK)
        r = metrics_merge_text(m, &text, &bytes, NULL);
    metrics_merge_deinit(m);
    free(m);
    if (r != SHD_OK)
        return false;
    free(x->text);
    x->text = text;
    x->bytes = bytes;
    x->asked_ns = clock_now_ns();
    return true;
}

/* -- The verb --------------------------------------------------------------------------------- */

static void answer(void *ctx, const char *path, struct serve_answer *ret_answer)
{
    struct exporter *x = ctx;
    if (strcmp(path, "/healthz") == 0)
        *ret_answer = serve_text(MHD_HTTP_OK, "ok\n");
    else if (strcmp(path, "/metrics") == 0 && !refresh(x))
        *ret_answer = serve_text(MHD_HTTP_INTERNAL_SERVER_ERROR, "no memory for the metrics\n");
    else if (strcmp(path, "/metrics") == 0)
        *ret_answer = (struct serve_answer){ MHD_HTTP_OK, PROMETHEUS_TYPE, x->text, x->bytes,
                                             .changes = true };
}

static void begun(void *name)
{
    printf("http://%s/metrics\n", (const char *)name);
    fflush(stdout);
}

static int exporter(const char *address, const char *where, bool units, bool allow_remote)
{
    struct exporter x = { .units = units };
    struct serve serve = { .answer = answer,
                           .ctx = &x,
                           .paths = "there are /metrics and /healthz\n",
                           .seen = "steps, memory and loss of all models",
                           .allow_remote = allow_remote };
    struct shd_err e = { 0 };
    char name[LISTEN_NAME_BYTES];
    int fd = -1;
    const int opened = node_open_early(address, &x.node);
    if (opened != CTL_OK)
        return opened;
    int code = CTL_FAILED;
    if (serve_listen(&serve, where, /* socket= */ NULL, &fd, name, &e) == SHD_OK)
        code = serve_until_signal(&serve, fd, begun, name);
    else
        ctl_say("%s", e.text);
    node_close(&x.node);
    free(x.text);
    return code;
}

int verb_exporter(int argc, char **argv)
{
    const char *address = NULL, *where = LISTEN_DEFAULT;
    bool units = false, allow_remote = false;
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(address),
        { "listen", 'l', FLAG_STRING, "HOST:PORT", "where to listen (" LISTEN_DEFAULT ")", &where,
          0, 0 },
        { "units", 'u', FLAG_BOOL, NULL,
          "norms of each unit of models with up to 4096 of them, else 256", &units, 0, 0 },
        { "allow-remote", 0, FLAG_BOOL, NULL,
          "let other machines read it: there is no password and no encryption", &allow_remote, 0,
          0 },
    };
    const struct flags flags = VERB_FLAGS(exporter, "shardctl exporter [FLAGS]", table);
    const int code = verb_start(&flags, argc, argv, /* ret_rest= */ NULL);
    if (code >= 0)
        return code;
    text_init();
    return exporter(address, where, units, allow_remote);
}
