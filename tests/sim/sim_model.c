/* What must be, computed from the seed alone: gradients, decisions, and the parameters that they
 * make; see sim.h. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "client/paths/watch.h"
#include "proto/base/sys.h"
#include "tests/sim/sim.h"
#include "tests/sim/sim_guest.h"

uint64_t sim_mix(uint64_t a, uint64_t b)
{
    uint64_t z = (a ^ b * UINT64_C(0xff51afd7ed558ccd)) + UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 32) * UINT64_C(0xd6e8feb86659fd93);
    return z ^ z >> 32;
}

/* -- The model: gradients and what becomes of them ------------------------------------------------
 */

static uint64_t model_hash(const struct sim *s, struct sim_batch at, uint32_t micro, uint32_t unit)
{
    const uint64_t hash = sim_mix(s->config.model_seed,
                                  (at.step << 16 | (uint64_t)micro << 8 | unit) + 1);
    return at.salt > 0 ? sim_mix(hash, at.salt) : hash;
}

/* A fifth of the gradients, and in some steps all of a unit's. */
bool sim_none(const struct sim *s, struct sim_batch at, uint32_t micro, uint32_t unit)
{
    return model_hash(s, at, 255, unit) % 11 == 0 || model_hash(s, at, micro, unit) % 5 == 0;
}

uint64_t sim_tag(const struct sim *s, struct sim_batch at, uint32_t micro, uint32_t unit)
{
    return model_hash(s, at, micro, unit) | 1;
}

uint32_t sim_micros_after(const struct sim *s, uint64_t step, const struct decision *last)
{
    if (last != NULL && last->micro_batches > 0)
        return last->micro_batches;
    return s->config.ramp ? ramp_at(&s->ramp, step) : s->config.micros;
}

static const struct decision *decision_before(const struct sim_line *line, uint64_t step)
{
    return step > 0 && step <= line->decided ? &line->decision[step - 1] : NULL;
}

uint32_t sim_micros(const struct sim *s, const struct sim_line *line, uint64_t step)
{
    return sim_micros_after(s, step, decision_before(line, step));
}

struct sim_batch sim_batch_of(const struct sim *s, const struct sim_line *line, uint64_t step)
{
    return (struct sim_batch){ step, line->salt[step], sim_micros(s, line, step) };
}

/* Up and down, the most at least once. */
static void make_ramp(struct sim *s)
{
    uint64_t from = 0;
    s->ramp.count = 2 + (uint32_t)(sim_mix(s->config.model_seed, 300) % 6);
    for (uint32_t i = 0; i < s->ramp.count; i++) {
        const uint64_t hash = sim_mix(s->config.model_seed, 301 + i);
        s->ramp.rows[i] = (struct ramp_row){ from, i == 1
                                                       ? s->config.micros
                                                       : 1 + (uint32_t)(hash % s->config.micros) };
        from += 1 + (hash >> 32) % 9;
    }
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

/* Now and then a sum is not finite, or that of a bad batch. */
void sim_square(const struct sim *s, uint64_t step, uint64_t acc, struct fixsum *sum, bool *finite)
{
    const double square = (double)(acc >> 40) / 1024;
    if (acc % 257 == 1)
        *finite = false;
    else
        fixsum_add(sum, sim_bad(s, step) == SIM_BAD_NORM ? square * 0x1p80 : square);
}

double sim_metric(const struct sim *s, struct sim_batch at, uint32_t micro)
{
    const bool bad = sim_bad(s, at.step) == SIM_BAD_LOSS && micro == at.step % at.micros;
    return 0.1 * micro + (double)at.step + (bad ? 1e6 : 0);
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
    struct turn_update u = { .args = { .micro_batches = sim_micros_after(s, step, last),
                                       .lr = 1e-3 * (1 + job) + 1e-6 * (double)step,
                                       .clip_norm = 1 } };
    u.args.loss_scale = loss_scale_next(last, &u.args.good_steps);
    u.args.puts = last != NULL ? last->puts : 0;
    u.args.divide_by = step % 2; /* the metric's sum is above 0 then */
    u.args.groups = &rates[step % 3];
    u.args.group_count = step % 4 == 0 ? 0 : 1;
    if (s->config.guard != SIM_GUARD_UNITS)
        return u;
    u.units = s->config.units;
    u.watched = sim_guard(s)->watched;
    u.column = sim_guard(s)->column;
    u.columns = sim_guard(s)->columns;
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

uint64_t sim_sum(const struct sim *s, struct sim_batch at, uint32_t unit, uint32_t block,
                 uint32_t next)
{
    uint64_t acc = 0;
    bool first = true;
    for (uint32_t m = 0; m < next; m++) {
        if (sim_none(s, at, m, unit))
            continue;
        acc = sim_add(acc, first, sim_tag(s, at, m, unit), block);
        first = false;
    }
    return acc;
}

static uint32_t took_part(const struct sim *s, struct sim_batch at, uint32_t unit)
{
    uint32_t took = 0;
    for (uint32_t m = 0; m < at.micros; m++)
        took += !sim_none(s, at, m, unit);
    return took;
}

struct wire_prepared sim_prepared(const struct sim *s, struct sim_batch at, uint32_t owner,
                                  uint32_t owners)
{
    const uint64_t step = at.step;
    struct wire_prepared p = {
        .step = step, .finite = true, .metric_count = 1, .reported = at.micros
    };
    struct fixsum of_means;
    fixsum_init(&p.sum);
    fixsum_init(&of_means);
    for (uint32_t u = 0; u < s->config.units; u++) {
        const uint32_t first = s->blocks[u] * owner / owners,
                       end = s->blocks[u] * (owner + 1) / owners;
        const bool any = !s->frozen[u] && first < end && took_part(s, at, u) > 0;
        for (uint32_t b = first; any && b < end; b++)
            sim_square(s, step, sim_sum(s, at, u, b, at.micros), s->means[u] ? &of_means : &p.sum,
                       &p.finite);
        /* a sum of zeros: finite, and 0 */
    }
    fixsum_carry(&p.sum);
    for (uint32_t m = 0; m < at.micros; m++)
        p.metrics[0] += sim_metric(s, at, m);
    return p;
}

/* As all owners' sums come to, of one unit. */
static double unit_squares(const struct sim *s, struct sim_batch at, uint32_t u)
{
    struct fixsum sum;
    bool finite = true;
    fixsum_init(&sum);
    const bool any = !s->frozen[u] && !s->means[u] && took_part(s, at, u) > 0;
    for (uint32_t b = 0; any && b < s->blocks[u]; b++)
        sim_square(s, at.step, sim_sum(s, at, u, b, at.micros), &sum, &finite);
    fixsum_carry(&sum);
    return fixsum_value(&sum);
}

static double unit_norm(double squares, struct sim_batch at, const struct decision *d)
{
    return sqrt(squares) / (d->divisor > 0 ? d->divisor : at.micros) / d->loss_scale;
}

/* Of the last steps that count, one after the other. */
static double unit_limit(const struct sim_line *line, const struct guard_rule *rule, uint64_t step,
                         uint32_t u)
{
    double x[GUARD_WINDOW_MIN];
    uint32_t count = 0;
    CHECK(rule->window == GUARD_WINDOW_MIN);
    for (uint64_t k = step; k > 0 && k + GUARD_LOOK_BACK * rule->window > step; k--)
        if (line->version[k].counts && count < rule->window)
            x[count++] = line->version[k].norm[u];
    return count == rule->window ? guard_window_limit(rule, x) : (double)INFINITY;
}

/* What rules of units make of a decision. */
static void watch_units(const struct sim *s, struct sim_batch at, const struct guard_limits *limits,
                        struct decision *d)
{
    const struct guard *guard = sim_guard(s);
    struct watch w;
    watch_begin(&w, guard->watched);
    for (uint32_t u = 0; u < s->config.units; u++) {
        double own[GUARD_RULES_MAX];
        uint32_t count = 0;
        for (uint32_t i = 0; i < guard->count; i++)
            if ((guard->watched[u] >> i & 1) != 0 && guard_unit_windowed(&guard->rules[i]))
                own[count++] = unit_limit(sim_line(s), &guard->rules[i], at.step, u);
        const double squares = unit_squares(s, at, u);
        watch_unit(&w, limits, &(struct watch_unit){ u, unit_norm(squares, at, d), squares, own });
    }
    watch_end(&w, limits, d);
}

bool sim_expected(const struct sim *s, uint64_t step, uint32_t job, uint32_t which,
                  struct decision *ret, double *ret_norm)
{
    const struct sim_line *line = sim_line(s);
    struct decided decided;
    struct shd_err e = { 0 };
    struct turn_update u = sim_update_of(s, step, job, decision_before(line, step));
    struct settings settings;
    struct guard_limits limits;
    uint32_t micros;
    if (!sim_settings(s, step, which, &settings, &micros))
        return false;
    const struct wire_prepared p = sim_prepared(s, sim_batch_of(s, line, step), 0, 1);
    if (s->config.guard != SIM_GUARD_NONE) {
        guard_window_limits(sim_guard(s), s->history, SIM_HISTORY, step, &limits);
        u.args.guard = &limits;
    }
    u.args.prepared = &p;
    u.args.owners = 1;
    u.args.settings = &settings;
    if (decide(&u.args, &decided, &e) != SHD_OK)
        return false;
    *ret = decided.decision;
    if (s->config.guard == SIM_GUARD_UNITS && p.finite)
        watch_units(s, sim_batch_of(s, line, step), &limits, ret);
    ret->micro_batches = micros;
    *ret_norm = decided.grad_norm;
    return true;
}

bool sim_expected_put(const struct sim *s, uint64_t step, uint32_t job, uint32_t which,
                      struct decision *ret, double *ret_norm)
{
    struct settings ignored;
    uint32_t micros;
    (void)job;
    if (!sim_settings(s, step, which, &ignored, &micros))
        return false;
    *ret = sim_put_of(s, step, decision_before(sim_line(s), step));
    ret->micro_batches = micros;
    *ret_norm = 0;
    return true;
}

static bool is_counted(const struct sim *s, struct sim_batch at, uint32_t unit)
{
    return s->frozen[unit] || s->means[unit] || !s->skips_idle[unit] || took_part(s, at, unit) > 0;
}

/* Of a unit that is not trained the model's. */
static void count_updates(const struct sim *s, const struct decision *decision, struct sim_batch at,
                          uint64_t updates[1 + SIM_UNITS])
{
    uint64_t given[SIM_UNITS];
    const bool gives = decision->put != 0 && sim_put_updates(decision->put, given);
    updates[0] += !decision->skip;
    if (decision->put != 0 && decision->updates > 0)
        updates[0] = decision->updates - 1;
    for (uint32_t u = 0; u < s->config.units; u++) {
        uint64_t *count = &updates[1 + u];
        *count += !decision->skip && is_counted(s, at, u);
        if (gives && given[u] > 0)
            *count = given[u] - 1;
        else if (s->frozen[u] || s->means[u] || (decision->put != 0 && decision->updates > 0))
            *count = updates[0];
    }
}

static void update_unit(const struct sim *s, const struct decision *decision, struct sim_batch at,
                        uint32_t u, struct sim_version *v)
{
    const uint32_t took = s->frozen[u] ? 0 : took_part(s, at, u);
    const bool moves = !s->frozen[u] && (took > 0 || !(s->skips_idle[u] || s->means[u]));
    const uint64_t hash = sim_mix(sim_decision_hash(decision), v->updates[1 + u]);
    for (uint32_t b = 0; moves && b < s->blocks[u]; b++) {
        const uint64_t acc = sim_sum(s, at, u, b, at.micros);
        v->param[u][b] = s->means[u] ? sim_mean(acc, took) : sim_update(v->param[u][b], hash, acc);
    }
}

void sim_decide_next(struct sim *s, const struct decision *decision, double norm)
{
    struct sim_line *line = &s->line[s->era & 1];
    const uint64_t step = line->decided;
    const struct sim_batch at = sim_batch_of(s, line, step);
    CHECK(step < SIM_STEPS);
    struct sim_version *v = &line->version[step + 1];
    history_put(s->history, SIM_HISTORY,
                &(struct history_row){ .step = step,
                                       .norm = norm,
                                       .metrics = { sim_prepared(s, at, 0, 1).metrics[0] },
                                       .metric_count = decision->put == 0,
                                       .reported = decision->put == 0 ? at.micros : 0,
                                       .skipped = decision->skip });
    *v = line->version[step];
    v->counts = !decision->skip && decision->put == 0;
    for (uint32_t u = 0; v->counts && u < s->config.units; u++)
        v->norm[u] = unit_norm(unit_squares(s, at, u), at, decision);
    line->decision[step] = *decision;
    line->decided++;
    s->last_decided_ns = s->now_ns;
    if (decision->guard.stop)
        v->stopped = step + 1;
    count_updates(s, decision, at, v->updates);
    for (uint32_t u = 0; decision->put != 0 && u < s->config.units; u++)
        for (uint32_t b = 0; sim_put_has(decision->put, u) && b < s->blocks[u]; b++)
            v->param[u][b] = sim_put_value(decision->put, u, b);
    for (uint32_t u = 0; u < s->config.units && !decision->skip; u++)
        update_unit(s, decision, at, u, v);
}

uint64_t sim_version_hash(const struct sim *s, const struct sim_line *line, uint64_t step,
                          uint32_t owner)
{
    uint64_t blocks[SIM_FLAT];
    uint32_t flat = 0;
    for (uint32_t u = 0; u < s->config.units; u++)
        for (uint32_t b = sim_first_block(s, owner, u); b < sim_first_block(s, owner + 1, u); b++)
            blocks[flat++] = line->version[step].param[u][b];
    return sim_hash_of(s, owner, blocks);
}

uint64_t sim_digest(const struct sim *s)
{
    const struct sim_line *line = sim_line(s);
    uint64_t digest = line->decided;
    for (uint32_t u = 0; u < s->config.units; u++)
        for (uint32_t b = 0; b < s->blocks[u]; b++)
            digest = sim_mix(digest, line->version[line->decided].param[u][b]);
    return digest;
}

void sim_begin_model(struct sim *s)
{
    for (uint32_t u = 0; u < SIM_UNITS; u++) {
        s->blocks[u] = 1 + (uint32_t)(sim_mix(s->config.model_seed, u) % SIM_BLOCKS);
        s->frozen[u] = s->config.frozen && u == 1;
        s->skips_idle[u] = sim_mix(s->config.model_seed, 100 + u) % 2 == 0;
        s->means[u] = !s->frozen[u] && sim_mix(s->config.model_seed, 200 + u) % 4 == 0;
        for (uint32_t b = 0; b < SIM_BLOCKS; b++)
            s->line[0].version[0].param[u][b] = sim_mix(u, b);
    }
    make_ramp(s);
}

static uint64_t undisturbed(const struct sim_config *config, const uint64_t *salts)
{
    struct sim *s = sys_pages(sizeof *s);
    CHECK(s != NULL);
    s->config = *config;
    sim_begin_model(s);
    for (uint64_t step = 0; step < config->steps; step++) {
        struct decision decision;
        double norm;
        s->line[0].salt[step] = salts != NULL ? salts[step] : 0;
        CHECK(sim_expected(s, step, 0, 0, &decision, &norm));
        sim_decide_next(s, &decision, norm);
    }
    const uint64_t digest = sim_digest(s);
    sys_pages_free(s, sizeof *s);
    return digest;
}

uint64_t sim_expected_digest(const struct sim_config *config)
{
    return undisturbed(config, NULL);
}

uint64_t sim_undisturbed(const struct sim *s)
{
    return undisturbed(&s->config, sim_line(s)->salt);
}
