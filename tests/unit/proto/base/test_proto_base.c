/* fixsum against plain big-integer addition, one bit at a time, which shares no code with it. */
#include <errno.h>
#include <math.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/dtype.h"
#include "proto/base/fixsum.h"
#include "proto/base/flags.h"
#include "proto/base/sys.h"
#include "tests/lib/test.h"

#define BITS 704 /* more than fixsum's 640: an overflow there would show here */

struct reference {
    uint8_t bit[BITS]; /* weight of bit i: 2^(i - 298) */
};

static void reference_add(struct reference *r, double x)
{
    uint64_t raw;
    memcpy(&raw, &x, sizeof raw);
    const int biased = (int)(raw >> 52 & 0x7ff);
    const uint64_t mantissa = (raw & ((UINT64_C(1) << 52) - 1)) |
                              (biased > 0 ? UINT64_C(1) << 52 : 0);
    const int low = (biased > 0 ? biased : 1) - 1075 + 298; /* index of the mantissa's bit 0 */
    int carry = 0;
    for (int i = 0; i < 53 || carry != 0; i++) {
        if (low + i < 0)
            continue; /* below 2^-298: dropped */
        const int sum = r->bit[low + i] + (i < 53 ? (int)(mantissa >> i & 1) : 0) + carry;
        r->bit[low + i] = sum & 1;
        carry = sum >> 1;
    }
}

static double reference_value(const struct reference *r)
{
    int top = BITS - 1;
    while (top >= 0 && r->bit[top] == 0)
        top--;
    double value = 0;
    for (int i = top; i >= 0 && i > top - 53; i--)
        value += ldexp((double)r->bit[i], i - 298);
    return value;
}

static void expect_same(const struct fixsum *s, const struct reference *r)
{
    struct fixsum t = *s;
    fixsum_carry(&t);
    EXPECT(fixsum_is_carried(&t));
    for (int i = 0; i < BITS; i++) {
        const int limb = i / 32;
        const int bit = limb < FIXSUM_LIMBS ? (int)(t.limb[limb] >> (i % 32) & 1) : 0;
        if (bit != r->bit[i])
            FAIL("bit %d is %d, expected %d", i, bit, r->bit[i]);
    }
    EXPECT(fixsum_value(s) == reference_value(r));
}

/* Non-negative, exponents over the whole range, some zero, some with few bits. */
static double random_term(uint64_t *state)
{
    const uint64_t how = test_random(state) % 16;
    const int exp = (int)(test_random(state) % 596) - 297;
    double frac = 1 + (double)(test_random(state) >> 12) * 0x1p-52;
    if (how == 0)
        return 0;
    if (how < 4)
        frac = 1;
    return ldexp(frac, exp);
}

TEST(sum_equals_big_integer_addition)
{
    uint64_t seed = test_seed(0x5eed1);
    for (int round = 0; round < 300; round++) {
        struct fixsum s;
        struct reference r = { { 0 } };
        fixsum_init(&s);
        const int terms = (int)(test_random(&seed) % 200);
        for (int i = 0; i < terms; i++) {
            const double x = random_term(&seed);
            fixsum_add(&s, x);
            reference_add(&r, x);
        }
        expect_same(&s, &r);
    }
}

TEST(one_term_comes_back_exactly_for_every_exponent)
{
    uint64_t seed = test_seed(0x5eed2);
    for (int exp = -298 + 52; exp <= 299; exp++) {
        const double x = ldexp(1 + (double)(test_random(&seed) >> 12) * 0x1p-52, exp);
        struct fixsum s;
        fixsum_init(&s);
        fixsum_add(&s, x);
        EXPECT(fixsum_value(&s) == x);
    }
    for (int exp = -298; exp <= 299; exp++) {
        struct fixsum s;
        fixsum_init(&s);
        fixsum_add(&s, ldexp(1, exp));
        EXPECT(fixsum_value(&s) == ldexp(1, exp));
    }
}

TEST(extremes_add_without_loss)
{
    struct fixsum s;
    struct reference r = { { 0 } };
    const double terms[] = { 0x1p-298, 0x1p299, 0x1.fffffffffffffp299, 0x1p-298, 0x1.8p-297, 0 };
    fixsum_init(&s);
    EXPECT(fixsum_value(&s) == 0);
    for (size_t i = 0; i < sizeof terms / sizeof terms[0]; i++) {
        fixsum_add(&s, terms[i]);
        reference_add(&r, terms[i]);
        expect_same(&s, &r);
    }
}

TEST(bits_below_the_range_are_dropped)
{
    const double tiny[] = { 0x1p-299, 0x1.fffffffffffffp-299, 0x1p-1074, 0x1p-1022, 0x1p-362 };
    for (size_t i = 0; i < sizeof tiny / sizeof tiny[0]; i++) {
        struct fixsum s;
        fixsum_init(&s);
        fixsum_add(&s, tiny[i]);
        EXPECT(fixsum_value(&s) == 0);
    }
    struct fixsum s;
    fixsum_init(&s);
    fixsum_add(&s, 0x1.8p-298); /* the half bit goes */
    EXPECT(fixsum_value(&s) == 0x1p-298);
}

TEST(text_is_the_sum_and_comes_back)
{
    static const struct {
        double x;
        const char *text;
    } known[] = { { 0, "0p0" }, { 1, "400p-10" }, { 0x1p-298, "1p-298" }, { 6, "1800p-10" } };
    char text[FIXSUM_TEXT_BYTES];
    struct fixsum s, back;
    uint64_t seed = test_seed(0x5eed7);
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        fixsum_init(&s);
        fixsum_add(&s, known[i].x);
        fixsum_carry(&s);
        fixsum_text(&s, text);
        EXPECT_STR(text, known[i].text);
        EXPECT(fixsum_parse(text, &back) && fixsum_value(&back) == known[i].x);
    }
    for (int round = 0; round < 300; round++) {
        fixsum_init(&s);
        for (int i = 0; i < round % 7; i++)
            fixsum_add(&s, random_term(&seed));
        fixsum_carry(&s);
        fixsum_text(&s, text);
        EXPECT(fixsum_parse(text, &back));
        EXPECT(memcmp(&s, &back, sizeof s) == 0);
    }
}

TEST(what_is_no_sums_text_is_refused)
{
    static const char *const bad[] = {
        "",
        "0",
        "p",
        "p0",
        "1",
        "1p",
        "1p0",
        "1p-10x",
        "1p-11",
        "1P-10",
        "1Ap-10",
        "1p-330",
        "1p310",
        "01p-10",
        "-1p-10",
        "1p--10",
        "1p+310",
        " 1p-10",
        "1p -10",
        "nanp-10",
        "0p-10",
        "1p-10 ",
        "1p999999999999999999999",
    };
    char text[FIXSUM_TEXT_BYTES + 64];
    struct fixsum sum;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        if (fixsum_parse(bad[i], &sum))
            FAIL("'%s' is taken for a sum", bad[i]);
    memset(text, 'f', sizeof text);
    memcpy(text + 153, "p-298", 6); /* 19 limbs and a digit: others could not be added to it */
    EXPECT(!fixsum_parse(text, &sum));
    memcpy(text + 152, "p-298", 6);
    EXPECT(fixsum_parse(text, &sum));
}

TEST(value_is_cut_not_rounded)
{
    struct fixsum s;
    fixsum_init(&s);
    fixsum_add(&s, 1);
    fixsum_add(&s, 0x1.8p-53); /* above half an ulp: nearest would go up */
    EXPECT(fixsum_value(&s) == 1);
    fixsum_add(&s, 0x1p-53);
    EXPECT(fixsum_value(&s) == 1 + 0x1p-52);
}

#define TERMS 1000

static void shuffle(double *x, int count, uint64_t *seed)
{
    for (int i = count - 1; i > 0; i--) {
        const int k = (int)(test_random(seed) % (uint64_t)(i + 1));
        const double t = x[i];
        x[i] = x[k];
        x[k] = t;
    }
}

static void sum_split(const double *x, int count, uint32_t owners, uint64_t *seed,
                      struct fixsum *ret_sum)
{
    struct fixsum part[64];
    EXPECT(owners > 0 && owners <= 64);
    for (uint32_t o = 0; o < owners; o++)
        fixsum_init(&part[o]);
    for (int i = 0; i < count; i++)
        fixsum_add(&part[test_random(seed) % owners], x[i]);
    fixsum_init(ret_sum);
    for (uint32_t o = 0; o < owners; o++) {
        if (test_random(seed) % 2 == 0)
            fixsum_carry(&part[o]); /* as on the wire, or not */
        fixsum_merge(ret_sum, &part[o]);
    }
    fixsum_carry(ret_sum);
}

TEST(order_and_split_change_no_bit)
{
    uint64_t seed = test_seed(0x5eed3);
    static double x[TERMS];
    for (int i = 0; i < TERMS; i++)
        x[i] = random_term(&seed);
    struct fixsum whole, split;
    fixsum_init(&whole);
    for (int i = 0; i < TERMS; i++)
        fixsum_add(&whole, x[i]);
    fixsum_carry(&whole);
    for (int round = 0; round < 100; round++) {
        shuffle(x, TERMS, &seed);
        sum_split(x, TERMS, (uint32_t)(test_random(&seed) % 64) + 1, &seed, &split);
        EXPECT(memcmp(whole.limb, split.limb, sizeof whole.limb) == 0);
        EXPECT(fixsum_value(&whole) == fixsum_value(&split));
    }
}

TEST(carry_comes_before_a_limb_can_overflow)
{
    struct fixsum s;
    fixsum_init(&s);
    s.adds = (1u << 30) - 2;
    s.limb[9] = (UINT64_C(1) << 62) - 1; /* as 2^30 additions may have left it */
    EXPECT(!fixsum_is_carried(&s));
    const double before = fixsum_value(&s);
    fixsum_add(&s, 0x1p-298);
    EXPECT_EQ(s.adds, (1u << 30) - 1);
    fixsum_add(&s, 0x1p-298);
    EXPECT_EQ(s.adds, 0);
    EXPECT(fixsum_is_carried(&s));
    EXPECT_EQ(s.limb[0], 2);
    EXPECT(fixsum_value(&s) == before);
}

TEST(carried_means_every_limb_below_2_to_32)
{
    for (int i = 0; i < FIXSUM_LIMBS; i++) {
        struct fixsum s;
        fixsum_init(&s);
        s.limb[i] = UINT32_MAX;
        EXPECT(fixsum_is_carried(&s));
        s.limb[i]++;
        EXPECT(!fixsum_is_carried(&s));
    }
}

/* status, dtype and the fault seam. */

TEST(every_code_has_a_name_and_a_meaning)
{
    for (int code = 0; code >= -16; code--) {
        EXPECT(status_known(code));
        EXPECT(strncmp(status_name(code), "SHD_", 4) == 0);
        EXPECT(strcmp(status_name(code), "SHD_UNKNOWN") != 0);
        EXPECT(strlen(status_meaning(code)) > 3);
    }
    EXPECT_STR(status_name(SHD_ESTEP), "SHD_ESTEP");
}

TEST(other_codes_are_unknown)
{
    const int codes[] = { SHD_PENDING, SHD_EMOVED - 1, 2, INT32_MAX, INT32_MIN };
    for (size_t i = 0; i < ARRAY_SIZE(codes); i++) {
        EXPECT(!status_known(codes[i]));
        EXPECT_STR(status_name(codes[i]), "SHD_UNKNOWN");
    }
}

TEST(set_returns_the_code_and_formats)
{
    struct shd_err e;
    EXPECT_STATUS(err_set(&e, SHD_ERANGE, "got %d of '%s'", 3, "x"), SHD_ERANGE);
    EXPECT_EQ(e.code, SHD_ERANGE);
    EXPECT_STR(e.text, "got 3 of 'x'");
    EXPECT_STATUS(err_set(NULL, SHD_EIO, "nobody asks"), SHD_EIO);
}

TEST(long_text_is_cut_and_terminated)
{
    struct {
        struct shd_err e;
        char guard;
    } s = { .guard = 'g' };
    char text[1000];
    memset(text, 'a', sizeof text - 1);
    text[sizeof text - 1] = 0;
    err_set(&s.e, SHD_EIO, "%s", text);
    EXPECT_EQ(strlen(s.e.text), SHD_ERR_TEXT_BYTES - 1);
    errno = EPIPE;
    err_sys(&s.e, SHD_EIO, "%s", text);
    EXPECT_EQ(strlen(s.e.text), SHD_ERR_TEXT_BYTES - 1);
    err_prefix(&s.e, "%s", text);
    EXPECT_EQ(strlen(s.e.text), SHD_ERR_TEXT_BYTES - 1);
    EXPECT_EQ(s.guard, 'g');
}

TEST(sys_appends_errno_and_knows_shortages)
{
    struct shd_err e;
    errno = ENOENT;
    EXPECT_STATUS(err_sys(&e, SHD_EIO, "open %s", "a"), SHD_EIO);
    EXPECT_STR(e.text, "open a: No such file or directory");
    const int shortages[] = { ENOMEM, EMFILE, ENFILE };
    for (size_t i = 0; i < ARRAY_SIZE(shortages); i++) {
        errno = shortages[i];
        EXPECT_STATUS(err_sys(&e, SHD_EIO, "open"), SHD_ENOMEM);
        EXPECT_EQ(e.code, SHD_ENOMEM);
    }
    errno = ENOMEM;
    EXPECT_STATUS(err_sys(NULL, SHD_EIO, "open"), SHD_ENOMEM);
}

TEST(prefix_keeps_the_code)
{
    struct shd_err e;
    err_set(&e, SHD_ESTEP, "step is 4");
    EXPECT_STATUS(err_prefix(&e, "owner %d", 2), SHD_ESTEP);
    EXPECT_STR(e.text, "owner 2: step is 4");
    EXPECT_STATUS(err_prefix(NULL, "owner"), SHD_EINTERNAL);
}

TEST(text_may_be_built_from_itself)
{
    struct shd_err e;
    err_set(&e, SHD_ESTEP, "inner");
    err_set(&e, SHD_EIO, "outer(%s)", e.text);
    EXPECT_STR(e.text, "outer(inner)");
    err_prefix(&e, "again(%s)", e.text);
    EXPECT_STR(e.text, "again(outer(inner)): outer(inner)");
}

TEST(dtypes_have_sizes_and_names)
{
    EXPECT_EQ(dtype_bytes(SHD_F32), 4);
    EXPECT_EQ(dtype_bytes(SHD_BF16), 2);
    EXPECT_EQ(dtype_bytes(SHD_F16), 2);
    for (int d = SHD_F32; d <= SHD_F16; d++) {
        EXPECT(dtype_valid((uint64_t)d));
        EXPECT_EQ(dtype_parse(dtype_name((enum shd_dtype)d)), d);
    }
    EXPECT(!dtype_valid(0) && !dtype_valid(4) && !dtype_valid(UINT64_MAX));
    EXPECT(!dtype_valid(UINT64_C(0x100000001))); /* not cut to 32 bits */
    EXPECT_EQ(dtype_parse("fp16"), SHD_F16);     /* as other tools have it */
    EXPECT_EQ(dtype_parse("float32"), SHD_F32);
    EXPECT_EQ(dtype_parse("bfloat16"), SHD_BF16);
    EXPECT_EQ(dtype_parse("f64"), 0);
    EXPECT_EQ(dtype_parse(""), 0);
}

TEST(processors_are_those_we_may_run_on)
{
    cpu_set_t before, one;
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
    EXPECT_EQ(sys_processors(), CPU_COUNT(&before));
    CPU_ZERO(&one);
    for (size_t cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; cpu++)
        if (CPU_ISSET(cpu, &before))
            CPU_SET(cpu, &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    EXPECT_EQ(sys_processors(), 1);
    CHECK(sched_setaffinity(0, sizeof before, &before) == 0);
}

static enum sys_kind fault_kind;

static int fault_of_kind(enum sys_kind kind)
{
    return kind == fault_kind ? EMFILE : 0;
}

static void expect_faults(enum sys_kind kind)
{
    struct msghdr h = { 0 };
    fault_kind = kind;
    sys_fault = fault_of_kind;
    void *const made[] = { sys_malloc(8), sys_calloc(1, 8), sys_realloc(NULL, 8), sys_strdup("a") };
    void *map = sys_mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint8_t *pages = sys_pages(3 * 4096);
    const int memfd = sys_memfd("test", 0);
    errno = 0;
    const ssize_t sent = sys_sendmsg(-1, &h, 0);
    const int send_errno = errno;
    sys_fault = NULL;
    for (size_t i = 0; i < ARRAY_SIZE(made); i++) {
        EXPECT((made[i] == NULL) == (kind == SYS_ALLOC));
        free(made[i]);
    }
    EXPECT((map == MAP_FAILED) == (kind == SYS_MAP));
    if (map != MAP_FAILED)
        munmap(map, 4096);
    EXPECT((pages == NULL) == (kind == SYS_MAP));
    EXPECT(pages == NULL || (pages[0] == 0 && pages[3 * 4096 - 1] == 0));
    sys_pages_free(pages, 3 * 4096);
    EXPECT((memfd < 0) == (kind == SYS_OPEN));
    if (memfd >= 0)
        close(memfd);
    EXPECT_EQ(sent, -1);
    EXPECT_EQ(send_errno, kind == SYS_SEND ? EMFILE : EBADF);
}

TEST(faults_hit_their_kind_only)
{
    expect_faults(SYS_ALLOC);
    expect_faults(SYS_MAP);
    expect_faults(SYS_SEND);
    expect_faults(SYS_OPEN);
}

TEST(calloc_refuses_overflow)
{
    volatile size_t huge = SIZE_MAX / 2;
    void *p = sys_calloc(huge, 4);
    EXPECT(p == NULL);
    free(p);
}

/* Flags as a table: both spellings, limits, what is said about wrong ones, and the help. */

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
        { "--WORKERS 3", "did you mean --workers?" },
        { "-x", "unknown flag '-x'; known: --loud, --workers" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        struct shd_err e = { 0 };
        int rest;
        EXPECT_EQ(parse(wrong[i].line, &rest, &e), FLAGS_ERROR);
        EXPECT_HAS(e.text, wrong[i].said);
    }
}

TEST(names_are_suggested_by_their_letters_and_lists_are_cut_between_them)
{
    static const char *const names[] = { "lr", "micro-batches-per-worker", NULL, "max_live_units" };
    static const struct {
        const char *word, *said;
    } cases[] = {
        { "learning-rate", "; did you mean --lr?" },
        { "microbatches", "; did you mean --micro-batches-per-worker?" },
        { "max-live-units", "; did you mean --max_live_units?" },
        { "mlu", "; did you mean --max_live_units?" },
        { "zzzzzzzz", "; known: --lr, --micro-batches-per-worker, --max_live_units" },
    };
    char buf[100], little[30];
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        EXPECT_STR(suggest(cases[i].word, names, ARRAY_SIZE(names), "--", buf, sizeof buf),
                   cases[i].said);
    EXPECT_STR(suggest("zzzzzzzz", names, ARRAY_SIZE(names), "--", little, sizeof little),
               "; known: --lr, ...");
    EXPECT_STR(suggest("zzzzzzzz", names, ARRAY_SIZE(names), "--", little, 8), "");
}

TEST(sums_cross_as_bytes_and_compare_exactly)
{
    uint64_t seed = test_seed(5);
    for (int i = 0; i < 200; i++) {
        struct fixsum s[2], back;
        uint8_t bytes[FIXSUM_BYTES];
        bool none = true;
        double x[2];
        for (int k = 0; k < 2; k++) {
            x[k] = ldexp((double)(test_random(&seed) % 5), (int)(test_random(&seed) % 500) - 290);
            fixsum_init(&s[k]);
            fixsum_add(&s[k], x[k]);
            fixsum_carry(&s[k]);
            fixsum_pack(&s[k], bytes);
            EXPECT(fixsum_unpack(bytes, &back, &none) && !none);
            EXPECT(memcmp(back.limb, s[k].limb, sizeof back.limb) == 0);
        }
        EXPECT_EQ(fixsum_compare(&s[0], &s[1]), x[0] < x[1] ? -1 : x[0] > x[1]);
        struct fixsum more = s[0]; /* by the lowest bit, which no double of it has */
        more.limb[0]++;
        EXPECT_EQ(fixsum_compare(&s[0], &more), -1);
        fixsum_pack(NULL, bytes);
        EXPECT(fixsum_unpack(bytes, &back, &none) && none && fixsum_value(&back) == 0);
        bytes[test_random(&seed) % (FIXSUM_BYTES - 4)] = 0;
        EXPECT(!fixsum_unpack(bytes, &back, &none)); /* a top limb that no sum of squares has */
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

TEST(a_table_is_put_together_in_the_order_of_its_parts)
{
    const struct flag first[] = { { "b", 0, FLAG_BOOL, NULL, "first", &got.loud, 0, 0 },
                                  { "a", 0, FLAG_BOOL, NULL, "then", &got.loud, 0, 0 } };
    struct flag_table whole = { .count = 0 };
    FLAGS_ADD(&whole, first);
    FLAGS_ADD(&whole, table);
    EXPECT_EQ(whole.count, 2 + ARRAY_SIZE(table));
    EXPECT_STR(whole.rows[1].name, "a");
    EXPECT_STR(whole.rows[2].name, "loud");
    const struct flags both = {
        .usage = "", .about = "", .more = "", .table = whole.rows, .count = whole.count
    };
    char *argv[] = { (char *)"x", (char *)"--workers=7", (char *)"--a" };
    struct shd_err e = { 0 };
    int rest = 0;
    memset(&got, 0, sizeof got);
    EXPECT_EQ(flags_parse(&both, 3, argv, &rest, &e), FLAGS_OK);
    EXPECT(got.loud && got.workers == 7);
}

TEST_MAIN()
