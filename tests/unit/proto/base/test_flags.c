/* Flags as a table: both spellings, limits, what is said about wrong ones, and the help. */
#include "proto/base/check.h"
#include "proto/base/flags.h"
#include "tests/lib/test.h"

static struct {
    bool loud;
    uint32_t workers;
    uint64_t steps, bytes;
    double rate;
    const char *name;
    struct flag_range range;
    struct flag_list data;
} got;

static const struct flag table[] = {
    { "loud", 'l', FLAG_BOOL, NULL, "say more", &got.loud, 0, 0 },
    { "workers", 'w', FLAG_U32, "N", "how many", &got.workers, 1, 64 },
    { "steps", 0, FLAG_U64, "N", "how long", &got.steps, 0, 0x1p53 },
    { "rate", 0, FLAG_REAL, "X", "how fast", &got.rate, 0, 1 },
    { "memory", 0, FLAG_BYTES, "B", "at most", &got.bytes, 0, 0 },
    { "name", 0, FLAG_STRING, "NAME", "of it", &got.name, 0, 0 },
    { "ranks", 0, FLAG_RANGE, "A..B", "of them", &got.range, 0, 9 },
    { "data", 0, FLAG_LIST, "PATH", "from here", &got.data, 0, 0 },
};
static const struct flags flags = { .usage = "x [FLAGS]",
                                    .about = "It does.",
                                    .more = "So it is.\n",
                                    .table = table,
                                    .count = ARRAY_SIZE(table) };

/* Words separated by spaces. */
static enum flags_result parse(const char *line, int *ret_rest, struct shd_err *e)
{
    static char text[512];
    char *argv[16] = { NULL };
    int argc = 0;
    memset(&got, 0, sizeof got);
    snprintf(text, sizeof text, "x %s", line);
    for (char *word = strtok(text, " "); word != NULL && argc < 15; word = strtok(NULL, " "))
        argv[argc++] = word;
    return flags_parse(&flags, argc, argv, ret_rest, e);
}

TEST(each_kind_is_stored_in_both_spellings)
{
    struct shd_err e = { 0 };
    int rest = 0;
    EXPECT_EQ(parse("-l -w 3 --steps=9007199254740992 --rate 0.25 --memory 1.5KiB word", &rest, &e),
              FLAGS_OK);
    EXPECT(got.loud && got.workers == 3 && got.steps == UINT64_C(1) << 53 && got.rate == 0.25);
    EXPECT_EQ(got.bytes, 1536);
    EXPECT_EQ(rest, 9);
    EXPECT_EQ(parse("--name=a=b --ranks 2..7 --data a --data=b -- --loud", &rest, &e), FLAGS_OK);
    EXPECT_STR(got.name, "a=b");
    EXPECT(got.range.first == 2 && got.range.last == 7 && got.data.count == 2);
    EXPECT_STR(got.data.items[1], "b");
    EXPECT(!got.loud && rest == 8);
    EXPECT_EQ(parse("--ranks 4", &rest, &e), FLAGS_OK);
    EXPECT(got.range.first == 4 && got.range.last == 4);
    EXPECT_EQ(parse("--loud --help", &rest, &e), FLAGS_HELP);
}

TEST(wrong_ones_are_named_with_value_and_limits)
{
    static const struct {
        const char *line, *said;
    } wrong[] = {
        { "--workers 65", "--workers is 65, its limits are 1 and 64" },
        { "--workers 0", "--workers is 0, its limits are 1 and 64" },
        { "--workers -1", "--workers takes a whole number, got '-1'" },
        { "--workers 2x", "takes a whole number, got '2x'" },
        { "--steps 18446744073709551616", "its limits are 0 and 9007199254740992" },
        { "--rate 1.5", "--rate is 1.5, its limits are 0 and 1" },
        { "--rate nan", "--rate takes a number, got 'nan'" },
        { "--memory 1.5Gi", "--memory takes bytes" },
        { "--ranks 5..4", "the first may not be larger than the last" },
        { "--ranks 1..x", "a whole number or A..B, got 'x'" },
        { "--name", "--name needs a value: --name NAME" },
        { "--loud=1", "--loud takes no value" },
        { "--wokers 3", "unknown flag '--wokers'; did you mean --workers?" },
        { "-x", "unknown flag '-x'; known: --loud, --workers" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        struct shd_err e = { 0 };
        int rest;
        EXPECT_EQ(parse(wrong[i].line, &rest, &e), FLAGS_ERROR);
        EXPECT_HAS(e.text, wrong[i].said);
    }
}

TEST(help_is_made_of_the_table)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    flags_help(&flags, out);
    fclose(out);
    EXPECT_HAS(text, "usage: x [FLAGS]\n\nIt does.\n\nflags:\n");
    EXPECT_HAS(text, "  -w, --workers N               how many\n");
    EXPECT_HAS(text, "  -h, --help                    this text\n\nSo it is.\n");
    free(text);
}

TEST_MAIN()
