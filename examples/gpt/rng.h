/* rng.h: random numbers as a pure function of a key and a counter.
 *
 * Each word of the key is absorbed by one round of splitmix64's finalizer (Steele, Lea and Flood,
 * "Fast splittable pseudorandom number generators", OOPSLA 2014; constants by Stafford, variant
 * 13): h = mix(h + word + golden ratio). No state: number (key, i) can be had in any order, by any
 * process. Not for cryptography.
 */
#ifndef GPT_RNG_H
#define GPT_RNG_H

#include <stdint.h>

static inline uint64_t rng_mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* Absorb one word. Start with rng_absorb(0, purpose), so that purposes do not share numbers. */
static inline uint64_t rng_absorb(uint64_t h, uint64_t word)
{
    return rng_mix(h + word + UINT64_C(0x9e3779b97f4a7c15));
}

/* Uniform in [0, limit), limit > 0: the high half of the product. The bias is limit / 2^64. */
static inline uint64_t rng_below(uint64_t random, uint64_t limit)
{
    return (uint64_t)(((unsigned __int128)random * limit) >> 64);
}

/* Uniform in [0, 1), 53 bits. */
static inline double rng_unit(uint64_t random)
{
    return (double)(random >> 11) * 0x1p-53;
}

enum rng_purpose { RNG_BATCH = 1, RNG_SAMPLE = 2 };

#endif
