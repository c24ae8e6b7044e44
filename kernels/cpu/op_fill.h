/* Initial values: fill.h over FILL_BLOCKS counters at a time, which compilers vectorize. Included
 * once per instruction set. */
#ifndef SHD_KERNELS_CPU_OP_FILL_H
#define SHD_KERNELS_CPU_OP_FILL_H

#include <stdint.h>
#include <string.h>

#include "kernels/cpu/isa.h"
#include "kernels/fill.h"

#define FILL_BLOCKS 16u /* Philox blocks at once */
#define FILL_ELEMS  (4 * FILL_BLOCKS)

/* words[w][l]: output word w of counter block `block` + l. */
static void group_words(uint64_t key, uint64_t block, uint32_t words[4][FILL_BLOCKS])
{
    for (unsigned l = 0; l < FILL_BLOCKS; l++) {
        uint32_t w[4];
        philox_words(key, block + l, w);
        for (unsigned i = 0; i < 4; i++)
            words[i][l] = w[i];
    }
}

static void normal_elems(const struct kern_fill *a, uint64_t block, float out[FILL_ELEMS])
{
    uint32_t words[4][FILL_BLOCKS];
    group_words(a->key, block, words);
    for (unsigned pair = 0; pair < 4; pair += 2)
        for (unsigned l = 0; l < FILL_BLOCKS; l++)
            fill_normal((const uint32_t[]){ words[pair][l], words[pair + 1][l] }, a->a, a->b,
                        &out[4 * l + pair]);
}

static void uniform_elems(const struct kern_fill *a, uint64_t block, float out[FILL_ELEMS])
{
    uint32_t words[4][FILL_BLOCKS];
    group_words(a->key, block, words);
    const float last = fill_before(a->b, a->a);
    for (unsigned w = 0; w < 4; w++)
        for (unsigned l = 0; l < FILL_BLOCKS; l++)
            out[4 * l + w] = fill_uniform(words[w][l], a->a, a->b, last);
}

static void fill_const(float *out, uint64_t elems, float value)
{
    for (uint64_t i = 0; i < elems; i++)
        out[i] = value;
}

static void fill_range(const struct kern_fill *a, struct cpu_range r)
{
    if (a->kind == KERN_FILL_CONST) {
        fill_const(a->out + r.first, r.count, a->a);
        return;
    }
    const uint64_t end = r.first + r.count;
    for (uint64_t i = r.first; i < end;) {
        const uint64_t index = a->first_index + i, skip = index % 4;
        float group[FILL_ELEMS];
        if (a->kind == KERN_FILL_NORMAL)
            normal_elems(a, index / 4, group);
        else
            uniform_elems(a, index / 4, group);
        const uint64_t n = end - i < FILL_ELEMS - skip ? end - i : FILL_ELEMS - skip;
        memcpy(a->out + i, group + skip, n * sizeof *group);
        i += n;
    }
}

#endif
