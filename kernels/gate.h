/* A counter that threads wait on: spin briefly, then sleep on a futex. Waking costs one load when
 * nobody sleeps. */
#ifndef SHD_KERNELS_GATE_H
#define SHD_KERNELS_GATE_H

#include <stdatomic.h>
#include <stdint.h>

struct gate {
    _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
};

/* value += delta (modulo 2^32), then wake up to wake_max of those who sleep. What the caller wrote
 * before is visible to whoever sees the new value. Returns the new value. */
uint32_t gate_add(struct gate *g, uint32_t delta, int wake_max);

/* Wait until value is not seen; returns it. */
uint32_t gate_wait(struct gate *g, uint32_t seen);

/* The two halves for a plain futex word; word_wait() may return early. */
void word_wake(uint32_t *word, int wake_max);
void word_wait(uint32_t *word, uint32_t seen);

#define GATE_SPINS 500u /* pauses before sleeping: some 10 us, about what a futex wake costs */

#endif
