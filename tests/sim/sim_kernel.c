/* The kernels of a simulated daemon: in order, block by block, with the trail that a successor goes
 * on from; see sim.h. */
#include "tests/sim/sim.h"

static void kernel_next(struct sim *s, struct sim_daemon *d)
{
    if (d->kernel_first < d->kernel_last)
        sim_daemon_after(s, d, 5 * US + sim_below(s, s->config.kernel_ns), EV_KERNEL,
                         d->kernel_first);
}

void sim_kernel_queue(struct sim *s, struct sim_daemon *d, const struct step_action *a)
{
    CHECK(d->kernel_last - d->kernel_done < SIM_KERNELS);
    struct sim_kernel *k = &d->kernels[d->kernel_last % SIM_KERNELS];
    const uint32_t owner = sim_daemon_index(s, d);
    *k = (struct sim_kernel){ .action = *a,
                              .step = step_collecting(d->core),
                              .block = sim_first_block(s, owner, a->unit),
                              .end = sim_first_block(s, owner + 1, a->unit) };
    if (a->kind == STEP_DO_ACCUMULATE || a->kind == STEP_DO_APPLY) {
        k->done = step_done_word(d->core, a);
        k->op = k->done.op;
    }
    if (a->kind == STEP_DO_ACCUMULATE) {
        const struct sim_op *op = &d->ops[a->ref];
        k->grad = a->ref == 0 ? &d->spill[a->unit][a->micro]
                              : &d->sessions[op->seat].slot[op->slot];
        k->summing = a->last;
    } else if (a->kind == STEP_DO_APPLY) {
        const struct decision *dec = &step_record(d->core)->decision;
        const struct decision w = { dec->skip, dec->scale, dec->lr, dec->loss_scale,
                                    dec->good_steps };
        k->decision = sim_decision_hash(&w);
        if (a->skip)
            k->block = k->end;
    } else {
        k->summing = true;
        if (a->kind == STEP_DO_SUM)
            k->block = k->end;
    }
    if (d->kernel_last++ == d->kernel_first)
        kernel_next(s, d);
}

/* One block, with its trail: what was killed between two of them goes on behind the first. */
static void kernel_block(struct sim_daemon *d, const struct sim_kernel *k, uint32_t b)
{
    const uint32_t u = k->action.unit;
    uint64_t *acc = &d->acc[u][b], *word = &d->word[u][b];
    if (k->action.kind == STEP_DO_ZERO) {
        *acc = 0;
        return;
    }
    if (*word == k->op)
        return;
    if (k->action.kind == STEP_DO_ACCUMULATE)
        *acc = sim_add(*acc, k->action.first, *k->grad, b);
    else
        d->param[u][b] = sim_update(d->param[u][b], k->decision, *acc);
    *word = k->op;
}

static void kernel_store_done(const struct sim_kernel *k)
{
    if (k->done.word == NULL || SIM_BUG(10))
        return;
    FAIL_POINT("sim:done:before");
    atomic_store_explicit(k->done.word, k->done.value, memory_order_release);
    FAIL_POINT("sim:done:after");
}

static void kernel_check(struct sim *s, struct sim_daemon *d, const struct sim_kernel *k)
{
    const struct step_action *a = &k->action;
    if (a->kind == STEP_DO_APPLY)
        sim_check_params(s, d, a->unit, k->done.value);
    else
        sim_check_sum(s, d, a->unit, k->step,
                      a->kind == STEP_DO_ACCUMULATE ? a->micro + 1 : s->config.micros);
}

void sim_kernel_event(struct sim *s, struct sim_daemon *d)
{
    struct sim_kernel *k = &d->kernels[d->kernel_first % SIM_KERNELS];
    if (k->block < k->end) {
        FAIL_POINT("sim:block:before");
        if (SIM_BUG(1) && k->block + 1 == k->end)
            kernel_store_done(k);
        kernel_block(d, k, k->block++);
        FAIL_POINT("sim:block:after");
    }
    if (k->block < k->end) {
        kernel_next(s, d);
        return;
    }
    if (!SIM_BUG(1))
        kernel_store_done(k);
    kernel_check(s, d, k);
    sim_daemon_after(s, d, US + sim_below(s, 50 * US), EV_KERNEL_DONE, d->kernel_first);
    d->kernel_first++;
    kernel_next(s, d);
}
