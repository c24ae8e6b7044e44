/* See kern_run.h. */
#include "client/paths/kern_run.h"

#include <limits.h>
#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/runs.h"

int kern_run_op(struct kern *k, const struct kern_op *op, struct shd_err *e)
{
    static const char *const names[] = {
#define OP_NAME(NAME, name) [KERN_##NAME] = #name,
        KERN_OPS(OP_NAME)
#undef OP_NAME
    };
    struct kern_waiter w;
    kern_waiter_init(&w);
    int r = k->ops->submit(k, op, &w.done, e);
    if (r != SHD_OK)
        return r;
    r = kern_wait(&w);
    return r == SHD_OK ? SHD_OK : kern_explain(k, r, e, names[op->kind]);
}

struct kern_op kern_zero(float *x, uint64_t elems)
{
    return (struct kern_op){ KERN_FILL,
                             { .fill = { .out = x, .elems = elems, .kind = KERN_FILL_CONST } } };
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

int kern_batch_add(struct kern_batch *b, struct kern *k, const struct kern_op *op,
                   struct shd_err *e)
{
    int r;
    do {
        begin(b, k);
        r = k->ops->submit(k, op, &b->done, e);
    } while (queue_again(b, r));
    return r;
}

int kern_batch_wait(struct kern_batch *b, struct shd_err *e)
{
    wait_all(b);
    const int r = __atomic_exchange_n(&b->status, SHD_OK, __ATOMIC_RELAXED);
    return r == SHD_OK ? SHD_OK : kern_explain(b->kern, r, e, "work of the device");
}
