/* shardctl up and down: daemons that stay, their keeper, and that nothing stays longer. */
#include <sys/stat.h>
#include <sys/wait.h>

#include "proto/base/check.h"
#include "proto/share/fdpass.h"
#include "tests/lib/ctl_run.h"

static char dir[128], address[192]; /* where `up` works, and what it prints */

static void start(void)
{
    setenv("SHARDD_BIN", SHD_FAKE_SHARDD, 1);
    setenv("FAKE", "", 1);
    snprintf(dir, sizeof(dir), "rm -rf %s/up", base);
    CHECK(system(dir) == 0); /* the log of the test before */
    snprintf(dir, sizeof(dir), "%s/up", base);
    snprintf(address, sizeof(address), "export SHARDD_ADDRESS=%s\n", dir);
}

static void up(void)
{
    ctl(ARGS("up", "-v", "--daemons", "2", "--runtime-dir", dir));
    EXPECT_EQ(run.code, 0);
    EXPECT_STR(run.out, address);
}

static void down(void)
{
    char says[160];
    ctl(ARGS("down", "--yes", "--runtime-dir", dir));
    snprintf(says, sizeof(says), " at %s\n", dir);
    EXPECT(strncmp(run.out, "stopped ", 8) == 0 && strstr(run.out, says) != NULL);
    EXPECT_EQ(run.code, 0);
}

static void expect_nothing_runs(void)
{
    ctl(ARGS("down", "--yes", "--runtime-dir", dir));
    EXPECT_EQ(run.code, 1);
    EXPECT_HAS(run.err, "nothing runs at '");
    EXPECT_EQ(leftovers(), 0);
}

/* The pid that a second `up` names. */
static pid_t keeper(void)
{
    ctl(ARGS("up", "--runtime-dir", dir));
    EXPECT_EQ(run.code, 1);
    EXPECT_STR(run.out, "");
    EXPECT_HAS(run.err, "is kept by a `shardctl up` that runs, pid ");
    return (pid_t)strtol(strstr(run.err, "runs, pid ") + strlen("runs, pid "), NULL, 10);
}

static void await_gone(pid_t pid)
{
    EXPECT_SOON(gone(pid));
}

static void await_log(const char *part)
{
    char command[256];
    snprintf(command, sizeof(command), "grep -qF '%s' %s/up.log", part, dir);
    const uint64_t deadline = test_now_ms() + TEST_HANG_MS;
    while (system(command) != 0) {
        if (test_now_ms() > deadline)
            FAIL("no '%s' in the log", part);
        sleep_ms(10);
    }
}

TEST(daemons_stay_until_down)
{
    pid_t pids[PIDS_MAX];
    start();
    up();
    EXPECT_EQ(pids_named("started daemon cpu1 pid=", pids), 1);
    const pid_t kept_by = keeper();
    EXPECT(kept_by > 1 && !gone(kept_by) && !gone(pids[0]));
    down();
    EXPECT(gone(kept_by) && gone(pids[0]));
    expect_nothing_runs();
}

TEST(real_daemons_serve_commands_that_come_later)
{
    char command[512];
    start();
    unsetenv("SHARDD_BIN");
    for (int i = 0; i < 2; i++) { /* a second time in the same place */
        snprintf(command, sizeof(command),
                 "set -e; unset XDG_RUNTIME_DIR; eval \"$(shardctl up -n 2 -d '%s')\"; "
                 "shd-gpt --layers 1 --dim 32 --heads 1 --seq 16 --batch 2 --micro-batches 2 "
                 "--steps 2 --sample 0 >/dev/null; shardctl status | grep -q OPEN",
                 dir);
        EXPECT_EQ(system(command), 0);
        down();
        EXPECT_EQ(leftovers(), 0);
    }
}

TEST(keeper_gives_a_killed_daemon_its_state_back)
{
    pid_t pids[PIDS_MAX];
    start();
    up();
    EXPECT_EQ(pids_named("started daemon cpu0 pid=", pids), 1);
    kill(pids[0], SIGKILL);
    await_log("[cpu0] adopted 3 of 6 files: seg0=2 seg1=2 seg2=2");
    await_log("was killed by signal 9 (SIGKILL): started again as pid ");
    down();
    expect_nothing_runs();
}

/* A shell's commands beside $D, with real daemons; `train N` goes on to step N. */
static void expect_shell(const char *commands)
{
    char command[2048];
    start();
    unsetenv("SHARDD_BIN");
    setenv("D", dir, 1);
    snprintf(command, sizeof(command),
             "set -e; unset XDG_RUNTIME_DIR; train() { shd-gpt --layers 1 --dim 32 --heads 1 "
             "--seq 16 --batch 2 --micro-batches 2 --sample 0 --steps $1 >/dev/null; }; "
             "eval \"$(shardctl up -n 2 -d $D)\"; %s",
             commands);
    EXPECT_EQ(system(command), 0);
    expect_nothing_runs();
}

TEST(down_says_what_is_lost_and_asks)
{
    expect_shell("train 3; r=0; shardctl down -d $D </dev/null 2>$D.err || r=$?; [ $r = 2 ]; "
                 "grep -q \"in no checkpoint: model 'gpt', 3 steps, .*; no checkpoint is known\" "
                 "$D.err; grep -q 'let it go with --yes' $D.err; "
                 "shardctl checkpoint $D.ck >/dev/null; train 4; "
                 "for a in n1 y0; do r=0; "
                 "echo ${a%?} | script -qec 'shardctl down -d $D' /dev/null >$D.err || r=$?; "
                 "grep -q '4 steps, .* the last checkpoint is of step 3, .* ago' $D.err; "
                 "grep -q 'lose that? .y/N.' $D.err; [ $r = ${a#?} ]; done; "
                 "rm -r $D.err $D.ck");
}

TEST(down_of_what_is_saved_or_empty_does_not_ask)
{
    expect_shell("shardctl down -d $D </dev/null >$D.err; eval \"$(shardctl up -n 2 -d $D)\"; "
                 "train 3; shardctl checkpoint $D.ck >$D.err; "
                 "shardctl down -d $D </dev/null >$D.err; rm -r $D.err $D.ck");
}

TEST(killed_keeper_takes_its_daemons_along_and_up_works_again)
{
    pid_t pids[PIDS_MAX];
    start();
    up();
    EXPECT_EQ(pids_named(" pid=", pids), 2);
    const pid_t kept_by = keeper();
    kill(kept_by, SIGKILL);
    await_gone(kept_by);
    await_gone(pids[0]);
    await_gone(pids[1]);
    ctl(ARGS("down", "--yes", "--runtime-dir", dir));
    EXPECT_EQ(run.code, 1);
    up();
    down();
    expect_nothing_runs();
}

TEST(sockets_of_a_killed_keepers_daemons_are_removed)
{
    char command[512];
    start();
    unsetenv("SHARDD_BIN");
    ctl(ARGS("up", "--daemons", "3", "--runtime-dir", dir));
    EXPECT_EQ(run.code, 0);
    const pid_t kept_by = keeper();
    kill(kept_by, SIGKILL);
    await_gone(kept_by);
    snprintf(command, sizeof(command), "touch %s/.cpu2sock", dir); /* as it made its own */
    EXPECT_EQ(system(command), 0);
    up(); /* at once: the daemons may still be about to die */
    snprintf(command, sizeof(command),
             "cd %s && [ \"$(ls *.sock)\" = 'cpu0.sock\ncpu1.sock' ] && [ ! -e .cpu2sock ]", dir);
    EXPECT_EQ(system(command), 0);
    down();
    expect_nothing_runs();
}

TEST(up_that_fails_says_why_and_leaves_nothing)
{
    start();
    setenv("FAKE", "never", 1);
    ctl(ARGS("up", "-v", "--max-restarts", "0", "--runtime-dir", dir));
    EXPECT_EQ(run.code, 1);
    EXPECT_STR(run.out, "");
    EXPECT_HAS(run.err, ") exited with code 4 before it was ready: no luck\n");
    expect_clean();
    setenv("SHARDD_BIN", "/nonexistent/shardd", 1);
    ctl(ARGS("up", "--runtime-dir", dir));
    EXPECT_EQ(run.code, 1);
    EXPECT_HAS(run.err, "SHARDD_BIN is '/nonexistent/shardd'");
    expect_clean();
}

TEST(homes_of_the_state_are_checked_by_shardctl_and_by_the_daemons)
{
    static const struct {
        const char *flag, *where, *why;
    } wrong[] = {
        { "--state", "disk", "--state 'disk' is neither memory nor file:DIR" },
        { "--state", "/var/tmp", "--state '/var/tmp' is neither memory nor file:DIR" },
        { "--publish", "bf16", "--publish 'bf16' is neither memory nor file:DIR" },
        { "--snapshots", "file:here", "--snapshots 'file:here': the directory is not an absolute" },
    };
    start();
    unsetenv("SHARDD_BIN");
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        ctl(ARGS("up", wrong[i].flag, wrong[i].where, "--runtime-dir", dir));
        EXPECT_EQ(run.code, 2);
        EXPECT_HAS(run.err, wrong[i].why);
        expect_clean();
    }
    ctl(ARGS("up", "--max-restarts", "0", "--state", "file:/nonexistent/dir", "--runtime-dir",
             dir));
    EXPECT_EQ(run.code, 1);
    EXPECT_HAS(run.err, "shardd: cpu0: --state: directory '/nonexistent/dir' is not there");
    expect_clean();
    ctl(ARGS("up", "--max-restarts", "0", "--publish", "file:/nonexistent/dir", "--runtime-dir",
             dir));
    EXPECT_EQ(run.code, 1);
    EXPECT_HAS(run.err, "shardd: cpu0: --publish: directory '/nonexistent/dir' is not there");
    expect_clean();
    ctl(ARGS("up", "--state", "file:/var/tmp", "--publish", "file:/var/tmp", "--snapshots",
             "file:/var/tmp", "--runtime-dir", dir));
    EXPECT_EQ(run.code, 0);
    down();
    EXPECT_EQ(leftovers(), 0);
}

TEST(up_that_is_killed_before_it_is_ready_leaves_nothing)
{
    start();
    setenv("FAKE", "never", 1); /* in its first pauses */
    run_start(&run, ARGS("up", "-v", "--runtime-dir", dir));
    run_await(&run, run.err, "no luck\n");
    kill(run.pid, SIGKILL);
    run_finish(&run); /* the keeper has the same stderr: it has ended */
    expect_clean();
}

static off_t size_of(const char *file)
{
    char path[192];
    struct stat st;
    snprintf(path, sizeof(path), "%s/%s", dir, file);
    return stat(path, &st) == 0 ? st.st_size : -1;
}

TEST(keeper_that_gives_up_leaves_its_log)
{
    pid_t pids[PIDS_MAX];
    start();
    setenv("FAKE", "empty", 1); /* with something in it it would not give up */
    ctl(ARGS("up", "-v", "--max-restarts", "0", "--daemons", "2", "--runtime-dir", dir));
    EXPECT_EQ(run.code, 0);
    EXPECT_EQ(pids_named("started daemon cpu0 pid=", pids), 1);
    kill(pids[0], SIGKILL);
    await_log("was killed by signal 9 (SIGKILL)");
    await_log("cpu1"); /* its end */
    const uint64_t deadline = test_now_ms() + TEST_HANG_MS;
    while (strstr(run.err, "nothing runs") == NULL && test_now_ms() < deadline)
        ctl(ARGS("down", "--yes", "--runtime-dir", dir));
    await_log("was killed by signal 9 (SIGKILL)");
    up();                            /* takes the directory over, and with it its removal */
    EXPECT(size_of("up.log.1") > 0); /* what the one before said */
    down();
    expect_nothing_runs();
}

/* 40 MB of a daemon, of which the last 16 to 32 MiB are kept, without a gap. */
TEST(log_of_loud_daemons_is_bounded)
{
    char command[512];
    start();
    setenv("FAKE", "loud", 1);
    ctl(ARGS("up", "--daemons", "1", "--runtime-dir", dir));
    EXPECT_EQ(run.code, 0);
    await_log("line 00299999");
    const off_t old = size_of("up.log.1"), now = size_of("up.log");
    snprintf(command, sizeof(command),
             "cd %s && cat up.log.1 up.log | awk '/line/ { if (seen && $3 != last + 1) exit 1; "
             "seen = 1; last = $3 }'",
             dir);
    const int gap = system(command);
    ctl(ARGS("down", "--yes", "--runtime-dir", dir));
    EXPECT_EQ(run.code, 0);
    EXPECT_EQ(gap, 0);
    EXPECT(old <= 16 << 20 && old > (16 << 20) - 4096);
    EXPECT(now <= 16 << 20 && now > 0);
    expect_nothing_runs();
}

TEST(foreground_stays_and_ends_by_a_signal)
{
    start();
    run_start(&run, ARGS("up", "-v", "--foreground", "--daemons", "2", "--runtime-dir", dir));
    run_await(&run, run.out, address);
    kill(run.pid, SIGINT);
    run_finish(&run);
    EXPECT_EQ(run.code, 0);
    expect_clean();
}

TEST(foreground_is_ended_by_down)
{
    static struct run foreground;
    start();
    run_start(&foreground, ARGS("up", "-f", "-n", "2", "-d", dir));
    run_await(&foreground, foreground.out, address);
    down();
    run_finish(&foreground);
    EXPECT_EQ(foreground.code, 0);
    expect_nothing_runs();
}

TEST(callers_streams_and_files_are_let_go)
{
    char command[512];
    start();
    snprintf(command, sizeof(command),
             "cd / && (exec 9>%s/held; flock 9; timeout %u shardctl up -n 2 -d %s 2>&1) | cat "
             ">/dev/null && flock -n %s/held true && rm %s/held",
             base, (unsigned)(TEST_HANG_MS / 1000), dir, base, base);
    EXPECT_EQ(system(command), 0);
    down();
    expect_nothing_runs();
}

TEST(paths_are_checked_and_quoted)
{
    start();
    ctl(ARGS("up", "-d", "/tmp"));
    EXPECT_EQ(run.code, 1);
    EXPECT_HAS(run.err, "shardctl: '/tmp' ");
    char longer[128];
    snprintf(longer, sizeof(longer), "/run/%0100d", 0);
    ctl(ARGS("up", "-d", longer));
    EXPECT_EQ(run.code, 1);
    EXPECT_HAS(run.err, "at most 83 leave room");
    snprintf(dir, sizeof(dir), "%s/it's here", base);
    ctl(ARGS("up", "-d", dir));
    EXPECT_EQ(run.code, 0);
    snprintf(address, sizeof(address), "export SHARDD_ADDRESS='%s/it'\\''s here'\n", base);
    EXPECT_STR(run.out, address);
    down();
    expect_nothing_runs();
}

/* A directory of ours where nobody else can move it, and verbs that find it without a word. */
TEST(daemons_below_tmp_are_found_by_the_rule)
{
    char tmp[] = "/tmp/shardctl-up-XXXXXX", sub[64], longer[64];
    start();
    CHECK(mkdtemp(tmp) != NULL);
    snprintf(sub, sizeof(sub), "%s/d", tmp);
    ctl(ARGS("up", "-d", sub));
    EXPECT_EQ(run.code, 0);
    ctl(ARGS("status"));
    EXPECT_HAS(run.err, sub); /* the stand-in has no sockets, so that there is no daemon to show */
    EXPECT_HAS(run.err, "where your only `shardctl up` or `run` is");
    setenv("SHARDD_ADDRESS", "/nonexistent/shardd?cpu0", 1);
    ctl(ARGS("down", "--yes"));
    EXPECT_EQ(run.code, 1);
    EXPECT_HAS(run.err, "nothing runs at '/nonexistent/shardd'");
    setenv("SHARDD_ADDRESS", sub, 1);
    ctl(ARGS("down", "--yes"));
    EXPECT_EQ(run.code, 0);
    EXPECT_HAS(run.out, "stopped 1 daemon at /tmp/");
    unsetenv("SHARDD_ADDRESS");
    ctl(ARGS("logs", "--address", sub));
    EXPECT_EQ(run.code, 0);
    EXPECT_HAS(run.out, "Z shardctl: got SIGTERM, stopping\n"); /* it has stayed, with times */
    ctl(ARGS("logs", "--address", sub, "-n", "1"));
    EXPECT(run.out[0] != '\0' && strchr(run.out, '\n') == strrchr(run.out, '\n'));
    snprintf(longer, sizeof(longer), "rm -r '%s'", tmp);
    EXPECT_EQ(system(longer), 0);
    ctl(ARGS("logs", "--address", sub));
    EXPECT_EQ(run.code, 1);
    EXPECT_HAS(run.err, "no `shardctl up` has written there");
    expect_clean();
}

TEST(daemon_of_someone_else_in_the_directory_is_spared)
{
    static struct run other;
    char path[400];
    start();
    unsetenv("SHARDD_BIN");
    CHECK(mkdir(dir, 0700) == 0);
    run_start_program(&other, BIN "/shardd", ARGS("--device", "cpu1", "--runtime-dir", dir));
    run_await(&other, other.err, "op=start device=cpu1 runtime_dir="); /* it serves */
    ctl(ARGS("up", "-n", "2", "-d", dir));
    EXPECT_EQ(run.code, 1);
    EXPECT_HAS(run.err, "a daemon for 'cpu1' runs at '");
    snprintf(path, sizeof(path), "%s/cpu1.sock", dir);
    EXPECT_EQ(access(path, F_OK), 0);
    kill(other.pid, SIGTERM);
    run_finish(&other);
    EXPECT_EQ(other.code, 0);
    up();
    down();
    snprintf(path, sizeof(path), "cd '%s' && rm *.lock up.log && rmdir ../up", dir);
    EXPECT_EQ(system(path), 0); /* lock files stay in a directory that was there before */
    expect_clean();
}

TEST(who_stands_in_for_another_hosts_daemon_keeps_its_socket)
{
    char path[400];
    struct shd_err e = { 0 };
    struct stat before, after;
    int door;
    start();
    unsetenv("SHARDD_BIN");
    CHECK(mkdir(dir, 0700) == 0);
    snprintf(path, sizeof(path), "%s/cpu7.sock", dir);
    EXPECT_OK(side_listen(path, &door, &e), &e);
    CHECK(stat(path, &before) == 0);
    ctl(ARGS("up", "-d", dir));
    EXPECT_EQ(run.code, 0);
    EXPECT(stat(path, &after) == 0 && after.st_ino == before.st_ino);
    down();
    close(door);
    ctl(ARGS("up", "-d", dir)); /* nobody listens any more */
    EXPECT_EQ(run.code, 0);
    EXPECT(access(path, F_OK) < 0);
    down();
    snprintf(path, sizeof(path), "rm -r '%s'", dir);
    EXPECT_EQ(system(path), 0);
    expect_clean();
}

int main(int argc, char **argv)
{
    return ctl_main(argc, argv);
}
