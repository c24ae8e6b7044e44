/* See plan_time.h. Actors (workers, their transfer threads, owners) do one task at a time; the
 * clock moves from one end of a task to the next. Who waits is looked at again after each. */
#include "client/plan/plan_time.h"

#include <inttypes.h>
#include <math.h>

#include "client/plan/plan_sim.h"
#include "proto/base/check.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"

#define STEPS     5u /* simulated; the first two are not counted */
#define STEPS_NOT 2u
#define TASKS_MAX 4000000u /* more would take long */

/* -- Workers ----------------------------------------------------------------------------------- */

static void count(const struct sim *s, struct sim_worker *w, enum sim_part part)
{
    if (w->step >= STEPS_NOT && w->step < STEPS)
        w->part_ns[part] += s->now_ns - w->since_ns;
    w->since_ns = s->now_ns;
}

static bool published(const struct sim *s, const struct sim_worker *w, uint32_t unit)
{
    for (uint32_t i = 0; i < s->shape->daemons; i++)
        if (s->owners[i].map->slice[unit].elems > 0 && s->owners[i].version[unit] < w->step)
            return false;
    return true;
}

static bool sealed(const struct sim *s, const struct sim_worker *w)
{
    for (uint32_t i = 0; i < s->shape->daemons; i++)
        if (s->owners[i].step == w->step && s->owners[i].summed < s->owners[i].expected)
            return false;
    return true;
}

/* No worker has anything more to hand over in this step: owners alone are waited for. */
static bool all_returned(const struct sim *s)
{
    for (uint32_t w = 0; w < s->shape->workers; w++)
        if (s->plan->ops[s->workers[w].at].kind < PLAN_PREPARE)
            return false;
    return true;
}

/* The next unit that a transfer thread copies, once its owners have published it. */
static void copier_go(struct sim *s, uint32_t index)
{
    struct sim_worker *w = &s->workers[index];
    struct sim_actor *a = sim_copier(s, index);
    const uint32_t room = s->spec->unit_count + 1;
    if (a->busy || w->first == w->last || !published(s, w, w->queue[w->first % room]))
        return;
    const uint32_t unit = w->queue[w->first % room];
    const struct plan_rate rate = s->rates->fetch[plan_dtype_index(s->spec->publish)];
    sim_start(a, s->rates->wake_ns, (double)s->spec->units[unit].elems * sim_rate_ns(s, rate));
}

static void copier_done(struct sim *s, uint32_t index)
{
    struct sim_worker *w = &s->workers[index];
    w->fetched[w->queue[w->first++ % (s->spec->unit_count + 1)]] = 2;
}

static bool readable(const struct sim *s, const struct sim_worker *w, uint32_t unit)
{
    return s->shape->copies ? w->fetched[unit] == 2 : published(s, w, unit);
}

/* Slots that a backward needs for gradients that it is the first to add to. */
static uint32_t opens(const struct sim *s, const struct sim_worker *w, uint32_t unit)
{
    const struct spec_unit *su = &s->spec->units[unit];
    uint32_t count = !su->frozen && !w->open[unit];
    for (uint32_t i = 0; i < su->uses_count; i++)
        count += !s->spec->units[su->uses[i]].frozen && !w->open[su->uses[i]];
    return count;
}

/* May the operation begin? Else *ret_why says what it waits for. */
static bool may_begin(const struct sim *s, const struct sim_worker *w, const struct plan_op *op,
                      enum sim_part *ret_why)
{
    const uint32_t in_use = w->sent + w->held;
    switch (op->kind) {
    case PLAN_WAIT:
        *ret_why = published(s, w, op->unit) ? SIM_FETCH : SIM_UPDATE;
        return readable(s, w, op->unit);
    case PLAN_BACKWARD:
        *ret_why = SIM_RETURN;
        return s->staged || w->sent == 0 || in_use + opens(s, w, op->unit) <= s->shape->slots;
    case PLAN_RETURN:
        *ret_why = SIM_RETURN;
        return !s->staged || w->sent < s->shape->slots;
    case PLAN_PREPARE:
        *ret_why = all_returned(s) ? SIM_UPDATE : SIM_WAIT;
        return sealed(s, w);
    default:
        return true;
    }
}

static void begin_backward(const struct sim *s, struct sim_worker *w, uint32_t unit)
{
    const struct spec_unit *su = &s->spec->units[unit];
    w->held += opens(s, w, unit);
    w->open[unit] = !su->frozen;
    for (uint32_t i = 0; i < su->uses_count; i++)
        w->open[su->uses[i]] = !s->spec->units[su->uses[i]].frozen;
}

/* The owners that have a slice of the unit. */
static uint32_t owners_of(const struct sim *s, uint32_t unit)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < s->shape->daemons; i++)
        count += s->owners[i].map->slice[unit].elems > 0;
    return count;
}

/* The time of an operation: on the clock alone, and of a processor. */
static void times(const struct sim *s, const struct plan_op *op, double *ret_sleep_ns,
                  double *ret_run_ns)
{
    const struct plan_rates *r = s->rates;
    const struct plan_compute *c = s->compute;
    *ret_sleep_ns = 0;
    *ret_run_ns = r->op_ns;
    if (op->kind == PLAN_FORWARD && c != NULL)
        *ret_run_ns += c->forward_ns[op->unit];
    if (op->kind == PLAN_BACKWARD && c != NULL)
        *ret_run_ns += c->backward_ns[op->unit];
    if (op->kind == PLAN_RETURN) {
        *ret_run_ns += r->send_ns * s->shape->daemons;
        if (s->staged)
            *ret_run_ns += (double)s->spec->units[op->unit].elems *
                           sim_rate_ns(s, r->stage[plan_dtype_index(s->grad_dtype)]);
    }
    if (op->kind == PLAN_COMMIT)
        *ret_sleep_ns = r->commit_ns;
}

static enum sim_part part_of(enum plan_op_kind kind)
{
    switch (kind) {
    case PLAN_FORWARD:
    case PLAN_BACKWARD:
        return SIM_COMPUTE;
    case PLAN_RETURN:
        return SIM_RETURN;
    case PLAN_FETCH:
    case PLAN_WAIT:
    case PLAN_FREE:
        return SIM_FETCH;
    default:
        return SIM_WAIT;
    }
}

static void give(struct sim *s, uint32_t index, uint32_t unit)
{
    struct sim_worker *w = &s->workers[index];
    const uint32_t group = w->returned[unit]++ * s->shape->workers + index;
    CHECK(group < s->groups);
    w->held -= w->open[unit] && !s->staged;
    w->open[unit] = 0;
    w->left[(size_t)unit * s->groups + group] = owners_of(s, unit);
    w->sent += w->left[(size_t)unit * s->groups + group] > 0;
    for (uint32_t i = 0; i < s->shape->daemons; i++)
        if (s->owners[i].map->slice[unit].elems > 0)
            sim_take(s, i, (struct sim_job){ unit, group });
}

static void commit(struct sim *s, uint32_t index)
{
    struct sim_worker *w = &s->workers[index];
    for (uint32_t i = 0; i < s->shape->daemons; i++)
        sim_commit(s, i, w->step);
    for (uint32_t u = 0; u < s->spec->unit_count; u++)
        w->returned[u] = 0;
    w->step++;
    w->at = UINT32_MAX; /* the caller moves on */
}

/* What an operation does when its time is over. */
static void finish(struct sim *s, uint32_t index, const struct plan_op *op)
{
    struct sim_worker *w = &s->workers[index];
    count(s, w, part_of(op->kind));
    if (op->kind == PLAN_FETCH && s->shape->copies) {
        w->fetched[op->unit] = 1;
        w->queue[w->last++ % (s->spec->unit_count + 1)] = op->unit;
        copier_go(s, index);
    } else if (op->kind == PLAN_FREE) {
        w->fetched[op->unit] = 0;
    } else if (op->kind == PLAN_RETURN) {
        give(s, index, op->unit);
    } else if (op->kind == PLAN_COMMIT) {
        commit(s, index);
    }
    w->at++;
    w->begun = false;
}

/* Carry out operations up to one that takes time, or cannot begin yet. */
static void worker_go(struct sim *s, uint32_t index)
{
    struct sim_worker *w = &s->workers[index];
    struct sim_actor *a = &s->actors[index];
    while (!a->busy && w->step < STEPS + 1) {
        const struct plan_op *op = &s->plan->ops[w->at];
        double sleep_ns, run_ns;
        enum sim_part why = SIM_WAIT;
        if (w->begun) {
            finish(s, index, op);
            continue;
        }
        if (!may_begin(s, w, op, &why)) {
            w->blocked = true;
            w->why = why;
            return;
        }
        times(s, op, &sleep_ns, &run_ns);
        if (w->blocked) {
            count(s, w, w->why);
            sleep_ns += s->rates->wake_ns;
        }
        w->blocked = false;
        if (op->kind == PLAN_BACKWARD && !s->staged)
            begin_backward(s, w, op->unit);
        w->begun = true;
        if (sleep_ns + run_ns > 0)
            sim_start(a, sleep_ns, run_ns);
    }
}

/* -- The clock --------------------------------------------------------------------------------- */

struct speed {
    double run, kernel; /* share of a processor that a thread gets; of that, an owner's */
};

static struct speed speed_now(const struct sim *s, uint32_t actors)
{
    double threads = 0, kernels = 0;
    for (uint32_t i = 0; i < actors; i++) {
        const struct sim_actor *a = &s->actors[i];
        if (!a->busy || a->sleep_ns > 0)
            continue;
        threads += a->threads;
        kernels += a->kernel ? a->threads : 0;
    }
    const double processors = s->rates->processors;
    const double beside = (kernels < processors ? kernels : processors) - 1;
    const double share = s->rates->threads_share;
    struct speed v = { .run = threads > processors ? processors / threads : 1, .kernel = 1 };
    if (beside > 0 && processors > 1 && s->far > 0)
        v.kernel = 1 / (1 + s->far * beside / (processors - 1) * (share * processors - 1));
    return v;
}

static double left_ns(const struct sim_actor *a, struct speed v)
{
    return a->sleep_ns > 0 ? a->sleep_ns : a->run_ns / (v.run * (a->kernel ? v.kernel : 1));
}

static void advance(struct sim_actor *a, struct speed v, double dt_ns)
{
    if (a->sleep_ns > 0)
        a->sleep_ns -= dt_ns;
    else
        a->run_ns -= dt_ns * v.run * (a->kernel ? v.kernel : 1);
}

static void done(struct sim *s, uint32_t index)
{
    const uint32_t workers = s->shape->workers;
    s->actors[index].busy = false;
    if (index < workers)
        worker_go(s, index);
    else if (index < 2 * workers)
        copier_done(s, index - workers);
    else if (index < 2 * workers + s->shape->daemons)
        sim_loop_done(s, index - 2 * workers);
    else
        sim_kernels_done(s, index - 2 * workers - s->shape->daemons);
    for (uint32_t w = 0; w < workers; w++) {
        if (s->shape->copies)
            copier_go(s, w);
        if (s->workers[w].blocked)
            worker_go(s, w);
    }
}

/* To the next end of a sleep or a task. False: nobody does anything. */
static bool tick(struct sim *s)
{
    const uint32_t actors = sim_actors(s);
    const struct speed v = speed_now(s, actors);
    uint32_t first = UINT32_MAX;
    double dt_ns = INFINITY;
    for (uint32_t i = 0; i < actors; i++)
        if (s->actors[i].busy && left_ns(&s->actors[i], v) < dt_ns) {
            dt_ns = left_ns(&s->actors[i], v);
            first = i;
        }
    if (first == UINT32_MAX)
        return false;
    dt_ns = dt_ns > 0 ? dt_ns : 0;
    s->now_ns += dt_ns;
    const bool slept = s->actors[first].sleep_ns > 0;
    for (uint32_t i = 0; i < actors; i++)
        if (s->actors[i].busy)
            advance(&s->actors[i], v, dt_ns);
    if (slept)
        s->actors[first].sleep_ns = 0;
    if (!slept || s->actors[first].run_ns <= 0)
        done(s, first);
    return true;
}

/* -- The question ------------------------------------------------------------------------------ */

uint64_t plan_time_bytes(const struct spec *spec)
{
    const uint32_t wide = spec_arrays(spec) - (spec->int8 ? spec_moments(spec) : 0);
    const uint64_t state = spec->elems * sizeof(float) * (1 + wide); /* and the sum */
    const uint64_t int8 = spec->int8 ? spec_moments(spec) * quant_bytes(spec->elems) : 0;
    return state + int8 + spec->elems * dtype_bytes(spec->publish);
}

static double far_of(const struct plan_rates *r, uint64_t bytes)
{
    const double far = log((double)bytes / r->near_bytes) / log(r->far_bytes / r->near_bytes);
    return far < 0 ? 0 : far > 1 ? 1 : far;
}

static int run(struct sim *s, struct plan_time *ret_time, struct shd_err *e)
{
    for (uint32_t w = 0; w < s->shape->workers; w++)
        worker_go(s, w);
    while (s->workers[0].step < STEPS)
        if (!tick(s))
            return err_set(e, SHD_EINTERNAL,
                           "the simulated step stands still at operation %" PRIu32,
                           s->workers[0].at);
    const double *part = s->workers[0].part_ns;
    const double steps = STEPS - STEPS_NOT;
    struct plan_time t = { .compute_ns = part[SIM_COMPUTE] / steps,
                           .fetch_ns = part[SIM_FETCH] / steps,
                           .return_ns = part[SIM_RETURN] / steps,
                           .update_ns = part[SIM_UPDATE] / steps,
                           .wait_ns = part[SIM_WAIT] / steps };
    t.step_ns = t.compute_ns + t.fetch_ns + t.return_ns + t.update_ns + t.wait_ns;
    *ret_time = t;
    return SHD_OK;
}

int plan_time(const struct spec *spec, const struct plan *plan, const struct plan_rates *rates,
              const struct plan_shape *shape, const struct plan_compute *compute,
              enum shd_dtype grad_dtype, struct plan_time *ret_time, struct shd_err *e)
{
    const uint32_t a = spec->accumulate > 0 ? spec->accumulate : 1;
    struct sim s = { .spec = spec,
                     .plan = plan,
                     .rates = rates,
                     .shape = shape,
                     .compute = compute,
                     .grad_dtype = grad_dtype != 0 ? grad_dtype : spec->grad_dtype,
                     .far = far_of(rates, plan_time_bytes(spec)),
                     .groups = plan->micros / a * shape->workers };
    CHECK(shape->workers > 0 && shape->daemons > 0 && shape->threads > 0 && shape->slots > 0);
    s.staged = shape->copies || a > 1 || s.grad_dtype != SHD_F32 ||
               plan->cost.live_grads_max > shape->slots;
    const uint64_t tasks = (uint64_t)shape->workers * plan->op_count +
                           (uint64_t)shape->daemons * spec->unit_count * (s.groups + 1);
    if (tasks > TASKS_MAX / STEPS)
        return err_set(e, SHD_ERANGE, "%" PRIu64 " operations a step, at most %u are simulated",
                       tasks, TASKS_MAX / STEPS);
    int r = sim_new(&s, e);
    if (r == SHD_OK)
        r = run(&s, ret_time, e);
    sim_free(&s);
    return r;
}

const char *plan_time_bound(const struct plan_time *t)
{
    const struct {
        const char *name;
        double ns;
    } parts[] = { { "compute", t->compute_ns },
                  { "fetch", t->fetch_ns },
                  { "return", t->return_ns },
                  { "update", t->update_ns },
                  { "wait", t->wait_ns } };
    uint32_t most = 0;
    for (uint32_t i = 1; i < ARRAY_SIZE(parts); i++)
        if (parts[i].ns > parts[most].ns)
            most = i;
    return parts[most].name;
}
