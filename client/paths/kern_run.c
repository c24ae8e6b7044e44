/* See kern_run.h. */
#include "client/paths/kern_run.h"

#include <limits.h>
#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/runs.h"

static int finish(struct kern *k, struct kern_waiter *w, const char *what, struct shd_err *e)
{
    const int r = kern_wait(w);
    return r == SHD_OK ? SHD_OK : kern_explain(k, r, e, what);
}

int kern_run_fill(struct kern *k, const struct kern_fill *a, struct shd_err *e)
{
    struct kern_waiter w;
    kern_waiter_init(&w);
    const int r = k->ops->fill(k, a, &w.done, e);
    return r == SHD_OK ? finish(k, &w, "fill", e) : r;
}

static struct kern_fill zeros(float *x, uint64_t elems)
{
    return (struct kern_fill){ .out = x, .elems = elems, .kind = KERN_FILL_CONST };
}

int kern_run_zero(struct kern *k, float *x, uint64_t elems, struct shd_err *e)
{
    const struct kern_fill a = zeros(x, elems);
    return kern_run_fill(k, &a, e);
}

int kern_run_cast(struct kern *k, const struct kern_cast *a, struct shd_err *e)
{
    struct kern_waiter w;
    kern_waiter_init(&w);
    const int r = k->ops->cast(k, a, &w.done, e);
    return r == SHD_OK ? finish(k, &w, "cast", e) : r;
}

int kern_run_hash(struct kern *k, const struct kern_hash *a, struct shd_err *e)
{
    struct kern_waiter w;
    kern_waiter_init(&w);
    const int r = k->ops->hash(k, a, &w.done, e);
    return r == SHD_OK ? finish(k, &w, "hash", e) : r;
}

int kern_run_accumulate(struct kern *k, const struct kern_accumulate *a, struct shd_err *e)
{
    struct kern_waiter w;
    kern_waiter_init(&w);
    const int r = k->ops->accumulate(k, a, &w.done, e);
    return r == SHD_OK ? finish(k, &w, "accumulate", e) : r;
}

int kern_run_sumsq(struct kern *k, const struct kern_sumsq *a, struct shd_err *e)
{
    struct kern_waiter w;
    kern_waiter_init(&w);
    const int r = k->ops->sumsq(k, a, &w.done, e);
    return r == SHD_OK ? finish(k, &w, "sumsq", e) : r;
}

int kern_run_update(struct kern *k, const struct kern_update *a, struct shd_err *e)
{
    struct kern_waiter w;
    kern_waiter_init(&w);
    const int r = k->ops->update(k, a, &w.done, e);
    return r == SHD_OK ? finish(k, &w, "update", e) : r;
}

/* -- Several ----------------------------------------------------------------------------------- */

static void batch_done(struct kern_done *done, int status)
{
    struct kern_batch *b = (struct kern_batch *)(void *)((char *)done -
                                                         offsetof(struct kern_batch, done));
    uint32_t *word = &b->pending;
    int ok = SHD_OK;
    if (status != SHD_OK)
        __atomic_compare_exchange_n(&b->status, &ok, status, /* weak= */ false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED);
    if (__atomic_sub_fetch(word, 1, __ATOMIC_ACQ_REL) == 0) /* *b may be gone from here on */
        syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void kern_batch_init(struct kern_batch *b)
{
    *b = (struct kern_batch){ .done = { batch_done }, .status = SHD_OK };
}

static void wait_all(struct kern_batch *b)
{
    uint32_t pending;
    while ((pending = __atomic_load_n(&b->pending, __ATOMIC_ACQUIRE)) > 0)
        syscall(SYS_futex, &b->pending, FUTEX_WAIT_PRIVATE, pending, NULL, NULL, 0);
}

static void begin(struct kern_batch *b, struct kern *k)
{
    b->kern = k;
    __atomic_add_fetch(&b->pending, 1, __ATOMIC_RELAXED);
}

/* r: what queueing one more came to. True: the queue was full and has room now, try again. */
static bool queue_again(struct kern_batch *b, int r)
{
    if (r == SHD_OK)
        return false;
    const bool others = __atomic_sub_fetch(&b->pending, 1, __ATOMIC_ACQ_REL) > 0;
    if (r != SHD_EBUSY || !others)
        return false;
    wait_all(b);
    return true;
}

int kern_batch_copy(struct kern_batch *b, struct kern *k, const struct kern_copy *a,
                    struct shd_err *e)
{
    int r;
    do {
        begin(b, k);
        r = k->ops->copy(k, a, &b->done, e);
    } while (queue_again(b, r));
    return r;
}

int kern_batch_cast(struct kern_batch *b, struct kern *k, const struct kern_cast *a,
                    struct shd_err *e)
{
    int r;
    do {
        begin(b, k);
        r = k->ops->cast(k, a, &b->done, e);
    } while (queue_again(b, r));
    return r;
}

int kern_batch_zero(struct kern_batch *b, struct kern *k, float *x, uint64_t elems,
                    struct shd_err *e)
{
    const struct kern_fill a = zeros(x, elems);
    int r;
    do {
        begin(b, k);
        r = k->ops->fill(k, &a, &b->done, e);
    } while (queue_again(b, r));
    return r;
}

int kern_batch_wait(struct kern_batch *b, struct shd_err *e)
{
    wait_all(b);
    const int r = __atomic_exchange_n(&b->status, SHD_OK, __ATOMIC_RELAXED);
    return r == SHD_OK ? SHD_OK : kern_explain(b->kern, r, e, "work of the device");
}
