/* See calibrate.h.
 *
 * A probe is a model of equal units on a daemon of its own. Its worker does what a worker without
 * compute would: reads all units, returns their gradients, commits. Times an element come from
 * large units: of a model that fits in caches (near), and of one that does not (far). What an
 * operation costs whatever its size comes from units of one block. What is left, the time that
 * waking somebody takes and the commit's, is set so that the simulation gives the measured step of
 * the probes with small units. */
#include "client/ctl/plan/calibrate.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/ctl/base/child.h"
#include "client/ctl/base/rundir.h"
#include "client/ctl/plan/trace_read.h"
#include "client/plan/plan.h"
#include "client/session/where.h"
#include "client/shd.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/spec/spec_json.h"

#define DEVICE         "cpu0"
#define ROUNDS_MAX     21u /* steps that are measured, behind */
#define ROUNDS_FAR     7u
#define WARMUP         3u
#define SPEC_BYTES     16384u
#define UNITS_MAX      64u
#define SMALL_ELEMS    2048u          /* one block: an owner's smallest slice */
#define NEAR_ELEMS     (128u * 1024)  /* 4 units of it: 10 MB of state */
#define FAR_ELEMS      (1024u * 1024) /* 4 units of it: 80 MB */
#define LARGE_UNITS    4u
#define SEARCHES       30u
#define FITS           3
#define COMPUTE_NS     1e4
#define WAKE_NS_MAX    1e6
#define COMMIT_NS_MAX  1e7
#define TRACE_S        60u
#define DAEMON_ADDRESS "%s?" DEVICE

struct probe {
    enum spec_optimizer optimizer;
    enum shd_dtype publish, grad;
    uint32_t units, elems, micros;
    uint32_t threads; /* of the daemon */
    uint32_t rounds;
    double compute_ns; /* of a backward */
    bool copies;
};

struct probed { /* medians over steps; times in ns */
    double step_ns, first_ns, next_ns, update_ns;
    double send_ns;  /* of this thread's processor, a gradient */
    double op_ns;    /* likewise, an acquire and release of a mapped unit */
    double stage_ns; /* of the clock, the first return of a step */
    double fetch_ns; /* of the clock, an acquire with path copy */
    double owner_ns; /* of the daemon's processors, a sum or update */
};

/* -- A daemon of our own ------------------------------------------------------------------------
 */

struct private_daemon {
    struct rundir dir;
    pid_t pid;
    bool has_dir;
};

static void daemon_end(struct private_daemon *d)
{
    struct shd_err e;
    if (d->pid > 0) {
        kill(d->pid, SIGKILL); /* it holds nothing that is worth a goodbye */
        waitpid(d->pid, NULL, 0);
    }
    if (d->has_dir)
        rundir_remove(&d->dir, &e);
    *d = (struct private_daemon){ 0 };
}

static int daemon_begin(struct private_daemon *d, uint32_t threads, struct shd_err *e)
{
    char program[4096], count[12];
    struct environ env = { 0 };
    char **list = NULL;
    *d = (struct private_daemon){ 0 };
    snprintf(count, sizeof count, "%u", (unsigned)threads);
    int r = child_find_shardd(program, sizeof program, e);
    if (r == SHD_OK)
        r = rundir_new(WHERE_RUN_PREFIX, &d->dir, e);
    d->has_dir = r == SHD_OK;
    if (r == SHD_OK)
        r = environ_new(&env, e);
    if (r == SHD_OK)
        r = environ_list(&env, &list, e);
    char *argv[] = { program,
                     (char[]){ "--device" },
                     (char[]){ DEVICE },
                     (char[]){ "--runtime-dir" },
                     d->dir.path,
                     (char[]){ "--threads" },
                     count,
                     (char[]){ "--log-level" },
                     (char[]){ "error" },
                     NULL };
    const struct child_spawn spawn = { .argv = argv, .envp = list, .in = 0, .out = 2, .err = 2 };
    if (r == SHD_OK)
        r = child_spawn(&spawn, &d->pid, e);
    free(list);
    environ_free(&env);
    if (r != SHD_OK)
        daemon_end(d);
    return r;
}

static double cpu_ns(clockid_t clock)
{
    struct timespec t = { 0 };
    clock_gettime(clock, &t);
    return (double)t.tv_sec * (double)NS_PER_S + (double)t.tv_nsec;
}

static double daemon_cpu_ns(const struct private_daemon *d)
{
    clockid_t clock;
    return clock_getcpuclockid(d->pid, &clock) == 0 ? cpu_ns(clock) : 0;
}

/* -- A worker ---------------------------------------------------------------------------------- */

static void write_spec(const struct probe *p, char json[SPEC_BYTES])
{
    int n = snprintf(json, SPEC_BYTES,
                     "{\"name\":\"probe\",\"micro_batches\":%u,\"publish\":\"%s\","
                     "\"grad_dtype\":\"%s\",\"optimizer\":{\"kind\":\"%s\"},\"units\":[",
                     (unsigned)p->micros, dtype_name(p->publish), dtype_name(p->grad),
                     spec_optimizer_rows[p->optimizer].kind);
    for (uint32_t u = 0; u < p->units; u++)
        n += snprintf(json + n, SPEC_BYTES - (size_t)n,
                      "%s{\"name\":\"u%u\",\"tensors\":[{\"name\":\"w%u\",\"shape\":[%u]}]}",
                      u > 0 ? "," : "", (unsigned)u, (unsigned)u, (unsigned)p->elems);
    n += snprintf(json + n, SPEC_BYTES - (size_t)n, "]}");
    CHECK(n > 0 && (unsigned)n < SPEC_BYTES);
}

struct series {
    double values[ROUNDS_MAX];
    uint32_t count;
};

static void series_add(struct series *s, double value)
{
    if (s->count < ROUNDS_MAX)
        s->values[s->count++] = value;
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double series_median(struct series *s)
{
    qsort(s->values, s->count, sizeof *s->values, by_size);
    return s->count > 0 ? s->values[s->count / 2] : 0;
}

/* All units once; *ret_ns: of this thread's processor (copies: of the clock), each. */
static int read_units(const struct probe *p, shd_model *m, double *ret_ns, struct shd_err *e)
{
    const clockid_t clock = p->copies ? CLOCK_MONOTONIC : CLOCK_THREAD_CPUTIME_ID;
    const double start_ns = cpu_ns(clock);
    int r = SHD_OK;
    for (uint32_t u = 0; r == SHD_OK && u < p->units; u++) {
        r = shd_acquire(m, u, NULL, e);
        if (r == SHD_OK)
            shd_release(m, u);
    }
    *ret_ns = (cpu_ns(clock) - start_ns) / p->units;
    return r;
}

/* Stand for a backward: a worker that computes meets owners that have gone to sleep meanwhile. */
static void compute(double ns)
{
    const double start_ns = cpu_ns(CLOCK_MONOTONIC);
    while (cpu_ns(CLOCK_MONOTONIC) - start_ns < ns)
        continue;
}

static int return_unit(const struct probe *p, shd_model *m, uint32_t micro, uint32_t unit,
                       struct shd_err *e)
{
    float *grad;
    const int r = shd_grad(m, micro, unit, &grad, e);
    if (r != SHD_OK)
        return r;
    memset(grad, 0, p->elems * sizeof *grad);
    compute(p->compute_ns);
    return shd_return(m, micro, unit, e);
}

/* *ret_send_ns: of this thread's processor, a gradient. *ret_stage_ns: of the clock, the first. */
static int return_units(const struct probe *p, shd_model *m, double *ret_send_ns,
                        double *ret_stage_ns, struct shd_err *e)
{
    const double start_ns = cpu_ns(CLOCK_THREAD_CPUTIME_ID), first_ns = cpu_ns(CLOCK_MONOTONIC);
    int r = SHD_OK;
    for (uint32_t micro = 0; r == SHD_OK && micro < p->micros; micro++)
        for (uint32_t u = p->units; r == SHD_OK && u-- > 0;) {
            r = return_unit(p, m, micro, u, e);
            if (micro == 0 && u + 1 == p->units)
                *ret_stage_ns = cpu_ns(CLOCK_MONOTONIC) - first_ns;
        }
    *ret_send_ns = (cpu_ns(CLOCK_THREAD_CPUTIME_ID) - start_ns) / (p->units * p->micros);
    return r;
}

static int train(const struct probe *p, const struct private_daemon *d, shd_model *m,
                 struct probed *ret, struct shd_err *e)
{
    static const struct shd_update update = { .size = sizeof update, .lr = 1e-6 };
    struct series steps = { 0 }, sends = { 0 }, ops = { 0 }, stages = { 0 };
    double owner_ns = 0;
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < WARMUP + p->rounds; i++) {
        double op_ns = 0, send_ns = 0, stage_ns = 0;
        const double start_ns = cpu_ns(CLOCK_MONOTONIC);
        if (i == WARMUP)
            owner_ns = daemon_cpu_ns(d);
        r = read_units(p, m, &op_ns, e);
        if (r == SHD_OK) /* those were waited for; these are here */
            r = read_units(p, m, &op_ns, e);
        if (r == SHD_OK)
            r = return_units(p, m, &send_ns, &stage_ns, e);
        if (r == SHD_OK)
            r = shd_commit(m, &update, NULL, e);
        if (i < WARMUP)
            continue;
        series_add(&steps, cpu_ns(CLOCK_MONOTONIC) - start_ns);
        series_add(&ops, op_ns);
        series_add(&sends, send_ns);
        series_add(&stages, stage_ns);
    }
    ret->owner_ns = (daemon_cpu_ns(d) - owner_ns) / (p->rounds * p->units * p->micros);
    ret->step_ns = series_median(&steps);
    ret->op_ns = series_median(&ops);
    ret->send_ns = series_median(&sends);
    ret->stage_ns = series_median(&stages);
    return r;
}

static int fetch(const struct probe *p, shd_model *m, struct probed *ret, struct shd_err *e)
{
    const struct shd_policy policy = { .size = sizeof policy,
                                       .path = SHD_PATH_COPY,
                                       .backward_prefetch = SHD_PREFETCH_NONE };
    struct series times = { 0 };
    int r = shd_set_policy(m, &policy, e);
    for (uint32_t i = 0; r == SHD_OK && i < WARMUP + p->rounds; i++) {
        double ns = 0;
        r = read_units(p, m, &ns, e);
        if (i >= WARMUP)
            series_add(&times, ns);
    }
    ret->fetch_ns = series_median(&times);
    return r;
}

static int use_daemon(const struct probe *p, const struct private_daemon *d, struct probed *ret,
                      struct shd_err *e)
{
    char address[sizeof d->dir.path + 16], json[SPEC_BYTES];
    const struct shd_options options = {
        .size = sizeof options, .address = address, .name = "shardctl plan", .timeout_ms = 60000
    };
    shd_session *s = NULL;
    shd_model *m = NULL;
    snprintf(address, sizeof address, DAEMON_ADDRESS, d->dir.path);
    write_spec(p, json);
    int r = shd_connect(&options, &s, e);
    if (r == SHD_OK)
        r = shd_model_open(s, json, &m, e);
    if (r == SHD_OK)
        r = p->copies ? fetch(p, m, ret, e) : train(p, d, m, ret, e);
    shd_model_close(m);
    shd_close(s);
    return r;
}

static int run_probe(const struct probe *p, struct probed *ret, struct shd_err *e)
{
    struct private_daemon d;
    char path[sizeof d.dir.path + 16];
    json_t *events = NULL;
    *ret = (struct probed){ 0 };
    int r = daemon_begin(&d, p->threads, e);
    if (r == SHD_OK)
        r = use_daemon(p, &d, ret, e);
    snprintf(path, sizeof path, "%s/" DEVICE ".status", d.dir.path);
    if (r == SHD_OK && !p->copies)
        r = trace_read(path, TRACE_S, &events, e);
    if (events != NULL) {
        ret->first_ns = trace_service_ns(events, "sum", /* micro= */ 0, /* more= */ 0);
        ret->next_ns = trace_service_ns(events, "sum", /* micro= */ 1, /* more= */ 1);
        ret->update_ns = trace_service_ns(events, "update", /* micro= */ -1, /* more= */ 0);
    }
    json_decref(events);
    daemon_end(&d);
    return r == SHD_OK ? r : err_prefix(e, "calibrate");
}

/* -- Rates from probes ------------------------------------------------------------------------- */

static const enum shd_dtype dtypes[PLAN_DTYPES] = { SHD_F32, SHD_BF16, SHD_F16 };

static double above(double ns, double fixed_ns)
{
    return ns > fixed_ns ? ns - fixed_ns : 0;
}

static double per_elem(double ns, double fixed_ns, const struct probe *p)
{
    return above(ns, fixed_ns) / p->elems;
}

/* A model in caches is no slower than one in memory: the shorter operation was disturbed more. */
static void order(struct plan_rate *rates, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (rates[i].near_ns > rates[i].far_ns || rates[i].near_ns <= 0)
            rates[i].near_ns = rates[i].far_ns;
}

static double *side(struct plan_rate *rate, bool far)
{
    return far ? &rate->far_ns : &rate->near_ns;
}

/* Near, or far: what depends on the number of elements, but for how it is copied. */
static int measure_large(struct plan_rates *rates, bool far, struct shd_err *e)
{
    struct probe p = {
        .units = LARGE_UNITS,
        .elems = far ? FAR_ELEMS : NEAR_ELEMS,
        .micros = 2,
        .threads = 1,
        .rounds = far ? ROUNDS_FAR : ROUNDS_MAX,
    };
    struct probed got;
    int r = SHD_OK;
    for (uint32_t k = SPEC_ADAMW; r == SHD_OK && k <= SPEC_OPTIMIZERS; k++)
        for (uint32_t d = 0; r == SHD_OK && d < PLAN_DTYPES; d++) {
            p.optimizer = (enum spec_optimizer)k;
            p.publish = dtypes[d];
            p.grad = k == SPEC_ADAMW ? dtypes[d] : SHD_F32;
            r = run_probe(&p, &got, e);
            *side(&rates->update[k - 1][d], far) = per_elem(got.update_ns, rates->kernel_ns, &p);
            if (k != SPEC_ADAMW)
                continue;
            *side(&rates->first[d], far) = per_elem(got.first_ns, rates->kernel_ns, &p);
            *side(&rates->next[d], far) = per_elem(got.next_ns, rates->kernel_ns, &p);
            *side(&rates->stage[d], far) = per_elem(got.stage_ns, rates->send_ns, &p);
        }
    return r;
}

static int measure_copies(struct plan_rates *rates, bool far, struct shd_err *e)
{
    struct probe p = { .optimizer = SPEC_SGD,
                       .grad = SHD_F32,
                       .units = LARGE_UNITS,
                       .elems = far ? FAR_ELEMS : NEAR_ELEMS,
                       .rounds = far ? ROUNDS_FAR : ROUNDS_MAX,
                       .micros = 1,
                       .threads = 1,
                       .copies = true };
    struct probed got;
    int r = SHD_OK;
    for (uint32_t d = 0; r == SHD_OK && d < PLAN_DTYPES; d++) {
        p.publish = dtypes[d];
        r = run_probe(&p, &got, e);
        *side(&rates->fetch[d], far) = per_elem(got.fetch_ns, /* fixed_ns= */ 0, &p);
    }
    return r;
}

static int measure_threads(struct plan_rates *rates, struct shd_err *e)
{
    const struct probe p = { .optimizer = SPEC_ADAMW,
                             .publish = SHD_F32,
                             .grad = SHD_F32,
                             .units = LARGE_UNITS,
                             .elems = FAR_ELEMS,
                             .rounds = ROUNDS_FAR,
                             .micros = 1,
                             .threads = sys_processors() };
    struct probed got;
    rates->threads_share = 1;
    if (p.threads == 1)
        return SHD_OK;
    const int r = run_probe(&p, &got, e);
    const double one = rates->update[SPEC_ADAMW - 1][0].far_ns;
    if (r == SHD_OK && one > 0)
        rates->threads_share = per_elem(got.update_ns, rates->kernel_ns, &p) / one;
    return r;
}

/* What the simulation says of a probe, which reads all units and then returns them. */
static int simulate(const struct probe *p, const struct plan_rates *rates, double *ret_step_ns,
                    struct shd_err *e)
{
    const struct plan_policy policy = { .strategy = PLAN_ZERO1,
                                        .backward_prefetch = PLAN_PREFETCH_NONE };
    const struct plan_shape shape = {
        .workers = 1, .daemons = 1, .threads = p->threads, .slots = 2
    };
    double forward_ns[UNITS_MAX] = { 0 }, backward_ns[UNITS_MAX];
    const struct plan_compute compute = { forward_ns, backward_ns };
    char json[SPEC_BYTES];
    struct spec *spec;
    struct plan plan;
    struct plan_time t;
    for (uint32_t u = 0; u < p->units; u++)
        backward_ns[u] = p->compute_ns;
    write_spec(p, json);
    int r = spec_parse(json, strlen(json), &spec, e);
    if (r != SHD_OK)
        return r;
    r = plan_build(spec, &policy, NULL, p->micros, &plan, e);
    if (r == SHD_OK) {
        r = plan_time(spec, &plan, rates, &shape, &compute, p->grad, &t, e);
        plan_free(&plan);
    }
    spec_free(spec);
    if (r == SHD_OK)
        *ret_step_ns = t.step_ns;
    return r;
}

/* Set *ret_ns, one of the rates, to what gives the probe's measured step. */
static int fit(const struct probe *p, double step_ns, double high_ns, struct plan_rates *rates,
               double *ret_ns, struct shd_err *e)
{
    double low_ns = 0;
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < SEARCHES; i++) {
        double simulated_ns = 0;
        *ret_ns = (low_ns + high_ns) / 2;
        r = simulate(p, rates, &simulated_ns, e);
        if (simulated_ns > step_ns)
            high_ns = *ret_ns;
        else
            low_ns = *ret_ns;
    }
    return r;
}

/* What an operation costs whatever its size. */
static int measure_small(struct plan_rates *rates, struct shd_err *e)
{
    const struct probe many = { .optimizer = SPEC_ADAMW,
                                .publish = SHD_F32,
                                .grad = SHD_F32,
                                .units = UNITS_MAX,
                                .elems = SMALL_ELEMS,
                                .micros = 4,
                                .threads = 1,
                                .rounds = ROUNDS_MAX,
                                .compute_ns = COMPUTE_NS };
    struct probe one = many;
    struct probed of_many, of_one;
    one.units = one.micros = 1;
    int r = run_probe(&many, &of_many, e);
    if (r == SHD_OK)
        r = run_probe(&one, &of_one, e);
    if (r != SHD_OK)
        return r;
    rates->op_ns = of_many.op_ns;
    rates->kernel_ns = of_many.update_ns;
    rates->send_ns = above(of_many.send_ns, COMPUTE_NS);
    rates->return_ns = above(of_many.owner_ns, rates->kernel_ns);
    for (int i = 0; r == SHD_OK && i < FITS; i++) {
        r = fit(&many, of_many.step_ns, WAKE_NS_MAX, rates, &rates->wake_ns, e);
        if (r == SHD_OK)
            r = fit(&one, of_one.step_ns, COMMIT_NS_MAX, rates, &rates->commit_ns, e);
    }
    return r;
}

int calibrate(struct plan_rates *ret_rates, struct shd_err *e)
{
    struct plan_rates rates = { .processors = sys_processors(),
                                .near_bytes = 20.0 * LARGE_UNITS * NEAR_ELEMS,
                                .far_bytes = 20.0 * LARGE_UNITS * FAR_ELEMS };
    int r = measure_small(&rates, e);
    for (int far = 0; r == SHD_OK && far <= 1; far++) {
        r = measure_large(&rates, far, e);
        if (r == SHD_OK)
            r = measure_copies(&rates, far, e);
    }
    order(rates.first, PLAN_DTYPES);
    order(rates.next, PLAN_DTYPES);
    order(rates.stage, PLAN_DTYPES);
    order(rates.fetch, PLAN_DTYPES);
    order(&rates.update[0][0], SPEC_OPTIMIZERS * PLAN_DTYPES);
    if (r == SHD_OK)
        r = measure_threads(&rates, e);
    if (r == SHD_OK)
        *ret_rates = rates;
    return r;
}
