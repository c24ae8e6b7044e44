/* A test program in one header: TEST(name) { EXPECT(...); } and TEST_MAIN().
 *
 * `prog` runs every test, `prog NAME...` those whose name contains one of the words, `prog -l`
 * lists them. A failed EXPECT prints file, line and values, and ends that test as failed; SKIP()
 * ends it visibly as skipped. The exit code is 0 only when nothing failed and something ran
 * (77, which ctest reports as skipped, when every test skipped).
 *
 * Tests run in a child, up to one that fails, is skipped, or ends the process; the rest in another,
 * which has nothing of what that one left. A test that is run alone is the program itself.
 */
#ifndef SHD_TEST_H
#define SHD_TEST_H

#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/clock.h"
#include "proto/base/status.h"

#if defined(__SANITIZE_THREAD__)
#define SANITIZE_THREAD 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SANITIZE_THREAD 1
#endif
#endif
#ifndef SANITIZE_THREAD
#define SANITIZE_THREAD 0
#endif

struct test_case {
    const char *name;
    void (*fn)(void);
    struct test_case *next;
};

extern jmp_buf test_escape;

void test_add(struct test_case *t);

#define TEST(id)                                                      \
    static void test_##id(void);                                      \
    __attribute__((constructor)) static void test_register_##id(void) \
    {                                                                 \
        static struct test_case t = { #id, test_##id, NULL };         \
        test_add(&t);                                                 \
    }                                                                 \
    static void test_##id(void)

#define FAIL(...)                                       \
    do {                                                \
        fprintf(stderr, "%s:%d: ", __FILE__, __LINE__); \
        fprintf(stderr, __VA_ARGS__);                   \
        fputc('\n', stderr);                            \
        longjmp(test_escape, 1);                        \
    } while (0)

#define SKIP(...)                     \
    do {                              \
        fprintf(stderr, "skipped: "); \
        fprintf(stderr, __VA_ARGS__); \
        fputc('\n', stderr);          \
        longjmp(test_escape, 2);      \
    } while (0)

#define EXPECT(cond)                    \
    do {                                \
        if (!(cond))                    \
            FAIL("expected %s", #cond); \
    } while (0)

#define EXPECT_EQ(a, b)                                                           \
    do {                                                                          \
        const long long test_a = (long long)(a), test_b = (long long)(b);         \
        if (test_a != test_b)                                                     \
            FAIL("expected %s == %s, got %lld and %lld", #a, #b, test_a, test_b); \
    } while (0)

#define EXPECT_STR(a, b)                                                          \
    do {                                                                          \
        const char *test_a = (a), *test_b = (b);                                  \
        if (strcmp(test_a, test_b) != 0)                                          \
            FAIL("expected %s == %s, got '%s' and '%s'", #a, #b, test_a, test_b); \
    } while (0)

#define EXPECT_HAS(text, part)                             \
    do {                                                   \
        const char *test_t = (text), *test_p = (part);     \
        if (strstr(test_t, test_p) == NULL)                \
            FAIL("expected '%s' in '%s'", test_p, test_t); \
    } while (0)

#define EXPECT_NEAR(a, b, bound)                                                                \
    do {                                                                                        \
        const double test_a = (a), test_b = (b), test_d = (bound);                              \
        if (!(fabs(test_a - test_b) <= test_d))                                                 \
            FAIL("expected %s near %s, got %.17g and %.17g (bound %g)", #a, #b, test_a, test_b, \
                 test_d);                                                                       \
    } while (0)

/* expr returns a status; err is the struct shd_err it filled. */
#define EXPECT_OK(expr, err)                                             \
    do {                                                                 \
        const int test_r = (expr);                                       \
        if (test_r != SHD_OK)                                            \
            FAIL("%s: %s: %s", #expr, status_name(test_r), (err)->text); \
    } while (0)

#define EXPECT_STATUS(expr, code)                                               \
    do {                                                                        \
        const int test_r = (expr);                                              \
        if (test_r != (code))                                                   \
            FAIL("%s: expected %s, got %s", #expr, #code, status_name(test_r)); \
    } while (0)

uint64_t test_now_ms(void);

/* Memory of processes is no measure then. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TEST_SANITIZED true
#else
#define TEST_SANITIZED false
#endif

void sleep_ms(long ms);

/* Times in tests are those of a machine that is quick and has nothing else to do. Here they are so
 * many times as long as SHD_TEST_PACE says, which scripts/test.sh measures. */
uint64_t test_paced(uint64_t ms);

/* For what must come: a wait ends with it, and only one that would never end by this: paced, but
 * ten minutes at most, lest one hang take as long as all tests may. */
#define TEST_HANG_MS test_hang_ms()
uint64_t test_hang_ms(void);

#define EXPECT_SOON(cond)                                       \
    do {                                                        \
        const uint64_t test_end = test_now_ms() + TEST_HANG_MS; \
        while (!(cond)) {                                       \
            if (test_now_ms() > test_end)                       \
                FAIL("never came: %s", #cond);                  \
            sleep_ms(2);                                        \
        }                                                       \
    } while (0)

/* xorshift64*: seeded, the same everywhere. */
uint64_t test_random(uint64_t *state);

/* Where a random test begins: `usual`, or something else for each SHD_TEST_SEED=N in the
 * environment. A test that fails says which N it had. */
uint64_t test_seed(uint64_t usual);

/* NULL; or words, up to NULL: without arguments, tests whose name contains none of them are not
 * run. */
extern const char *const *test_only;

/* Called in the process of a test that failed or was skipped: ends what it started and did not come
 * to end. */
extern void (*test_clean_up)(void);

int test_run_all(int argc, char **argv);

#ifdef TEST_ONLY /* what this program is for, of tests that it shares with another one */
#define TEST_MAIN()                                            \
    int main(int argc, char **argv)                            \
    {                                                          \
        static const char *const only[] = { TEST_ONLY, NULL }; \
        test_only = only;                                      \
        return test_run_all(argc, argv);                       \
    }
#else
#define TEST_MAIN()                      \
    int main(int argc, char **argv)      \
    {                                    \
        return test_run_all(argc, argv); \
    }
#endif

#endif
