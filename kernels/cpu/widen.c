/* See widen.h. */
#include "kernels/cpu/widen.h"

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

static void widen(const struct cpu_isa *isa, const struct kern_widen *a)
{
    const unsigned csr = _mm_getcsr();
    _mm_setcsr(CPU_MXCSR);
    isa->widen(a);
    _mm_setcsr(csr);
}

void cpu_widen(const struct kern_widen *a)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_best);
    widen(best, a);
}

void cpu_widen_by(const char *isa, const struct kern_widen *a)
{
    const struct cpu_isa *found = NULL;
    CHECK(cpu_isa_find(isa, &found, NULL) == SHD_OK);
    CHECK(found != NULL);
    widen(found, a);
}
