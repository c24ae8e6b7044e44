/* CUDA's words for code that is compiled for the emulation: see kernels/cuda/portable.cuh, before
 * which the compiler is told to include this, and emulate.h. Nothing here is for anybody else. */
#ifndef SHD_TESTS_EMULATE_DEVICE_H
#define SHD_TESTS_EMULATE_DEVICE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "tests/cuda/emulate.h"

struct uint3 {
    unsigned x, y, z;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

/* Of the thread that runs now. */
extern struct uint3 threadIdx, blockIdx, blockDim, gridDim;

/* The emulation's side of what a thread does. */
void emulate_register(struct emulate_kernel *kernel, unsigned char *shared_first,
                      unsigned char *shared_end);
void emulate_barrier(const char *file, int line);
void emulate_fence(const char *file, int line);
uint64_t emulate_shuffle(uint64_t value, unsigned from_lane, const char *file, int line);
unsigned emulate_lane();
void emulate_before_store(void *p, size_t bytes);
void emulate_before_or(void *p, uint64_t set, size_t bytes);
void emulate_event();

/* All __shared__ variables of a library or program lie between these. */
extern "C" {
extern unsigned char __start_emulate_shared[] __attribute__((weak, visibility("hidden")));
extern unsigned char __stop_emulate_shared[] __attribute__((weak, visibility("hidden")));
}
#define __shared__ static __attribute__((section("emulate_shared")))

struct emulate_registration {
    struct emulate_kernel kernel;
    emulate_registration(const char *name, size_t args_bytes, unsigned threads,
                         void (*run)(const void *args))
        : kernel{ name, args_bytes, threads, run, nullptr }
    {
        emulate_register(&kernel, __start_emulate_shared, __stop_emulate_shared);
    }
};

#define KERNEL_BOUNDS(name, type, threads, blocks)                                               \
    static void name(const type &a);                                                             \
    static void name##_run(const void *args)                                                     \
    {                                                                                            \
        name(*static_cast<const type *>(args));                                                  \
    }                                                                                            \
    static emulate_registration name##_registration(#name, sizeof(type), (threads), name##_run); \
    static void name(const type &a)
#define DEVICE static inline __attribute__((unused))

#define __syncthreads()            emulate_barrier(__FILE__, __LINE__)
#define __threadfence()            emulate_fence(__FILE__, __LINE__)
#define __syncwarp()               ((void)emulate_shuffle(0, 0, __FILE__, __LINE__))
#define __shfl_sync(mask, x, lane) emulate_shfl((mask), (x), (lane) % 32, __FILE__, __LINE__)
#define __shfl_xor_sync(mask, x, with) \
    emulate_shfl((mask), (x), emulate_lane() ^ (with), __FILE__, __LINE__)
#define __shfl_down_sync(mask, x, by) \
    emulate_shfl((mask), (x), emulate_lane() + (by), __FILE__, __LINE__)
#define __shfl_up_sync(mask, x, by) \
    emulate_shfl((mask), (x), emulate_lane() - (by), __FILE__, __LINE__)

template <typename To, typename From> static inline To emulate_bits(From x)
{
    static_assert(sizeof(To) == sizeof(From), "the same size");
    To to;
    memcpy(&to, &x, sizeof to);
    return to;
}

/* Beyond the warp's ends a lane keeps its own value, as on the device. */
template <typename T>
static inline T emulate_shfl(unsigned mask, T x, unsigned lane, const char *file, int line)
{
    static_assert(sizeof(T) <= sizeof(uint64_t), "4 or 8 bytes");
    (void)mask;
    uint64_t word = 0;
    memcpy(&word, &x, sizeof x);
    word = emulate_shuffle(word, lane < 32 ? lane : emulate_lane(), file, line);
    memcpy(&x, &word, sizeof x);
    return x;
}

template <typename T> static inline void put(T *p, T x)
{
    emulate_before_store(p, sizeof x);
    *p = x;
    emulate_event();
}

template <typename T> static inline void put_once(T *p, T x)
{
    put(p, x);
}

template <typename T> static inline T get_once(const T *p)
{
    return *p;
}

template <typename T> static inline T atomicOr(T *p, T x)
{
    emulate_before_or(p, (uint64_t)x, sizeof x);
    const T old = *p;
    *p = old | x;
    emulate_event();
    return old;
}

template <typename T> static inline T atomicAdd(T *p, T x)
{
    const T old = *p;
    *p = old + x;
    emulate_event();
    return old;
}

template <typename T> static inline T atomicMax(T *p, T x)
{
    const T old = *p;
    *p = old > x ? old : x;
    emulate_event();
    return old;
}

static inline float2 make_float2(float x, float y)
{
    return { x, y };
}

static inline float4 make_float4(float x, float y, float z, float w)
{
    return { x, y, z, w };
}

static inline uint2 make_uint2(unsigned x, unsigned y)
{
    return { x, y };
}

static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w)
{
    return { x, y, z, w };
}

#endif
