/* See status_join.h. */
#include "client/ctl/watch/status_join.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/base/text.h"
#include "proto/base/check.h"

#define SLOW_S 1.0 /* shorter waits are how training works */

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

static double or_zero(double x)
{
    return isnan(x) ? 0 : x;
}

/* Of one that several daemons report the longest counts: who began to wait there first waits. */
static void add_wait(struct join *j, const struct doc_wait *w)
{
    for (uint32_t i = 0; i < j->wait_count; i++) {
        if (!same_wait(&j->waits[i].w, w))
            continue;
        if (or_zero(w->since_s) > or_zero(j->waits[i].w.since_s))
            j->waits[i].w = *w;
        j->waits[i].daemons++;
        return;
    }
    if (j->wait_count < JOIN_WAITS_MAX)
        j->waits[j->wait_count++] = (struct join_wait){ .w = *w, .daemons = 1 };
}

static int compare_waits(const void *a, const void *b)
{
    const double x = or_zero(((const struct join_wait *)a)->w.since_s);
    const double y = or_zero(((const struct join_wait *)b)->w.since_s);
    return x < y ? 1 : x > y ? -1 : 0;
}

/* -- Who holds up ---------------------------------------------------------------------------- */

static bool on_has(const struct doc_wait *w, double pid)
{
    for (uint32_t i = 0; i < w->on_count; i++)
        if (same_pid(w->on[i].pid, pid))
            return true;
    return false;
}

/* Counts the different workers that wait for this one, with the longest wait. */
static void count_waits_for(const struct join *j, struct join_worker *worker)
{
    const double pid = worker->s.pid;
    for (uint32_t i = 0; i < j->wait_count; i++) {
        const struct doc_wait *w = &j->waits[i].w;
        if (!on_has(w, pid) || same_pid(w->who.pid, pid))
            continue;
        bool counted = false;
        for (uint32_t k = 0; k < i; k++)
            counted = counted ||
                      (same_pid(j->waits[k].w.who.pid, w->who.pid) && on_has(&j->waits[k].w, pid));
        worker->waited_for += !counted;
        worker->waited_s = fmax(worker->waited_s, or_zero(w->since_s));
    }
}

static struct headline_process process_of(const struct doc_peer *p)
{
    const bool is_pid = p->pid >= 1 && p->pid <= INT32_MAX;
    return (struct headline_process){ .pid = is_pid ? (int64_t)p->pid : 0,
                                      .name = p->name,
                                      .state = p->state };
}

static struct headline_wait wait_of(const struct doc_wait *w)
{
    struct headline_wait wait = { .who = process_of(&w->who),
                                  .on_count = w->on_count,
                                  .text = w->text,
                                  .since_s = or_zero(w->since_s) };
    for (uint32_t i = 0; i < w->on_count; i++)
        wait.on[i] = process_of(&w->on[i]);
    return wait;
}

static struct headline_daemon daemon_of(const struct node_daemon *d)
{
    const struct doc_peer p = { .pid = d->up ? d->doc->pid : (double)d->pid };
    struct headline_daemon daemon = { .process = process_of(&p),
                                      .answers = d->up || !d->asked,
                                      .why = d->why.text };
    daemon.process.name = d->device;
    daemon.process.state = d->up ? "" : d->state;
    if (d->up && d->doc->stale_ms > NODE_STALE_MS)
        daemon.stuck_s = d->doc->stale_ms / 1000;
    return daemon;
}

_Static_assert(DOC_ON_MAX <= HEADLINE_ON_MAX && JOIN_WAITS_MAX <= HEADLINE_WAITS_MAX,
               "all of them");

static void find_headline(const struct node *n, struct join *j)
{
    struct headline_daemon *daemons = calloc(n->count + 1u, sizeof(*daemons));
    struct headline_wait *waits = calloc(j->wait_count + 1u, sizeof(*waits));
    if (daemons != NULL && waits != NULL) {
        const struct headline_view view = { daemons, waits, n->count, j->wait_count };
        for (uint32_t i = 0; i < n->count; i++)
            daemons[i] = daemon_of(&n->daemons[i]);
        for (uint32_t i = 0; i < j->wait_count; i++)
            waits[i] = wait_of(&j->waits[i].w);
        j->held_up = headline_make(&view, &j->headline);
    }
    free(daemons);
    free(waits);
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
    for (uint32_t i = 0; i < j.worker_count; i++)
        count_waits_for(&j, &j.workers[i]);
    find_headline(n, &j);
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
