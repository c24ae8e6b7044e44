/* The guard: a batch that was planted a thousand times too large is skipped, by any rule, with any
 * number of owners and workers, whatever is killed around it, and the run ends in the bits of one
 * that never had this batch. What stops is refused until it is gone on with. */
#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/paths/map.h"
#include "client/paths/turn.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"
#include "tests/lib/paired.h"

#define STEPS     10u
#define BAD       7u /* the batch whose gradients and loss are large */
#define LARGE     1000.0f
#define NORM_SKIP "{\"norm_above\": 1000}"
#define NORM_STOP "{\"norm_above\": 1000, \"action\": \"stop\"}"

static const char *const rules[] = {
    NORM_SKIP,
    "{\"norm_zscore\": 50, \"window\": 4}",
    "{\"loss_zscore\": 50, \"window\": 5}",
    "{\"norm_zscore\": 50, \"window\": 4, \"units\": [\"h*\", \"embed\"]}",
};
static const uint32_t kinds[] = { SHD_GUARD_NORM_ABOVE, SHD_GUARD_NORM_ZSCORE,
                                  SHD_GUARD_LOSS_ZSCORE, SHD_GUARD_UNIT_ZSCORE };

/* rule NULL: none. */
static const char *spec(const char *rule)
{
    static char json[5000];
    const char *toy = toy_spec("f32", TOY_ADAMW);
    snprintf(json, sizeof json, "{ %s%s%s %s", rule != NULL ? "\"guard\": [" : "",
             rule != NULL ? rule : "", rule != NULL ? "]," : "", toy + 1);
    return json;
}

struct batches { /* ctx of a step */
    shd_model *m;
    uint64_t data; /* which batch it is */
    float by;      /* what that is multiplied by */
};

static int forward(void *ctx, uint32_t micro, uint32_t unit, const void *params)
{
    (void)ctx, (void)micro, (void)unit, (void)params;
    return 0;
}

/* A function of parameters and batch alone, not of the step. */
static int backward(void *ctx, uint32_t micro, uint32_t unit, const void *params, float *grad)
{
    const struct batches *b = ctx;
    const float by = b->data == BAD ? b->by : 1, *p = params;
    if (unit + 1 == shd_units(b->m)) { /* uses embed */
        struct shd_err e;
        float *tied;
        if (shd_grad(b->m, micro, 0, &tied, &e) != SHD_OK)
            return 1;
    }
    for (uint32_t t = 0; t < shd_tensors(b->m); t++) {
        struct shd_tensor tensor = { .size = sizeof tensor };
        shd_tensor_get(b->m, t, &tensor, NULL);
        for (uint64_t i = tensor.offset_elems;
             tensor.unit == unit && i < tensor.offset_elems + tensor.elems; i++)
            grad[i] = by * (toy_noise(b->data, micro, unit, i) + 0.1f * p[i]);
    }
    return 0;
}

static uint32_t metrics(void *ctx, uint32_t micro, double *ret_metrics)
{
    const struct batches *b = ctx;
    ret_metrics[0] = (double)(b->data == BAD ? b->by : 1) * (2 + 1.0 / (micro + 3));
    return 1;
}

/* Step k trains on batch k; without: from BAD on on the one after that. */
static int train(shd_model *m, float by, bool without, const uint32_t *micros, uint32_t count,
                 struct shd_result *ret_result, struct shd_err *e)
{
    struct batches b = { m, shd_step(m), by };
    if (without && b.data >= BAD)
        b.data++;
    const struct shd_compute compute = { sizeof compute, &b, forward, backward, metrics, NULL };
    const struct shd_update update = toy_update(b.data);
    return shd_run_step(m, micros, count, &compute, &update, ret_result, e);
}

/* All that the owners hold, one array behind the other; the caller's to free. */
static float *state_of(shd_model *m, uint64_t *ret_elems, uint64_t *ret_updates)
{
    struct shd_err e = { 0 };
    float *all = NULL;
    uint64_t elems = 0;
    for (uint32_t u = 0; u < shd_units(m); u++)
        for (int array = SHD_PARAMS; array <= SHD_MOMENT2; array++) {
            const uint64_t more = shd_unit_elems(m, u);
            all = realloc(all, (elems + more) * sizeof *all);
            CHECK(all != NULL);
            EXPECT_OK(shd_get(m, u, (enum shd_array)array, all + elems, NULL, ret_updates, &e), &e);
            elems += more;
        }
    *ret_elems = elems;
    return all;
}

/* The oracle: no guard. planted NaN: the batch's gradients are not finite. Else there is no such
 * batch, and the steps are one fewer. */
static float *oracle(float planted, char ret_hex[65], uint64_t *ret_elems, uint64_t *ret_updates)
{
    struct shd_err e = { 0 };
    shd_session *s;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, spec(NULL));
    while (shd_step(m) < (isnan(planted) ? STEPS : STEPS - 1))
        EXPECT_OK(train(m, planted, !isnan(planted), toy_all_micros, TOY_MICROS, NULL, &e), &e);
    digest_of(m, ret_hex);
    float *state = state_of(m, ret_elems, ret_updates);
    shd_close(s);
    return state;
}

/* A digest has the number of steps in it: it is that of a run in which the batch's gradients were
 * not finite. What that holds, to the bit, is what a run holds that never had the batch. */
static void reference(char ret_hex[65])
{
    uint64_t elems, fewer_elems, updates, fewer_updates;
    char other[65];
    float *state = oracle(NAN, ret_hex, &elems, &updates);
    float *fewer = oracle(1, other, &fewer_elems, &fewer_updates);
    EXPECT_EQ(elems, fewer_elems);
    EXPECT_EQ(updates, STEPS - 1);
    EXPECT_EQ(fewer_updates, STEPS - 1);
    EXPECT(memcmp(state, fewer, elems * sizeof *state) == 0);
    free(state);
    free(fewer);
}

static void expect_digest(shd_model *m, const char *want)
{
    char got[65];
    digest_of(m, got);
    EXPECT_STR(got, want);
}

static void expect_result(const struct shd_result *r, uint32_t rule, bool stops)
{
    EXPECT_EQ(r->skipped, r->step == BAD);
    EXPECT_EQ(r->guard, r->step == BAD ? rule : SHD_GUARD_NONE);
    EXPECT_EQ(r->stopped, r->step == BAD && stops);
    if (r->step == BAD)
        EXPECT(r->guard_value > 10 * r->guard_bound && r->guard_bound > 0);
    if (r->step == BAD && rule == SHD_GUARD_UNIT_ZSCORE)
        EXPECT(r->cause_unit > 0 && r->guard_value == r->cause_norm);
    else if (r->step == BAD && rule != SHD_GUARD_LOSS_ZSCORE)
        EXPECT(r->guard_value == r->grad_norm);
}

static void expect_row(shd_model *m, uint32_t rule)
{
    struct shd_err e = { 0 };
    struct shd_step_row rows[STEPS];
    uint64_t from = 0;
    uint32_t count = 0;
    rows[0].size = sizeof rows[0];
    EXPECT_OK(shd_history(m, &from, rows, STEPS, &count, &e), &e);
    EXPECT_EQ(count, STEPS);
    for (uint32_t i = 0; i < count; i++) {
        EXPECT_EQ(rows[i].skipped, i == BAD);
        EXPECT_EQ(rows[i].guard, i == BAD ? rule : SHD_GUARD_NONE);
        EXPECT_EQ(rows[i].guard_bound > 0, i == BAD);
    }
}

/* -- Skipping ---------------------------------------------------------------------------------- */

TEST(in_this_process_it_is_as_if_the_batch_had_not_been)
{
    struct shd_err e = { 0 };
    char want[65], got[65];
    shd_session *s;
    reference(want);
    for (uint32_t i = 0; i <= ARRAY_SIZE(rules); i++) {
        EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
        shd_model *m = open_toy(s, spec(i < ARRAY_SIZE(rules) ? rules[i] : NULL));
        while (shd_step(m) < STEPS) {
            struct shd_result result = { .size = sizeof result };
            EXPECT_OK(train(m, LARGE, false, toy_all_micros, TOY_MICROS, &result, &e), &e);
            if (i < ARRAY_SIZE(rules))
                expect_result(&result, kinds[i], false);
        }
        digest_of(m, got);
        EXPECT_EQ(strcmp(got, want) == 0, i < ARRAY_SIZE(rules)); /* without a guard it counts */
        if (i < ARRAY_SIZE(rules))
            expect_row(m, kinds[i]);
        shd_close(s);
    }
}

/* Of a gradient that is 1 everywhere the unit's norm is 2, of however many micro-batches. */
TEST(norms_of_units_go_by_the_micro_batches_that_are_set)
{
    static const char json[] =
        "{\"name\":\"g\",\"micro_batches\":2,\"micro_batches_max\":8,"
        "\"optimizer\":{\"kind\":\"sgd\"},\"guard\":[{\"norm_above\":4,\"units\":[\"u\"]}],"
        "\"units\":[{\"name\":\"u\",\"tensors\":[{\"name\":\"u.w\",\"shape\":[4]}]}]}";
    const struct shd_update update = { .size = sizeof update, .lr = 0.1 };
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    EXPECT_OK(shd_model_open(s, json, &m, &e), &e);
    EXPECT_OK(shd_model_set(m, "micro_batches=8", 0, NULL, &e), &e);
    while (shd_step(m) < 3) {
        struct shd_result result = { .size = sizeof result };
        for (uint32_t micro = 0; micro < shd_micro_batches(m); micro++) {
            float *grad;
            EXPECT_OK(shd_grad(m, micro, 0, &grad, &e), &e);
            for (uint32_t i = 0; i < 4; i++)
                grad[i] = 1;
            EXPECT_OK(shd_return(m, micro, 0, &e), &e);
        }
        EXPECT_OK(shd_commit(m, &update, &result, &e), &e);
        EXPECT(!result.skipped && fabs(result.grad_norm - 2) < 1e-6);
    }
    EXPECT_EQ(shd_micro_batches(m), 8);
    shd_close(s);
}

static pid_t other_worker(const char *rule)
{
    const pid_t pid = test_fork();
    if (pid != 0)
        return pid;
    shd_session *s;
    shd_model *m;
    MUST_OK(try_connect(daemons.address, PATIENT_MS, &s, &e));
    MUST_OK(shd_model_open(s, spec(rule), &m, &e));
    while (shd_step(m) < STEPS)
        MUST_OK(train(m, LARGE, false, toy_all_micros + 2, 2, NULL, &e));
    shd_close(s);
    _exit(0);
}

static void expect_ended(pid_t pid)
{
    int status = 0;
    EXPECT(waitpid(pid, &status, 0) == pid);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(owners_and_workers_make_no_difference)
{
    char want[65];
    struct shd_err e = { 0 };
    reference(want);
    for (uint32_t i = 0; i < ARRAY_SIZE(rules); i++)
        for (uint32_t workers = 1; workers <= 2; workers++) {
            const int owners = 1 + (int)(i + workers) % 3;
            fixture_start(&daemons, owners, NULL);
            const pid_t pid = workers == 2 ? other_worker(rules[i]) : 0;
            shd_session *s = attach(PATIENT_MS);
            shd_model *m = open_toy(s, spec(rules[i]));
            while (shd_step(m) < STEPS) {
                struct shd_result result = { .size = sizeof result };
                EXPECT_OK(train(m, LARGE, false, toy_all_micros, workers == 2 ? 2 : 4, &result, &e),
                          &e);
                expect_result(&result, kinds[i], false);
            }
            if (pid != 0)
                expect_ended(pid);
            expect_digest(m, want);
            expect_row(m, kinds[i]);
            shd_close(s);
            fixture_stop(&daemons);
        }
}

/* A worker for each step, and the owners killed between any two: windows outlive them all. */
TEST(windows_outlive_owners_and_workers)
{
    char want[65];
    struct shd_err e = { 0 };
    reference(want);
    for (uint32_t i = 1; i < ARRAY_SIZE(rules); i++) {
        fixture_start_kept(&daemons, 2, "");
        for (uint32_t step = 0; step < STEPS; step++) {
            struct shd_result result = { .size = sizeof result };
            shd_session *s = attach(PATIENT_MS);
            shd_model *m = open_toy(s, spec(rules[i]));
            EXPECT_EQ(shd_step(m), step);
            EXPECT_OK(train(m, LARGE, false, toy_all_micros, TOY_MICROS, &result, &e), &e);
            expect_result(&result, kinds[i], false);
            if (step + 1 == STEPS)
                expect_digest(m, want);
            shd_close(s);
            fixture_restart(&daemons, (int)step % 2);
        }
        fixture_stop(&daemons);
    }
}

/* What the windows of units have since gone is back with the model, through kills, too: the limits
 * are those of a run that never went further. */
TEST(windows_of_units_go_back_with_the_model)
{
    char want[65];
    struct shd_err e = { 0 };
    uint64_t step;
    reference(want);
    for (int owners = 1; owners <= 2; owners++) {
        double bound = 0;
        fixture_start_kept(&daemons, owners, owners == 2 ? "rewind:words;" : "");
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, spec(rules[3]));
        while (shd_step(m) < BAD - 1)
            EXPECT_OK(train(m, LARGE, false, toy_all_micros, TOY_MICROS, NULL, &e), &e);
        EXPECT_OK(shd_snapshot(m, &step, &e), &e);
        for (int i = 0; i < 2; i++) {
            while (shd_step(m) < (i == 0 ? BAD + 8 : STEPS)) {
                struct shd_result result = { .size = sizeof result };
                EXPECT_OK(train(m, LARGE, false, toy_all_micros, TOY_MICROS, &result, &e), &e);
                expect_result(&result, SHD_GUARD_UNIT_ZSCORE, false);
                if (result.step == BAD && i == 0)
                    bound = result.guard_bound;
                else if (result.step == BAD)
                    EXPECT(result.guard_bound == bound);
            }
            if (i == 0)
                EXPECT_OK(shd_model_rewind(m, BAD - 1, &step, &e), &e);
            if (i == 0 && owners == 1)
                fixture_restart(&daemons, 0);
        }
        expect_digest(m, want);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

#ifdef SHD_FAIL_POINTS
/* Owners die between Prepare's answer and the commit of the bad step, before and behind it. */
TEST(owners_killed_around_the_commit_agree)
{
    static const char *const fails[] = {
        "step:promise:after@8;", "step:commit:before@8;",
        "step:commit:after@8;",  "step:promise:after@8;step:commit:before;",
        "skipped:sums@8;",       "step:commit:before@7;",
    };
    char want[65];
    struct shd_err e = { 0 };
    reference(want);
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        const size_t rule = i < 4 ? 1 + i % 3 : 3;
        fixture_start_kept(&daemons, 2, fails[i]);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, spec(rules[rule]));
        while (shd_step(m) < STEPS) {
            struct shd_result result = { .size = sizeof result };
            EXPECT_OK(train(m, LARGE, false, toy_all_micros, TOY_MICROS, &result, &e), &e);
            expect_result(&result, kinds[rule], false);
        }
        expect_digest(m, want);
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_STARTS, 0, "") > 1);
        shd_close(s);
        fixture_stop(&daemons);
    }
}
#endif

/* -- Hosts with replicas ----------------------------------------------------------------------- */

#define PAIR "cpu0+cpu1"

/* Steps with a rule of units in this process, the last one with the planted batch. */
static double bound_here(char ret_hex[65], uint64_t steps)
{
    struct shd_result result = { .size = sizeof result };
    struct shd_err e = { 0 };
    shd_session *s = attach_here();
    shd_model *m = open_toy(s, spec(rules[3]));
    while (shd_step(m) < steps)
        EXPECT_OK(train(m, LARGE, false, toy_all_micros, TOY_MICROS, &result, &e), &e);
    digest_of(m, ret_hex);
    shd_close(s);
    return result.guard_bound;
}

static struct {
    const shd_model *m;
    void (*on_wait)(struct hub *hub, uint64_t start_ns, uint64_t now_ns);
    bool out; /* host b */
    int go;   /* the other worker's; -1: it was told */
} waits;

/* While Prepare waits for gradients host b is lost; then, when it was asked anew, they come. */
static void lose_b(struct hub *hub, uint64_t start_ns, uint64_t now_ns)
{
    const struct link *a = &hub->links[0];
    waits.on_wait(hub, start_ns, now_ns);
    if (turn_state(waits.m->map->turn) != TURN_PREPARING || waits.go < 0)
        return;
    if (!waits.out)
        paired_put_out("b");
    waits.out = true;
    if (!hub_lost(hub, 1) || a->state != LINK_UP || a->unsent > 0)
        return;
    EXPECT_EQ(write(waits.go, "", 1), 1);
    waits.go = -1;
}

static pid_t other_of_pair(int go)
{
    char byte;
    shd_model *m;
    const pid_t pid = test_fork();
    if (pid != 0)
        return pid;
    MUST(read(go, &byte, 1) == 1);
    shd_session *s = attach_devices(PAIR);
    MUST_OK(shd_model_open(s, spec(rules[3]), &m, &e));
    MUST(shd_step(m) == 1);
    MUST_OK(train(m, LARGE, false, toy_all_micros + 2, 2, NULL, &e));
    shd_close(s);
    _exit(0);
}

/* What was asked before is answered as well, and must not be taken for the units' norms. */
TEST(a_host_lost_while_gradients_are_waited_for_leaves_the_others)
{
    char want[65];
    int go[2];
    struct shd_err e = { 0 };
    bound_here(want, 2);
    EXPECT_EQ(pipe(go), 0);
    paired_start(&daemons, 2, 2, "");
    const pid_t pid = other_of_pair(go[0]);
    shd_session *s = attach_devices(PAIR);
    shd_model *m = open_toy(s, spec(rules[3]));
    EXPECT_OK(train(m, LARGE, false, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    waits.m = m;
    waits.out = false;
    waits.go = go[1];
    waits.on_wait = s->hub->on_wait;
    s->hub->on_wait = lose_b;
    EXPECT_OK(train(m, LARGE, false, toy_all_micros, 2, NULL, &e), &e);
    EXPECT_EQ(waits.go, -1);
    expect_ended(pid);
    expect_digest(m, want);
    shd_close(s);
    close(go[0]);
    close(go[1]);
    paired_remove(&daemons);
    fixture_stop(&daemons);
}

#ifdef SHD_FAIL_POINTS
static void die_between_two_commits(const char *name)
{
    static int commits;
    commits += strcmp(name, "send:commit:before") == 0;
    if (commits == 2)
        raise(SIGKILL);
}

static void train_and_die(void)
{
    shd_model *m;
    const pid_t pid = test_fork();
    if (pid == 0) {
        shd_session *s = attach_devices(PAIR);
        MUST_OK(shd_model_open(s, spec(rules[3]), &m, &e));
        while (shd_step(m) < BAD - 2)
            MUST_OK(train(m, LARGE, false, toy_all_micros, TOY_MICROS, NULL, &e));
        fail_point_hook = die_between_two_commits;
        train(m, LARGE, false, toy_all_micros, TOY_MICROS, NULL, NULL);
        _exit(1);
    }
    int status = 0;
    EXPECT(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
}

static bool has_lost_a(const struct hub *hub)
{
    return hub_lost(hub, 1) && strcmp(hub->links[0].device, "cpu1") == 0;
}

/* A worker dies when owner 0 has the step on record and its replica has not, and the one that
 * passes it on has no norms of its own: the replica's limits are owner 0's all the same. */
TEST(windows_of_a_replica_are_its_owners)
{
    char want[65];
    struct shd_result result = { .size = sizeof result };
    struct shd_err e = { 0 };
    const double bound = bound_here(want, BAD + 1);
    paired_start(&daemons, 2, 2, "");
    train_and_die();
    shd_session *s = attach_devices(PAIR);
    shd_model *m = open_toy(s, spec(rules[3]));
    EXPECT_EQ(shd_step(m), BAD - 1);
    EXPECT_OK(train(m, LARGE, false, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    paired_put_out("a");
    poll_until(s->hub, has_lost_a);
    EXPECT_OK(train(m, LARGE, false, toy_all_micros, TOY_MICROS, &result, &e), &e);
    expect_result(&result, SHD_GUARD_UNIT_ZSCORE, false);
    EXPECT(result.guard_bound == bound);
    expect_digest(m, want);
    shd_close(s);
    paired_remove(&daemons);
    fixture_stop(&daemons);
}
#endif

/* -- Stopping ---------------------------------------------------------------------------------- */

static void train_to_the_stop(shd_model *m)
{
    struct shd_err e = { 0 };
    while (shd_step(m) <= BAD) {
        struct shd_result result = { .size = sizeof result };
        EXPECT_OK(train(m, LARGE, false, toy_all_micros, TOY_MICROS, &result, &e), &e);
        expect_result(&result, SHD_GUARD_NORM_ABOVE, true);
    }
}

static void expect_stopped(shd_model *m, const uint32_t *micros, uint32_t count)
{
    struct shd_err e = { 0 };
    EXPECT_STATUS(train(m, LARGE, false, micros, count, NULL, &e), SHD_ESTOPPED);
    EXPECT_HAS(e.text, "stopped training at step 7: norm ");
    EXPECT_HAS(e.text, "is above 1000 (norm_above)");
    EXPECT_EQ(shd_step(m), BAD + 1);
}

static void go_on(shd_model *m)
{
    struct shd_err e = { 0 };
    uint64_t from = 0;
    EXPECT_OK(shd_model_set(m, " guard=go-on", 0, &from, &e), &e);
    EXPECT_EQ(from, BAD + 1);
    EXPECT_OK(shd_model_set(m, "guard=go-on", 0, NULL, &e), &e); /* as who was not answered */
    EXPECT_STATUS(shd_model_set(m, "guard=go-on", 12, NULL, &e), SHD_EINVAL);
}

TEST(stop_in_this_process)
{
    struct shd_err e = { 0 };
    char want[65];
    shd_session *s;
    reference(want);
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, spec(NORM_STOP));
    train_to_the_stop(m);
    expect_stopped(m, toy_all_micros, TOY_MICROS);
    go_on(m);
    const struct shd_update update = toy_update(BAD + 1);
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e); /* of what is in */
    while (shd_step(m) < STEPS)
        EXPECT_OK(train(m, LARGE, false, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    expect_digest(m, want);
    shd_close(s);
}

static void expect_status(shd_session *s, bool stopped)
{
    struct shd_err e = { 0 };
    char *json = NULL;
    EXPECT_OK(shd_status(s, 0, &json, &e), &e);
    EXPECT_EQ(strstr(json, "\"stopped\":null") == NULL, stopped);
    EXPECT_EQ(strstr(json, "\"stopped\":{\"step\":7,\"guard\":{\"rule\":\"norm_above\"") != NULL,
              stopped);
    free(json);
}

/* Through kills before, behind, and at the word that lets it go on; the gradients of the step that
 * was refused count. */
TEST(stop_holds_through_kills_until_it_is_gone_on_with)
{
    static const char *const fails[] = { "", "step:commit:before@8;", "step:commit:after@8;",
                                         "step:go_on:before;", "step:go_on:after;" };
    struct shd_err e = { 0 };
    char want[65];
    reference(want);
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
#ifndef SHD_FAIL_POINTS
        if (i > 0)
            break;
#endif
        fixture_start_kept(&daemons, 2, fails[i]);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, spec(NORM_STOP));
        train_to_the_stop(m);
        expect_stopped(m, toy_all_micros, TOY_MICROS);
        shd_close(s);
        s = attach(PATIENT_MS); /* another worker: all micro-batches are in, and it is refused */
        m = open_toy(s, spec(NORM_STOP));
        if (i == 0)
            fixture_restart(&daemons, 0);
        expect_stopped(m, toy_all_micros, 0);
        expect_status(s, true);
        go_on(m);
        expect_status(s, false);
        if (i == 0)
            fixture_restart(&daemons, 0);
        else
            EXPECT_SOON(fixture_ask(&daemons, KEEPER_STARTS, 0, "") > 1);
        while (shd_step(m) < STEPS)
            EXPECT_OK(train(m, LARGE, false, toy_all_micros,
                            shd_step(m) == BAD + 1 ? 0 : TOY_MICROS, NULL, &e),
                      &e);
        expect_digest(m, want);
        expect_row(m, SHD_GUARD_NORM_ABOVE);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

/* A checkpoint of the step that was skipped says so, and a model that is restored is stopped. */
/* Going back ends a stop that was not yet, and keeps one that was. */
TEST(a_stop_goes_back_with_its_step)
{
    struct shd_err e = { 0 };
    char want[65];
    uint64_t step, from = 0;
    reference(want);
    for (int gone_on = 0; gone_on < 2; gone_on++) {
        fixture_start_kept(&daemons, 2, "");
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, spec(NORM_STOP));
        while (shd_step(m) < 4)
            EXPECT_OK(train(m, LARGE, false, toy_all_micros, TOY_MICROS, NULL, &e), &e);
        EXPECT_OK(shd_snapshot(m, &step, &e), &e);
        for (int i = 0; i < 2; i++) {
            train_to_the_stop(m);
            if (gone_on == 1)
                EXPECT_OK(shd_model_set(m, "guard=go-on", 0, &from, &e), &e);
            if (i == 0)
                EXPECT_OK(shd_model_rewind(m, 4, &step, &e), &e);
            if (i == 0)
                for (int k = 0; k < 2; k++) /* what is left of it in the ledgers is theirs */
                    fixture_restart(&daemons, k);
            if (i == 0)
                expect_status(s, false);
        }
        if (gone_on == 0) { /* the step behind it is kept with it */
            EXPECT_OK(shd_snapshot(m, &step, &e), &e);
            EXPECT_EQ(step, BAD + 1);
            go_on(m);
            EXPECT_OK(train(m, LARGE, false, toy_all_micros, TOY_MICROS, NULL, &e), &e);
            EXPECT_OK(shd_model_rewind(m, BAD + 1, &step, &e), &e);
            EXPECT_OK(shd_model_set(m, "guard=go-on", 0, NULL, &e), &e);
        }
        while (shd_step(m) < STEPS)
            EXPECT_OK(train(m, LARGE, false, toy_all_micros, TOY_MICROS, NULL, &e), &e);
        expect_digest(m, want);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

TEST(checkpoints_have_the_reason)
{
    struct shd_err e = { 0 };
    char want[65];
    reference(want);
    make_ckpts();
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec(NORM_STOP));
    train_to_the_stop(m);
    save_ok(m, 1);
    EXPECT_EQ(shell("grep -q '\"format\": 4' '%s'/step-*8/shardd.json", ckpts), 0);
    shd_close(s);
    fixture_stop(&daemons);
    fixture_start(&daemons, 3, NULL);
    s = attach(PATIENT_MS);
    m = restore_ok(s, ckpts);
    expect_stopped(m, toy_all_micros, TOY_MICROS);
    go_on(m);
    const struct shd_update update = toy_update(BAD + 1);
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
    save_ok(m, 1); /* the next decision was no guard's */
    EXPECT_EQ(shell("grep -q '\"format\": 1' '%s'/step-*9/shardd.json", ckpts), 0);
    while (shd_step(m) < STEPS)
        EXPECT_OK(train(m, LARGE, false, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    expect_digest(m, want);
    shd_close(s);
    fixture_stop(&daemons);
    remove_ckpts();
}

TEST_MAIN()
