/* shardctl status: what each daemon holds, who is attached and who waits for whom (docs/status.md).
 * Read from the status sockets; a daemon that has none is asked over its control connection. */
#include "client/ctl/watch/status.h"

#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/text.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/watch/status_join.h"
#include "client/ctl/watch/status_node.h"
#include "client/shd.h"
#include "proto/base/check.h"

#define CONTROL_MS  3000
#define GREETING_MS 500
#define STALL_S     30 /* most of a watchdog's patience is left then */
#define STALLED     3  /* exit code */
#define CELL        TABLE_CELL_BYTES_MAX

_Static_assert(TEXT_BYTES <= CELL && DOC_NAME_BYTES <= CELL, "texts fit a table's cell");

static const char status_about[] =
    "Show each daemon: its models with step, phase, gradients that are in (of units times\n"
    "micro-batches) and memory, the sessions attached to it with what each does now, and who\n"
    "waits for whom. Sessions of tools are left out. `shardctl top` shows the same, live.";

static const char status_more[] = VERB_WHERE
    "\n"
    "examples:\n"
    "  shardctl status --runtime-dir '/run/shardd?cpu0,cpu1'\n"
    "  shardctl status --watch 2            again every 2 seconds\n"
    "  shardctl status --json | jq '.[].models[]?.step'\n"
    "  shardctl status --json | jq '.[] | select(.error)'\n"
    "\n"
    "exit codes:\n"
    "  0  all daemons answered and are well\n"
    "  1  one did not answer, its event loop is stuck, or it refused to adopt a model; or there "
    "is\n"
    "     no daemon at all\n"
    "  2  the command line was wrong\n"
    "  3  all are well, but training stands still: somebody has waited for 30 s (--stall); who "
    "and\n"
    "     for whom is at the top of the waits\n";

struct status_options {
    const char *address, *hosts;
    const char *watch; /* seconds, as text; NULL: once */
    uint64_t interval_ms;
    double stall_s;
    bool as_json, with_tools;
};

/* -- Control connections -------------------------------------------------------------------- */

/* True when somebody listens there: shd_connect() would wait long for a socket that nobody has. A
 * daemon greets each connection, and complains when that is closed before its greeting. */
static bool listens(const char *path)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    if (strlen(path) >= sizeof(a.sun_path))
        return false;
    memcpy(a.sun_path, path, strlen(path) + 1);
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    const bool does = fd >= 0 && connect(fd, (const struct sockaddr *)&a, sizeof(a)) == 0;
    struct pollfd p = { .fd = fd, .events = POLLIN };
    if (does)
        poll(&p, 1, GREETING_MS);
    if (fd >= 0)
        close(fd);
    return does;
}

static int ask(const char *address, char **ret_text, struct shd_err *e)
{
    const struct shd_options options = { .size = sizeof(options),
                                         .address = address,
                                         .name = "shardctl status",
                                         .timeout_ms = CONTROL_MS };
    shd_session *s;
    int r = shd_connect(&options, &s, e);
    if (r != SHD_OK)
        return r;
    r = shd_status(s, 0, ret_text, e);
    shd_close(s);
    return r;
}

static void ask_one(struct node *n, struct node_daemon *d)
{
    char path[NODE_PATH_BYTES + DOC_NAME_BYTES + 8], *text;
    snprintf(path, sizeof(path), "%s/%s.sock", n->dir, d->device);
    if (!listens(path))
        return;
    snprintf(path, sizeof(path), "%s?%s", n->dir, d->device);
    struct shd_err e = { 0 };
    if (ask(path, &text, &e) != SHD_OK) {
        d->why = e;
        text_clean(e.text, d->why.text, sizeof(d->why.text));
        return;
    }
    node_take(n, d, text, strlen(text));
    free(text);
}

/* Ask all daemons of n that are down for the lack of a status socket, an older or a smaller
 * shardd's, over DEVICE.sock. Waits, at most a few seconds each; none for one that is dead. */
static void control_ask(struct node *n)
{
    for (uint32_t i = 0; i < n->count; i++) {
        struct node_daemon *d = &n->daemons[i];
        if (!d->up &&
            (d->why.code == SHD_ENOENT || d->why.code == SHD_EGONE || d->why.code == SHD_ENOTSUP))
            ask_one(n, d);
    }
}

/* -- Cells ----------------------------------------------------------------------------------- */

static const char *or_dash(const char *text)
{
    return text[0] != '\0' ? text : "-";
}

/* "12/24". buf[CELL]; returns buf. */
static const char *cell_of(double part, double whole, char *buf)
{
    char a[TEXT_BYTES], b[TEXT_BYTES];
    snprintf(buf, CELL, "%.18s/%.18s", text_count(part, a), text_count(whole, b));
    return buf;
}

static const char *cell_returned(const struct doc_model *m, char *buf)
{
    const double expected = isnan(m->expected) ? m->units * m->micro_batches : m->expected;
    return isnan(expected) ? text_count(m->returned, buf) : cell_of(m->returned, expected, buf);
}

/* -- One daemon ------------------------------------------------------------------------------ */

static void show_verified(const struct doc_model *m, FILE *out)
{
    char compared[TEXT_BYTES], differ[TEXT_BYTES];
    if (isnan(m->compared))
        return;
    fprintf(out, "  verified in %s: %s pairs compared, %s differ\n", or_dash(m->name),
            text_count(m->compared, compared), text_count(m->differences, differ));
    if (m->differ[0] != '\0')
        fprintf(out, "  WRONG GRADIENT: %s\n", m->differ);
}

/* What of a model lies on a disk, and so not in the table. */
static void show_files(const struct doc_model *m, FILE *out)
{
    static const char *const what[DOC_FILES] = { "state", "published (a successor's too)",
                                                 "snapshots" };
    const char *before = "";
    char bytes[TEXT_BYTES];
    for (unsigned i = 0; i < DOC_FILES; i++) {
        if (!(m->files[i] > 0))
            continue;
        if (before[0] == '\0')
            fprintf(out, "  on files of %s: ", or_dash(m->name));
        fprintf(out, "%s%s %s", before, text_bytes(m->files[i], bytes), what[i]);
        before = ", ";
    }
    if (before[0] != '\0')
        fputc('\n', out);
}

static void show_models(const struct doc *d, FILE *out)
{
    static const char *const headings[] = { "MODEL",   "STEP",     "PHASE",  "OWNER",
                                            "UNITS",   "RETURNED", "STEP/S", "STATE",
                                            "PUBLISH", "INBOX",    "SPILL",  "SAVING" };
    struct table t;
    table_init(&t, headings, ARRAY_SIZE(headings));
    for (uint32_t i = 0; i < d->model_count; i++) {
        const struct doc_model *m = &d->models[i];
        char b[ARRAY_SIZE(headings)][CELL];
        table_row(
            &t, (const char *[]){ or_dash(m->name), text_count(m->step, b[0]), or_dash(m->phase),
                                  cell_of(m->owner, m->owners, b[1]), text_count(m->units, b[2]),
                                  cell_returned(m, b[3]), text_number(m->steps_per_s, b[4]),
                                  text_bytes(m->bytes[DOC_STATE], b[5]),
                                  text_bytes(m->bytes[DOC_PUBLISH], b[6]),
                                  text_bytes(m->bytes[DOC_INBOX], b[7]),
                                  text_bytes(m->bytes[DOC_SPILL], b[8]), or_dash(m->checkpoint) });
    }
    table_print(&t, "  ", out);
    table_deinit(&t);
    for (uint32_t i = 0; i < d->model_count; i++)
        show_files(&d->models[i], out);
    for (uint32_t i = 0; i < d->model_count; i++)
        if (d->models[i].stopped[0] != '\0')
            fprintf(out, "  STOPPED: %s, by its guard: %s; shardctl set %s guard=go-on goes on\n",
                    or_dash(d->models[i].name), d->models[i].stopped, or_dash(d->models[i].name));
    for (uint32_t i = 0; i < d->model_count; i++)
        if (d->models[i].stopped[0] == '\0' && d->models[i].skipped[0] != '\0')
            fprintf(out, "  last step of %s skipped: %s\n", or_dash(d->models[i].name),
                    d->models[i].skipped);
    for (uint32_t i = 0; i < d->model_count; i++)
        if (d->models[i].settings[0] != '\0')
            fprintf(out, "  set in %s: %s\n", or_dash(d->models[i].name), d->models[i].settings);
    for (uint32_t i = 0; i < d->model_count; i++)
        show_verified(&d->models[i], out);
}

static void show_sessions(const struct doc *d, FILE *out)
{
    static const char *const headings[] = { "SESSION", "PID",    "UID",  "ROLE", "PROCESS",
                                            "SLOTS",   "IN USE", "PATH", "NOW",  "SINCE" };
    struct table t;
    table_init(&t, headings, ARRAY_SIZE(headings));
    for (uint32_t i = 0; i < d->session_count; i++) {
        const struct doc_session *s = &d->sessions[i];
        char b[ARRAY_SIZE(headings)][CELL], now[CELL];
        table_row(&t, (const char *[]){
                          or_dash(s->name), text_count(s->pid, b[0]), text_count(s->uid, b[1]),
                          or_dash(s->role), or_dash(s->state), text_count(s->slots, b[2]),
                          text_count(s->slots_waiting, b[3]), or_dash(s->path),
                          join_now(&s->now, now, sizeof(now)), text_time(s->now.since_s, b[4]) });
    }
    table_print(&t, "  ", out);
    table_deinit(&t);
}

static void show_daemon(const struct node_daemon *n, FILE *out)
{
    char why[DOC_TEXT_BYTES], b[3][TEXT_BYTES];
    const bool healthy = node_healthy(n, why, sizeof(why));
    if (!n->up) {
        fprintf(out, "%s  unreachable: %s\n", n->device, why);
        return;
    }
    const struct doc *d = n->doc;
    fprintf(out, "%s  pid %s  up %s  threads %s  %s  shardd %s\n", n->device,
            text_count(d->pid, b[0]), text_time(d->uptime_s, b[1]), text_count(d->threads, b[2]),
            or_dash(d->isa), or_dash(d->version));
    if (!healthy)
        fprintf(out, "  NOT WELL: %s\n", why);
    if (d->kernels[0] != '\0')
        fprintf(out, "  kernels, by their times: %s\n", d->kernels);
    if (d->error[0] != '\0')
        fprintf(out, "  last warning: %s\n", d->error);
    show_models(d, out);
    show_sessions(d, out);
}

/* -- The node -------------------------------------------------------------------------------- */

static void show_waits(const struct join *j, FILE *out)
{
    char since[TEXT_BYTES];
    if (j->wait_count == 0)
        return;
    fputs("waits, the longest first:\n", out);
    for (uint32_t i = 0; i < j->wait_count; i++)
        fprintf(out, "  %8s  %s\n", text_time(j->waits[i].w.since_s, since),
                or_dash(j->waits[i].w.text));
}

/* Who holds training up and what to do, daemons with their models and sessions, then who waits for
 * what. */
static void show_node(const struct node *n, FILE *out)
{
    struct join j;
    join_make(n, &j);
    if (j.held_up)
        fprintf(out, "HELD UP: %s\n     do: %s\n", j.headline.text, j.headline.remedy);
    for (uint32_t i = 0; i < n->count; i++)
        show_daemon(&n->daemons[i], out);
    show_waits(&j, out);
    join_free(&j);
}

static json_t *json_of_down(const struct node_daemon *d)
{
    return json_pack("{s:s, s:s, s:s}", "device", d->device, "error", d->why.text, "status",
                     status_name(d->why.code));
}

/* jansson escapes all but DEL. */
static void put_json(const char *text, FILE *out)
{
    for (; *text != '\0'; text++)
        if (*text == '\x7f')
            fputs("\\u007f", out);
        else
            fputc(*text, out);
    fputc('\n', out);
}

/* One array: each daemon's document, or {"device", "error", "status"} of one without. Only
 * printable ASCII is written. */
static int show_json(const struct node *n, FILE *out)
{
    json_t *all = json_array();
    for (uint32_t i = 0; i < n->count; i++) {
        const struct node_daemon *d = &n->daemons[i];
        json_array_append_new(all, d->up ? json_incref(d->json) : json_of_down(d));
    }
    char *text = json_dumps(all, JSON_INDENT(2) | JSON_ENSURE_ASCII);
    const bool whole = text != NULL && json_array_size(all) == n->count;
    if (whole)
        put_json(text, out);
    free(text);
    json_decref(all);
    return whole ? SHD_OK : SHD_ENOMEM;
}

/* -- All of it ------------------------------------------------------------------------------- */

/* The longest wait of anybody decides whether training goes on. */
static int health(const struct node *n, const struct status_options *o)
{
    char why[DOC_TEXT_BYTES], since[TEXT_BYTES];
    struct join j;
    for (uint32_t i = 0; i < n->count; i++)
        if (!node_healthy(&n->daemons[i], why, sizeof(why)))
            return CTL_FAILED;
    join_make(n, &j);
    const double longest_s = j.wait_count > 0 ? j.waits[0].w.since_s : 0;
    join_free(&j);
    if (!(o->stall_s > 0 && longest_s >= o->stall_s))
        return CTL_OK;
    ctl_say("training stands still: somebody waits for %s (--stall %g)",
            text_time(longest_s, since), o->stall_s);
    return STALLED;
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
    return health(n, o);
}

static int open_node(const struct status_options *o, struct node *ret_node)
{
    const int code = node_open(o->address, o->hosts, ret_node);
    if (code != CTL_OK)
        return code;
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

/* True for a terminal that can be cleared. A dumb one, and a file, get one block after the other.
 */
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
        VERB_ADDRESS_FLAGS(o->address),
        HOST_FLAG(o->hosts),
        { "watch", 'w', FLAG_STRING, "[S]", "show it again every S seconds (1)", &o->watch, 0, 0 },
        { "stall", 0, FLAG_REAL, "S", "exit code 3 when somebody waits so long (30); 0: never",
          &o->stall_s, 0, 1e9 },
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
    struct status_options o = { .stall_s = STALL_S };
    struct shd_err e = { 0 };
    char **words = calloc((size_t)argc + 2, sizeof(*words));
    if (words == NULL)
        return ctl_fail("out of memory");
    int code = parse(complete_watch(argc, argv, words), words, &o);
    free(words);
    if (code >= 0)
        return code;
    if (o.watch != NULL && node_interval(o.watch, &o.interval_ms, &e) != SHD_OK)
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
