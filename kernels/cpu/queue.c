/* The op queue and the compute threads.
 *
 * A caller copies its op into the ring and raises `pushed`. The leader (thread 0) takes ops in
 * order. One of a single chunk, or on a device of one thread, it runs alone: no hand-off. A larger
 * one it opens to the crew: helpers that wake in time enter, each takes the chunks of its own
 * contiguous part and then those that others have left. The leader then closes the op, waits for
 * the helpers inside (never for one that came too late), merges the partial sums, frees the slot
 * and calls done. Nothing is allocated after the start. A caller may take an idle leader's place
 * for an op that is over before the leader would be awake.
 *
 * Contiguous parts, because threads that take turns chunk by chunk through one range reach only
 * 85-90 % of the memory bandwidth that they reach far apart (EPYC Zen 5, two threads).
 *
 * Which thread does which chunk never shows in a result: elements are independent, block sums
 * belong to one block, and partial sums are exact (proto/base/fixsum.h).
 */
#include "kernels/cpu/queue.h"

#include <immintrin.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"

#define CREW_OPEN 0x80000000u

/* -- Gates ------------------------------------------------------------------------------------ */

/* value += delta (modulo 2^32), then wake up to wake_max of those who sleep. What the caller wrote
 * before is visible to whoever sees the new value. Returns the new value. */
static uint32_t gate_add(struct gate *g, uint32_t delta, int wake_max)
{
    /* Sequentially consistent here and in gate_wait(): either this sees the sleeper, or the
     * sleeper's last look sees the new value. */
    const uint32_t value = atomic_fetch_add(&g->value, delta) + delta;
    if (atomic_load(&g->sleepers) > 0)
        syscall(SYS_futex, &g->value, FUTEX_WAKE_PRIVATE, wake_max, NULL, NULL, 0);
    return value;
}

/* Wait until value is not seen; returns it. */
static uint32_t gate_wait(struct gate *g, uint32_t seen)
{
    uint32_t value;
    for (unsigned i = 0; i < KERN_SPINS; i++) {
        value = atomic_load_explicit(&g->value, memory_order_acquire);
        if (value != seen)
            return value;
        _mm_pause();
    }
    atomic_fetch_add(&g->sleepers, 1);
    while ((value = atomic_load(&g->value)) == seen)
        syscall(SYS_futex, &g->value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&g->sleepers, 1);
    return value;
}

/* -- Work ------------------------------------------------------------------------------------- */

static void sum_init(struct kern_sum *s)
{
    fixsum_init(&s->sum);
    s->finite = true;
}

static uint64_t op_chunks(const struct cpu_op *op)
{
    return (op->work.count + op->chunk - 1) / op->chunk;
}

static void run_begin(struct cpu_thread *t, const struct cpu_op *op)
{
    t->took_part = true;
    t->status = SHD_OK;
    if (op->work.sum != NULL)
        sum_init(&t->sum);
    if (op->work.change != NULL) {
        sum_init(&t->change.update);
        sum_init(&t->change.weight);
        t->change.whole = true;
    }
}

static void sum_merge(struct kern_sum *to, const struct kern_sum *part)
{
    fixsum_merge(&to->sum, &part->sum);
    to->finite = to->finite && part->finite;
}

/* What a thread has summed of the op. */
static void run_end(const struct cpu_thread *t, const struct cpu_op *op)
{
    struct kern_change *change = op->work.change;
    if (op->work.sum != NULL)
        sum_merge(op->work.sum, &t->sum);
    if (change == NULL)
        return;
    sum_merge(&change->update, &t->change.update);
    sum_merge(&change->weight, &t->change.weight);
    change->whole = change->whole && t->change.whole;
}

/* The next chunk of this thread's part, or of another's who is late. False: none is left. */
static bool take_chunk(const struct cpu_thread *self, uint64_t *ret_chunk)
{
    struct cpu_kern *k = self->kern;
    for (uint32_t i = 0; i < k->thread_count; i++) {
        struct cpu_thread *t = &k->threads[(self->index + i) % k->thread_count];
        if (atomic_load_explicit(&t->next_chunk, memory_order_relaxed) >= t->chunks_end)
            continue;
        const uint64_t at = atomic_fetch_add_explicit(&t->next_chunk, 1, memory_order_relaxed);
        if (at >= t->chunks_end)
            continue;
        *ret_chunk = at;
        return true;
    }
    return false;
}

/* Take chunks until none is left; leader and helpers. */
static void run_shared(struct cpu_thread *t, const struct cpu_op *op)
{
    run_begin(t, op);
    for (uint64_t at; take_chunk(t, &at);) {
        const uint64_t first = at * op->chunk, left = op->work.count - first;
        const struct cpu_range r = { first, op->chunk < left ? op->chunk : left };
        const int status = op->run(op, t, r);
        if (t->status == SHD_OK)
            t->status = status;
    }
}

/* The whole op on the leader. */
static void run_alone(struct cpu_thread *t, const struct cpu_op *op)
{
    run_begin(t, op);
    const uint64_t step = op->work.trail ? op->chunk : op->work.count;
    for (uint64_t first = 0; first < op->work.count && t->status == SHD_OK; first += step) {
        const uint64_t left = op->work.count - first;
        t->status = op->run(op, t, (struct cpu_range){ first, step < left ? step : left });
    }
}

/* Share an op of several chunks with the helpers; leader only. */
static void run_with_crew(struct cpu_kern *k, const struct cpu_op *op)
{
    const uint64_t chunks = op_chunks(op), wanted = chunks - 1;
    const uint32_t count = k->thread_count, helpers = count - 1;
    for (uint32_t i = 0; i < count; i++) {
        struct cpu_thread *t = &k->threads[i];
        t->took_part = false;
        atomic_store_explicit(&t->next_chunk, chunks * i / count, memory_order_relaxed);
        t->chunks_end = chunks * (i + 1) / count;
    }
    k->shared = op;
    gate_add(&k->crew, CREW_OPEN, 0);
    gate_add(&k->work, 1, (int)(wanted < helpers ? wanted : helpers));

    run_shared(&k->threads[0], op);

    uint32_t inside = gate_add(&k->crew, CREW_OPEN, 0); /* closed: the bit wraps to 0 */
    while (inside > 0)
        inside = gate_wait(&k->crew, inside);
}

/* Enter the shared op, if one is open. */
static bool crew_enter(struct cpu_kern *k)
{
    uint32_t inside = atomic_load_explicit(&k->crew.value, memory_order_relaxed);
    while ((inside & CREW_OPEN) != 0)
        if (atomic_compare_exchange_weak(&k->crew.value, &inside, inside + 1))
            return true;
    return false;
}

static void *helper_main(void *arg)
{
    struct cpu_thread *t = arg;
    struct cpu_kern *k = t->kern;
    _mm_setcsr(CPU_MXCSR);
    for (uint32_t seen = 0; !atomic_load(&k->leaving);) {
        seen = gate_wait(&k->work, seen);
        if (!crew_enter(k))
            continue;
        run_shared(t, k->shared);
        gate_add(&k->crew, UINT32_MAX, 1); /* - 1 */
    }
    return NULL;
}

/* One pass over an op; leader only. Returns the first status that is not SHD_OK. */
static int run_pass(struct cpu_kern *k, const struct cpu_op *op)
{
    const bool alone = k->thread_count == 1 || op_chunks(op) <= 1;
    if (alone)
        run_alone(&k->threads[0], op);
    else
        run_with_crew(k, op);

    int status = SHD_OK;
    for (uint32_t i = 0; i < (alone ? 1 : k->thread_count); i++) {
        const struct cpu_thread *t = &k->threads[i];
        if (!t->took_part)
            continue;
        if (status == SHD_OK)
            status = t->status;
        run_end(t, op);
    }
    return status;
}

static int run_op(struct cpu_kern *k, struct cpu_op *op)
{
    int status;
    do
        status = run_pass(k, op);
    while (status == SHD_OK && op->next != NULL && op->next(k, op));
    work_end(&op->work, status); /* the helpers' stores were ordered before by the crew's gate */
    return status;
}

static void *leader_main(void *arg)
{
    struct cpu_thread *self = arg;
    struct cpu_kern *k = self->kern;
    _mm_setcsr(CPU_MXCSR);
    uint32_t pushed = 0;
    for (uint32_t popped = 0;;) {
        while (popped == pushed)
            pushed = gate_wait(&k->pushed, pushed);
        struct cpu_op *op = &k->ring[popped % CPU_RING];
        if (op->run == NULL)
            return NULL;
        const int status = run_op(k, op);
        struct kern_done *done = op->work.done;
        atomic_store_explicit(&k->popped, ++popped, memory_order_release); /* *op is gone now */
        if (done != NULL)
            done->fn(done, status);
    }
}

/* The CPU of a thread: devices with the same mask have CPUs of their own as long as there are
 * enough. Then they share, but their leaders, which do all small work, do not begin at the same CPU
 * again: each time around the mask it is one further. */
static int pick_cpu(const struct kern_config *config, uint32_t index, cpu_set_t *ret_one,
                    struct shd_err *e)
{
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) < 0)
        return err_sys(e, SHD_EIO, "read the CPU affinity mask");
    const uint32_t count = (uint32_t)CPU_COUNT(&allowed);
    if (config->threads > count)
        return err_set(e, SHD_EINVAL, "cannot pin %" PRIu32 " threads to %" PRIu32 " CPUs",
                       config->threads, count);
    const uint64_t first = config->pin_first, wanted = (first + first / count + index) % count;
    uint32_t at = 0;
    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &allowed) || at++ != wanted)
            continue;
        CPU_ZERO(ret_one);
        CPU_SET(cpu, ret_one);
        break;
    }
    return SHD_OK;
}

static int start_thread(struct cpu_kern *k, uint32_t index, const struct kern_config *config,
                        struct shd_err *e)
{
    pthread_attr_t attr;
    int r = SHD_OK;
    int error = pthread_attr_init(&attr);
    if (error != 0)
        return err_set(e, SHD_ENOMEM, "thread attributes: %s", strerror(error));
    if (config->pin) {
        cpu_set_t one;
        r = pick_cpu(config, index, &one, e);
        if (r != SHD_OK)
            goto out;
        error = pthread_attr_setaffinity_np(&attr, sizeof one, &one);
        if (error != 0) {
            r = err_set(e, SHD_ENOMEM, "pin compute thread %" PRIu32 ": %s", index,
                        strerror(error));
            goto out;
        }
    }
    struct cpu_thread *t = &k->threads[index];
    error = sys_thread(&t->id, &attr, index == 0 ? leader_main : helper_main, t);
    if (error != 0) {
        r = err_set(e, SHD_ENOMEM, "start compute thread %" PRIu32 ": %s", index, strerror(error));
        goto out;
    }
    k->threads_started++;
    char name[16];
    snprintf(name, sizeof name, "shd-kern-%u", index % 1000);
    pthread_setname_np(t->id, name); /* for top(1); nothing is lost when it fails */
out:
    pthread_attr_destroy(&attr);
    return r;
}

int queue_start(struct cpu_kern *k, const struct kern_config *config, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t i = 0; i < k->thread_count && r == SHD_OK; i++)
        r = start_thread(k, i, config, e);
    return r;
}

/* Copy op into the ring; push_lock held. */
static void ring_put(struct cpu_kern *k, const struct cpu_op *op)
{
    const uint32_t at = atomic_load_explicit(&k->pushed.value, memory_order_relaxed);
    k->ring[at % CPU_RING] = *op;
    gate_add(&k->pushed, 1, 1);
}

int queue_push(struct cpu_kern *k, const struct cpu_op *op, struct shd_err *e)
{
    CHECK(op->run != NULL && op->chunk > 0);
    int r = SHD_OK;
    pthread_mutex_lock(&k->push_lock);
    const uint32_t queued = atomic_load_explicit(&k->pushed.value, memory_order_relaxed) -
                            atomic_load_explicit(&k->popped, memory_order_acquire);
    if (queued < KERN_QUEUE_MAX)
        ring_put(k, op);
    else
        r = err_set(e, SHD_EBUSY, "%u operations are queued on %s, the limit", KERN_QUEUE_MAX,
                    k->ops.name);
    pthread_mutex_unlock(&k->push_lock);
    return r;
}

bool queue_run(struct cpu_kern *k, struct cpu_op *op, int *ret_status)
{
    CHECK(op->run != NULL && (k->thread_count == 1 || op_chunks(op) <= 1));
    if (pthread_mutex_trylock(&k->push_lock) != 0)
        return false;
    /* With the lock, and all that was queued popped, the leader waits, and its record of the trail
     * is ours. */
    const bool idle = atomic_load_explicit(&k->pushed.value, memory_order_relaxed) ==
                      atomic_load_explicit(&k->popped, memory_order_acquire);
    if (idle) {
        const unsigned mxcsr = _mm_getcsr();
        _mm_setcsr(CPU_MXCSR);
        *ret_status = run_op(k, op);
        _mm_setcsr(mxcsr);
    }
    pthread_mutex_unlock(&k->push_lock);
    return idle;
}

void queue_stop(struct cpu_kern *k)
{
    if (k->threads_started == 0)
        return;
    pthread_mutex_lock(&k->push_lock);
    ring_put(k, &(struct cpu_op){ 0 }); /* behind all that is queued */
    pthread_mutex_unlock(&k->push_lock);
    pthread_join(k->threads[0].id, NULL);
    atomic_store(&k->leaving, true);
    gate_add(&k->work, 1, INT_MAX);
    for (uint32_t i = 1; i < k->threads_started; i++)
        pthread_join(k->threads[i].id, NULL);
}
