/* What the daemon logs: the form of a line, and how many of them. In children, since what stderr is
 * is looked up once. */
#include "daemon/base/log.h"

#include <inttypes.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "tests/lib/test.h"

static char out[1 << 20]; /* what the last child wrote to stderr */

/* Run fn in a child with a pipe as stderr, which JOURNAL_STREAM names or does not. */
static void run_child(void (*fn)(void), bool journal)
{
    int ends[2], status;
    size_t used = 0;
    ssize_t n;
    CHECK(pipe(ends) == 0);
    fflush(NULL);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        char stream[64];
        struct stat st;
        CHECK(dup2(ends[1], STDERR_FILENO) >= 0 && fstat(STDERR_FILENO, &st) == 0);
        close(ends[0]);
        close(ends[1]);
        snprintf(stream, sizeof stream, "%llu:%llu", (unsigned long long)st.st_dev,
                 (unsigned long long)st.st_ino + !journal); /* inherited by who is not there */
        setenv("JOURNAL_STREAM", stream, 1);
        fn();
        _exit(0);
    }
    close(ends[1]);
    while ((n = read(ends[0], out + used, sizeof out - 1 - used)) > 0)
        used += (size_t)n;
    out[used] = '\0';
    close(ends[0]);
    CHECK(waitpid(pid, &status, 0) == pid);
    EXPECT_EQ(status, 0);
}

static unsigned count_of(const char *part)
{
    unsigned count = 0;
    for (const char *at = strstr(out, part); at != NULL; at = strstr(at + 1, part))
        count++;
    return count;
}

static void say_each(void)
{
    log_error("op=a n=%d", 1);
    log_warn("op=b n=%d", 2);
    log_info("op=c n=%d", 3);
    log_debug("op=d n=%d", 4);
}

TEST(journal_gets_priorities_and_others_words)
{
    run_child(say_each, /* journal= */ true);
    EXPECT_STR(out, "<3>op=a n=1\n<4>op=b n=2\n<6>op=c n=3\n");
    run_child(say_each, /* journal= */ false);
    EXPECT_HAS(out, "Z error: op=a n=1\n20");
    EXPECT_HAS(out, "Z warn: op=b n=2\n20");
    EXPECT_HAS(out, "Z info: op=c n=3\n");
    EXPECT(strspn(out, "0123456789-T:.") == strlen("2026-11-22T08:00:00.123"));
}

static void say_json(void)
{
    CHECK(!log_set_format("xml") && log_set_format("json"));
    log_set_device("cpu7");
    log_warn("op=hello pid=12 name=a\"b why=\"it said \"no\": x=1\" do=\"ask \xff\" n=1.5 empty=");
    log_info("no pairs");
}

TEST(json_has_the_pairs_as_fields)
{
    run_child(say_json, /* journal= */ false);
    EXPECT_HAS(out, "{\"time\":\"20");
    EXPECT_HAS(out, "Z\",\"device\":\"cpu7\",\"level\":\"warn\",\"op\":\"hello\",\"pid\":12,"
                    "\"name\":\"a\\\"b\",\"why\":\"it said \\\"no\\\": x=1\",\"do\":\"?\","
                    "\"n\":\"1.5\",\"empty\":\"\"}\n");
    EXPECT_HAS(out, "\"level\":\"info\",\"text\":\"no pairs\"}\n");
    run_child(say_json, /* journal= */ true);
    EXPECT_HAS(out, "<4>{\"time\":");
}

static void say_forged(void)
{
    log_warn("op=hello name=%s", "x\n<0>op=forged\r\033[2J\177");
}

TEST(line_is_one_line_whatever_a_peer_calls_itself)
{
    run_child(say_forged, /* journal= */ true);
    EXPECT_STR(out, "<4>op=hello name=\"x\\n<0>op=forged\\r\\x1b[2J\\x7f\"\n");
}

/* Printable all, as names of sessions are */
#define FORGED "x uid=0 why=\"gone\" do=\"run this\""

static void say_forged_pairs(void)
{
    log_warn("op=hello name=%s path=%s why=\"%.*s\" do=\"%s\" n=%02u/%" PRIu64
             " r=%.1f z=%zu x=%016" PRIx64,
             FORGED, "/a/b:c", 6, "a\" b=1 cut", "see \302\2330m \377 \303\244 \\", 7u,
             UINT64_C(1) << 40, 2.5, (size_t)3, UINT64_C(0xabc));
}

TEST(peer_adds_no_pair_whatever_it_calls_itself)
{
    static const char rest[] = "n=07/1099511627776 r=2.5 z=3 x=0000000000000abc\n";
    run_child(say_forged_pairs, /* journal= */ true);
    EXPECT_HAS(out, "<4>op=hello name=\"x uid=0 why=\\\"gone\\\" do=\\\"run this\\\"\" path=/a/b:c "
                    "why=\"a\\\" b=1\" do=\"see \\xc2\\x9b0m \\xff \303\244 \\\\\" ");
    EXPECT_HAS(out, rest);
}

static void say_forged_json(void)
{
    log_set_format("json");
    say_forged_pairs();
    log_warn("op=hello name=%s why=\"%s\"", "a\nb\033", "\" do=\"x\ty");
}

TEST(peer_adds_no_field_to_json)
{
    run_child(say_forged_json, /* journal= */ false);
    EXPECT_HAS(out,
               "\"name\":\"x uid=0 why=\\\"gone\\\" do=\\\"run this\\\"\",\"path\":\"/a/b:c\","
               "\"why\":\"a\\\" b=1\",\"do\":\"see \\\\xc2\\\\x9b0m \\\\xff \\u00E4 \\\\\",\"n\":");
    EXPECT_HAS(out, "\"name\":\"a\\nb\\u001B\",\"why\":\"\\\" do=\\\"x\\ty\"}\n");
}

static void say_long(void)
{
    char name[2000];
    memset(name, '\n', sizeof name);
    name[sizeof name - 1] = '\0';
    log_warn("op=hello name=%s status=%s", name, "SHD_OK");
}

TEST(value_that_is_too_long_ends_the_line_between_two_escapes)
{
    run_child(say_long, /* journal= */ true);
    EXPECT_EQ(count_of("\\n"), (1023 - strlen("op=hello name=\"")) / 2);
    EXPECT_EQ(count_of("status="), 0);
}

static void flood(int lines)
{
    for (int i = 0; i < lines; i++)
        log_warn("op=undecodable n=%d", i);
}

static void flood_and_end(void)
{
    flood(500);
    CHECK(log_suppressed() == 480);
    log_flush(/* all= */ true);
    log_flush(/* all= */ true); /* once */
}

TEST(flood_is_held_back_and_counted_at_the_end)
{
    struct log_entry recent[LOG_ENTRIES];
    run_child(flood_and_end, /* journal= */ true);
    EXPECT_EQ(count_of("op=undecodable n="), 20);
    EXPECT_HAS(out, "\n<4>op=undecodable suppressed=480 why=\"more than 20 like it in 5 s\"\n");
    EXPECT_EQ(count_of("suppressed="), 1);
    EXPECT_EQ(log_recent(recent), 0); /* a child's */
}

static void flood_and_go_on(void)
{
    flood(100);
    log_info("op=early");
    poll(NULL, 0, 5100);
    log_info("op=late");
    flood(1);
}

TEST(flood_that_is_over_is_told_with_the_next_line_of_any_place)
{
    run_child(flood_and_go_on, /* journal= */ true);
    EXPECT_EQ(count_of("op=undecodable n="), 21);
    EXPECT_EQ(count_of("suppressed="), 1);
    EXPECT_HAS(out, "<6>op=early\n<4>op=undecodable suppressed=80 why=");
    EXPECT_HAS(out, "\n<6>op=late\n");
}

static void say_many_kinds(void)
{
    struct log_entry recent[LOG_ENTRIES];
    for (int i = 0; i < 18; i++)
        log_warn("op=kept n=%d", i);
    log_info("op=not_kept");
    CHECK(log_recent(recent) == LOG_ENTRIES);
    CHECK(strcmp(recent[0].text, "op=kept n=2") == 0);
    CHECK(strcmp(recent[LOG_ENTRIES - 1].text, "op=kept n=17") == 0);
    log_set_level(LOG_LEVEL_ERROR);
    log_warn("op=quiet");
    CHECK(log_recent(recent) == LOG_ENTRIES);
    CHECK(strcmp(recent[LOG_ENTRIES - 1].text, "op=quiet") == 0);
}

TEST(warnings_are_kept_for_the_status_also_when_not_written)
{
    run_child(say_many_kinds, /* journal= */ false);
    EXPECT_EQ(count_of("op=kept"), 18);
    EXPECT_EQ(count_of("op=quiet"), 0);
}

TEST_MAIN()
