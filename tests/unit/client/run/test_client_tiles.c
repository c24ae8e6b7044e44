/* Models with units that are cut into tiles: a worker that may hold a quarter of a layer trains
 * them to the same bits, over any number of owners and workers; checkpoints and what comes of
 * them have the tensors whole, and begin models that are cut otherwise or not at all. */
#include "client/ctl/state/weights.h"
#include "client/session/session.h"
#include "proto/files/ckpt.h"
#include "proto/files/safetensors.h"
#include "proto/spec/spec.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

#define WIDE_ROWS 4096u
#define WIDE_COLS 16u
#define STEPS     3u

/* tiles 1: not cut. "head" uses all of "embed". */
static const char *tiled_spec(const char *publish, uint32_t embed, uint32_t wide)
{
    static char json[2048];
    snprintf(json, sizeof json,
             "{ \"name\": \"toy\", \"seed\": 3, \"micro_batches\": 4, \"publish\": \"%s\","
             "  \"optimizer\": { " TOY_ADAMW " },"
             "  \"groups\": [ { \"name\": \"decay\", \"weight_decay\": 0.1 },"
             "               { \"name\": \"plain\", \"lr_scale\": 0.5 } ],"
             "  \"units\": ["
             "   { \"name\": \"embed\", \"tiles\": %u, \"tensors\": ["
             "     { \"name\": \"wte\", \"shape\": [97, 53], \"group\": \"decay\","
             "       \"init\": [\"normal\", 0, 0.5] },"
             "     { \"name\": \"wpe\", \"shape\": [33], \"group\": \"plain\","
             "       \"init\": [\"uniform\", -1, 1] } ] },"
             "   { \"name\": \"h0\", \"tiles\": %u, \"tensors\": ["
             "     { \"name\": \"h0.w\", \"shape\": [%u, %u], \"group\": \"decay\","
             "       \"init\": [\"normal\", 0, 1] } ] },"
             "   { \"name\": \"head\", \"uses\": [\"embed\"], \"tensors\": ["
             "     { \"name\": \"ln.w\", \"shape\": [130, 7], \"group\": \"decay\","
             "       \"init\": [\"uniform\", 0, 2] } ] } ] }",
             publish, embed, wide, WIDE_ROWS, WIDE_COLS);
    return json;
}

static void reference(const char *spec, uint32_t steps, char hex[65])
{
    shd_session *s = NULL;
    struct shd_err e = { 0 };
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, spec);
    train_steps(m, steps);
    digest_of(m, hex);
    shd_close(s);
}

/* A quarter of the layer, in what is published. */
static struct shd_policy quarter(const char *publish)
{
    return (struct shd_policy){ .size = sizeof(struct shd_policy),
                                .strategy = SHD_ZERO3,
                                .forward_prefetch = 1,
                                .max_live_bytes = UINT64_C(1) * WIDE_ROWS * WIDE_COLS / 4 *
                                                  (strcmp(publish, "f32") == 0 ? 4 : 2) };
}

TEST(a_quarter_of_a_layer_at_a_time_comes_to_the_same_bits)
{
    static const char *const publish[] = { "f32", "bf16", "f16" };
    char want[65], got[65];
    struct shd_err e = { 0 };
    for (int owners = 1; owners <= 3; owners++) {
        const char *spec = tiled_spec(publish[owners - 1], 3, 4);
        struct shd_policy policy = quarter(publish[owners - 1]);
        reference(spec, STEPS, want);
        fixture_start(&daemons, owners, NULL);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, spec);
        EXPECT_OK(shd_set_policy(m, &policy, &e), &e);
        train_steps(m, STEPS);
        digest_of(m, got);
        EXPECT_STR(got, want);
        shd_close(s);
        fixture_stop(&daemons);

        fixture_start(&daemons, owners, NULL);
        pid_t pids[2];
        for (uint32_t rank = 0; rank < 2; rank++)
            pids[rank] = trainer_fork(spec, rank, 2, STEPS);
        for (uint32_t rank = 0; rank < 2; rank++)
            expect_well(pids[rank]);
        s = attach(PATIENT_MS);
        m = open_toy(s, spec);
        digest_of(m, got);
        EXPECT_STR(got, want);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

TEST(the_smallest_bound_is_the_largest_tile)
{
    struct shd_err e = { 0 };
    shd_session *s = NULL;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, tiled_spec("f32", 3, 4));
    struct shd_policy policy = quarter("f32");
    struct shd_stats stats = { .size = sizeof stats };
    policy.max_live_bytes--;
    EXPECT_STATUS(shd_set_policy(m, &policy, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "must be at least 65536: unit 3 'h0/0'");
    policy.max_live_bytes++;
    EXPECT_OK(shd_set_policy(m, &policy, &e), &e);
    train_steps(m, 1);
    EXPECT_OK(shd_stats(s, &stats, &e), &e);
    EXPECT(stats.live_bytes_max < 3 * policy.max_live_bytes); /* with gradients */
    shd_model_close(m);
    m = open_toy(s, tiled_spec("f32", 3, 1));
    policy = quarter("f32");
    EXPECT_STATUS(shd_set_policy(m, &policy, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "must be at least 262144: unit 3 'h0', ");
    shd_close(s);
}

/* -- Whole tensors ------------------------------------------------------------------------------
 */

/* All of a tensor, be it cut or not. */
static void whole_values(shd_model *m, const char *name, float *values)
{
    struct shd_err e = { 0 };
    uint64_t done = 0, step;
    for (uint32_t t = 0; t < m->spec->tensor_count; t++) {
        const struct spec_tensor *from = &m->spec->tensors[t];
        if (strcmp(spec_whole_name(from), name) != 0)
            continue;
        EXPECT_EQ(spec_whole_first(from), done);
        EXPECT_OK(
            shd_tensor_values(m, from->name, SHD_PARAMS, 0, from->elems, values + done, &step, &e),
            &e);
        done += from->elems;
    }
    EXPECT(done > 0);
}

static void expect_same_weights(shd_model *m, const float *wide, const float *wte, const float *wpe)
{
    static float got[WIDE_ROWS * WIDE_COLS];
    whole_values(m, "h0.w", got);
    EXPECT(memcmp(got, wide, sizeof got) == 0);
    whole_values(m, "wte", got);
    EXPECT(memcmp(got, wte, 97 * 53 * sizeof *got) == 0);
    whole_values(m, "wpe", got);
    EXPECT(memcmp(got, wpe, 33 * sizeof *got) == 0);
}

static float wide[WIDE_ROWS * WIDE_COLS], wte[97 * 53], wpe[33];

static void keep_weights(shd_model *m)
{
    whole_values(m, "h0.w", wide);
    whole_values(m, "wte", wte);
    whole_values(m, "wpe", wpe);
}

TEST(a_model_that_is_cut_begins_as_one_that_is_not)
{
    fixture_start(&daemons, 3, NULL);
    shd_session *s = attach(PATIENT_MS), *local = NULL;
    struct shd_err e = { 0 };
    shd_model *m = open_toy(s, tiled_spec("f32", 1, 1));
    keep_weights(m);
    EXPECT_OK(try_connect("local:", PATIENT_MS, &local, &e), &e);
    expect_same_weights(open_toy(local, tiled_spec("f32", 5, 7)), wide, wte, wpe);
    shd_close(local);
    shd_close(s);
    fixture_stop(&daemons);
    fixture_start(&daemons, 2, NULL);
    s = attach(PATIENT_MS);
    expect_same_weights(open_toy(s, tiled_spec("f32", 7, 3)), wide, wte, wpe);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(a_tensor_that_is_cut_is_found_by_its_tiles)
{
    struct shd_err e = { 0 };
    shd_session *s = NULL;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, tiled_spec("f32", 3, 4));
    struct shd_tensor t = { .size = sizeof t };
    EXPECT_OK(shd_tensor_find(m, "wte/2", &t, &e), &e);
    EXPECT(t.unit == 2 && t.elems == UINT64_C(33) * 53);
    EXPECT_STATUS(shd_tensor_find(m, "wte", &t, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "tensor 'wte' of model 'toy' is cut into 3 tiles: name one of them, 'wte/0' "
                       "to 'wte/2'");
    shd_close(s);
}

/* The tensor's bytes in a file of any tool's. */
static void expect_in_file(const struct safeset *set, const char *name, uint32_t rank,
                           const float *want, uint64_t elems)
{
    static float got[WIDE_ROWS * WIDE_COLS];
    struct safeset_place place;
    struct shd_err e = { 0 };
    EXPECT(safeset_find(set, name, &place));
    EXPECT(place.tensor->rank == rank && place.tensor->elems == elems);
    EXPECT_OK(
        ckpt_pread(place.file->fd, got, elems * sizeof *got, place.tensor->at_bytes, name, &e), &e);
    EXPECT(memcmp(got, want, elems * sizeof *got) == 0);
}

static void expect_whole_files(const char *path)
{
    struct shd_err e = { 0 };
    struct safeset *set;
    struct safeset_place place;
    EXPECT_OK(safeset_open(path, &set, &e), &e);
    expect_in_file(set, "h0.w", 2, wide, UINT64_C(1) * WIDE_ROWS * WIDE_COLS);
    expect_in_file(set, "wte", 2, wte, 97 * 53);
    expect_in_file(set, "wpe", 1, wpe, 33);
    EXPECT(!safeset_find(set, "wte/0", &place));
    safeset_free(set);
}

/* Files of a few tensors each: the tiles of one are never in two. */
TEST(checkpoints_have_whole_tensors_and_restore_onto_any_owners)
{
    static const uint64_t file_bytes[] = { UINT64_C(5000000000), 1000 };
    char half[65], want[65], got[65];
    const char *spec = tiled_spec("f32", 3, 4);
    reference(spec, 2, half);
    reference(spec, 4, want);
    for (int i = 0; i < 2; i++) {
        checkpoint_file_bytes_max = file_bytes[i];
        make_ckpts();
        fixture_start(&daemons, 2 + i, NULL);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, spec);
        train_steps(m, 2);
        keep_weights(m);
        const struct shd_checkpointed saved = save_ok(m, 0);
        EXPECT_STR(saved.digest, half);
        char path[600];
        snprintf(path, sizeof path, "%s/%s", ckpts, saved.name);
        expect_whole_files(path);
        shd_close(s);
        fixture_stop(&daemons);
        fixture_start(&daemons, 3 - 2 * i, NULL);
        s = attach(PATIENT_MS);
        m = restore_ok(s, ckpts);
        digest_of(m, got);
        EXPECT_STR(got, half);
        train_steps(m, 2);
        digest_of(m, got);
        EXPECT_STR(got, want);
        shd_close(s);
        fixture_stop(&daemons);
        EXPECT_EQ(expect_all_good(), 1);
        remove_ckpts();
    }
    checkpoint_file_bytes_max = UINT64_C(5000000000);
}

static shd_model *begin_with(shd_session *s, const char *name, const char *spec)
{
    char path[600];
    struct shd_err e = { 0 };
    shd_model *m;
    const struct shd_restore_options options = { .size = sizeof options,
                                                 .weights = true,
                                                 .spec_json = spec };
    snprintf(path, sizeof path, "%s/%s", ckpts, name);
    EXPECT_OK(shd_restore(s, path, &options, NULL, &e), &e);
    EXPECT_OK(shd_model_attach(s, NULL, &m, &e), &e);
    return m;
}

/* Weights of a model that is not cut, that is, and that is otherwise, in all directions. */
TEST(weights_begin_models_that_are_cut_otherwise)
{
    static const uint32_t tiles[][2] = { { 3, 4 }, { 1, 1 }, { 5, 2 } };
    for (size_t from = 0; from < ARRAY_SIZE(tiles); from++) {
        make_ckpts();
        fixture_start(&daemons, 2, NULL);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, tiled_spec("f32", tiles[from][0], tiles[from][1]));
        train_steps(m, 1);
        keep_weights(m);
        const struct shd_checkpointed saved = save_ok(m, 0);
        shd_close(s);
        fixture_stop(&daemons);
        const size_t to = (from + 1) % ARRAY_SIZE(tiles);
        fixture_start(&daemons, 3, NULL);
        s = attach(PATIENT_MS);
        m = begin_with(s, saved.name, tiled_spec("f32", tiles[to][0], tiles[to][1]));
        expect_same_weights(m, wide, wte, wpe);
        EXPECT_EQ(shd_step(m), 0);
        shd_close(s);
        fixture_stop(&daemons);
        remove_ckpts();
    }
}

/* The whole state, moments and all, goes on in other tiles: with the bits of one that never was in
 * any, as what is computed here goes by elements. Moments are checked by steps after it. */
static shd_model *restore_cut(shd_session *s, const char *spec)
{
    struct shd_err e = { 0 };
    shd_model *m;
    const struct shd_restore_options options = { .size = sizeof options, .spec_json = spec };
    EXPECT_OK(shd_restore(s, ckpts, &options, NULL, &e), &e);
    EXPECT_OK(shd_model_attach(s, NULL, &m, &e), &e);
    return m;
}

/* A gradient that does not depend on tiles: of the whole tensor's element. */
static int even_backward(void *ctx, uint32_t micro, uint32_t unit, const void *params, float *grad)
{
    const shd_model *m = ctx;
    const struct spec_unit *u = &m->spec->units[unit];
    for (uint32_t t = u->first_tensor; t < u->first_tensor + u->tensor_count; t++) {
        const struct spec_tensor *of = &m->spec->tensors[t];
        for (uint64_t i = 0; i < of->elems; i++)
            grad[of->offset_elems + i] = toy_noise(shd_step(m), micro, 7,
                                                   spec_whole_first(of) + i) +
                                         0.1f * ((const float *)params)[of->offset_elems + i];
    }
    return 0;
}

static int even_forward(void *ctx, uint32_t micro, uint32_t unit, const void *params)
{
    (void)ctx, (void)micro, (void)unit;
    return params == NULL;
}

static void train_even(shd_model *m, uint32_t steps)
{
    struct shd_err e = { 0 };
    const struct shd_compute compute = { sizeof compute, m,           even_forward,
                                         even_backward,  toy_metrics, NULL };
    for (uint32_t k = 0; k < steps; k++) {
        struct shd_update update = toy_update(shd_step(m));
        update.clip_norm = 0; /* norms are summed by units */
        EXPECT_OK(shd_run_step(m, toy_all_micros, TOY_MICROS, &compute, &update, NULL, &e), &e);
    }
}

/* Without "uses", whose gradient this toy does not write. */
static const char *plain_spec(uint32_t embed, uint32_t wide_tiles)
{
    static char json[2048];
    snprintf(json, sizeof json, "%s", tiled_spec("f32", embed, wide_tiles));
    char *uses = strstr(json, "\"uses\": [\"embed\"]");
    EXPECT(uses != NULL);
    memset(uses + strlen("\"uses\": ["), ' ', strlen("\"embed\""));
    return json;
}

TEST(a_state_goes_on_in_other_tiles)
{
    static const uint32_t tiles[][2] = { { 3, 4 }, { 1, 1 }, { 5, 7 }, { 1, 2 } };
    struct shd_err e = { 0 };
    shd_session *s = NULL;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, plain_spec(1, 1));
    train_even(m, 4);
    keep_weights(m);
    shd_close(s);
    for (size_t from = 0; from < ARRAY_SIZE(tiles); from++) {
        const size_t to = (from + 1) % ARRAY_SIZE(tiles);
        make_ckpts();
        fixture_start(&daemons, 2, NULL);
        s = attach(PATIENT_MS);
        m = open_toy(s, plain_spec(tiles[from][0], tiles[from][1]));
        train_even(m, 2);
        save_ok(m, 0);
        shd_close(s);
        fixture_stop(&daemons);
        fixture_start(&daemons, 3, NULL);
        s = attach(PATIENT_MS);
        m = restore_cut(s, plain_spec(tiles[to][0], tiles[to][1]));
        shd_model_close(m);
        m = open_toy(s, plain_spec(tiles[to][0], tiles[to][1]));
        EXPECT_EQ(shd_step(m), 2);
        train_even(m, 2);
        expect_same_weights(m, wide, wte, wpe);
        save_ok(m, 0);
        EXPECT_EQ(expect_all_good(), 2);
        shd_close(s);
        fixture_stop(&daemons);
        remove_ckpts();
    }
}

TEST(a_damaged_byte_is_found_by_whoever_reads_it_in_other_tiles)
{
    struct shd_err e = { 0 };
    make_ckpts();
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, plain_spec(3, 4));
    train_even(m, 1);
    const struct shd_checkpointed saved = save_ok(m, 0);
    shd_close(s);
    fixture_stop(&daemons);
    fixture_start(&daemons, 3, NULL);
    s = attach(PATIENT_MS);
    const struct shd_restore_options wrong = { .size = sizeof wrong,
                                               .spec_json = tiled_spec("bf16", 3, 4) };
    EXPECT_STATUS(shd_restore(s, ckpts, &wrong, NULL, &e), SHD_ESPEC);
    EXPECT_HAS(e.text, "the spec may differ from the checkpoint's in tiles alone: publish");
    const struct shd_restore_options cut = { .size = sizeof cut, .spec_json = plain_spec(1, 3) };
    flip_byte(saved.name, "optimizer-v.safetensors", -70000);
    EXPECT_STATUS(shd_restore(s, ckpts, &cut, NULL, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "second moments of tensor 'h0.w/2', elements 14336 to 16383");
    flip_byte(saved.name, "optimizer-v.safetensors", -70000);
    EXPECT_OK(shd_restore(s, ckpts, &cut, NULL, &e), &e);
    shd_close(s);
    fixture_stop(&daemons);
    remove_ckpts();
}

/* Counts of units (`idle` `skip`) are of tiles, each of which has those of its unit. */
static uint32_t all_but_wide(void *ctx, uint32_t micro, uint32_t unit)
{
    const shd_model *m = ctx;
    (void)micro;
    for (uint32_t u = unit == UINT32_MAX ? 0 : unit + 1; u < m->spec->unit_count; u++)
        if (strncmp(m->spec->units[u].name, "h0", 2) != 0)
            return u;
    return UINT32_MAX;
}

static const char *idle_spec(uint32_t embed, uint32_t wide_tiles)
{
    static char json[2048];
    const char *plain = plain_spec(embed, wide_tiles);
    const char *at = strstr(plain, "\"weight_decay\"");
    EXPECT(at != NULL);
    snprintf(json, sizeof json, "%.*s\"idle\": \"skip\", %s", (int)(at - plain), plain, at);
    at = strstr(json, "\"lr_scale\"");
    EXPECT(at != NULL);
    static char both[2048];
    snprintf(both, sizeof both, "%.*s\"idle\": \"skip\", %s", (int)(at - json), json, at);
    return both;
}

TEST(counts_of_units_are_of_tiles)
{
    static const uint32_t tiles[][2] = { { 3, 4 }, { 3, 4 }, { 1, 1 }, { 2, 5 } };
    struct shd_err e = { 0 };
    for (size_t to = 1; to < ARRAY_SIZE(tiles); to++) {
        make_ckpts();
        fixture_start(&daemons, 2, NULL);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, idle_spec(tiles[0][0], tiles[0][1]));
        train_even(m, 1);
        const struct shd_compute compute = { sizeof compute, m,           even_forward,
                                             even_backward,  toy_metrics, all_but_wide };
        struct shd_update update = toy_update(1);
        EXPECT_OK(shd_run_step(m, toy_all_micros, TOY_MICROS, &compute, &update, NULL, &e), &e);
        save_ok(m, 0);
        shd_close(s);
        fixture_stop(&daemons);
        fixture_start(&daemons, 1, NULL);
        s = attach(PATIENT_MS);
        m = restore_cut(s, idle_spec(tiles[to][0], tiles[to][1]));
        for (uint32_t u = 0; u < shd_units(m); u++) {
            uint64_t step, updates;
            float *values = malloc(shd_unit_elems(m, u) * sizeof *values);
            EXPECT_OK(shd_get(m, u, SHD_PARAMS, values, &step, &updates, &e), &e);
            free(values);
            EXPECT_EQ(updates, strncmp(shd_unit_name(m, u), "h0", 2) == 0 ? 1 : 2);
        }
        shd_close(s);
        fixture_stop(&daemons);
        remove_ckpts();
    }
}

TEST(exported_weights_are_whole_tensors)
{
    struct shd_err e = { 0 };
    struct weights w;
    uint64_t step = 0;
    int fd = -1;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, tiled_spec("f32", 3, 4));
    train_steps(m, 1);
    keep_weights(m);
    EXPECT_OK(shd_pin(m, NULL, &step, &e), &e);
    EXPECT_OK(weights_new(m, &w, &e), &e);
    EXPECT_OK(weights_memory(&w, "weights", &fd, &e), &e);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    expect_whole_files(path);
    close(fd);
    weights_free(&w);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST_MAIN()
