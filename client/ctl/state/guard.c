/* See guard.h. */
#include "client/ctl/state/guard.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/checkpoint/dir.h"
#include "client/ctl/base/child.h"
#include "client/ctl/base/say.h"
#include "proto/base/check.h"
#include "proto/base/dir.h"

#define GONE_TRIES 100 /* of 20 ms: a child in fsync() dies when the disk is done */

static const int ending[] = { SIGINT, SIGTERM, SIGHUP, SIGQUIT };

/* Those of ending[] that who started us lets through (nohup, a shell's &), and SIGCHLD. */
static void make_set(sigset_t *set)
{
    struct sigaction old;
    sigemptyset(set);
    sigaddset(set, SIGCHLD);
    for (size_t i = 0; i < ARRAY_SIZE(ending); i++)
        if (sigaction(ending[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN)
            sigaddset(set, ending[i]);
}

/* In the child. What a terminal sends to both of us is for the parent to act on. */
static int work(const struct guarded *g, pid_t parent, const sigset_t *before)
{
    sigset_t mask = *before;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        return CTL_FAILED;
    for (size_t i = 0; i < ARRAY_SIZE(ending); i++) /* SIG_IGN would drop one that waits already */
        signal(ending[i], ending[i] == SIGTERM && g->on_term != NULL ? g->on_term : SIG_IGN);
    if (g->on_term != NULL)
        sigdelset(&mask, SIGTERM);
    sigprocmask(SIG_SETMASK, &mask, NULL);
    const int code = g->work(g->arg);
    if (fflush(stdout) == 0)
        return code;
    return ctl_fail("cannot write the output: %s", strerror(errno));
}

/* -- Clearing away ------------------------------------------------------------------------------
 */

/* Opened to save in, a directory loses what dead savers left in it. */
static void clear_one(const char *dir, pid_t pid)
{
    char path[PATH_MAX];
    struct checkpoint_dir d;
    if (snprintf(path, sizeof path, "%s/" CHECKPOINT_PARTIAL, dir, (int)pid) >= (int)sizeof path ||
        access(path, F_OK) != 0)
        return;
    (void)checkpoint_dir_lock(&d, dir, (uid_t)-1, NULL); /* where it fails the next saver does it */
    checkpoint_dir_close(&d);
}

/* dir, and the directories of models in it. */
static void clear_away(const char *path, pid_t pid)
{
    DIR *dir = opendir(path);
    clear_one(path, pid);
    for (const char *name = dir_next(&dir); name != NULL; name = dir_next(&dir)) {
        char sub[PATH_MAX];
        if (name[0] != '.' && snprintf(sub, sizeof sub, "%s/%s", path, name) < (int)sizeof sub)
            clear_one(sub, pid);
    }
}

static int break_off(const struct guarded *g, pid_t pid, int sig)
{
    pid_t gone = 0;
    kill(pid, SIGKILL);
    for (int i = 0; i < GONE_TRIES && gone == 0; i++) {
        gone = waitpid(pid, NULL, WNOHANG);
        if (gone == 0)
            nanosleep(&(struct timespec){ .tv_nsec = 20 * 1000 * 1000 }, NULL);
    }
    if (g->dir != NULL)
        clear_away(g->dir, pid);
    ctl_say("got SIG%s: %s", sigabbrev_np(sig), g->broken);
    return 128 + sig;
}

/* -- Watching -----------------------------------------------------------------------------------
 */

/* The exit code of a child that has ended by itself; -1: it goes on. */
static int look(pid_t pid)
{
    char how[64];
    int status = 0;
    if (waitpid(pid, &status, WNOHANG) != pid)
        return -1;
    if (WIFSIGNALED(status))
        ctl_say("the work (pid %ld) %s", (long)pid, child_describe(status, how, sizeof how));
    return child_code(status);
}

int guard_run(const struct guarded *g)
{
    sigset_t set, before;
    bool term_passed = g->on_term == NULL;
    int code = -1;
    make_set(&set);
    sigprocmask(SIG_BLOCK, &set, &before);
    fflush(stdout); /* or it comes twice */
    const pid_t parent = getpid(), pid = fork();
    if (pid < 0)
        return ctl_fail("start a process: %s", strerror(errno));
    if (pid == 0)
        exit(work(g, parent, &before));
    while (code < 0) {
        const int sig = sigwaitinfo(&set, NULL);
        if (sig == SIGCHLD) {
            code = look(pid);
        } else if (sig == SIGTERM && !term_passed) {
            term_passed = true;
            kill(pid, SIGTERM);
        } else if (sig > 0) {
            code = break_off(g, pid, sig);
        }
    }
    sigprocmask(SIG_SETMASK, &before, NULL);
    return code;
}
