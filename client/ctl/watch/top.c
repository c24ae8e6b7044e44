/* shardctl top: the node on a full screen, live. The loop; what is shown is top_draw.c's, the
 * terminal top_term.c's.
 *
 * One wait for the keyboard and all daemons' sockets: a daemon that does not answer is shown as
 * such and delays nothing. */
#include "client/ctl/watch/top.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/text.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/watch/status_join.h"
#include "client/ctl/watch/status_node.h"
#include "client/ctl/watch/top_draw.h"
#include "client/ctl/watch/top_term.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

#define TICK_MS        100
#define INTERVAL_MS    1000
#define TIMEOUT_MS_MIN 500
#define FRAME_MS_MIN   100 /* daemons answer one by one: not a frame for each */
#define DIRECTORY_MS   1000

static const char top_about[] =
    "Show the daemons of this host, their models and workers, and who waits for whom, live.\n"
    "Needs a terminal; `shardctl status --watch` does without.";

static const char top_more[] = VERB_WHERE
    "\n"
    "keys:\n"
    "  q           quit                      h           explains the columns\n"
    "  s           order of the workers      p           pause, go on\n"
    "  arrows      scroll; PgUp PgDn Home End; Tab: the other list\n"
    "\n"
    "NO_COLOR=1 does without colour, LC_ALL=C without block characters, TERM=dumb without moving\n"
    "the cursor. A worker that holds others up is named in the line above the keys.\n"
    "\n"
    "examples:\n"
    "  shardctl top\n"
    "  shardctl run --verbose ... says its runtime directory: shardctl top --runtime-dir DIR\n"
    "\n"
    "exit codes: 0 quit; 1 no daemon, or no terminal; 2 the command line was wrong; 128 + N for\n"
    "signal N\n";

struct top {
    struct node node;
    struct top_picture picture;
    struct join join;
    struct shd_err trouble;
    uint64_t interval_ms;
    uint64_t scanned_ns, drawn_ns;
    bool dirty, quit;
};

/* -- Drawing --------------------------------------------------------------------------------- */

static void draw(struct top *t)
{
    struct screen s;
    unsigned rows, cols;
    term_size(&rows, &cols);
    t->picture.now_ns = clock_now_ns();
    t->picture.trouble = t->trouble.code != SHD_OK ? t->trouble.text : NULL;
    if (screen_init(&s, rows, cols)) {
        top_draw(&t->picture, &s);
        term_show(&s);
    }
    screen_deinit(&s);
    t->drawn_ns = t->picture.now_ns;
    t->dirty = false;
}

static void take_news(struct top *t)
{
    join_free(&t->join);
    join_make(&t->node, &t->join);
    join_sort(&t->join, t->picture.sort);
    t->dirty = true;
}

/* -- Keys ------------------------------------------------------------------------------------ */

/* Rows by which a key scrolls, far beyond any list for its ends; 0: it does not. */
static int scrolled(enum term_key key, int page)
{
    const int rows[] = {
        [KEY_IS_UP] = -1,
        [KEY_IS_DOWN] = 1,
        [KEY_IS_PAGE_UP] = -page,
        [KEY_IS_PAGE_DOWN] = page,
        [KEY_IS_FIRST] = -(int)JOIN_WORKERS_MAX,
        [KEY_IS_LAST] = (int)JOIN_WORKERS_MAX,
    };
    return (size_t)key < ARRAY_SIZE(rows) ? rows[key] : 0;
}

static void press(struct top *t, enum term_key key)
{
    struct top_picture *p = &t->picture;
    const int page = p->page[p->focus] > 1 ? (int)p->page[p->focus] - 1 : 1;
    t->dirty = true;
    if (p->help && key != KEY_IS_QUIT) {
        p->help = key == KEY_IS_REDRAW; /* a new size is no key */
        return;
    }
    const int first = (int)p->first[p->focus] + scrolled(key, page);
    p->first[p->focus] = first > 0 ? (unsigned)first : 0; /* top_draw() looks at the other end */
    if (key == KEY_IS_SORT) {
        p->sort = (p->sort + 1) % JOIN_SORTS;
        join_sort(&t->join, p->sort);
    } else if (key == KEY_IS_TAB) {
        p->focus = p->focus == TOP_DAEMONS ? TOP_WORKERS : TOP_DAEMONS;
    } else if (key == KEY_IS_PAUSE) {
        p->paused = !p->paused;
    }
    t->quit = t->quit || key == KEY_IS_QUIT;
    p->help = key == KEY_IS_HELP;
}

/* -- The loop -------------------------------------------------------------------------------- */

/* New daemons; a directory that cannot be read is shown, and tried again. */
static void scan(struct top *t, uint64_t now_ns)
{
    if (now_ns - t->scanned_ns < DIRECTORY_MS * NS_PER_MS)
        return;
    t->scanned_ns = now_ns;
    const uint32_t count = t->node.count;
    struct shd_err e = { 0 };
    char text[sizeof(e.text)];
    if (node_scan(&t->node, &e) != SHD_OK)
        snprintf(e.text, sizeof(e.text), "%s", text_clean(e.text, text, sizeof(text)));
    if (e.code != t->trouble.code || count != t->node.count)
        t->dirty = true;
    t->trouble = e;
}

/* Wait for a key, an answer or the next tick; false: the terminal has gone. */
static bool wait_for_events(struct top *t)
{
    struct pollfd keys = { .fd = STDIN_FILENO, .events = POLLIN };
    http_client_wait(&t->node.client, STDIN_FILENO, TICK_MS);
    return poll(&keys, 1, 0) < 0 || (keys.revents & (POLLHUP | POLLERR | POLLNVAL)) == 0;
}

static void iterate(struct top *t)
{
    const uint64_t now_ns = clock_now_ns();
    if (!t->picture.paused) {
        scan(t, now_ns);
        node_ask(&t->node, t->interval_ms);
    }
    if (node_step(&t->node) && !t->picture.paused)
        take_news(t);
    for (enum term_key key = term_key(); key != KEY_IS_NONE && !t->quit; key = term_key())
        press(t, key);
    const uint64_t since_ms = (now_ns - t->drawn_ns) / NS_PER_MS;
    const uint64_t least_ms = term_is_full_screen() ? FRAME_MS_MIN : t->interval_ms;
    if (t->drawn_ns == 0 || (t->dirty && since_ms >= least_ms) ||
        (since_ms >= t->interval_ms && !t->picture.paused))
        draw(t);
}

/* Until a key or a signal ends it. */
static int run_top(struct top *t)
{
    bool there = true;
    while (!t->quit && term_signal() == 0 && there) {
        iterate(t);
        if (!t->quit)
            there = wait_for_events(t);
    }
    term_close();
    if (term_signal() != 0) {
        signal(term_signal(), SIG_DFL);
        raise(term_signal()); /* who waits for us sees how we ended */
    }
    return there ? CTL_OK : CTL_FAILED;
}

static int top_at(struct top *t, const char *address, const char *hosts)
{
    struct shd_err e = { 0 };
    int code = node_open(address, hosts, &t->node);
    if (code != CTL_OK)
        return code;
    const int r = term_open(&e);
    if (r != SHD_OK) {
        node_close(&t->node);
        return node_fail(r, &e);
    }
    if (t->interval_ms > TIMEOUT_MS_MIN && t->interval_ms < t->node.timeout_ms)
        t->node.timeout_ms = t->interval_ms;
    join_make(&t->node, &t->join);
    t->picture = (struct top_picture){
        .node = &t->node, .join = &t->join, .focus = TOP_WORKERS, .utf8 = text_is_utf8()
    };
    code = run_top(t);
    join_free(&t->join);
    node_close(&t->node);
    return code;
}

int verb_top(int argc, char **argv)
{
    const char *address = NULL, *hosts = NULL, *interval = NULL;
    struct top t = { .interval_ms = INTERVAL_MS };
    struct shd_err e = { 0 };
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(address),
        HOST_FLAG(hosts),
        { "interval", 'i', FLAG_STRING, "S", "ask the daemons every S seconds (1)", &interval, 0,
          0 },
    };
    const struct flags flags = VERB_FLAGS(top, "shardctl top [FLAGS]", table);
    const int code = verb_start(&flags, argc, argv, /* ret_rest= */ NULL);
    if (code >= 0)
        return code;
    if (interval != NULL && node_interval(interval, &t.interval_ms, &e) != SHD_OK)
        return ctl_usage("--interval: %s", e.text);
    if (!isatty(STDOUT_FILENO) || !isatty(STDIN_FILENO))
        return ctl_fail(
            "top needs a terminal; `shardctl status --watch` writes to files and pipes");
    text_init();
    return top_at(&t, address, hosts);
}
