/* The beginning and the end of each verb of shardctl: flags, words, help and exit codes; a file
 * that a flag names; JSON; the lines on stderr and their log; the devices that run and up start. */
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/ctl/base/devices.h"
#include "client/ctl/base/say.h"
#include "client/ctl/base/verb.h"
#include "tests/lib/test.h"

static const char toy_about[] = "A toy.", toy_more[] = "examples: none\n";
static uint32_t count;
static bool loud;
static const struct flag table[] = {
    { "count", 'n', FLAG_U32, "N", "how many (1)", &count, 1, 9 },
    { "loud", 0, FLAG_BOOL, NULL, "say it 'aloud'", &loud, 0, 0 },
};
static const struct flags toy = VERB_FLAGS(toy, "shardctl toy [FLAGS]", table);

static char output[4096]; /* what the last call wrote to stdout and stderr */
static int out_fd = -1, saved[2];

static void capture(void)
{
    char name[] = "/tmp/test_ctl_verb.XXXXXX";
    fflush(stdout);
    out_fd = mkstemp(name);
    CHECK(out_fd >= 0 && unlink(name) == 0);
    for (int i = 0; i < 2; i++) {
        saved[i] = dup(i + 1);
        CHECK(saved[i] >= 0 && dup2(out_fd, i + 1) >= 0);
    }
}

static void captured(void)
{
    fflush(stdout);
    for (int i = 0; i < 2; i++) {
        dup2(saved[i], i + 1);
        close(saved[i]);
    }
    const ssize_t n = pread(out_fd, output, sizeof output - 1, 0);
    output[n > 0 ? n : 0] = '\0';
    close(out_fd);
}

#define WORDS_MAX 8
/* Words behind "toy", up to NULL; into argv, which verb_start_word() changes. */
static int words(const char *const *from, char *argv[WORDS_MAX + 2])
{
    int argc = 0;
    argv[argc++] = (char *)"toy";
    for (; *from != NULL; from++)
        argv[argc++] = (char *)*from;
    argv[argc] = NULL;
    return argc;
}
#define WORDS(...) ((const char *[]){ __VA_ARGS__ __VA_OPT__(, ) NULL })

static int start(const char *const *from, int *ret_rest)
{
    char *argv[WORDS_MAX + 2];
    const int argc = words(from, argv);
    count = 1;
    loud = false;
    capture();
    const int code = verb_start(&toy, argc, argv, ret_rest);
    captured();
    return code;
}

/* -- Flags ----------------------------------------------------------------------------------- */

TEST(flags_are_taken_and_the_verb_goes_on)
{
    int rest = -1;
    EXPECT_EQ(start(WORDS("--count", "3", "--loud"), NULL), -1);
    EXPECT_EQ(count, 3);
    EXPECT(loud);
    EXPECT_STR(output, "");
    EXPECT_EQ(start(WORDS("-n", "2", "file", "more"), &rest), -1);
    EXPECT_EQ(rest, 3);
    EXPECT_EQ(start(WORDS(), NULL), -1);
}

TEST(help_is_an_answer_and_goes_to_stdout)
{
    EXPECT_EQ(start(WORDS("--help"), NULL), CTL_OK);
    EXPECT_HAS(output, "usage: shardctl toy [FLAGS]");
    EXPECT_HAS(output, "A toy.");
    EXPECT_HAS(output, "how many (1)");
    EXPECT_HAS(output, "examples: none");
}

TEST(a_wrong_command_line_is_code_2_and_names_the_help)
{
    EXPECT_EQ(start(WORDS("--cuont", "3"), NULL), CTL_USAGE);
    EXPECT_HAS(output, "shardctl: unknown flag '--cuont'");
    EXPECT_HAS(output, "shardctl: `shardctl toy --help` explains\n");
    EXPECT_EQ(start(WORDS("--count", "10"), NULL), CTL_USAGE);
    EXPECT_EQ(start(WORDS("word"), NULL), CTL_USAGE);
    EXPECT_HAS(output, "shardctl: toy takes no further words, got 'word'\n");
}

TEST(flags_are_listed_for_shells_and_for_the_manual)
{
    EXPECT_EQ(start(WORDS(VERB_LIST_FLAGS), NULL), CTL_OK);
    EXPECT_STR(output, " --count:N -n:N --loud --help -h");
    EXPECT_EQ(start(WORDS(VERB_LIST_MDOC), NULL), CTL_OK);
    EXPECT_STR(output, ".It Fl n , Fl -count Ar N\nhow many (1).\n"
                       ".It Fl -loud\nsay it 'aloud'.\n");
}

static int start_word(const char *const *from, const char **ret_word, const char **ret_more)
{
    char *argv[WORDS_MAX + 2];
    const int argc = words(from, argv);
    *ret_word = *ret_more = NULL;
    count = 1;
    capture();
    const int code = verb_start_word(&toy, argc, argv, ret_word, ret_more);
    captured();
    return code;
}

TEST(one_word_stands_before_the_flags_or_behind_them)
{
    const char *word, *more;
    EXPECT_EQ(start_word(WORDS("dir", "--count", "4"), &word, &more), -1);
    EXPECT_STR(word, "dir");
    EXPECT(more == NULL && count == 4);
    EXPECT_EQ(start_word(WORDS("--count", "5", "dir"), &word, &more), -1);
    EXPECT_STR(word, "dir");
    EXPECT(more == NULL && count == 5);
    EXPECT_EQ(start_word(WORDS("dir", "--count", "4", "again"), &word, &more), -1);
    EXPECT_STR(word, "dir");
    EXPECT_STR(more, "again");
    EXPECT_EQ(start_word(WORDS("a", "b"), &word, &more), -1);
    EXPECT_STR(more, "b");
    EXPECT_EQ(start_word(WORDS(), &word, &more), -1);
    EXPECT(word == NULL && more == NULL);
    EXPECT_EQ(start_word(WORDS("dir", "--nonsense"), &word, &more), CTL_USAGE);
}

/* -- Files and JSON -------------------------------------------------------------------------- */

TEST(a_file_is_read_whole_or_refused)
{
    char name[] = "/tmp/test_ctl_verb.XXXXXX", *text = NULL;
    size_t bytes = 0;
    struct shd_err e = { 0 };
    const int fd = mkstemp(name);
    EXPECT(fd >= 0 && write(fd, "12345", 5) == 5);
    close(fd);
    EXPECT_OK(verb_file(name, 5, &text, &bytes, &e), &e);
    EXPECT_EQ(bytes, 5);
    EXPECT_STR(text, "12345");
    free(text);
    EXPECT_STATUS(verb_file(name, 4, &text, &bytes, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "has more than 4 bytes");
    unlink(name);
    EXPECT_STATUS(verb_file(name, 5, &text, &bytes, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, name);
}

TEST(json_is_one_document_and_a_newline)
{
    capture();
    verb_json(json_pack("{s:i, s:s}", "step", 3, "model", "gpt"), JSON_COMPACT, stdout);
    captured();
    EXPECT_STR(output, "{\"step\":3,\"model\":\"gpt\"}\n");
}

/* -- Lines on stderr ------------------------------------------------------------------------- */

TEST(lines_are_whole_and_codes_are_those_of_the_help)
{
    char longer[2000];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    capture();
    const int failed = ctl_fail("no %s", "luck"), usage = ctl_usage("%d words", 3);
    captured();
    EXPECT_STR(output, "shardctl: no luck\nshardctl: 3 words\n");
    EXPECT(CTL_OK == 0 && failed == 1 && usage == 2);
    capture();
    ctl_say("%s", longer);
    captured();
    EXPECT_EQ(strlen(output), strlen("shardctl: ") + 1000); /* cut, with its end */
    EXPECT_EQ(output[strlen(output) - 1], '\n');
}

#define TIME_BYTES 25 /* "2026-11-22T08:00:00.123Z " */

/* Last of all: a log stays the process's stderr. */
TEST(a_log_that_is_full_goes_aside_and_one_on_a_full_disk_says_what_it_lacks)
{
    char dir[] = "/tmp/test_ctl_log.XXXXXX", log[64], old[64];
    struct shd_err e = { 0 };
    struct stat st;
    EXPECT(mkdtemp(dir) != NULL);
    snprintf(log, sizeof log, "%s/up.log", dir);
    snprintf(old, sizeof old, "%s/up.log" SAY_LOG_OLD, dir);
    const int err = dup(STDERR_FILENO);
    EXPECT_OK(say_to_log(log, &e), &e);
    ctl_say("first");
    const int r = ftruncate(STDERR_FILENO, (off_t)SAY_LOG_BYTES_MAX - TIME_BYTES - 20);
    ctl_say("123456789"); /* 20 bytes and the time: just fits */
    const bool kept = stat(old, &st) < 0;
    ctl_say("next");
    /* A file that cannot grow, as on a full disk. */
    struct rlimit limit;
    EXPECT(getrlimit(RLIMIT_FSIZE, &limit) == 0 && signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
    const struct rlimit small = { .rlim_cur = TIME_BYTES + 20, .rlim_max = limit.rlim_max };
    EXPECT(setrlimit(RLIMIT_FSIZE, &small) == 0);
    ctl_say("of this there is room for a part");
    say_line("[cpu0] and of this\n", 19);
    EXPECT(setrlimit(RLIMIT_FSIZE, &limit) == 0 && signal(SIGXFSZ, SIG_DFL) != SIG_ERR);
    ctl_say("after");
    dup2(err, STDERR_FILENO);
    close(err);
    static const char *const left[] = { "next", "2 lines are missing here: File too large",
                                        "after" };
    char *text = NULL, *line = NULL;
    size_t bytes = 0;
    EXPECT_OK(verb_file(log, 1000, &text, &bytes, &e), &e);
    line = strtok(text, "\n");
    for (size_t i = 0; i < ARRAY_SIZE(left); i++, line = strtok(NULL, "\n")) {
        EXPECT(line != NULL && strncmp(line + TIME_BYTES, "shardctl: ", 10) == 0);
        EXPECT_STR(line + TIME_BYTES + 10, left[i]);
    }
    EXPECT(line == NULL);
    free(text);
    EXPECT_EQ(r, 0);
    EXPECT(kept);
    EXPECT(stat(old, &st) == 0 && (uint64_t)st.st_size == SAY_LOG_BYTES_MAX);
    unlink(log);
    unlink(old);
    rmdir(dir);
}

/* -- Devices --------------------------------------------------------------------------------- */

static struct devices devices;

static void expect_devices(const char *list, uint32_t n, const char *why)
{
    struct shd_err e = { 0 };
    EXPECT_STATUS(devices_parse(list, n, &devices, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, why);
}

TEST(devices_are_counted_or_listed_in_their_order)
{
    char address[DEVICES_ADDRESS_BYTES(20)];
    struct shd_err e = { 0 };
    EXPECT_OK(devices_parse(NULL, 0, &devices, &e), &e);
    EXPECT(devices.count == 1 && !devices.listed);
    EXPECT_OK(devices_parse(NULL, 3, &devices, &e), &e);
    EXPECT_EQ(devices.count, 3);
    EXPECT_STR(devices.names[2], "cpu2");
    EXPECT_OK(devices_parse("gpu0,cpu12,gpu1", 0, &devices, &e), &e);
    EXPECT(devices.count == 3 && devices.listed);
    devices_address(&devices, "/run/d", address, sizeof address);
    EXPECT_STR(address, "/run/d?gpu0,cpu12,gpu1");
    EXPECT_OK(devices_parse(NULL, DEVICES_MAX, &devices, &e), &e);
    EXPECT_STR(devices.names[DEVICES_MAX - 1], "cpu1023");
}

TEST(devices_that_are_none_are_named)
{
    expect_devices("cpu0", 2, "says how many daemons: leave --daemons out");
    expect_devices("cpu", 0, "'cpu' is no device");
    expect_devices("cpux", 0, "'cpux' is no device");
    expect_devices("cpu0x", 0, "'cpu0x' is no device");
    expect_devices("tpu0", 0, "'tpu0' is no device");
    expect_devices("", 0, "'' is no device");
    expect_devices("cpu0,", 0, "'' is no device");
    expect_devices("cpu0000000000001", 0, "is no device");
    expect_devices("cpu0,gpu0,cpu0", 0, "cpu0 is there twice");
}

TEST_MAIN()
