/* shardctl status: what each daemon holds, who is attached and who waits for whom (docs/status.md).
 * Read from the status sockets; a daemon that has none is asked over its control connection. */
#include "client/ctl/watch/status.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/text.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/watch/status_control.h"
#include "client/ctl/watch/status_node.h"
#include "client/ctl/watch/status_show.h"
#include "proto/base/check.h"

static const char status_about[] =
    "Show each daemon: its models with step, phase, gradients that are in (of units times\n"
    "micro-batches) and memory, the sessions attached to it with what each does now, and who\n"
    "waits for whom. Sessions of tools are left out. `shardctl top` shows the same, live.";

static const char status_more[] =
    "default place: $SHARDD_ADDRESS, else where `shardctl up` starts daemons, else /run/shardd,\n"
    "else that of your only `shardctl run`\n"
    "\n"
    "examples:\n"
    "  shardctl status --runtime-dir '/run/shardd?cpu0,cpu1'\n"
    "  shardctl status --watch 2            again every 2 seconds\n"
    "  shardctl status --json | jq '.[].models[].step'\n"
    "  shardctl status --json | jq '.[] | select(.error)'\n"
    "\n"
    "exit codes:\n"
    "  0  all daemons answered and are well\n"
    "  1  one did not answer, its event loop is stuck, or it refused to adopt a model; or there "
    "is\n"
    "     no daemon at all\n"
    "  2  the command line was wrong\n";

struct status_options {
    const char *address, *hosts;
    const char *watch; /* seconds, as text; NULL: once */
    uint64_t interval_ms;
    bool as_json, with_tools;
};

static int health(const struct node *n)
{
    char why[DOC_TEXT_BYTES];
    for (uint32_t i = 0; i < n->count; i++)
        if (!node_healthy(&n->daemons[i], why, sizeof(why)))
            return CTL_FAILED;
    return CTL_OK;
}

static int show(struct node *n, const struct status_options *o)
{
    node_ask_once(n);
    if (!n->tcp)
        control_ask(n);
    if (o->as_json && show_json(n, stdout) != SHD_OK)
        return ctl_fail("no memory for the document");
    if (!o->as_json)
        show_node(n, stdout);
    return health(n);
}

static int open_node(const struct status_options *o, struct node *ret_node)
{
    struct shd_err e = { 0 };
    const int r = o->hosts != NULL ? node_open_hosts(o->hosts, ret_node, &e)
                                   : node_open(o->address, ret_node, &e);
    if (r != SHD_OK) {
        char text[sizeof(e.text)];
        ctl_say("%s", text_clean(e.text, text, sizeof(text)));
        return node_exit(r);
    }
    ret_node->with_tools = o->with_tools;
    ret_node->keep_json = o->as_json;
    return CTL_OK;
}

/* -- Again and again ------------------------------------------------------------------------- */

static volatile sig_atomic_t stopped;

static void on_signal(int signum)
{
    stopped = signum;
}

static void print_time(void)
{
    char text[32];
    struct tm tm;
    const time_t now = time(NULL);
    if (localtime_r(&now, &tm) != NULL && strftime(text, sizeof(text), "%F %T", &tm) > 0)
        printf("-- %s\n", text);
}

/* A terminal is cleared by what its kind understands; one that cannot (dumb), and a file, get one
 * block after the other. */
static bool can_clear(void)
{
    const char *term = getenv("TERM");
    return isatty(STDOUT_FILENO) && term != NULL && term[0] != '\0' && strcmp(term, "dumb") != 0;
}

static int watch(const struct status_options *o)
{
    struct sigaction stop = { .sa_handler = on_signal };
    sigaction(SIGINT, &stop, NULL);
    sigaction(SIGTERM, &stop, NULL);
    int code = CTL_OK;
    while (stopped == 0) {
        struct node n;
        code = open_node(o, &n);
        if (can_clear() && !o->as_json)
            fputs("\x1b[H\x1b[2J", stdout);
        if (!o->as_json)
            print_time();
        if (code == CTL_OK) {
            code = show(&n, o);
            node_close(&n);
        }
        if (fflush(stdout) != 0) /* nobody reads on */
            break;
        nanosleep(&(struct timespec){ .tv_sec = (time_t)(o->interval_ms / 1000),
                                      .tv_nsec = (long)(o->interval_ms % 1000) * 1000000 },
                  NULL);
    }
    return code;
}

/* -- The verb -------------------------------------------------------------------------------- */

/* The value of --watch may be left out: put "1" there. words[argc + 2]. */
static int complete_watch(int argc, char **argv, char **words)
{
    static char one[] = "1";
    int n = 0;
    for (int i = 0; i < argc; i++) {
        words[n++] = argv[i];
        const bool is_watch = strcmp(argv[i], "--watch") == 0 || strcmp(argv[i], "-w") == 0;
        if (is_watch && (i + 1 == argc || argv[i + 1][0] == '-') && n <= argc)
            words[n++] = one;
    }
    words[n] = NULL;
    return n;
}

static int parse(int argc, char **argv, struct status_options *o)
{
    const struct flag table[] = {
        { "runtime-dir", 'd', FLAG_STRING, "DIR", "where the daemons are: DIR or DIR?cpu0,cpu1",
          &o->address, 0, 0 },
        { "address", 'a', FLAG_STRING, "DIR", "the same", &o->address, 0, 0 },
        HOST_FLAG(o->hosts),
        { "watch", 'w', FLAG_STRING, "[S]", "show it again every S seconds (1)", &o->watch, 0, 0 },
        { "all", 0, FLAG_BOOL, NULL, "show sessions of tools (role admin) as well", &o->with_tools,
          0, 0 },
        { "json", 'j', FLAG_BOOL, NULL, "one array: each daemon's document, or its `error`",
          &o->as_json, 0, 0 },
    };
    const struct flags flags = VERB_FLAGS(status, "shardctl status [FLAGS]", table);
    return verb_start(&flags, argc, argv, /* ret_rest= */ NULL);
}

int verb_status(int argc, char **argv)
{
    struct status_options o = { 0 };
    struct shd_err e = { 0 };
    char **words = calloc((size_t)argc + 2, sizeof(*words));
    if (words == NULL)
        return ctl_fail("out of memory");
    int code = parse(complete_watch(argc, argv, words), words, &o);
    free(words);
    if (code >= 0)
        return code;
    if (o.watch != NULL && show_interval(o.watch, &o.interval_ms, &e) != SHD_OK)
        return ctl_usage("--watch: %s", e.text);
    text_init();
    if (o.watch != NULL)
        return watch(&o);
    struct node n;
    code = open_node(&o, &n);
    if (code != CTL_OK)
        return code;
    code = show(&n, &o);
    node_close(&n);
    return code;
}
