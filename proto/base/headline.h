/* Who holds training up: the root of the graph of who waits for whom, in one sentence, and what to
 * do about it. One function for all who show it: a daemon's /status, shardctl's verbs and page, and
 * the errors of a worker that gives up. Pure.
 *
 *     worker a ── waits for ──▶ worker b ── waits for ──▶ worker c, stopped: the root
 *
 * A daemon that does not answer comes first, for every owner takes part in every step. Else it is
 * one that others wait for and that waits for nobody itself: one that is stopped or gone before one
 * that runs, then the one with the most that wait for it, then with the longest wait. Who is
 * stopped last spoke before it was: what it says it waits for counts for nothing. Waits below a
 * second are how training works and make no headline.
 */
#ifndef SHD_HEADLINE_H
#define SHD_HEADLINE_H

#include <stdbool.h>
#include <stdint.h>

#define HEADLINE_BYTES     320u
#define HEADLINE_ON_MAX    8u
#define HEADLINE_WAITS_MAX 256u

struct headline_process { /* strings are borrowed, "" or NULL where not known */
    int64_t pid;          /* 0: not known */
    const char *name;     /* of its session: "shd-gpt"; of a daemon its device */
    const char *state;    /* "running", "stopped", "gone", ... (process.h) */
};

struct headline_wait {
    struct headline_process who;
    struct headline_process on[HEADLINE_ON_MAX];
    uint32_t on_count;
    const char *text; /* in words: "A (pid 1) waits 3.2 s for B: ..." */
    double since_s;
};

struct headline_daemon {
    struct headline_process process;
    bool answers;
    const char *why; /* it does not */
    double stuck_s;  /* its event loop has not turned for so long; 0: it turns */
};

struct headline_view {
    const struct headline_daemon *daemons; /* borrowed, [daemon_count] */
    const struct headline_wait *waits;     /* borrowed, [wait_count]; the longest first: the first
                                            * HEADLINE_WAITS_MAX count */
    uint32_t daemon_count, wait_count;
};

struct headline {
    char text[HEADLINE_BYTES];   /* "shd-gpt (pid 13) is stopped: 2 workers wait 4.2 s for it" */
    char remedy[HEADLINE_BYTES]; /* what to do */
    int64_t pid;                 /* of the root; 0: none is known */
    double since_s;              /* the longest wait for it */
    bool halted;                 /* it is stopped, gone or stuck: it does not go on by itself */
};

/* False: nothing is held up. ret_headline is empty then. */
bool headline_make(const struct headline_view *view, struct headline *ret_headline);

#endif
