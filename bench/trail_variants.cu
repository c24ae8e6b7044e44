/* trail_variants: what a trail costs an update kernel on a GPU, by what it writes and waits for.
 *
 * AdamW with a bf16 copy, and accumulate in fp32, over 2^27 elements, each in one launch, beside
 * the driver's copy; bandwidth by the bytes of the arrays alone (30 and 12 an element). For
 * looking, not for use: no variant can be repaired. By default as the kernels in kernels/cuda are,
 * then one thing changed at a time. Build and run (docs/gpu.md, "Measured"):
 *
 *     nvcc -O3 -std=c++17 -arch=sm_90 -o trail_variants bench/trail_variants.cu && ./trail_variants
 */
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cuda_bf16.h>

enum fence_kind { NO_FENCE, SC, ACQ_REL };
enum trail_kind {
    NONE,
    OLD_VALUES,   /* into a record, which then is said to be busy: two fences, two barriers */
    NO_RECORDS,   /* the same, and nothing is written into the record */
    WARP_RECORDS, /* a record for each warp, without barriers */
    MARKS /* a word for four values: which is the old one, which the new; one fence, one barrier */
};

struct args {
    float *p, *m, *v;
    const float *g;
    __nv_bfloat16 *publish;
    uint64_t elems;
    char *records;
    unsigned long long *done; /* a bit for each tile */
};

struct elems {
    float4 p, m, v, g;
};

static void check(cudaError_t e, const char *what)
{
    if (e == cudaSuccess)
        return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e));
    exit(1);
}

template <fence_kind KIND> __device__ void fence()
{
    if (KIND == SC)
        __threadfence();
    if (KIND == ACQ_REL)
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

__device__ float4 get(const float *x)
{
    return __ldcs((const float4 *)x);
}

__device__ void put(float *x, float4 value)
{
    __stcs((float4 *)x, value);
}

__device__ void adamw(float *p, float *m, float *v, float g)
{
    *m = fmaf(0.9f, *m, 0.1f * g);
    *v = fmaf(0.999f, *v, 0.001f * g * g);
    *p -= 1e-4f * (__fdiv_rn(*m, __fsqrt_rn(*v) + 1e-8f) + 0.1f * *p);
}

/* The number of a bit in which old and new differ, and what the old one has there. */
__device__ uint32_t mark(float was, float is)
{
    const uint32_t bits = __float_as_uint(was), differ = bits ^ __float_as_uint(is);
    const uint32_t at = (uint32_t)(__ffs(differ) - 1) & 31;
    return at | (bits >> at & 1) << 5;
}

__device__ uint32_t marks(float4 was, float4 is, uint32_t tag)
{
    return mark(was.x, is.x) | mark(was.y, is.y) << 6 | mark(was.z, is.z) << 12 |
           mark(was.w, is.w) << 18 | tag << 24;
}

struct adamw_work {
    enum { ARRAYS = 3, BYTES = 30 };
    typedef elems values;

    static __device__ elems read(const args &a, uint64_t i)
    {
        return { get(a.p + i), get(a.m + i), get(a.v + i), get(a.g + i) };
    }

    static __device__ elems step(elems x)
    {
        adamw(&x.p.x, &x.m.x, &x.v.x, x.g.x);
        adamw(&x.p.y, &x.m.y, &x.v.y, x.g.y);
        adamw(&x.p.z, &x.m.z, &x.v.z, x.g.z);
        adamw(&x.p.w, &x.m.w, &x.v.w, x.g.w);
        return x;
    }

    static __device__ void write(const args &a, uint64_t i, const elems &x)
    {
        const __nv_bfloat162 low = __floats2bfloat162_rn(x.p.x, x.p.y);
        const __nv_bfloat162 high = __floats2bfloat162_rn(x.p.z, x.p.w);
        put(a.m + i, x.m);
        put(a.v + i, x.v);
        put(a.p + i, x.p);
        __stcs((uint2 *)(a.publish + i),
               make_uint2(*(const uint32_t *)&low, *(const uint32_t *)&high));
    }

    static __device__ float4 array(const elems &x, int index)
    {
        return index == 0 ? x.p : index == 1 ? x.m : x.v;
    }
};

struct accumulate_work {
    enum { ARRAYS = 1, BYTES = 12 };

    static __device__ elems read(const args &a, uint64_t i)
    {
        elems x = {};
        x.p = get(a.p + i);
        x.g = get(a.g + i);
        return x;
    }

    static __device__ elems step(elems x)
    {
        x.p = make_float4(x.p.x + x.g.x, x.p.y + x.g.y, x.p.z + x.g.z, x.p.w + x.g.w);
        return x;
    }

    static __device__ void write(const args &a, uint64_t i, const elems &x)
    {
        put(a.p + i, x.p);
    }

    static __device__ float4 array(const elems &x, int)
    {
        return x.p;
    }
};

/* Threads that go through tiles together: a block, or a warp. FOURS: times four elements that each
 * has of a tile. AHEAD: the next tile is read before this one's fences. */
template <class WORK, int THREADS, int BLOCKS, int FOURS, trail_kind TRAIL, fence_kind FENCE,
          bool AHEAD>
__global__ void __launch_bounds__(THREADS, BLOCKS) update(const __grid_constant__ args a)
{
    const bool warp = TRAIL == WARP_RECORDS;
    const uint32_t lanes = warp ? 32 : THREADS, lane = threadIdx.x % lanes;
    const uint64_t teams = THREADS / lanes, all = gridDim.x * teams;
    const uint64_t team = blockIdx.x * teams + threadIdx.x / lanes;
    const uint32_t tile_elems = lanes * 4 * FOURS;
    const uint64_t tiles = a.elems / tile_elems, record_bytes = 128 + 12 * tile_elems;
    elems x[FOURS], next[FOURS];
    int64_t pending = -1;
    uint32_t turn = 0;
    for (int f = 0; f < FOURS && AHEAD && team < tiles; f++)
        next[f] = WORK::read(a, team * tile_elems + 4 * (f * lanes + lane));
    for (uint64_t tile = team; tile < tiles; tile += all, turn++) {
        const uint64_t first = tile * tile_elems;
        char *const record = a.records + (4 * team + turn % 4) * record_bytes;
#pragma unroll
        for (int f = 0; f < FOURS; f++)
            x[f] = AHEAD ? next[f] : WORK::read(a, first + 4 * (f * lanes + lane));
#pragma unroll
        for (int f = 0; f < FOURS; f++) {
            const uint32_t at = f * lanes + lane;
            const elems is = WORK::step(x[f]);
            for (int i = 0; i < WORK::ARRAYS; i++) {
                const uint32_t in = at + i * (tile_elems / 4);
                if (TRAIL == OLD_VALUES || TRAIL == WARP_RECORDS)
                    ((float4 *)(record + 128))[in] = WORK::array(x[f], i);
                if (TRAIL == MARKS)
                    ((uint32_t *)(record + 128))[in] = marks(WORK::array(x[f], i),
                                                             WORK::array(is, i), turn & 255);
            }
            x[f] = is;
        }
        for (int f = 0; f < FOURS && AHEAD && tile + all < tiles; f++)
            next[f] = WORK::read(a, first + all * tile_elems + 4 * (f * lanes + lane));
        if (TRAIL != NONE) {
            fence<FENCE>();
            if (warp)
                __syncwarp();
            else
                __syncthreads();
            if (lane == 0) {
                if (pending >= 0)
                    atomicOr(a.done + pending / 64, 1ull << pending % 64);
                if (TRAIL != MARKS) {
                    *(volatile unsigned long long *)record = 1 + tile;
                    fence<FENCE>();
                }
            }
            if (warp)
                __syncwarp();
            else if (TRAIL != MARKS)
                __syncthreads();
            pending = (int64_t)tile;
        }
#pragma unroll
        for (int f = 0; f < FOURS; f++)
            WORK::write(a, first + 4 * (f * lanes + lane), x[f]);
    }
}

/* Milliseconds of fn(), the median of some. */
template <class FN> static float median_ms(FN fn)
{
    std::vector<float> ms;
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "event");
    check(cudaEventCreate(&end), "event");
    for (int i = 0; i < 12; i++) {
        float took;
        cudaEventRecord(begin);
        fn();
        cudaEventRecord(end);
        check(cudaEventSynchronize(end), "run");
        check(cudaEventElapsedTime(&took, begin, end), "time");
        if (i >= 3)
            ms.push_back(took);
    }
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2];
}

static double copy_rate;
static int processors;

template <class WORK, int THREADS, int BLOCKS, int FOURS, trail_kind TRAIL, fence_kind FENCE,
          bool AHEAD>
static void run(const char *name, const args &a)
{
    const auto kernel = update<WORK, THREADS, BLOCKS, FOURS, TRAIL, FENCE, AHEAD>;
    cudaFuncAttributes has;
    int blocks = 0;
    check(cudaFuncGetAttributes(&has, kernel), name);
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, THREADS, 0), name);
    const float ms = median_ms([&] { kernel<<<processors * blocks, THREADS>>>(a); });
    const double rate = (double)WORK::BYTES * (double)a.elems / ms / 1e6;
    printf("%-52s %3d registers, %d blocks  %5.0f GB/s  %.3f of the copy\n", name, has.numRegs,
           blocks, rate, rate / copy_rate);
    fflush(stdout);
}

int main()
{
    const uint64_t elems = UINT64_C(1) << 27, gap = UINT64_C(1) << 20,
                   bytes = elems * sizeof(float) + gap;
    char *memory;
    args a = {};
    cudaDeviceProp device;
    check(cudaGetDeviceProperties(&device, 0), "device");
    processors = device.multiProcessorCount;
    check(cudaMalloc(&memory, 5 * bytes + (UINT64_C(256) << 20)), "memory");
    check(cudaMemset(memory, 0, 5 * bytes), "memory");
    check(cudaMalloc(&a.done, elems / 8), "memory");
    a.elems = elems;
    a.p = (float *)memory;
    a.m = (float *)(memory + bytes);
    a.v = (float *)(memory + 2 * bytes);
    a.g = (float *)(memory + 3 * bytes);
    a.publish = (__nv_bfloat16 *)(memory + 4 * bytes);
    a.records = memory + 5 * bytes;
    const float ms = median_ms(
        [&] { cudaMemcpyAsync(a.m, a.p, elems * 4, cudaMemcpyDeviceToDevice); });
    copy_rate = 8.0 * (double)elems / ms / 1e6;
    printf("%s: the driver's copy %.0f GB/s\n", device.name, copy_rate);

    typedef adamw_work A;
    run<A, 256, 4, 2, NONE, SC, false>("adamw, no trail", a);
    run<A, 256, 4, 1, NONE, SC, true>("adamw, no trail, 4 elements a thread, read ahead", a);
    run<A, 256, 4, 2, OLD_VALUES, SC, false>("adamw, old values", a);
    run<A, 256, 4, 2, OLD_VALUES, ACQ_REL, false>("adamw, old values, acquire-release fences", a);
    run<A, 256, 4, 2, OLD_VALUES, NO_FENCE, false>("adamw, old values, no fences", a);
    run<A, 256, 4, 2, NO_RECORDS, SC, false>("adamw, fences, nothing written", a);
    run<A, 256, 4, 2, WARP_RECORDS, SC, false>("adamw, a record for each warp", a);
    run<A, 256, 4, 1, OLD_VALUES, SC, true>("adamw, old values, 4 elements a thread, read ahead",
                                            a);
    run<A, 256, 4, 2, MARKS, SC, false>("adamw, marks", a);
    run<A, 256, 4, 1, MARKS, SC, true>("adamw, marks, 4 elements a thread, read ahead", a);
    typedef accumulate_work C;
    run<C, 256, 4, 2, NONE, SC, true>("accumulate, no trail", a);
    run<C, 256, 4, 2, OLD_VALUES, SC, true>("accumulate, old values", a);
    run<C, 256, 6, 1, MARKS, SC, true>("accumulate, marks, 4 elements a thread", a);
    return 0;
}
