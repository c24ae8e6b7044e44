/* /units and the metrics of units: what owners say of each step adds up to what it came to. */
#include <math.h>

#include <jansson.h>

#include "proto/base/fixsum.h"
#include "tests/lib/client_remote.h"
#include "tests/lib/fixture.h"

#define OWNERS 3

static json_t *get_units(int index, const char *query, int code)
{
    char path[300];
    snprintf(path, sizeof path, "/units%s%s", query[0] != '\0' ? "?" : "", query);
    struct http_reply r = http_get(&daemons, index, path);
    if (r.code != code)
        FAIL("%s: %d, %s", path, r.code, r.text);
    json_t *root = code == 200 ? json_loadb(r.body, r.body_bytes, JSON_REJECT_DUPLICATES, NULL)
                               : NULL;
    EXPECT((root != NULL) == (code == 200));
    free(r.text);
    return root;
}

static json_int_t number(const json_t *o, const char *key)
{
    EXPECT(json_is_integer(json_object_get(o, key)));
    return json_integer_value(json_object_get(o, key));
}

/* An owner's answer, once it has made so many steps. */
static json_t *get_at(int index, const char *query, json_int_t step)
{
    json_t *root = NULL;
    const uint64_t end_ms = test_now_ms() + TEST_HANG_MS;
    do {
        json_decref(root);
        root = get_units(index, query, 200);
    } while (number(root, "step") < step && test_now_ms() < end_ms);
    EXPECT_EQ(number(root, "step"), step);
    return root;
}

static void drop_all(json_t *roots[OWNERS])
{
    for (int i = 0; i < OWNERS; i++)
        json_decref(roots[i]);
}

static json_t *row_of(const json_t *root, size_t index)
{
    return json_array_get(json_object_get(root, "rows"), index);
}

/* Exact sums of a row's units [first, first + count), of all owners. False: some are not known. */
static bool add_sums(json_t *const roots[OWNERS], size_t row, const char *key, size_t first,
                     size_t count, struct fixsum *ret_sum)
{
    fixsum_init(ret_sum);
    bool all = true;
    for (int i = 0; i < OWNERS; i++)
        for (size_t u = first; u < first + count; u++) {
            const json_t *sums = json_object_get(row_of(roots[i], row), "sums");
            const char *text = json_string_value(json_array_get(json_object_get(sums, key), u));
            struct fixsum part;
            all = all && text != NULL;
            if (text == NULL)
                continue;
            EXPECT(fixsum_parse(text, &part));
            fixsum_merge(ret_sum, &part);
        }
    return all;
}

static void expect_fields(const json_t *o, const char *fields)
{
    char list[300], *save = NULL;
    size_t count = 0;
    snprintf(list, sizeof list, "%s", fields);
    for (char *f = strtok_r(list, " ", &save); f != NULL; f = strtok_r(NULL, " ", &save), count++)
        if (json_object_get(o, f) == NULL)
            FAIL("no field '%s'", f);
    EXPECT_EQ(json_object_size(o), count);
}

/* What an owner shows of a cell is what its sums come to. */
static void expect_numbers(const json_t *row, size_t unit)
{
    const json_t *sums = json_object_get(row, "sums");
    const double divisor = json_number_value(json_object_get(row, "divisor"));
    struct fixsum grad, update, weight;
    EXPECT(fixsum_parse(json_string_value(json_array_get(json_object_get(sums, "grad"), unit)),
                        &grad));
    EXPECT(json_number_value(json_array_get(json_object_get(row, "grad"), unit)) ==
           sqrt(fixsum_value(&grad)) / divisor);
    const char *text = json_string_value(json_array_get(json_object_get(sums, "weight"), unit));
    if (text == NULL) {
        EXPECT(json_is_null(json_array_get(json_object_get(row, "ratio"), unit)));
        return;
    }
    EXPECT(fixsum_parse(text, &weight));
    text = json_string_value(json_array_get(json_object_get(sums, "update"), unit));
    EXPECT(fixsum_parse(text, &update));
    EXPECT(json_number_value(json_array_get(json_object_get(row, "weight"), unit)) ==
           sqrt(fixsum_value(&weight)));
    if (fixsum_value(&weight) > 0)
        EXPECT(json_number_value(json_array_get(json_object_get(row, "ratio"), unit)) ==
               sqrt(fixsum_value(&update)) / sqrt(fixsum_value(&weight)));
}

TEST(owners_units_add_up_to_each_step)
{
    enum { STEPS = 9 };
    double norms[STEPS];
    struct shd_err e;
    json_t *roots[OWNERS];
    struct fixsum sum, weight;
    fixture_start_kept(&daemons, OWNERS, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    for (int k = 0; k < STEPS; k++) {
        struct shd_result result = { .size = sizeof result };
        EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
        norms[k] = result.grad_norm;
    }
    for (int i = 0; i < OWNERS; i++) {
        roots[i] = get_at(i, "model=toy&sums=1", STEPS);
        expect_fields(roots[i],
                      "model owner owners step kept every unit_count unit units next rows");
        EXPECT_EQ(number(roots[i], "owner"), i);
        EXPECT_EQ(number(roots[i], "next"), STEPS);
        EXPECT_EQ(json_array_size(json_object_get(roots[i], "units")), 4);
        EXPECT_EQ(json_array_size(json_object_get(roots[i], "rows")), STEPS);
    }
    const size_t every = (size_t)number(roots[0], "every");
    for (size_t k = 0; k < STEPS; k++) {
        const json_t *row = row_of(roots[0], k);
        expect_fields(row, "step skipped guard divisor grad weight ratio bad sums");
        EXPECT_EQ(number(row, "step"), (json_int_t)k);
        EXPECT(json_is_false(json_object_get(row, "skipped")));
        EXPECT(add_sums(roots, k, "grad", 0, 4, &sum));
        const double divisor = json_number_value(json_object_get(row, "divisor"));
        EXPECT_NEAR(sqrt(fixsum_value(&sum)) / divisor, norms[k], 1e-15 * norms[k]);
        EXPECT_EQ(add_sums(roots, k, "update", 0, 4, &sum), k % every == 0);
        for (size_t u = 0; u < 4; u++)
            expect_numbers(row, u);
    }
    /* The last step was measured: its numbers are those of the tensors that are there now. */
    EXPECT_EQ((STEPS - 1) % every, 0);
    struct shd_tensor_stats stats = { .size = sizeof stats };
    EXPECT_OK(shd_tensor_stats(m, "ln.w", SHD_PARAMS, &stats, &e), &e);
    EXPECT(add_sums(roots, STEPS - 1, "weight", 3, 1, &weight));
    const double rms = sqrt(fixsum_value(&weight) / (double)stats.elems);
    EXPECT_NEAR(rms, stats.rms, 1e-13 * rms);
    EXPECT_OK(shd_tensor_stats(m, "ln.w", SHD_UPDATE, &stats, &e), &e);
    EXPECT(add_sums(roots, STEPS - 1, "update", 3, 1, &sum));
    const double ratio = sqrt(fixsum_value(&sum)) / sqrt(fixsum_value(&weight));
    EXPECT_NEAR(ratio, stats.update_ratio, 1e-4 * ratio);
    drop_all(roots);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- In a program ------------------------------------------------------------------------------ */

#define UNITS 4u

static void ask(shd_model *m, uint64_t step, struct shd_unit_stats stats[UNITS],
                struct shd_unit_step *of)
{
    struct shd_err e = { 0 };
    stats[0].size = sizeof stats[0];
    of->size = sizeof *of;
    EXPECT_OK(shd_unit_stats(m, step, 0, UNITS, stats, of, &e), &e);
    for (uint32_t u = 1; u < UNITS; u++)
        EXPECT_EQ(stats[u].size, sizeof stats[u]);
}

/* Of any number of owners, with the same bits: as /units has it. */
static void stats_with(int owners, struct shd_unit_stats all[10][UNITS])
{
    struct shd_err e = { 0 };
    struct shd_unit_stats stats[UNITS], one = { .size = sizeof one };
    struct shd_unit_step of;
    fixture_start_kept(&daemons, owners, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    stats[0].size = sizeof stats[0];
    EXPECT_STATUS(shd_unit_stats(m, SHD_LAST_STEP, 0, UNITS, stats, NULL, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "no step of model 'toy' has been seen");
    for (uint64_t k = 0; k < 10; k++) {
        struct shd_result result = { .size = sizeof result };
        double squares = 0;
        EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
        for (uint32_t u = 0; u < UNITS; u++) { /* it is applied */
            const void *params;
            EXPECT_OK(shd_acquire(m, u, &params, &e), &e);
            shd_release(m, u);
        }
        ask(m, k, stats, &of);
        EXPECT(of.step == k && of.measured_step == k - k % 8 && !of.skipped && of.guard == 0);
        for (uint32_t u = 0; u < UNITS; u++) {
            squares += stats[u].grad_norm * stats[u].grad_norm;
            EXPECT(stats[u].weight_norm > 0 && stats[u].update_ratio > 0);
            if (owners == 1)
                all[k][u] = stats[u];
            EXPECT(memcmp(&all[k][u], &stats[u], sizeof stats[u]) == 0);
        }
        EXPECT_NEAR(sqrt(squares), result.grad_norm, 1e-14 * result.grad_norm);
    }
    ask(m, SHD_LAST_STEP, stats, &of);
    EXPECT(of.step == 9 && memcmp(stats, all[9], sizeof stats) == 0);
    EXPECT_OK(shd_unit_stats(m, 3, 2, 1, &one, NULL, &e), &e);
    EXPECT(memcmp(&one, &all[3][2], sizeof one) == 0);
    EXPECT_STATUS(shd_unit_stats(m, 10, 0, 1, &one, NULL, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "step 10 of model 'toy': it is not over");
    EXPECT_STATUS(shd_unit_stats(m, 3, 3, 2, stats, NULL, &e), SHD_ERANGE);
    EXPECT_STATUS(shd_unit_stats(m, 3, UNITS, 1, stats, NULL, &e), SHD_ERANGE);
    EXPECT_STATUS(shd_unit_stats(m, 3, 0, 0, stats, NULL, &e), SHD_ERANGE);
    one.size = 0;
    EXPECT_STATUS(shd_unit_stats(m, 3, 0, 1, &one, NULL, &e), SHD_EINVAL);
    fixture_restart(&daemons, owners - 1); /* what it had seen is gone */
    one.size = sizeof one;
    EXPECT_STATUS(shd_unit_stats(m, 3, 0, 1, &one, NULL, &e), SHD_ENOENT);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(programs_are_told_what_units_came_to)
{
    struct shd_unit_stats all[10][UNITS];
    for (int owners = 1; owners <= OWNERS; owners++)
        stats_with(owners, all);
}

TEST(in_this_process_nobody_keeps_what_units_came_to)
{
    struct shd_unit_stats one = { .size = sizeof one };
    struct shd_err e = { 0 };
    shd_session *s;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    EXPECT_STATUS(shd_unit_stats(m, SHD_LAST_STEP, 0, 1, &one, NULL, &e), SHD_ENOTSUP);
    shd_close(s);
}

TEST(what_is_asked_for_is_bounded_and_named)
{
    fixture_start(&daemons, 1, NULL);
    get_units(0, "", 404); /* there is no model */
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_SGD));
    train_steps(m, 3);
    json_t *root = get_at(0, "from=1", 3);
    EXPECT_EQ(number(row_of(root, 0), "step"), 1);
    EXPECT(json_object_get(row_of(root, 0), "sums") == NULL);
    json_decref(root);
    root = get_units(0, "model=toy&from=1000000", 200);
    EXPECT_EQ(json_array_size(json_object_get(root, "rows")), 0);
    EXPECT_EQ(number(root, "next"), 3);
    json_decref(root);
    root = get_units(0, "unit=2", 200);
    EXPECT_EQ(number(root, "unit_count"), 4);
    EXPECT_EQ(json_array_size(json_object_get(root, "units")), 2);
    EXPECT_STR(json_string_value(json_array_get(json_object_get(root, "units"), 0)), "h1");
    EXPECT_EQ(json_array_size(json_object_get(row_of(root, 0), "grad")), 2);
    json_decref(root);
    static const struct {
        const char *query;
        int code;
    } bad[] = { { "unit=4", 404 },         { "unit=18446744073709551615", 404 },
                { "model=other", 404 },    { "from=x", 400 },
                { "from=-1", 400 },        { "from=18446744073709551616", 400 },
                { "unit=1x", 400 },        { "unit=", 400 },
                { "model=%1b%5b31m", 404 } };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        get_units(0, bad[i].query, bad[i].code);
    shd_close(s);
    fixture_stop(&daemons);
}

/* The skipped step says so, and which units were not finite; nothing was updated. */
TEST(a_step_that_is_not_finite_names_its_units)
{
    struct shd_err e;
    fixture_start(&daemons, 1, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    train_steps(m, 8);
    for (uint32_t micro = 0; micro < TOY_MICROS; micro++)
        for (uint32_t u = 0; u < 4; u++) {
            float *grad;
            EXPECT_OK(shd_grad(m, micro, u, &grad, &e), &e);
            memset(grad, 0, shd_unit_elems(m, u) * sizeof *grad);
            if (micro == 2 && u == 1)
                grad[5] = INFINITY;
            EXPECT_OK(shd_return(m, micro, u, &e), &e);
        }
    const struct shd_update update = toy_update(8);
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
    json_t *root = get_at(0, "from=8", 9);
    const json_t *row = row_of(root, 0), *bad = json_object_get(row, "bad");
    EXPECT(json_is_true(json_object_get(row, "skipped")));
    EXPECT_EQ(json_array_size(bad), 1);
    EXPECT_EQ(json_integer_value(json_array_get(bad, 0)), 1);
    EXPECT(json_is_null(json_array_get(json_object_get(row, "grad"), 1)));
    EXPECT(json_number_value(json_array_get(json_object_get(row, "grad"), 0)) == 0);
    EXPECT(json_is_null(json_array_get(json_object_get(row, "ratio"), 0)));
    json_decref(root);
    shd_close(s);
    fixture_stop(&daemons);
}

static void expect_steps(json_int_t open, json_int_t first, json_int_t count)
{
    json_t *root = get_at(0, "", open);
    EXPECT_EQ(number(root, "next"), open);
    EXPECT_EQ(json_array_size(json_object_get(root, "rows")), count);
    for (json_int_t k = 0; k < count; k++) {
        const json_t *row = row_of(root, (size_t)k);
        EXPECT_EQ(number(row, "step"), first + k);
        for (size_t u = 0; u < 4; u++)
            EXPECT(json_is_real(json_array_get(json_object_get(row, "grad"), u)));
        EXPECT_EQ(json_is_real(json_array_get(json_object_get(row, "ratio"), 3)),
                  (first + k) % number(root, "every") == 0);
    }
    json_decref(root);
}

TEST(steps_that_were_gone_back_from_are_not_told)
{
    struct shd_err e;
    uint64_t step;
    fixture_start_kept(&daemons, 1, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    train_steps(m, 7);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    train_steps(m, 4);
    expect_steps(11, 0, 11);
    EXPECT_OK(shd_model_rewind(m, 7, &step, &e), &e);
    expect_steps(7, 0, 7);
    train_steps(m, 2);
    expect_steps(9, 0, 9);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(a_successor_tells_of_what_it_has_seen_itself)
{
    fixture_start_kept(&daemons, 1, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    train_steps(m, 3);
    fixture_restart(&daemons, 0);
    expect_steps(3, 0, 0);
    train_steps(m, 6);
    expect_steps(9, 3, 6);
    shd_close(s);
    fixture_stop(&daemons);
}

#define MANY_MAX 4100

/* Units of one tensor of four elements each. */
static const char *many_units(int count)
{
    static char json[MANY_MAX * 96 + 256];
    int used = snprintf(json, sizeof json,
                        "{\"name\": \"many\", \"micro_batches\": 1, \"publish\": \"f32\","
                        " \"optimizer\": {" TOY_ADAMW "}, \"units\": [");
    for (int i = 0; i < count; i++)
        used += snprintf(json + used, sizeof json - (size_t)used,
                         "%s{\"name\": \"u%d\", \"tensors\": [{\"name\": \"t%d\", \"shape\": [4],"
                         " \"init\": [\"const\", 1]}]}",
                         i > 0 ? "," : "", i, i);
    snprintf(json + used, sizeof json - (size_t)used, "]}");
    return json;
}

/* A step of them: each gradient's norm is 5. */
static void train_many(shd_session *s, int count)
{
    const struct shd_update update = toy_update(0);
    struct shd_err e;
    shd_model *m;
    EXPECT_OK(shd_model_open(s, many_units(count), &m, &e), &e);
    for (uint32_t u = 0; u < shd_units(m); u++) {
        float *grad;
        EXPECT_OK(shd_grad(m, 0, u, &grad, &e), &e);
        memset(grad, 0, shd_unit_elems(m, u) * sizeof *grad);
        grad[0] = 3, grad[1] = 4;
        EXPECT_OK(shd_return(m, 0, u, &e), &e);
    }
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
}

static bool has_metric(const char *path, const char *sample)
{
    struct http_reply r = http_get(&daemons, 0, path);
    EXPECT_EQ(r.code, 200);
    const bool has = strstr(r.body, sample) != NULL;
    free(r.text);
    return has;
}

TEST(metrics_of_many_units_are_there_when_they_are_asked_for)
{
    fixture_start(&daemons, 1, NULL);
    shd_session *s = attach(PATIENT_MS);
    train_many(s, 300);
    EXPECT_SOON(has_metric("/metrics?units=1", "model=\"many\",unit=\"u299\"} 5\n"));
    EXPECT_SOON(has_metric("/metrics?units=1", "shardd_unit_weight_norm{device=\"cpu0\",model="
                                               "\"many\",unit=\"u0\"} "));
    EXPECT_SOON(has_metric("/metrics?units=1", "shardd_unit_update_norm{device=\"cpu0\",model="
                                               "\"many\",unit=\"u0\"} "));
    EXPECT(!has_metric("/metrics", "shardd_unit_grad_norm{"));
    EXPECT(!has_metric("/metrics?units=0", "shardd_unit_weight_norm{"));
    shd_close(s);
    fixture_stop(&daemons);
}

/* Of more than an answer has, the rest is asked for; shardctl does. */
TEST(more_units_than_an_answer_has_come_in_several)
{
    char command[600], line[200];
    int lines = 0, fives = 0;
    fixture_start(&daemons, 1, NULL);
    shd_session *s = attach(PATIENT_MS);
    train_many(s, MANY_MAX);
    json_t *root = get_at(0, "", 1), *rest = get_at(0, "unit=4096", 1);
    EXPECT_EQ(number(root, "unit_count"), MANY_MAX);
    EXPECT_EQ(json_array_size(json_object_get(root, "units")), 4096);
    EXPECT_EQ(json_array_size(json_object_get(row_of(root, 0), "grad")), 4096);
    EXPECT_STR(json_string_value(json_array_get(json_object_get(rest, "units"), 3)), "u4099");
    EXPECT(json_number_value(json_array_get(json_object_get(row_of(rest, 0), "grad"), 3)) == 5);
    json_decref(root);
    json_decref(rest);
    EXPECT(!has_metric("/metrics?units=1", "shardd_unit_grad_norm{"));
    snprintf(command, sizeof command, SHD_BIN_DIR "/shardctl show --units --address %s 2>&1",
             daemons.dir);
    FILE *out = popen(command, "r"); /* NOLINT(cert-env33-c): a test's own program */
    EXPECT(out != NULL);
    for (; fgets(line, sizeof line, out) != NULL; lines++)
        fives += line[0] == 'u' && strstr(line, "  5  ") != NULL;
    EXPECT_EQ(pclose(out), 0);
    EXPECT_EQ(lines, MANY_MAX + 2);
    EXPECT_EQ(fives, MANY_MAX);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST_MAIN()
