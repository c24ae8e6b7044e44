#include "tests/lib/ctl_run.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/share/fdpass.h"

#define ARGS_MAX 24u

char base[64];

static pid_t unreaped[16]; /* of run_start_program(); 0: none */

static void reaped(pid_t pid)
{
    for (size_t i = 0; i < ARRAY_SIZE(unreaped); i++)
        if (unreaped[i] == pid)
            unreaped[i] = 0;
}

/* -- Running it ------------------------------------------------------------------------------ */

void run_start_program(struct run *r, const char *program, const char *const *args)
{
    int out[2], err[2];
    CHECK(pipe2(out, O_CLOEXEC) == 0 && pipe2(err, O_CLOEXEC) == 0);
    fflush(stdout);
    r->pid = fork();
    CHECK(r->pid >= 0);
    if (r->pid == 0) {
        char *argv[ARGS_MAX + 2];
        size_t n = 0;
        argv[n++] = strdup(program);
        for (; args[n - 1] != NULL && n <= ARGS_MAX; n++)
            argv[n] = strdup(args[n - 1]);
        argv[n] = NULL;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(out[1], STDOUT_FILENO);
        dup2(err[1], STDERR_FILENO);
        execv(program, argv);
        _exit(99);
    }
    size_t at = 0;
    while (unreaped[at] != 0)
        CHECK(++at < ARRAY_SIZE(unreaped));
    unreaped[at] = r->pid;
    close(out[1]);
    close(err[1]);
    r->fds[0] = out[0];
    r->fds[1] = err[0];
    r->used[0] = r->used[1] = 0;
    r->out[0] = r->err[0] = '\0';
}

void run_start(struct run *r, const char *const *args)
{
    run_start_program(r, BIN "/shardctl", args);
}

bool run_read(struct run *r, int wait_ms)
{
    struct pollfd p[2] = { { .fd = r->fds[0], .events = POLLIN },
                           { .fd = r->fds[1], .events = POLLIN } };
    if (r->fds[0] < 0 && r->fds[1] < 0)
        return false;
    poll(p, 2, wait_ms);
    for (int i = 0; i < 2; i++) {
        char *text = i == 0 ? r->out : r->err;
        if (p[i].revents == 0)
            continue;
        CHECK(r->used[i] < OUTPUT_BYTES - 1);
        const ssize_t n = read(r->fds[i], text + r->used[i], OUTPUT_BYTES - 1 - r->used[i]);
        if (n <= 0) {
            close(r->fds[i]);
            r->fds[i] = -1;
            continue;
        }
        r->used[i] += (size_t)n;
        text[r->used[i]] = '\0';
    }
    return true;
}

void run_await(struct run *r, const char *stream, const char *part)
{
    const uint64_t deadline = test_now_ms() + TEST_HANG_MS;
    while (strstr(stream, part) == NULL)
        if (test_now_ms() > deadline || !run_read(r, 100))
            FAIL("no '%s' in stdout '%s' stderr '%s'", part, r->out, r->err);
}

void run_finish(struct run *r)
{
    const uint64_t deadline = test_now_ms() + TEST_HANG_MS;
    while (run_read(r, 100))
        if (test_now_ms() > deadline)
            FAIL("it does not end: stdout '%s' stderr '%s'", r->out, r->err);
    int status;
    CHECK(waitpid(r->pid, &status, 0) == r->pid);
    reaped(r->pid);
    r->code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

struct run run;

void ctl(const char *const *args)
{
    run_start(&run, args);
    run_finish(&run);
}

/* -- What is left ---------------------------------------------------------------------------- */

/* True for what `up` leaves on purpose: a directory with its log, and that it has made it. */
static bool is_log(const char *name)
{
    char path[sizeof base + NAME_MAX + 2];
    unsigned others = 0, logs = 0;
    snprintf(path, sizeof(path), "%s/%s", base, name);
    DIR *dir = opendir(path);
    for (const struct dirent *d = dir != NULL ? readdir(dir) : NULL; d != NULL; d = readdir(dir)) {
        const bool is_log = strncmp(d->d_name, "up.log", 6) == 0;
        logs += is_log;
        others += !is_log && d->d_name[0] != '.' && strcmp(d->d_name, "up.lock") != 0;
    }
    if (dir != NULL)
        closedir(dir);
    return logs > 0 && others == 0;
}

unsigned leftovers(void)
{
    unsigned count = 0;
    DIR *dir = opendir(base);
    CHECK(dir != NULL);
    for (const struct dirent *d = readdir(dir); d != NULL; d = readdir(dir))
        count += d->d_name[0] != '.' && !is_log(d->d_name);
    closedir(dir);
    return count;
}

unsigned pids_named(const char *mark, pid_t *ret_pids)
{
    unsigned count = 0;
    for (const char *at = strstr(run.err, mark); at != NULL && count < PIDS_MAX;
         at = strstr(at + 1, mark))
        ret_pids[count++] = (pid_t)strtol(at + strlen(mark), NULL, 10);
    return count;
}

pid_t daemon_pid(const char *dir, int index)
{
    char path[192];
    struct side_peer peer = { .pid = 0 };
    struct shd_err e;
    int fd;
    snprintf(path, sizeof path, "%s/cpu%d.sock", dir, index);
    if (side_connect(path, &fd, &e) != SHD_OK)
        return 0;
    if (side_peer(fd, &peer, &e) != SHD_OK)
        peer.pid = 0;
    close(fd);
    return peer.pid;
}

bool gone(pid_t pid)
{
    char path[64], text[256] = "";
    snprintf(path, sizeof(path), "/proc/%ld/stat", (long)pid);
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return true;
    const size_t n = fread(text, 1, sizeof(text) - 1, f);
    fclose(f);
    const char *state = n > 0 ? strrchr(text, ')') : NULL;
    return state == NULL || state[2] == 'Z' || state[2] == 'X';
}

void expect_gone(const char *mark, unsigned count)
{
    pid_t pids[PIDS_MAX];
    EXPECT_EQ(pids_named(mark, pids), count);
    for (unsigned i = 0; i < count; i++) {
        EXPECT_SOON(gone(pids[i]));
    }
}

void expect_clean(void)
{
    expect_gone(" pid=", pids_named(" pid=", (pid_t[PIDS_MAX]){ 0 }));
    EXPECT_EQ(leftovers(), 0);
}

/* A test failed: end its runs (they end what they started) and what `shardctl up` keeps in the
 * base, so that nothing outlives this program and the next test begins with an empty base. */
static void end_all(void)
{
    for (size_t i = 0; i < ARRAY_SIZE(unreaped); i++) {
        const pid_t pid = unreaped[i];
        if (pid == 0)
            continue;
        kill(pid, SIGCONT);
        kill(pid, SIGTERM);
        const uint64_t patience_ms = test_now_ms() + test_paced(15000);
        while (waitpid(pid, NULL, WNOHANG) == 0) {
            if (test_now_ms() > patience_ms)
                kill(pid, SIGKILL);
            sleep_ms(10);
        }
        unreaped[i] = 0;
    }
    char command[256];
    snprintf(command, sizeof(command),
             "cd %s && for d in *; do [ ! -e \"$d/up.lock\" ] || " BIN
             "/shardctl down -y -d \"$PWD/$d\"; done;"
             " rm -rf %s/*",
             base, base);
    if (system(command) != 0)
        fprintf(stderr, "%s: not all of it could be ended\n", base);
}

/* -- The program ----------------------------------------------------------------------------- */

/* A base like /run/user/UID, of the test's own; 0 when there is no place for one. */
static int make_base(void)
{
    const char *home = getenv("HOME");
    if (geteuid() == 0)
        snprintf(base, sizeof(base), "/run/shardctl-test-XXXXXX");
    else if (home == NULL ||
             snprintf(base, sizeof(base), "%s/.shardctl-test-XXXXXX", home) >= (int)sizeof(base))
        return 0;
    return mkdtemp(base) != NULL && setenv("XDG_RUNTIME_DIR", base, 1) == 0;
}

int ctl_main(int argc, char **argv)
{
    signal(SIGINT, SIG_DFL); /* ignored when a shell has started us with & */
    close_range(3, ~0u, 0);  /* of our caller: they would be counted as leaks */
    if (!make_base()) {
        fprintf(stderr, "skipped: no place for a private directory: %s\n", strerror(errno));
        return 77;
    }
    char path[4096];
    const char *old = getenv("PATH");
    snprintf(path, sizeof(path), BIN ":%s", old != NULL ? old : "/usr/bin:/bin");
    setenv("PATH", path, 1);
    if (geteuid() != 0) /* tests look into daemons */
        setenv("SHARDD_CORE_DUMPS", "1", 0);
    test_clean_up = end_all;
    const int code = test_run_all(argc, argv);
    snprintf(path, sizeof(path), "rm -rf %s/*", base);
    if (leftovers() == 0 && system(path) != 0) /* logs are no leftovers */
        fprintf(stderr, "%s: cannot be emptied\n", base);
    if (rmdir(base) != 0)
        fprintf(stderr, "%s: %s\n", base, strerror(errno));
    return code;
}
