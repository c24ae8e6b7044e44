/* Tests that fail leave nothing to those that come after them: this program runs itself on its own
 * tests of INNER, of which some fail. */
#define TEST_ONLY "rest"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "tests/lib/test.h"

#define INNER "inner"
#define MARK  "left-by-a-test"

static int *kept; /* of a test that failed */

static bool has_mapping(const char *name)
{
    char line[512];
    bool found = false;
    FILE *f = fopen("/proc/self/maps", "re");
    CHECK(f != NULL);
    while (fgets(line, sizeof line, f) != NULL)
        found = found || strstr(line, name) != NULL;
    fclose(f);
    return found;
}

TEST(inner_1_passes)
{
    EXPECT(true);
}

/* A mapping, a descriptor, a variable of the environment, a handler. */
TEST(inner_2_fails_and_leaves_things)
{
    const int fd = memfd_create(MARK, 0);
    EXPECT(fd >= 0 && ftruncate(fd, 4096) == 0);
    kept = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    EXPECT(kept != MAP_FAILED && has_mapping(MARK));
    setenv("SHD_TEST_LEFT", "1", 1);
    signal(SIGUSR1, SIG_IGN);
    FAIL("as it should");
}

TEST(inner_3_has_nothing_of_it)
{
    EXPECT(kept == NULL && !has_mapping(MARK));
    EXPECT(getenv("SHD_TEST_LEFT") == NULL);
    EXPECT(signal(SIGUSR1, SIG_DFL) == SIG_DFL);
}

TEST(inner_4_is_skipped_and_leaves_things)
{
    kept = malloc(1);
    SKIP("as it should");
}

TEST(inner_5_dies)
{
    static const struct rlimit none = { 0, 0 };
    EXPECT(kept == NULL);
    setrlimit(RLIMIT_CORE, &none);
    raise(SIGKILL);
}

TEST(inner_6_ends_the_process)
{
    _exit(3);
}

/* What a process of a test says is for the test to judge; the tests after it are not its to run. */
TEST(inner_7_has_a_child_that_fails)
{
    int status;
    fflush(NULL);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0)
        FAIL("in the child");
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 1);
}

TEST(inner_8_passes)
{
    EXPECT(true);
}

/* What this program says when it runs its tests of these words, and its exit code. */
static int run_words(const char *words, char *ret_text, size_t room)
{
    char self[256], command[512];
    const ssize_t bytes = readlink("/proc/self/exe", self, sizeof self - 1);
    CHECK(bytes > 0);
    self[bytes] = '\0';
    snprintf(command, sizeof command, "'%s' %s 2>/dev/null", self, words);
    FILE *f = popen(command, "re");
    CHECK(f != NULL);
    const size_t used = fread(ret_text, 1, room - 1, f);
    ret_text[used] = '\0';
    const int status = pclose(f);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(the_rest_runs_once_in_a_clean_process)
{
    char text[4096];
    EXPECT_EQ(run_words(INNER, text, sizeof text), 1);
    EXPECT_STR(text, "ok      inner_1_passes\n"
                     "FAILED  inner_2_fails_and_leaves_things\n"
                     "ok      inner_3_has_nothing_of_it\n"
                     "skipped inner_4_is_skipped_and_leaves_things\n"
                     "FAILED  inner_5_dies: killed by signal 9\n"
                     "FAILED  inner_6_ends_the_process: exit 3\n"
                     "ok      inner_7_has_a_child_that_fails\n"
                     "ok      inner_8_passes\n"
                     "4 passed, 3 failed, 1 skipped\n");
}

TEST(exit_codes_are_those_of_what_rests)
{
    char text[4096];
    EXPECT_EQ(run_words("inner_1 inner_4", text, sizeof text), 0);
    EXPECT_EQ(run_words("inner_4", text, sizeof text), 77);
    EXPECT_EQ(run_words("inner_8 inner_6", text, sizeof text), 1);
    EXPECT_HAS(text, "ok      inner_8_passes\n1 passed, 1 failed, 0 skipped\n");
    EXPECT_EQ(run_words("inner_8 inner_2", text, sizeof text), 1);
    EXPECT_EQ(run_words("inner_2", text, sizeof text), 1);
    EXPECT_EQ(run_words("no_such_test", text, sizeof text), 1);
}

TEST_MAIN()
