/* A process killed at every instruction of one whole step: gradients, sums, seal, commit, update.
 *
 * A child takes the step with the real core and kernels while the parent steps its threads, the
 * one or the other in a random order. What its shared memory is after an instruction is what a
 * SIGKILL there would leave, so the parent finishes a copy of each such state as a successor does:
 * it adopts, repairs, resumes, is sent again what was not credited, and decides anew and otherwise.
 * Parameters, moments, record, blob and versions must be, bit for bit, those of an undisturbed
 * step; of the first decision, once that is on record. Some of these successors are stepped and
 * left in turn. Real SIGKILLs at random instructions show that the copies are what they leave. */
#include <errno.h>
#include <sched.h>
#include <stddef.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>

#include "daemon/core/ledger.h"
#include "kernels/cpu/cpu.h"
#include "proto/base/clock.h"
#include "tests/lib/child.h"
#include "tests/unit/daemon/core/commit_step.h"

#ifdef __SANITIZE_ADDRESS__ /* every instruction costs more, and there are more of them */
#define SLOW 1
#else
#define SLOW 0
#endif

#define EVERY        (SLOW ? 8u : 1u) /* see struct stepping */
#define SECOND_EVERY (SLOW ? 16u : 2u)
#define PICKS        2u  /* states whose recovery is stepped in turn: before and after the commit */
#define FIRST_ALL    64u /* states at a beginning, where repairs are: all are finished */
#define KILLS        60u
#define KILL_STEPS   400u /* instructions that are stepped before a kill, fewer than this */
#define WINDOWS      7u

/* -- A traced child ---------------------------------------------------------------------------- */

#define CODE_SYSCALL 0x0f05u
#define CODE_PAUSE   0xf390u

struct tracee {
    pid_t tid; /* 0: none */
    bool stopped;
    bool inside; /* a system call, to which its next instruction may return */
};

struct trace {
    struct tracee threads[2]; /* the one with the core, the one that computes */
    uint64_t instructions;
    uint64_t *random;
    bool unheard;         /* a thread may have stopped that nobody waited for */
    uint64_t since_pause; /* instructions of the one that computes: few where it waits for work */
    bool ended;
    int status;
};

/* A thread's report. */
static void trace_note(struct trace *t, pid_t tid, int status)
{
    struct tracee *thread = &t->threads[tid != t->threads[0].tid];
    thread->tid = tid;
    thread->stopped = WIFSTOPPED(status);
    if (WIFSTOPPED(status))
        return;
    if (tid == t->threads[0].tid) {
        t->ended = true;
        t->status = status;
    } else {
        thread->tid = 0;
    }
}

static void trace_wait(struct trace *t)
{
    int status;
    const pid_t tid = waitpid(-1, &status, __WALL);
    EXPECT(tid > 0);
    trace_note(t, tid, status);
}

/* The child is a copy of this process: what is at an address there is here. */
__attribute__((no_sanitize("address", "undefined"))) static unsigned code_at(uintptr_t at)
{
    const uint8_t *code = (const uint8_t *)at; /* NOLINT(performance-no-int-to-ptr) */
    return (unsigned)code[0] << 8 | code[1];
}

/* Where a stopped thread is, or 0 if it is none any more: the other one's exit_group() ends it
 * wherever it is, and its report may not have come yet. */
static uintptr_t trace_at(const struct tracee *thread)
{
    errno = 0;
    const long at = ptrace(PTRACE_PEEKUSER, thread->tid, offsetof(struct user_regs_struct, rip),
                           NULL);
    EXPECT(errno == 0 || errno == ESRCH);
    return errno == 0 ? (uintptr_t)at : 0;
}

/* One instruction of one thread. Only a system call is not waited for: the other thread may have
 * to end it, and none of those here writes to the memory that is looked at. */
static void trace_step(struct trace *t, struct tracee *thread)
{
    int status;
    const uintptr_t at = trace_at(thread);
    const unsigned code = at == 0 ? 0 : code_at(at);
    const bool call = code == CODE_SYSCALL || thread->inside;
    const bool gone = at == 0 || ptrace(PTRACE_SINGLESTEP, thread->tid, NULL, 0) != 0;
    EXPECT(!gone || errno == ESRCH);
    thread->stopped = thread->inside = false;
    if (gone) {
        t->unheard = true;
        return;
    }
    if (thread == &t->threads[1])
        t->since_pause = code == CODE_PAUSE ? 0 : t->since_pause + 1;
    t->instructions++;
    t->unheard = t->unheard || call;
    if (call)
        return;
    EXPECT_EQ(waitpid(thread->tid, &status, __WALL), thread->tid);
    trace_note(t, thread->tid, status);
}

static void trace_hear(struct trace *t)
{
    int status;
    for (pid_t tid; (tid = waitpid(-1, &status, __WALL | WNOHANG)) > 0;)
        trace_note(t, tid, status);
    t->unheard = !t->threads[0].stopped || !t->threads[1].stopped;
}

/* The threads go in a random order, but one that spins has few turns. False: the child has ended.
 */
static bool trace_next(struct trace *t)
{
    if (t->unheard && t->instructions % 8 == 0)
        trace_hear(t);
    while (!t->ended && !t->threads[0].stopped && !t->threads[1].stopped)
        trace_wait(t);
    if (t->ended)
        return false;
    const uint64_t random = test_random(t->random) >> 32;
    struct tracee *thread = &t->threads[t->since_pause < 8 ? random % 64 == 0 : random % 2];
    if (!thread->stopped)
        thread = &t->threads[thread == &t->threads[0]];
    trace_step(t, thread);
    return true;
}

/* Let both threads run for a while, then stop them wherever they are. */
static void trace_run(struct trace *t, uint64_t us)
{
    const pid_t pid = t->threads[0].tid;
    for (uint32_t i = 0; i < 2; i++) {
        ptrace(PTRACE_CONT, t->threads[i].tid, NULL, 0);
        t->threads[i].stopped = false;
    }
    usleep((useconds_t)us);
    for (uint32_t i = 0; i < 2; i++)
        syscall(SYS_tgkill, pid, t->threads[i].tid, SIGSTOP);
    while (!t->ended && (!t->threads[0].stopped || !t->threads[1].stopped))
        trace_wait(t);
    t->threads[0].inside = t->threads[1].inside = true;
}

static void trace_kill(struct trace *t)
{
    int status;
    const pid_t pid = t->threads[0].tid;
    if (!t->ended)
        kill(pid, SIGKILL);
    while (!t->ended && waitpid(-1, &status, __WALL) != pid) /* its thread is reaped first */
        ;
}

/* From the child's first stop, before it has a second thread, to its second one, after which it
 * begins; both threads are stopped then. */
static void trace_attach(struct trace *t)
{
    const pid_t pid = t->threads[0].tid;
    int status;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    if (WIFEXITED(status) && WEXITSTATUS(status) == NO_PTRACE)
        SKIP("ptrace is not permitted here");
    EXPECT(WIFSTOPPED(status));
    EXPECT(ptrace(PTRACE_SETOPTIONS, pid, NULL, PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL) == 0);
    ptrace(PTRACE_CONT, pid, NULL, 0);
    for (bool ready = false; !ready || !t->threads[1].stopped;) {
        const pid_t tid = waitpid(-1, &status, __WALL);
        EXPECT(tid > 0 && WIFSTOPPED(status));
        trace_note(t, tid, status);
        if (tid == pid && status >> 16 == 0) {
            ready = true;
        } else if (tid == pid) { /* a thread was made */
            ptrace(PTRACE_CONT, tid, NULL, 0);
        }
    }
}

/* -- Worlds ------------------------------------------------------------------------------------ */

struct window {
    uint64_t offset, bytes;
    bool core; /* what the core writes: no change of it is left out */
};

/* What a step can change. */
static void windows_of(const struct world *w, struct window *ret)
{
    const struct ledger_head *h = w->ledger.head;
    const struct window windows[WINDOWS] = {
        { 0, h->trail_at, true },
        { h->trail_at, sizeof(struct trail_record), false },
        { h->chunks_at, h->chunk_count * sizeof(uint64_t), false },
        { h->blobs_at, BLOB_BYTES, true },
        { h->blobs_at + LEDGER_BLOB_BYTES, BLOB_BYTES, true },
        { w->ledger_bytes, sizeof(struct marks), true },
        { w->ledger_bytes + 4096, w->bytes - w->ledger_bytes - 4096, false },
    };
    memcpy(ret, windows, sizeof windows);
}

static bool windows_same(const struct world *a, const struct world *b, const struct window *win,
                         bool core)
{
    for (uint32_t i = 0; i < WINDOWS; i++)
        if (win[i].core == core &&
            !same_words(a->base + win[i].offset, b->base + win[i].offset, win[i].bytes))
            return false;
    return true;
}

static void windows_copy(const struct world *to, const struct world *from, const struct window *win)
{
    for (uint32_t i = 0; i < WINDOWS; i++)
        memcpy(to->base + win[i].offset, from->base + win[i].offset, win[i].bytes);
}

static bool world_same(const struct world *a, const struct world *b, const struct window *win)
{
    return windows_same(a, b, win, true) && windows_same(a, b, win, false);
}

static bool is_committed(const struct world *w)
{
    return atomic_load(&w->ledger.head->commits) > STEP;
}

/* -- Every instruction ------------------------------------------------------------------------- */

struct counts {
    uint64_t start_ns;
    uint64_t instructions, states, core_states, recoveries;
    uint64_t in_group[2]; /* states inside a group, before and after the commit */
    uint64_t committed;   /* recoveries of the first decision, by one who decides otherwise */
};

/* live is the child's; seen, what it was at the last look; end, what it must become by each of the
 * two decisions; copy, where its states are finished; picked, those to begin a second time from. */
struct stepping {
    struct world start, live, seen, copy, end[2], picked[PICKS];
    struct window win[WINDOWS];
    struct inputs in;
    const struct plan *plan;
    struct kern *k;      /* finishes copies */
    uint64_t run_states; /* of this child */
    uint64_t every;      /* this many states of what kernels write are one that is finished */
    bool second;         /* live is of a successor already: */
    uint32_t decided;    /* whose decision counts whatever happens to it */
    uint64_t random;
    struct counts counts;
};

static pid_t fork_step(struct stepping *s, const char *isa)
{
    const pid_t pid = fork();
    EXPECT(pid >= 0);
    if (pid > 0)
        return pid;
    struct kern *k;
    struct shd_err e;
    child_stop();
    if (kern_cpu_new(&(struct kern_config){ .threads = 1, .isa = isa }, &k, &e) != SHD_OK)
        _exit(1);
    raise(SIGSTOP);
    const char *wrong = shell_run(&s->live, &s->in, s->plan, k, STEP, s->second);
    if (wrong != NULL)
        fprintf(stderr, "child: %s\n", wrong);
    _exit(wrong == NULL ? 0 : 1);
}

static void step_begin(struct stepping *s, const struct world *from, const char *isa,
                       struct trace *ret)
{
    windows_copy(&s->live, from, s->win);
    windows_copy(&s->seen, from, s->win);
    *ret = (struct trace){ .random = &s->random, .since_pause = 8 };
    ret->threads[0].tid = fork_step(s, isa);
    trace_attach(ret);
}

/* Finish a copy of the live memory. Returns what is wrong with it, or NULL. */
static const char *finish_copy(struct stepping *s)
{
    windows_copy(&s->copy, &s->live, s->win);
    const bool committed = is_committed(&s->copy);
    const uint32_t decided = s->second ? s->decided : !committed;
    s->counts.recoveries++;
    s->counts.committed += committed;
    if (atomic_load(&s->copy.marks->answered) != 0 && !committed)
        return "a commit was answered and is not there";
    const char *wrong = commit_differs(&s->copy, committed ? &s->end[decided] : &s->start);
    if (wrong == NULL)
        wrong = shell_run(&s->copy, &s->in, s->plan, s->k, STEP, 1);
    return wrong != NULL ? wrong : world_differs(&s->copy, &s->end[decided]);
}

/* Of the states inside a group, which a repair has to undo: each has the same chance. */
static void pick(struct stepping *s)
{
    const struct trail_record *r = &s->live.ledger.trail->records[0];
    const uint32_t committed = is_committed(&s->live);
    if (r->op == 0 || (r->pos & 0xff) == 0)
        return;
    if ((test_random(&s->random) >> 33) % ++s->counts.in_group[committed] == 0)
        windows_copy(&s->picked[committed], &s->live, s->win);
}

/* The child has run one more instruction. A state seen before needs no second look. */
static const char *look(struct stepping *s)
{
    s->counts.instructions++;
    const bool core_same = windows_same(&s->live, &s->seen, s->win, true);
    if (core_same && windows_same(&s->live, &s->seen, s->win, false))
        return NULL;
    windows_copy(&s->seen, &s->live, s->win);
    s->counts.states++;
    s->counts.core_states += !core_same;
    if (!s->second)
        pick(s);
    if (core_same && s->run_states++ >= FIRST_ALL && s->counts.states % s->every != 0)
        return NULL;
    return finish_copy(s);
}

static void step_all(struct stepping *s, const struct world *from, const char *isa)
{
    struct trace t;
    s->run_states = 0;
    step_begin(s, from, isa, &t);
    while (trace_next(&t)) {
        const char *wrong = look(s);
        if (wrong == NULL)
            continue;
        trace_kill(&t);
        FAIL("%s, plan \"%s\"%s: killed at instruction %" PRIu64 " and recovered it differs: %s",
             isa, s->plan->name, s->second ? ", a recovery" : "", t.instructions, wrong);
    }
    EXPECT(WIFEXITED(t.status) && WEXITSTATUS(t.status) == 0);
    const char *wrong = world_differs(&s->live, &s->end[s->second ? s->decided : 0]);
    if (wrong != NULL)
        FAIL("%s, plan \"%s\": the child itself differs: %s", isa, s->plan->name, wrong);
}

static void counts_begin(struct stepping *s, bool second, uint64_t every)
{
    s->counts = (struct counts){ .start_ns = clock_now_ns() };
    s->second = second;
    s->every = every;
}

static void report(const struct stepping *s, const char *isa, const char *what)
{
    const struct counts *c = &s->counts;
    printf("%-6s %-20s %-14s %8" PRIu64 " instructions, %6" PRIu64 " states, %5" PRIu64
           " of the core's, %6" PRIu64 " recoveries, %5" PRIu64 " of them committed, %.1f s\n",
           isa, s->plan->name, what, c->instructions, c->states, c->core_states, c->recoveries,
           c->committed, (double)(clock_now_ns() - c->start_ns) * 1e-9);
}

/* A child killed at a random instruction leaves what was copied before, and that can be finished.
 * It runs freely for up to us, then for some instructions. False: it had not begun, or had ended.
 */
static bool kill_one(struct stepping *s, const char *isa, uint64_t us)
{
    struct trace t;
    step_begin(s, &s->start, isa, &t);
    trace_run(&t, test_random(&s->random) % us);
    const uint64_t at = test_random(&s->random) % KILL_STEPS;
    while (t.instructions < at && !t.ended && trace_next(&t))
        ;
    memcpy(s->seen.base, s->live.base, s->live.bytes);
    trace_kill(&t);
    if (memcmp(s->seen.base, s->live.base, s->live.bytes) != 0)
        FAIL("killed after %" PRIu64 " steps it left something else than was there before", at);
    if (t.ended || world_same(&s->live, &s->start, s->win))
        return false;
    s->counts.instructions += t.instructions;
    s->counts.states++;
    const char *wrong = finish_copy(s);
    if (wrong != NULL)
        FAIL("%s, plan \"%s\": killed and recovered it differs: %s", isa, s->plan->name, wrong);
    return true;
}

/* Microseconds of an undisturbed step in a child. */
static uint64_t step_us(struct stepping *s, const char *isa)
{
    struct trace t;
    step_begin(s, &s->start, isa, &t);
    const uint64_t start_ns = clock_now_ns();
    ptrace(PTRACE_CONT, t.threads[1].tid, NULL, 0);
    ptrace(PTRACE_CONT, t.threads[0].tid, NULL, 0);
    while (!t.ended)
        trace_wait(&t);
    return 1 + (clock_now_ns() - start_ns) / 1000;
}

static void kill_case(struct stepping *s, const char *isa, uint32_t kills)
{
    counts_begin(s, false, 1);
    const uint64_t us = step_us(s, isa);
    uint32_t killed = 0;
    for (uint32_t tries = 0; killed < kills; tries++) {
        EXPECT(tries < 100 * kills);
        killed += kill_one(s, isa, us);
    }
    report(s, isa, "SIGKILLs");
}

/* -- Cases ------------------------------------------------------------------------------------- */

/* Pointers to all the worlds there are, the start first. */
#define WORLDS (6u + PICKS)

static void worlds_of(struct stepping *s, struct world **ret)
{
    struct world *const all[] = { &s->start, &s->live, &s->seen, &s->copy, &s->end[0], &s->end[1] };
    memcpy(ret, all, sizeof all);
    for (uint32_t i = 0; i < PICKS; i++)
        ret[ARRAY_SIZE(all) + i] = &s->picked[i];
}

/* Step 0, and from there both ways to end STEP. */
static void plan_begin(struct stepping *s, const struct plan *plan)
{
    struct world *all[WORLDS];
    worlds_of(s, all);
    for (size_t i = 0; i < WORLDS; i++)
        *all[i] = world_new();
    windows_of(&s->start, s->win);
    s->plan = plan;
    EXPECT(shell_run(&s->start, &s->in, plan, s->k, 0, 0) == NULL);
    memset(s->start.marks, 0, sizeof *s->start.marks);
    for (size_t i = 1; i < WORLDS; i++)
        memcpy(all[i]->base, s->start.base, s->start.bytes);
    for (uint32_t d = 0; d < 2; d++)
        EXPECT(shell_run(&s->end[d], &s->in, plan, s->k, STEP, d) == NULL);
    EXPECT(world_differs(&s->end[0], &s->end[1]) != NULL);
}

static void plan_end(struct stepping *s)
{
    struct world *all[WORLDS];
    worlds_of(s, all);
    for (size_t i = 0; i < WORLDS; i++)
        world_free(all[i]);
}

/* Tracer and tracee take turns: on one CPU that is many times faster. */
static void stay_on_one_cpu(cpu_set_t *ret_before)
{
    cpu_set_t one;
    EXPECT(sched_getaffinity(0, sizeof *ret_before, ret_before) == 0);
    CPU_ZERO(&one);
    CPU_SET((size_t)sched_getcpu(), &one);
    sched_setaffinity(0, sizeof one, &one);
}

/* A whole step, and one from a state in the midst of it. */
static void step_case(struct stepping *s, const char *isa)
{
    cpu_set_t before;
    stay_on_one_cpu(&before);
    counts_begin(s, false, EVERY);
    step_all(s, &s->start, isa);
    report(s, isa, "every");
    EXPECT(s->counts.states >= 500 && s->counts.core_states >= 20);
    EXPECT(s->counts.in_group[0] > 0 && s->counts.in_group[1] > 0);
    EXPECT(s->counts.committed > 0 && s->counts.committed < s->counts.recoveries);

    counts_begin(s, true, SECOND_EVERY);
    for (uint32_t i = SLOW; i < PICKS; i++) { /* after the commit less is left to do */
        s->decided = !is_committed(&s->picked[i]);
        step_all(s, &s->picked[i], isa);
    }
    report(s, isa, "second crashes");
    sched_setaffinity(0, sizeof before, &before);
}

TEST(every_instruction_of_a_step_is_a_good_one_to_die_at)
{
    static const struct plan plans[] = {
        { "spilled, and none last",
          { { 0, 1, false, true },
            { 2, 1, true, false },
            { 0, 0, false, false },
            { 2, 0, false, false } } },
        { "one takes no part",
          { { 2, 0, true, false },
            { 0, 0, false, false },
            { 0, 1, false, false },
            { 2, 1, true, false } } },
    };
    static struct stepping s;
    if (SANITIZE_THREAD)
        SKIP("ThreadSanitizer takes too many instructions");
    s.random = test_seed(20261121);
    inputs_fill(&s.in);
    s.k = device_new(NULL, 1);
    uint32_t isas = 0;
    while (kern_cpu_isas()[isas] != NULL)
        isas++;
    EXPECT(isas > 0);
    for (uint32_t p = 0; p < ARRAY_SIZE(plans); p++) {
        plan_begin(&s, &plans[p]);
        const char *isa = kern_cpu_isas()[isas - 1 - p % isas];
        if (!SLOW || p == 0)
            step_case(&s, isa);
        kill_case(&s, isa, KILLS / ARRAY_SIZE(plans));
        plan_end(&s);
    }
    s.k->ops->free(s.k);
}

TEST_MAIN()
