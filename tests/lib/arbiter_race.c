/* See arbiter_race.h. */
#include "tests/lib/arbiter_race.h"

#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/files/arbiter.h"
#include "tests/lib/child.h"
#include "tests/lib/test.h"

#define RACERS 8

struct race {
    atomic_uint ready;
    atomic_uint wins[ARBITER_RACE_VIEWS_MAX + 1];    /* of each number */
    atomic_uint unknown[ARBITER_RACE_VIEWS_MAX + 1]; /* claims that ended by neither */
};

static void claim_next(struct race *r, struct arbiter *a, uint64_t number, uint32_t who)
{
    char out[1][ARBITER_NAME_BYTES];
    struct shd_err e = { 0 };
    const struct arbiter_view v = { .number = number, .out_count = 1, .out = out };
    snprintf(out[0], sizeof out[0], "h%u", who);
    const int claimed = arbiter_claim(a, &v, &e);
    if (claimed != SHD_OK && claimed != SHD_EBUSY && claimed != SHD_ETIMEDOUT)
        fprintf(stderr, "claim of view %" PRIu64 ": %s\n", number, e.text);
    MUST(claimed == SHD_OK || claimed == SHD_EBUSY || claimed == SHD_ETIMEDOUT);
    if (claimed == SHD_OK)
        atomic_fetch_add(&r->wins[number], 1);
    if (claimed == SHD_ETIMEDOUT)
        atomic_fetch_add(&r->unknown[number], 1);
}

static void race(struct race *r, const char *text, const char *cluster, uint32_t views,
                 uint32_t who)
{
    struct arbiter *a;
    uint64_t last = 0;
    MUST_OK(arbiter_open(text, cluster, &a, &e));
    atomic_fetch_add(&r->ready, 1);
    while (atomic_load(&r->ready) < RACERS)
        sched_yield();
    while (last < views) {
        struct arbiter_view v = { 0 };
        struct shd_err why = { 0 };
        const int read = arbiter_read(a, &v, &why);
        if (read == SHD_ETIMEDOUT) /* a busy machine */
            continue;
        if (read != SHD_OK)
            fprintf(stderr, "read: %s\n", why.text);
        MUST(read == SHD_OK && v.number >= last);
        last = v.number;
        arbiter_view_free(&v);
        if (last < views)
            claim_next(r, a, last + 1, who);
    }
    arbiter_close(a);
    _exit(0);
}

void expect_one_makes_each_view(const char *text, const char *cluster, uint32_t views)
{
    pid_t pids[RACERS];
    CHECK(views <= ARBITER_RACE_VIEWS_MAX);
    struct race *r = mmap(NULL, sizeof *r, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                          0);
    CHECK(r != MAP_FAILED);
    for (uint32_t i = 0; i < RACERS; i++) {
        pids[i] = test_fork();
        if (pids[i] == 0)
            race(r, text, cluster, views, i);
    }
    for (uint32_t i = 0; i < RACERS; i++)
        expect_well(pids[i]);
    for (uint32_t n = 1; n <= views; n++) {
        const uint32_t wins = atomic_load(&r->wins[n]), unknown = atomic_load(&r->unknown[n]);
        if (wins > 1 || wins + unknown == 0)
            FAIL("view %u was made by %u, of %u is unknown", n, wins, unknown);
    }
    munmap(r, sizeof *r);
}
