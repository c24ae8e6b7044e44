/* See decode.h. */
#include "kernels/cpu/decode.h"

#include <immintrin.h>
#include <pthread.h>
#include <stddef.h>

#include "kernels/cpu/isa.h"
#include "proto/base/check.h"

static const struct cpu_isa *best;

static void find_best(void)
{
    CHECK(cpu_isa_find(NULL, &best, NULL) == SHD_OK); /* there is a scalar one */
}

static void decode(const struct cpu_isa *isa, const struct kern_decode *a)
{
    const unsigned csr = _mm_getcsr();
    CHECK(a->codec != CODEC_NONE && a->elems % CODEC_TILE_ELEMS == 0);
    _mm_setcsr(CPU_MXCSR);
    isa->decode(a);
    _mm_setcsr(csr);
}

void cpu_decode(const struct kern_decode *a)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_best);
    decode(best, a);
}

void cpu_decode_by(const char *isa, const struct kern_decode *a)
{
    const struct cpu_isa *found = NULL;
    CHECK(cpu_isa_find(isa, &found, NULL) == SHD_OK);
    CHECK(found != NULL);
    decode(found, a);
}
