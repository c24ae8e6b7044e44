/* See saver.h. */
#include "client/ctl/run/saver.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#include "client/ctl/base/child.h"
#include "client/ctl/base/say.h"
#include "client/ctl/run/launch.h"
#include "proto/base/check.h"

static void init(struct run *r, struct run_child *c, const char *name)
{
    *c = (struct run_child){ .run = r, .what = "helper", .relay.fd = -1 };
    snprintf(c->name, sizeof c->name, "%s", name);
}

void saver_init(struct run *r)
{
    init(r, &r->restorer, "restore");
    init(r, &r->saver, "checkpoint");
}

int saver_restore(struct run *r, struct shd_err *e)
{
    char self[PATH_MAX];
    char *argv[] = { self, (char[]){ "restore" }, (char *)r->options->restore, NULL };
    const int rc = child_find_self(self, sizeof self, e);
    return rc == SHD_OK ? launch_helper(&r->restorer, argv, e) : rc;
}

int saver_start(struct run *r, struct shd_err *e)
{
    const struct run_options *o = r->options;
    char self[PATH_MAX], every[12], keep[12];
    if (o->checkpoint == NULL)
        return SHD_OK;
    snprintf(every, sizeof every, "%" PRIu32, o->checkpoint_every);
    snprintf(keep, sizeof keep, "%" PRIu32, o->keep);
    char *argv[] = { self,
                     (char[]){ "checkpoint" },
                     (char *)o->checkpoint,
                     (char[]){ "--every" },
                     every,
                     o->keep > 0 ? (char[]){ "--keep" } : NULL,
                     keep,
                     NULL };
    const int rc = child_find_self(self, sizeof self, e);
    return rc == SHD_OK ? launch_helper(&r->saver, argv, e) : rc;
}

bool saver_gone(const struct run *r)
{
    return r->restorer.state == CHILD_GONE && r->saver.state == CHILD_GONE;
}

static void signal_both(const struct run *r, int sig)
{
    if (r->restorer.state == CHILD_RUNNING)
        child_signal(r->restorer.pid, sig);
    if (r->saver.state == CHILD_RUNNING)
        child_signal(r->saver.pid, sig);
}

bool saver_stop(const struct run *r)
{
    signal_both(r, SIGTERM);
    return !saver_gone(r);
}

void saver_kill(const struct run *r)
{
    signal_both(r, SIGKILL);
}

bool saver_failed(const struct run_child *c, int wait_status)
{
    if (wait_status != 0)
        ctl_say("%s %s", c->name, c->ended);
    return wait_status != 0;
}
