/* pager: what it gives up is not in memory any more, and is what it was when it is read again. */
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/pager.h"
#include "kernels/done.h"
#include "proto/base/check.h"
#include "proto/share/segment_file.h"
#include "tests/lib/proto_util.h"
#include "tests/lib/test.h"

#define PAGE  4096u
#define PAGES 512u
#define BYTES ((uint64_t)PAGES * PAGE)

struct counted {
    struct kern_done done;
    _Atomic uint32_t times;
};

static void count(struct kern_done *done, int status)
{
    EXPECT_EQ(status, SHD_OK);
    atomic_fetch_add(&((struct counted *)done)->times, 1);
}

static struct segment on_file(void)
{
    struct shd_err e = { 0 };
    struct segment s = SEGMENT_CLOSED;
    EXPECT_OK(segment_file_new("/var/tmp", SEGMENT_STATE, BYTES, &s, &e), &e);
    return s;
}

static struct pager *pager(void)
{
    struct shd_err e = { 0 };
    struct pager *p = NULL;
    EXPECT_OK(pager_new(&p, &e), &e);
    return p;
}

static void fill(const struct segment *s, uint64_t salt)
{
    uint64_t *words = s->base;
    for (uint64_t i = 0; i < s->bytes / sizeof *words; i++)
        words[i] = i * 0x9e3779b97f4a7c15u + salt;
}

static void expect_filled(const struct segment *s, uint64_t salt)
{
    const uint64_t *words = s->base;
    for (uint64_t i = 0; i < s->bytes / sizeof *words; i++)
        if (words[i] != i * 0x9e3779b97f4a7c15u + salt)
            FAIL("word %" PRIu64 " differs", i);
}

/* Of [first, first + count), in memory. */
static uint32_t pages_in(const struct segment *s, uint32_t first, uint32_t count_pages)
{
    unsigned char in[PAGES];
    uint32_t found = 0;
    CHECK(mincore((char *)s->base + (uint64_t)first * PAGE, (uint64_t)count_pages * PAGE, in) == 0);
    for (uint32_t i = 0; i < count_pages; i++)
        found += in[i] & 1;
    return found;
}

TEST(what_is_given_up_is_on_the_disk_alone_and_is_read_again)
{
    struct counted c = { .done = { count } };
    struct pager *p = pager();
    struct segment s = on_file();
    fill(&s, 1);
    EXPECT_EQ(pages_in(&s, 0, PAGES), PAGES);
    pager_behind(p, &s, BYTES / 4, BYTES / 2, &c.done);
    EXPECT_SOON(atomic_load(&c.times) == 1);
    EXPECT_EQ(pages_in(&s, PAGES / 4, PAGES / 2), 0);
    EXPECT_EQ(pages_in(&s, 0, PAGES / 4), PAGES / 4);
    EXPECT_EQ(pages_in(&s, 3 * PAGES / 4, PAGES / 4), PAGES / 4);
    pager_ahead(p, &s, BYTES / 4, BYTES / 2);
    EXPECT_SOON(pages_in(&s, 0, PAGES) == PAGES);
    expect_filled(&s, 1);
    fill(&s, 2);
    pager_behind(p, &s, 0, BYTES, &c.done);
    EXPECT_SOON(atomic_load(&c.times) == 2);
    expect_filled(&s, 2);
    pager_close(p, &s);
    EXPECT_EQ(s.fd, -1);
    pager_stop(p);
    pager_free(p);
}

/* What is stored while it is being written back is not lost. */
TEST(stores_to_pages_that_are_being_given_up_are_there)
{
    struct counted c = { .done = { count } };
    struct pager *p = pager();
    struct segment s = on_file();
    for (uint32_t round = 0; round < 20; round++) {
        pager_behind(p, &s, 0, BYTES, &c.done);
        fill(&s, round);
        EXPECT_SOON(atomic_load(&c.times) == round + 1);
        expect_filled(&s, round);
    }
    pager_close(p, &s);
    pager_stop(p);
    pager_free(p);
}

/* A later mapping at its address is nobody's business. */
TEST(segment_is_closed_behind_what_is_queued_for_it)
{
    struct counted c = { .done = { count } };
    const int before = fds_open();
    struct pager *p = pager();
    for (uint32_t round = 0; round < 50; round++) {
        struct segment s = on_file();
        fill(&s, round);
        for (int i = 0; i < 4; i++)
            pager_behind(p, &s, 0, BYTES, &c.done);
        pager_close(p, &s);
        uint64_t *mine = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                              0);
        CHECK(mine != MAP_FAILED);
        memset(mine, 0x55, BYTES);
        EXPECT_SOON(atomic_load(&c.times) == 4 * (round + 1));
        for (uint64_t i = 0; i < BYTES / sizeof *mine; i++)
            EXPECT_EQ(mine[i], UINT64_C(0x5555555555555555));
        munmap(mine, BYTES);
    }
    pager_stop(p);
    EXPECT_EQ(fds_open(), before);
    pager_free(p);
}

#define MANY 20000u

TEST(each_completion_fires_once_however_many_there_are)
{
    static struct counted c[MANY];
    struct pager *p = pager();
    struct segment s = on_file();
    for (uint32_t i = 0; i < MANY; i++) { /* more than a queue holds */
        c[i].done.fn = count;
        pager_behind(p, &s, (uint64_t)(i % PAGES) * PAGE, PAGE, &c[i].done);
    }
    pager_close(p, &s);
    pager_stop(p); /* completes what is queued */
    for (uint32_t i = 0; i < MANY; i++)
        EXPECT_EQ(atomic_load(&c[i].times), 1);
    struct counted late = { .done = { count } };
    s = on_file();
    pager_behind(p, &s, 0, BYTES, &late.done); /* nobody is left to do it */
    EXPECT_EQ(atomic_load(&late.times), 1);
    pager_ahead(p, &s, 0, BYTES);
    pager_close(p, &s);
    EXPECT_EQ(s.fd, -1);
    pager_free(p);
}

TEST(memory_has_no_pages_to_be_given_up)
{
    struct shd_err e = { 0 };
    struct counted c = { .done = { count } };
    struct pager *p = pager();
    struct segment s;
    EXPECT_OK(segment_new("test", SEGMENT_STATE, BYTES, &s, &e), &e);
    fill(&s, 3);
    pager_ahead(p, &s, 0, BYTES);
    pager_behind(p, &s, 0, BYTES, &c.done);
    EXPECT_EQ(atomic_load(&c.times), 1);
    expect_filled(&s, 3);
    pager_close(p, &s);
    EXPECT_EQ(s.fd, -1);
    s = on_file();
    pager_close(/* p= */ NULL, &s);
    EXPECT_EQ(s.fd, -1);
    pager_stop(p);
    pager_free(p);
    pager_stop(NULL);
    pager_free(NULL);
}

TEST_MAIN()
