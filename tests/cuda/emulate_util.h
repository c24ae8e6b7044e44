/* Shared by the tests of emulated kernels: launches, and hyperparameters as the host hands them to
 * a kernel. */
#ifndef SHD_TESTS_EMULATE_UTIL_H
#define SHD_TESTS_EMULATE_UTIL_H

#include "kernels/cuda/args.h"
#include "tests/cuda/emulate.h"
#include "tests/lib/kern_util.h"

/* LAUNCH("shd_fill", &args, blocks): its argument struct by value, CUDA_THREADS threads. */
#define LAUNCH(name, args, blocks) launch((name), (args), sizeof *(args), (blocks))

__attribute__((unused)) static void launch(const char *name, const void *args, size_t bytes,
                                           unsigned blocks)
{
    const struct emulate_kernel *k = emulate_find(name);
    if (k == NULL)
        FAIL("no kernel %s", name);
    EXPECT_EQ(k->args_bytes, bytes);
    emulate_launch(k, args, (const unsigned[]){ blocks, 1, 1 },
                   (const unsigned[]){ CUDA_THREADS, 1, 1 });
}

__attribute__((unused)) static const char *optimizer_kernel(enum spec_optimizer o)
{
    static const char *const names[] = {
        [SPEC_ADAMW] = "shd_adamw",         [SPEC_SGD] = "shd_sgd",
        [SPEC_LION] = "shd_lion",           [SPEC_ADAMW_TORCH] = "shd_adamw_torch",
        [SPEC_SGD_TORCH] = "shd_sgd_torch", [SPEC_MEAN] = "shd_mean"
    };
    return names[o];
}

/* What the host makes of a kernel's block sums. */
__attribute__((unused)) static struct kern_sum sum_of(const double *block_sums, uint64_t count)
{
    struct kern_sum sum = { .finite = true };
    fixsum_init(&sum.sum);
    for (uint64_t i = 0; i < count; i++) {
        if (isfinite(block_sums[i]))
            fixsum_add(&sum.sum, block_sums[i]);
        else
            sum.finite = false;
    }
    fixsum_carry(&sum.sum); /* the one form that equal sums share */
    return sum;
}

__attribute__((unused)) static bool same_sum(const struct kern_sum *a, const struct kern_sum *b)
{
    return a->finite == b->finite && memcmp(a->sum.limb, b->sum.limb, sizeof a->sum.limb) == 0;
}

#endif
