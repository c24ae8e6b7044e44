/* Processes that shardctl starts: their environment, descriptors and process group, how their end
 * is told, and where the daemon's program is found. */
#include <envz.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/ctl/base/child.h"
#include "proto/base/check.h"
#include "tests/lib/test.h"

static const char *value_of(const struct environ *env, const char *name)
{
    return envz_get(env->text, env->bytes, name);
}

/* -- Environment ----------------------------------------------------------------------------- */

TEST(an_environment_is_ours_without_what_a_manager_set)
{
    static const char *const managers[] = { "NOTIFY_SOCKET",  "LISTEN_FDS",    "LISTEN_PID",
                                            "LISTEN_FDNAMES", "WATCHDOG_USEC", "WATCHDOG_PID" };
    struct environ env;
    struct shd_err e = { 0 };
    for (size_t i = 0; i < ARRAY_SIZE(managers); i++)
        setenv(managers[i], "x", 1);
    setenv("LISTEN_FDS_OF_MINE", "3", 1);
    setenv("EMPTY", "", 1);
    EXPECT_OK(environ_new(&env, &e), &e);
    for (size_t i = 0; i < ARRAY_SIZE(managers); i++) {
        EXPECT(value_of(&env, managers[i]) == NULL);
        unsetenv(managers[i]);
    }
    EXPECT_STR(value_of(&env, "LISTEN_FDS_OF_MINE"), "3");
    EXPECT_STR(value_of(&env, "EMPTY"), "");
    environ_free(&env);
    EXPECT(env.text == NULL && env.bytes == 0);
}

TEST(a_variable_is_set_once_and_listed)
{
    struct environ env;
    struct shd_err e = { 0 };
    char **list = NULL;
    unsigned found = 0, all = 0;
    EXPECT_OK(environ_new(&env, &e), &e);
    EXPECT_OK(environ_set(&env, &e, "RANK", "%d", 3), &e);
    EXPECT_OK(environ_set(&env, &e, "RANK", "%d of %d", 4, 5), &e);
    EXPECT_OK(environ_set(&env, &e, "RANKS", "%s", "a=b"), &e);
    EXPECT_STR(value_of(&env, "RANK"), "4 of 5");
    EXPECT_OK(environ_list(&env, &list, &e), &e);
    for (; list[all] != NULL; all++)
        found += strncmp(list[all], "RANK=", 5) == 0 || strcmp(list[all], "RANKS=a=b") == 0;
    EXPECT_EQ(found, 2);
    EXPECT(all > 2);
    free(list);
    environ_free(&env);
}

/* -- Starting -------------------------------------------------------------------------------- */

static char output[512];

/* Run `sh -c script` with its output here; returns its wait status. */
static int run(const char *script, struct child_spawn spawn)
{
    int ends[2], status = -1;
    pid_t pid = -1;
    struct shd_err e = { 0 };
    char *argv[] = { (char[]){ "sh" }, (char[]){ "-c" }, (char *)script, NULL };
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    spawn.argv = argv;
    spawn.envp = spawn.envp != NULL ? spawn.envp : environ;
    spawn.in = null;
    spawn.out = ends[1];
    spawn.err = STDERR_FILENO;
    const int r = child_spawn(&spawn, &pid, &e);
    close(ends[1]);
    close(null);
    EXPECT_OK(r, &e);
    size_t used = 0;
    ssize_t n;
    while ((n = read(ends[0], output + used, sizeof output - 1 - used)) > 0)
        used += (size_t)n;
    output[used] = '\0';
    close(ends[0]);
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    return status;
}

TEST(a_child_leads_a_group_blocks_no_signal_and_ignores_what_we_were_told_to)
{
    sigset_t usr1;
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    signal(SIGPIPE, SIG_IGN);
    void (*const before)(int) = signal(SIGINT, SIG_IGN); /* as for a shell's & */
    sigprocmask(SIG_BLOCK, &usr1, NULL);
    EXPECT_EQ(run("set -- $(cat /proc/self/stat); echo pid $$ group $5; "
                  "grep -E '^Sig(Blk|Ign)' /proc/self/status",
                  (struct child_spawn){ .argv = NULL }),
              0);
    sigprocmask(SIG_UNBLOCK, &usr1, NULL);
    signal(SIGINT, before);
    int pid = 0, group = 0;
    EXPECT_EQ(sscanf(output, "pid %d group %d", &pid, &group), 2);
    EXPECT(pid > 0 && pid == group);
    EXPECT_HAS(output, "SigBlk:\t0000000000000000");
    const char *ignored = strstr(output, "SigIgn:");
    EXPECT(ignored != NULL);
    const uint64_t mask = strtoull(ignored + strlen("SigIgn:"), NULL, 16);
    EXPECT((mask >> (SIGINT - 1) & 1) == 1 && (mask >> (SIGPIPE - 1) & 1) == 0);
}

TEST(descriptors_become_3_and_4_whatever_their_numbers_were)
{
    char listen_pid[CHILD_PID_BYTES + 16] = "LISTEN_PID=";
    char *envp[] = { listen_pid, (char[]){ "PATH=/usr/bin:/bin" }, NULL };
    int fds[2];
    for (int i = 0; i < 2; i++) {
        char name[] = "/tmp/test_ctl_child.XXXXXX";
        fds[i] = mkostemp(name, O_CLOEXEC);
        EXPECT(fds[i] >= 3 && unlink(name) == 0);
        EXPECT_EQ(pwrite(fds[i], i == 0 ? "first" : "other", 5, 0), 5);
    }
    /* Where one is to go the other already is. */
    const int swapped[] = { fcntl(fds[0], F_DUPFD_CLOEXEC, 40), fcntl(fds[1], F_DUPFD_CLOEXEC, 3) };
    EXPECT_EQ(run("cat <&3; echo; cat <&4; echo; test $LISTEN_PID = $$ && echo mine",
                  (struct child_spawn){ .envp = envp,
                                        .fds = swapped,
                                        .fd_count = 2,
                                        .listen_pid = listen_pid + strlen("LISTEN_PID=") }),
              0);
    EXPECT_STR(output, "first\nother\nmine\n");
    for (int i = 0; i < 2; i++) {
        close(fds[i]);
        close(swapped[i]);
    }
}

TEST(a_program_that_is_not_there_is_an_error_of_the_start)
{
    struct shd_err e = { 0 };
    pid_t pid = -1;
    char *argv[] = { (char[]){ "/nonexistent/program" }, NULL };
    const struct child_spawn spawn = { .argv = argv, .envp = environ, .in = 0, .out = 1, .err = 2 };
    EXPECT_STATUS(child_spawn(&spawn, &pid, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "cannot run '/nonexistent/program': No such file");
    EXPECT_EQ(pid, -1);
    EXPECT(waitpid(-1, NULL, WNOHANG) < 0); /* it was reaped */
}

/* -- Ends ------------------------------------------------------------------------------------ */

TEST(ends_are_told_as_a_shell_would)
{
    char how[64];
    const struct child_spawn none = { .argv = NULL };
    int status = run("exit 3", none);
    EXPECT_EQ(child_code(status), 3);
    EXPECT_STR(child_describe(status, how, sizeof how), "exited with code 3");
    status = run("kill -9 $$", none);
    EXPECT_EQ(child_code(status), 128 + 9);
    EXPECT_STR(child_describe(status, how, sizeof how), "was killed by signal 9 (SIGKILL)");
    status = run("kill -TERM $$", none);
    EXPECT_EQ(child_code(status), 143);
    EXPECT_HAS(child_describe(status, how, sizeof how), "(SIGTERM)");
}

TEST(a_stopped_group_acts_on_a_signal)
{
    int status;
    pid_t pid = -1;
    struct shd_err e = { 0 };
    char *argv[] = { (char[]){ "sleep" }, (char[]){ "1000" }, NULL };
    const struct child_spawn spawn = { .argv = argv, .envp = environ, .in = 0, .out = 1, .err = 2 };
    EXPECT_OK(child_spawn(&spawn, &pid, &e), &e);
    EXPECT(child_any());
    child_signal(pid, SIGSTOP);
    EXPECT_EQ(waitpid(pid, &status, WUNTRACED), pid);
    EXPECT(WIFSTOPPED(status));
    child_signal(pid, SIGTERM);
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
    EXPECT(!child_any());
}

TEST(orphans_are_ended_with_what_they_leave)
{
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    EXPECT_EQ(run("sleep 1000 >/dev/null 2>&1 & (sleep 1000 >/dev/null 2>&1 &) ; exit 0",
                  (struct child_spawn){ .argv = NULL }),
              0);
    EXPECT(child_any());
    child_end_orphans();
    EXPECT(!child_any());
    prctl(PR_SET_CHILD_SUBREAPER, 0);
}

/* -- The daemon ------------------------------------------------------------------------------ */

TEST(shardd_is_what_the_environment_says_or_beside_us_or_in_path)
{
    char path[300], self[300];
    struct shd_err e = { 0 };
    setenv("SHARDD_BIN", "/bin/../bin/sh", 1);
    EXPECT_OK(child_find_shardd(path, sizeof path, &e), &e);
    EXPECT(path[0] == '/' && strstr(path, "..") == NULL); /* as it is from any directory */
    setenv("SHARDD_BIN", "/nonexistent/shardd", 1);
    EXPECT_STATUS(child_find_shardd(path, sizeof path, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "SHARDD_BIN is '/nonexistent/shardd': No such file");
    setenv("SHARDD_BIN", "", 1);
    EXPECT_OK(child_find_shardd(path, sizeof path, &e), &e);
    EXPECT_STR(path, "shardd"); /* there is none beside this test */
    unsetenv("SHARDD_BIN");
    EXPECT_OK(child_find_self(self, sizeof self, &e), &e);
    EXPECT_HAS(self, "/test_ctl_child");
}

TEST_MAIN()
