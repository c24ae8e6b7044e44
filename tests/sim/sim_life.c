/* A simulated daemon begins, ends, and begins again on what its predecessor left; see sim.h. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core/ledger_guard.h"
#include "daemon/core/ledger_rewind.h"
#include "daemon/core/ledger_set.h"
#include "daemon/core/step_guard.h"
#include "daemon/core/step_init.h"
#include "tests/sim/sim.h"
#include "tests/sim/sim_guest.h"

#define CORE_BYTES  ((size_t)16384)
#define LEASE_BYTES ((size_t)128 << 10)

void sim_daemon_wipe(struct sim *s, struct sim_daemon *d)
{
    d->fresh = true;
    d->commits_seen = 0;
    d->lost_gen = d->gen;
    s->kept_lost = true;
}

static void make_fresh(struct sim *s, struct sim_daemon *d)
{
    const uint32_t owner = sim_owner_index(s, d);
    const struct ledger_shape shape = { .name = "m",
                                        .spec = "{}",
                                        .spec_bytes = 2,
                                        .owner = owner,
                                        .owners = s->config.daemons,
                                        .units = s->config.units,
                                        .micros = s->config.micros,
                                        .history_slots = sim_guard(s) != NULL ? SIM_HISTORY : 0,
                                        .window = step_guard_shape(sim_guard(s), owner) };
    struct shd_err e;
    uint64_t bytes;
    CHECK(ledger_bytes(&shape, &bytes, &e) == SHD_OK);
    if (d->ledger_memory == NULL)
        d->ledger_memory = aligned_alloc(128, bytes);
    CHECK(d->ledger_memory != NULL);
    d->ledger_bytes = bytes;
    /* Blobs and spec lie behind what matters: zeroing all of it would be most of a run's time. */
    memset(d->ledger_memory, 0, bytes - 2 * LEDGER_BLOB_BYTES);
    ledger_init(&d->ledger, d->ledger_memory, &shape);
    uint8_t *behind = (uint8_t *)d->ledger.more, *end = (uint8_t *)d->ledger_memory + bytes;
    memset(behind, 0, (size_t)(end - behind));
    memset(&d->back, 0, sizeof d->back);
    d->instance++;
    d->put = 0;
    memset(d->ledger.history, 0, shape.history_slots * sizeof *d->ledger.history);
    memset(d->board, 0, sizeof d->board);
    memset(d->word, 0, sizeof d->word);
    memset(d->acc, 0, sizeof d->acc);
    memset(d->credited, 0, sizeof d->credited);
    for (uint32_t u = 0; u < SIM_UNITS; u++)
        for (uint32_t b = 0; b < SIM_BLOCKS; b++)
            d->param[u][b] = sim_mix(u, b);
    atomic_store(&d->ledger.head->ready, 1);
    d->fresh = false;
}

static void check_adopted(struct sim *s, struct sim_daemon *d)
{
    const uint64_t commits = atomic_load(&d->ledger.head->commits);
    const struct step_blob blob = step_last_blob(d->core);
    uint64_t held = 0;
    if (commits < d->commits_seen)
        sim_broken(s, "P3", sim_daemon_index(s, d), SIM_NOBODY,
                   "%llu commits came back, %llu were acknowledged", (unsigned long long)commits,
                   (unsigned long long)d->commits_seen);
    if (commits > d->commits_seen)
        sim_check_decision(s, d, commits - 1, &step_record(d->core)->decision);
    if (blob.bytes == sizeof held)
        memcpy(&held, blob.data, sizeof held);
    if (commits > 0 && held != sim_mix(commits - 1, 77))
        sim_broken(s, "P3", sim_daemon_index(s, d), SIM_NOBODY, "the blob of step %llu is gone",
                   (unsigned long long)commits - 1);
    sim_check_credited(s, d);
}

void sim_daemon_core(struct sim *s, struct sim_daemon *d)
{
    struct shd_err e = { 0 };
    d->core = step_init(d->core_memory, &d->ledger, s->frozen);
    step_guard(d->core, sim_guard(s));
    for (uint32_t u = 0; u < s->config.units; u++)
        if (s->skips_idle[u])
            step_skips_idle(d->core, u);
    for (uint32_t u = 0; u < s->config.units; u++)
        if (s->means[u])
            step_means(d->core, u);
    if (step_ramp(d->core, s->config.ramp ? &s->ramp : NULL, /* accumulate= */ 1, &e) != SHD_OK)
        sim_broken(s, "P3", sim_daemon_index(s, d), SIM_NOBODY, "the ledger is refused: %s",
                   e.text);
    d->lease = lease_init(d->lease_memory, s->config.micros,
                          d->adopted || sim_owner_index(s, d) > 0);
    sim_verify_start(s, d, !d->adopted);
}

void sim_daemon_start(struct sim *s, struct sim_daemon *d)
{
    struct shd_err e = { 0 };
    const bool fresh = d->fresh || d->ledger_memory == NULL;
    sim_note(s, "daemon starts", sim_daemon_index(s, d), SIM_NOBODY, 0, 0, 0);
    d->alive = true;
    if (d->core_memory == NULL) {
        d->core_memory = aligned_alloc(16, CORE_BYTES);
        d->lease_memory = aligned_alloc(16, LEASE_BYTES);
        CHECK(d->core_memory != NULL && d->lease_memory != NULL);
        CHECK(step_bytes(SIM_UNITS, SIM_MICROS) <= CORE_BYTES &&
              lease_bytes(SIM_MICROS) <= LEASE_BYTES);
    }
    if (fresh)
        make_fresh(s, d);
    else if (ledger_adopt(&d->ledger, d->ledger_memory, d->ledger_bytes, &e) != SHD_OK)
        sim_broken(s, "P3", sim_daemon_index(s, d), SIM_NOBODY, "the ledger is refused: %s",
                   e.text);
    d->adopted = !fresh;
    sim_back_start(s, d);
    sim_daemon_core(s, d);
    sim_back_started(s, d);
    check_adopted(s, d);
    for (uint32_t u = 0; u < s->config.units; u++)
        d->board[u] = atomic_load(&d->ledger.unit[u].version);
    d->board_attempt = step_attempt(d->core);
    sim_host_start(s, d);
    for (uint32_t u = 0; u < s->config.units; u++) {
        struct step_actions actions;
        FAIL_POINT("sim:resume");
        step_resume(d->core, u, &actions);
        sim_daemon_take(s, d, &actions);
    }
}

void sim_session_clear(struct sim_session *ses)
{
    memset(ses, 0, offsetof(struct sim_session, waits));
    ses->wait_count = 0;
}

void sim_daemon_kill(struct sim *s, struct sim_daemon *d)
{
    const uint32_t i = sim_daemon_index(s, d);
    sim_note(s, "daemon killed", i, SIM_NOBODY, 0, 0, 0);
    sim_host_kill(s, d);
    sim_back_kill(d);
    for (uint32_t k = 0; k < SIM_SESSIONS; k++) {
        replies_free(d->sessions[k].replies);
        sim_session_clear(&d->sessions[k]);
    }
    memset(d->ops, 0, sizeof d->ops);
    memset(d->summed, 0, sizeof d->summed);
    d->kernel_first = d->kernel_done = d->kernel_last = 0;
    d->alive = false;
    d->view = 0;
    d->held = 0;
    d->stalled_until_ns = 0;
    for (uint32_t w = 0; w < s->config.workers; w++) {
        const struct sim_msg msg = { .daemon = i,
                                     .worker = w,
                                     .daemon_gen = d->gen,
                                     .worker_gen = s->worker[w].gen,
                                     .reply = { .kind = SIM_HANGUP } };
        if (s->worker[w].alive)
            sim_send(s, &msg);
    }
    d->gen++;
    sim_daemon_after(s, d, MS + sim_below(s, sim_chance(s, 500) ? 10 * MS : 200 * MS),
                     EV_START_DAEMON, 0);
    s->result.kills++;
}

void sim_daemon_deinit(struct sim_daemon *d)
{
    for (uint32_t k = 0; k < SIM_SESSIONS; k++)
        replies_free(d->sessions[k].replies);
    free(d->ledger_memory);
    free(d->core_memory);
    free(d->lease_memory);
    free(d->verify_memory);
}

/* The kernels of a simulated daemon: in order, block by block, with the trail that a successor goes
 * on from; see sim.h. */

static void kernel_next(struct sim *s, struct sim_daemon *d)
{
    if (d->kernel_first < d->kernel_last)
        sim_daemon_after(s, d, 5 * US + sim_below(s, s->config.kernel_ns), EV_KERNEL,
                         d->kernel_first);
}

void sim_kernel_queue(struct sim *s, struct sim_daemon *d, const struct step_action *a)
{
    if (a->kind == STEP_DO_APPLY)
        sim_pins_before_update(s, d, a->unit);
    CHECK(d->kernel_last - d->kernel_done < SIM_KERNELS);
    struct sim_kernel *k = &d->kernels[d->kernel_last % SIM_KERNELS];
    const uint32_t owner = sim_owner_index(s, d);
    *k = (struct sim_kernel){ .action = *a,
                              .step = step_collecting(d->core),
                              .round = a->round,
                              .block = sim_first_block(s, owner, a->unit),
                              .end = sim_first_block(s, owner + 1, a->unit) };
    if (a->kind == STEP_DO_ACCUMULATE || a->kind == STEP_DO_APPLY) {
        k->done = a->done;
        k->op = k->done.op;
    }
    if (a->kind == STEP_DO_ACCUMULATE) {
        const struct sim_op *op = &d->ops[a->ref];
        k->grad = a->ref == 0 ? &d->spill[a->unit][a->micro]
                              : &d->sessions[op->seat].slot[op->slot];
        k->summing = a->last;
    } else if (a->kind == STEP_DO_APPLY) {
        k->decision = sim_mix(sim_decision_hash(&step_record(d->core)->decision), a->updates);
        k->put = a->put ? step_record(d->core)->decision.put : 0;
        if (a->skip || (a->put && !sim_put_has(k->put, a->unit)))
            k->block = k->end;
    } else {
        k->summing = true;
        if (a->kind == STEP_DO_SUM)
            k->block = k->end;
    }
    if (d->kernel_last++ == d->kernel_first)
        kernel_next(s, d);
}

void sim_kernel_copy(struct sim *s, struct sim_daemon *d, uint64_t *to, struct sim_copy copy,
                     uint32_t first, uint32_t end)
{
    CHECK(d->kernel_last - d->kernel_done < SIM_KERNELS);
    d->kernels[d->kernel_last % SIM_KERNELS] = (struct sim_kernel){
        .copy_to = to, .copy = copy, .block = first, .end = end
    };
    if (d->kernel_last++ == d->kernel_first)
        kernel_next(s, d);
}

uint64_t *sim_flat_param(const struct sim *s, struct sim_daemon *d, uint32_t flat)
{
    const uint32_t owner = sim_owner_index(s, d);
    uint32_t left = flat;
    for (uint32_t u = 0; u < s->config.units; u++) {
        const uint32_t first = sim_first_block(s, owner, u);
        const uint32_t count = sim_first_block(s, owner + 1, u) - first;
        if (left < count)
            return &d->param[u][first + left];
        left -= count;
    }
    CHECK(false); /* past the end */
    return NULL;
}

static void copy_block(const struct sim *s, struct sim_daemon *d, const struct sim_kernel *k,
                       uint32_t flat)
{
    uint64_t *param = sim_flat_param(s, d, flat);
    if (k->copy.what == SIM_COPY_BACK)
        *param = k->copy_to[flat];
    else
        k->copy_to[flat] = *param;
}

/* One block, with its trail: what was killed between two of them goes on behind the first. */
static void kernel_block(const struct sim *s, struct sim_daemon *d, const struct sim_kernel *k,
                         uint32_t b)
{
    if (k->copy_to != NULL) {
        copy_block(s, d, k, b);
        return;
    }
    const uint32_t u = k->action.unit;
    uint64_t *acc = &d->acc[u][b], *word = &d->word[u][b];
    if (k->action.kind == STEP_DO_ZERO) {
        *acc = 0;
        return;
    }
    if (k->put != 0) { /* can be done again: no trail */
        d->param[u][b] = sim_put_value(k->put, u, b);
        return;
    }
    if (*word == k->op)
        return;
    if (k->action.kind == STEP_DO_ACCUMULATE)
        *acc = sim_add(*acc, k->action.first, *k->grad, b);
    else if (s->means[u])
        d->param[u][b] = sim_mean(*acc, k->action.took);
    else
        d->param[u][b] = sim_update(d->param[u][b], k->decision, *acc);
    *word = k->op;
}

static void kernel_store_done(const struct sim_kernel *k)
{
    if (k->copy_to != NULL || k->done.word == NULL || SIM_BUG(10))
        return;
    FAIL_POINT("sim:done:before");
    atomic_store_explicit(k->done.word, k->done.value, memory_order_release);
    FAIL_POINT("sim:done:after");
}

static void kernel_check(struct sim *s, struct sim_daemon *d, const struct sim_kernel *k)
{
    const struct step_action *a = &k->action;
    if (k->copy_to != NULL)
        return;
    if (a->kind == STEP_DO_APPLY)
        sim_check_params(s, d, a->unit, k->done.value);
    else if (k->round == ledger_round(&d->ledger) && !s->spoilt[k->round])
        sim_check_sum(s, d, a->unit, k->step,
                      a->kind == STEP_DO_ACCUMULATE ? a->micro + 1
                                                    : sim_micros(s, sim_line_of(s, d), k->step));
}

void sim_kernel_event(struct sim *s, struct sim_daemon *d)
{
    struct sim_kernel *k = &d->kernels[d->kernel_first % SIM_KERNELS];
    if (k->block < k->end) {
        FAIL_POINT("sim:block:before");
        if (SIM_BUG(1) && k->block + 1 == k->end)
            kernel_store_done(k);
        kernel_block(s, d, k, k->block++);
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
