/* See headline.h. */
#include "proto/base/headline.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "proto/base/check.h"

#define SLOW_S    1.0
#define HALTED_S  0.2 /* for a process that does not run at all */
#define NODES_MAX 256u

struct node { /* a process */
    struct headline_process process;
    bool daemon;
    bool halted;
    bool named;   /* another one waits for it */
    bool blocked; /* it waits for another one itself */
};

struct edges { /* of a wait; NULL: a process that is not known, or the same one */
    struct node *who, *on[HEADLINE_ON_MAX];
};

struct graph {
    const struct headline_view *view;
    uint32_t node_count, wait_count;
    struct node nodes[NODES_MAX];
    struct edges edges[HEADLINE_WAITS_MAX]; /* of each wait that counts; of others nothing */
};

static const char *known(const char *text)
{
    return text != NULL ? text : "";
}

static bool is_halted(const struct headline_process *p)
{
    return strcmp(known(p->state), "stopped") == 0 || strcmp(known(p->state), "gone") == 0;
}

/* -- The graph ------------------------------------------------------------------------------- */

static struct node *find_node(struct graph *g, int64_t pid)
{
    for (uint32_t i = 0; i < g->node_count; i++)
        if (g->nodes[i].process.pid == pid)
            return &g->nodes[i];
    return NULL;
}

/* NULL: it has no pid, or there are too many. */
static struct node *add_node(struct graph *g, const struct headline_process *p)
{
    struct node *n = p->pid > 0 ? find_node(g, p->pid) : NULL;
    if (n == NULL && p->pid > 0 && g->node_count < NODES_MAX) {
        n = &g->nodes[g->node_count++];
        *n = (struct node){ .process = *p };
    }
    if (n == NULL)
        return NULL;
    if (known(n->process.state)[0] == '\0' || is_halted(p))
        n->process.state = p->state;
    n->halted = n->halted || is_halted(p);
    return n;
}

static bool is_long(const struct headline_wait *w)
{
    double least_s = SLOW_S;
    for (uint32_t i = 0; i < w->on_count; i++)
        if (is_halted(&w->on[i]))
            least_s = HALTED_S;
    return w->since_s >= least_s;
}

static void add_nodes(struct graph *g, const struct headline_wait *w, struct edges *ret_edges)
{
    struct edges e = { .who = add_node(g, &w->who) };
    for (uint32_t i = 0; i < w->on_count; i++) {
        e.on[i] = add_node(g, &w->on[i]);
        if (e.on[i] == e.who)
            e.on[i] = NULL;
    }
    *ret_edges = e;
}

/* A wait of one that does not run is none, and a short one is nothing that anybody is held up by.
 */
static void keep_edges(const struct headline_wait *w, struct edges *e)
{
    if (!is_long(w) || (e->who != NULL && e->who->halted))
        *e = (struct edges){ .who = NULL };
    for (uint32_t i = 0; i < w->on_count; i++)
        if (e->on[i] != NULL) {
            e->on[i]->named = true;
            if (e->who != NULL)
                e->who->blocked = true;
        }
}

static void make_graph(struct graph *g)
{
    const struct headline_view *v = g->view;
    for (uint32_t i = 0; i < v->daemon_count; i++) {
        struct node *n = add_node(g, &v->daemons[i].process);
        if (n != NULL)
            n->daemon = true;
    }
    g->wait_count = v->wait_count < HEADLINE_WAITS_MAX ? v->wait_count : HEADLINE_WAITS_MAX;
    for (uint32_t i = 0; i < g->wait_count; i++)
        add_nodes(g, &v->waits[i], &g->edges[i]);
    for (uint32_t i = 0; i < g->wait_count; i++)
        keep_edges(&v->waits[i], &g->edges[i]);
}

/* -- Roots ----------------------------------------------------------------------------------- */

struct root {
    const struct node *node;
    const struct headline_wait *wait; /* the longest of those that name it */
    uint32_t workers;                 /* that wait for it, or for who waits for it */
};

/* Marks the processes that wait for one that is marked, until there are no more. */
static void mark_behind(const struct graph *g, bool marked[NODES_MAX])
{
    bool more = true;
    while (more) {
        more = false;
        for (uint32_t i = 0; i < g->wait_count; i++) {
            const struct edges *e = &g->edges[i];
            if (e->who == NULL || marked[e->who - g->nodes])
                continue;
            for (uint32_t k = 0; k < HEADLINE_ON_MAX; k++)
                if (e->on[k] != NULL && marked[e->on[k] - g->nodes])
                    more = marked[e->who - g->nodes] = true;
        }
    }
}

static bool names(const struct edges *e, const struct node *node)
{
    for (uint32_t i = 0; i < HEADLINE_ON_MAX; i++)
        if (e->on[i] == node)
            return true;
    return false;
}

static struct root judge(const struct graph *g, const struct node *node)
{
    struct root r = { .node = node };
    bool marked[NODES_MAX] = { false };
    marked[node - g->nodes] = true;
    mark_behind(g, marked);
    for (uint32_t i = 0; i < g->node_count; i++)
        r.workers += marked[i] && &g->nodes[i] != node && !g->nodes[i].daemon;
    for (uint32_t i = 0; i < g->wait_count; i++) {
        const struct headline_wait *w = &g->view->waits[i];
        if (names(&g->edges[i], node) && (r.wait == NULL || w->since_s > r.wait->since_s))
            r.wait = w;
    }
    CHECK(r.wait != NULL); /* who is named is named by one */
    return r;
}

static bool is_worse(const struct root *a, const struct root *b)
{
    if (b->node == NULL || a->node->halted != b->node->halted)
        return b->node == NULL || a->node->halted;
    return a->workers != b->workers ? a->workers > b->workers : a->wait->since_s > b->wait->since_s;
}

static struct root find_root(const struct graph *g)
{
    struct root worst = { 0 };
    for (uint32_t i = 0; i < g->node_count; i++) {
        if (g->nodes[i].blocked || !g->nodes[i].named)
            continue;
        const struct root r = judge(g, &g->nodes[i]);
        if (is_worse(&r, &worst))
            worst = r;
    }
    return worst;
}

/* -- Words ----------------------------------------------------------------------------------- */

/* What the wait is for, out of its sentence: "micro-batch 1 of step 7" of "... waits 3.2 s for
 * micro-batch 1 of step 7: ...". */
static void say_what(const struct headline_wait *w, char *buf, size_t bytes)
{
    const char *at = strstr(known(w->text), " s for ");
    buf[0] = '\0';
    if (at == NULL)
        return;
    at += strlen(" s for ");
    const size_t length = strcspn(at, ":;");
    if (length > 0 && length + 4 < bytes && at[length] != '\0')
        snprintf(buf, bytes, " (%.*s)", (int)length, at);
}

static void say_worker(const struct root *r, struct headline *h)
{
    const struct headline_process *p = &r->node->process;
    const char *name = known(p->name)[0] != '\0' ? p->name : "worker";
    const bool gone = strcmp(known(p->state), "gone") == 0;
    char what[120];
    say_what(r->wait, what, sizeof what);
    const char *s = r->workers == 1 ? "" : "s";
    if (r->node->halted) {
        snprintf(h->text, sizeof h->text,
                 "%s (pid %" PRId64 ") is %s: %" PRIu32 " worker%s wait%s %.1f s for it%s", name,
                 p->pid, p->state, r->workers, s, r->workers == 1 ? "s" : "", r->wait->since_s,
                 what);
        if (gone)
            snprintf(h->remedy, sizeof h->remedy,
                     "start its rank again: it computes what it had not returned");
        else
            snprintf(h->remedy, sizeof h->remedy,
                     "kill -CONT %" PRId64 " lets it go on; after kill -9 %" PRId64
                     " `shardctl run` starts its rank again, and with --elastic others take its "
                     "work",
                     p->pid, p->pid);
        return;
    }
    snprintf(h->text, sizeof h->text,
             "%" PRIu32 " worker%s wait%s %.1f s for %s (pid %" PRId64 "%s%s)%s", r->workers, s,
             r->workers == 1 ? "s" : "", r->wait->since_s, name, p->pid,
             known(p->state)[0] != '\0' ? ", " : "", known(p->state), what);
    if (r->node->daemon)
        snprintf(h->remedy, sizeof h->remedy,
                 "the daemon is at work on it: `shardctl top` shows it");
    else
        snprintf(
            h->remedy, sizeof h->remedy,
            "it computes, or hangs: if no micro-batch takes so long look at it (gdb -p %" PRId64
            "), or kill -9 it and start its rank again",
            p->pid);
}

static void say_silent(const struct headline_daemon *d, uint32_t workers, double since_s,
                       struct headline *h)
{
    const struct headline_process *p = &d->process;
    const bool stopped = strcmp(known(p->state), "stopped") == 0;
    char pid[40] = "", waits[80] = "";
    if (p->pid > 0)
        snprintf(pid, sizeof pid, " (pid %" PRId64 ")", p->pid);
    if (workers > 0)
        snprintf(waits, sizeof waits, ": %" PRIu32 " worker%s wait%s %.1f s", workers,
                 workers == 1 ? "" : "s", workers == 1 ? "s" : "", since_s);
    h->halted = true;
    h->pid = p->pid;
    h->since_s = since_s;
    if (stopped) {
        snprintf(h->text, sizeof h->text, "daemon %s%s is stopped%s", known(p->name), pid, waits);
        snprintf(h->remedy, sizeof h->remedy,
                 "kill -CONT %" PRId64 " lets it go on; after kill -9 %" PRId64
                 ", or in 30 s by itself, its keeper starts it again with its state",
                 p->pid, p->pid);
    } else if (d->answers) {
        snprintf(h->text, sizeof h->text,
                 "daemon %s%s is stuck: its event loop has not turned for %.1f s%s", known(p->name),
                 pid, d->stuck_s, waits);
        snprintf(h->remedy, sizeof h->remedy,
                 "its keeper's watchdog starts it again with its state, when it lasts");
    } else {
        snprintf(h->text, sizeof h->text, "daemon %s%s does not answer%s%s%s", known(p->name), pid,
                 waits, known(d->why)[0] != '\0' ? "; " : "", known(d->why));
        snprintf(h->remedy, sizeof h->remedy,
                 "its keeper starts it again with its state; what it says of it is in DIR/up.log "
                 "or `journalctl -u shardd@%s`",
                 known(p->name));
    }
}

/* Nobody is named: the longest wait, in its own words. */
static bool say_unnamed(const struct headline_wait *w, struct headline *h)
{
    if (w == NULL)
        return false;
    const bool nobody = strstr(known(w->text), "nobody is known to have") != NULL ||
                        strstr(known(w->text), "no trainer is attached") != NULL;
    snprintf(h->text, sizeof h->text, "%s", known(w->text));
    snprintf(h->remedy, sizeof h->remedy,
             nobody ? "start the worker whose share that is (its RANK), or run with --elastic"
                    : "the daemons are at work on it: `shardctl top` shows whether they go on");
    h->since_s = w->since_s;
    return true;
}

/* -- All of it ------------------------------------------------------------------------------- */

static const struct headline_daemon *find_silent(const struct headline_view *v)
{
    const struct headline_daemon *found = NULL;
    for (uint32_t i = 0; i < v->daemon_count; i++) {
        const struct headline_daemon *d = &v->daemons[i];
        if (d->answers && d->stuck_s <= 0)
            continue;
        if (found == NULL || (!is_halted(&found->process) && is_halted(&d->process)))
            found = d;
    }
    return found;
}

/* Workers that wait long, for whatever, and the longest of their waits; NULL: none. */
static const struct headline_wait *longest_wait(struct graph *g, uint32_t *ret_workers)
{
    const struct headline_wait *longest = NULL;
    bool counted[NODES_MAX] = { false };
    *ret_workers = 0;
    for (uint32_t i = 0; i < g->wait_count; i++) {
        const struct headline_wait *w = &g->view->waits[i];
        const struct node *who = find_node(g, w->who.pid);
        if (w->since_s < SLOW_S || is_halted(&w->who) || (who != NULL && who->halted))
            continue;
        if (who != NULL && !who->daemon && !counted[who - g->nodes]) {
            counted[who - g->nodes] = true;
            ++*ret_workers;
        }
        if (longest == NULL || w->since_s > longest->since_s)
            longest = w;
    }
    return longest;
}

bool headline_make(const struct headline_view *view, struct headline *ret_headline)
{
    struct headline h = { .pid = 0 };
    struct graph g = { .view = view };
    uint32_t workers;
    make_graph(&g);
    const struct headline_wait *longest = longest_wait(&g, &workers);
    const struct headline_daemon *silent = find_silent(view);
    const struct root root = find_root(&g);
    bool said = true;
    if (silent != NULL) {
        say_silent(silent, workers, longest != NULL ? longest->since_s : 0, &h);
    } else if (root.node != NULL) {
        say_worker(&root, &h);
        h.pid = root.node->process.pid;
        h.since_s = root.wait->since_s;
        h.halted = root.node->halted;
    } else {
        said = say_unnamed(longest, &h);
    }
    *ret_headline = h;
    return said;
}
