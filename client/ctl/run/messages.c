/* See messages.h. */
#include "client/ctl/run/messages.h"

#include "client/ctl/run/notify.h"

/* A daemon that is not ready yet goes on, and asks for ms from here on. */
static void allow_more(struct run_child *c, uint64_t ms)
{
    if (uv_is_active((uv_handle_t *)&c->timer) && uv_timer_get_due_in(&c->timer) < ms)
        uv_timer_start(&c->timer, c->run->child_timer, ms, 0);
}

static void daemon_says(struct run_child *c, struct notify_message *m)
{
    keeper_take(&c->kept, m, c->name);
    c->drained = c->drained || m->drained;
    if (!c->ready && m->more_us > 0)
        allow_more(c, m->more_us / 1000);
    if (!m->ready || c->ready)
        return;
    c->ready = true;
    c->early = 0;
    uv_timer_stop(&c->timer);
    run_note(c->run, "daemon %s is ready", c->name);
}

void messages_take(struct run *r)
{
    struct notify_message m;
    for (int got = notify_take(r->notify_fd, &m); got >= 0; got = notify_take(r->notify_fd, &m)) {
        if (got == 0)
            continue;
        for (uint32_t i = 0; i < r->options->daemons; i++)
            if (r->daemons[i].state == CHILD_RUNNING && r->daemons[i].pid == m.pid)
                daemon_says(&r->daemons[i], &m);
        notify_close(&m);
    }
}
