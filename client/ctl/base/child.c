/* See child.h. */
#include "client/ctl/base/child.h"

#include <argz.h>
#include <envz.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/dir.h"

/* -- Programs ------------------------------------------------------------------------------------
 */

int child_find_self(char *buf, size_t bytes, struct shd_err *e)
{
    const ssize_t n = readlink("/proc/self/exe", buf, bytes - 1);
    if (n < 0)
        return err_sys(e, SHD_EIO, "find shardctl");
    buf[n] = '\0';
    return SHD_OK;
}

/* The program of this name in shardctl's own folder. False: there is none. */
static bool child_find_beside(const char *name, char path[PATH_MAX])
{
    char self[PATH_MAX];
    const char *slash = child_find_self(self, sizeof(self), NULL) == SHD_OK ? strrchr(self, '/')
                                                                            : NULL;
    return slash != NULL &&
           snprintf(path, PATH_MAX, "%.*s/%s", (int)(slash - self), self, name) < PATH_MAX &&
           access(path, X_OK) == 0;
}

int child_find_shardd(char *buf, size_t bytes, struct shd_err *e)
{
    char self[PATH_MAX];
    const char *wanted = getenv("SHARDD_BIN");
    if (wanted != NULL && wanted[0] != '\0') {
        char *real = realpath(wanted, NULL); /* `up` leaves the directory it was started in */
        const bool found = real != NULL && snprintf(buf, bytes, "%s", real) < (int)bytes;
        free(real);
        return found ? SHD_OK : err_sys(e, SHD_ENOENT, "SHARDD_BIN is '%s'", wanted);
    }
    const bool beside = child_find_beside("shardd", self);
    snprintf(buf, bytes, "%s", beside ? self : "shardd");
    return SHD_OK;
}

/* -- Starting ------------------------------------------------------------------------------------
 */

/* In the child, before exec: undo what shardctl set up for itself. Returns 0 or -1 with errno. */
static int child_prepare(const struct child_spawn *s, pid_t parent)
{
    for (int sig = 1; sig < NSIG; sig++) {
        struct sigaction sa;
        if (sigaction(sig, NULL, &sa) == 0 && sa.sa_handler != SIG_DFL &&
            (sa.sa_handler != SIG_IGN || sig == SIGPIPE)) {
            sa = (struct sigaction){ .sa_handler = SIG_DFL };
            sigaction(sig, &sa, NULL);
        }
    }
    setpgid(0, 0); /* the parent does the same: whoever comes first */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0)
        return -1;
    if (getppid() != parent)
        raise(SIGKILL); /* it died before the line above took effect */
    if (s->files != NULL)
        setrlimit(RLIMIT_NOFILE, s->files);
    if (dup2(s->in, STDIN_FILENO) < 0 || dup2(s->out, STDOUT_FILENO) < 0 ||
        dup2(s->err, STDERR_FILENO) < 0)
        return -1;
    sigset_t none;
    sigemptyset(&none);
    return sigprocmask(SIG_SETMASK, &none, NULL);
}

/* The descriptors handed in may have any number, also one where another is to go: all are first
 * moved out of the way, then put in place. Source numbers are closed meanwhile: half the files. */
static int child_move_fds(struct child_spawn *s, int *report)
{
    static int moved[CHILD_FDS_MAX]; /* too large for some stacks */
    CHECK(s->fd_count <= CHILD_FDS_MAX);
    const int free_from = 3 + (int)s->fd_count;
    int *const ours[] = { &s->in, &s->out, &s->err, report };
    for (size_t i = 0; i < ARRAY_SIZE(ours); i++) {
        const int fd = fcntl(*ours[i], F_DUPFD_CLOEXEC, free_from);
        if (fd < 0)
            return -1;
        *ours[i] = fd;
    }
    for (uint32_t i = 0; i < s->fd_count; i++) {
        moved[i] = fcntl(s->fds[i], F_DUPFD_CLOEXEC, free_from);
        if (moved[i] < 0)
            return -1;
        close(s->fds[i]);
    }
    for (uint32_t i = 0; i < s->fd_count; i++)
        if (dup2(moved[i], 3 + (int)i) < 0)
            return -1;
    return 0;
}

/* beside: see child_spawn(). */
static _Noreturn void child_main(struct child_spawn s, const char *beside, pid_t parent, int report)
{
    if (s.listen_pid != NULL)
        snprintf(s.listen_pid, CHILD_PID_BYTES, "%ld", (long)getpid());
    if (child_move_fds(&s, &report) == 0 && child_prepare(&s, parent) == 0)
        execvpe(s.argv[0], s.argv, s.envp);
    if (errno == ENOENT && beside[0] != '\0') {
        execve(beside, s.argv, s.envp);
        errno = ENOENT;
    }
    const int failed = errno;
    if (write(report, &failed, sizeof(failed)) < 0)
        _exit(126);
    _exit(127);
}

int child_spawn(const struct child_spawn *spawn, pid_t *ret_pid, struct shd_err *e)
{
    CHECK(spawn->argv[0] != NULL);
    char beside[PATH_MAX] = "";
    int report[2];
    if (strchr(spawn->argv[0], '/') == NULL && !child_find_beside(spawn->argv[0], beside))
        beside[0] = '\0';
    if (pipe2(report, O_CLOEXEC) < 0)
        return err_sys(e, SHD_EIO, "start '%s'", spawn->argv[0]);
    /* Handlers of ours must not run in the child: signals stay blocked until it has exec'ed. */
    sigset_t all, old;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &old);
    const pid_t parent = getpid();
    const pid_t pid = fork();
    if (pid == 0)
        child_main(*spawn, beside, parent, report[1]);
    const int fork_errno = errno;
    sigprocmask(SIG_SETMASK, &old, NULL);
    close(report[1]);
    if (pid < 0) {
        close(report[0]);
        errno = fork_errno;
        return err_sys(e, SHD_EIO, "start '%s'", spawn->argv[0]);
    }
    setpgid(pid, pid);
    int failed = 0;
    ssize_t n;
    do {
        n = read(report[0], &failed, sizeof(failed));
    } while (n < 0 && errno == EINTR);
    close(report[0]);
    if (n == (ssize_t)sizeof(failed)) {
        waitpid(pid, NULL, 0);
        errno = failed;
        return err_sys(e, failed == ENOENT ? SHD_ENOENT : SHD_EIO, "cannot run '%s'",
                       spawn->argv[0]);
    }
    *ret_pid = pid;
    return SHD_OK;
}

void child_signal(pid_t pid, int sig)
{
    CHECK(pid > 1);
    /* A stopped process acts on a signal only when it goes on. That comes first: SIGCONT would undo
     * the SIGSTOP by which a debugger, or a leak checker at exit, attaches meanwhile. */
    if (sig != SIGKILL && sig != SIGSTOP && sig != SIGCONT)
        kill(-pid, SIGCONT);
    if (kill(-pid, sig) < 0)
        kill(pid, sig);
}

int child_code(int wait_status)
{
    return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

const char *child_describe(int wait_status, char *buf, size_t bytes)
{
    if (!WIFSIGNALED(wait_status)) {
        snprintf(buf, bytes, "exited with code %d", WEXITSTATUS(wait_status));
        return buf;
    }
    const int sig = WTERMSIG(wait_status);
    const char *name = sigabbrev_np(sig);
    snprintf(buf, bytes, "was killed by signal %d (%s%s)%s", sig, name != NULL ? "SIG" : "",
             name != NULL ? name : "?", WCOREDUMP(wait_status) ? ", core dumped" : "");
    return buf;
}

/* /proc/PID/NAME into text[bytes], with a NUL. */
static bool read_proc(const char *pid, const char *name, char *text, size_t bytes)
{
    char path[300];
    snprintf(path, sizeof(path), "/proc/%s/%s", pid, name);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    const ssize_t n = read(fd, text, bytes - 1);
    close(fd);
    text[n > 0 ? n : 0] = '\0';
    return n > 0;
}

/* The name in parentheses may hold anything, so what follows is read from the last ')'. */
bool child_stat(const char *pid, struct child_stat *ret_stat)
{
    char text[512], *end;
    if (pid[0] < '1' || pid[0] > '9' || !read_proc(pid, "stat", text, sizeof(text)))
        return false;
    const char *after = strrchr(text, ')');
    if (after == NULL || strlen(after) < 5)
        return false;
    ret_stat->state = after[2]; /* ") S PARENT GROUP ..." */
    ret_stat->parent = (pid_t)strtol(after + 4, &end, 10);
    ret_stat->group = (pid_t)strtol(end, NULL, 10);
    return true;
}

pid_t child_tracer(pid_t pid)
{
    char name[CHILD_PID_BYTES], text[4096];
    snprintf(name, sizeof(name), "%ld", (long)pid);
    const char *at = read_proc(name, "status", text, sizeof(text)) ? strstr(text, "\nTracerPid:")
                                                                   : NULL;
    return at != NULL ? (pid_t)strtol(at + strlen("\nTracerPid:"), NULL, 10) : 0;
}

/* Send sig (0: none) to each child of this process; returns how many there are. */
static unsigned children_signal(int sig)
{
    unsigned count = 0;
    DIR *proc = opendir("/proc");
    for (const char *name = dir_next(&proc); name != NULL; name = dir_next(&proc)) {
        struct child_stat stat;
        if (!child_stat(name, &stat) || stat.parent != getpid())
            continue;
        kill((pid_t)strtol(name, NULL, 10), sig);
        count++;
    }
    return count;
}

bool child_any(void)
{
    return children_signal(0) > 0;
}

void child_end_orphans(void)
{
    /* Killing one may hand us its children in turn, hence the rounds; SIGKILLed processes end by
     * themselves, so the wait does too. */
    for (unsigned round = 0; round < 64 && children_signal(SIGKILL) > 0; round++)
        while (waitpid(-1, NULL, 0) > 0)
            continue;
}

/* -- Its environment ----------------------------------------------------------------------------
 */

int environ_new(struct environ *ret_env, struct shd_err *e)
{
    static const char *const manager_vars[] = { "NOTIFY_SOCKET",  "LISTEN_FDS",    "LISTEN_PID",
                                                "LISTEN_FDNAMES", "WATCHDOG_USEC", "WATCHDOG_PID" };
    struct environ env = { 0 };
    if (argz_create(environ, &env.text, &env.bytes) != 0)
        return err_set(e, SHD_ENOMEM, "out of memory for the environment");
    for (size_t i = 0; i < ARRAY_SIZE(manager_vars); i++)
        envz_remove(&env.text, &env.bytes, manager_vars[i]);
    *ret_env = env;
    return SHD_OK;
}

void environ_free(struct environ *env)
{
    free(env->text);
    *env = (struct environ){ 0 };
}

int environ_set(struct environ *env, struct shd_err *e, const char *name, const char *fmt, ...)
{
    char *value = NULL;
    va_list args;
    va_start(args, fmt);
    const bool made = vasprintf(&value, fmt, args) >= 0;
    va_end(args);
    const bool set = made && envz_add(&env->text, &env->bytes, name, value) == 0;
    if (made)
        free(value);
    return set ? SHD_OK : err_set(e, SHD_ENOMEM, "out of memory for environment variable %s", name);
}

int environ_list(const struct environ *env, char ***ret_list, struct shd_err *e)
{
    const size_t count = argz_count(env->text, env->bytes);
    char **list = calloc(count + 1, sizeof(*list));
    if (list == NULL)
        return err_set(e, SHD_ENOMEM, "out of memory for %zu environment variables", count);
    argz_extract(env->text, env->bytes, list);
    *ret_list = list;
    return SHD_OK;
}
