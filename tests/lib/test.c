#include "tests/lib/test.h"

#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/base/check.h"

static struct test_case *test_first, **test_last = &test_first;

jmp_buf test_escape;

void test_add(struct test_case *t)
{
    *test_last = t;
    test_last = &t->next;
}

uint64_t test_now_ms(void)
{
    return clock_now_ns() / NS_PER_MS;
}

void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){ .tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000 }, NULL);
}

uint64_t test_paced(uint64_t ms)
{
    const char *text = getenv("SHD_TEST_PACE");
    const unsigned long pace = text != NULL ? strtoul(text, NULL, 10) : 1;
    return pace > 1 ? pace * ms : ms;
}

uint64_t test_hang_ms(void)
{
    const uint64_t ms = test_paced(120000);
    return ms < 600000 ? ms : 600000;
}

uint64_t test_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(2685821657736338717);
}

static bool test_seeded; /* the test that runs has asked */

static uint64_t test_seed_given(void)
{
    const char *text = getenv("SHD_TEST_SEED");
    return text != NULL ? strtoull(text, NULL, 0) : 0;
}

uint64_t test_seed(uint64_t usual)
{
    const uint64_t mixed = usual ^ test_seed_given() * UINT64_C(0x9e3779b97f4a7c15);
    test_seeded = true;
    return mixed != 0 ? mixed : usual; /* test_random() stays at 0 */
}

const char *const *test_only;

static bool test_wanted(const char *name, int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (strstr(name, argv[i]) != NULL)
            return true;
    const char *const *word = test_only;
    while (word != NULL && *word != NULL && strstr(name, *word) == NULL)
        word++;
    return argc <= 1 && (word == NULL || *word != NULL);
}

void (*test_clean_up)(void);

/* How far the program has come: shared by the processes that its tests run in. */
struct test_progress {
    struct test_case *next;    /* from here on; NULL: none is left */
    struct test_case *running; /* NULL: none */
    int passed, failed, skipped;
};

static void test_failed(struct test_progress *p, const struct test_case *t, const char *why)
{
    p->failed++;
    printf("FAILED  %s%s\n", t->name, why);
}

static struct test_case *test_next_wanted(struct test_case *t, int argc, char **argv)
{
    while (t != NULL && !test_wanted(t->name, argc, argv))
        t = t->next;
    return t;
}

/* One test; false: it has left what it had, by longjmp. */
static bool test_run_one(struct test_progress *p, const struct test_case *t)
{
    const pid_t pid = getpid();
    test_seeded = false;
    const int how = setjmp(test_escape);
    if (how == 0) {
        t->fn();
        p->passed++;
        printf("ok      %s\n", t->name);
        return true;
    }
    if (getpid() !=
        pid) /* a process that the test forked: what comes after is not its own to run */
        _exit(how == 1 ? 1 : 77);
    if (how == 1) {
        test_failed(p, t, "");
        if (test_seeded)
            printf("        with SHD_TEST_SEED=%" PRIu64 "\n", test_seed_given());
    } else {
        p->skipped++;
        printf("skipped %s\n", t->name);
    }
    if (test_clean_up != NULL)
        test_clean_up();
    return false;
}

/* Up to one that leaves something behind. */
static void test_run_some(struct test_progress *p, int argc, char **argv)
{
    bool clean = true;
    while (p->next != NULL && clean) {
        p->running = p->next;
        clean = test_run_one(p, p->running);
        fflush(stdout);
        p->next = test_next_wanted(p->running->next, argc, argv);
        p->running = NULL;
    }
}

/* The same in a child, whose memory, descriptors and threads end with it: what a test has left is
 * nothing that the next one's processes inherit. */
static int test_run_forked(struct test_progress *p, int argc, char **argv)
{
    int status;
    char why[48];
    fflush(NULL);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        test_run_some(p, argc, argv);
        exit(0); /* sanitizers look at it, and what is to be done at exit is done */
    }
    while (waitpid(pid, &status, 0) != pid)
        CHECK(errno == EINTR);
    if (p->running != NULL) { /* it has ended the process */
        snprintf(why, sizeof why, ": %s %d", WIFSIGNALED(status) ? "killed by signal" : "exit",
                 WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
        test_failed(p, p->running, why);
        p->next = test_next_wanted(p->running->next, argc, argv);
        p->running = NULL;
        return SHD_OK;
    }
    return status == 0 ? SHD_OK : SHD_EINTERNAL;
}

static int test_list(void)
{
    for (const struct test_case *t = test_first; t != NULL; t = t->next)
        printf("%s\n", t->name);
    return 0;
}

int test_run_all(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "-l") == 0)
        return test_list();
    struct test_progress *p = mmap(NULL, sizeof *p, PROT_READ | PROT_WRITE,
                                   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED);
    p->next = test_next_wanted(test_first, argc, argv);
    int r = SHD_OK;
    if (p->next != NULL && test_next_wanted(p->next->next, argc, argv) == NULL)
        test_run_some(p, argc, argv); /* alone: a debugger has no child to follow */
    while (p->next != NULL)
        r = test_run_forked(p, argc, argv) == SHD_OK ? r : SHD_EINTERNAL;
    printf("%d passed, %d failed, %d skipped\n", p->passed, p->failed, p->skipped);
    const bool failed = p->failed > 0 || r != SHD_OK;
    const int passed = p->passed, skipped = p->skipped;
    munmap(p, sizeof *p);
    if (failed || passed + skipped == 0) /* a word that no test has in its name */
        return 1;
    return passed == 0 ? 77 : 0;
}
