/* shardctl as a user meets it: the real binary with the real shardd, in a runtime base of the
 * test's own. Every test ends with nothing left in that base and no process of it alive.
 *
 * Workers are `sh -c` scripts; what a run does is read from `-v` lines, its stdout, its stderr
 * and its exit code.
 */
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "tests/lib/ctl_run.h"

/* -- The command line ------------------------------------------------------------------------ */

TEST(help_and_version_go_to_stdout)
{
    ctl(ARGS("--help"));
    EXPECT_EQ(run.code, 0);
    EXPECT_HAS(run.out, "run a command as workers");
    EXPECT_HAS(run.out, "exit codes");
    ctl(ARGS("run", "--help"));
    EXPECT_EQ(run.code, 0);
    EXPECT_HAS(run.out, "examples:");
    EXPECT_STR(run.err, "");
    ctl(ARGS("help", "digest"));
    EXPECT_EQ(run.code, 0);
    EXPECT_HAS(run.out, "usage: shardctl digest");
    ctl(ARGS("--version"));
    EXPECT_EQ(run.code, 0);
    EXPECT_HAS(run.out, "shardctl 0.");
}

TEST(wrong_command_lines_exit_2_and_suggest)
{
    static const struct {
        const char *args[6];
        const char *says;
    } cases[] = {
        { { "stats" }, "unknown verb 'stats'; did you mean status?" },
        { { "xyzzy" },
          "known: run, up, host, hosts, drain, down, logs, status, top, log, trace, dashboard, "
          "exporter, "
          "show, digest, plan, checkpoint, restore, export, set, fork, snapshot, snapshots, "
          "replay, rewind, reshard, drop, keys, doctor, completion, help" },
        { { "run", "--deamons", "2" }, "unknown flag '--deamons'; did you mean --daemons?" },
        { { "run", "--daemons", "0", "true" }, "--daemons is 0, its limits are 1 and 1024" },
        { { "run", "--workers", "1025", "true" }, "--workers is 1025, its limits are 1 and 1024" },
        { { "run", "--workers", "two", "true" },
          "--workers takes a whole number or A..B, got 'two'" },
        { { "run", "--workers=99999999999999999999", "true" }, "its limits are 1 and 1024" },
        { { "run", "--workers", "2..x", "true" }, "takes a whole number or A..B, got 'x'" },
        { { "run", "--workers", "4..2", "true" }, "the first may not be larger than the last" },
        { { "run", "--workers", "2..4", "true" }, "--workers 2..4 needs --elastic" },
        { { "run", "--workers", "0..4", "true" }, "--workers is 0, its limits are 1 and 1024" },
        { { "run", "--max-restarts", "1001", "true" }, "its limits are 0 and 1000" },
        { { "up", "cpu0" }, "up takes no further words, got 'cpu0'" },
        { { "down", "cpu0" }, "down takes no further words, got 'cpu0'" },
        { { "drain", "--checkpoint", "x", "cpu0" },
          "--checkpoint saves whole models: name no device" },
        { { "drain", "cpu0", "--timeout", "5", "--checkpoint=x" }, "name no device" },
        { { "checkpoint", "--json", "x", "--list", "--keep=2" }, "--list and --verify only look" },
        { { "checkpoint", "x", "--json", "y" }, "one directory at a time, got 'y' as well" },
        { { "checkpoint", "--", "--json", "--list" }, "got '--list' as well" },
        { { "restore", "x", "--weight", "y" }, "did you mean --weights?" },
        { { "run", "--daemons" }, "--daemons needs a value" },
        { { "run", "--verbose=1", "true" }, "--verbose takes no value" },
        { { "run", "--daemons", "2" }, "run needs a command" },
        { { "status", "cpu0" }, "status takes no further words, got 'cpu0'" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        ctl(cases[i].args);
        EXPECT_HAS(run.err, cases[i].says);
        EXPECT_EQ(run.code, 2);
        EXPECT_STR(run.out, "");
    }
}

TEST(status_and_digest_without_a_daemon_fail_clearly)
{
    ctl(ARGS("status", "--address", "/nonexistent"));
    EXPECT_EQ(run.code, 1);
    EXPECT_HAS(run.err, "/nonexistent");
    ctl(ARGS("digest", "--address", "/nonexistent"));
    EXPECT_EQ(run.code, 1);
    EXPECT_HAS(run.err, "/nonexistent");
}

/* -- A run that goes well -------------------------------------------------------------------- */

TEST(workers_get_torchruns_environment)
{
    ctl(ARGS("run", "-v", "--daemons", "2", "--workers", "3", "--", "sh", "-c",
             ("echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR; "
              "[ $MASTER_PORT -gt 0 ] && "
              "[ $MASTER_PORT -lt $(cut -f 1 /proc/sys/net/ipv4/ip_local_port_range) ] && "
              "[ $OMP_NUM_THREADS -ge 1 ] && echo numbers; "
              "echo ${SHARDD_ADDRESS#*\\?} ${NOTIFY_SOCKET-none}")));
    EXPECT_EQ(run.code, 0);
    EXPECT_STR(run.out, "0 0 3 3 0 127.0.0.1\nnumbers\ncpu0,cpu1 none\n");
    EXPECT_HAS(run.err, "[rank 2] 2 2 3 3 0 127.0.0.1\n");
    EXPECT_HAS(run.err, "[rank 1] cpu0,cpu1 none\n");
    expect_gone("started daemon cpu0 pid=", 1);
    expect_gone("started worker rank 2 pid=", 1);
    expect_clean();
}

TEST(stdout_is_rank_0s_alone_and_exact)
{
    ctl(ARGS("run", "--workers", "2", "--", "sh", "-c",
             "[ $RANK = 0 ] && printf 'a\\r\\0b\\n'; echo err >&2; printf 'no newline'"));
    EXPECT_EQ(run.code, 0);
    EXPECT_EQ(run.used[0], strlen("a\r?b\nno newline"));
    EXPECT(memcmp(run.out, "a\r\0b\nno newline", run.used[0]) == 0);
    EXPECT_HAS(run.err, "[rank 1] err\n");
    EXPECT_HAS(run.err, "[rank 1] no newline\n"); /* a partial last line is completed */
    expect_clean();
}

TEST(users_thread_settings_are_kept)
{
    setenv("OPENBLAS_NUM_THREADS", "7", 1);
    ctl(ARGS("run", "--", "sh", "-c", "echo $OPENBLAS_NUM_THREADS"));
    unsetenv("OPENBLAS_NUM_THREADS");
    EXPECT_STR(run.out, "7\n");
    expect_clean();
}

TEST(closed_standard_streams_do_no_harm)
{
    run.err[0] = '\0';
    EXPECT_EQ(system("exec shardctl run --daemons 2 --workers 2 -- sh -c 'echo a; echo b >&2; cat' "
                     "<&- >&- 2>&-"),
              0);
    expect_clean();
}

TEST(status_inside_a_run_shows_both_daemons)
{
    ctl(ARGS("run", "--daemons", "2", "--", "sh", "-c",
             "shardctl status && shardctl status --json"));
    EXPECT_STR(run.err, "");
    EXPECT_EQ(run.code, 0);
    EXPECT_HAS(run.out, "cpu0  pid ");
    EXPECT_HAS(run.out, "cpu1  pid ");
    EXPECT_HAS(run.out, "\"device\": \"cpu1\"");
    EXPECT(strstr(run.out, "shardctl status") == NULL); /* its own session is left out */
    expect_clean();
}

TEST(digest_of_a_run_is_what_the_worker_printed)
{
    ctl(ARGS("run", "--daemons", "2", "--", "sh", "-c",
             ("shd-gpt --layers 1 --dim 32 --heads 1 --seq 16 --batch 2 --micro-batches 2 "
              "--steps 2 --sample 0 && shardctl digest && shardctl status && "
              "! shardctl digest --model other")));
    EXPECT_EQ(run.code, 0);
    const char *trained = strstr(run.out, "digest sha256:");
    EXPECT(trained != NULL);
    const char *asked = strstr(trained + 1, "digest sha256:");
    EXPECT(asked != NULL);
    EXPECT(strncmp(trained, asked, strlen("digest sha256:") + 64 + strlen(" step=2")) == 0);
    EXPECT_HAS(asked, " step=2 model=");
    EXPECT_HAS(asked, "OPEN");
    EXPECT_HAS(run.err, "other");
    expect_clean();
}

/* -- A run that does not --------------------------------------------------------------------- */

TEST(failing_worker_is_named_and_its_code_passed_on)
{
    ctl(ARGS("run", "-v", "--daemons", "2", "--workers", "3", "--", "sh", "-c",
             "[ $RANK = 1 ] && exit 3; sleep 99999"));
    EXPECT_EQ(run.code, 3);
    EXPECT_HAS(run.err, "worker rank 1 (pid ");
    EXPECT_HAS(run.err, ") exited with code 3\n");
    expect_clean();
}

TEST(killed_worker_is_named_with_its_signal_when_it_may_not_be_started_again)
{
    ctl(ARGS("run", "-v", "--max-restarts", "0", "--workers", "2", "--", "sh", "-c",
             "[ $RANK = 0 ] && kill -9 $$; sleep 99999"));
    EXPECT_EQ(run.code, 128 + SIGKILL);
    EXPECT_HAS(run.err, "worker rank 0 (pid ");
    EXPECT_HAS(run.err, ") was killed by signal 9 (SIGKILL)\n");
    expect_clean();
}

TEST(missing_command_is_an_error)
{
    ctl(ARGS("run", "-v", "--", "./no-such-command"));
    EXPECT_EQ(run.code, 1);
    EXPECT_HAS(run.err, "worker rank 0: cannot run './no-such-command': No such file");
    expect_clean();
}

/* As in a build's folder, which is on nobody's PATH. */
TEST(command_is_found_beside_shardctl)
{
    char path[4096];
    snprintf(path, sizeof path, "%s", getenv("PATH"));
    setenv("PATH", "/usr/bin:/bin", 1);
    ctl(ARGS("run", "--", "shd-gpt", "--version"));
    setenv("PATH", path, 1);
    EXPECT_EQ(run.code, 0);
    EXPECT_HAS(run.out, "shd-gpt 0.");
}

TEST(daemon_that_dies_is_named_before_its_workers_when_it_may_not_be_started_again)
{
    pid_t pids[PIDS_MAX];
    run_start(&run, ARGS("run", "-v", "--max-restarts", "0", "--daemons", "3", "--workers", "2",
                         "--", "sh", "-c", "echo working; sleep 99999"));
    run_await(&run, run.err, "[rank 1] working");
    EXPECT_EQ(pids_named("started daemon cpu1 pid=", pids), 1);
    kill(pids[0], SIGKILL);
    run_finish(&run);
    EXPECT_EQ(run.code, 1);
    char says[128];
    snprintf(says, sizeof(says), "daemon cpu1 (pid %ld) was killed by signal 9 (SIGKILL)\n",
             (long)pids[0]);
    EXPECT_HAS(run.err, says);
    expect_clean();
}

/* shardctl beside a program that is not shardd: copied, since it looks next to itself. */
static void ctl_beside(const char *script, const char *const *args)
{
    char command[2048], program[128];
    snprintf(command, sizeof(command),
             "mkdir %s/.bin && cp " BIN "/shardctl %s/.bin/ && "
             "printf '#!/bin/sh\\n%s\\n' > %s/.bin/shardd && chmod +x %s/.bin/shardd",
             base, base, script, base, base);
    CHECK(system(command) == 0);
    snprintf(program, sizeof(program), "%s/.bin/shardctl", base);
    run_start_program(&run, program, args);
    run_finish(&run);
    snprintf(command, sizeof(command), "rm -r %s/.bin", base);
    CHECK(system(command) == 0);
}

TEST(daemon_that_ends_before_it_is_ready_is_named_with_its_last_line)
{
    ctl_beside("echo no luck >&2; exit 4", ARGS("run", "-v", "--max-restarts", "0", "--", "true"));
    EXPECT_EQ(run.code, 1);
    EXPECT_HAS(run.err, ") exited with code 4 before it was ready: no luck\n");
    expect_clean();
}

TEST(daemon_of_a_device_that_is_not_here_is_tried_once)
{
    run_start(&run, ARGS("run", "--devices", "gpu1023", "--", "true"));
    run_finish(&run);
    EXPECT_EQ(run.code, 1);
    EXPECT_HAS(run.err, ") exited with code 2 before it was ready: shardd: gpu1023: ");
    EXPECT(strstr(run.err, "started again") == NULL);
    expect_clean();
}

TEST(daemon_that_never_gets_ready_is_given_up)
{
    char seconds[24], says[80];
    snprintf(seconds, sizeof(seconds), "%" PRIu64, test_paced(1000) / 1000);
    ctl_beside("echo thinking >&2; exec sleep 99999",
               ARGS("run", "-v", "--timeout", seconds, "--", "true"));
    EXPECT_EQ(run.code, 1);
    EXPECT_HAS(run.err, "daemon cpu0 (pid ");
    snprintf(says, sizeof(says), ") was not ready after %s s (--timeout): thinking\n", seconds);
    EXPECT_HAS(run.err, says);
    expect_clean();
}

/* -- Who finds them -------------------------------------------------------------------------- */

TEST(status_finds_the_only_run)
{
    static struct run more, status;
    if (access("/run/shardd", F_OK) == 0)
        SKIP("there are daemons here already\n");
    run_start(&run, ARGS("run", "-v", "--", "sh", "-c", "echo up; exec sleep 99999"));
    run_await(&run, run.out, "up\n");
    run_start(&status, ARGS("status", "--json"));
    run_finish(&status);
    EXPECT_EQ(status.code, 0);
    EXPECT_HAS(status.out, "\"device\":");
    run_start(&more, ARGS("run", "-v", "--", "sh", "-c", "echo up; exec sleep 99999"));
    run_await(&more, more.out, "up\n");
    run_start(&status, ARGS("status", "--json"));
    run_finish(&status);
    EXPECT_EQ(status.code, 2);
    EXPECT_HAS(status.err, "2 `shardctl up` or `run` of yours go on (");
    EXPECT_HAS(status.err, "/shardd-run-");
    kill(more.pid, SIGTERM);
    run_finish(&more);
    kill(run.pid, SIGTERM);
    run_finish(&run);
    run_start(&status, ARGS("status"));
    run_finish(&status);
    EXPECT_EQ(status.code, 1);
    EXPECT_HAS(status.err, "no directory '/run/shardd': start daemons (`shardctl up`)");
    expect_clean();
}

/* -- Signals --------------------------------------------------------------------------------- */

TEST(signals_reach_each_worker_once_and_decide_the_code)
{
    static const struct {
        int number;
        const char *name;
    } signals[] = { { SIGINT, "INT" }, { SIGTERM, "TERM" }, { SIGHUP, "HUP" } };
    for (size_t i = 0; i < ARRAY_SIZE(signals); i++) {
        char script[256];
        snprintf(script, sizeof(script),
                 "trap 'echo caught; caught=yes' %s; echo up; until [ $caught ]; do sleep 0.1; "
                 "done; sleep 0.3; exit 0",
                 signals[i].name);
        run_start(&run, ARGS("run", "-v", "--workers", "2", "--", "bash", "-c", script));
        run_await(&run, run.out, "up\n");
        run_await(&run, run.err, "[rank 1] up\n");
        kill(run.pid, signals[i].number);
        run_finish(&run);
        EXPECT_EQ(run.code, 128 + signals[i].number);
        EXPECT_STR(run.out, "up\ncaught\n");
        EXPECT_HAS(run.err, "[rank 1] caught\n");
        expect_clean();
    }
}

TEST(worker_that_ignores_a_signal_is_killed_after_grace)
{
    run_start(&run, ARGS("run", "-v", "--grace", "1", "--", "sh", "-c",
                         "trap '' TERM; echo up; sleep 9999; sleep 9999"));
    run_await(&run, run.out, "up\n");
    kill(run.pid, SIGTERM);
    run_finish(&run);
    EXPECT_EQ(run.code, 128 + SIGTERM);
    EXPECT_HAS(run.err, "worker rank 0 (pid ");
    EXPECT_HAS(run.err, ") did not stop within 1 s: killing it\n");
    expect_clean();
}

TEST(second_signal_kills_at_once)
{
    run_start(&run, ARGS("run", "-v", "--grace", "9999", "--", "sh", "-c",
                         "trap 'echo caught' INT; echo up; while :; do sleep 0.1; done"));
    run_await(&run, run.out, "up\n");
    kill(run.pid, SIGINT);
    run_await(&run, run.out, "caught\n");
    sleep_ms(700); /* one that comes sooner is the same key once more */
    kill(run.pid, SIGINT);
    run_finish(&run); /* it would wait for the worker's end as long as grace is */
    EXPECT_EQ(run.code, 128 + SIGINT);
    expect_clean();
}

/* -- Nothing is left ------------------------------------------------------------------------- */

TEST(processes_that_workers_leave_behind_are_ended)
{
    ctl(ARGS("run", "-v", "--", "bash", "-c",
             ("sleep 100 & echo left pid=$! >&2; setsid sleep 100 & echo left pid=$! >&2; "
              "setsid bash -c 'sleep 100 & echo left pid=$! >&2'; exit 0")));
    EXPECT_EQ(run.code, 0);
    expect_gone("left pid=", 3);
    expect_clean();
}

TEST(what_a_worker_leaves_behind_ends_with_it_and_not_with_the_run)
{
    pid_t left[1];
    run_start(&run, ARGS("run", "-v", "--workers", "2", "--", "sh", "-c",
                         "[ $RANK = 0 ] || exec sleep 1000; sleep 1000 & echo left pid=$! >&2"));
    run_await(&run, run.err, "worker rank 0 (pid ");
    EXPECT_EQ(pids_named("left pid=", left), 1);
    EXPECT_SOON(gone(left[0])); /* long before the run's end, which would end it too */
    kill(run.pid, SIGTERM);
    run_finish(&run);
    expect_clean();
}

TEST(killed_shardctl_takes_all_along_and_the_next_run_removes_its_directory)
{
    run_start(&run, ARGS("run", "-v", "--daemons", "2", "--workers", "2", "--", "sh", "-c",
                         "echo up; exec sleep 99999"));
    run_await(&run, run.err, "[rank 1] up\n");
    kill(run.pid, SIGKILL);
    run_finish(&run);
    EXPECT_EQ(run.code, 128 + SIGKILL);
    expect_gone(" pid=", 4);
    EXPECT_EQ(leftovers(), 1);
    ctl(ARGS("run", "--", "true"));
    EXPECT_EQ(run.code, 0);
    EXPECT_EQ(leftovers(), 0);
}

TEST(run_spares_the_directory_of_a_live_run)
{
    static struct run other;
    char command[256];
    run_start(&other, ARGS("run", "--", "sh", "-c",
                           ("d=${SHARDD_ADDRESS%\\?*}; echo up; "
                            "while [ ! -e $d/go ]; do sleep 0.05; done; ls $d")));
    run_await(&other, other.out, "up\n");
    ctl(ARGS("run", "--", "true"));
    EXPECT_EQ(run.code, 0);
    EXPECT_EQ(leftovers(), 1);
    snprintf(command, sizeof(command), "touch $(echo %s/shardd-run-*)/go", base);
    EXPECT_EQ(system(command), 0);
    run_finish(&other);
    EXPECT_EQ(other.code, 0);
    EXPECT_HAS(other.out, "cpu0.sock");
    expect_clean();
}

TEST(directory_is_private_and_too_long_a_base_is_an_error)
{
    ctl(ARGS("run", "--", "sh", "-c", "stat -c '%a %u' ${SHARDD_ADDRESS%\\?*}"));
    char want[32];
    snprintf(want, sizeof(want), "700 %u\n", (unsigned)geteuid());
    EXPECT_STR(run.out, want);
    char longer[128];
    snprintf(longer, sizeof(longer), "%s/%060d", base, 0);
    CHECK(mkdir(longer, 0700) == 0);
    setenv("XDG_RUNTIME_DIR", longer, 1);
    ctl(ARGS("run", "--", "true"));
    setenv("XDG_RUNTIME_DIR", base, 1);
    EXPECT_EQ(run.code, 1);
    EXPECT_HAS(run.err, "is too long for sockets in it");
    CHECK(rmdir(longer) == 0);
    expect_clean();
}

TEST(lines_of_shardctl_have_no_escape_sequences)
{
    ctl(ARGS("run", "--max-restarts", "0", "--", "\033[2J\xff/nowhere"));
    EXPECT(run.code != 0);
    EXPECT_HAS(run.err, "?[2J\xff/nowhere");
    EXPECT(strchr(run.err, '\033') == NULL);
    ctl(ARGS("run", "--log-format", "json", "--max-restarts", "0", "--", "\033[2J\xff/nowhere"));
    EXPECT_HAS(run.err, "?[2J?/nowhere");
    EXPECT_EQ(run.err[0], '{');
    expect_clean();
}

/* -- Who may look into it ---------------------------------------------------------------------- */

/* As a worker, which is a process of the daemons' own user: its parent's and the daemon's
 * descriptors and memory. Root may look anywhere, unless it is without capabilities, as under a
 * user of its own. */
static void look_inside(void)
{
    static const char looks[] =
        ("for p in $PPID $(cat /proc/$PPID/task/$PPID/children); do "
         "name=$(cat /proc/$p/comm); case $name in shard*) "
         "for at in fd/0 fd/2; do readlink /proc/$p/$at >/dev/null && echo $name $at; done; "
         "for at in maps environ mem; do true 2>/dev/null </proc/$p/$at && echo $name $at; done;; "
         "esac; "
         "done; cat /proc/self/environ >/dev/null && echo self");
    if (geteuid() != 0) {
        ctl(ARGS("run", "--", "sh", "-c", looks));
        return;
    }
    if (system("setpriv --bounding-set=-all true") != 0)
        SKIP("setpriv cannot take capabilities away here");
    run_start_program(
        &run, "/bin/sh",
        ARGS("-c", "exec setpriv --bounding-set=-all shardctl run -- sh -c \"$0\"", looks));
    run_finish(&run);
}

TEST(daemon_and_keeper_are_closed_to_their_own_user)
{
    unsetenv("SHARDD_CORE_DUMPS");
    look_inside();
    EXPECT_EQ(run.code, 0);
    EXPECT_STR(run.out, "self\n");
    expect_clean();
}

TEST(daemon_and_keeper_are_open_where_core_dumps_are_asked_for)
{
    setenv("SHARDD_CORE_DUMPS", "1", 1);
    look_inside();
    unsetenv("SHARDD_CORE_DUMPS");
    EXPECT_EQ(run.code, 0);
    EXPECT_HAS(run.out, "shardctl fd/2\nshardctl maps\n"); /* mem: where Yama lets it */
    EXPECT_HAS(run.out, "shardd fd/2\nshardd maps\n");
    expect_clean();
}

TEST(core_dumps_are_a_0_or_a_1)
{
    setenv("SHARDD_CORE_DUMPS", "yes", 1);
    run_start_program(&run, BIN "/shardd", ARGS("--device", "cpu0"));
    unsetenv("SHARDD_CORE_DUMPS");
    run_finish(&run);
    EXPECT_EQ(run.code, 2);
    EXPECT_HAS(run.err, "SHARDD_CORE_DUMPS 'yes' is neither 0 nor 1");
}

int main(int argc, char **argv)
{
    return ctl_main(argc, argv);
}
