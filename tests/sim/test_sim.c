/* Millions of random events on the cores; see sim.h. As a tool:
 *
 *     test_sim --scenario NAME [--seed S] [--events N] [--hosts N] [--back] [--short] [--trace]
 *
 * runs seeds from S on until N events have happened, or until something breaks; --back: of models
 * that go back, and that nobody looks at; --short: of few steps with many faults. What breaks is
 * shrunk: with as few kinds of faults, steps, daemons and workers as still show it. */
#include <stdlib.h>
#include <time.h>

#include "tests/lib/test.h"
#include "tests/sim/sim.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define EVENTS UINT64_C(250000) /* of each scenario */
#else
#define EVENTS UINT64_C(5000000)
#endif
#define SEED      UINT64_C(20261121)
#define SEEDS_MAX 1000u

static void print_config(const struct sim_config *c)
{
    static const char *const guards[] = { "", ", guard", ", bad batches",
                                          ", bad batches that stop it", ", guard of units" };
    fprintf(stderr,
            "seed %" PRIu64 ": %" PRIu32 " daemons, %" PRIu32 " workers, %" PRIu32
            " units, %" PRIu32 " micro-batches, %" PRIu32 " steps, %" PRIu32
            " hosts, %s%s%s%s%s%s%s%s%s, faults %#" PRIx32 "\n",
            c->seed, c->daemons, c->workers, c->units, c->micros, c->steps, c->hosts,
            c->lease ? "leases" : "ranks", c->puts ? ", puts" : "", c->apart ? ", rates apart" : "",
            c->sets ? ", sets" : "", c->guests ? ", guests" : "", guards[c->guard],
            c->ramp ? ", ramp" : "", c->rewinds ? ", rewinds" : "",
            c->verify > 0 ? ", verified" : "", c->faults);
}

/* Does it still break, in the same way? Then that is the smaller one. */
static bool try_smaller(struct sim_config *best, const struct sim_config *smaller,
                        const char *promise)
{
    const struct sim_result r = sim_run(smaller, /* trace= */ false);
    if (r.outcome != SIM_BROKEN || strcmp(r.promise, promise) != 0)
        return false;
    *best = *smaller;
    return true;
}

static struct sim_config shrink(struct sim_config c, const char *promise)
{
    for (uint32_t bit = 0; bit < 32; bit++) {
        struct sim_config less = c;
        less.faults &= ~(1u << bit);
        if (less.faults != c.faults)
            try_smaller(&c, &less, promise);
    }
    uint32_t *const counts[] = { &c.steps, &c.daemons, &c.workers, &c.units, &c.micros };
    for (size_t i = 0; i < ARRAY_SIZE(counts); i++) {
        for (uint32_t n = 1; n < *counts[i]; n++) {
            struct sim_config less = c;
            const size_t offset = (size_t)((uint8_t *)counts[i] - (uint8_t *)&c);
            memcpy((uint8_t *)&less + offset, &n, sizeof n);
            if (try_smaller(&c, &less, promise))
                break;
        }
    }
    return c;
}

static void report(const struct sim_scenario *scenario, const struct sim_config *c,
                   const struct sim_result *r)
{
    fprintf(stderr, "scenario '%s' broke %s: %s\n", scenario->name, r->promise, r->text);
    print_config(c);
    const struct sim_config small = shrink(*c, r->promise);
    fprintf(stderr, "shrunk to ");
    print_config(&small);
    const struct sim_result again = sim_run(&small, /* trace= */ false);
    fprintf(stderr, "%s: %s\n", again.promise, again.text);
    sim_print_end();
}

struct runs {
    uint64_t seed, events; /* from seed on, for so many */
    uint32_t hosts;        /* with replicas; 0: as the seed has it */
    bool back, brief, trace;
};

/* False: something broke, and was reported. */
static bool run_seeds(const struct sim_scenario *scenario, const struct runs *runs,
                      uint64_t *ret_lost)
{
    uint64_t events = 0, kills = 0, lost = 0, last = runs->seed;
    const clock_t start = clock();
    for (; events < runs->events; last++) {
        struct sim_config c = sim_config_of(scenario, last);
        c.rewinds = c.rewinds || runs->back;
        c.guests = c.guests && !runs->back;
        if (runs->brief)
            sim_config_shorten(&c);
        c.hosts = c.replicas && runs->hosts > 0 ? runs->hosts : c.hosts;
        const struct sim_result r = sim_run(&c, runs->trace);
        events += r.events;
        kills += r.kills;
        lost += r.outcome == SIM_LOST;
        if (r.outcome == SIM_BROKEN) {
            report(scenario, &c, &r);
            return false;
        }
    }
    const double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    printf("  %-10s seeds %" PRIu64 "..%" PRIu64 ": %" PRIu64 " events, %" PRIu64 " kills, %" PRIu64
           " lost, %.1f million events/s\n",
           scenario->name, runs->seed, last - 1, events, kills, lost,
           (double)events / 1e6 / (seconds + 1e-9));
    *ret_lost = lost;
    return true;
}

static bool run_scenario(const struct sim_scenario *scenario, uint64_t seed, uint64_t events,
                         uint64_t *ret_lost)
{
    const struct runs runs = { .seed = seed, .events = events };
    return run_seeds(scenario, &runs, ret_lost);
}

static const struct sim_scenario *find(const char *name)
{
    for (uint32_t i = 0; i < sim_scenario_count; i++)
        if (strcmp(sim_scenarios[i].name, name) == 0)
            return &sim_scenarios[i];
    return NULL;
}

TEST(nothing_is_lost_counted_twice_or_stuck_whatever_happens)
{
    uint64_t lost;
    for (uint32_t i = 0; i < sim_scenario_count; i++) {
        if ((sim_scenarios[i].faults & SIM_KEEPER) != 0 || sim_scenarios[i].replicas)
            continue;
        EXPECT(run_scenario(&sim_scenarios[i], SEED, EVENTS, &lost));
        EXPECT_EQ(lost, 0);
    }
}

/* Promises R1 to R5 of sim_replica.h. */
TEST(training_goes_on_with_one_result_whichever_host_is_lost_or_cut_off)
{
    uint64_t lost;
    for (uint32_t i = 0; i < sim_scenario_count; i++) {
        if (!sim_scenarios[i].replicas)
            continue;
        EXPECT(run_scenario(&sim_scenarios[i], SEED, EVENTS / 4, &lost));
        EXPECT_EQ(lost, 0);
    }
}

/* What a host that is lost takes with it changes no bit, nor does who goes on alone. */
TEST(result_with_a_host_lost_is_that_of_a_run_in_which_none_is)
{
    static const char *const names[] = { "hosts", "links", "halves" };
    struct sim_result all = { .outs = 0 };
    for (uint64_t seed = 1; seed <= 90; seed++) {
        struct sim_config c = sim_config_of(find(names[seed % ARRAY_SIZE(names)]), seed);
        sim_config_shorten(&c);
        c.puts = c.apart = false; /* who is first is first */
        const struct sim_result r = sim_run(&c, false);
        if (r.outcome != SIM_DONE || r.digest != sim_expected_digest(&c))
            print_config(&c);
        EXPECT(r.outcome == SIM_DONE && r.digest == sim_expected_digest(&c));
        all.outs += r.outs;
        all.succeeded += r.succeeded;
    }
    printf("  %" PRIu64 " hosts out, %" PRIu64 " times an owner's replica took its place\n",
           all.outs, all.succeeded);
    EXPECT(all.outs > 20 && all.succeeded > 40);
}

static bool all_killed_at(const char *const *names, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (sim_killed_at(names[i]) == 0)
            return false;
    return true;
}

TEST(each_fail_point_of_the_core_and_its_shell_was_killed_at)
{
    static const char *const names[] = {
        "step:metrics:before",
        "step:metrics:after",
        "step:cell:before",
        "step:cell:after",
        "step:commit:before",
        "step:commit:after",
        "sim:reply:before",
        "sim:reply:after",
        "sim:block:before",
        "sim:block:after",
        "sim:done:before",
        "sim:done:after",
        "sim:publish:before",
        "sim:publish:after",
        "sim:spill:before",
        "sim:spill:after",
        "sim:resume",
        "step:promise:before",
        "step:promise:after",
        "step:reset:before",
        "step:reset:after",
        "step:set:before",
        "step:set:after",
        "sim:set:answer",
        "create:full:before",
        "create:full:after",
        "create:ready:before",
        "create:ready:after",
        "drop:hold:before",
        "drop:hold:after",
        "drop:ready:before",
        "drop:ready:between",
        "drop:ready:after",
        "step:go_on:before",
        "step:go_on:after",
        "sim:go_on",
        "rewind:held",
        "step:rewind:before",
        "step:rewind:after",
        "step:rewind:unit",
        "step:rewind:words",
        "step:rewind:done:before",
        "step:rewind:done:after",
        "sim:back:block",
        "sim:snapshot:head",
        "sim:snapshot:ready",
        "sim:snapshot:trim",
    };
    uint64_t lost;
    EXPECT(run_scenario(find("points"), 1, 500000, &lost));
    EXPECT(run_scenario(find("again"), 1, 500000, &lost));
    /* What owner 0 alone passes, now and then. */
    for (uint64_t seed = 1; seed <= SEEDS_MAX && !all_killed_at(names, ARRAY_SIZE(names)); seed++) {
        struct sim_config c = sim_config_of(find("points"), seed);
        c.daemons = 1 + (uint32_t)seed % 2;
        c.rewinds = true;
        c.guard = SIM_GUARD_STOPS;
        EXPECT_EQ(sim_run(&c, false).outcome, SIM_DONE);
    }
    for (size_t i = 0; i < ARRAY_SIZE(names); i++)
        if (sim_killed_at(names[i]) == 0)
            FAIL("nobody was killed at '%s'", names[i]);
}

TEST(steps_are_pinned_and_forks_made_and_dropped_all_the_while)
{
    static const char *const names[] = { "calm", "stalls", "worst" };
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        struct sim_result all = { .pins = 0 };
        for (uint64_t seed = 1; seed <= 8; seed++) {
            struct sim_config c = sim_config_of(find(names[i]), seed);
            c.guests = true;
            const struct sim_result r = sim_run(&c, false);
            EXPECT_EQ(r.outcome, SIM_DONE);
            all.pins += r.pins;
            all.forks += r.forks;
            all.drops += r.drops;
        }
        EXPECT(all.pins > 100 && all.forks > 10 && all.drops > 10);
    }
}

TEST(model_goes_back_and_is_stopped_all_the_while)
{
    static const char *const names[] = { "calm", "stalls", "points", "worst" };
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        struct sim_result all = { .stops = 0 };
        for (uint64_t seed = 1; seed <= 8; seed++) {
            struct sim_config c = sim_config_of(find(names[i]), seed);
            c.rewinds = true;
            c.guard = SIM_GUARD_STOPS;
            const struct sim_result r = sim_run(&c, false);
            EXPECT_EQ(r.outcome, SIM_DONE);
            all.stops += r.stops;
            all.snapshots += r.snapshots;
            all.rewinds += r.rewinds;
        }
        EXPECT(all.stops > 10 && all.snapshots > 100 && all.rewinds > 20);
    }
}

/* Though the steps in between were others: the digest is that of a run that never took them. */
TEST(result_after_rewinds_is_that_of_a_run_that_never_went_further)
{
    uint64_t rewinds = 0;
    for (uint64_t seed = 1; seed <= 12; seed++) {
        struct sim_config c = sim_config_of(find(seed % 2 == 0 ? "calm" : "both"), seed);
        c.puts = c.apart = c.sets = false; /* sim_check_end() compares, then */
        c.rewinds = c.ramp = c.micros > 1;
        const struct sim_result r = sim_run(&c, false);
        EXPECT_EQ(r.outcome, SIM_DONE);
        EXPECT(r.rewinds > 0 || !c.rewinds || r.digest == sim_expected_digest(&c));
        rewinds += r.rewinds;
    }
    EXPECT(rewinds > 20);
}

TEST(lost_keeper_is_reported_and_never_silently_wrong)
{
    uint64_t lost;
    EXPECT(run_scenario(find("keeper"), SEED, EVENTS, &lost));
    EXPECT(lost > 0);
}

/* It sees the same step there as it is at; what it has computed is of no step at all. */
TEST(late_worker_returns_nothing_to_an_owner_that_began_anew)
{
    struct sim_config c = sim_config_of(find("keeper"), 73);
    EXPECT_EQ(sim_run(&c, false).outcome, SIM_LOST);
    c.micros = 2; /* the least of each that shows it */
    c.steps = 4;
    EXPECT_EQ(sim_run(&c, false).outcome, SIM_LOST);
}

/* Others come by with other seeds; these broke once, beyond those that the tests above run. */
TEST(seeds_that_broke_once_do_not)
{
    static const struct {
        const char *scenario;
        uint64_t seed;
        uint32_t hosts; /* 0: as the seed has it */
        bool brief;
    } broke[] = {
        /* a put of before a rewind began at an owner that had gone back */
        { "resets", 229, 0, false },   { "stalls", 938, 0, false },
        { "workers", 453, 0, false }, /* copies of the dead to be verified left no room, but work */
        { "links", 694, 3, false },   /* a worker acted by an older view than others */
        { "halves", 20386, 2, false }, /* a lost owner alone had begun an attempt */
        { "halves", 26545, 2, true },  /* a lost owner had granted a reset */
        { "halves", 27787, 3, true },  { "halves", 29772, 2, true },
        { "halves", 23246, 3, false }, /* what was said beside one that was lost then counted */
    };
    for (size_t i = 0; i < ARRAY_SIZE(broke); i++) {
        struct sim_config c = sim_config_of(find(broke[i].scenario), broke[i].seed);
        if (broke[i].brief)
            sim_config_shorten(&c);
        c.hosts = broke[i].hosts > 0 ? broke[i].hosts : c.hosts;
        const struct sim_result r = sim_run(&c, false);
        if (r.outcome != SIM_DONE)
            FAIL("%s, seed %" PRIu64 ": %s %s", broke[i].scenario, c.seed, r.promise, r.text);
    }
}

TEST(result_is_the_same_for_any_number_of_daemons_and_workers)
{
    const char *const names[] = { "calm", "both" };
    for (uint64_t seed = 1; seed <= 10; seed++) {
        struct sim_config c = sim_config_of(find("calm"), seed);
        c.puts = c.apart = c.sets = c.guests = c.rewinds = false; /* who is first is first */
        const uint64_t expected = sim_expected_digest(&c);
        for (c.daemons = 1; c.daemons <= SIM_DAEMONS; c.daemons++)
            for (c.workers = 1; c.workers <= SIM_WORKERS; c.workers++)
                for (uint32_t how = 0; how < 4; how++) {
                    c.faults = find(names[how & 1])->faults;
                    c.lease = how >> 1;
                    const struct sim_result r = sim_run(&c, false);
                    if (r.outcome != SIM_DONE || r.digest != expected)
                        print_config(&c);
                    EXPECT(r.outcome == SIM_DONE && r.digest == expected);
                }
    }
}

/* Where nothing dies. Who attaches late, or has no work in a step, is not looked at in it; no copy
 * of the wrong worker's passes for right, but of a group in which no unit here took part. */
TEST(wrong_worker_is_named_and_nobody_else)
{
    uint64_t compared = 0, of_wrong = 0, named = 0;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        struct sim_config c = sim_config_of(find("calm"), seed);
        c.puts = c.apart = c.sets = c.rewinds = false;
        c.lease = true;
        c.steps = 200;
        c.verify = 1 + seed % 4;
        c.workers = 2 + (uint32_t)seed % (SIM_WORKERS - 1);
        c.wrong = seed % 3 == 0 ? 0 : 1 + (uint32_t)seed % c.workers;
        const struct sim_result r = sim_run(&c, false);
        if (r.outcome != SIM_DONE || (r.named > 0) != (c.wrong > 0))
            print_config(&c);
        EXPECT(r.outcome == SIM_DONE && r.digest == sim_expected_digest(&c));
        EXPECT_EQ(r.named > 0, c.wrong > 0);
        compared += r.compared;
        of_wrong += r.compared_wrong;
        named += r.named;
    }
    printf("  %" PRIu64 " compared, %" PRIu64 " of the wrong one, %" PRIu64 " named\n", compared,
           of_wrong, named);
    EXPECT(compared > 2000 && of_wrong > 1000 && named >= of_wrong / 10 * 8);
}

TEST(same_seed_gives_the_same_run)
{
    const struct sim_config c = sim_config_of(find("everything"), SEED);
    const struct sim_result a = sim_run(&c, false), b = sim_run(&c, false);
    EXPECT(a.events == b.events && a.digest == b.digest && a.kills == b.kills);
}

/* -- As a tool ----------------------------------------------------------------------------------
 */

static int usage(void)
{
    fprintf(stderr, "test_sim --scenario NAME [--seed S] [--events N] [--hosts 2|3] [--back] "
                    "[--short] [--trace]\n"
                    "scenarios:");
    for (uint32_t i = 0; i < sim_scenario_count; i++)
        fprintf(stderr, " %s", sim_scenarios[i].name);
    fputc('\n', stderr);
    return 2;
}

static int tool(int argc, char **argv)
{
    const struct sim_scenario *scenario = NULL;
    struct runs runs = { .seed = SEED, .events = 1 };
    uint64_t lost;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        const bool trace = strcmp(argv[i], "--trace") == 0, back = strcmp(argv[i], "--back") == 0;
        runs.trace = runs.trace || trace;
        const bool brief = strcmp(argv[i], "--short") == 0;
        runs.back = runs.back || back;
        runs.brief = runs.brief || brief;
        if (trace || back || brief)
            continue;
        if (strcmp(argv[i], "--scenario") == 0)
            scenario = find(value);
        else if (strcmp(argv[i], "--seed") == 0)
            runs.seed = strtoull(value, NULL, 0);
        else if (strcmp(argv[i], "--hosts") == 0 && value[0] >= '2' && value[0] <= '3')
            runs.hosts = (uint32_t)value[0] - '0';
        else if (strcmp(argv[i], "--events") == 0)
            runs.events = strtoull(value, NULL, 0);
        else
            return usage();
        i++;
    }
    if (scenario == NULL)
        return usage();
    return run_seeds(scenario, &runs, &lost) ? 0 : 1;
}

int main(int argc, char **argv)
{
    if (argc > 1 && strncmp(argv[1], "--", 2) == 0)
        return tool(argc, argv);
    return test_run_all(argc, argv);
}
