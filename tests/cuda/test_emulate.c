/* The emulation: it gives what a device would, sees what a device would punish, and stops where it
 * is told. */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "tests/cuda/emulate.h"
#include "tests/lib/test.h"

struct planted {
    uint32_t *out;
    uint32_t n;
};

static uint32_t out[4 * 64];

/* What a process says that runs one thread of a PTX kernel of this body. */
static void run_ptx(const char *body, char ret_said[512], int *ret_signal)
{
    char path[] = "/tmp/shd-test-ptx-XXXXXX";
    const int file = mkstemp(path);
    int pipe_fd[2], status;
    EXPECT(file >= 0 && pipe(pipe_fd) == 0);
    dprintf(file,
            "// a comment\n.visible .entry planted(\n\t.param .align 8 .b8 planted_param_0[16]\n)\n"
            ".maxntid 256, 1, 1\n{\n.reg .pred %%p<3>;\n.reg .b32 %%r<5>;\n.reg .f32 %%f<5>;\n"
            ".reg .b64 %%rd<5>;\nld.param.u64 %%rd1, [planted_param_0]; // out\n%s\nret;\n}\n",
            body);
    close(file);
    fflush(stdout);
    const pid_t pid = fork();
    EXPECT(pid >= 0);
    if (pid == 0) {
        dup2(pipe_fd[1], STDERR_FILENO);
        setenv("EMULATE_PTX", path, 1);
        const struct planted args = { out, 0 };
        const struct emulate_kernel *k = emulate_find("planted");
        emulate_launch(k, &args, (const unsigned[]){ 1, 1, 1 }, (const unsigned[]){ 1, 1, 1 });
        dprintf(STDERR_FILENO, "%x", out[0]);
        _exit(0);
    }
    close(pipe_fd[1]);
    memset(ret_said, 0, 512);
    for (ssize_t at = 0, n; (n = read(pipe_fd[0], ret_said + at, 511 - (size_t)at)) > 0;)
        at += n;
    close(pipe_fd[0]);
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    *ret_signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    unlink(path);
}

/* The first test: a process reads EMULATE_PTX once. */
TEST(ptx_is_run_as_defined_or_not_at_all)
{
    static const struct {
        const char *body, *says;
    } cases[] = {
        { "st.global.u32 [%rd1], 0x1234;", "1234" },
        /* the smallest denormal and half the smallest normal number, flushed or not */
        { "mov.f32 %f1, 0f00000001; add.rn.ftz.f32 %f2, %f1, %f1; st.global.f32 [%rd1], %f2;",
          "0" },
        { "mov.f32 %f1, 0f00000001; add.rn.f32 %f2, %f1, %f1; st.global.f32 [%rd1], %f2;", "2" },
        { "mov.f32 %f1, 0f80800000; mul.rn.ftz.f32 %f2, %f1, 0f3F000000; st.global.f32 [%rd1], "
          "%f2;",
          "80000000" },
        /* one rounding, not two; and toward minus infinity */
        { "mov.f32 %f1, 0f3F800001; fma.rn.ftz.f32 %f2, %f1, %f1, 0fBF800002; "
          "st.global.f32 [%rd1], %f2;",
          "28800000" },
        { "mov.f32 %f1, 0f3F800000; fma.rm.ftz.f32 %f2, %f1, %f1, 0f9F800000; "
          "st.global.f32 [%rd1], %f2;",
          "3f7fffff" },
        { "mov.f32 %f1, 0f7F800000; sub.rn.ftz.f32 %f2, %f1, %f1; st.global.f32 [%rd1], %f2;",
          "7fffffff" },
        { "mov.u32 %r1, 7; setp.gt.s32 %p1, %r1, -8; @!%p1 bra $L1; st.global.u32 [%rd1], %r1; "
          "$L1: bfi.b32 %r2, %r1, 0, 30, 4; st.global.u32 [%rd1], %r2;",
          "c0000000" },
        { "mov.u32 %r1, 7; setp.gt.u32 %p1, %r1, -8; @%p1 bra $L1; mov.b64 %rd2, {%r1, %r1}; "
          "shr.u64 %rd3, %rd2, 31; st.global.u32 [%rd1], %rd3; $L1: mov.u32 %r2, 1;",
          "e" },
        { "frob.u32 %r1, %r2, %r3;", "an instruction that is not known here: frob.u32" },
        { "add.s32 %r1, %r2, %r9;", "a register that is not declared: %r9" },
        { "add.s32 %r1, %r2, nothing;", "an operand that is not known here: nothing" },
        { "bra $L9;", "a label that is not there: $L9" },
        { "st.global.wb.u32 [%rd1], 1;", "an access that is not known here" },
        { "st.global.u32 [%rd1+2], 1;", "an address that is not aligned" },
        { "st.shared.u32 [%r1], 1;", "beyond shared memory" },
        { "shfl.sync.down.b32 %r1|%p1, %r2, 1, 31, 1;", "a shuffle of less than a warp" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char said[512];
        int signal;
        run_ptx(cases[i].body, said, &signal);
        const bool refused = strchr(cases[i].says, ' ') != NULL;
        if (refused != (signal == SIGABRT) ||
            (refused ? strstr(said, cases[i].says) == NULL : strcmp(said, cases[i].says) != 0))
            FAIL("\"%s\": said \"%s\" (signal %d), expected \"%s\"", cases[i].body, said, signal,
                 cases[i].says);
    }
}

static void launch(const char *name, uint32_t n, unsigned blocks, unsigned threads)
{
    const struct emulate_kernel *k = emulate_find(name);
    EXPECT(k != NULL && k->args_bytes == sizeof(struct planted));
    const struct planted args = { out, n };
    emulate_launch(k, &args, (const unsigned[]){ blocks, 1, 1 },
                   (const unsigned[]){ threads, 1, 1 });
}

/* True when a process that launches it is ended by abort(), having said `text`. */
static bool aborts(const char *name, uint32_t n, unsigned threads, const char *text)
{
    int pipe_fd[2];
    EXPECT(pipe(pipe_fd) == 0);
    fflush(stdout);
    const pid_t pid = fork();
    EXPECT(pid >= 0);
    if (pid == 0) {
        dup2(pipe_fd[1], STDERR_FILENO);
        launch(name, n, 4, threads);
        _exit(0);
    }
    close(pipe_fd[1]);
    char said[512] = { 0 };
    const ssize_t count = read(pipe_fd[0], said, sizeof said - 1);
    close(pipe_fd[0]);
    int status;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    return count > 0 && WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT &&
           strstr(said, text) != NULL && strstr(said, name) != NULL;
}

static bool mirrored(void)
{
    for (uint32_t i = 0; i < 4 * 64; i++)
        if (out[i] != i / 64 * 64 + 63 - i % 64)
            return false;
    return true;
}

TEST(blocks_share_memory_and_wait_for_each_other_in_any_schedule)
{
    for (uint64_t seed = 0; seed < 50; seed++) {
        emulate_configure(
            &(struct emulate_options){ .seed = seed, .resident = (unsigned)(seed % 5) });
        memset(out, 0, sizeof out);
        launch("planted_right", 0, 4, 64);
        EXPECT(mirrored());
        EXPECT_EQ(emulate_last().events, 4 * 64 * 2);
    }
}

TEST(a_missing_barrier_shows)
{
    for (uint64_t seed = 0; seed < 50; seed++) {
        emulate_configure(&(struct emulate_options){ .seed = seed, .resident = 2 });
        launch("planted_no_barrier", 0, 4, 64);
        EXPECT(!mirrored());
    }
    emulate_configure(NULL); /* what was never written reads as all ones, in every block */
    launch("planted_no_barrier", 0, 4, 64);
    EXPECT(out[0] == 0xffffffff && out[3 * 64] == 0xffffffff);
}

TEST(divergence_ends_the_process)
{
    emulate_configure(NULL);
    EXPECT(aborts("planted_some_leave", 10, 64, "after another thread's end") ||
           aborts("planted_some_leave", 10, 64, "while others wait at a barrier"));
    EXPECT(aborts("planted_some_barrier", 63, 64, "while others wait at a barrier"));
    EXPECT(aborts("planted_two_barriers", 32, 64, "at another barrier"));
    EXPECT(aborts("planted_some_lanes", 31, 64, "shuffle"));
    EXPECT(aborts("planted_small", 0, 64, "more threads"));
    EXPECT(!aborts("planted_some_leave", 64, 64, ""));
    EXPECT(!aborts("planted_some_lanes", 32, 64, ""));
}

TEST(warp_functions_are_the_devices)
{
    for (uint64_t seed = 0; seed < 20; seed++) {
        emulate_configure(&(struct emulate_options){ .seed = seed, .resident = 3 });
        launch("planted_shuffles", 0, 4, 64);
        for (uint32_t i = 0; i < 4 * 64; i++) {
            const uint32_t t = i % 64, warp = t / 32 * 32, lane = t % 32;
            const uint32_t sum = 32 * warp + 496, down = lane + 3 < 32 ? t + 3 : t;
            const uint32_t up = lane >= 3 ? t - 3 : t;
            EXPECT_EQ(out[i], sum | down << 16 | up << 22 | warp << 28);
        }
    }
}

TEST(atomics_count_every_thread)
{
    emulate_configure(&(struct emulate_options){ .seed = 7, .resident = 4 });
    memset(out, 0, sizeof out);
    launch("planted_atomics", 0, 4, 64);
    EXPECT_EQ(out[0], 256);
    EXPECT_EQ(out[1], 0xffffffff);
    EXPECT_EQ(out[3], 255);
}

TEST(a_launch_stops_at_its_event)
{
    for (uint64_t at = 1; at <= 65; at++) {
        emulate_configure(&(struct emulate_options){ .stop_at = at, .keep_stores = true });
        memset(out, 0, sizeof out);
        launch("planted_stores", 0, 1, 1);
        const uint32_t stored = (uint32_t)(at <= 32 ? at : at - 1);
        for (uint32_t i = 0; i < 64; i++)
            EXPECT_EQ(out[i], i < stored);
        EXPECT(emulate_last().stopped && emulate_last().events == at - 1);
        launch("planted_right", 0, 4, 64); /* nothing runs any more */
        EXPECT_EQ(out[0], stored > 0);
    }
    emulate_configure(&(struct emulate_options){ .stop_at = 66 });
    launch("planted_stores", 0, 1, 1);
    EXPECT(!emulate_last().stopped);
}

/* Of 20 stores before the fence and 20 after it that a kill finds, only the latter may be lost. */
TEST(a_stop_loses_what_no_fence_made_sure_of)
{
    uint32_t lost = 0, kept = 0;
    for (uint64_t seed = 1; seed <= 50; seed++) {
        emulate_configure(&(struct emulate_options){ .seed = seed, .stop_at = 33 + 20 });
        memset(out, 0, sizeof out);
        launch("planted_stores", 0, 1, 1);
        for (uint32_t i = 0; i < 32; i++)
            EXPECT_EQ(out[i], 1);
        for (uint32_t i = 32; i < 52; i++)
            *(out[i] == 1 ? &kept : &lost) += 1;
    }
    EXPECT_EQ(lost + kept, 50 * 20);
    EXPECT(lost > 300 && kept > 300);
}

TEST(a_stop_can_kill_the_process)
{
    fflush(stdout);
    const pid_t pid = fork();
    EXPECT(pid >= 0);
    if (pid == 0) {
        emulate_configure(&(struct emulate_options){ .stop_at = 5, .stop_kills = true });
        launch("planted_stores", 0, 1, 1);
        _exit(0);
    }
    int status;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

TEST_MAIN()
