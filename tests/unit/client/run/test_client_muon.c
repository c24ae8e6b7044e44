/* Models with tensors that are updated as a whole, by Muon, LAMB or Adafactor: the same bits over
 * any number of owners, each of which has whole units, through checkpoints onto other numbers of
 * them, snapshots, forks and puts. */
#include <sys/wait.h>

#include "client/paths/map.h"
#include "proto/share/deal.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

#define MATRIX_UNIT 3u /* the first of three of one size, which have owners of their own */

static const char *whole = "muon"; /* what they are updated by: each of */
static const char *const wholes[] = { "muon", "lamb", "adafactor" };

static const char *muon_spec(const char *publish)
{
    static char json[4096];
    snprintf(json, sizeof json, "%s",
             pt_spec(&(struct pt_model){ .name = "matrices",
                                         .publish = publish,
                                         .ema = strcmp(whole, "adafactor") != 0,
                                         .whole = whole }));
    return json;
}

static shd_session *connect_to(const char *address)
{
    struct shd_err e = { 0 };
    shd_session *s = NULL;
    EXPECT_OK(try_connect(address, PATIENT_MS, &s, &e), &e);
    return s;
}

/* What `before` steps, what `between` does, and `after` more come to in this process. */
static void reference(const char *publish, uint32_t before, void (*between)(shd_model *m),
                      uint32_t after, char hex[65])
{
    shd_session *s = connect_to("local:");
    shd_model *m = open_toy(s, muon_spec(publish));
    train_steps(m, before);
    if (between != NULL)
        between(m);
    train_steps(m, after);
    digest_of(m, hex);
    shd_close(s);
}

TEST(matrices_come_to_the_same_bits_over_any_owners_and_workers)
{
    static const char *const publish[] = { "f32", "bf16", "f16" };
    char want[65], got[65];
    for (int owners = 1; owners <= 5; owners++) {
        const char *dtype = publish[owners / 2];
        whole = wholes[owners % 3];
        reference(dtype, 3, NULL, 0, want);
        for (uint32_t workers = 1; workers <= 2; workers++) {
            fixture_start(&daemons, owners, NULL);
            pid_t pids[2];
            for (uint32_t rank = 0; rank < workers; rank++)
                pids[rank] = trainer_fork(muon_spec(dtype), rank, workers, 3);
            for (uint32_t rank = 0; rank < workers; rank++)
                expect_well(pids[rank]);
            shd_session *s = connect_to(daemons.address);
            shd_model *m = open_toy(s, muon_spec(dtype));
            EXPECT_EQ(shd_step(m), 3);
            digest_of(m, got);
            EXPECT_STR(got, want);
            shd_close(s);
            fixture_stop(&daemons);
        }
    }
}

/* Units of one size lie at several owners: a gradient's slots must not be taken for each other's.
 */
TEST(units_of_matrices_are_whole_at_owners_of_their_own)
{
    fixture_start(&daemons, 3, NULL);
    shd_session *s = connect_to(daemons.address);
    shd_model *m = open_toy(s, muon_spec("f32"));
    uint32_t seen[3] = { 0 };
    for (uint32_t u = MATRIX_UNIT; u < MATRIX_UNIT + 3; u++)
        for (uint32_t o = 0; o < 3; o++) {
            const struct slice slice = m->map->owners[o].shards->slice[u];
            EXPECT(slice.elems == 0 || slice.elems == m->spec->units[u].elems);
            seen[o] += slice.elems > 0;
        }
    EXPECT(seen[0] + seen[1] + seen[2] == 3);
    EXPECT(seen[0] < 3 && seen[1] < 3 && seen[2] < 3);
    EXPECT(m->map->view_of[MATRIX_UNIT] != m->map->view_of[MATRIX_UNIT + 1] ||
           m->map->view_of[MATRIX_UNIT] != m->map->view_of[MATRIX_UNIT + 2]);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(saved_by_some_owners_restored_by_others)
{
    static const int counts[][2] = { { 2, 3 }, { 3, 1 }, { 1, 2 } };
    char want[65], got[65];
    for (size_t i = 0; i < ARRAY_SIZE(counts); i++) {
        whole = wholes[i % 3];
        reference("bf16", 4, NULL, 0, want);
        make_ckpts();
        fixture_start(&daemons, counts[i][0], NULL);
        shd_session *s = connect_to(daemons.address);
        shd_model *m = open_toy(s, muon_spec("bf16"));
        train_steps(m, 2);
        save_ok(m, 1);
        shd_close(s);
        fixture_stop(&daemons);
        fixture_start(&daemons, counts[i][1], NULL);
        s = connect_to(daemons.address);
        m = restore_ok(s, ckpts);
        shd_model_close(m);
        m = open_toy(s, muon_spec("bf16"));
        train_steps(m, 2);
        digest_of(m, got);
        EXPECT_STR(got, want);
        shd_close(s);
        fixture_stop(&daemons);
        remove_ckpts();
    }
}

TEST(taken_back_to_a_snapshot_they_go_on_with_the_same_bits)
{
    char want[65], got[65];
    struct shd_err e = { 0 };
    uint64_t step = 0;
    whole = "adafactor";
    reference("f32", 4, NULL, 0, want);
    fixture_start(&daemons, 2, NULL);
    shd_session *s = connect_to(daemons.address);
    shd_model *m = open_toy(s, muon_spec("f32"));
    train_steps(m, 2);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    EXPECT_EQ(step, 2);
    train_steps(m, 2);
    EXPECT_OK(shd_model_rewind(m, 2, &step, &e), &e);
    train_steps(m, 2);
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(a_fork_and_its_model_go_on_with_the_same_bits)
{
    char want[65], got[65];
    struct shd_err e = { 0 };
    shd_model *fork_model = NULL;
    whole = "adafactor";
    reference("f32", 4, NULL, 0, want);
    fixture_start(&daemons, 3, NULL);
    shd_session *s = connect_to(daemons.address);
    shd_model *m = open_toy(s, muon_spec("f32"));
    train_steps(m, 2);
    EXPECT_OK(shd_model_fork(m, "twin", NULL, &e), &e);
    train_steps(m, 2);
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_model_close(m);
    char twin[4096], *at;
    snprintf(twin, sizeof twin, "%s", muon_spec("f32"));
    at = strstr(twin, "matrices");
    EXPECT(at != NULL);
    memmove(at + 4, at + 8, strlen(at + 8) + 1);
    memcpy(at, "twin", 4);
    EXPECT_OK(shd_model_open(s, twin, &fork_model, &e), &e);
    EXPECT_EQ(shd_step(fork_model), 2);
    train_steps(fork_model, 2);
    digest_of(fork_model, got);
    EXPECT_STR(got, want);
    shd_close(s);
    fixture_stop(&daemons);
}

static int fill(void *ctx, uint32_t unit, enum shd_array array, float *values)
{
    const shd_model *m = ctx;
    for (uint64_t i = 0; i < shd_unit_elems(m, unit); i++)
        values[i] = 0.01f * toy_noise(7, (uint32_t)array, unit, i);
    return 0;
}

/* Parameters and momentum of some units that have matrices, and of one that has none. */
static void put_some(shd_model *m)
{
    static const uint8_t arrays[PT_UNITS] = {
        SHD_PUT_PARAMS, SHD_PUT_PARAMS | SHD_PUT_MOMENT1, 0, SHD_PUT_MOMENT1, SHD_PUT_PARAMS, 0, 0
    };
    const struct shd_put_options options = {
        .size = sizeof options, .arrays = arrays, .fill = fill, .ctx = m
    };
    struct shd_err e = { 0 };
    bool counts = false;
    EXPECT_OK(shd_put(m, &options, &counts, &e), &e);
    EXPECT(counts);
}

/* Parameters alone: statistics, which lie behind them, stay; and these alone, which fill finds
 * there. */
static int fill_statistics(void *ctx, uint32_t unit, enum shd_array array, float *values)
{
    const shd_model *m = ctx;
    for (uint32_t t = 0; t < shd_tensors(m); t++) {
        struct shd_tensor tensor = { .size = sizeof tensor };
        shd_tensor_get(m, t, &tensor, NULL);
        for (uint64_t i = 0; tensor.unit == unit && i < tensor.elems; i++)
            if (!tensor.statistics)
                values[tensor.offset_elems + i] = 0.01f * toy_noise(7, (uint32_t)array, unit, i);
            else if (unit % 2 == 0)
                values[tensor.offset_elems + i] *= 4;
    }
    return 0;
}

static void put_statistics(shd_model *m)
{
    static const uint8_t arrays[PT_UNITS] = { 0, SHD_PUT_PARAMS, 0, 0, SHD_PUT_PARAMS, 0, 0 };
    const struct shd_put_options options = {
        .size = sizeof options, .arrays = arrays, .fill = fill_statistics, .ctx = m
    };
    struct shd_err e = { 0 };
    bool counts = false;
    EXPECT_OK(shd_put(m, &options, &counts, &e), &e);
    EXPECT(counts);
}

static void set_decay(shd_model *m)
{
    struct shd_err e = { 0 };
    EXPECT_OK(shd_model_set(m, "weight_decay.x=1 lr_scale.x=3", 0, NULL, &e), &e);
    EXPECT_STATUS(shd_model_set(m, "betas.x=0.9,0.95", 0, NULL, &e), SHD_EINVAL);
    EXPECT(strstr(e.text, "its optimizer is adafactor") != NULL);
    EXPECT_STATUS(shd_model_set(m, "eps.x=0.9", 0, NULL, &e), SHD_EINVAL);
}

static void set_momentum(shd_model *m)
{
    struct shd_err e = { 0 };
    EXPECT_OK(shd_model_set(m, "momentum.x=0.25 eps.x=0.01 lr_scale.x=3", 0, NULL, &e), &e);
    EXPECT_STATUS(shd_model_set(m, "betas.x=0.9,0.95", 0, NULL, &e), SHD_EINVAL);
    EXPECT(strstr(e.text, "its optimizer is muon") != NULL);
}

static void set_betas(shd_model *m)
{
    struct shd_err e = { 0 };
    EXPECT_OK(shd_model_set(m, "betas.x=0.5,0.75 eps.x=0.01 weight_decay.x=1", 0, NULL, &e), &e);
    EXPECT_STATUS(shd_model_set(m, "momentum.x=0.9", 0, NULL, &e), SHD_EINVAL);
    EXPECT(strstr(e.text, "its optimizer is lamb") != NULL);
}

TEST(puts_and_settings_come_to_the_same_bits)
{
    static const struct {
        const char *whole;
        void (*between)(shd_model *m);
    } cases[] = {
        { "muon", put_some },  { "muon", set_momentum },        { "lamb", put_some },
        { "lamb", set_betas }, { "adafactor", put_statistics }, { "adafactor", set_decay },
    };
    char plain[65], want[65], got[65];
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        whole = cases[i].whole;
        reference("f32", 2, NULL, 2, plain);
        reference("f32", 2, cases[i].between, 2, want);
        EXPECT(strcmp(want, plain) != 0);
        fixture_start(&daemons, 2, NULL);
        shd_session *s = connect_to(daemons.address);
        shd_model *m = open_toy(s, muon_spec("f32"));
        train_steps(m, 2);
        cases[i].between(m);
        train_steps(m, 2);
        digest_of(m, got);
        EXPECT_STR(got, want);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

/* Of a matrix neither is kept that it went by; of others in the same unit it is told as ever. */
TEST(what_the_last_update_of_a_matrix_was_cannot_be_told)
{
    struct shd_tensor_stats stats = { .size = sizeof stats };
    struct shd_err e = { 0 };
    whole = "muon";
    fixture_start(&daemons, 2, NULL);
    shd_session *s = connect_to(daemons.address);
    shd_model *m = open_toy(s, muon_spec("f32"));
    train_steps(m, 1);
    EXPECT_STATUS(shd_tensor_stats(m, "h0.w", SHD_UPDATE, &stats, &e), SHD_ENOTSUP);
    EXPECT(strstr(e.text, "Muon goes by a matrix that is not kept") != NULL);
    EXPECT_OK(shd_tensor_stats(m, "h0.b", SHD_UPDATE, &stats, &e), &e);
    EXPECT_OK(shd_tensor_stats(m, "h0.w", SHD_MOMENT1, &stats, &e), &e);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST_MAIN()
