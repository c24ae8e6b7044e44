/* The mapped path against real daemons, in forked children on a private runtime directory: the same
 * bits as in one process, whatever the split; what is mapped, and that nothing is left. */
#include <signal.h>
#include <sys/wait.h>

#include "client/paths/map.h"
#include "client/session/hub.h"
#include "proto/base/sys.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

/* -- Same bits ----------------------------------------------------------------------------------
 */

static void train_and_compare(const char *spec, int owners, uint32_t steps)
{
    char want[65], got[65];
    struct shd_err e = { 0 };
    struct shd_stats stats = { .size = sizeof stats };
    toy_reference(spec, steps, want);
    fixture_start(&daemons, owners, NULL);
    shd_session *s = attach(PATIENT_MS);
    EXPECT_EQ(shd_owners(s), owners);
    shd_model *m = open_toy(s, spec);
    for (uint32_t k = 0; k < steps; k++) {
        struct shd_result result = { .size = sizeof result };
        EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
        EXPECT_EQ(result.step, k);
        EXPECT(result.metrics[1] == 6 && result.grad_norm > 0);
    }
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_stats(s, &stats, NULL);
    EXPECT_EQ(stats.bytes_copied, 0);
    EXPECT(stats.bytes_mapped > 0 && stats.requests > 0);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(digest_equals_in_process_training_for_any_number_of_daemons)
{
    static const int counts[] = { 1, 2, 3, 5 };
    for (size_t i = 0; i < ARRAY_SIZE(counts); i++)
        train_and_compare(toy_spec("f32", TOY_ADAMW), counts[i], 4);
}

TEST(digest_equals_in_process_training_for_each_optimizer_and_dtype)
{
    train_and_compare(toy_spec("bf16", TOY_ADAMW), 2, 3);
    train_and_compare(toy_spec("f16", TOY_SGD), 3, 3);
    train_and_compare(toy_spec("f32", TOY_LION), 2, 3);
    train_and_compare(toy_spec("f32", TOY_ADAMW ", \"order\": \"torch\""), 3, 3);
    train_and_compare(toy_spec("bf16", TOY_SGD ", \"order\": \"torch\", \"nesterov\": true"), 2, 3);
}

/* Rates and divisor of each step are in its decision: all owners have the same. */
TEST(rates_and_divisor_give_the_same_bits_for_any_number_of_daemons)
{
    static const struct shd_rates group = { 0.02, 0.1, 0.8, 0.9 };
    const char *spec = pt_spec(&(struct pt_model){ .name = "rates" });
    struct pt_run run = { .steps = 3,
                          .t.overflow_step = 1,
                          .update = { .size = sizeof run.update,
                                      .clip_norm = 0.5,
                                      .divide_by = 2,
                                      .groups = &group,
                                      .group_count = 1 } };
    char want[65], got[65];
    struct shd_err e = { 0 };
    pt_reference(spec, &run, want);
    fixture_start(&daemons, 3, NULL);
    shd_session *s = attach(PATIENT_MS);
    EXPECT_OK(pt_train(s, spec, &run, toy_all_micros, TOY_MICROS, got, &e), &e);
    EXPECT_STR(got, want);
    shd_close(s);
    fixture_stop(&daemons);
}

/* pt_spec() with one group of this "idle", and decay. */
static const char *idle_spec(const char *idle)
{
    static char json[8192];
    const char *spec = pt_spec(&(struct pt_model){ .name = idle }),
               *units = strstr(spec, "\"units\"");
    snprintf(
        json, sizeof json,
        "%.*s \"groups\": [ { \"name\": \"all\", \"weight_decay\": 0.1, \"idle\": \"%s\" } ], %s",
        (int)(units - spec), spec, idle, units);
    return json;
}

/* The unit's t. */
static uint64_t updates_of(shd_model *m, uint32_t unit)
{
    struct shd_err e = { 0 };
    uint64_t updates = 0;
    float *values = malloc(shd_unit_elems(m, unit) * sizeof *values);
    EXPECT_OK(shd_get(m, unit, SHD_MOMENT2, values, NULL, &updates, &e), &e);
    free(values);
    return updates;
}

/* Three steps, in the second of which expert 0 takes no part. ret_moved: did that move it? */
static void train_idle(shd_session *s, const char *spec, char hex[65], bool *ret_moved)
{
    static const struct shd_update update = { .size = sizeof update, .lr = 0.1 };
    struct shd_err e = { 0 };
    shd_model *m;
    float *grad, before = 0;
    const void *params;
    EXPECT_OK(shd_model_open(s, spec, &m, &e), &e);
    for (uint32_t k = 0; k < 3; k++) {
        for (uint32_t i = 0; i < PT_UNITS * TOY_MICROS; i++) {
            const uint32_t micro = i / PT_UNITS, u = i % PT_UNITS;
            EXPECT_OK(shd_acquire(m, u, &params, &e), &e);
            if (k == 1 && u == PT_EXPERT) {
                before = *(const float *)params;
                EXPECT_OK(shd_return_none(m, micro, u, &e), &e);
            } else {
                EXPECT_OK(shd_grad(m, micro, u, &grad, &e), &e);
                toy_write(m, micro, u, 0, params, false, grad);
                EXPECT_OK(shd_return(m, micro, u, &e), &e);
            }
            shd_release(m, u);
        }
        EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
        EXPECT_OK(shd_acquire(m, PT_EXPERT, &params, &e), &e);
        if (k == 1)
            *ret_moved = *(const float *)params != before;
        shd_release(m, PT_EXPERT);
    }
    EXPECT_EQ(updates_of(m, PT_EXPERT), *ret_moved ? 3 : 2);
    EXPECT_EQ(updates_of(m, 0), 3);
    EXPECT_OK(shd_digest(m, hex, NULL, &e), &e);
}

TEST(idle_units_stay_as_they_are_where_their_group_says_so)
{
    const struct shd_options local = { .size = sizeof local, .address = "local:" };
    static const char *const kinds[] = { "zero", "skip" };
    char want[2][65], got[65];
    struct shd_err e = { 0 };
    shd_session *s;
    bool moved;
    fixture_start(&daemons, 3, NULL);
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        EXPECT_OK(shd_connect(&local, &s, &e), &e);
        train_idle(s, idle_spec(kinds[i]), want[i], &moved);
        EXPECT_EQ(moved, i == 0);
        shd_close(s);
        s = attach(PATIENT_MS);
        train_idle(s, idle_spec(kinds[i]), got, &moved);
        EXPECT_EQ(moved, i == 0);
        EXPECT_STR(got, want[i]);
        shd_close(s);
    }
    EXPECT(strcmp(want[0], want[1]) != 0);
    fixture_stop(&daemons);
}

/* One of W workers, in its own process: micro-batches w, w + W, ... Exits with 0 when it ends with
 * the wanted digest. */
__attribute__((noreturn)) static void be_worker(uint32_t worker, uint32_t workers, uint32_t steps,
                                                const char *want)
{
    uint32_t micros[TOY_MICROS], count = 0;
    char got[65];
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    for (uint32_t i = worker; i < TOY_MICROS; i += workers)
        micros[count++] = i;
    int r = try_connect(daemons.address, PATIENT_MS, &s, &e);
    if (r == SHD_OK)
        r = shd_model_open(s, toy_spec("f32", TOY_ADAMW), &m, &e);
    while (r == SHD_OK && shd_step(m) < steps) /* without a part it may jump */
        r = toy_step(m, micros, count, NULL, &e);
    if (r == SHD_OK)
        r = shd_digest(m, got, NULL, &e);
    if (r != SHD_OK)
        fprintf(stderr, "worker %u: %s\n", worker, e.text);
    else
        shd_close(s);
    _exit(r != SHD_OK ? 1 : strcmp(got, want) != 0 ? 2 : 0);
}

TEST(digest_does_not_depend_on_number_of_workers)
{
    const uint32_t steps = 5;
    char want[65];
    toy_reference(toy_spec("f32", TOY_ADAMW), steps, want);
    for (uint32_t workers = 1; workers <= 5; workers++) { /* the fifth has no micro-batch */
        pid_t pids[5];
        fixture_start(&daemons, 2, NULL);
        for (uint32_t w = 0; w < workers; w++) {
            pids[w] = fork();
            EXPECT(pids[w] >= 0);
            if (pids[w] == 0)
                be_worker(w, workers, steps, want);
        }
        for (uint32_t w = 0; w < workers; w++) {
            int status;
            EXPECT_EQ(waitpid(pids[w], &status, 0), pids[w]);
            EXPECT_EQ(status, 0);
        }
        fixture_stop(&daemons);
    }
}

/* What a successor of a killed worker meets: it computes again what its predecessor had returned
 * already, and the others commit meanwhile. */
struct overtaken {
    struct toy toy;
    shd_model *other;
    bool done;
};

static int forward_overtaken(void *ctx, uint32_t micro, uint32_t unit, const void *params)
{
    struct overtaken *o = ctx;
    struct shd_err e = { 0 };
    if (!o->done && unit == 1) {
        o->done = true;
        if (toy_step(o->other, toy_all_micros, TOY_MICROS, NULL, &e) != SHD_OK)
            return 9;
    }
    return toy_forward(&o->toy, micro, unit, params);
}

static int backward_overtaken(void *ctx, uint32_t micro, uint32_t unit, const void *params,
                              float *grad)
{
    struct overtaken *o = ctx;
    return toy_backward(&o->toy, micro, unit, params, grad);
}

TEST(overtaken_worker_goes_on_with_the_next_step)
{
    struct shd_err e = { 0 };
    char want[65], got[65];
    const char *spec = toy_spec("f32", TOY_ADAMW);
    toy_reference(spec, 2, want);
    fixture_start(&daemons, 2, NULL);
    shd_session *first = attach(PATIENT_MS), *second = attach(PATIENT_MS);
    struct overtaken o = { .other = open_toy(first, spec), .toy = { .fail_micro = -1 } };
    o.toy.m = open_toy(second, spec);
    const struct shd_compute compute = { sizeof compute,     &o,   forward_overtaken,
                                         backward_overtaken, NULL, NULL };
    const struct shd_update update = toy_update(0);
    struct shd_result result = { .size = sizeof result };
    EXPECT_OK(shd_run_step(o.toy.m, (const uint32_t[]){ 1, 3 }, 2, &compute, &update, &result, &e),
              &e);
    EXPECT(o.done);
    EXPECT_EQ(result.step, 0);
    EXPECT_EQ(shd_step(o.toy.m), 1);
    EXPECT_OK(toy_step(o.toy.m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    EXPECT_OK(shd_digest(o.toy.m, got, NULL, &e), &e);
    EXPECT_STR(got, want);
    shd_close(first);
    shd_close(second);
    fixture_stop(&daemons);
}

/* -- Mapping ------------------------------------------------------------------------------------
 */

/* Each unit is one array although three daemons own it: initial values are those of one owner. */
TEST(units_are_contiguous_over_owners)
{
    const char *spec = toy_spec("f32", TOY_ADAMW);
    struct shd_err e = { 0 };
    shd_session *one;
    const struct shd_options options = { .size = sizeof options, .address = "local:" };
    fixture_start(&daemons, 3, NULL); /* it forks: before the first thread */
    EXPECT_OK(shd_connect(&options, &one, &e), &e);
    shd_model *reference = open_toy(one, spec);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec);
    for (uint32_t t = 0; t < shd_tensors(m); t++) {
        struct shd_tensor tensor = { .size = sizeof tensor };
        const void *a, *b;
        shd_tensor_get(m, t, &tensor, NULL);
        EXPECT_OK(shd_acquire(m, tensor.unit, &a, &e), &e);
        EXPECT_OK(shd_acquire(reference, tensor.unit, &b, &e), &e);
        EXPECT(memcmp((const float *)a + tensor.offset_elems,
                      (const float *)b + tensor.offset_elems, tensor.elems * sizeof(float)) == 0);
    }
    shd_close(s);
    shd_close(one);
    fixture_stop(&daemons);
}

TEST(fifty_attaches_leak_nothing_on_either_side)
{
    fixture_start(&daemons, 2, NULL);
    int own_fds = 0, own_maps = 0, fds = 0, maps = 0;
    for (int i = 0; i < 50; i++) {
        struct shd_err e = { 0 };
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
        if (i % 10 == 0)
            EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
        shd_close(s);
        if (i > 0)
            continue;
        sleep_ms(200);
        own_fds = count_fds(getpid());
        own_maps = count_segment_maps(getpid());
        fds = count_fds(daemons.pids[0]);
        maps = count_segment_maps(daemons.pids[0]);
    }
    EXPECT_EQ(count_fds(getpid()), own_fds);
    EXPECT_EQ(count_segment_maps(getpid()), own_maps);
    EXPECT_EQ(own_maps, 0);
    expect_daemon_idle(daemons.pids[0], fds, maps);
    fixture_stop(&daemons);
}

TEST(attach_by_name_reads_and_trains)
{
    char want[65], got[65];
    struct shd_err e = { 0 };
    shd_model *m;
    toy_reference(toy_spec("f32", TOY_ADAMW), 2, want);
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    EXPECT_STATUS(shd_model_attach(s, NULL, &m, &e), SHD_ENOENT);
    EXPECT_STATUS(shd_model_attach(s, "toy", &m, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "toy");
    shd_model *first = open_toy(s, toy_spec("f32", TOY_ADAMW));
    EXPECT_OK(toy_step(first, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    shd_session *other = attach(PATIENT_MS);
    EXPECT_OK(shd_model_attach(other, NULL, &m, &e), &e);
    EXPECT_STR(shd_model_name(m), "toy");
    EXPECT_EQ(shd_step(m), 1);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e); /* slots made on demand */
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(blob_status_and_skip)
{
    struct shd_err e = { 0 };
    char buf[64], *json;
    size_t bytes;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    struct shd_update update = toy_update(0);
    update.blob = "position";
    update.blob_bytes = 8;
    for (uint32_t micro = 0; micro < TOY_MICROS; micro++)
        for (uint32_t u = 0; u < shd_units(m); u++)
            if (u == 1 && micro == 1) {
                float *grad;
                EXPECT_OK(shd_grad(m, micro, u, &grad, &e), &e);
                for (uint32_t i = 0; i < 4099; i++)
                    grad[i] = i == 4000 ? (float)NAN : 0;
                EXPECT_OK(shd_return(m, micro, u, &e), &e);
            } else {
                EXPECT_OK(shd_return_none(m, micro, u, &e), &e);
            }
    struct shd_result result = { .size = sizeof result };
    EXPECT_OK(shd_commit(m, &update, &result, &e), &e);
    EXPECT(result.skipped && isinf(result.grad_norm));
    EXPECT_EQ(shd_step(m), 1);
    EXPECT_OK(shd_blob(m, buf, sizeof buf, &bytes, &e), &e);
    EXPECT(bytes == 8 && memcmp(buf, "position", 8) == 0);
    EXPECT_STATUS(shd_blob(m, buf, 4, &bytes, &e), SHD_ERANGE);
    EXPECT_OK(shd_status(s, 1, &json, &e), &e);
    EXPECT_HAS(json, "cpu1");
    free(json);
    EXPECT_STATUS(shd_status(s, 2, &json, &e), SHD_ERANGE);
    shd_close(s);
    fixture_stop(&daemons);
}

#define CROWD_UNITS 4096u

/* A model of so many units, with names so long, that three such models have a status that no frame
 * takes. */
static char *crowded_spec(int index)
{
    char *text = malloc(SPEC_MESSAGE_BYTES_MAX);
    int used = snprintf(text, SPEC_MESSAGE_BYTES_MAX,
                        "{ \"name\": \"crowd%d\", \"micro_batches\": 1, \"optimizer\": { \"kind\": "
                        "\"sgd\" }, \"units\": [",
                        index);
    for (unsigned u = 0; u < CROWD_UNITS; u++)
        used += snprintf(text + used, SPEC_MESSAGE_BYTES_MAX - (size_t)used,
                         "%s{\"name\":\"%030u\",\"tensors\":[{\"name\":\"t%u\",\"shape\":[1]}]}",
                         u > 0 ? "," : "", u, u);
    snprintf(text + used, SPEC_MESSAGE_BYTES_MAX - (size_t)used, "] }");
    return text;
}

TEST(status_counts_units_where_their_list_fits_no_frame)
{
    struct shd_err e = { 0 };
    char *json;
    fixture_start(&daemons, 1, NULL);
    shd_session *s = attach(PATIENT_MS);
    for (int i = 0; i < 3; i++) {
        char *spec = crowded_spec(i);
        shd_model *m;
        EXPECT_OK(shd_model_open(s, spec, &m, &e), &e);
        free(spec);
        EXPECT_OK(shd_status(s, 0, &json, &e), &e);
        EXPECT_EQ(strstr(json, "\"units\":4096") == NULL, i < 2);
        EXPECT_EQ(strstr(json, "\"waits\":[") != NULL, i < 2);
        EXPECT_HAS(json, "\"sessions\":[{");
        free(json);
    }
    shd_close(s);
    fixture_stop(&daemons);
}

/* Two models in one session take turns; each comes out as if it were alone. */
TEST(models_of_one_session_do_not_mix)
{
    const char *other = "{ \"name\": \"other\", \"micro_batches\": 4, \"optimizer\": {"
                        " \"kind\": \"lion\" }, \"units\": [ { \"name\": \"u\", \"tensors\": ["
                        " { \"name\": \"w\", \"shape\": [9000], \"init\": [\"normal\", 0, 1] } ] },"
                        " { \"name\": \"v\", \"uses\": [\"u\"], \"tensors\": ["
                        " { \"name\": \"x\", \"shape\": [77] } ] } ] }";
    char want_toy[65], want_other[65], got[65];
    struct shd_err e = { 0 };
    toy_reference(toy_spec("f32", TOY_ADAMW), 3, want_toy);
    toy_reference(other, 3, want_other);
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *a = open_toy(s, toy_spec("f32", TOY_ADAMW));
    shd_model *b = open_toy(s, other);
    for (int k = 0; k < 3; k++) {
        EXPECT_OK(toy_step(a, toy_all_micros, TOY_MICROS, NULL, &e), &e);
        EXPECT_OK(toy_step(b, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    }
    digest_of(a, got);
    EXPECT_STR(got, want_toy);
    digest_of(b, got);
    EXPECT_STR(got, want_other);
    shd_model_close(a); /* b goes on */
    EXPECT_OK(toy_step(b, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    EXPECT_EQ(shd_step(b), 4);
    shd_close(s);
    s = attach(PATIENT_MS);
    EXPECT_STATUS(shd_model_attach(s, NULL, &a, &e), SHD_ENOENT); /* which one? */
    shd_close(s);
    fixture_stop(&daemons);
}

static int allocations;

static int count_allocations(enum sys_kind kind)
{
    allocations += kind == SYS_ALLOC || kind == SYS_MAP;
    return 0;
}

TEST(steady_state_allocates_and_maps_nothing)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    sys_fault = count_allocations;
    for (int i = 0; i < 3; i++)
        EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    sys_fault = NULL;
    EXPECT_EQ(allocations, 0);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- An older build ---------------------------------------------------------------------------- */

/* One step of all micro-batches, of which one has other names of its metrics. */
static int step_with_names(shd_model *m, struct shd_err *e)
{
    struct toy t = { .m = m, .fail_micro = -1 };
    const struct shd_compute compute = {
        .size = sizeof compute, .forward = toy_forward, .backward = toy_backward, .ctx = &t
    };
    const struct shd_update update = toy_update(shd_step(m));
    const double metric = 1;
    for (uint32_t i = 0; i < TOY_MICROS; i++)
        EXPECT_OK(shd_report_named(m, i, i == 2 ? "ruin" : "loss", &metric, 1, e), e);
    return shd_run_step(m, toy_all_micros, TOY_MICROS, &compute, &update, NULL, e);
}

/* They would not understand the message, and end the session. */
TEST(daemons_that_know_no_names_of_metrics_are_sent_none)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 1, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    s->hub->links[0].peer.level = WIRE_LEVEL_BASE; /* as if its welcome had said nothing */
    EXPECT_OK(step_with_names(m, &e), &e);
    s->hub->links[0].peer.level = WIRE_LEVEL;
    EXPECT_STATUS(step_with_names(m, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "metrics 'ruin' of micro-batch 2");
    shd_close(s);
    fixture_stop(&daemons);
}

/* idle: break the opening off, which owner 0 has answered, and owner 1 has not. */
static int answered_by_one(void *ctx)
{
    const shd_session *const *s = ctx;
    return *s != NULL && (*s)->hub->links[0].call_count == 0 && (*s)->hub->links[1].call_count > 0;
}

/* Two workers open a model at once, and owner 1 is upgraded between their two Hellos: of it one is
 * told that it is of an older build, which has one count of updates for all units. */
static void open_before_an_upgrade(const char *spec)
{
    struct shd_err e = { 0 };
    shd_session *s = NULL;
    shd_model *m;
    const struct shd_options options = {
        .size = sizeof options, .address = daemons.address, .idle = answered_by_one, .idle_ctx = &s
    };
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    s->hub->links[1].peer.level = WIRE_LEVEL_COUNTS - 1;
    kill(daemons.pids[1], SIGSTOP);
    EXPECT_STATUS(shd_model_open(s, spec, &m, &e), SHD_ECANCELED);
    shd_close(s);
    kill(daemons.pids[1], SIGCONT);
}

TEST(owners_that_count_updates_otherwise_are_named)
{
    static const char *const specs[] = {
        "{\"name\":\"skips\",\"micro_batches\":1,\"optimizer\":{" TOY_ADAMW "},"
        "\"groups\":[{\"name\":\"all\",\"idle\":\"skip\"}],"
        "\"units\":[{\"name\":\"a\",\"tensors\":[{\"name\":\"w\",\"shape\":[64]}]}]}",
        "{\"name\":\"plain\",\"micro_batches\":1,\"optimizer\":{" TOY_ADAMW "},"
        "\"units\":[{\"name\":\"a\",\"tensors\":[{\"name\":\"w\",\"shape\":[64]}]}]}"
    };
    for (int skips = 0; skips < 2; skips++) {
        struct shd_err e = { 0 };
        shd_model *m;
        fixture_start(&daemons, 2, NULL);
        open_before_an_upgrade(specs[!skips]);
        shd_session *s = attach(PATIENT_MS);
        const int r = shd_model_open(s, specs[!skips], &m, &e);
        EXPECT_STATUS(r, skips ? SHD_ESPEC : SHD_OK); /* all counts are alike where none skips */
        if (skips) {
            EXPECT_HAS(e.text, "daemon cpu1");
            EXPECT_HAS(e.text, "counts the updates of model 'skips' by unit, daemon cpu0 as one");
        }
        shd_close(s);
        fixture_stop(&daemons);
    }
}

TEST_MAIN()
