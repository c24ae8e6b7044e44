/* See elastic.h. */
#include "client/ctl/run/elastic.h"

#include <inttypes.h>
#include <signal.h>

#include "client/ctl/base/child.h"
#include "client/ctl/base/say.h"
#include "proto/base/check.h"

/* The lowest rank that nobody has; NULL when all are taken. */
static struct run_child *free_rank(struct run *r)
{
    for (uint32_t i = 0; i < r->options->workers.last; i++)
        if (r->workers[i].state == CHILD_GONE)
            return &r->workers[i];
    return NULL;
}

void elastic_join(struct run *r)
{
    const uint32_t max = r->options->workers.last;
    if (r->phase == RUN_STARTING && r->workers_wanted < max) {
        r->workers_wanted++;
        return;
    }
    if (r->phase > RUN_WORKING)
        return;
    struct run_child *c = r->phase == RUN_WORKING ? free_rank(r) : NULL;
    if (c == NULL) {
        ctl_say("no worker added: there are %" PRIu32 " already (--workers)", max);
        return;
    }
    c->ended[0] = '\0'; /* nobody's successor */
    c->order = ++r->order;
    c->leaving = false;
    c->state = CHILD_WAITING; /* the rank's last owner may have left its pipe to the loop */
    uv_timer_start(&c->timer, r->child_timer, 0, 0);
}

/* The newest worker that was not asked to leave; *ret_staying: how many there are of those. */
static struct run_child *newest(struct run *r, uint32_t *ret_staying)
{
    struct run_child *found = NULL;
    *ret_staying = 0;
    for (uint32_t i = 0; i < r->options->workers.last; i++) {
        struct run_child *c = &r->workers[i];
        if (c->state == CHILD_GONE || c->leaving)
            continue;
        (*ret_staying)++;
        if (found == NULL || c->order >= found->order)
            found = c;
    }
    return found;
}

void elastic_leave(struct run *r)
{
    const uint32_t min = r->options->workers.first;
    if (r->phase == RUN_STARTING && r->workers_wanted > min) {
        r->workers_wanted--;
        return;
    }
    if (r->phase > RUN_WORKING)
        return;
    uint32_t staying = 0;
    struct run_child *c = r->phase == RUN_WORKING ? newest(r, &staying) : NULL;
    if (c == NULL || staying <= min) {
        ctl_say("no worker asked to leave: %" PRIu32 " must stay (--workers)", min);
        return;
    }
    if (c->state == CHILD_WAITING) { /* about to be started */
        uv_timer_stop(&c->timer);
        c->state = CHILD_GONE;
        ctl_say("worker %s left", c->name);
        return;
    }
    c->leaving = true;
    ctl_say("worker %s (pid %ld) is asked to leave", c->name, (long)c->pid);
    child_signal(c->pid, SIGTERM);
    uv_timer_start(&c->timer, r->child_timer, (uint64_t)r->options->grace_s * 1000, 0);
}
