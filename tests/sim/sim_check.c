/* What must be, computed from the seed alone, and the comparison with what is; see sim.h. */
#include <inttypes.h>
#include <math.h>
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

uint64_t sim_mix(uint64_t a, uint64_t b)
{
    uint64_t z = (a ^ b * UINT64_C(0xff51afd7ed558ccd)) + UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 32) * UINT64_C(0xd6e8feb86659fd93);
    return z ^ z >> 32;
}

/* -- The model: gradients and what becomes of them ------------------------------------------------
 */

static uint64_t model_hash(const struct sim *s, uint64_t step, uint32_t micro, uint32_t unit)
{
    return sim_mix(s->config.model_seed, (step << 16 | (uint64_t)micro << 8 | unit) + 1);
}

/* A fifth of the gradients, and in some steps all of a unit's. */
bool sim_none(const struct sim *s, uint64_t step, uint32_t micro, uint32_t unit)
{
    return model_hash(s, step, 255, unit) % 11 == 0 || model_hash(s, step, micro, unit) % 5 == 0;
}

uint64_t sim_tag(const struct sim *s, uint64_t step, uint32_t micro, uint32_t unit)
{
    return model_hash(s, step, micro, unit) | 1;
}

/* Not commutative: another order is another sum. */
uint64_t sim_add(uint64_t acc, bool first, uint64_t tag, uint32_t block)
{
    return sim_mix(first ? 0 : acc, tag + block);
}

uint64_t sim_update(uint64_t param, uint64_t decision, uint64_t acc)
{
    return sim_mix(sim_mix(param, decision), acc);
}

uint64_t sim_mean(uint64_t acc, uint32_t took)
{
    return sim_mix(acc, 500 + took);
}

/* Now and then a sum is not finite. */
void sim_square(uint64_t acc, struct fixsum *sum, bool *finite)
{
    if (acc % 257 == 1)
        *finite = false;
    else
        fixsum_add(sum, (double)(acc >> 40) / 1024);
}

uint64_t sim_decision_hash(const struct decision *d)
{
    uint64_t lr, loss_scale;
    const double scale = (double)d->scale;
    uint64_t scale_bits;
    memcpy(&lr, &d->lr, sizeof lr);
    memcpy(&loss_scale, &d->loss_scale, sizeof loss_scale);
    memcpy(&scale_bits, &scale, sizeof scale_bits);
    uint64_t hash = sim_mix(sim_mix(sim_mix(lr, loss_scale), scale_bits),
                            (uint64_t)d->skip << 32 | d->good_steps);
    uint64_t divisor;
    memcpy(&divisor, &d->divisor, sizeof divisor);
    hash = sim_mix(hash, divisor);
    if (d->put != 0)
        hash = sim_mix(hash, d->put);
    for (uint32_t i = 0; i < d->rate_count; i++) {
        uint64_t rate;
        memcpy(&rate, &d->rates[i], sizeof rate);
        hash = sim_mix(hash, rate);
    }
    return hash;
}

struct turn_update sim_update_of(const struct sim *s, uint64_t step, uint32_t job,
                                 const struct decision *last)
{
    static const struct decision_rates rates[] = { { 1e-3, NAN, 0.9, NAN },
                                                   { 2e-3, 0.1, 0.8, 0.95 },
                                                   { NAN, 0.2, NAN, NAN } };
    struct turn_update u = { .args = { .micro_batches = s->config.micros,
                                       .lr = 1e-3 * (1 + job) + 1e-6 * (double)step,
                                       .clip_norm = 1 } };
    u.args.loss_scale = loss_scale_next(last, &u.args.good_steps);
    u.args.puts = last != NULL ? last->puts : 0;
    u.args.divide_by = step % 2; /* the metric's sum is above 0 then */
    u.args.groups = &rates[step % 3];
    u.args.group_count = step % 4 == 0 ? 0 : 1;
    return u;
}

bool sim_is_put(const struct sim *s, uint64_t step)
{
    return s->config.puts && sim_mix(s->config.model_seed, 9000 + step) % 5 == 0;
}

struct decision sim_put_of(const struct sim *s, uint64_t step, const struct decision *last)
{
    struct decision d = { .skip = true,
                          .put = sim_mix(s->config.model_seed, 7000 + step) | 1,
                          .updates = step % 2 * (3 * step + 1),
                          .puts = (last != NULL ? last->puts : 0) + 1 };
    d.loss_scale = loss_scale_next(last, &d.good_steps);
    return d;
}

bool sim_put_has(uint64_t put, uint32_t unit)
{
    return (put >> (8 + unit) & 1) != 0;
}

uint64_t sim_put_value(uint64_t put, uint32_t unit, uint32_t block)
{
    return sim_mix(put, unit * 64 + block);
}

bool sim_put_updates(uint64_t put, uint64_t ret_updates[SIM_UNITS])
{
    for (uint32_t u = 0; u < SIM_UNITS; u++)
        ret_updates[u] = sim_mix(put, 500 + u) % 4; /* 0: as the decision says */
    return (put >> 4 & 1) != 0;
}

uint32_t sim_first_block(const struct sim *s, uint32_t owner, uint32_t unit)
{
    return s->blocks[unit] * owner / s->config.daemons;
}

/* The sum of a unit's block over micro-batches below `next`; 0 when none took part. */
static uint64_t sum_of(const struct sim *s, uint64_t step, uint32_t unit, uint32_t block,
                       uint32_t next)
{
    uint64_t acc = 0;
    bool first = true;
    for (uint32_t m = 0; m < next; m++) {
        if (sim_none(s, step, m, unit))
            continue;
        acc = sim_add(acc, first, sim_tag(s, step, m, unit), block);
        first = false;
    }
    return acc;
}

static uint32_t took_part(const struct sim *s, uint64_t step, uint32_t unit)
{
    uint32_t took = 0;
    for (uint32_t m = 0; m < s->config.micros; m++)
        took += !sim_none(s, step, m, unit);
    return took;
}

static struct wire_prepared prepared_of(const struct sim *s, uint64_t step, uint32_t owner,
                                        uint32_t owners)
{
    struct wire_prepared p = { .step = step, .finite = true, .metric_count = 1 };
    struct fixsum of_means;
    fixsum_init(&p.sum);
    fixsum_init(&of_means);
    for (uint32_t u = 0; u < s->config.units; u++) {
        const uint32_t first = s->blocks[u] * owner / owners,
                       end = s->blocks[u] * (owner + 1) / owners;
        const bool any = !s->frozen[u] && first < end && took_part(s, step, u) > 0;
        for (uint32_t b = first; any && b < end; b++)
            sim_square(sum_of(s, step, u, b, s->config.micros), s->means[u] ? &of_means : &p.sum,
                       &p.finite);
        /* a sum of zeros: finite, and 0 */
    }
    fixsum_carry(&p.sum);
    for (uint32_t m = 0; m < s->config.micros; m++)
        p.metrics[0] += 0.1 * m + (double)step;
    return p;
}

/* Norms are all over the place: a rule that many steps are beyond. */
const struct guard sim_guard = {
    .count = 1,
    .rules = { { .what = GUARD_NORM_ZSCORE, .threshold = 0.75, .window = GUARD_WINDOW_MIN } }
};

/* which: of settings, as sim_settings(). */
static bool expected_decision(const struct sim *s, uint64_t step, uint32_t job, uint32_t which,
                              struct decision *ret, double *ret_norm)
{
    const struct wire_prepared p = prepared_of(s, step, 0, 1);
    struct decided decided;
    struct shd_err e = { 0 };
    struct turn_update u = sim_update_of(s, step, job, step == 0 ? NULL : &s->decision[step - 1]);
    struct settings settings;
    struct guard_limits limits;
    if (!sim_settings(s, step, which, &settings))
        return false;
    if (s->config.guard) {
        guard_window_limits(&sim_guard, s->history, SIM_HISTORY, step, &limits);
        u.args.guard = &limits;
    }
    u.args.prepared = &p;
    u.args.owners = 1;
    u.args.settings = &settings;
    if (decide(&u.args, &decided, &e) != SHD_OK)
        return false;
    *ret = decided.decision;
    *ret_norm = decided.grad_norm;
    return true;
}

static bool is_counted(const struct sim *s, uint64_t step, uint32_t unit)
{
    return s->frozen[unit] || s->means[unit] || !s->skips_idle[unit] ||
           took_part(s, step, unit) > 0;
}

/* Of a unit that is not trained the model's. */
static void count_updates(struct sim *s, const struct decision *decision, uint64_t step)
{
    uint64_t given[SIM_UNITS];
    const bool gives = decision->put != 0 && sim_put_updates(decision->put, given);
    s->updates[0] += !decision->skip;
    if (decision->put != 0 && decision->updates > 0)
        s->updates[0] = decision->updates - 1;
    for (uint32_t u = 0; u < s->config.units; u++) {
        uint64_t *count = &s->updates[1 + u];
        *count += !decision->skip && is_counted(s, step, u);
        if (gives && given[u] > 0)
            *count = given[u] - 1;
        else if (s->frozen[u] || s->means[u] || (decision->put != 0 && decision->updates > 0))
            *count = s->updates[0];
    }
}

/* The next decision is known: so are the parameters it makes. */
static void decide_next(struct sim *s, const struct decision *decision, double norm)
{
    const uint64_t step = s->decided;
    CHECK(step < SIM_STEPS);
    history_put(s->history, SIM_HISTORY,
                &(struct history_row){ .step = step, .norm = norm, .skipped = decision->skip });
    memcpy(s->param[1], s->param[0], sizeof s->param[1]);
    s->decision[step] = *decision;
    s->decided++;
    s->last_decided_ns = s->now_ns;
    count_updates(s, decision, step);
    for (uint32_t u = 0; decision->put != 0 && u < s->config.units; u++)
        for (uint32_t b = 0; sim_put_has(decision->put, u) && b < s->blocks[u]; b++)
            s->param[0][u][b] = sim_put_value(decision->put, u, b);
    for (uint32_t u = 0; u < s->config.units && !decision->skip; u++) {
        const uint32_t took = s->frozen[u] ? 0 : took_part(s, step, u);
        const bool moves = !s->frozen[u] && (took > 0 || !(s->skips_idle[u] || s->means[u]));
        const uint64_t hash = sim_mix(sim_decision_hash(decision), s->updates[1 + u]);
        for (uint32_t b = 0; moves && b < s->blocks[u]; b++) {
            const uint64_t acc = sum_of(s, step, u, b, s->config.micros);
            s->param[0][u][b] = s->means[u] ? sim_mean(acc, took)
                                            : sim_update(s->param[0][u][b], hash, acc);
        }
    }
    sim_guests_decided(s);
}

static uint64_t digest_of(const struct sim *s)
{
    uint64_t digest = s->decided;
    for (uint32_t u = 0; u < s->config.units; u++)
        for (uint32_t b = 0; b < s->blocks[u]; b++)
            digest = sim_mix(digest, s->param[0][u][b]);
    return digest;
}

void sim_begin_checks(struct sim *s)
{
    for (uint32_t u = 0; u < SIM_UNITS; u++) {
        s->blocks[u] = 1 + (uint32_t)(sim_mix(s->config.model_seed, u) % SIM_BLOCKS);
        s->frozen[u] = s->config.frozen && u == 1;
        s->skips_idle[u] = sim_mix(s->config.model_seed, 100 + u) % 2 == 0;
        s->means[u] = !s->frozen[u] && sim_mix(s->config.model_seed, 200 + u) % 4 == 0;
        for (uint32_t b = 0; b < SIM_BLOCKS; b++)
            s->param[0][u][b] = s->param[1][u][b] = sim_mix(u, b);
    }
}

uint64_t sim_expected_digest(const struct sim_config *config)
{
    struct sim *s = calloc(1, sizeof *s);
    CHECK(s != NULL);
    s->config = *config;
    sim_begin_checks(s);
    for (uint64_t step = 0; step < config->steps; step++) {
        struct decision decision;
        double norm;
        CHECK(expected_decision(s, step, 0, 0, &decision, &norm));
        decide_next(s, &decision, norm);
    }
    const uint64_t digest = digest_of(s);
    free(s);
    return digest;
}

/* -- Checks -------------------------------------------------------------------------------------
 */

uint64_t sim_round(uint64_t step, uint64_t attempt)
{
    const uint64_t round = step + attempt - 1;
    CHECK(attempt > 0 && round < SIM_ROUNDS);
    return round;
}

/* Owner 0 has made a put of it: what others sum of it, torn gradients too, will be dropped. */
static bool is_put(const struct sim *s, uint64_t step)
{
    return step < s->decided && s->decision[step].put != 0;
}

void sim_check_sum(struct sim *s, const struct sim_daemon *d, uint32_t unit, uint64_t step,
                   uint32_t next)
{
    const uint32_t owner = sim_daemon_index(s, d);
    if (is_put(s, step))
        return;
    for (uint32_t b = sim_first_block(s, owner, unit); b < sim_first_block(s, owner + 1, unit); b++)
        if (d->acc[unit][b] != sum_of(s, step, unit, b, next))
            sim_broken(s, "P2", owner, SIM_NOBODY,
                       "unit %" PRIu32 " block %" PRIu32
                       " is not the sum of micro-batches 0..%" PRIu32 " of step %" PRIu64
                       ", each once, ascending",
                       unit, b, next - 1, step);
}

void sim_check_params(struct sim *s, const struct sim_daemon *d, uint32_t unit, uint64_t version)
{
    const uint32_t owner = sim_daemon_index(s, d);
    if (version > s->decided || version + 1 < s->decided)
        sim_broken(s, "P1", owner, SIM_NOBODY,
                   "unit %" PRIu32 " becomes version %" PRIu64 " of %" PRIu64, unit, version,
                   s->decided);
    for (uint32_t b = sim_first_block(s, owner, unit); b < sim_first_block(s, owner + 1, unit); b++)
        if (d->param[unit][b] != s->param[s->decided - version][unit][b])
            sim_broken(s, "P1", owner, SIM_NOBODY,
                       "unit %" PRIu32 " block %" PRIu32
                       " is not what the decisions below version %" PRIu64
                       " make, each applied once",
                       unit, b, version);
}

/* The owner's decision of `step` became known. */
void sim_check_decision(struct sim *s, struct sim_daemon *d, uint64_t step,
                        const struct decision *decision)
{
    const uint32_t owner = sim_daemon_index(s, d);
    if (step != d->commits_seen)
        sim_broken(s, "P3", owner, SIM_NOBODY, "commits step %" PRIu64 " after %" PRIu64 " steps",
                   step, d->commits_seen);
    d->commits_seen = step + 1;
    if (step < s->decided) {
        if (!decision_equal(decision, &s->decision[step]))
            sim_broken(s, "P1", owner, SIM_NOBODY,
                       "applies another decision of step %" PRIu64
                       " than an owner before it (lr %g, %g)",
                       step, decision->lr, s->decision[step].lr);
        return;
    }
    struct decision expected = sim_put_of(s, step, step == 0 ? NULL : &s->decision[step - 1]);
    if (step == s->decided && sim_is_put(s, step) && decision_equal(&expected, decision)) {
        decide_next(s, decision, /* norm= */ 0);
        return;
    }
    double norm = 0;
    const uint32_t others = s->config.apart ? s->config.workers - 1 : 0;
    for (uint32_t job = 0; step == s->decided && job <= s->job + others; job++) {
        const bool without = expected_decision(s, step, job, 0, &expected, &norm) &&
                             decision_equal(&expected, decision);
        const bool with = expected_decision(s, step, job, 1, &expected, &norm) &&
                          decision_equal(&expected, decision);
        if (!with && !without)
            continue;
        if (with != without)
            sim_settings_seen(s, step, with);
        decide_next(s, decision, norm);
        return;
    }
    sim_broken(s, "P1", owner, SIM_NOBODY, "nobody could derive its decision of step %" PRIu64,
               step);
}

void sim_check_prepared(struct sim *s, const struct sim_daemon *d, const struct step_prepared *p)
{
    const uint32_t owner = sim_daemon_index(s, d);
    if (s->spoilt[sim_round(p->step, step_attempt(d->core))])
        sim_broken(s, "P2", owner, SIM_NOBODY,
                   "sealed step %" PRIu64 " with what was not all returned", p->step);
    const struct wire_prepared want = prepared_of(s, p->step, owner, s->config.daemons);
    if (is_put(s, p->step))
        return;
    if (p->finite != want.finite || p->metric_count != 1 || p->metrics[0] != want.metrics[0] ||
        (p->finite && memcmp(p->sum.limb, want.sum.limb, sizeof want.sum.limb) != 0))
        sim_broken(s, "P1", owner, SIM_NOBODY,
                   "sealed step %" PRIu64 " with another sum than its gradients'", p->step);
    for (uint32_t u = 0; u < s->config.units; u++)
        if (!s->frozen[u])
            sim_check_sum(s, d, u, p->step, s->config.micros);
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
    if (d->credited_round != round)
        return;
    for (uint32_t u = 0; u < s->config.units; u++) {
        for (uint32_t m = 0; m < s->config.micros; m++) {
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
                   s->decided, (unsigned long long)(STEP_BOUND / S));
    if (s->now_ns < s->last_fault_ns + WAIT_BOUND)
        return;
    for (uint32_t i = 0; i < s->config.workers; i++) {
        const struct sim_worker *w = &s->worker[i];
        if (w->alive && w->work != WORK_FINISHED && s->now_ns > w->since_ns + WAIT_BOUND)
            sim_broken(s, "P4", SIM_NOBODY, i,
                       "waits in '%s' of step %" PRIu64 " for more than %llu s",
                       sim_work_name(w->work), w->step, (unsigned long long)(WAIT_BOUND / S));
    }
    sim_guests_check(s, WAIT_BOUND);
}

void sim_check_end(struct sim *s)
{
    for (uint32_t i = 0; i < s->config.daemons; i++) {
        const struct sim_daemon *d = &s->daemon[i];
        for (uint32_t u = 0; u < s->config.units; u++) {
            sim_check_params(s, d, u, s->config.steps);
            if (step_unit_updates(d->core, u) != s->updates[1 + u])
                sim_broken(s, "P1", i, SIM_NOBODY,
                           "unit %" PRIu32 " has %" PRIu64 " updates, not %" PRIu64, u,
                           step_unit_updates(d->core, u), s->updates[1 + u]);
            if (d->board[u] != s->config.steps)
                sim_broken(s, "P1", i, SIM_NOBODY, "unit %" PRIu32 " ends at version %" PRIu64, u,
                           d->board[u]);
        }
    }
    sim_verify_check_end(s);
    s->result.digest = digest_of(s);
    if (s->job == 0 && !s->config.puts && !s->config.apart && !s->config.sets &&
        s->result.digest != sim_expected_digest(&s->config))
        sim_broken(s, "P1", SIM_NOBODY, SIM_NOBODY,
                   "the result is not that of the undisturbed run");
}
