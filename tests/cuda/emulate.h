/* Kernels run on the host: a .cu file that keeps to kernels/cuda/portable.cuh, compiled as C++,
 * with each thread of a block as a fiber.
 *
 *     const struct emulate_kernel *k = emulate_find("shd_fill");
 *     emulate_launch(k, &args, (const unsigned[]){ 8, 1, 1 }, (const unsigned[]){ 256, 1, 1 });
 *
 * Arithmetic is done with FTZ|DAZ, to nearest even, as nvcc's -ftz=true. Shared memory holds NaN
 * (all bits set) when a block begins. The process is ended, with a message, by: threads of a block
 * that do not all come to the same barrier, lanes of a warp that do not all come to the same
 * shuffle, a block larger than the kernel was compiled for, a wrong size of arguments. Memory
 * errors are the sanitizers' to find: fibers are made known to them.
 *
 * What runs when is the options' choice. By default blocks run one after the other, threads from
 * barrier to barrier, in order. With a seed: several blocks at a time, switched between at random,
 * at each put(), fence, atomic and barrier. A launch can be ended at the n-th of these events, as
 * by a kill of the process; what no fence had made sure of by then is lost, or not, at random.
 *
 * Launches exclude each other; any thread. Kernels of several libraries: the first of a name wins.
 */
#ifndef SHD_TESTS_EMULATE_H
#define SHD_TESTS_EMULATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct emulate_kernel {
    const char *name;
    size_t args_bytes;
    unsigned threads_max; /* per block */
    void (*run)(const void *args);
    const struct emulate_kernel *next;
};

/* Kernel of this name, NULL: none is linked in. */
const struct emulate_kernel *emulate_find(const char *name);

/* Run it to its end (or to the options' stop). args[k->args_bytes] is copied. block: a multiple of
 * 32 threads where the kernel has warp functions. */
void emulate_launch(const struct emulate_kernel *k, const void *args, const unsigned grid[3],
                    const unsigned block[3]);

struct emulate_options {
    uint64_t seed;      /* of all choices; 0: none is made, in order */
    unsigned resident;  /* blocks at a time, 1..64; 0: 1. Takes effect with a seed */
    uint64_t stop_at;   /* end at this event of the launch, 1..; 0: never. What follows does not */
                        /* run: further launches do nothing until options are set again */
    bool stop_kills;    /* the process, by SIGKILL, rather than just the launch */
    bool keep_stores;   /* when stopped: lose none */
    unsigned skip_site; /* 0, or 1 + index of a site (below) that is as if it were not written */
};

/* For launches from now on. NULL: the default. EMULATE_SEED, EMULATE_RESIDENT, EMULATE_STOP_AT (it
 * kills) in the environment are read at the first launch of a process that never called this. */
void emulate_configure(const struct emulate_options *options);

/* The fences and barriers that any thread has come to in this process, in the order first seen:
 * whether a test notices when one is missing is what says that it can fail. */
struct emulate_site {
    const char *file;
    int line;
    bool is_fence;
};
unsigned emulate_sites(struct emulate_site *ret_sites, unsigned max); /* returns how many */

/* Of the last launch. */
struct emulate_report {
    uint64_t events; /* that passed */
    bool stopped;
    uint64_t stores_lost;
};
struct emulate_report emulate_last(void);

#ifdef __cplusplus
}
#endif
#endif
