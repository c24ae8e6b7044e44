/* One process that shardctl started: how it is started, signalled and described, and its
 * environment.
 *
 * Each child leads a process group of its own, so that a Ctrl-C at the terminal reaches shardctl
 * alone, which passes it on once, and so that whatever the child started goes with it. A child is
 * killed by the kernel when shardctl dies (PR_SET_PDEATHSIG).
 */
#ifndef SHD_CTL_CHILD_H
#define SHD_CTL_CHILD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "proto/base/status.h"

#define CHILD_FDS_MAX   4096u
#define CHILD_PID_BYTES 12u /* a pid as text, with its NUL */

struct child_spawn {
    char *const *argv;          /* argv[0] is looked up in PATH unless it has a slash */
    char *const *envp;          /* NULL-terminated "NAME=value" */
    int in, out, err;           /* become 0, 1, 2; stay the caller's */
    const struct rlimit *files; /* RLIMIT_NOFILE for the child; NULL: as ours */
    const int *fds;             /* become 3, 4, ...; each a different one, at least 3 */
    uint32_t fd_count;          /* at most CHILD_FDS_MAX */
    char *listen_pid;           /* in envp, CHILD_PID_BYTES: gets the child's pid; NULL: nothing */
};

/* The path of this program: "/proc/self/exe" would be another by the time a child looks. */
int child_find_self(char *buf, size_t bytes, struct shd_err *e);

/* The daemon to start: $SHARDD_BIN, else shardd beside this program, else "shardd", by PATH.
 * Errors: SHD_ENOENT $SHARDD_BIN is not there. */
int child_find_shardd(char *buf, size_t bytes, struct shd_err *e);

/* Start it: argv[0] by PATH, else in the folder of this program. Returns once it has exec'ed, so a
 * missing program is an error here: SHD_ENOENT/SHD_EIO "cannot run 'x': ...". */
int child_spawn(const struct child_spawn *spawn, pid_t *ret_pid, struct shd_err *e);

/* Signal the process and the group it leads, stopped ones included. */
void child_signal(pid_t pid, int sig);

/* The exit code that a shell would give an ended child: its code, or 128 + signal. */
int child_code(int wait_status);

/* "exited with code 3" or "was killed by signal 9 (SIGKILL)" into buf; returns buf. */
const char *child_describe(int wait_status, char *buf, size_t bytes);

struct child_stat {
    char state; /* 'R', 'S', 'T' (stopped by a signal), 't' (by its tracer), 'Z', ... */
    pid_t parent, group;
};

/* Of any process, from /proc. False: gone, or pid is none. */
bool child_stat(const char *pid, struct child_stat *ret_stat);

/* The process that traces this one, as a debugger does; 0: none. */
pid_t child_tracer(pid_t pid);

/* True when this process has a child: at start, one inherited by exec, which is not ours to end. */
bool child_any(void);

/* Processes whose parent died and left them to us (we are their subreaper): kill and reap those
 * that are there now. Call when no child of our own is left. */
void child_end_orphans(void);

/* -- Its environment: ours, with some variables set and some taken out ---------------------------
 */

struct environ {
    char *text; /* owned: "NAME=value" each behind its NUL, as <envz.h> has them */
    size_t bytes;
};

/* A copy of this process's environment without what a service manager set for us alone
 * (NOTIFY_SOCKET, LISTEN_FDS ...). Errors: SHD_ENOMEM. */
int environ_new(struct environ *ret_env, struct shd_err *e);
void environ_free(struct environ *env);

/* Set name to the formatted value, replacing an old one. Errors: SHD_ENOMEM. */
int environ_set(struct environ *env, struct shd_err *e, const char *name, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* For child_spawn(): NULL-terminated, into env, which is left alone meanwhile. *ret_list is the
 * caller's to free. Errors: SHD_ENOMEM. */
int environ_list(const struct environ *env, char ***ret_list, struct shd_err *e);

#endif
