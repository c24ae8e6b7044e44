/* See status_join.h. */
#include "client/ctl/watch/status_join.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/base/text.h"
#include "proto/base/check.h"

/* Shorter waits are how training works. */
#define SLOW_S         1.0
#define SLOW_STOPPED_S 0.2 /* for a process that does not run at all */

static bool same_pid(double a, double b)
{
    return a == b; /* NAN is nobody */
}

/* -- Workers --------------------------------------------------------------------------------- */

static struct join_worker *find_worker(const struct join *j, double pid)
{
    for (uint32_t i = 0; i < j->worker_count; i++)
        if (same_pid(j->workers[i].s.pid, pid))
            return &j->workers[i];
    return NULL;
}

static double plus(double a, double b)
{
    return isnan(a) ? b : isnan(b) ? a : a + b;
}

/* Another session of a worker: the latest word counts. */
static void merge_worker(struct join_worker *w, const struct doc_session *s, double told_ns)
{
    struct doc_session both = told_ns > w->told_ns ? *s : w->s;
    const struct doc_session *other = told_ns > w->told_ns ? &w->s : s;
    if (both.now.what[0] == '\0')
        both.now = other->now; /* a worker tells one daemon only */
    if (both.path[0] == '\0')
        memcpy(both.path, other->path, sizeof(both.path));
    both.slots = plus(w->s.slots, s->slots);
    both.slots_waiting = plus(w->s.slots_waiting, s->slots_waiting);
    w->s = both;
    w->told_ns = fmax(w->told_ns, told_ns);
    w->daemons++;
}

static void add_worker(struct join *j, const struct doc_session *s, double told_ns)
{
    struct join_worker *w = find_worker(j, s->pid);
    if (w != NULL) {
        merge_worker(w, s, told_ns);
        return;
    }
    if (j->worker_count < JOIN_WORKERS_MAX)
        j->workers[j->worker_count++] = (struct join_worker){ .s = *s,
                                                              .told_ns = told_ns,
                                                              .daemons = 1 };
}

/* -- Waits ----------------------------------------------------------------------------------- */

static bool same_wait(const struct doc_wait *a, const struct doc_wait *b)
{
    if (strcmp(a->kind, b->kind) != 0 || a->on_count != b->on_count ||
        (!same_pid(a->who.pid, b->who.pid) && !(isnan(a->who.pid) && isnan(b->who.pid))))
        return false;
    for (uint32_t i = 0; i < a->on_count; i++)
        if (!same_pid(a->on[i].pid, b->on[i].pid))
            return false;
    return true;
}

static void add_wait(struct join *j, const struct doc_wait *w)
{
    for (uint32_t i = 0; i < j->wait_count; i++) {
        if (!same_wait(&j->waits[i].w, w))
            continue;
        if (w->since_s > j->waits[i].w.since_s)
            j->waits[i].w = *w;
        j->waits[i].daemons++;
        return;
    }
    if (j->wait_count < JOIN_WAITS_MAX)
        j->waits[j->wait_count++] = (struct join_wait){ .w = *w, .daemons = 1 };
}

static double or_zero(double x)
{
    return isnan(x) ? 0 : x;
}

static int compare_waits(const void *a, const void *b)
{
    const double x = or_zero(((const struct join_wait *)a)->w.since_s);
    const double y = or_zero(((const struct join_wait *)b)->w.since_s);
    return x < y ? 1 : x > y ? -1 : 0;
}

/* -- The slowest worker ---------------------------------------------------------------------- */

static bool on_has(const struct doc_wait *w, double pid)
{
    for (uint32_t i = 0; i < w->on_count; i++)
        if (same_pid(w->on[i].pid, pid))
            return true;
    return false;
}

static bool is_slow(const struct doc_wait *w, const struct doc_peer *on)
{
    const bool stopped = strcmp(on->state, "stopped") == 0 || strcmp(on->state, "gone") == 0;
    return w->since_s >= (stopped ? SLOW_STOPPED_S : SLOW_S);
}

/* True when the process itself waits for another, which is to blame then. */
static bool waits_itself(const struct join *j, double pid)
{
    for (uint32_t i = 0; i < j->wait_count; i++) {
        const struct doc_wait *w = &j->waits[i].w;
        if (!same_pid(w->who.pid, pid) || w->since_s < SLOW_S)
            continue;
        for (uint32_t k = 0; k < w->on_count; k++)
            if (!same_pid(w->on[k].pid, pid) && !isnan(w->on[k].pid))
                return true;
    }
    return false;
}

struct culprit {
    const struct doc_peer *peer;
    uint32_t workers; /* that wait for it */
    double since_s;   /* the longest */
};

/* Counts the different workers that wait for peer, with the longest wait. */
static struct culprit judge(const struct join *j, const struct doc_peer *peer)
{
    struct culprit c = { .peer = peer };
    for (uint32_t i = 0; i < j->wait_count; i++) {
        const struct doc_wait *w = &j->waits[i].w;
        if (!on_has(w, peer->pid) || same_pid(w->who.pid, peer->pid))
            continue;
        bool counted = false;
        for (uint32_t k = 0; k < i; k++)
            counted = counted || (same_pid(j->waits[k].w.who.pid, w->who.pid) &&
                                  on_has(&j->waits[k].w, peer->pid));
        c.workers += !counted;
        c.since_s = fmax(c.since_s, or_zero(w->since_s));
    }
    return c;
}

static void say_slowest(struct join *j, const struct culprit *c)
{
    char since[TEXT_BYTES];
    const struct doc_peer *p = c->peer;
    snprintf(j->slowest, sizeof(j->slowest), "%s pid %.0f%s%s: %u worker%s wait%s %s for it",
             p->name[0] != '\0' ? p->name : "worker", p->pid, p->state[0] != '\0' ? " " : "",
             p->state, c->workers, c->workers == 1 ? "" : "s", c->workers == 1 ? "s" : "",
             text_time(c->since_s, since));
}

static bool named_before(const struct join *j, uint32_t wait, double pid)
{
    for (uint32_t i = 0; i < wait; i++)
        if (on_has(&j->waits[i].w, pid))
            return true;
    return false;
}

/* Name the process that holds up the most, of those that do not wait themselves. */
static void find_slowest(struct join *j)
{
    struct culprit worst = { 0 };
    for (uint32_t i = 0; i < j->wait_count; i++) {
        const struct doc_wait *w = &j->waits[i].w; /* the longest first: is_slow() of the first */
        for (uint32_t k = 0; k < w->on_count; k++) {
            const struct doc_peer *on = &w->on[k];
            if (isnan(on->pid) || named_before(j, i, on->pid))
                continue;
            const struct culprit c = judge(j, on);
            struct join_worker *worker = find_worker(j, on->pid);
            if (worker != NULL) {
                worker->waited_for = c.workers;
                worker->waited_s = c.since_s;
            }
            if (c.workers == 0 || !is_slow(w, on) || waits_itself(j, on->pid))
                continue;
            if (c.workers > worst.workers ||
                (c.workers == worst.workers && c.since_s > worst.since_s))
                worst = c;
        }
    }
    if (worst.workers > 0)
        say_slowest(j, &worst);
}

/* -- All of it ------------------------------------------------------------------------------- */

void join_make(const struct node *n, struct join *ret_join)
{
    struct join j = { 0 };
    j.workers = calloc(JOIN_WORKERS_MAX, sizeof(*j.workers));
    j.waits = calloc(JOIN_WAITS_MAX, sizeof(*j.waits));
    for (uint32_t i = 0; i < n->count && j.workers != NULL && j.waits != NULL; i++) {
        const struct doc *d = n->daemons[i].doc;
        if (!n->daemons[i].up)
            continue;
        const double told_ns = (double)n->daemons[i].up_ns - or_zero(d->stale_ms) * 1e6;
        for (uint32_t k = 0; k < d->session_count; k++)
            add_worker(&j, &d->sessions[k], told_ns);
        for (uint32_t k = 0; k < d->wait_count; k++)
            add_wait(&j, &d->waits[k]);
    }
    if (j.wait_count > 1)
        qsort(j.waits, j.wait_count, sizeof(*j.waits), compare_waits);
    find_slowest(&j);
    *ret_join = j;
}

void join_free(struct join *j)
{
    free(j->workers);
    free(j->waits);
    *j = (struct join){ 0 };
}

const char *join_now(const struct doc_now *s, char *buf, size_t bytes)
{
    char micro[TEXT_BYTES], step[TEXT_BYTES];
    int n = snprintf(buf, bytes, "%s", s->what[0] != '\0' ? s->what : "-");
    if (s->unit[0] != '\0' && n < (int)bytes)
        n += snprintf(buf + n, bytes - (size_t)n, " %s", s->unit);
    if (isfinite(s->micro) && n < (int)bytes)
        n += snprintf(buf + n, bytes - (size_t)n, ", micro %s", text_count(s->micro, micro));
    if (isfinite(s->step) && n < (int)bytes)
        snprintf(buf + n, bytes - (size_t)n, ", step %s", text_count(s->step, step));
    return buf;
}

/* -- Order ----------------------------------------------------------------------------------- */

static int badness(const struct join_worker *w)
{
    if (strcmp(w->s.state, "gone") == 0)
        return 3;
    if (strcmp(w->s.state, "stopped") == 0)
        return 2;
    return w->waited_s >= SLOW_S;
}

static int by_number(double a, double b)
{
    return or_zero(a) < or_zero(b) ? -1 : or_zero(a) > or_zero(b);
}

static int by_pid(const void *a, const void *b)
{
    return by_number(((const struct join_worker *)a)->s.pid,
                     ((const struct join_worker *)b)->s.pid);
}

static int by_badness(const void *a, const void *b)
{
    const int x = badness(a), y = badness(b);
    return x != y ? y - x : by_pid(a, b);
}

static int by_name(const void *a, const void *b)
{
    const struct join_worker *x = a, *y = b;
    const int order = strcmp(x->s.name, y->s.name);
    return order != 0 ? order : by_pid(a, b);
}

static int by_since(const void *a, const void *b)
{
    const struct join_worker *x = a, *y = b;
    const int order = by_number(y->s.now.since_s, x->s.now.since_s);
    return order != 0 ? order : by_pid(a, b);
}

static const struct {
    const char *name;
    int (*compare)(const void *a, const void *b);
} sorts[JOIN_SORTS] = {
    [JOIN_WORST] = { "worst", by_badness },
    [JOIN_PID] = { "pid", by_pid },
    [JOIN_NAME] = { "name", by_name },
    [JOIN_SINCE] = { "longest", by_since },
};

const char *join_sort_name(enum join_sort sort)
{
    CHECK(sort < JOIN_SORTS);
    return sorts[sort].name;
}

void join_sort(struct join *j, enum join_sort sort)
{
    CHECK(sort < JOIN_SORTS);
    if (j->worker_count > 1)
        qsort(j->workers, j->worker_count, sizeof(*j->workers), sorts[sort].compare);
}
