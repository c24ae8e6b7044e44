/* What must be, computed from the seed alone, and the comparison with what is; see sim.h. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"
#include "tests/sim/sim_guest.h"

#define STEP_BOUND (600 * S) /* no step takes longer, whatever happens to it */
#define WAIT_BOUND (60 * S)  /* nobody waits longer when nothing happened for as long */

static void stop(struct sim *s)
{
    siglongjmp(s->stopped, 1);
}

void sim_broken(struct sim *s, const char *promise, uint32_t daemon, uint32_t worker,
                const char *format, ...)
{
    va_list args;
    char what[200];
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    s->result.outcome = SIM_BROKEN;
    s->result.daemon = daemon;
    s->result.worker = worker;
    snprintf(s->result.promise, sizeof s->result.promise, "%s", promise);
    if (daemon != SIM_NOBODY)
        snprintf(s->result.text, sizeof s->result.text, "daemon %" PRIu32 ": %s", daemon, what);
    else if (worker != SIM_NOBODY)
        snprintf(s->result.text, sizeof s->result.text, "worker %" PRIu32 ": %s", worker, what);
    else
        snprintf(s->result.text, sizeof s->result.text, "%s", what);
    sim_note(s, "BROKEN", daemon, worker, 0, 0, 0);
    stop(s);
    abort();
}

/* Somebody says that state is gone: right when it is, and only then. */
void sim_lost(struct sim *s, const char *why)
{
    if (!s->kept_lost)
        sim_broken(s, "P3", SIM_NOBODY, SIM_NOBODY, "reported as lost, and no keeper was: %s", why);
    s->result.outcome = SIM_LOST;
    snprintf(s->result.text, sizeof s->result.text, "%s", why);
    stop(s);
    abort();
}

/* -- Checks -------------------------------------------------------------------------------------
 */

uint64_t sim_round(uint64_t step, uint64_t attempt)
{
    const uint64_t round = step + attempt - 1;
    CHECK(attempt > 0 && round < SIM_ROUNDS);
    return round;
}

/* Owner 0 has made a put of it, or has gone back: what others sum of it, torn gradients too, will
 * be dropped. */
static bool is_dropped(const struct sim *s, const struct sim_line *line, uint64_t step)
{
    return (step < line->decided && line->decision[step].put != 0) ||
           (step >= line->decided && line != sim_line(s));
}

void sim_check_sum(struct sim *s, const struct sim_daemon *d, uint32_t unit, uint64_t step,
                   uint32_t next)
{
    const uint32_t owner = sim_owner_index(s, d);
    const struct sim_line *line = sim_line_of(s, d);
    const struct sim_batch at = sim_batch_of(s, line, step);
    if (is_dropped(s, line, step) || d->stray.is || sim_is_out(s, sim_daemon_index(s, d)))
        return;
    for (uint32_t b = sim_first_block(s, owner, unit); b < sim_first_block(s, owner + 1, unit); b++)
        if (d->acc[unit][b] != sim_sum(s, at, unit, b, next))
            sim_broken(s, "P2", sim_daemon_index(s, d), SIM_NOBODY,
                       "unit %" PRIu32 " block %" PRIu32
                       " is not the sum of micro-batches 0..%" PRIu32 " of step %" PRIu64
                       ", each once, ascending",
                       unit, b, next - 1, step);
}

void sim_check_params(struct sim *s, const struct sim_daemon *d, uint32_t unit, uint64_t version)
{
    const uint32_t owner = sim_owner_index(s, d), i = sim_daemon_index(s, d);
    const struct sim_line *line = sim_line_of(s, d);
    if (d->stray.is)
        return;
    if (version > line->decided || (version + 1 < line->decided && !sim_is_out(s, i)))
        sim_broken(s, "P1", i, SIM_NOBODY,
                   "unit %" PRIu32 " becomes version %" PRIu64 " of %" PRIu64, unit, version,
                   line->decided);
    for (uint32_t b = sim_first_block(s, owner, unit); b < sim_first_block(s, owner + 1, unit); b++)
        if (d->param[unit][b] != line->version[version].param[unit][b] && sim_is_out(s, i))
            s->daemon[i].stray.wrong = true;
        else if (d->param[unit][b] != line->version[version].param[unit][b])
            sim_broken(s, "P1", i, SIM_NOBODY,
                       "unit %" PRIu32 " block %" PRIu32
                       " is not what the decisions below version %" PRIu64
                       " make, each applied once",
                       unit, b, version);
}

/* Is the decision one that is expected, with what is known to be set, or with what was asked for,
 * too? Then it tells which. */
static bool seen(struct sim *s, uint64_t step, const struct decision *decision,
                 bool (*expect)(const struct sim *s, uint64_t step, uint32_t job, uint32_t which,
                                struct decision *ret_decision, double *ret_norm),
                 uint32_t job, double *ret_norm)
{
    struct decision expected;
    const bool without = expect(s, step, job, 0, &expected, ret_norm) &&
                         decision_equal(&expected, decision);
    bool with = false;
    for (uint32_t which = 1; !with && which <= SIM_SETTINGS_SINCE; which++)
        with = expect(s, step, job, which, &expected, ret_norm) &&
               decision_equal(&expected, decision);
    if (with != without)
        sim_settings_seen(s, step, with);
    return with || without;
}

/* The first decision of a step: somebody could derive it, and nothing has stopped training. */
static void check_first(struct sim *s, uint32_t owner, uint64_t step,
                        const struct decision *decision)
{
    double norm = 0;
    const uint32_t others = s->config.apart ? s->config.workers - 1 : 0;
    if (sim_is_put(s, step) && seen(s, step, decision, sim_expected_put, 0, &norm)) {
        sim_decide_next(s, decision, norm);
        return;
    }
    for (uint32_t job = 0; job <= s->job + others; job++) {
        if (!seen(s, step, decision, sim_expected, job, &norm))
            continue;
        sim_guard_check(s, owner, step, decision, norm);
        sim_decide_next(s, decision, norm);
        return;
    }
    sim_broken(s, "P1", owner, SIM_NOBODY, "nobody could derive its decision of step %" PRIu64,
               step);
}

/* The owner's decision of `step` became known. */
void sim_check_decision(struct sim *s, struct sim_daemon *d, uint64_t step,
                        const struct decision *decision)
{
    const uint32_t owner = sim_daemon_index(s, d);
    const struct sim_line *line = sim_line_of(s, d);
    if (step != d->commits_seen)
        sim_broken(s, "P3", owner, SIM_NOBODY, "commits step %" PRIu64 " after %" PRIu64 " steps",
                   step, d->commits_seen);
    d->commits_seen = step + 1;
    if (sim_stray_decides(s, d, step, decision))
        return;
    if (step < line->decided) {
        if (!decision_equal(decision, &line->decision[step]))
            sim_broken(s, "P1", owner, SIM_NOBODY,
                       "applies another decision of step %" PRIu64
                       " than an owner before it (lr %g, %g)",
                       step, decision->lr, line->decision[step].lr);
        return;
    }
    if (line != sim_line(s))
        sim_broken(s, "P1", owner, SIM_NOBODY,
                   "decides step %" PRIu64 ", and the model went back to step %" PRIu64, step,
                   sim_line(s)->base);
    if (step > line->decided)
        sim_broken(s, "P1", owner, SIM_NOBODY, "decides step %" PRIu64 " of %" PRIu64, step,
                   line->decided);
    check_first(s, owner, step, decision);
}

void sim_check_prepared(struct sim *s, const struct sim_daemon *d, const struct step_prepared *p)
{
    const uint32_t owner = sim_daemon_index(s, d);
    const struct sim_line *line = sim_line_of(s, d);
    if (d->stray.is || sim_is_out(s, owner))
        return;
    if (s->spoilt[sim_round(p->step, step_attempt(d->core))])
        sim_broken(s, "P2", owner, SIM_NOBODY,
                   "sealed step %" PRIu64 " with what was not all returned", p->step);
    const struct wire_prepared want = sim_prepared(s, sim_batch_of(s, line, p->step),
                                                   sim_owner_index(s, d), s->config.daemons);
    if (is_dropped(s, line, p->step))
        return;
    if (p->finite != want.finite || p->metric_count != 1 || p->metrics[0] != want.metrics[0] ||
        p->reported != want.reported ||
        (p->finite && memcmp(p->sum.limb, want.sum.limb, sizeof want.sum.limb) != 0))
        sim_broken(s, "P1", owner, SIM_NOBODY,
                   "sealed step %" PRIu64 " with another sum than its gradients'", p->step);
    for (uint32_t u = 0; u < s->config.units; u++)
        if (!s->frozen[u])
            sim_check_sum(s, d, u, p->step, sim_micros(s, line, p->step));
}

static bool is_durable(const struct sim *s, const struct sim_daemon *d, uint32_t unit,
                       uint32_t micro, uint64_t round)
{
    const uint64_t progress = atomic_load(&d->ledger.unit[unit].progress);
    const uint64_t cell = atomic_load(&d->ledger.cell[unit * s->config.micros + micro]);
    return (ledger_progress_round(progress) == round && micro < ledger_progress_next(progress)) ||
           (ledger_cell_round(cell) == round && ledger_cell_kind(cell) != LEDGER_CELL_EMPTY);
}

/* A new process, before its first event: what its predecessors credited, it has. */
void sim_check_credited(struct sim *s, const struct sim_daemon *d)
{
    const uint32_t owner = sim_daemon_index(s, d);
    const uint64_t step = step_collecting(d->core);
    const uint64_t round = sim_round(step, step_attempt(d->core));
    uint64_t credited = 0;
    if (d->credited_round != round || d->stray.is)
        return;
    for (uint32_t u = 0; u < s->config.units; u++) {
        for (uint32_t m = 0; m < sim_micros(s, sim_line_of(s, d), step); m++) {
            if ((d->credited[u] >> m & 1) == 0)
                continue;
            credited++;
            if (!is_durable(s, d, u, m, round))
                sim_broken(s, "P3", owner, SIM_NOBODY,
                           "unit %" PRIu32 " micro-batch %" PRIu32 " of step %" PRIu64
                           " was credited and is gone",
                           u, m, step);
        }
    }
    if (step_cells_in(d->core) + step_cells_waiting(d->core) < credited)
        sim_broken(s, "P3", owner, SIM_NOBODY,
                   "%" PRIu64 " gradients of step %" PRIu64 " were credited, %" PRIu64 " came back",
                   credited, step, step_cells_in(d->core) + step_cells_waiting(d->core));
}

void sim_check_progress(struct sim *s)
{
    if (s->now_ns > s->last_decided_ns + STEP_BOUND)
        sim_broken(s, "P4", SIM_NOBODY, SIM_NOBODY, "step %" PRIu64 " takes longer than %llu s",
                   sim_line(s)->decided, (unsigned long long)(STEP_BOUND / S));
    if (s->now_ns < s->last_fault_ns + WAIT_BOUND)
        return;
    for (uint32_t i = 0; i < s->config.workers; i++) {
        const struct sim_worker *w = &s->worker[i];
        if (w->alive && w->work != WORK_FINISHED && s->now_ns > w->since_ns + WAIT_BOUND &&
            !sim_hosts_cut_off(s, w))
            sim_broken(s, "P4", SIM_NOBODY, i,
                       "waits in '%s' of step %" PRIu64 " for more than %llu s",
                       sim_work_name(w->work), w->step, (unsigned long long)(WAIT_BOUND / S));
    }
    sim_guests_check(s, WAIT_BOUND);
}

void sim_check_end(struct sim *s)
{
    const struct sim_line *line = sim_line(s);
    for (uint32_t i = 0; i < sim_members(s); i++) {
        const struct sim_daemon *d = &s->daemon[i];
        if (sim_is_out(s, i) || sim_is_dead(s, i))
            continue;
        sim_back_check_end(s, d);
        for (uint32_t u = 0; u < s->config.units; u++) {
            sim_check_params(s, d, u, s->config.steps);
            const uint64_t updates = line->version[line->decided].updates[1 + u];
            if (step_unit_updates(d->core, u) != updates)
                sim_broken(s, "P1", i, SIM_NOBODY,
                           "unit %" PRIu32 " has %" PRIu64 " updates, not %" PRIu64, u,
                           step_unit_updates(d->core, u), updates);
            if (d->board[u] != s->config.steps)
                sim_broken(s, "P1", i, SIM_NOBODY, "unit %" PRIu32 " ends at version %" PRIu64, u,
                           d->board[u]);
        }
    }
    sim_verify_check_end(s);
    s->result.digest = sim_digest(s);
    if (s->job == 0 && !s->config.puts && !s->config.apart && !s->config.sets &&
        s->result.digest != sim_undisturbed(s))
        sim_broken(s, "P1", SIM_NOBODY, SIM_NOBODY,
                   "the result is not that of the undisturbed run");
}
