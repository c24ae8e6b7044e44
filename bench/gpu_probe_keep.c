/* gpu_probe keep and queued: what is left of a killed process. */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "bench/gpu_probe.h"
#include "bench/stat.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

/* -- keep ---------------------------------------------------------------------------------------
 * The maker fills a segment and hashes it; the keeper (this process, which never initialises CUDA)
 * has the descriptor alone when the maker is killed; a successor maps it and hashes again. */

struct keep {
    const struct probe_options *o;
    int sockets[2];
    int fd; /* the successor's */
    uint64_t leaves;
    _Atomic uint64_t ready;
    uint64_t free_before, free_after;
    uint8_t *hashes; /* [leaves * 32] */
};

static void hash(struct probe_device *d, const float *x, uint64_t elems, uint8_t *out)
{
    const struct kern_hash h = {
        .x = x, .elems = elems, .head_elems = 2048, .out = (uint8_t(*)[32])out
    };
    struct kern_waiter w;
    struct shd_err e;
    kern_waiter_init(&w);
    probe_check(kern_hash(d->k, &h, &w.done, &e), &e);
    CHECK(kern_wait(&w) == SHD_OK);
}

static int keep_maker(void *arg)
{
    struct keep *k = arg;
    struct probe_device d;
    struct segment s;
    struct shd_err e;
    probe_open(&d, k->o->device);
    k->free_before = probe_free_bytes(&d);
    probe_check(d.k->ops->segment_new(d.k, "probe", SEGMENT_STATE, k->o->bytes, &s, &e), &e);
    probe_fill_random(&d, s.base, k->o->bytes / 4, /* key= */ 42);
    hash(&d, s.base, k->o->bytes / 4, k->hashes);
    probe_send_fd(k->sockets[1], s.fd);
    k->ready = 1;
    while (pause() != 0)
        ; /* until it is killed */
    return 0;
}

static int keep_successor(void *arg)
{
    struct keep *k = arg;
    struct probe_device d;
    struct segment s;
    struct shd_err e;
    uint8_t *again = malloc(k->leaves * 32);
    CHECK(again != NULL);
    probe_open(&d, k->o->device);
    const uint64_t start = clock_now_ns();
    probe_check(d.k->ops->segment_map(d.k, k->fd, SEGMENT_STATE, k->o->bytes, NULL, &s, &e), &e);
    probe_figure("gpu.keep.adopt", "ms", (double)(clock_now_ns() - start) * 1e-6);
    hash(&d, s.base, k->o->bytes / 4, again);
    const bool same = memcmp(again, k->hashes, k->leaves * 32) == 0;
    d.k->ops->segment_close(d.k, &s);
    free(again);
    return same ? 0 : 1;
}

static int keep_last(void *arg)
{
    struct keep *k = arg;
    struct probe_device d;
    probe_open(&d, k->o->device);
    k->free_after = probe_free_bytes(&d);
    return 0;
}

int probe_keep(const struct probe_options *o)
{
    struct keep *k = probe_shared(sizeof *k);
    k->o = o;
    k->leaves = kern_hash_leaves(2048, o->bytes / 4);
    k->hashes = probe_shared(k->leaves * 32);
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, k->sockets) == 0);
    const pid_t maker = probe_fork(keep_maker, k);
    if (!probe_until(&k->ready, 1, maker)) {
        kill(maker, SIGKILL);
        probe_wait(maker);
        fprintf(stderr, "gpu_probe: the maker did not get ready\n");
        return 1;
    }
    k->fd = probe_receive_fd(k->sockets[0]);
    CHECK(k->fd >= 0);
    kill(maker, SIGKILL);
    probe_wait(maker);
    sleep(1); /* what tears its context down may be late */
    const int same = probe_wait(probe_fork(keep_successor, k));
    close(k->fd);
    sleep(1);
    const int last = probe_wait(probe_fork(keep_last, k));
    if (same != 0 || last != 0) {
        printf("answer: after SIGKILL the memory is %s\n", same == 1 ? "NOT what it was" : "lost");
        return 1;
    }
    const int64_t lost = (int64_t)k->free_before - (int64_t)k->free_after;
    probe_figure("gpu.keep.not_given_back", "bytes", (double)lost);
    const bool given_back = lost < (int64_t)(o->bytes / 2);
    printf("answer: %" PRIu64 " MiB intact after SIGKILL; memory %s after the last descriptor\n",
           o->bytes >> 20, given_back ? "given back" : "NOT given back");
    return given_back ? 0 : 1;
}

/* -- queued -------------------------------------------------------------------------------------
 * The victim adds 1 to every element again and again, as far ahead as a device goes; the watcher,
 * ready before, reads samples of it all the time. Both note times in shared memory. */

#define SAMPLES    64u
#define VICTIM_OPS 64u
#define KILL_AFTER 4u /* operations done */
#define SETTLE_S   2u

struct queued {
    const struct probe_options *o;
    int sockets[2]; /* victim to watcher */
    uint64_t elems;
    _Atomic uint64_t done, watching, reaped_ns, stop;
    uint64_t last_change_ns; /* the watcher's; 0: none */
    double at_reap, at_end;  /* sums of the samples */
    uint64_t looks;
    double look_us;
};

struct victim_done {
    struct kern_done done;
    struct queued *q;
};

static void victim_done(struct kern_done *done, int status)
{
    struct victim_done *v = (struct victim_done *)done; /* its first member */
    if (status != SHD_OK) {
        fprintf(stderr, "gpu_probe: an operation failed with %d\n", status);
        _exit(1);
    }
    v->q->done++;
}

static int queued_victim(void *arg)
{
    static struct victim_done done[VICTIM_OPS];
    struct queued *q = arg;
    struct probe_device d;
    struct segment s;
    struct shd_err e;
    probe_open(&d, q->o->device);
    probe_check(d.k->ops->segment_new(d.k, "probe", SEGMENT_STATE, q->elems * 4, &s, &e), &e);
    float *ones = d.k->ops->alloc(d.k, q->elems * 4);
    CHECK(ones != NULL);
    probe_fill(&d, s.base, q->elems, 0);
    probe_fill(&d, ones, q->elems, 1);
    probe_send_fd(q->sockets[1], s.fd);
    while (!q->watching)
        usleep(1000);
    for (uint32_t i = 0; i < VICTIM_OPS; i++) {
        const struct kern_accumulate a = {
            .acc = s.base, .grad = ones, .grad_dtype = SHD_F32, .elems = q->elems
        };
        done[i] = (struct victim_done){ { victim_done }, q };
        probe_check(kern_accumulate(d.k, &a, &done[i].done, &e), &e);
    }
    while (pause() != 0)
        ; /* until it is killed */
    return 0;
}

static double look(struct probe_device *d, const struct queued *q, const float *x, float *pinned)
{
    double sum = 0;
    for (uint32_t i = 0; i < SAMPLES; i++) {
        const uint64_t at = (q->elems - 1) / (SAMPLES - 1) * i;
        probe_check_cuda(d->cuda,
                         d->cuda->cuMemcpyAsync((CUdeviceptr)(uintptr_t)(pinned + i),
                                                (CUdeviceptr)(uintptr_t)(x + at), sizeof(float),
                                                d->stream),
                         "copy a sample");
    }
    probe_check_cuda(d->cuda, d->cuda->cuStreamSynchronize(d->stream), "copy samples");
    for (uint32_t i = 0; i < SAMPLES; i++)
        sum += (double)pinned[i];
    return sum;
}

static int queued_watcher(void *arg)
{
    struct queued *q = arg;
    struct probe_device d;
    struct segment s;
    struct shd_err e;
    void *pinned;
    probe_open(&d, q->o->device);
    probe_check_cuda(d.cuda, d.cuda->cuMemHostAlloc(&pinned, SAMPLES * sizeof(float), 0),
                     "cuMemHostAlloc");
    const int fd = probe_receive_fd(q->sockets[0]);
    CHECK(fd >= 0);
    probe_check(d.k->ops->segment_map(d.k, fd, SEGMENT_STATE, q->elems * 4, NULL, &s, &e), &e);
    double last = look(&d, q, s.base, pinned);
    const uint64_t start = clock_now_ns();
    bool reaped = false;
    q->watching = 1;
    while (!q->stop) {
        const bool after = q->reaped_ns != 0; /* known before this look began */
        const double sum = look(&d, q, s.base, pinned);
        q->looks++;
        if (after && !reaped) {
            reaped = true;
            q->at_reap = sum;
        }
        if (sum != last)
            q->last_change_ns = clock_now_ns();
        last = sum;
    }
    q->at_end = last;
    q->look_us = (double)(clock_now_ns() - start) * 1e-3 / (double)(q->looks > 0 ? q->looks : 1);
    return reaped ? 0 : 1;
}

static int queued_report(const struct queued *q, uint64_t done, uint64_t kill_ns)
{
    const double late = q->at_end - q->at_reap;
    const double reap_ms = (double)(q->reaped_ns - kill_ns) * 1e-6;
    const double change_ms = ((double)q->last_change_ns - (double)kill_ns) * 1e-6;
    probe_figure("gpu.queued.done_at_kill", "ops", (double)done);
    probe_figure("gpu.queued.done_at_end", "ops", q->at_end / SAMPLES);
    probe_figure("gpu.queued.reaped_after_kill", "ms", reap_ms);
    probe_figure("gpu.queued.last_change_after_kill", "ms", change_ms);
    probe_figure("gpu.queued.written_after_reap", "ops", late / SAMPLES);
    probe_figure("gpu.queued.look", "us", q->look_us);
    printf("answer: %.2f of %u operations took place, %" PRIu64 " were known done at SIGKILL; last "
           "change %.1f ms after it, exit %.1f ms after it; %s after the exit\n",
           q->at_end / SAMPLES, VICTIM_OPS, done, change_ms, reap_ms,
           late == 0 ? "nothing was written" : "the device still WROTE");
    return late == 0 ? 0 : 1;
}

int probe_queued(const struct probe_options *o)
{
    struct queued *q = probe_shared(sizeof *q);
    q->o = o;
    q->elems = o->bytes / 4;
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, q->sockets) == 0);
    const pid_t watcher = probe_fork(queued_watcher, q);
    const pid_t victim = probe_fork(queued_victim, q);
    const bool ready = probe_until(&q->watching, 1, watcher) &&
                       probe_until(&q->done, KILL_AFTER, victim);
    const uint64_t kill_ns = clock_now_ns(), done = q->done;
    kill(victim, SIGKILL);
    probe_wait(victim);
    q->reaped_ns = clock_now_ns();
    sleep(ready ? SETTLE_S : 0);
    q->stop = 1;
    if (!ready)
        kill(watcher, SIGKILL);
    const int code = probe_wait(watcher);
    if (!ready || code != 0) {
        fprintf(stderr, "gpu_probe: %s\n", ready ? "the watcher failed" : "nothing was done");
        return 1;
    }
    return queued_report(q, done, kill_ns);
}
