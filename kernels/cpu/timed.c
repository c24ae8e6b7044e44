/* See timed.h. */
#include "kernels/cpu/timed.h"

#include <stdio.h>
#include <sys/resource.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"

/* The set that is worth a try beside the widest. Plain C never is: without the processor's fused
 * multiply and add it takes many times as long. */
static const struct cpu_isa *isa_beside(const struct cpu_isa *widest)
{
    return widest == &cpu_isa_avx512 ? &cpu_isa_avx2 : NULL;
}

int timed_init(struct timed *t, const char *isa, struct shd_err *e)
{
    const int r = cpu_isa_find(isa, &t->isa[CHOICE_WIDEST], e);
    if (r == SHD_OK && isa == NULL)
        t->isa[CHOICE_OTHER] = isa_beside(t->isa[CHOICE_WIDEST]);
    return r;
}

/* First touches of pages and times that the scheduler took the processor away, so far. */
static uint64_t disturbances(void)
{
    struct rusage u;
    if (getrusage(RUSAGE_THREAD, &u) != 0)
        return 0;
    return (uint64_t)u.ru_minflt + (uint64_t)u.ru_majflt + (uint64_t)u.ru_nivcsw;
}

/* choice[] is touched by the leader alone, or in its place while it has nothing to do. */
void timed_turn(struct timed *t, struct timed_range *r)
{
    CHECK(r->work < TIMED_WORKS);
    if (choice_over(&t->choice[r->work]))
        return;
    r->isa = t->isa[choice_turn(&t->choice[r->work])];
    r->counts = true;
    r->disturbances = disturbances();
    r->start_ns = clock_now_ns();
}

/* As people call it: "adamw bf16" for an update that publishes so, "adamw int8 bf16", "accumulate
 * f32 first sum". */
static void name_work(uint32_t work, char name[KERN_CHOICE_NAME_BYTES])
{
    if (work < TIMED_UPDATES) {
        const struct spec_optimizer_row *row =
            &spec_optimizer_rows[SPEC_ADAMW + work % TIMED_KINDS / TIMED_DTYPES];
        snprintf(name, KERN_CHOICE_NAME_BYTES, "%s%s%s %s", row->kind,
                 row->in_torch_order ? " torch" : "", work < TIMED_KINDS ? "" : " int8",
                 dtype_name((enum shd_dtype)(SHD_F32 + work % TIMED_DTYPES)));
        return;
    }
    const uint32_t how = (work - TIMED_UPDATES) % 4;
    snprintf(name, KERN_CHOICE_NAME_BYTES, "accumulate %s%s%s",
             dtype_name((enum shd_dtype)(SHD_F32 + (work - TIMED_UPDATES) / 4)),
             (how & 2) != 0 ? " first" : "", (how & 1) != 0 ? " sum" : "");
}

/* All is timed: go by it from here on, and tell. */
static void settle(struct timed *t, uint32_t work)
{
    struct choice_verdict v;
    if (!choice_judge(&t->choice[work], &v))
        return;
    atomic_store_explicit(&t->taken[work], (uint8_t)v.taken, memory_order_relaxed);
    const enum choice_side not = v.taken == CHOICE_WIDEST ? CHOICE_OTHER : CHOICE_WIDEST;
    const uint32_t at = atomic_load_explicit(&t->made_count, memory_order_relaxed);
    struct kern_choice *made = &t->made[at];
    *made = (struct kern_choice){
        .isa = t->isa[v.taken]->name,
        .other = t->isa[not ]->name,
        .isa_ns = v.ns[v.taken] / (double)KERN_CHUNK_ELEMS,
        .other_ns = v.ns[not ] / (double)KERN_CHUNK_ELEMS,
        .ratio = v.taken == CHOICE_OTHER || !(v.ratio > 0) ? v.ratio : 1 / v.ratio,
    };
    name_work(work, made->work);
    atomic_store_explicit(&t->made_count, at + 1, memory_order_release);
}

void timed_take(struct timed *t, const struct timed_range *r)
{
    const uint64_t ns = clock_now_ns() - r->start_ns;
    struct choice *c = &t->choice[r->work];
    if (disturbances() == r->disturbances)
        choice_add(c, ns);
    else
        choice_spoil(c);
    if (choice_over(c))
        settle(t, r->work);
}
