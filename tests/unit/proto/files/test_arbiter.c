/* An arbiter on a directory: one view after the other, each made once, by whoever is first; and
 * what is not well there. */
#include "proto/files/arbiter.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/files/arbiter_file.h"
#include "tests/lib/arbiter_race.h"
#include "tests/lib/child.h"
#include "tests/lib/test.h"

#define CLUSTER "c0ffee"

static char dir[64], text[80];
static struct arbiter *arbiter;

static void empty_dir(void)
{
    char path[PATH_MAX];
    DIR *d = opendir(dir);
    for (const struct dirent *entry; d != NULL && (entry = readdir(d)) != NULL;) {
        snprintf(path, sizeof path, "%s/%s", dir, entry->d_name);
        if (unlink(path) != 0)
            rmdir(path);
    }
    if (d != NULL)
        closedir(d);
}

static void clean_up(void)
{
    if (dir[0] == '\0')
        return;
    empty_dir();
    rmdir(dir);
    dir[0] = '\0';
}

static void begin(void)
{
    struct shd_err e = { 0 };
    /* In memory, where there is no disk to wait for: calls have an end of their own. */
    snprintf(dir, sizeof dir, "%s/shd-arbiter-XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    CHECK(mkdtemp(dir) != NULL);
    test_clean_up = clean_up;
    snprintf(text, sizeof text, "file:%s", dir);
    EXPECT_OK(arbiter_open(text, CLUSTER, &arbiter, &e), &e);
}

static void end(void)
{
    arbiter_close(arbiter);
    clean_up();
}

/* The view `number` with one host out. */
static struct arbiter_view view_of(uint64_t number, char (*out)[ARBITER_NAME_BYTES],
                                   const char *host)
{
    snprintf(out[0], sizeof out[0], "%s", host);
    return (struct arbiter_view){ .number = number, .out_count = 1, .out = out };
}

static int claim_one(struct arbiter *a, uint64_t number, const char *host, struct shd_err *e)
{
    char out[1][ARBITER_NAME_BYTES];
    const struct arbiter_view v = view_of(number, out, host);
    return arbiter_claim(a, &v, e);
}

static uint64_t newest(struct arbiter *a)
{
    struct arbiter_view v = { 0 };
    struct shd_err e = { 0 };
    EXPECT_OK(arbiter_read(a, &v, &e), &e);
    const uint64_t number = v.number;
    arbiter_view_free(&v);
    return number;
}

static uint32_t count_names(const char *part)
{
    uint32_t count = 0;
    DIR *d = opendir(dir);
    CHECK(d != NULL);
    for (const struct dirent *entry; (entry = readdir(d)) != NULL;)
        count += entry->d_name[strspn(entry->d_name, ".")] != '\0' &&
                 strstr(entry->d_name, part) != NULL;
    closedir(d);
    return count;
}

static void write_file(const char *name, const char *content, size_t bytes)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "w");
    CHECK(f != NULL && fwrite(content, 1, bytes, f) == bytes && fclose(f) == 0);
}

TEST(views_follow_each_other)
{
    struct shd_err e = { 0 };
    struct arbiter_view v = { 0 }, next = { 0 };
    struct arbiter *other;
    begin();
    EXPECT_OK(arbiter_open(text, CLUSTER, &other, &e), &e);
    EXPECT_EQ(newest(arbiter), 0);
    EXPECT_OK(arbiter_read(arbiter, &v, &e), &e);
    EXPECT_EQ(v.out_count, 0);
    EXPECT_OK(arbiter_view_next(&v, "b", &next, &e), &e);
    EXPECT_OK(arbiter_claim(arbiter, &next, &e), &e);
    EXPECT_STATUS(arbiter_claim(other, &next, &e), SHD_EBUSY);
    EXPECT_HAS(e.text, "view 1 is another's");
    arbiter_view_free(&next);
    EXPECT_OK(arbiter_read(other, &v, &e), &e);
    EXPECT_EQ(v.number, 1);
    EXPECT(v.out_count == 1 && strcmp(v.out[0], "b") == 0);
    EXPECT_STATUS(arbiter_view_next(&v, "b", &next, &e), SHD_EEXIST);
    EXPECT_OK(arbiter_view_next(&v, "a", &next, &e), &e);
    EXPECT_OK(arbiter_claim(other, &next, &e), &e);
    arbiter_view_free(&v);
    EXPECT_OK(arbiter_read(arbiter, &v, &e), &e);
    EXPECT_EQ(v.number, 2);
    EXPECT(v.out_count == 2 && arbiter_view_has(&v, "a") && arbiter_view_has(&v, "b"));
    EXPECT_STR(v.out[0], "a");
    arbiter_view_free(&v);
    arbiter_view_free(&next);
    EXPECT_STATUS(claim_one(arbiter, 4, "a", &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "view 4 cannot follow view 2");
    EXPECT_STATUS(claim_one(arbiter, 0, "a", &e), SHD_EINVAL);
    EXPECT_EQ(count_names(".new"), 0);
    struct stat st;
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/" CLUSTER ".1", dir);
    EXPECT(stat(path, &st) == 0 && st.st_nlink == 1 && (st.st_mode & 07137) == 0);
    arbiter_close(other);
    end();
}

TEST(two_clusters_share_a_directory)
{
    struct shd_err e = { 0 };
    struct arbiter *other, *third;
    begin();
    EXPECT_OK(arbiter_open(text, CLUSTER ".1", &other, &e), &e);
    EXPECT_OK(arbiter_open(text, "c0ffe", &third, &e), &e);
    EXPECT_OK(claim_one(arbiter, 1, "a", &e), &e);
    EXPECT_OK(claim_one(arbiter, 2, "b", &e), &e);
    EXPECT_EQ(newest(other), 0);
    EXPECT_EQ(newest(third), 0);
    EXPECT_OK(claim_one(other, 1, "z", &e), &e);
    EXPECT_EQ(newest(arbiter), 2);
    EXPECT_EQ(newest(other), 1);
    EXPECT_EQ(newest(third), 0);
    arbiter_close(other);
    arbiter_close(third);
    end();
}

TEST(views_without_and_with_all_hosts_pass)
{
    struct shd_err e = { 0 };
    struct arbiter_view v = { .number = 1 }, got = { 0 };
    begin();
    EXPECT_OK(arbiter_claim(arbiter, &v, &e), &e);
    EXPECT_OK(arbiter_read(arbiter, &got, &e), &e);
    EXPECT(got.number == 1 && got.out_count == 0);
    arbiter_view_free(&got);
    v = (struct arbiter_view){ .number = 2, .out_count = ARBITER_HOSTS_MAX };
    v.out = calloc(v.out_count, sizeof *v.out);
    for (uint32_t i = 0; i < v.out_count; i++) /* the longest names */
        snprintf(v.out[i], sizeof v.out[i], "%063" PRIu32, i);
    EXPECT_OK(arbiter_claim(arbiter, &v, &e), &e);
    EXPECT_OK(arbiter_read(arbiter, &got, &e), &e);
    EXPECT_EQ(got.out_count, ARBITER_HOSTS_MAX);
    EXPECT(memcmp(got.out, v.out, v.out_count * sizeof *v.out) == 0);
    struct arbiter_view next;
    EXPECT_STATUS(arbiter_view_next(&got, "one-more", &next, &e), SHD_ERANGE);
    arbiter_view_free(&got);
    v.number = 3;
    memcpy(v.out[7], v.out[6], sizeof v.out[7]);
    EXPECT_STATUS(arbiter_claim(arbiter, &v, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "they ascend");
    snprintf(v.out[7], sizeof v.out[7], "a/b");
    EXPECT_STATUS(arbiter_claim(arbiter, &v, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "'a/b' is no name");
    free(v.out);
    EXPECT_EQ(newest(arbiter), 2);
    end();
}

/* Claimed, and read again. */
static void go_on(struct arbiter_view *v, struct arbiter_view *next)
{
    struct shd_err e = { 0 };
    EXPECT_OK(arbiter_claim(arbiter, next, &e), &e);
    arbiter_view_free(next);
    arbiter_view_free(v);
    EXPECT_OK(arbiter_read(arbiter, v, &e), &e);
}

TEST(hosts_that_come_back_are_behind_the_others)
{
    struct shd_err e = { 0 };
    struct arbiter_view v = { 0 }, next = { 0 };
    begin();
    EXPECT_STATUS(arbiter_view_in(&v, "a", &next, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "'a' is not out");
    EXPECT(!arbiter_view_swaps(&v, "a", "b") && !arbiter_view_swaps(&v, "b", "a"));
    EXPECT_OK(arbiter_view_next(&v, "a", &next, &e), &e);
    go_on(&v, &next);
    EXPECT_OK(arbiter_view_in(&v, "a", &next, &e), &e);
    go_on(&v, &next);
    EXPECT(v.number == 2 && v.out_count == 0 && v.behind_count == 1);
    EXPECT(v.behind[0].since == 2 && v.behind[0].filling);
    EXPECT(arbiter_view_behind(&v, "a") == &v.behind[0] && arbiter_view_behind(&v, "b") == NULL);
    EXPECT(arbiter_view_swaps(&v, "a", "b") && !arbiter_view_swaps(&v, "b", "a"));
    EXPECT_STATUS(arbiter_view_filled(&v, "b", &next, &e), SHD_ENOENT);
    EXPECT_OK(arbiter_view_filled(&v, "a", &next, &e), &e);
    go_on(&v, &next);
    EXPECT(v.behind_count == 1 && v.behind[0].since == 2 && !v.behind[0].filling);
    EXPECT_STATUS(arbiter_view_filled(&v, "a", &next, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "not being filled");

    EXPECT_OK(arbiter_view_next(&v, "b", &next, &e), &e);
    go_on(&v, &next);
    EXPECT(v.out_count == 1 && v.behind_count == 1);
    EXPECT_OK(arbiter_view_in(&v, "b", &next, &e), &e);
    go_on(&v, &next);
    EXPECT(v.behind_count == 2 && v.behind[1].since == 5 && v.behind[1].filling);
    EXPECT(!arbiter_view_swaps(&v, "a", "b") && arbiter_view_swaps(&v, "b", "a"));
    EXPECT(arbiter_view_swaps(&v, "a", "c") && !arbiter_view_swaps(&v, "c", "b"));

    EXPECT_OK(arbiter_view_next(&v, "a", &next, &e), &e); /* who goes out is behind nobody */
    go_on(&v, &next);
    EXPECT(v.behind_count == 1 && strcmp(v.behind[0].host, "b") == 0 && v.behind[0].filling);
    EXPECT(arbiter_view_has(&v, "a") && arbiter_view_behind(&v, "a") == NULL);
    arbiter_view_free(&v);
    end();
}

/* The longest text that there can be. */
TEST(all_hosts_behind_fit_into_a_view)
{
    struct shd_err e = { 0 };
    struct arbiter_view v = { .number = ARBITER_NUMBER_MAX, .behind_count = ARBITER_HOSTS_MAX };
    struct arbiter_view got = { 0 };
    char *of_it;
    v.behind = calloc(v.behind_count, sizeof *v.behind);
    for (uint32_t i = 0; i < v.behind_count; i++) {
        snprintf(v.behind[i].host, sizeof v.behind[i].host, "%063" PRIu32, i);
        v.behind[i].since = ARBITER_NUMBER_MAX - v.behind_count + 1 + i;
    }
    EXPECT_OK(arbiter_view_write(&v, CLUSTER, &of_it, &e), &e);
    EXPECT_OK(arbiter_view_parse(of_it, strlen(of_it), CLUSTER, &got, &e), &e);
    EXPECT(got.behind_count == v.behind_count);
    EXPECT(memcmp(got.behind, v.behind, v.behind_count * sizeof *v.behind) == 0);
    arbiter_view_free(&got);
    free(of_it);
    arbiter_view_free(&v);
}

TEST(views_of_builds_that_know_none_behind_are_read)
{
    static const char text_of_old[] =
        "{\"schema\": 1, \"cluster\": \"c0ffee\", \"view\": 1, \"out\": [\"b\"]}\n";
    struct shd_err e = { 0 };
    struct arbiter_view v = { 0 };
    char *again;
    EXPECT_OK(arbiter_view_parse(text_of_old, strlen(text_of_old), CLUSTER, &v, &e), &e);
    EXPECT(v.number == 1 && v.out_count == 1 && v.behind_count == 0);
    EXPECT_OK(arbiter_view_write(&v, CLUSTER, &again, &e), &e);
    EXPECT_STR(again, text_of_old); /* nor do they see any where none is */
    free(again);
    arbiter_view_free(&v);
}

/* -- Races ------------------------------------------------------------------------------------- */

#define VIEWS 60

TEST(one_of_eight_processes_makes_each_view)
{
    begin();
    expect_one_makes_each_view(text, CLUSTER, VIEWS);
    EXPECT_EQ(newest(arbiter), VIEWS);
    EXPECT_EQ(count_names(".new"), 0);
    EXPECT(count_names(CLUSTER) <= 2 * ARBITER_FILE_KEPT);
    end();
}

static void claim_for_ever(uint64_t seed)
{
    struct arbiter *a;
    struct shd_err why;
    MUST_OK(arbiter_open(text, CLUSTER, &a, NULL));
    for (;;) {
        struct arbiter_view v = { 0 };
        char host[32];
        if (arbiter_read(a, &v, &why) != SHD_OK)
            continue;
        snprintf(host, sizeof host, "h%" PRIu64, test_random(&seed) % 4);
        claim_one(a, v.number + 1, host, &why);
        arbiter_view_free(&v);
    }
}

/* What a kill leaves is a view that is whole, or none. */
TEST(killed_claimers_leave_whole_views)
{
    uint64_t seed = test_seed(11);
    uint64_t last = 0;
    begin();
    for (int i = 0; i < 30; i++) {
        const pid_t pid = test_fork();
        if (pid == 0)
            claim_for_ever(seed);
        const uint64_t goal = last + 1 + test_random(&seed) % 3;
        EXPECT_SOON(newest(arbiter) >= goal);
        usleep((useconds_t)(test_random(&seed) % 3000));
        CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, NULL, 0) == pid);
        EXPECT(newest(arbiter) >= last);
        last = newest(arbiter);
    }
    struct shd_err e = { 0 };
    EXPECT_OK(claim_one(arbiter, last + 1, "b", &e), &e);
    end();
}

/* -- Old views --------------------------------------------------------------------------------- */

TEST(old_views_go_and_the_newest_stays)
{
    struct shd_err e = { 0 };
    begin();
    for (uint64_t n = 1; n <= 40; n++)
        EXPECT_OK(claim_one(arbiter, n, "b", &e), &e);
    EXPECT_EQ(count_names(CLUSTER), ARBITER_FILE_KEPT + 1);
    EXPECT_EQ(newest(arbiter), 40);
    EXPECT_STATUS(claim_one(arbiter, 3, "a", &e), SHD_EBUSY); /* whose file is gone */
    end();
}

static atomic_int opens, late_at;
static struct arbiter *quick;

/* While the late one has looked and not linked yet, others have made so many views that its own
 * number is pruned. */
static int overtake(enum sys_kind kind)
{
    if (kind != SYS_OPEN || atomic_fetch_add(&opens, 1) + 1 != atomic_load(&late_at))
        return 0;
    sys_fault = NULL;
    for (uint64_t n = 3; n < 3 + 2 * ARBITER_FILE_KEPT; n++)
        CHECK(claim_one(quick, n, "q", NULL) == SHD_OK);
    return 0;
}

TEST(late_claim_of_a_number_whose_file_is_gone_is_no_view)
{
    struct shd_err e = { 0 };
    struct arbiter_view v = { 0 };
    begin();
    EXPECT_OK(arbiter_open(text, CLUSTER, &quick, &e), &e);
    EXPECT_OK(claim_one(arbiter, 1, "b", &e), &e);
    EXPECT_OK(claim_one(arbiter, 2, "b", &e), &e);
    opens = 0;
    late_at = 3; /* the directory to look, the directory to write, the file aside */
    sys_fault = overtake;
    const int r = claim_one(arbiter, 3, "late", &e);
    EXPECT(sys_fault == NULL);
    EXPECT_STATUS(r, SHD_EBUSY);
    EXPECT_HAS(e.text, "comes late");
    EXPECT_OK(arbiter_read(arbiter, &v, &e), &e);
    EXPECT_EQ(v.number, 2 + 2 * ARBITER_FILE_KEPT);
    EXPECT_STR(v.out[0], "q");
    arbiter_view_free(&v);
    EXPECT_EQ(count_names(".new"), 0);
    EXPECT_EQ(count_names(CLUSTER), ARBITER_FILE_KEPT + 1);
    arbiter_close(quick);
    end();
}

/* As a killed claimer leaves them, long ago and just now. */
TEST(names_aside_that_are_old_go)
{
    static const char old[] = "." CLUSTER ".1.0123456789abcdef.new";
    static const char young[] = "." CLUSTER ".1.fedcba9876543210.new";
    static const char others[] = ".c0ffe.1.0123456789abcdef.new";
    char path[PATH_MAX];
    const struct timespec times[2] = { { .tv_sec = 1000 }, { .tv_sec = 1000 } };
    struct shd_err e = { 0 };
    begin();
    write_file(old, "{", 1);
    write_file(young, "{", 1);
    write_file(others, "{", 1);
    snprintf(path, sizeof path, "%s/%s", dir, old);
    CHECK(utimensat(AT_FDCWD, path, times, 0) == 0);
    snprintf(path, sizeof path, "%s/%s", dir, others);
    CHECK(utimensat(AT_FDCWD, path, times, 0) == 0);
    EXPECT_EQ(newest(arbiter), 0);
    EXPECT_OK(claim_one(arbiter, 1, "b", &e), &e);
    EXPECT_EQ(count_names(old), 0);
    EXPECT_EQ(count_names(young), 1);
    EXPECT_EQ(count_names(others), 1);
    end();
}

/* -- What is no view --------------------------------------------------------------------------- */

TEST(files_that_are_no_view_are_refused_by_name)
{
    static const struct {
        const char *content;
        int code;
        const char *says;
    } wrong[] = {
        { "", SHD_EINVAL, "'c0ffee.2' is no view: line" },
        { "{\"schema\": 1, \"cluster\": \"c0ffee\", \"view\": 2, \"ou", SHD_EINVAL, "is no view" },
        { "[]", SHD_EINVAL, "its 'schema' is not 1" },
        { "{\"schema\": 2, \"cluster\": \"c0ffee\", \"view\": 2, \"out\": []}", SHD_EINVAL,
          "it is of another build" },
        { "{\"schema\": 1, \"cluster\": \"c0ffee\", \"view\": 2}", SHD_EINVAL,
          "it is no object of" },
        { "{\"schema\": 1, \"cluster\": \"c0ffee\", \"view\": 2, \"out\": [], \"more\": 1}",
          SHD_EINVAL, "it is no object of" },
#define BEHIND(OUT, LIST)                                                                         \
    "{\"schema\": 1, \"cluster\": \"c0ffee\", \"view\": 2, \"out\": [" OUT "], \"behind\": " LIST \
    "}"
#define ITEM(HOST, VIEW) "{\"host\": \"" HOST "\", \"view\": " VIEW ", \"filling\": false}"
        { BEHIND("", "1"), SHD_EINVAL, "its 'behind' is no array" },
        { BEHIND("", "[1]"), SHD_EINVAL, "behind[0] is no object of host, view and filling" },
        { BEHIND("", "[{\"host\": \"b\", \"view\": 1}]"), SHD_EINVAL, "behind[0] is no object" },
        { BEHIND("", "[" ITEM("b", "3") "]"), SHD_ERANGE,
          "behind[0] came with view 3, not 1 to 2" },
        { BEHIND("", "[" ITEM("b", "2") ", " ITEM("c", "2") "]"), SHD_ERANGE, "not 3 to 2" },
        { BEHIND("", "[" ITEM("b", "1") ", " ITEM("b", "2") "]"), SHD_EINVAL,
          "'b' is in it twice" },
        { BEHIND("\"b\"", "[" ITEM("b", "1") "]"), SHD_EINVAL, "'b' is in it twice" },
        { BEHIND("", "[" ITEM("b/c", "1") "]"), SHD_EINVAL, "'b/c' is no name" },
#undef ITEM
#undef BEHIND
        { "{\"schema\": 1, \"cluster\": \"other\", \"view\": 2, \"out\": []}", SHD_EINVAL,
          "it is of cluster 'other', not of 'c0ffee'" },
        { "{\"schema\": 1, \"cluster\": \"c0ffee\", \"view\": 3, \"out\": []}", SHD_EINVAL,
          "'c0ffee.2' says that it is view 3" },
        { "{\"schema\": 1, \"cluster\": \"c0ffee\", \"view\": -2, \"out\": []}", SHD_ERANGE,
          "its 'view' is -2" },
        { "{\"schema\": 1, \"cluster\": \"c0ffee\", \"view\": 2.0, \"out\": []}", SHD_EINVAL,
          "it is no object of" },
        { "{\"schema\": 1, \"cluster\": \"c0ffee\", \"view\": 2, \"out\": {}}", SHD_EINVAL,
          "its 'out' is no array" },
        { "{\"schema\": 1, \"cluster\": \"c0ffee\", \"view\": 2, \"out\": [1]}", SHD_EINVAL,
          "its out[0] is no string" },
        { "{\"schema\": 1, \"cluster\": \"c0ffee\", \"view\": 2, \"out\": [\"../b\"]}", SHD_EINVAL,
          "'../b' is no name" },
        { "{\"schema\": 1, \"cluster\": \"c0ffee\", \"view\": 2, \"out\": [\"b\\u0000c\"]}",
          SHD_EINVAL, "is no view" },
        { "{\"schema\": 1, \"cluster\": \"c0ffee\", \"view\": 2, \"out\": [\"b\", \"a\"]}",
          SHD_EINVAL, "out[1] is 'a' behind 'b'" },
        { "{\"schema\": 1, \"cluster\": \"c0ffee\", \"view\": 2, \"out\": [\"b\", \"b\"]}",
          SHD_EINVAL, "they ascend" },
        { "{\"schema\": 1, \"cluster\": \"c0ffee\", \"view\": 2, \"view\": 2, \"out\": []}",
          SHD_EINVAL, "duplicate" },
        { "{\"schema\": 1, \"cluster\": \"c0ffee\", \"view\": 2, \"out\": []} {}", SHD_EINVAL,
          "is no view" },
    };
    struct shd_err e = { 0 };
    struct arbiter_view v = { 0 };
    begin();
    EXPECT_OK(claim_one(arbiter, 1, "b", &e), &e);
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        write_file(CLUSTER ".2", wrong[i].content, strlen(wrong[i].content));
        const int r = arbiter_read(arbiter, &v, &e);
        if (r != wrong[i].code || strstr(e.text, wrong[i].says) == NULL)
            FAIL("%s: %s: %s", wrong[i].content, status_name(r), e.text);
        EXPECT_HAS(e.text, dir);
    }
    end();
}

TEST(names_that_are_no_regular_file_are_refused)
{
    char path[PATH_MAX], target[PATH_MAX];
    struct shd_err e = { 0 };
    struct arbiter_view v = { 0 };
    begin();
    EXPECT_OK(claim_one(arbiter, 1, "b", &e), &e);
    snprintf(path, sizeof path, "%s/" CLUSTER ".2", dir);
    snprintf(target, sizeof target, "%s/" CLUSTER ".1", dir);
    CHECK(symlink(target, path) == 0);
    EXPECT_STATUS(arbiter_read(arbiter, &v, &e), SHD_EIO);
    EXPECT_HAS(e.text, "'c0ffee.2'");
    CHECK(unlink(path) == 0 && mkfifo(path, 0600) == 0);
    EXPECT_STATUS(arbiter_read(arbiter, &v, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "'c0ffee.2'");
    CHECK(unlink(path) == 0 && mkdir(path, 0700) == 0);
    EXPECT_STATUS(arbiter_read(arbiter, &v, &e), SHD_EINVAL);
    CHECK(rmdir(path) == 0);
    char *big = calloc(1, ARBITER_TEXT_MAX + 1);
    write_file(CLUSTER ".2", big, ARBITER_TEXT_MAX + 1);
    free(big);
    EXPECT_STATUS(arbiter_read(arbiter, &v, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "'c0ffee.2' has 131073 bytes, at most 131072");
    CHECK(unlink(path) == 0);
    /* What is no number of ours is nobody's view. */
    write_file(CLUSTER ".07", "", 0);
    write_file(CLUSTER ".99999999999999999999", "", 0);
    write_file(CLUSTER ".9007199254740993", "", 0);
    write_file(CLUSTER ".7.bak", "", 0);
    write_file(CLUSTER ".-7", "", 0);
    write_file(CLUSTER ".", "", 0);
    EXPECT_EQ(newest(arbiter), 1);
    end();
}

TEST(last_number_is_the_last)
{
    static const char last[] =
        "{\"schema\": 1, \"cluster\": \"c0ffee\", \"view\": 9007199254740992, \"out\": []}";
    struct shd_err e = { 0 };
    begin();
    write_file(CLUSTER ".9007199254740992", last, strlen(last));
    EXPECT_EQ(newest(arbiter), ARBITER_NUMBER_MAX);
    EXPECT_STATUS(claim_one(arbiter, ARBITER_NUMBER_MAX + 1, "b", &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "the last number is 9007199254740992");
    EXPECT_EQ(newest(arbiter), ARBITER_NUMBER_MAX);
    end();
}

/* -- What is not well -------------------------------------------------------------------------- */

TEST(texts_that_name_no_arbiter_are_refused)
{
    static const struct {
        const char *text, *cluster, *says;
    } wrong[] = {
        { "/shared", CLUSTER, "arbiter '/shared' is neither file:DIR" },
        { "", CLUSTER, "arbiter ''" },
        { "file:", CLUSTER, "no absolute path" },
        { "file:here", CLUSTER, "arbiter file:here: the directory is no absolute path" },
        { "k8s:lease", CLUSTER, "is neither file:DIR" },
        { "file:/x", "", "'' is no name of a cluster" },
        { "file:/x", "../x", "'../x' is no name of a cluster" },
        { "file:/x", ".x", "no '.' in front" },
    };
    struct shd_err e = { 0 };
    struct arbiter *a;
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        EXPECT_STATUS(arbiter_open(wrong[i].text, wrong[i].cluster, &a, &e), SHD_EINVAL);
        EXPECT_HAS(e.text, wrong[i].says);
    }
    char *path = malloc(PATH_MAX + 16);
    memset(path, 'x', PATH_MAX + 15);
    path[PATH_MAX + 15] = '\0';
    memcpy(path, "file:/", 6);
    EXPECT_STATUS(arbiter_open(path, CLUSTER, &a, &e), SHD_ERANGE);
    free(path);
    arbiter_close(NULL);
}

/* A file system that is not mounted is no arbiter at which nothing has happened. */
TEST(directory_that_is_missing_or_a_mount_point_is_an_error)
{
    struct shd_err e = { 0 };
    struct arbiter_view v = { 0 };
    struct arbiter *a;
    begin();
    CHECK(rmdir(dir) == 0);
    EXPECT_STATUS(arbiter_read(arbiter, &v, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "is not there: mount it");
    EXPECT_STATUS(claim_one(arbiter, 1, "b", &e), SHD_ENOENT);
    CHECK(access(dir, F_OK) < 0);
    FILE *f = fopen(dir, "w");
    CHECK(f != NULL && fclose(f) == 0);
    EXPECT_STATUS(arbiter_read(arbiter, &v, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "is no directory");
    CHECK(unlink(dir) == 0 && mkdir(dir, 0700) == 0);
    EXPECT_EQ(newest(arbiter), 0);
    EXPECT_OK(arbiter_open("file:/proc", CLUSTER, &a, &e), &e);
    EXPECT_STATUS(arbiter_read(a, &v, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "'/proc' is a mount point");
    EXPECT_HAS(e.text, "name a directory in it");
    EXPECT_STATUS(claim_one(a, 1, "b", &e), SHD_EINVAL);
    arbiter_close(a);
    end();
}

TEST(directory_without_permission_is_named)
{
    begin();
    CHECK(chmod(dir, 0555) == 0);
    const pid_t pid = test_fork();
    if (pid == 0) {
        struct shd_err why = { 0 };
        struct arbiter_view v = { 0 };
        if (geteuid() == 0)
            MUST(setgid(65534) == 0 && setuid(65534) == 0);
        MUST_OK(arbiter_read(arbiter, &v, NULL));
        MUST(claim_one(arbiter, 1, "b", &why) == SHD_EAUTH);
        MUST(strstr(why.text, dir) != NULL && strstr(why.text, "Permission denied") != NULL);
        _exit(0);
    }
    expect_well(pid);
    CHECK(chmod(dir, 0) == 0);
    const pid_t blind = test_fork();
    if (blind == 0) {
        struct shd_err why = { 0 };
        struct arbiter_view v = { 0 };
        if (geteuid() == 0)
            MUST(setgid(65534) == 0 && setuid(65534) == 0);
        MUST(arbiter_read(arbiter, &v, &why) == SHD_EAUTH);
        MUST(strstr(why.text, dir) != NULL && strstr(why.text, "Permission denied") != NULL);
        _exit(0);
    }
    expect_well(blind);
    CHECK(chmod(dir, 0700) == 0);
    EXPECT_EQ(newest(arbiter), 0);
    end();
}

/* A disk of a page or two, in a mount namespace of a child's own: views until it is full. */
static void fill_small_disk(void)
{
    char under[PATH_MAX];
    struct shd_err why = { 0 };
    struct arbiter *a;
    int r = SHD_OK;
    uint64_t n = 0;
    snprintf(under, sizeof under, "file:%s/in", dir);
    MUST(mkdir(under + 5, 0700) == 0);
    MUST_OK(arbiter_open(under, CLUSTER, &a, NULL));
    while (r == SHD_OK && n < 10)
        r = claim_one(a, ++n, "b", &why);
    MUST(r == SHD_EIO && strstr(why.text, "No space left") != NULL &&
         strstr(why.text, dir) != NULL);
    struct arbiter_view v = { 0 };
    MUST_OK(arbiter_read(a, &v, NULL));
    MUST(v.number == n - 1);
    arbiter_view_free(&v);
    /* Room again: nothing is in the way. */
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/in/" CLUSTER ".1", dir);
    MUST(unlink(path) == 0);
    MUST_OK(claim_one(a, n, "b", NULL));
    arbiter_close(a);
    _exit(0);
}

TEST(full_disk_makes_no_view)
{
    int status;
    begin();
    const pid_t pid = test_fork();
    if (pid == 0) {
        if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
            mount("none", dir, "tmpfs", 0, "size=12k") != 0)
            _exit(77);
        fill_small_disk();
    }
    CHECK(waitpid(pid, &status, 0) == pid);
    end();
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
        SKIP("a small disk cannot be mounted here");
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static atomic_int fault_kind, fault_at, fault_calls;

static int nth(enum sys_kind kind)
{
    if ((int)kind != atomic_load(&fault_kind))
        return 0;
    return atomic_fetch_add(&fault_calls, 1) == atomic_load(&fault_at) ? ENOMEM : 0;
}

/* Each allocation and each file that is opened fails once. */
TEST(failures_leave_the_view_as_it_was)
{
    static const int kinds[] = { SYS_ALLOC, SYS_OPEN };
    struct shd_err e = { 0 };
    struct arbiter *a = NULL;
    begin();
    uint64_t number = 0;
    for (size_t k = 0; k < ARRAY_SIZE(kinds); k++)
        for (int at = 0;; at++) {
            fault_kind = kinds[k];
            fault_at = at;
            fault_calls = 0;
            sys_fault = nth;
            struct arbiter_view v = { 0 };
            int r = arbiter_open(text, CLUSTER, &a, &e);
            if (r == SHD_OK)
                r = arbiter_read(a, &v, &e);
            if (r == SHD_OK)
                r = claim_one(a, number + 1, "b", &e);
            sys_fault = NULL;
            arbiter_close(a);
            a = NULL;
            arbiter_view_free(&v);
            const uint64_t now = newest(arbiter);
            EXPECT(now == number || now == number + 1);
            EXPECT(r == SHD_ENOMEM || (r == SHD_OK && now == number + 1));
            number = now;
            if (fault_calls <= at)
                break; /* there was none to fail */
        }
    EXPECT_EQ(count_names(".new"), 0);
    end();
}

/* -- A file system that hangs ------------------------------------------------------------------ */

static atomic_bool hung;
static atomic_int hanging;

static int hang(enum sys_kind kind)
{
    if (kind == SYS_OPEN && atomic_load(&hung)) {
        atomic_fetch_add(&hanging, 1);
        while (atomic_load(&hung))
            sleep_ms(1);
        atomic_fetch_sub(&hanging, 1);
    }
    return 0;
}

TEST(directory_that_hangs_is_given_up_and_found_again)
{
    struct shd_err e = { 0 };
    struct arbiter_view v = { 0 };
    begin();
    EXPECT_OK(claim_one(arbiter, 1, "b", &e), &e);
    hung = true;
    sys_fault = hang;
    EXPECT_STATUS(arbiter_read(arbiter, &v, &e), SHD_ETIMEDOUT);
    EXPECT_HAS(e.text, "has not answered for 2.0 s");
    EXPECT_EQ(hanging, 1);
    EXPECT_STATUS(claim_one(arbiter, 2, "c", &e), SHD_ETIMEDOUT);
    EXPECT_EQ(hanging, 1); /* no second thread hangs beside the first */
    hung = false;
    int r = SHD_ETIMEDOUT;
    EXPECT_SOON((r = arbiter_read(arbiter, &v, &e)) != SHD_ETIMEDOUT);
    EXPECT_OK(r, &e);
    EXPECT_EQ(v.number, 1); /* what was given up before it began was not made */
    arbiter_view_free(&v);
    EXPECT_OK(claim_one(arbiter, 2, "c", &e), &e);
    end();
}

static uint32_t count_threads(void)
{
    uint32_t count = 0;
    DIR *d = opendir("/proc/self/task");
    CHECK(d != NULL);
    for (const struct dirent *entry; (entry = readdir(d)) != NULL;)
        count += entry->d_name[0] != '.';
    closedir(d);
    return count;
}

TEST(closing_one_that_hangs_waits_for_nothing)
{
    struct shd_err e = { 0 };
    struct arbiter_view v = { 0 };
    begin();
    const uint32_t before = count_threads();
    hung = true;
    sys_fault = hang;
    EXPECT_STATUS(claim_one(arbiter, 1, "b", &e), SHD_ETIMEDOUT);
    arbiter_close(arbiter);
    EXPECT_EQ(hanging, 1);
    hung = false;
    EXPECT_SOON(count_threads() == before);
    /* A claim that was given up may come true. */
    EXPECT_OK(arbiter_open(text, CLUSTER, &arbiter, &e), &e);
    EXPECT_OK(arbiter_read(arbiter, &v, &e), &e);
    EXPECT_EQ(v.number, 1);
    arbiter_view_free(&v);
    end();
}

TEST_MAIN()
