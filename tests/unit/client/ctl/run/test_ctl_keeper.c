/* shardctl as the service manager of its daemons and workers: what they store comes back, who dies
 * is started again; while state is kept, for ever. The daemon is
 * tests/unit/client/ctl/run/fake_shardd.c, but for the last tests.
 */
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "proto/base/check.h"
#include "tests/lib/ctl_run.h"

#define RUN(...) ARGS("run", "-v", __VA_ARGS__)
#define WAIT     "--", "sh", "-c", "echo up; exec sleep 99999"

/* How it is started: the fake daemon in this mode. */
static void fake(const char *mode)
{
    setenv("SHARDD_BIN", SHD_FAKE_SHARDD, 1);
    setenv("FAKE", mode, 1);
}

/* So many seconds of a quick machine, as a flag's value; it lives until the next test. */
static const char *seconds(uint64_t count)
{
    static char texts[4][24];
    static unsigned last;
    char *text = texts[last++ % ARRAY_SIZE(texts)];
    snprintf(text, sizeof(texts[0]), "%" PRIu64, test_paced(count * 1000) / 1000);
    return text;
}

static pid_t last_pid(const char *mark)
{
    pid_t pids[PIDS_MAX];
    const unsigned count = pids_named(mark, pids);
    EXPECT(count > 0);
    return pids[count - 1];
}

static unsigned count_of(const char *part)
{
    unsigned count = 0;
    for (const char *at = strstr(run.err, part); at != NULL; at = strstr(at + 1, part))
        count++;
    return count;
}

static void await_count(const char *part, unsigned count)
{
    const uint64_t deadline = test_now_ms() + TEST_HANG_MS;
    while (count_of(part) < count)
        if (test_now_ms() > deadline || !run_read(&run, 100))
            FAIL("no %u '%s' in stderr '%s'", count, part, run.err);
}

static void end_by_term(void)
{
    kill(run.pid, SIGTERM);
    run_finish(&run);
    EXPECT_EQ(run.code, 128 + SIGTERM);
    expect_clean();
}

/* Files shardctl has open, named memfd. */
static unsigned memfds_of(pid_t pid)
{
    char command[128], text[32] = "";
    snprintf(command, sizeof(command), "ls -l /proc/%ld/fd | grep -c memfd", (long)pid);
    FILE *f = popen(command, "re");
    CHECK(f != NULL && fgets(text, sizeof(text), f) != NULL);
    pclose(f);
    return (unsigned)strtoul(text, NULL, 10);
}

/* -- Daemons --------------------------------------------------------------------------------- */

TEST(segments_survive_ten_kills_with_their_contents)
{
    fake("");
    run_start(&run, RUN("--daemons", "2", WAIT));
    run_await(&run, run.out, "up\n");
    for (unsigned i = 1; i <= 10; i++) {
        char says[160];
        const pid_t pid = last_pid("started daemon cpu1 pid=");
        kill(pid, SIGKILL);
        snprintf(says, sizeof(says), "[cpu1] adopted 3 of 6 files: seg0=%u seg1=%u seg2=%u\n",
                 i + 1, i + 1, i + 1);
        run_await(&run, run.err, says);
        await_count("daemon cpu1 is ready", i + 1);
        snprintf(says, sizeof(says),
                 "daemon cpu1 (pid %ld) was killed by signal 9 (SIGKILL): started again as pid "
                 "%ld with 3 kept segments\n",
                 (long)pid, (long)last_pid("started daemon cpu1 pid="));
        EXPECT_HAS(run.err, says);
    }
    EXPECT_EQ(memfds_of(run.pid), 6);
    EXPECT_EQ(count_of("cpu0 (pid"), 0);
    end_by_term();
}

TEST(what_a_daemon_stored_just_before_its_end_counts)
{
    fake("");
    run_start(&run, RUN(WAIT));
    run_await(&run, run.out, "up\n");
    kill(last_pid("started daemon cpu0 pid="), SIGUSR1);
    run_await(&run, run.err, "adopted 4 of 7 files: seg0=2 seg1=2 seg2=2 late=101\n");
    EXPECT_HAS(run.err, "with 4 kept segments\n");
    end_by_term();
}

TEST(dropped_names_are_gone_and_exit_codes_count_as_death)
{
    fake("lost");
    run_start(&run, RUN(WAIT));
    run_await(&run, run.out, "up\n");
    kill(last_pid("started daemon cpu0 pid="), SIGKILL);
    await_count("is ready", 2);
    kill(last_pid("started daemon cpu0 pid="), SIGTERM); /* it exits with 0 */
    run_await(&run, run.err, "adopted 2 of 5 files: seg0=3 seg2=3\n");
    EXPECT_HAS(run.err, ") exited with code 0: started again as pid ");
    EXPECT_EQ(memfds_of(run.pid), 2);
    end_by_term();
}

TEST(wrong_names_are_refused_aloud)
{
    fake("names");
    run_start(&run, RUN(WAIT));
    run_await(&run, run.out, "up\n");
    EXPECT_EQ(count_of("daemon cpu0: refused FDNAME '"), 3);
    EXPECT_HAS(run.err, "refused FDNAME 'a:b': 1 to 255 printable ASCII characters, no ':'\n");
    EXPECT_EQ(memfds_of(run.pid), 4);
    end_by_term();
}

TEST(descriptors_beyond_the_cap_are_refused_aloud_and_the_rest_comes_back)
{
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) < 0 || files.rlim_max < 8500)
        SKIP("the limit of open files is too low\n");
    const struct rlimit usual = { .rlim_cur = 1024, .rlim_max = files.rlim_max };
    CHECK(setrlimit(RLIMIT_NOFILE, &usual) == 0);
    fake("many");
    run_start(&run, RUN("--", "sh", "-c", "ulimit -Sn; echo up; exec sleep 99999"));
    CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0);
    run_await(&run, run.out, "1024\nup\n"); /* for workers it is as it was */
    EXPECT_EQ(count_of("a daemon's limit is 4096\n"), 3 + 4100 - 4096);
    EXPECT_EQ(memfds_of(run.pid), 4096);
    kill(last_pid("started daemon cpu0 pid="), SIGKILL);
    run_await(&run, run.err, "adopted 4096 of 4099 files: seg0=2 seg1=2 seg2=2 many0=2 many1=3");
    end_by_term();
}

TEST(daemon_that_never_gets_ready_is_given_up_with_its_tries_and_last_words)
{
    fake("never");
    const uint64_t start = test_now_ms();
    ctl(RUN("--", "true"));
    EXPECT_EQ(run.code, 1);
    EXPECT_EQ(count_of("started daemon cpu0"), 8);
    EXPECT_EQ(count_of(") exited with code 4 before it was ready: no luck\n"), 8);
    EXPECT_HAS(run.err, "daemon cpu0: given up after 8 tries in a row that did not get ready; its "
                        "last words: no luck\n");
    EXPECT(test_now_ms() - start >= 50 + 100 + 200 + 400 + 800 + 1600 + 3200);
    expect_clean();
}

TEST(daemon_with_kept_state_that_hangs_is_killed_and_tried_again)
{
    char says[64];
    fake("hang");
    run_start(&run, RUN("--timeout", seconds(1), WAIT));
    run_await(&run, run.out, "up\n");
    kill(last_pid("started daemon cpu0 pid="), SIGKILL);
    snprintf(says, sizeof(says), ") was not ready after %s s (--timeout)", seconds(1));
    await_count(says, 2);
    await_count("seg0=4", 1); /* what it holds outlives each try */
    end_by_term();
}

TEST(daemon_that_asks_for_more_time_when_started_again_has_it)
{
    fake("slow");
    setenv("FAKE_SLOW_S", seconds(2), 1);
    run_start(&run, RUN("--timeout", seconds(1), WAIT));
    run_await(&run, run.out, "up\n");
    kill(last_pid("started daemon cpu0 pid="), SIGKILL);
    await_count("daemon cpu0 is ready", 2);
    end_by_term();
}

/* --max-restarts bounds how often it is started, not whether. */
TEST(daemon_with_kept_state_that_is_killed_too_often_waits_and_goes_on)
{
    char says[64];
    fake("");
    run_start(&run, RUN("--max-restarts", "2", WAIT));
    run_await(&run, run.out, "up\n");
    unsigned kills = 0;
    do { /* three, unless they take more than 10 s */
        await_count("daemon cpu0 is ready", kills + 1);
        kill(last_pid("started daemon cpu0 pid="), SIGKILL);
        await_count(" (SIGKILL): started again ", ++kills);
    } while (count_of("(SIGKILL): started again 2 times within 10 s, the limit") == 0);
    EXPECT(kills >= 3);
    snprintf(says, sizeof(says), "seg0=%u seg1=%u seg2=%u", kills + 1, kills + 1, kills + 1);
    await_count(says, 1);
    end_by_term();
}

/* The program under a name that can be taken away. */
static void fake_at(char path[128])
{
    char command[512];
    snprintf(path, 128, "%s/fake", base);
    snprintf(command, sizeof(command), "cp %s %s", SHD_FAKE_SHARDD, path);
    CHECK(system(command) == 0);
    setenv("SHARDD_BIN", path, 1);
    setenv("FAKE", "", 1);
}

static void remove_fake(const char *path)
{
    CHECK(unlink(path) == 0);
}

TEST(daemon_whose_program_is_away_is_tried_until_it_is_back)
{
    char path[128], away[136], command[600];
    fake_at(path);
    snprintf(away, sizeof(away), "%s.away", path);
    run_start(&run, RUN("--daemons", "2", WAIT));
    run_await(&run, run.out, "up\n");
    CHECK(rename(path, away) == 0);
    kill(last_pid("started daemon cpu0 pid="), SIGKILL);
    /* 8 tries end a run that holds nothing; the eighth is said with what is kept. */
    await_count("cannot run '", 8);
    EXPECT_HAS(run.err, "(8 tries), the next in 6.4 s; its state is kept (3 segments)\n");
    snprintf(command, sizeof(command),
             "d=$(echo %s/shardd-run-*); grep -q '^cpu0 since=[0-9]* next=[0-9]* tries=[0-9]* "
             "kept=3 why=daemon cpu0: cannot run' $d/keeper.down && touch $d/cpu0.sock && "
             "%s/shardctl status -d $d | grep -q 'cpu0  unreachable: daemon cpu0: cannot run .*its "
             "state is kept'",
             base, BIN);
    EXPECT_EQ(system(command), 0);
    CHECK(rename(away, path) == 0);
    await_count("[cpu0] adopted 3 of 6 files: seg0=2 seg1=2 seg2=2", 1);
    await_count("daemon cpu0 is ready", 2);
    snprintf(command, sizeof(command), "d=$(echo %s/shardd-run-*); [ ! -s $d/keeper.down ]", base);
    EXPECT_EQ(system(command), 0);
    remove_fake(path);
    end_by_term();
}

/* The limit of open files falls below what the keeper has open: it cannot even start a child. */
TEST(keeper_out_of_descriptors_goes_on_when_there_are_some)
{
    struct rlimit before, few = { 8, 8 };
    fake("");
    run_start(&run, RUN(WAIT));
    run_await(&run, run.out, "up\n");
    EXPECT_EQ(prlimit(run.pid, RLIMIT_NOFILE, NULL, &before), 0);
    few.rlim_max = before.rlim_max;
    EXPECT_EQ(prlimit(run.pid, RLIMIT_NOFILE, &few, NULL), 0);
    kill(last_pid("started daemon cpu0 pid="), SIGKILL);
    await_count("Too many open files", 2);
    EXPECT_EQ(prlimit(run.pid, RLIMIT_NOFILE, &before, NULL), 0);
    await_count("adopted 3 of 6 files: seg0=2 seg1=2 seg2=2", 1);
    end_by_term();
}

/* What a daemon wants kept waits for a descriptor, and the daemon waits for that. */
TEST(segment_that_cannot_be_taken_yet_is_taken_later)
{
    struct rlimit before, few = { 8, 8 };
    char command[256];
    unsetenv("SHARDD_BIN");
    run_start(&run, RUN("--", "sh", "-c",
                        ("echo up; while [ ! -e ${SHARDD_ADDRESS%\\?*}/go ]; do sleep 0.05; done; "
                         "exec shd-gpt --layers 1 --dim 32 --heads 1 --seq 16 --batch 2 "
                         "--micro-batches 2 --steps 2 --sample 0")));
    run_await(&run, run.out, "up\n");
    EXPECT_EQ(prlimit(run.pid, RLIMIT_NOFILE, NULL, &before), 0);
    few.rlim_max = before.rlim_max;
    EXPECT_EQ(prlimit(run.pid, RLIMIT_NOFILE, &few, NULL), 0);
    snprintf(command, sizeof(command), "touch $(echo %s/shardd-run-*)/go", base);
    EXPECT_EQ(system(command), 0);
    await_count("too many open files here to take what a daemon wants kept", 1);
    EXPECT_EQ(prlimit(run.pid, RLIMIT_NOFILE, &before, NULL), 0);
    run_finish(&run);
    EXPECT_EQ(run.code, 0);
    EXPECT_HAS(run.out, " step=2\n");
    EXPECT_HAS(run.err, "not saved, and gone with the daemons: model 'gpt', 2 steps, ");
    expect_clean();
}

TEST(daemon_stopped_with_the_run_is_not_started_again)
{
    fake("");
    ctl(RUN("--daemons", "3", "--workers", "2", "--", "true"));
    EXPECT_EQ(run.code, 0);
    EXPECT_EQ(count_of("started daemon"), 3);
    EXPECT_EQ(count_of("started again"), 0);
    expect_clean();
}

/* -- Workers --------------------------------------------------------------------------------- */

TEST(killed_worker_is_started_again_with_its_rank)
{
    fake("");
    ctl(RUN("--workers", "3", "--", "sh", "-c",
            ("echo rank $RANK of $WORLD_SIZE port $MASTER_PORT; d=${SHARDD_ADDRESS%\\?*}; "
             "[ $RANK != 1 ] && exit 0; [ -e $d/once ] && exit 0; touch $d/once; kill -9 $$")));
    EXPECT_EQ(run.code, 0);
    EXPECT_EQ(count_of("[rank 1] rank 1 of 3 port "), 2);
    EXPECT_EQ(count_of("started worker rank 1 pid="), 2);
    EXPECT_HAS(run.err, "was killed by signal 9 (SIGKILL): started again as pid ");
    expect_clean();
}

/* SIGKILL comes from outside, by whom is not known: no reason to end with the state. */
TEST(worker_that_is_killed_too_often_waits_and_goes_on)
{
    fake("");
    run_start(&run, RUN("--max-restarts", "2", "--", "sh", "-c", "kill -9 $$"));
    await_count("started again 2 times within 10 s, the limit (--max-restarts): the next start is",
                1);
    const char *limit = strstr(run.err, "started again 2 times"), *at = run.err;
    for (uint32_t starts = 0; starts < 3; starts++) { /* it said so behind the third, */
        at = strstr(at, "started worker rank 0");
        EXPECT(at != NULL && at++ < limit);
    }
    at = strstr(at, "started worker rank 0"); /* and not the fourth */
    EXPECT(at == NULL || at > limit);
    await_count("started worker rank 0", 4);
    end_by_term();
}

TEST(worker_that_crashes_each_time_is_given_up)
{
    fake("");
    ctl(RUN("--workers", "2", "--max-restarts", "5", "--", "sh", "-c",
            "[ $RANK = 0 ] && kill -11 $$; exec sleep 99999"));
    EXPECT_EQ(run.code, 128 + SIGSEGV);
    EXPECT_EQ(count_of("started worker rank 0"), 6);
    EXPECT_HAS(run.err, "given up, it was started again 5 times within 10 s (--max-restarts)\n");
    expect_clean();
}

TEST(worker_killed_for_its_closed_output_is_not_started_again)
{
    fake("");
    ctl(RUN("--", "sh", "-c", "kill -PIPE $$"));
    EXPECT_EQ(run.code, 128 + SIGPIPE);
    EXPECT_EQ(count_of("started worker"), 1);
    expect_clean();
}

TEST(worker_with_an_exit_code_ends_the_run_also_when_it_was_started_again)
{
    fake("");
    ctl(RUN(
        "--workers", "2", "--", "sh", "-c",
        ("d=${SHARDD_ADDRESS%\\?*}; [ $RANK = 0 ] && exec sleep 99999; [ -e $d/once ] && exit 7; "
         "touch $d/once; kill -9 $$")));
    EXPECT_EQ(run.code, 7);
    EXPECT_HAS(run.err, ") exited with code 7\n");
    expect_clean();
}

/* -- The watchdog ---------------------------------------------------------------------------- */

TEST(daemon_that_is_stopped_is_killed_and_gets_its_segments_back)
{
    fake("");
    run_start(&run, RUN("--daemons", "2", "--watchdog", seconds(1), WAIT));
    run_await(&run, run.out, "up\n");
    const pid_t pid = last_pid("started daemon cpu1 pid=");
    char says[128];
    kill(pid, SIGSTOP);
    snprintf(
        says, sizeof(says),
        "daemon cpu1 (pid %ld) has not said that it is well for %s s (--watchdog): killing it\n",
        (long)pid, seconds(1));
    run_await(&run, run.err, says);
    run_await(&run, run.err, "[cpu1] adopted 3 of 6 files: seg0=2 seg1=2 seg2=2\n");
    await_count("daemon cpu1 is ready", 2);
    end_by_term();
}

TEST(daemon_that_runs_and_says_nothing_is_killed_unless_that_is_turned_off)
{
    fake("silent");
    run_start(&run, RUN("--watchdog", seconds(1), WAIT));
    run_await(&run, run.err, "(--watchdog): killing it\n");
    run_await(&run, run.err, "adopted 3 of 6 files");
    end_by_term();
    ctl(RUN("--watchdog", "0", "--", "sh", "-c", "echo \"watchdog '$WATCHDOG_USEC'\"; sleep 1.5"));
    EXPECT_EQ(run.code, 0);
    EXPECT_HAS(run.out, "watchdog ''\n");
    EXPECT_EQ(count_of("killing it"), 0);
    expect_clean();
}

TEST(daemon_under_a_debugger_is_left_alone_until_that_lets_go)
{
    fake("");
    run_start(&run, RUN("--watchdog", seconds(1), WAIT));
    run_await(&run, run.out, "up\n");
    const pid_t pid = last_pid("started daemon cpu0 pid=");
    if (ptrace(PTRACE_SEIZE, pid, NULL, NULL) < 0) {
        end_by_term();
        SKIP("this process may not trace\n");
    }
    CHECK(ptrace(PTRACE_INTERRUPT, pid, NULL, NULL) == 0);
    run_await(&run, run.err, "(--watchdog): left alone, process ");
    EXPECT_EQ(count_of("killing it"), 0);
    CHECK(waitpid(pid, NULL, __WALL) == pid);
    kill(pid, SIGSTOP);
    CHECK(ptrace(PTRACE_DETACH, pid, NULL, SIGSTOP) == 0);
    run_await(&run, run.err, "(--watchdog): killing it\n");
    await_count("daemon cpu0 is ready", 2);
    end_by_term();
}

/* The worker is a shell whose child is stopped, as a launcher's would be. */
TEST(worker_that_is_stopped_is_killed_and_started_again_with_its_rank)
{
    char says[80];
    fake("");
    ctl(RUN("--workers", "2", "--watchdog", seconds(1), "--", "sh", "-c",
            ("d=${SHARDD_ADDRESS%\\?*}; [ $RANK = 0 ] && exit 0; [ -e $d/once ] && exit 0; "
             "touch $d/once; sh -c 'kill -STOP $$'; exit 3")));
    EXPECT_EQ(run.code, 0);
    EXPECT_HAS(run.err, "worker rank 1 (pid ");
    snprintf(says, sizeof(says), ") was stopped for %s s (--watchdog): killing it\n", seconds(1));
    EXPECT_HAS(run.err, says);
    EXPECT_EQ(count_of("started worker rank 1 pid="), 2);
    expect_clean();
}

TEST(worker_that_sleeps_or_computes_is_left_alone)
{
    fake("");
    setenv("WATCHDOG_S", seconds(1), 1);
    ctl(RUN("--workers", "2", "--watchdog", seconds(1), "--", "sh", "-c",
            ("for_s=$((WATCHDOG_S + 1)); [ $RANK = 0 ] && exec sleep $for_s; "
             "end=$(($(date +%s) + for_s)); while [ $(date +%s) -lt $end ]; do :; done")));
    EXPECT_EQ(run.code, 0);
    EXPECT_EQ(count_of("killing it"), 0);
    expect_clean();
}

/* shardctl stands still for longer than the watchdog's time, and all that it started beside it. */
TEST(nobody_is_killed_when_all_were_stopped_together)
{
    fake("");
    run_start(&run, RUN("--watchdog", seconds(2), WAIT));
    run_await(&run, run.out, "up\n");
    run_await(&run, run.err, "started worker rank 0 pid=");
    const pid_t all[] = { run.pid, last_pid("started daemon cpu0 pid="),
                          last_pid("started worker rank 0 pid=") };
    for (size_t i = 0; i < ARRAY_SIZE(all); i++)
        kill(all[i], SIGSTOP);
    sleep_ms((long)test_paced(2500));
    for (size_t i = 0; i < ARRAY_SIZE(all); i++)
        kill(all[ARRAY_SIZE(all) - 1 - i], SIGCONT);
    run_read(&run, 700);
    EXPECT_EQ(count_of("killing it"), 0);
    end_by_term();
}

/* -- Elastic --------------------------------------------------------------------------------- */

#define ELASTIC_SCRIPT                                                                 \
    "trap 'exit 0' TERM; echo rank $RANK of $WORLD_SIZE elastic $SHARDD_ELASTIC >&2; " \
    "while [ ! -e ${SHARDD_ADDRESS%\\?*}/end ]; do sleep 0.05; done"

static void say_end(void)
{
    char command[128];
    snprintf(command, sizeof(command), "cd %s/shardd-run-* && touch end", base);
    CHECK(system(command) == 0);
}

TEST(workers_join_and_leave_by_signals)
{
    fake("");
    run_start(&run, RUN("--elastic", "--workers", "1..3", "--", "bash", "-c", (ELASTIC_SCRIPT)));
    run_await(&run, run.err, "rank 0 of 3 elastic 1\n");
    kill(run.pid, SIGUSR1);
    run_await(&run, run.err, "worker rank 1 joined as pid ");
    run_await(&run, run.err, "[rank 1] rank 1 of 3 elastic 1\n");
    kill(run.pid, SIGUSR1);
    run_await(&run, run.err, "[rank 2] rank 2 of 3 elastic 1\n");
    kill(run.pid, SIGUSR1);
    run_await(&run, run.err, "no worker added: there are 3 already (--workers)\n");
    kill(run.pid, SIGUSR2);
    run_await(&run, run.err, "worker rank 2 (pid ");
    run_await(&run, run.err, ") exited with code 0: left\n");
    kill(run.pid, SIGUSR1); /* the rank is given to the next */
    await_count("worker rank 2 joined as pid ", 2);
    await_count("[rank 2] rank 2 of 3", 2);
    for (unsigned i = 0; i < 2; i++) {
        kill(run.pid, SIGUSR2);
        await_count(": left\n", 2 + i);
    }
    kill(run.pid, SIGUSR2);
    run_await(&run, run.err, "no worker asked to leave: 1 must stay (--workers)\n");
    say_end();
    run_finish(&run);
    EXPECT_EQ(run.code, 0);
    expect_clean();
}

TEST(leaving_worker_may_die_by_the_signal_and_is_killed_when_it_does_not_leave)
{
    fake("");
    run_start(&run, RUN("--elastic", "--workers", "1..3", "--grace", "1", "--", "bash", "-c",
                        ("[ $RANK = 1 ] && trap '' TERM; echo rank $RANK >&2; "
                         "while [ ! -e ${SHARDD_ADDRESS%\\?*}/end ]; do sleep 0.05; done")));
    run_await(&run, run.err, "rank 0\n");
    for (unsigned rank = 1; rank < 3; rank++) {
        char says[32];
        kill(run.pid, SIGUSR1);
        snprintf(says, sizeof(says), "[rank %u] rank %u\n", rank, rank);
        run_await(&run, run.err, says);
    }
    kill(run.pid, SIGUSR2);
    run_await(&run, run.err, ") was killed by signal 15 (SIGTERM): left\n");
    kill(run.pid, SIGUSR2);
    run_await(&run, run.err, ") did not leave within 1 s: killing it\n");
    run_await(&run, run.err, ") was killed by signal 9 (SIGKILL): left\n");
    say_end();
    run_finish(&run);
    EXPECT_EQ(run.code, 0);
    EXPECT_EQ(count_of("started again"), 0);
    expect_clean();
}

TEST(elastic_worker_that_is_killed_is_started_again)
{
    fake("");
    run_start(&run, RUN("--elastic", "--workers", "2", "--", "bash", "-c", (ELASTIC_SCRIPT)));
    run_await(&run, run.err, "[rank 1] rank 1 of 2");
    kill(last_pid("started worker rank 1 pid="), SIGKILL);
    await_count("[rank 1] rank 1 of 2", 2);
    say_end();
    run_finish(&run);
    EXPECT_EQ(run.code, 0);
    expect_clean();
}

TEST(elastic_run_ends_when_its_workers_are_done_and_signals_come_late_or_early)
{
    fake("");
    run_start(&run, RUN("--elastic", "--workers", "1..2", "--", "bash", "-c", (ELASTIC_SCRIPT)));
    run_await(&run, run.err, "started daemon");
    kill(run.pid, SIGUSR1); /* before they are ready, or just after */
    run_await(&run, run.err, "[rank 1] rank 1 of 2");
    say_end();
    for (unsigned i = 0; i < 20 && run_read(&run, 5); i++)
        kill(run.pid, i % 2 == 0 ? SIGUSR1 : SIGUSR2);
    run_finish(&run);
    EXPECT_EQ(run.code, 0);
    expect_clean();
}

/* -- Finding the daemon ---------------------------------------------------------------------- */

TEST(shardd_bin_that_is_not_there_is_an_error)
{
    setenv("SHARDD_BIN", "/nonexistent/shardd", 1);
    ctl(RUN("--", "true"));
    EXPECT_EQ(run.code, 1);
    EXPECT_HAS(run.err, "SHARDD_BIN is '/nonexistent/shardd': No such file");
    expect_clean();
}

int main(int argc, char **argv)
{
    return ctl_main(argc, argv);
}
