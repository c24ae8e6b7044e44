/* See board.h. */
#include "proto/share/board.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/status.h"
#include "proto/base/sys.h"
#include "proto/spec/layout.h"

#define NOT_PUBLISHED UINT64_MAX
#define SPINS         64 /* a few us: longer would take the daemon its core on a small machine */
#define STOP_NS       (2 * NS_PER_MS) /* between two looks at a word that cannot be slept on, too */

static_assert(sizeof(struct board_word) == 64, "a word fills its cache line");
static_assert(offsetof(struct board, version) == 192, "layout other processes map");
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "futex_word() takes the low half of a word to come first"
#endif

uint64_t board_bytes(uint32_t units)
{
    CHECK(units <= SHD_UNITS_MAX);
    return sizeof(struct board) + (uint64_t)units * sizeof(struct board_word);
}

void board_init(struct board *b, uint32_t units)
{
    CHECK(units <= SHD_UNITS_MAX);
    b->magic = BOARD_MAGIC;
    b->units = units;
    b->layout = 0;
    atomic_store_explicit(&b->attempt, 1, memory_order_release);
    for (uint32_t u = 0; u < units; u++)
        atomic_store_explicit(&b->version[u].value, NOT_PUBLISHED, memory_order_release);
}

int board_check(const struct board *b, uint64_t bytes, uint32_t units, struct shd_err *e)
{
    if (units > SHD_UNITS_MAX || bytes < board_bytes(units))
        return err_set(e, SHD_ESEGMENT, "board of %" PRIu64 " bytes for %" PRIu32 " units", bytes,
                       units);
    if (b->magic != BOARD_MAGIC)
        return err_set(e, SHD_ESEGMENT, "board magic is %#" PRIx64 ", expected %#" PRIx64, b->magic,
                       BOARD_MAGIC);
    if (b->units != units)
        return err_set(e, SHD_ESEGMENT, "board has %" PRIu32 " units, the model %" PRIu32, b->units,
                       units);
    if (b->layout != 0)
        return err_set(e, SHD_ESEGMENT, "board layout is %" PRIu32 ", this build knows 0",
                       b->layout);
    return SHD_OK;
}

static const uint32_t *futex_word(const struct board_word *word)
{
    return (const uint32_t *)(const void *)&word->value;
}

/* Not FUTEX_PRIVATE: waiters are other processes. */
static void wake_all(const struct board_word *word)
{
    syscall(SYS_futex, futex_word(word), FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void board_begin(struct board *b, uint32_t unit, uint64_t version)
{
    CHECK(unit < b->units);
    atomic_store_explicit(&b->version[unit].value, version, memory_order_release);
}

void board_publish(struct board *b, uint32_t unit, uint64_t version)
{
    board_begin(b, unit, version);
    wake_all(&b->version[unit]);
}

uint64_t board_awaited(uint32_t model, uint32_t unit)
{
    return (uint64_t)model << 32 | (uint64_t)unit << 1 | 1;
}

/* A step is stored before it is said to be applied, and behind the word that it is not: at no time
 * do the two say that a step is applied which is only open. */
void board_set_step(struct board *b, uint64_t step, uint64_t phase)
{
    if (phase != STEP_APPLYING)
        atomic_store_explicit(&b->phase.value, phase, memory_order_release);
    atomic_store_explicit(&b->step.value, step, memory_order_release);
    if (phase == STEP_APPLYING)
        atomic_store_explicit(&b->phase.value, phase, memory_order_release);
}

uint64_t board_collecting(const struct board *b)
{
    /* The other way round, APPLYING may be of the step before. */
    const uint64_t step = atomic_load_explicit(&b->step.value, memory_order_acquire);
    const uint64_t phase = atomic_load_explicit(&b->phase.value, memory_order_acquire);
    return step + (phase == STEP_APPLYING);
}

void board_set_attempt(struct board *b, uint64_t step, uint64_t attempt)
{
    atomic_store_explicit(&b->tried, step, memory_order_release);
    atomic_store_explicit(&b->attempt, attempt, memory_order_release);
}

uint64_t board_attempt(const struct board *b, uint64_t step)
{
    /* Steps never go back, so one that is seen too early hides an attempt of a later step alone. */
    const uint64_t attempt = atomic_load_explicit(&b->attempt, memory_order_acquire);
    return atomic_load_explicit(&b->tried, memory_order_acquire) > step ? 0 : attempt;
}

void board_set_rewound(struct board *b, uint64_t step, uint64_t attempt)
{
    atomic_store_explicit(&b->rewound_to, step, memory_order_release);
    atomic_store_explicit(&b->rewound, attempt, memory_order_release);
}

uint64_t board_rewound(const struct board *b, uint64_t *ret_step)
{
    uint64_t attempt, before;
    do {
        before = atomic_load_explicit(&b->rewound, memory_order_acquire);
        *ret_step = atomic_load_explicit(&b->rewound_to, memory_order_acquire);
        attempt = atomic_load_explicit(&b->rewound, memory_order_acquire);
    } while (attempt != before);
    return attempt;
}

void board_unpublish(struct board *b)
{
    for (uint32_t u = 0; u < b->units; u++)
        atomic_store_explicit(&b->version[u].value, NOT_PUBLISHED, memory_order_release);
}

uint64_t board_version(const struct board *b, uint32_t unit)
{
    return atomic_load_explicit(&b->version[unit].value, memory_order_acquire);
}

/* An update says APPLYING before it changes anything; the unit's version follows when it is done. A
 * step is stored before that, so reading them the other way round takes no old one for new. */
uint64_t board_stable_version(const struct board *b, uint32_t unit)
{
    atomic_thread_fence(memory_order_acquire); /* behind what was read before */
    const uint64_t phase = atomic_load_explicit(&b->phase.value, memory_order_acquire);
    const uint64_t step = atomic_load_explicit(&b->step.value, memory_order_acquire);
    const uint64_t version = board_version(b, unit);
    return phase == STEP_APPLYING && version <= step ? NOT_PUBLISHED : version;
}

static bool reached(uint64_t now, uint64_t wanted)
{
    return now != NOT_PUBLISHED && now >= wanted;
}

int board_reached(const struct board *b, uint32_t unit, uint64_t version)
{
    return reached(board_version(b, unit), version);
}

static void spin_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

/* Sleep until the word is not `now` any more, or *stop not 0 (NULL: there is none). May end for no
 * reason: woken, EAGAIN, interrupted, timed out. The kernel compares the low half only; a word that
 * moves by exactly 2^32 steps while we look is out of reach. */
static void sleep_on(const struct board_word *word, uint64_t now, const _Atomic uint32_t *stop,
                     uint64_t sleep_ns)
{
    if (stop != NULL) {
        const struct sys_word words[] = {
            { futex_word(word), (uint32_t)now, /* shared= */ true },
            { (const uint32_t *)(const void *)stop, 0, /* shared= */ false },
        };
        /* A filter of system calls may not know this one either. */
        if (sys_wait_words(words, 2, sleep_ns) == 0 || (errno != ENOSYS && errno != EPERM))
            return;
        sleep_ns = sleep_ns < STOP_NS ? sleep_ns : STOP_NS;
    }
    const struct timespec rest = clock_timespec(sleep_ns);
    syscall(SYS_futex, futex_word(word), FUTEX_WAIT, (uint32_t)now, &rest, NULL, 0);
}

static bool is_stopped(const _Atomic uint32_t *stop)
{
    return stop != NULL && atomic_load_explicit(stop, memory_order_acquire) != 0;
}

int board_wait_or(const struct board *b, uint32_t unit, uint64_t version,
                  const _Atomic uint32_t *stop, uint64_t timeout_ns)
{
    if (board_reached(b, unit, version))
        return SHD_OK;
    if (timeout_ns == 0)
        return SHD_ETIMEDOUT;
    const uint64_t start = clock_now_ns();
    for (int i = 0; i < SPINS; i++) {
        spin_pause();
        if (board_reached(b, unit, version))
            return SHD_OK;
    }
    for (;;) {
        const uint64_t now = board_version(b, unit);
        if (reached(now, version))
            return SHD_OK;
        if (is_stopped(stop))
            return SHD_ECANCELED;
        const uint64_t waited = clock_now_ns() - start;
        if (waited >= timeout_ns)
            return SHD_ETIMEDOUT;
        sleep_on(&b->version[unit], now, stop, timeout_ns - waited);
    }
}

int board_wait(const struct board *b, uint32_t unit, uint64_t version, uint64_t timeout_ns)
{
    return board_wait_or(b, unit, version, /* stop= */ NULL, timeout_ns);
}

void board_stop(_Atomic uint32_t *stop)
{
    atomic_store_explicit(stop, 1, memory_order_release);
    syscall(SYS_futex, stop, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}
