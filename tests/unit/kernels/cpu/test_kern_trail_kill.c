/* Trails and deaths: processes killed at random moments, and a thread stepped instruction by
 * instruction, the memory after each of which is what a SIGKILL there would leave. A successor
 * must end with the bits of an undisturbed run. */
#include <sys/ptrace.h>
#include <sys/wait.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/trail.h"
#include "proto/base/clock.h"
#include "tests/lib/child.h"
#include "tests/lib/kern_trail_util.h"

static int repair(const struct world *w, struct shd_err *e)
{
    return kern_trail_repair(w->area, w->base, w->bytes, w->marks->chunks, ALL_CHUNKS, e);
}

/* -- Random moments ---------------------------------------------------------------------------- */

#define KILLS     240u
#define KILLS_MAX 4000u

enum { PHASE_NONE, PHASE_STARTED, PHASE_RESUMED }; /* RESUMED: past the op it found begun */

/* How far the dead process was. */
struct deaths {
    uint32_t kills, in_op, in_group, in_resumed_op, finished;
};

static void child_main(const struct world *w, struct inputs *in, const struct script *want,
                       const struct kern_config *config)
{
    struct shd_err e = { 0 };
    struct kern *k;
    struct kern_sum sum;
    w->marks->phase = PHASE_STARTED;
    if (repair(w, &e) != SHD_OK || kern_cpu_new(config, &k, &e) != SHD_OK)
        _exit(2);
    for (uint64_t op = w->marks->done + 1; op <= SCRIPT_OPS; op++) {
        if (script_run(k, w, in, op, true, &sum) != SHD_OK)
            _exit(3);
        if (!same_sum(&sum, &want->sum[op])) {
            w->marks->wrong = op;
            _exit(4);
        }
        w->marks->phase = PHASE_RESUMED;
    }
    _exit(0);
}

/* A record speaks, or a chunk has a word of the operation that comes after the last done one. */
static void count_death(const struct world *w, struct deaths *d)
{
    bool in_op = false, in_group = false;
    for (uint32_t i = 0; i < CPU_THREADS_MAX; i++) {
        const struct trail_record *r = &w->area->records[i];
        in_op = in_op || r->op != 0;
        in_group = in_group || (r->op != 0 && (r->pos & 0xff) != 0);
    }
    for (uint32_t c = 0; c < ALL_CHUNKS; c++)
        in_op = in_op || w->marks->chunks[c] >> 17 == w->marks->done + 1;
    d->kills++;
    d->in_op += in_op;
    d->in_group += in_group;
    d->in_resumed_op += in_op && w->marks->phase == PHASE_STARTED;
}

/* The operation that was begun, here. */
static void finish_here(const struct world *w, struct inputs *in, const struct script *want,
                        const struct kern_config *config)
{
    const uint64_t op = w->marks->done + 1;
    struct shd_err e = { 0 };
    struct kern *k;
    struct kern_sum sum;
    EXPECT_OK(repair(w, &e), &e);
    EXPECT_OK(repair(w, &e), &e); /* once more does no harm */
    EXPECT_OK(kern_cpu_new(config, &k, &e), &e);
    EXPECT_STATUS(script_run(k, w, in, op, true, &sum), SHD_OK);
    k->ops->free(k);
    EXPECT_EQ(w->marks->done, op);
    EXPECT(same_sum(&sum, &want->sum[op]));
    if (world_digest(w) != want->digest[op])
        FAIL("op %" PRIu64 ", finished after a kill, gave other bits", op);
}

static struct kern_config random_config(uint64_t *state)
{
    uint32_t isas = 1; /* scalar is everywhere */
    while (kern_cpu_isas()[isas] != NULL)
        isas++;
    return (struct kern_config){
        .threads = 1 + (uint32_t)(test_random(state) >> 33) % 4,
        .isa = kern_cpu_isas()[(test_random(state) >> 33) % (isas + 1)], /* the last: it chooses */
    };
}

/* One child from where the last one died, killed after up to delay_us; counted if it was alive. */
static void kill_child(const struct world *w, struct inputs *in, const struct script *want,
                       uint64_t delay_us, uint64_t *state, struct deaths *d)
{
    const struct kern_config config = random_config(state);
    w->marks->phase = PHASE_NONE;
    const pid_t pid = fork();
    EXPECT(pid >= 0);
    if (pid == 0)
        child_main(w, in, want, &config);
    while (w->marks->phase == PHASE_NONE)
        usleep(20);
    usleep((useconds_t)(test_random(state) % (delay_us + 1)));
    kill(pid, SIGKILL);
    int status;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    if (WIFSIGNALED(status)) {
        EXPECT_EQ(WTERMSIG(status), SIGKILL);
        count_death(w, d);
    } else if (WEXITSTATUS(status) != 0) {
        FAIL("a child exited with %d; wrong sum at op %" PRIu64, WEXITSTATUS(status),
             (uint64_t)w->marks->wrong);
    }
}

static bool fell_inside(const struct deaths *d)
{
    return d->in_op >= 20 && d->in_group >= 5 && d->in_resumed_op >= 2;
}

TEST(killed_processes_are_finished_by_their_successors)
{
    uint64_t state = test_seed(20240917);
    struct world w = world_new();
    struct inputs *in = inputs_new();
    static struct script want;
    script_record(&w, in, &want);
    world_reset(&w);
    const uint64_t start = clock_now_ns();
    finish_here(&w, in, &want, &(struct kern_config){ .threads = 1, .isa = "scalar" });
    const uint64_t op_us = (clock_now_ns() - start) / 1000;

    struct deaths d = { 0 };
    /* Where a kill falls is the scheduler's choice as well: go on until enough fell inside. */
    while (d.kills < KILLS || (d.kills < KILLS_MAX && !fell_inside(&d))) {
        world_reset(&w);
        while (w.marks->done < SCRIPT_OPS) {
            const uint64_t r = test_random(&state) >> 33;
            kill_child(&w, in, &want, r % 3 == 0 ? 300 : 2 * op_us, &state, &d);
            if (r % 4 == 0 && w.marks->done < SCRIPT_OPS)
                finish_here(&w, in, &want,
                            &(struct kern_config){ .threads = 1 + (uint32_t)(r % 3) });
        }
        d.finished++;
        if (world_digest(&w) != want.digest[SCRIPT_OPS])
            FAIL("after %" PRIu32 " kills the script ended with other bits", d.kills);
    }
    printf("%" PRIu32 " kills, %" PRIu32 " inside an operation, %" PRIu32
           " inside a group, %" PRIu32 " inside an operation being finished; %" PRIu32
           " scripts ended\n",
           d.kills, d.in_op, d.in_group, d.in_resumed_op, d.finished);
    EXPECT(fell_inside(&d));
    world_free(&w);
    free(in);
}

/* -- Every instruction ------------------------------------------------------------------------- */

#define STEP_ELEMS  BLOCK /* only this much of each array is ever changed */
#define STEP_CASE_S 2u    /* a case that takes longer stops being stepped, and says so */
#define WINDOWS     9u

struct window {
    uint64_t offset, bytes;
};

/* What a stepped operation can change, as parts of the mapping. */
static void windows_of(const struct world *w, struct window *ret)
{
    const void *const at[WINDOWS] = { w->area, w->marks, w->acc,       w->p,        w->m,
                                      w->v,    w->e,     w->q[0].base, w->q[1].base };
    for (uint32_t i = 0; i < WINDOWS; i++) {
        ret[i].offset = (uint64_t)((const uint8_t *)at[i] - w->base);
        ret[i].bytes = i == 0   ? sizeof(struct trail_record)
                       : i == 1 ? sizeof(struct marks)
                       : i < 7  ? STEP_ELEMS * sizeof(float)
                                : quant_bytes(STEP_ELEMS);
    }
}

static bool windows_same(const struct world *a, const struct world *b, const struct window *win,
                         uint32_t first)
{
    for (uint32_t i = first; i < WINDOWS; i++)
        if (!same_words(a->base + win[i].offset, b->base + win[i].offset, win[i].bytes))
            return false;
    return true;
}

static void windows_copy(const struct world *to, const struct world *from, const struct window *win)
{
    for (uint32_t i = 0; i < WINDOWS; i++)
        memcpy(to->base + win[i].offset, from->base + win[i].offset, win[i].bytes);
}

/* live is the tracee's; seen, what it was at the last step; end, what it must become; copy, where
 * each of its states is finished. */
struct stepping {
    struct world live, seen, end, copy, mid;
    struct window win[WINDOWS];
    struct inputs *in;
    struct kern *k; /* finishes copies, by another instruction set */
    uint64_t op;
    struct kern_sum sum; /* of op */
    uint64_t instructions, states, in_group;
    uint64_t deadline_ns;
    bool cut;
};

/* Finish a copy of the live memory; false: with other bits. */
static bool finish_copy(struct stepping *s)
{
    struct shd_err e = { 0 };
    windows_copy(&s->copy, &s->live, s->win);
    if (repair(&s->copy, &e) != SHD_OK)
        return false;
    if (s->copy.marks->done != s->op) {
        struct kern_sum sum;
        if (script_run(s->k, &s->copy, s->in, s->op, true, &sum) != SHD_OK ||
            !same_sum(&sum, &s->sum))
            return false;
    }
    return windows_same(&s->copy, &s->end, s->win, 2); /* arrays; done, too, was stored */
}

/* The tracee has run one more instruction. A state seen before needs no second look. */
static bool step_seen(struct stepping *s)
{
    s->instructions++;
    if (windows_same(&s->live, &s->seen, s->win, 0))
        return true;
    windows_copy(&s->seen, &s->live, s->win);
    s->states++;
    const struct trail_record *r = &s->live.area->records[0];
    if (r->op != 0 && (r->pos & 0xff) != 0) {
        s->in_group++;
        windows_copy(&s->mid, &s->live, s->win); /* the last one serves the repair's test */
    }
    return finish_copy(s);
}

/* One stop of the tracee pid or of its thread. Steps the thread, or pid itself where `main` says
 * so, and lets the other run. False: finished with other bits. */
static bool step_stop(struct stepping *s, pid_t pid, pid_t tid, int status, bool step_main)
{
    const int signal = WSTOPSIG(status) == SIGTRAP || WSTOPSIG(status) == SIGSTOP
                           ? 0
                           : WSTOPSIG(status);
    if ((tid == pid) != step_main || s->cut) {
        ptrace(PTRACE_CONT, tid, NULL, signal);
        return true;
    }
    if (!step_seen(s))
        return false;
    s->cut = clock_now_ns() > s->deadline_ns;
    ptrace(s->cut ? PTRACE_CONT : PTRACE_SINGLESTEP, tid, NULL, signal);
    return true;
}

/* From the stop the child made itself to its end. */
static bool step_child(struct stepping *s, pid_t pid, bool step_main)
{
    int status;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    if (WIFEXITED(status) && WEXITSTATUS(status) == NO_PTRACE)
        SKIP("ptrace is not permitted here");
    EXPECT(WIFSTOPPED(status));
    EXPECT(ptrace(PTRACE_SETOPTIONS, pid, NULL, PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL) == 0);
    windows_copy(&s->seen, &s->live, s->win);
    s->instructions = s->states = s->in_group = 0;
    s->cut = false;
    s->deadline_ns = clock_now_ns() + STEP_CASE_S * UINT64_C(1000000000);
    ptrace(step_main ? PTRACE_SINGLESTEP : PTRACE_CONT, pid, NULL, 0);
    for (;;) {
        const pid_t tid = waitpid(-1, &status, __WALL);
        EXPECT(tid > 0);
        if (tid == pid && !WIFSTOPPED(status))
            return WIFEXITED(status) && WEXITSTATUS(status) == 0;
        if (WIFSTOPPED(status) && !step_stop(s, pid, tid, status, step_main)) {
            kill(pid, SIGKILL);
            while (waitpid(-1, &status, __WALL) != pid) /* its thread must be reaped first */
                ;
            return false;
        }
    }
}

/* The child that does the operation on its compute thread, or here: on its main one. */
static pid_t fork_op(const struct stepping *s, const char *isa)
{
    const pid_t pid = fork();
    EXPECT(pid >= 0);
    if (pid > 0)
        return pid;
    if (!s->in->here)
        child_stop();
    const struct kern_config config = { .threads = 1, .isa = isa };
    struct kern *k;
    struct shd_err e;
    struct kern_sum sum;
    if (kern_cpu_new(&config, &k, &e) != SHD_OK)
        _exit(1);
    if (s->in->here)
        child_stop(); /* its thread sleeps on, and is not stepped */
    if (script_run(k, &s->live, s->in, s->op, true, &sum) != SHD_OK)
        _exit(1);
    if (!s->in->here)
        k->ops->free(k);
    _exit(0);
}

/* The child that repairs what is in live. */
static pid_t fork_repair(const struct stepping *s)
{
    const pid_t pid = fork();
    EXPECT(pid >= 0);
    if (pid > 0)
        return pid;
    struct shd_err e = { 0 };
    child_stop();
    _exit(repair(&s->live, &e) == SHD_OK ? 0 : 1);
}

static void step_report(const struct stepping *s, const char *isa, const char *what)
{
    printf("%s %s: %" PRIu64 " instructions, %" PRIu64 " states, %" PRIu64 " inside a group%s\n",
           isa, what, s->instructions, s->states, s->in_group, s->cut ? "; cut short" : "");
    if (s->in_group == 0 && !s->cut)
        FAIL("%s %s: no step fell inside a group", isa, what);
}

/* The instruction set that finishes what isa began: another one, where there is one. */
static const char *successor_of(const char *isa)
{
    const char *const *at = kern_cpu_isas();
    while (strcmp(*at, isa) != 0)
        at++;
    return at[1] != NULL ? at[1] : kern_cpu_isas()[0];
}

static void step_case(struct stepping *s, const char *isa, uint64_t op)
{
    static const char *const names[] = { "adamw", "first accumulate", "accumulate",
                                         "accumulate with sum" };
    const char *name = op == OP_INT8 ? "adamw int8" : names[op % 4];
    s->op = op;
    s->k = NULL;
    world_reset(&s->live);
    world_reset(&s->copy);
    world_reset(&s->end);
    struct kern *k = device_new("scalar", 1);
    EXPECT_STATUS(script_run(k, &s->end, s->in, op, false, &s->sum), SHD_OK);
    k->ops->free(k);
    const pid_t pid = fork_op(s, isa);
    s->k = device_new(successor_of(isa), 1);
    if (!step_child(s, pid, s->in->here))
        FAIL("%s %s: finished from instruction %" PRIu64 " it has other bits", isa, name,
             s->instructions);
    s->k->ops->free(s->k);
    EXPECT_EQ(s->live.marks->done, op);
    EXPECT(windows_same(&s->live, &s->end, s->win, 2));
    step_report(s, isa, name);

    windows_copy(&s->live, &s->mid, s->win);
    const pid_t repairing = fork_repair(s);
    s->k = device_new(successor_of(isa), 1);
    if (!step_child(s, repairing, true))
        FAIL("%s %s: repaired and killed at instruction %" PRIu64 " it has other bits", isa, name,
             s->instructions);
    s->k->ops->free(s->k);
    step_report(s, isa, "repair");
}

static void step_cases(bool here)
{
    static const struct kern_run runs[] = { { 3, 37, 0 }, { 50, 200, 1 }, { 1000, 70, 0 } };
    static struct stepping s;
    struct world *const worlds[] = { &s.live, &s.seen, &s.end, &s.copy, &s.mid };
    for (size_t i = 0; i < ARRAY_SIZE(worlds); i++)
        *worlds[i] = world_new();
    windows_of(&s.live, s.win);
    s.in = inputs_new();
    s.in->acc_elems = STEP_ELEMS;
    s.in->here = here;
    s.in->averages = here; /* an average is of all elements, also of those that no run has */
    if (here)
        s.in->update_elems = STEP_ELEMS;
    s.in->runs = runs;
    s.in->run_count = ARRAY_SIZE(runs);
    for (const char *const *isa = kern_cpu_isas(); *isa != NULL; isa++) {
        step_case(&s, *isa, 4); /* AdamW */
        step_case(&s, *isa, 3);
        step_case(&s, *isa, OP_INT8);
    }
    for (size_t i = 0; i < ARRAY_SIZE(worlds); i++)
        world_free(worlds[i]);
    free(s.in);
}

TEST(every_instruction_is_a_good_one_to_die_at)
{
    if (SANITIZE_THREAD)
        SKIP("ThreadSanitizer takes too many instructions to start a thread");
    step_cases(/* here= */ false);
}

TEST(every_instruction_is_on_the_callers_thread)
{
    if (SANITIZE_THREAD)
        SKIP("ThreadSanitizer takes too many instructions");
    step_cases(/* here= */ true);
}

TEST_MAIN()
