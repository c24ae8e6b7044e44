/* See gate.h. */
#include "kernels/gate.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

void word_wake(uint32_t *word, int wake_max)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, wake_max, NULL, NULL, 0);
}

void word_wait(uint32_t *word, uint32_t seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

uint32_t gate_add(struct gate *g, uint32_t delta, int wake_max)
{
    /* Sequentially consistent here and in gate_wait(): either this sees the sleeper, or the
     * sleeper's last look sees the new value. */
    const uint32_t value = atomic_fetch_add(&g->value, delta) + delta;
    if (atomic_load(&g->sleepers) > 0)
        word_wake((uint32_t *)&g->value, wake_max);
    return value;
}

uint32_t gate_wait(struct gate *g, uint32_t seen)
{
    uint32_t value;
    for (unsigned i = 0; i < GATE_SPINS; i++) {
        value = atomic_load_explicit(&g->value, memory_order_acquire);
        if (value != seen)
            return value;
        _mm_pause();
    }
    atomic_fetch_add(&g->sleepers, 1);
    while ((value = atomic_load(&g->value)) == seen)
        word_wait((uint32_t *)&g->value, seen);
    atomic_fetch_sub(&g->sleepers, 1);
    return value;
}
