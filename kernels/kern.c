/* See kern.h. */
#include "kernels/kern.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <math.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "proto/spec/layout.h"

uint64_t kern_trail_chunks(uint64_t elems)
{
    return elems / KERN_CHUNK_ELEMS + (elems % KERN_CHUNK_ELEMS != 0);
}

uint64_t kern_hash_leaves(uint64_t head_elems, uint64_t elems)
{
    if (elems <= head_elems)
        return 1;
    return 1 + (elems - head_elems + SHD_BLOCK_ELEMS - 1) / SHD_BLOCK_ELEMS;
}

static void waiter_done(struct kern_done *done, int status)
{
    struct kern_waiter *w = (struct kern_waiter *)(void *)((char *)done -
                                                           offsetof(struct kern_waiter, done));
    uint32_t *word = &w->state;
    w->status = status;
    __atomic_store_n(word, 1, __ATOMIC_RELEASE);
    /* From here on *w may be gone: waking a stale address is harmless, reading it is not. */
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

void kern_waiter_init(struct kern_waiter *w)
{
    *w = (struct kern_waiter){ .done = { waiter_done } };
}

int kern_wait(struct kern_waiter *w)
{
    for (unsigned i = 0; i < KERN_SPINS; i++) {
        if (__atomic_load_n(&w->state, __ATOMIC_ACQUIRE) != 0)
            return w->status;
        _mm_pause();
    }
    while (__atomic_load_n(&w->state, __ATOMIC_ACQUIRE) == 0)
        syscall(SYS_futex, &w->state, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0);
    return w->status;
}

int kern_explain(struct kern *k, int status, struct shd_err *e, const char *what)
{
    struct shd_err why;
    if (!k->ops->failed(k, &why))
        return err_set(e, status, "%s failed: %s", what, status_meaning(status));
    return err_set(e, status, "%s failed: %s", what, why.text);
}

struct kern_rates kern_muon_rates(const struct kern_muon *h, double ratio)
{
    return (struct kern_rates){ .scale = 1, .keep = h->keep, .rate = (float)-(h->lr * ratio) };
}

struct kern_rates kern_rates_of(enum spec_optimizer kind, const struct kern_hyper *h,
                                float grad_scale)
{
    if (spec_optimizer_rows[kind].in_torch_order || kind == SPEC_MUON || kind == SPEC_ADAFACTOR) {
        struct kern_rates t = h->torch;
        t.scale = grad_scale;
        return t;
    }
    struct kern_rates c = {
        .scale = grad_scale,
        .keep = (float)(1 - (double)h->lr * (double)h->weight_decay),
        .rate = h->lr,
        .beta1 = h->beta1,
        .rest1 = (float)(1 - (double)h->beta1),
        .beta2 = h->beta2,
        .rest2 = (float)(1 - (double)h->beta2),
        .eps = h->eps,
    };
    if (kind == SPEC_LAMB) {
        c.rate = (float)(1 / (double)h->bias1);
        c.decay = h->weight_decay;
        c.unbias = (float)(1 / sqrt((double)h->bias2));
    }
    if (kind == SPEC_ADAMW) {
        c.rate = (float)((double)h->lr / (double)h->bias1);
        c.unbias = (float)(1 / sqrt((double)h->bias2));
    }
    return c;
}
