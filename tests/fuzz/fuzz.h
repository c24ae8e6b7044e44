/* What every fuzz target has, and how it reads its input.
 *
 * A target is one file with these functions. Linked with libFuzzer (preset fuzz) it searches;
 * linked with replay.c (all other builds) it runs its own seeds and the corpus as a unit test.
 * What must hold is said with CHECK(): a failed one aborts, which libFuzzer reports.
 */
#ifndef SHD_FUZZ_H
#define SHD_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/base/status.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The index-th valid input into buf; returns its size, 0 when there are no more. */
size_t fuzz_seed(unsigned index, uint8_t *buf, size_t bytes_max);

#define FUZZ_SEED_BYTES_MAX ((size_t)1 << 16)

#ifdef SHD_FUZZ /* defined by libFuzzer's build only */
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max, unsigned seed);
#endif

/* An input read from front to back; behind its end everything is 0. */
struct fuzz_in {
    const uint8_t *at;
    size_t left;
};

static inline uint64_t fuzz_bytes(struct fuzz_in *in, size_t bytes)
{
    uint64_t value = 0;
    const size_t n = bytes < in->left ? bytes : in->left;
    for (size_t i = 0; i < n; i++)
        value |= (uint64_t)in->at[i] << (8 * i);
    in->at += n;
    in->left -= n;
    return value;
}
static inline uint8_t fuzz_u8(struct fuzz_in *in)
{
    return (uint8_t)fuzz_bytes(in, 1);
}
static inline uint32_t fuzz_u32(struct fuzz_in *in)
{
    return (uint32_t)fuzz_bytes(in, 4);
}
static inline uint64_t fuzz_u64(struct fuzz_in *in)
{
    return fuzz_bytes(in, 8);
}
static inline uint32_t fuzz_below(struct fuzz_in *in, uint32_t limit)
{
    return (uint32_t)(fuzz_bytes(in, limit > 256 ? 4 : 1) % limit);
}

/* What every refusal has. */
static inline void fuzz_check_refusal(int r, const struct shd_err *e)
{
    CHECK(r < 0 && status_known(r) && e->code == r);
    CHECK(e->text[0] != 0 && memchr(e->text, 0, sizeof e->text) != NULL);
}

#endif
