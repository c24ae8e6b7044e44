/* The rings between a worker and a daemon (proto/share/ring.h). */
#include "proto/share/ring.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <string.h>

#include "tests/lib/test.h"

/* Both sides of a pair, in this process. */
struct pair {
    struct ring_page pages[2];
    struct ring sides[2];
};

static struct pair pair;

static void begin(void)
{
    memset(&pair, 0, sizeof pair);
    for (int i = 0; i < 2; i++)
        ring_init(&pair.sides[i], &pair.pages[i], &pair.pages[1 - i], /* awake= */ i == 0);
}

/* Frame `number` of a side: any size, any bytes, the same whenever it is made. */
static size_t frame_of(uint64_t seed, uint64_t number, uint8_t frame[RING_FRAME_BYTES_MAX])
{
    uint64_t random = (seed + 1) * UINT64_C(0x9e3779b97f4a7c15) ^ (number + 1);
    test_random(&random);
    const uint64_t kind = test_random(&random) % 8;
    const uint64_t most = kind == 0 ? RING_FRAME_BYTES_MAX : kind < 3 ? 700 : 90;
    const size_t bytes = 1 + (size_t)(test_random(&random) % most);
    for (size_t i = 0; i < bytes; i++)
        frame[i] = (uint8_t)(random + i * 31);
    return bytes;
}

/* Also of threads, in which no test can fail: whatever is wrong is a status. */

static int put(struct ring *r, uint64_t seed, uint64_t number, bool *ret_wake)
{
    uint8_t frame[RING_FRAME_BYTES_MAX];
    struct shd_err e = { 0 };
    return ring_put(r, frame, frame_of(seed, number, frame), ret_wake, &e);
}

/* SHD_PENDING, or frame `number` was there. */
static int take(struct ring *r, uint64_t seed, uint64_t number)
{
    uint8_t got[RING_FRAME_BYTES_MAX], frame[RING_FRAME_BYTES_MAX];
    struct shd_err e = { 0 };
    size_t bytes = 0;
    const int status = ring_take(r, got, &bytes, &e);
    if (status != SHD_OK)
        return status;
    return bytes == frame_of(seed, number, frame) && memcmp(got, frame, bytes) == 0 ? SHD_OK
                                                                                    : SHD_EINTERNAL;
}

TEST(frames_come_as_they_were_put_whatever_the_sides_do_in_between)
{
    for (uint64_t round = 0; round < 20; round++) {
        uint64_t random = test_seed(1) + round, sent[2] = { 0 }, taken[2] = { 0 };
        unsigned full = 0;
        begin();
        for (unsigned i = 0; i < 20000; i++) {
            const unsigned side = (unsigned)(test_random(&random) % 2);
            /* for a while one side is ahead, then the other */
            const bool puts = test_random(&random) % 16 < ((i / 1000) % 2 == 0 ? 11u : 5u);
            bool wake;
            const int r = puts ? put(&pair.sides[side], side, sent[side], &wake)
                               : take(&pair.sides[side], 1 - side, taken[side]);
            EXPECT(r == SHD_OK || r == (puts ? SHD_EBUSY : SHD_PENDING));
            *(puts ? &sent[side] : &taken[side]) += r == SHD_OK;
            full += r == SHD_EBUSY;
            EXPECT_EQ(ring_is_empty(&pair.sides[side]), taken[side] == sent[1 - side]);
            EXPECT_EQ(ring_is_drained(&pair.sides[side]), taken[1 - side] == sent[side]);
        }
        EXPECT(full > 0);
        EXPECT(pair.sides[0].written > 4 * RING_BYTES && pair.sides[1].written > 4 * RING_BYTES);
        for (unsigned side = 0; side < 2; side++) {
            while (take(&pair.sides[side], 1 - side, taken[side]) == SHD_OK)
                taken[side]++;
            EXPECT_EQ(taken[side], sent[1 - side]);
        }
    }
}

TEST(ring_is_full_up_to_its_last_byte)
{
    static const uint8_t frame[RING_FRAME_BYTES_MAX] = { 1 };
    struct shd_err e = { 0 };
    bool wake;
    begin();
    for (unsigned i = 0; i < RING_BYTES / RING_FRAME_BYTES_MAX; i++) /* each with a header */
        EXPECT_OK(ring_put(&pair.sides[0], frame, RING_FRAME_BYTES_MAX - 8, &wake, &e), &e);
    EXPECT_STATUS(ring_put(&pair.sides[0], frame, 1, &wake, &e), SHD_EBUSY);
    uint8_t got[RING_FRAME_BYTES_MAX];
    size_t bytes;
    EXPECT_OK(ring_take(&pair.sides[1], got, &bytes, &e), &e);
    EXPECT_STATUS(ring_put(&pair.sides[0], frame, RING_FRAME_BYTES_MAX - 7, &wake, &e), SHD_EBUSY);
    EXPECT_OK(ring_put(&pair.sides[0], frame, RING_FRAME_BYTES_MAX - 8, &wake, &e), &e);
    EXPECT_STATUS(ring_put(&pair.sides[0], frame, 1, &wake, &e), SHD_EBUSY);
}

/* -- Waking ------------------------------------------------------------------------------------ */

TEST(sleeper_is_woken_once_and_nobody_else_is)
{
    struct ring *worker = &pair.sides[0], *daemon = &pair.sides[1];
    bool wake = false;
    begin();
    put(worker, 0, 0, &wake);
    EXPECT(wake); /* the daemon begins asleep */
    put(worker, 0, 1, &wake);
    EXPECT(!wake);
    put(daemon, 1, 0, &wake);
    EXPECT(!wake); /* the worker begins awake */
    EXPECT(!ring_arm(daemon, 1));
    put(worker, 0, 2, &wake);
    EXPECT(!wake); /* it saw that there is something, and stays awake */
    for (uint64_t i = 0; i < 3; i++)
        EXPECT_OK(take(daemon, 0, i), &(struct shd_err){ 0 });
    EXPECT(ring_arm(daemon, 1));
    ring_disarm(daemon); /* it was woken by something else */
    put(worker, 0, 3, &wake);
    EXPECT(!wake);
    EXPECT_OK(take(daemon, 0, 3), &(struct shd_err){ 0 });
    EXPECT(ring_arm(daemon, 1));
    put(worker, 0, 4, &wake);
    EXPECT(wake);
}

/* Of the shortest frames it gets as many as it asked for, of longer ones some at least. */
TEST(sleeper_that_wants_several_is_woken_once_they_are_there)
{
    struct ring *worker = &pair.sides[0], *daemon = &pair.sides[1];
    static const uint8_t frame[64] = { 1 };
    struct shd_err e = { 0 };
    uint8_t got[RING_FRAME_BYTES_MAX];
    size_t bytes;
    bool wake;
    for (uint32_t wants = 1; wants <= 70; wants += 3)
        for (size_t size = 1; size <= sizeof frame; size += 63) {
            uint32_t wakes = 0, first = 0;
            begin();
            EXPECT(ring_arm(worker, wants));
            for (uint32_t i = 0; i < 80; i++) {
                EXPECT_OK(ring_put(daemon, frame, size, &wake, &e), &e);
                first = wake ? i + 1 : first;
                wakes += wake;
            }
            EXPECT_EQ(wakes, 1);
            EXPECT(size == 1 ? first == wants : first > 0 && first <= wants);
            EXPECT(!ring_arm(worker, 80)); /* they are there */
            while (ring_take(worker, got, &bytes, &e) == SHD_OK)
                continue;
            EXPECT(ring_arm(worker, wants));
        }
    ring_put(daemon, frame, 1, &wake, &e);
    EXPECT(!wake);
    EXPECT(ring_put_elsewhere(daemon)); /* that wakes it, whatever it wants */
    ring_disarm(worker);
    EXPECT(!ring_put_elsewhere(daemon));
}

TEST(answer_that_goes_elsewhere_wakes_a_sleeper)
{
    struct ring *worker = &pair.sides[0], *daemon = &pair.sides[1];
    bool wake;
    begin();
    EXPECT(!ring_put_elsewhere(daemon));
    EXPECT_EQ(ring_elsewhere(worker), 1);
    put(daemon, 1, 0, &wake);
    EXPECT(!ring_put_elsewhere(daemon));
    EXPECT_OK(take(worker, 1, 0), &(struct shd_err){ 0 });
    EXPECT(ring_arm(worker, 1));
    EXPECT(ring_put_elsewhere(daemon));
    EXPECT_EQ(ring_elsewhere(worker), 3);
}

/* Two threads that sleep when there is nothing to take: a wake that were lost would leave both
 * asleep. */

#define THREAD_FRAMES (SANITIZE_THREAD ? 20000u : 200000u)

static sem_t bells[2];
static _Atomic uint64_t slept;

static void send_all(unsigned side, uint64_t *sent, uint64_t until)
{
    while (*sent < until) {
        bool wake = false;
        if (put(&pair.sides[side], side, *sent, &wake) != SHD_OK)
            return;
        ++*sent;
        if (wake)
            sem_post(&bells[1 - side]);
    }
}

/* Each sends a burst, waits for as many of the other's, and so on. */
static void *run_side(void *arg)
{
    const unsigned side = (unsigned)(uintptr_t)arg;
    struct ring *r = &pair.sides[side];
    uint64_t sent = 0, taken = 0, random = side + 1;
    while (taken < THREAD_FRAMES || sent < THREAD_FRAMES) {
        const uint64_t burst = taken + 1 + test_random(&random) % 8;
        send_all(side, &sent, burst < THREAD_FRAMES ? burst : THREAD_FRAMES);
        int got;
        while ((got = take(r, 1 - side, taken)) == SHD_OK)
            taken++;
        if (got != SHD_PENDING)
            return "got another frame than was put";
        const bool owes = sent <= taken && sent < THREAD_FRAMES;
        if (taken == THREAD_FRAMES || owes || !ring_arm(r, 1))
            continue;
        slept++;
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += (time_t)(TEST_HANG_MS / 1000) + 1;
        while (sem_timedwait(&bells[side], &until) != 0)
            if (errno != EINTR)
                return "nobody woke it";
        ring_disarm(r);
    }
    return NULL;
}

TEST(two_threads_lose_no_frame_and_no_wake)
{
    pthread_t threads[2];
    begin();
    slept = 0;
    for (unsigned i = 0; i < 2; i++)
        EXPECT(sem_init(&bells[i], 0, 0) == 0);
    for (uintptr_t i = 0; i < 2; i++)
        EXPECT(pthread_create(&threads[i], NULL, run_side, (void *)i) == 0);
    for (unsigned i = 0; i < 2; i++) {
        void *why;
        pthread_join(threads[i], &why);
        if (why != NULL)
            FAIL("side %u: %s", i, (const char *)why);
    }
    EXPECT(slept > 0);
    EXPECT(ring_is_drained(&pair.sides[0]) && ring_is_drained(&pair.sides[1]));
}

/* One side sends, the other sleeps until some of what is to come is there. */

static _Atomic bool over;

static const char *take_some(void)
{
    struct ring *r = &pair.sides[1];
    uint64_t taken = 0, random = 7;
    while (taken < THREAD_FRAMES) {
        int got;
        while ((got = take(r, 0, taken)) == SHD_OK)
            taken++;
        if (got != SHD_PENDING)
            return "got another frame than was put";
        const uint64_t left = THREAD_FRAMES - taken, wants = 1 + test_random(&random) % 30;
        if (left == 0 || !ring_arm(r, (uint32_t)(wants < left ? wants : left)))
            continue;
        slept++;
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += (time_t)(TEST_HANG_MS / 1000) + 1;
        while (sem_timedwait(&bells[1], &until) != 0)
            if (errno != EINTR)
                return "nobody woke it";
        ring_disarm(r);
    }
    return NULL;
}

static void *take_several(void *arg)
{
    (void)arg;
    const char *why = take_some();
    over = true;
    return (void *)(uintptr_t)why;
}

TEST(who_waits_for_several_loses_no_wake)
{
    pthread_t thread;
    void *why;
    begin();
    slept = 0;
    over = false;
    EXPECT(sem_init(&bells[1], 0, 0) == 0);
    EXPECT(pthread_create(&thread, NULL, take_several, NULL) == 0);
    for (uint64_t sent = 0; sent < THREAD_FRAMES && !over;) {
        bool wake = false;
        sent += put(&pair.sides[0], 0, sent, &wake) == SHD_OK;
        if (wake)
            sem_post(&bells[1]);
    }
    pthread_join(thread, &why);
    if (why != NULL)
        FAIL("%s", (const char *)why);
    EXPECT(slept > 0);
}

/* The moment in which a consumer arms is what the producer aims at: it puts a frame a little later
 * each time after the last one was taken, whose taker then finds nothing and goes to sleep. */

#define AIMED_FRAMES (SANITIZE_THREAD ? 20000u : 200000u)

static void *sleep_for_each(void *arg)
{
    uint8_t got[RING_FRAME_BYTES_MAX];
    struct shd_err e;
    size_t bytes;
    (void)arg;
    for (uint32_t i = 0; i < AIMED_FRAMES;) {
        if (ring_take(&pair.sides[1], got, &bytes, &e) == SHD_OK) {
            i++;
            continue;
        }
        if (!ring_arm(&pair.sides[1], 1))
            continue;
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += (time_t)(TEST_HANG_MS / 1000) + 1;
        while (sem_timedwait(&bells[1], &until) != 0)
            if (errno != EINTR)
                return "nobody woke it";
    }
    return NULL;
}

TEST(frame_that_comes_while_its_taker_falls_asleep_wakes_it)
{
    pthread_t thread;
    struct shd_err e = { 0 };
    void *why;
    begin();
    EXPECT(sem_init(&bells[1], 0, 0) == 0);
    EXPECT(pthread_create(&thread, NULL, sleep_for_each, NULL) == 0);
    const uint64_t end_ms = test_now_ms() + 2 * TEST_HANG_MS;
    for (uint32_t i = 0; i < AIMED_FRAMES; i++) {
        bool wake;
        while (!ring_is_drained(&pair.sides[0]))
            if (test_now_ms() > end_ms)
                FAIL("frame %" PRIu32 " was never taken", i);
        for (volatile uint32_t k = 0; k < i % 64; k++) {
        }
        EXPECT_OK(ring_put(&pair.sides[0], "x", 1, &wake, &e), &e);
        if (wake)
            sem_post(&bells[1]);
    }
    pthread_join(thread, &why);
    if (why != NULL)
        FAIL("%s", (const char *)why);
}

/* -- What the other side must not say ---------------------------------------------------------- */

static void expect_refused(struct ring *r, const char *text)
{
    uint8_t got[RING_FRAME_BYTES_MAX];
    size_t bytes = 77;
    struct shd_err e = { 0 };
    EXPECT_STATUS(ring_take(r, got, &bytes, &e), SHD_EPROTO);
    EXPECT_HAS(e.text, text);
    EXPECT_EQ(bytes, 77);
}

TEST(positions_that_cannot_be_are_refused)
{
    static const struct {
        uint64_t written;
        const char *text;
    } cases[] = {
        { 1, "written up to 1, of which 0" },
        { 7, "written up to 7" },
        { RING_BYTES + 8, "written up to 32776" },
        { UINT64_MAX - 7, "written up to 18446744073709551608" }, /* before the beginning */
        { UINT64_C(1) << 63, "written up to 9223372036854775808" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        begin();
        pair.pages[0].written = cases[i].written;
        expect_refused(&pair.sides[1], cases[i].text);
    }
    bool wake;
    begin();
    put(&pair.sides[0], 0, 0, &wake);
    EXPECT_OK(take(&pair.sides[1], 0, 0), &(struct shd_err){ 0 });
    pair.pages[0].written = 0; /* back to where it was */
    expect_refused(&pair.sides[1], "written up to 0");
}

TEST(lengths_that_cannot_be_are_refused)
{
    static const uint32_t headers[][2] = {
        { 0, 0 },          { RING_FRAME_BYTES_MAX + 1, 0 },
        { UINT32_MAX, 0 }, { UINT32_MAX - 6, 0 },
        { 57, 0 },         { 8, 1 },
    };
    for (size_t i = 0; i < sizeof headers / sizeof headers[0]; i++) {
        begin();
        memcpy(pair.pages[0].data, headers[i], sizeof headers[i]);
        pair.pages[0].written = 64; /* 56 bytes fit */
        expect_refused(&pair.sides[1], "a frame of");
    }
    begin(); /* a header with nothing behind it */
    memcpy(pair.pages[0].data, (const uint32_t[2]){ 1, 0 }, 8);
    pair.pages[0].written = 8;
    expect_refused(&pair.sides[1], "a frame of 1 bytes");
}

TEST(taking_what_was_not_written_is_refused_when_room_is_needed)
{
    static const uint8_t frame[RING_FRAME_BYTES_MAX] = { 0 };
    static const uint64_t lies[] = { RING_BYTES + 8, UINT64_MAX, UINT64_C(1) << 63 };
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        struct shd_err e = { 0 };
        bool wake;
        begin();
        while (ring_put(&pair.sides[0], frame, 1000, &wake, &e) == SHD_OK) {
        }
        pair.pages[1].taken = lies[i];
        EXPECT_STATUS(ring_put(&pair.sides[0], frame, 1000, &wake, &e), SHD_EPROTO);
        EXPECT_HAS(e.text, "ring: taken up to");
    }
    struct shd_err e = { 0 };
    bool wake;
    begin();
    while (ring_put(&pair.sides[0], frame, 1000, &wake, &e) == SHD_OK) {
    }
    pair.pages[1].taken = 2 * 1008;
    EXPECT_OK(ring_put(&pair.sides[0], frame, 1000, &wake, &e), &e);
    EXPECT_OK(ring_put(&pair.sides[0], frame, 1000, &wake, &e), &e);
    pair.pages[1].taken = 1008; /* back again */
    EXPECT_STATUS(ring_put(&pair.sides[0], frame, 1000, &wake, &e), SHD_EPROTO);
}

TEST_MAIN()
