/* What a Return costs: a worker of `shardctl run` that returns gradients of small units, by the
 * rings and by the connections alone (SHD_RING=off), one step of each in turn, so that both have
 * the same machine. Processor time is that of this process and of all its daemons.
 *
 * A unit is one block of 2,048 elements, so what is measured is everything but the sum; with two
 * daemons one of them has no part of it and is asked all the same. A step is `micro` times all
 * units, and its commit. A round trip is shd_blob() of a model without a blob: one request, of the
 * first daemon.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench/bench.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

#define UNITS_MAX  4096u
#define SPEC_BYTES (UNITS_MAX * 80u + 400u)
#define UNIT_ELEMS 2048u
#define WAYS       2u
#define ASKS       201u /* round trips of a round, of which the median counts */
#define US_PER_NS  1e-3

struct way { /* frames by the rings, or not */
    const char *name;
    shd_session *session;
    shd_model *model;
    struct stat_series cpu_us, daemons_us, step_ms, round_us;
};

struct bench {
    uint32_t units, micro, rounds, ways;
    bool as_json;
    struct way way[WAYS]; /* the first `ways` of them */
};

static uint64_t cpu_ns(clockid_t clock)
{
    struct timespec t;
    CHECK(clock_gettime(clock, &t) == 0);
    return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}

static uint64_t daemons_ns(const struct hub *hub)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < hub->link_count; i++) {
        clockid_t clock;
        if (clock_getcpuclockid(hub->links[i].pid, &clock) == 0)
            sum += cpu_ns(clock);
    }
    return sum;
}

static char *make_spec(const struct bench *b, const char *name)
{
    char *json = malloc(SPEC_BYTES);
    CHECK(json != NULL);
    int at = snprintf(json, SPEC_BYTES,
                      "{\"name\":\"%s\",\"micro_batches\":%" PRIu32
                      ",\"optimizer\":{\"kind\":\"sgd\"},\"units\":[",
                      name, b->micro);
    for (uint32_t i = 0; i < b->units; i++)
        at += snprintf(json + at, SPEC_BYTES - (size_t)at,
                       "%s{\"name\":\"u%" PRIu32 "\",\"tensors\":[{\"name\":\"t%" PRIu32
                       "\",\"shape\":[%u]}]}",
                       i > 0 ? "," : "", i, i, UNIT_ELEMS);
    snprintf(json + at, SPEC_BYTES - (size_t)at, "]}");
    return json;
}

static int begin(const struct bench *b, struct way *w, struct shd_err *e)
{
    const struct shd_options options = { .size = sizeof options, .name = w->name };
    int r = shd_connect(&options, &w->session, e);
    if (r != SHD_OK)
        return r;
    if (w->session->hub == NULL)
        return err_set(e, SHD_EINVAL, "no daemons: run it by shardctl run");
    char *json = make_spec(b, w->name);
    r = shd_model_open(w->session, json, &w->model, e);
    free(json);
    return r;
}

static int step(const struct bench *b, const struct way *w, struct shd_err *e)
{
    const struct shd_update update = { .size = sizeof update, .lr = 0.1 };
    struct shd_result result = { .size = sizeof result };
    for (uint32_t micro = 0; micro < b->micro; micro++)
        for (uint32_t unit = b->units; unit-- > 0;) {
            float *grad;
            int r = shd_grad(w->model, micro, unit, &grad, e);
            if (r != SHD_OK)
                return r;
            grad[0] = 1;
            r = shd_return(w->model, micro, unit, e);
            if (r != SHD_OK)
                return r;
        }
    return shd_commit(w->model, &update, &result, e);
}

static int ask(struct way *w, bool counts, struct shd_err *e)
{
    double us[ASKS];
    uint8_t blob[8];
    size_t bytes;
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < ASKS; i++) {
        const uint64_t start_ns = clock_now_ns();
        r = shd_blob(w->model, blob, sizeof blob, &bytes, e);
        us[i] = (double)(clock_now_ns() - start_ns) * US_PER_NS;
    }
    if (r != SHD_OK || !counts)
        return r;
    qsort(us, ASKS, sizeof *us, stat_ascending);
    stat_add(&w->round_us, us[ASKS / 2]);
    return SHD_OK;
}

static int measure(const struct bench *b, struct way *w, bool counts, struct shd_err *e)
{
    const struct hub *hub = w->session->hub;
    const double returns = (double)b->units * b->micro * hub->link_count;
    const uint64_t own_ns = cpu_ns(CLOCK_PROCESS_CPUTIME_ID), theirs_ns = daemons_ns(hub);
    const uint64_t start_ns = clock_now_ns();
    const int r = step(b, w, e);
    const uint64_t end_ns = clock_now_ns();
    if (r != SHD_OK || !counts)
        return r;
    const double own = (double)(cpu_ns(CLOCK_PROCESS_CPUTIME_ID) - own_ns) * US_PER_NS;
    const double theirs = (double)(daemons_ns(hub) - theirs_ns) * US_PER_NS;
    stat_add(&w->cpu_us, (own + theirs) / returns);
    stat_add(&w->daemons_us, theirs / returns);
    stat_add(&w->step_ms, (double)(end_ns - start_ns) * 1e-6);
    return SHD_OK;
}

static void report(const struct bench *b, const char *what, const char *unit,
                   const struct stat_series *s)
{
    char name[64];
    snprintf(name, sizeof name, "control.return.%s", what);
    stat_print(b->as_json, name, unit, s);
}

static void report_all(const struct bench *b)
{
    const struct way *ring = &b->way[0], *conn = &b->way[1];
    stat_print_head(b->as_json);
    report(b, "cpu_us", "us", &ring->cpu_us);
    report(b, "cpu_us.daemons", "us", &ring->daemons_us);
    report(b, "step_ms", "ms", &ring->step_ms);
    report(b, "round_us", "us", &ring->round_us);
    if (b->ways < WAYS)
        return;
    const struct stat_series cpu = stat_ratio(&ring->cpu_us, &conn->cpu_us);
    const struct stat_series time = stat_ratio(&ring->step_ms, &conn->step_ms);
    report(b, "off.cpu_us", "us", &conn->cpu_us);
    report(b, "off.cpu_us.daemons", "us", &conn->daemons_us);
    report(b, "off.step_ms", "ms", &conn->step_ms);
    report(b, "off.round_us", "us", &conn->round_us);
    report(b, "cpu_over_off", "", &cpu);
    report(b, "step_over_off", "", &time);
}

static int run(struct bench *b, struct shd_err *e)
{
    int r = begin(b, &b->way[0], e);
    setenv("SHD_RING", "off", 1);
    if (r == SHD_OK && b->ways == WAYS)
        r = begin(b, &b->way[1], e);
    for (uint32_t i = 0; r == SHD_OK && i <= b->rounds; i++) /* the first one warms up */
        for (unsigned k = 0; r == SHD_OK && k < b->ways; k++) {
            struct way *w = &b->way[(i + k) % b->ways];
            r = measure(b, w, /* counts= */ i > 0, e);
            if (r == SHD_OK)
                r = ask(w, /* counts= */ i > 0, e);
        }
    if (r == SHD_OK)
        report_all(b);
    for (unsigned k = 0; k < WAYS; k++)
        shd_close(b->way[k].session);
    return r;
}

int main(int argc, char **argv)
{
    static struct bench b = { .units = 512,
                              .micro = 4,
                              .rounds = 9,
                              .ways = WAYS,
                              .way = { { .name = "ring" }, { .name = "conn" } } };
    static const struct flag table[] = {
        { "units", 0, FLAG_U32, "N", "units of 2,048 elements (512)", &b.units, 1, UNITS_MAX },
        { "micro", 0, FLAG_U32, "N", "micro-batches of a step (4)", &b.micro, 1, 64 },
        { "ways", 0, FLAG_U32, "N", "1: by rings alone; both (2)", &b.ways, 1, WAYS },
        { "rounds", 0, FLAG_U32, "N", "steps of each way (9)", &b.rounds, 1, STAT_ROUNDS_MAX - 1 },
        BENCH_JSON(&b.as_json),
    };
    const struct flags flags = {
        .usage = "shardctl run --daemons N -- bench_return [flags]",
        .about = "Processor time of a Return, of worker and daemons together and for each owner, "
                 "and a step's\ntime: by rings, and by the connections alone (SHD_RING=off), a "
                 "step of each in turn;\nand the round trip of a small request.",
        .table = table,
        .count = ARRAY_SIZE(table),
    };
    struct shd_err e = { 0 };
    bench_flags(&flags, argc, argv, NULL);
    bench_check(run(&b, &e), &e);
    return 0;
}
