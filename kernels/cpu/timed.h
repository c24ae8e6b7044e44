/* The instruction set by which a device does each kind of work: the widest one, until another was
 * found to be quicker here (choice.h). The first whole chunks that the leader does, or a
 * caller in its place, are timed, by turns with the one and the other: no work is done for it, and
 * nothing waits for it. Every set gives the same bits and leaves the same trail, so that one may
 * begin what another ends.
 *
 * A chunk counts that nothing has disturbed: no page was touched for the first time, and nobody
 * else was given the processor meanwhile. What a wide set does to the clock of the code that comes
 * after it is not seen by this.
 */
#ifndef SHD_KERNELS_CPU_TIMED_H
#define SHD_KERNELS_CPU_TIMED_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "kernels/cpu/choice.h"
#include "kernels/cpu/isa.h"

/* Kinds of work: updates by optimizer, published dtype and bits of moments; accumulates by dtype,
 * first, sum. What is seldom done (fill, cast, sums alone) is not timed. */
#define TIMED_DTYPES  3u
#define TIMED_KINDS   (SPEC_OPTIMIZERS_ALL * TIMED_DTYPES) /* moments in fp32; then in 8 bits */
#define TIMED_UPDATES (2 * TIMED_KINDS)
#define TIMED_WORKS   (TIMED_UPDATES + TIMED_DTYPES * 4u)

struct timed {
    const struct cpu_isa *isa[CHOICE_SIDES]; /* OTHER: NULL where there is no choice */
    _Atomic uint8_t taken[TIMED_WORKS];      /* enum choice_side */
    struct choice choice[TIMED_WORKS];       /* the leader's */
    struct kern_choice made[TIMED_WORKS];    /* [made_count]; these do not change any more */
    _Atomic uint32_t made_count;
};

/* One range being done. */
struct timed_range {
    const struct cpu_isa *isa; /* do it by this one */
    uint32_t work;
    bool counts;
    uint64_t disturbances, start_ns;
};

/* t is zero. isa: the one to use for everything; NULL: choose among those here. SHD_EINVAL,
 * SHD_ENOTSUP: as cpu_isa_find(). */
int timed_init(struct timed *t, const char *isa, struct shd_err *e);

/* A whole chunk of the leader's, while the work may be timed: by the set whose turn it is. And it
 * is done. */
void timed_turn(struct timed *t, struct timed_range *r);
void timed_take(struct timed *t, const struct timed_range *r);

/* elems of work r.work are about to be done. leader: on its thread, or in its place. Here, for most
 * have nothing to do with timing. */
static inline struct timed_range timed_begin(struct timed *t, uint32_t work, bool leader,
                                             uint64_t elems)
{
    const uint8_t taken = atomic_load_explicit(&t->taken[work], memory_order_relaxed);
    struct timed_range r = { .isa = t->isa[taken], .work = work };
    if (leader && elems == KERN_CHUNK_ELEMS && t->isa[CHOICE_OTHER] != NULL)
        timed_turn(t, &r);
    return r;
}

/* What is not published is timed, and called, as fp32: a model has no update of both kinds. */
static inline uint32_t timed_dtype(enum shd_dtype dtype)
{
    return dtype != 0 ? (uint32_t)dtype - SHD_F32 : 0;
}

static inline struct timed_range timed_update(struct timed *t, const struct kern_update *a,
                                              bool leader, uint64_t elems)
{
    const uint32_t kind = (uint32_t)a->kind - SPEC_ADAMW;
    const uint32_t work = kind * TIMED_DTYPES + timed_dtype(a->publish_dtype);
    return timed_begin(t, a->int8 ? TIMED_KINDS + work : work, leader, elems);
}

static inline struct timed_range timed_accumulate(struct timed *t, const struct kern_accumulate *a,
                                                  bool leader, uint64_t elems)
{
    const uint32_t how = (a->first ? 2u : 0u) + (a->sum != NULL ? 1u : 0u);
    return timed_begin(t, TIMED_UPDATES + timed_dtype(a->grad_dtype) * 4 + how, leader, elems);
}

static inline void timed_end(struct timed *t, const struct timed_range *r)
{
    if (r->counts)
        timed_take(t, r);
}

#endif
