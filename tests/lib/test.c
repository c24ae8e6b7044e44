#include "tests/lib/test.h"

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
bool test_leaves_memory;

int test_run_all(int argc, char **argv)
{
    /* static: longjmp leaves automatic variables undefined */
    static int passed, failed, skipped;
    static struct test_case *t;
    for (t = test_first; t != NULL; t = t->next) {
        if (argc == 2 && strcmp(argv[1], "-l") == 0) {
            printf("%s\n", t->name);
            continue;
        }
        if (!test_wanted(t->name, argc, argv))
            continue;
        test_seeded = false;
        const int how = setjmp(test_escape);
        if (how == 0) {
            t->fn();
            passed++;
            printf("ok      %s\n", t->name);
        } else if (how == 1) {
            failed++;
            printf("FAILED  %s\n", t->name);
            if (test_seeded)
                printf("        with SHD_TEST_SEED=%" PRIu64 "\n", test_seed_given());
        } else {
            skipped++;
            printf("skipped %s\n", t->name);
        }
        fflush(stdout);
        test_leaves_memory = test_leaves_memory || how != 0;
        if (how != 0 && test_clean_up != NULL)
            test_clean_up();
    }
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    if (failed > 0)
        return 1;
    return passed == 0 && skipped > 0 ? 77 : 0;
}
