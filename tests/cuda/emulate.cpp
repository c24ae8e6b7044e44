/* See emulate.h. One launch at a time; a scheduler on the caller's stack resumes fibers, which come
 * back to it, or go on to the next, where they must wait or may be switched. */
#include "tests/cuda/emulate.h"

#include <mutex>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <vector>
#include <xmmintrin.h>

#include "tests/cuda/emulate_device.h"
#include "tests/cuda/emulate_fiber.h"
#include "tests/cuda/ptx.h"

#define WARP         32u
#define RESIDENT_MAX 64u
#define MXCSR        0x9fc0u /* round to nearest even, exceptions masked, FTZ | DAZ */

struct uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace
{

/* A store that no fence has made sure of. An atomic or has `set` instead of old bytes. */
struct unsure {
    unsigned char *p;
    uint64_t set;
    unsigned char old[16];
    uint8_t bytes;
    uint64_t event;
};

struct warp {
    uint64_t value[2][WARP]; /* of this shuffle and the next: nobody is further ahead */
    unsigned lanes, arrived;
    const char *file;
    int line;
};

struct thread {
    struct fiber fiber;
    unsigned index; /* within the block */
    unsigned shuffles;
    bool parked; /* its fiber waits in thread_main() for a thread to run */
    std::vector<struct unsure> unsure;
};

/* A resident block. */
struct block {
    std::vector<struct thread> threads;
    std::vector<struct warp> warps;
    std::vector<unsigned> ready; /* threads that can go on */
    unsigned at_barrier, ended;
    const char *file; /* of the barrier */
    int line;
    struct uint3 index;
    std::vector<unsigned char> shared; /* while another block runs */
    std::vector<struct unsure> unsure; /* of blocks that ended here */
};

struct range {
    unsigned char *first, *end;
    bool operator==(const struct range &o) const
    {
        return first == o.first;
    }
};

struct machine {
    std::mutex lock;
    struct emulate_options options;
    bool configured, dead;
    uint64_t random;
    struct emulate_report report;
    struct fiber scheduler;
    struct block *block; /* that runs, and whose shared memory is in place */
    struct thread *thread;
    const struct emulate_kernel *kernel;
    const void *args;
    std::vector<struct block> blocks; /* kept for their stacks: */
    size_t resident;                  /* how many run at a time now */
    std::vector<struct emulate_site> sites;
    uint64_t next_block, block_count;
};

/* Registered before main(), so made at the first use. */
struct emulate_kernel *&kernels()
{
    static struct emulate_kernel *first;
    return first;
}

std::vector<struct range> &shared_ranges()
{
    static std::vector<struct range> ranges;
    return ranges;
}

struct machine *made; /* by registering; outlives every user */

inline struct machine &emulator()
{
    if (made == nullptr)
        made = new struct machine();
    return *made;
}

uint64_t random_below(uint64_t n)
{
    uint64_t &s = emulator().random;
    s ^= s >> 12;
    s ^= s << 25;
    s ^= s >> 27;
    return (s * UINT64_C(2685821657736338717) >> 16) % n;
}

[[noreturn]] void wrong(const char *what, const char *file, int line)
{
    const struct machine &e = emulator();
    fprintf(stderr, "emulate: %s, block %u, thread %u: %s (%s:%d)\n",
            e.kernel != nullptr ? e.kernel->name : "?", blockIdx.x, threadIdx.x, what,
            file != nullptr ? file : "-", line);
    abort();
}

bool same_file(const char *one, const char *other)
{
    return one == other || strcmp(one, other) == 0;
}

/* True: this fence or barrier is to be passed over. */
bool site_skipped(const char *file, int line, bool is_fence)
{
    struct machine &e = emulator();
    unsigned at = 0;
    while (at < e.sites.size() && (e.sites[at].line != line || e.sites[at].is_fence != is_fence ||
                                   !same_file(e.sites[at].file, file)))
        at++;
    if (at == e.sites.size())
        e.sites.push_back({ file, line, is_fence });
    return e.options.skip_site == at + 1;
}

/* -- Shared memory ----------------------------------------------------------------------------- */

size_t shared_bytes()
{
    size_t bytes = 0;
    for (const struct range &r : shared_ranges())
        bytes += (size_t)(r.end - r.first);
    return bytes;
}

void shared_fill()
{
    for (const struct range &r : shared_ranges())
        memset(r.first, 0xff, (size_t)(r.end - r.first));
}

void shared_swap(struct block *from, struct block *to)
{
    size_t at = 0;
    for (const struct range &r : shared_ranges()) {
        const size_t bytes = (size_t)(r.end - r.first);
        if (from != nullptr)
            memcpy(&from->shared[at], r.first, bytes);
        memcpy(r.first, &to->shared[at], bytes);
        at += bytes;
    }
}

/* -- Threads ----------------------------------------------------------------------------------- */

/* The thread of b that goes on. */
unsigned take_ready(struct block *b)
{
    const struct machine &e = emulator();
    const size_t last = b->ready.size() - 1;
    const size_t at = e.options.seed != 0 ? random_below(last + 1) : last;
    const unsigned index = b->ready[at];
    b->ready[at] = b->ready[last];
    b->ready.pop_back();
    return index;
}

/* Its fiber is to be switched to. */
struct fiber *thread_enter(struct block *b, unsigned index)
{
    struct machine &e = emulator();
    if (e.block != b) {
        if (e.resident > 1)
            shared_swap(e.block, b);
        e.block = b;
    }
    struct thread *t = &b->threads[index];
    e.thread = t;
    blockIdx = b->index;
    if (index < blockDim.x) /* most of them, and divisions take long */
        threadIdx = { index, 0, 0 };
    else
        threadIdx = { index % blockDim.x, index / blockDim.x % blockDim.y,
                      index / blockDim.x / blockDim.y };
    return &t->fiber;
}

/* In order the next thread is known here, and half of the switches saved. */
void thread_leave()
{
    struct machine &e = emulator();
    struct fiber *here = &e.thread->fiber;
    if (e.options.seed != 0 || e.dead || e.block->ready.empty())
        fiber_switch(here, &e.scheduler);
    else
        fiber_switch(here, thread_enter(e.block, take_ready(e.block)));
}

/* A fiber's life: one thread after the other. */
void thread_main()
{
    struct machine &e = emulator();
    fiber_arrived(&e.thread->fiber);
    for (;;) {
        e.thread->parked = false;
        e.kernel->run(e.args);
        struct block *b = e.block;
        if (b->at_barrier > 0)
            wrong("ended while others wait at a barrier", b->file, b->line);
        b->ended++;
        e.thread->parked = true;
        thread_leave();
    }
}

/* -- Blocks ------------------------------------------------------------------------------------ */

void block_reserve(struct block *b, unsigned threads)
{
    const size_t had = b->threads.size();
    if (had < threads) {
        b->threads.resize(threads);
        for (size_t i = had; i < threads; i++)
            fiber_alloc(&b->threads[i].fiber);
    }
    b->warps.resize((threads + WARP - 1) / WARP);
}

/* Give b the grid's next block. */
void block_begin(struct block *b)
{
    struct machine &e = emulator();
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    const uint64_t n = e.next_block++;
    b->index.x = (unsigned)(n % gridDim.x);
    b->index.y = (unsigned)(n / gridDim.x % gridDim.y);
    b->index.z = (unsigned)(n / gridDim.x / gridDim.y);
    b->at_barrier = b->ended = 0;
    for (unsigned w = 0; w < b->warps.size(); w++) {
        b->warps[w].lanes = threads - w * WARP < WARP ? threads - w * WARP : WARP;
        b->warps[w].arrived = 0;
    }
    b->ready.clear();
    for (unsigned i = threads; i-- > 0;) {
        struct thread *t = &b->threads[i];
        b->unsure.insert(b->unsure.end(), t->unsure.begin(), t->unsure.end());
        t->unsure.clear();
        t->index = i;
        t->shuffles = 0;
        if (!t->parked)
            fiber_start(&t->fiber, thread_main);
        b->ready.push_back(i);
    }
    if (e.resident > 1)
        b->shared.assign(shared_bytes(), 0xff);
    if (e.resident == 1 || e.block == b)
        shared_fill();
}

bool block_ended(const struct block *b)
{
    return b->ended == blockDim.x * blockDim.y * blockDim.z;
}

/* One thread of b goes on to where it next waits, or in order as many as can. */
void block_step(struct block *b)
{
    if (b->ready.empty()) {
        for (const struct warp &w : b->warps)
            if (w.arrived > 0)
                wrong("some lanes wait at a shuffle which others never come to", w.file, w.line);
        wrong("some threads wait at a barrier which others never come to", b->file, b->line);
    }
    fiber_switch(&emulator().scheduler, thread_enter(b, take_ready(b)));
}

/* -- Launches ---------------------------------------------------------------------------------- */

void run_in_order()
{
    struct machine &e = emulator();
    struct block *b = &e.blocks[0];
    while (e.next_block < e.block_count && !e.dead) {
        block_begin(b);
        while (!block_ended(b) && !e.dead)
            block_step(b);
    }
}

void run_at_random()
{
    struct machine &e = emulator();
    std::vector<struct block *> running;
    for (size_t i = 0; i < e.resident; i++) {
        block_begin(&e.blocks[i]);
        running.push_back(&e.blocks[i]);
    }
    while (!running.empty() && !e.dead) {
        const size_t at = random_below(running.size());
        struct block *b = running[at];
        for (uint64_t steps = 1 + random_below(64); steps > 0 && !block_ended(b) && !e.dead;
             steps--)
            block_step(b);
        if (e.dead || !block_ended(b))
            continue;
        if (e.next_block < e.block_count)
            block_begin(b);
        else
            running.erase(running.begin() + (ptrdiff_t)at);
    }
}

void lose(const struct unsure &u, std::vector<const struct unsure *> *kept)
{
    for (const struct unsure *k : *kept) /* a later store to the same place was not lost */
        if (k->set == 0 && k->p < u.p + u.bytes && u.p < k->p + k->bytes)
            return;
    if (random_below(2) == 0) {
        kept->push_back(&u);
        return;
    }
    if (u.set != 0) {
        uint64_t word = 0;
        memcpy(&word, u.p, u.bytes);
        word &= ~u.set;
        memcpy(u.p, &word, u.bytes);
    } else {
        memcpy(u.p, u.old, u.bytes);
    }
    emulator().report.stores_lost++;
}

/* What a kill loses: stores that no fence of their thread came after, in no order but that of one
 * place. */
void lose_unsure()
{
    std::vector<const struct unsure *> kept;
    for (struct block &b : emulator().blocks) {
        for (struct thread &t : b.threads) {
            kept.clear(); /* no two threads store to one place without a fence in between */
            for (size_t i = t.unsure.size(); i-- > 0;)
                lose(t.unsure[i], &kept);
            t.unsure.clear();
        }
        kept.clear();
        for (size_t i = b.unsure.size(); i-- > 0;)
            lose(b.unsure[i], &kept);
        b.unsure.clear();
    }
}

uint64_t from_environment(const char *name)
{
    const char *text = getenv(name);
    return text != nullptr ? strtoull(text, nullptr, 0) : 0;
}

void configure_from_environment()
{
    struct machine &e = emulator();
    e.options.seed = from_environment("EMULATE_SEED");
    e.options.resident = (unsigned)from_environment("EMULATE_RESIDENT");
    e.options.stop_at = from_environment("EMULATE_STOP_AT");
    e.options.stop_kills = true;
    e.random = e.options.seed;
    e.configured = true;
}

/* As many resident blocks as asked for and useful. */
void prepare()
{
    struct machine &e = emulator();
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    e.block_count = (uint64_t)gridDim.x * gridDim.y * gridDim.z;
    e.next_block = 0;
    uint64_t count = e.options.seed != 0 && e.options.resident > 1 ? e.options.resident : 1;
    CHECK(count <= RESIDENT_MAX);
    count = count < e.block_count ? count : e.block_count;
    if (e.blocks.size() < count)
        e.blocks.resize(count);
    e.resident = count;
    for (struct block &b : e.blocks) {
        b.unsure.clear();
        for (struct thread &t : b.threads)
            t.unsure.clear();
    }
    for (size_t i = 0; i < count; i++)
        block_reserve(&e.blocks[i], threads);
    e.block = nullptr;
    e.report = emulate_report();
}

} /* namespace */

void emulate_register(struct emulate_kernel *kernel, unsigned char *shared_first,
                      unsigned char *shared_end)
{
    struct emulate_kernel **at = &kernels();
    while (*at != nullptr)
        at = const_cast<struct emulate_kernel **>(&(*at)->next);
    *at = kernel;
    const struct range r = { shared_first, shared_end };
    for (const struct range &known : shared_ranges())
        if (known == r)
            return;
    if (shared_first != shared_end)
        shared_ranges().push_back(r);
}

const struct emulate_kernel *emulate_find(const char *name)
{
    if (const struct emulate_kernel *k = ptx_find(name))
        return k;
    for (const struct emulate_kernel *k = kernels(); k != nullptr; k = k->next)
        if (strcmp(k->name, name) == 0)
            return k;
    return nullptr;
}

void emulate_configure(const struct emulate_options *options)
{
    struct machine &e = emulator();
    const std::lock_guard<std::mutex> held(e.lock);
    e.options = options != nullptr ? *options : emulate_options();
    e.random = e.options.seed != 0 ? e.options.seed * UINT64_C(0x9e3779b97f4a7c15) | 1 : 1;
    e.configured = true;
    e.dead = false;
}

struct emulate_report emulate_last(void)
{
    struct machine &e = emulator();
    const std::lock_guard<std::mutex> held(e.lock);
    return e.report;
}

unsigned emulate_sites(struct emulate_site *ret_sites, unsigned max)
{
    struct machine &e = emulator();
    const std::lock_guard<std::mutex> held(e.lock);
    unsigned count = 0;
    for (; count < e.sites.size() && count < max; count++)
        ret_sites[count] = e.sites[count];
    return count;
}

void emulate_launch(const struct emulate_kernel *k, const void *args, const unsigned grid[3],
                    const unsigned block[3])
{
    struct machine &e = emulator();
    const std::lock_guard<std::mutex> held(e.lock);
    if (!e.configured)
        configure_from_environment();
    if (e.dead)
        return;
    gridDim = { grid[0], grid[1], grid[2] };
    blockDim = { block[0], block[1], block[2] };
    e.kernel = k;
    CHECK((uint64_t)block[0] * block[1] * block[2] >= 1 && grid[0] >= 1);
    if ((uint64_t)block[0] * block[1] * block[2] > k->threads_max)
        wrong("launched with more threads than it was compiled for", nullptr, 0);
    alignas(64) unsigned char copy[4096]; /* as much as a launch takes */
    CHECK(k->args_bytes <= sizeof copy);
    memcpy(copy, args, k->args_bytes);
    e.args = copy;
    prepare();

    const unsigned before = _mm_getcsr();
    _mm_setcsr(MXCSR);
    if (e.options.seed != 0)
        run_at_random();
    else
        run_in_order();
    if (e.dead && !e.options.keep_stores)
        lose_unsure();
    _mm_setcsr(before);
    e.report.stopped = e.dead;
    if (e.dead && e.options.stop_kills)
        kill(getpid(), SIGKILL);
}

/* -- What a thread does ------------------------------------------------------------------------ */

void emulate_event()
{
    struct machine &e = emulator();
    if (e.report.events + 1 == e.options.stop_at) {
        e.dead = true;
        thread_leave();
        abort(); /* never resumed */
    }
    e.report.events++;
    if (e.options.seed != 0 && random_below(8) == 0) {
        e.block->ready.push_back(e.thread->index);
        thread_leave();
    }
}

void emulate_before_store(void *p, size_t bytes)
{
    struct machine &e = emulator();
    if (e.options.stop_at == 0 || e.options.keep_stores)
        return;
    struct unsure u = unsure();
    CHECK(bytes <= sizeof u.old);
    u.p = static_cast<unsigned char *>(p);
    u.bytes = (uint8_t)bytes;
    memcpy(u.old, p, bytes);
    e.thread->unsure.push_back(u);
}

void emulate_before_or(void *p, uint64_t set, size_t bytes)
{
    struct machine &e = emulator();
    if (e.options.stop_at == 0 || e.options.keep_stores)
        return;
    struct unsure u = unsure();
    u.p = static_cast<unsigned char *>(p);
    u.bytes = (uint8_t)bytes;
    memcpy(&u.set, p, bytes);
    u.set = set & ~u.set;
    if (u.set != 0)
        e.thread->unsure.push_back(u);
}

void emulate_fence(const char *file, int line)
{
    if (!site_skipped(file, line, true))
        emulator().thread->unsure.clear();
    emulate_event();
}

void emulate_barrier(const char *file, int line)
{
    struct machine &e = emulator();
    emulate_event();
    if (site_skipped(file, line, false))
        return;
    struct block *b = e.block;
    if (b->ended > 0)
        wrong("at a barrier after another thread's end", file, line);
    if (b->at_barrier > 0 && (b->line != line || !same_file(b->file, file)))
        wrong("at another barrier than the rest of the block", file, line);
    b->file = file;
    b->line = line;
    if (++b->at_barrier == blockDim.x * blockDim.y * blockDim.z) {
        b->at_barrier = 0;
        for (unsigned i = (unsigned)b->threads.size(); i-- > 0;)
            if (i < blockDim.x * blockDim.y * blockDim.z)
                b->ready.push_back(i);
    }
    thread_leave();
}

unsigned emulate_lane()
{
    return emulator().thread->index % WARP;
}

uint64_t emulate_shuffle(uint64_t value, unsigned from_lane, const char *file, int line)
{
    struct machine &e = emulator();
    struct thread *t = e.thread;
    const unsigned first = t->index / WARP * WARP;
    struct warp *w = &e.block->warps[t->index / WARP];
    uint64_t *values = w->value[t->shuffles++ % 2];
    values[t->index % WARP] = value;
    if (w->arrived > 0 && (w->line != line || !same_file(w->file, file)))
        wrong("at another shuffle than the rest of the warp", file, line);
    w->file = file;
    w->line = line;
    if (++w->arrived == w->lanes) {
        w->arrived = 0;
        for (unsigned i = w->lanes; i-- > 0;)
            e.block->ready.push_back(first + i);
    }
    thread_leave();
    return values[from_lane < w->lanes ? from_lane : t->index % WARP];
}
