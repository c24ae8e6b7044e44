/* See watchdog.h. */
#include "client/ctl/run/watchdog.h"

#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>

#include "client/ctl/base/child.h"
#include "client/ctl/base/rundir.h"
#include "client/ctl/base/say.h"
#include "proto/base/dir.h"

static bool is_due(const struct run_child *c)
{
    return c->silent > WATCHDOG_LOOKS;
}

/* Kill c, or say why it is left alone; it has the whole time again. */
static void end_silent(struct run_child *c, const char *what, const char *did)
{
    const uint32_t seconds = c->run->options->watchdog_s;
    const pid_t tracer = child_tracer(c->pid);
    c->silent = 0;
    if (tracer > 0) {
        ctl_say("%s %s (pid %ld) %s %" PRIu32 " s (--watchdog): left alone, process %ld traces it",
                what, c->name, (long)c->pid, did, seconds, (long)tracer);
        return;
    }
    ctl_say("%s %s (pid %ld) %s %" PRIu32 " s (--watchdog): killing it", what, c->name,
            (long)c->pid, did, seconds);
    child_signal(c->pid, SIGKILL);
}

/* -- Daemons --------------------------------------------------------------------------------- */

void watchdog_fed(struct run_child *daemon)
{
    daemon->silent = 0;
}

static void look_at_daemons(struct run *r)
{
    for (uint32_t i = 0; i < r->daemons.count; i++) {
        struct run_child *c = &r->daemons.list[i];
        if (c->state != CHILD_RUNNING || !c->ready)
            continue;
        c->silent++;
        if (is_due(c))
            end_silent(c, r->daemons.what, "has not said that it is well for");
    }
}

/* -- Workers and helpers --------------------------------------------------------------------- */

static void note_stopped(struct run_children *children, pid_t group)
{
    for (uint32_t i = 0; i < children->count; i++)
        if (children->list[i].state == CHILD_RUNNING && children->list[i].pid == group)
            children->list[i].stopped = true;
}

/* A worker may be a shell that waits for the process which is stopped, so all of its group count.
 */
static void find_stopped(struct run *r)
{
    struct child_stat stat;
    DIR *proc = opendir("/proc");
    for (const char *name = dir_next(&proc); name != NULL; name = dir_next(&proc)) {
        if (!child_stat(name, &stat) || stat.state != 'T')
            continue;
        note_stopped(&r->workers, stat.group);
        note_stopped(&r->helpers, stat.group);
    }
}

static void look_at(struct run_children *children)
{
    for (uint32_t i = 0; i < children->count; i++) {
        struct run_child *c = &children->list[i];
        c->silent = c->stopped ? c->silent + 1 : 0;
        c->stopped = false;
        if (is_due(c))
            end_silent(c, children->what, "was stopped for");
    }
}

static void look(uv_timer_t *timer)
{
    struct run *r = timer->data;
    look_at_daemons(r);
    find_stopped(r);
    look_at(&r->workers);
    look_at(&r->helpers);
}

void watchdog_init(struct run *r)
{
    const uint64_t ms = (uint64_t)r->options->watchdog_s * 1000 / WATCHDOG_LOOKS;
    uv_timer_init(&r->loop, &r->watchdog);
    r->watchdog.data = r;
    if (ms > 0)
        uv_timer_start(&r->watchdog, look, ms, ms);
}
