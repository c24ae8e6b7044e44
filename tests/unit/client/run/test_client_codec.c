/* Parameters published in codes: the same bits for any owners, paths and after kills; what workers
 * and readers see is what the codes say; and fewer bytes. */
#include "client/plan/plan_cost.h"
#include "daemon/model/pin.h"
#include "kernels/cpu/decode.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec_json.h"
#include "tests/lib/client_remote.h"
#include "tests/lib/kern_util.h"

static const struct pt_model models[] = {
    { .name = "pt", .publish = "bf16", .codec = "int8" },
    { .name = "pt", .publish = "f32", .frozen = true, .ema = true, .codec = "fp8" },
    { .name = "pt", .publish = "f16", .ema = true, .int8 = true, .placed = true, .codec = "int4" },
    { .name = "pt", .publish = "f32", .mean = true, .codec = "int4" },
    { .name = "pt", .publish = "bf16", .whole = "muon", .codec = "int8" },
    { .name = "pt", .publish = "f32", .whole = "adafactor", .codec = "fp8" },
};

static struct spec *parsed(const struct pt_model *model)
{
    struct shd_err e = { 0 };
    struct spec *spec;
    const char *json = pt_spec(model);
    EXPECT_OK(spec_parse(json, strlen(json), &spec, &e), &e);
    return spec;
}

/* -- What is read --------------------------------------------------------------------------------
 */

/* The unit's parameters, or their average, encoded and decoded here: [elems], yours. */
static void *want_of(shd_model *m, const struct spec *spec, uint32_t unit, enum shd_array array)
{
    static const uint64_t zero = 0;
    struct shd_err e = { 0 };
    const uint64_t elems = spec->units[unit].elems;
    float *values = aligned_alloc(64, elems * sizeof *values);
    void *codes = aligned_alloc(64, codec_bytes(spec->codec, elems));
    struct kern *k = device_new("scalar", 1);
    EXPECT(values != NULL && codes != NULL);
    memset(values, 0, elems * sizeof *values);
    EXPECT_OK(shd_get(m, unit, array, values, NULL, NULL, &e), &e);
    const struct kern_encode encode = {
        values, codes, spec->codec, 0, elems, &zero, &zero, 1, NULL
    };
    EXPECT_RUNS(encode, k, &encode);
    const struct kern_decode decode = { values, codes, spec->codec, spec->publish, elems };
    cpu_decode_by("scalar", &decode);
    k->ops->free(k);
    free(codes);
    return values;
}

static uint64_t read_bytes(const struct spec *spec, uint32_t unit)
{
    const struct spec_unit *u = &spec->units[unit];
    const struct spec_tensor *last = &spec->tensors[u->first_tensor + u->tensor_count - 1];
    return (last->offset_elems + last->elems) * dtype_bytes(spec->publish);
}

static void expect_reads(shd_model *m, const struct spec *spec)
{
    struct shd_err e = { 0 };
    void *read[PT_UNITS];
    uint64_t step;
    for (uint32_t u = 0; u < PT_UNITS; u++) {
        read[u] = malloc(read_bytes(spec, u));
        EXPECT(read[u] != NULL);
    }
    EXPECT_OK(shd_read_step(m, read, &step, &e), &e);
    EXPECT_EQ(step, shd_step(m));
    for (uint32_t u = 0; u < PT_UNITS; u++) {
        void *want = want_of(m, spec, u, SHD_PARAMS);
        const void *params;
        EXPECT_OK(shd_acquire(m, u, &params, &e), &e);
        EXPECT(memcmp(params, want, spec->units[u].elems * dtype_bytes(spec->publish)) == 0);
        EXPECT(memcmp(read[u], want, read_bytes(spec, u)) == 0);
        shd_release(m, u);
        free(read[u]);
        free(want);
    }
}

static void expect_pinned(shd_model *m, const struct spec *spec, bool ema)
{
    const struct shd_pin_options options = { .size = sizeof options, .ema = ema };
    struct shd_err e = { 0 };
    uint64_t step;
    EXPECT_OK(shd_pin(m, &options, &step, &e), &e);
    EXPECT_EQ(step, shd_step(m));
    for (uint32_t u = 0; u < PT_UNITS; u++) {
        const bool own = ema && spec_unit_ema(spec, u);
        void *want = want_of(m, spec, u, own ? SHD_EMA : SHD_PARAMS);
        EXPECT(memcmp(shd_pinned(m, u), want, spec->units[u].elems * dtype_bytes(spec->publish)) ==
               0);
        free(want);
    }
    shd_unpin(m);
    EXPECT(shd_pinned(m, 0) == NULL);
}

TEST(digests_and_what_is_read_are_the_same_for_any_owners)
{
    for (size_t i = 0; i < ARRAY_SIZE(models); i++)
        for (int owners = 1; owners <= 3; owners++) {
            struct spec *spec = parsed(&models[i]);
            pin_piece_bytes = owners == 1 ? 512 : UINT64_C(4) << 20;
            fixture_start(&daemons, owners, NULL);
            shd_session *s = attach(PATIENT_MS), *own = attach_here();
            shd_model *m = open_pt_of(s, &models[i]), *twin = open_pt_of(own, &models[i]);
            EXPECT_EQ(shd_path(m), SHD_PATH_COPY);
            expect_reads(m, spec); /* initial values */
            for (int step = 0; step < 2; step++) {
                train_pt(m, 1);
                train_pt(twin, 1);
                expect_twins(m, twin);
            }
            expect_reads(m, spec);
            expect_reads(twin, spec);
            expect_pinned(m, spec, /* ema= */ false);
            if (spec->ema > 0)
                expect_pinned(m, spec, /* ema= */ true);
            shd_close(own);
            shd_close(s);
            fixture_stop(&daemons);
            spec_free(spec);
        }
}

/* -- Returned ------------------------------------------------------------------------------------
 */

#define GRADS "\", \"grad_codec\": \"int8"

static const struct pt_model returned[] = {
    { .name = "pt", .publish = "bf16", .mean = true, .codec = "int8" GRADS },
    { .name = "pt", .publish = "f32", .accumulate = 2, .frozen = true, .codec = "none" GRADS },
    { .name = "pt", .publish = "f32", .placed = true, .whole = "lamb", .codec = "int4" GRADS },
    { .name = "pt", .publish = "bf16", .grad_dtype = SHD_BF16, .codec = "none" GRADS },
};

/* A gradient is rounded by numbers of its place in training alone: another worker, or one after a
 * kill, returns the same. */
TEST(gradients_in_codes_are_the_same_for_any_owners_and_after_kills)
{
    for (size_t i = 0; i < ARRAY_SIZE(returned); i++)
        for (int owners = 1; owners <= 3; owners++) {
            fixture_start_kept(&daemons, owners, "");
            shd_session *s = attach(PATIENT_MS), *own = attach_here();
            shd_model *m = open_pt_of(s, &returned[i]), *twin = open_pt_of(own, &returned[i]);
            for (int step = 0; step < 3; step++) {
                if (step == 1)
                    fixture_restart(&daemons, owners - 1);
                train_pt(m, 1);
                train_pt(twin, 1);
                expect_twins(m, twin);
            }
            shd_close(own);
            shd_close(s);
            fixture_stop(&daemons);
        }
}

TEST(a_worker_returns_as_many_bytes_as_the_plan_says)
{
    struct spec *spec = parsed(&returned[0]);
    struct shd_stats stats = { .size = sizeof stats };
    struct shd_err e = { 0 };
    uint64_t bytes = 0;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    train_pt(open_pt_of(s, &returned[0]), 1);
    for (uint32_t u = 0; u < PT_UNITS; u++) {
        bytes += TOY_MICROS * plan_unit_returned_bytes(spec, u, SHD_F32);
        EXPECT(spec->units[u].mean || plan_unit_returned_bytes(spec, u, SHD_F32) * 3 <
                                          plan_unit_grad_bytes(spec, u, SHD_F32));
    }
    EXPECT_OK(shd_stats(s, &stats, &e), &e);
    EXPECT_EQ(stats.bytes_returned, bytes);
    shd_close(s);
    fixture_stop(&daemons);
    spec_free(spec);
}

/* Other bits than without, and near them. */
TEST(a_codec_is_seen_in_what_is_trained)
{
    char hex[3][65];
    shd_session *s = attach_here();
    for (size_t i = 0; i < 3; i++) {
        const char *const codecs[] = { NULL, "int8", "int4" };
        const struct pt_model model = { .name = i == 0   ? "none"
                                                : i == 1 ? "int8"
                                                         : "int4",
                                        .publish = "f32",
                                        .codec = codecs[i] };
        shd_model *m = open_pt_of(s, &model);
        train_pt(m, 1);
        digest_of(m, hex[i]);
    }
    EXPECT(strcmp(hex[0], hex[1]) != 0 && strcmp(hex[1], hex[2]) != 0);
    shd_close(s);
}

/* -- Killed --------------------------------------------------------------------------------------
 */

#ifdef SHD_FAIL_POINTS
/* A successor publishes all of it anew: between an update and its codes the word that vouches for
 * the update is there, and no board says that it is published. */
TEST(a_kill_between_an_update_and_its_codes_is_not_seen)
{
    static const char *const points[] = { "apply:publish:before@9;", "kern:done:before@4;",
                                          "kern:done:after@11;" };
    for (size_t i = 0; i < ARRAY_SIZE(points); i++) {
        struct spec *spec = parsed(&models[i]);
        fixture_start_kept(&daemons, 1, points[i]);
        shd_session *s = attach(PATIENT_MS), *own = attach_here();
        shd_model *m = open_pt_of(s, &models[i]), *twin = open_pt_of(own, &models[i]);
        train_pt(m, 3);
        train_pt(twin, 3);
        EXPECT(fixture_ask(&daemons, KEEPER_STARTS, 0, "") > 1);
        expect_twins(m, twin);
        expect_reads(m, spec);
        shd_close(own);
        shd_close(s);
        fixture_stop(&daemons);
        spec_free(spec);
    }
}
#endif

TEST(daemons_killed_while_a_worker_trains_publish_again)
{
    struct spec *spec = parsed(&models[2]);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS), *own = attach_here();
    shd_model *m = open_pt_of(s, &models[2]), *twin = open_pt_of(own, &models[2]);
    for (int step = 0; step < 4; step++) {
        fixture_restart(&daemons, step % 2);
        train_pt(m, 1);
        train_pt(twin, 1);
        expect_reads(m, spec);
    }
    expect_twins(m, twin);
    shd_close(own);
    shd_close(s);
    fixture_stop(&daemons);
    spec_free(spec);
}

/* -- Elsewhere -----------------------------------------------------------------------------------
 */

TEST(forks_checkpoints_and_rewinds_publish_codes)
{
    const struct pt_model *model = &models[1];
    struct pt_model other = *model;
    struct shd_err e = { 0 };
    struct spec *spec = parsed(model);
    uint64_t step;
    make_ckpts();
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *own = attach_here();
    shd_model *m = open_pt_of(s, model), *twin = open_pt_of(own, model);
    train_pt(m, 1);
    train_pt(twin, 1);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    EXPECT_OK(shd_model_fork(m, "other", NULL, &e), &e);
    other.name = "other";
    shd_model *fork = open_pt_of(s, &other);
    expect_reads(fork, spec);
    train_pt(m, 1);
    EXPECT_OK(shd_model_rewind(m, step, &step, &e), &e);
    expect_reads(m, spec);
    expect_twins(m, twin);
    save_ok(m, 0);
    shd_close(s);
    fixture_stop(&daemons);
    fixture_start(&daemons, 3, NULL);
    s = attach(PATIENT_MS);
    m = restore_ok(s, ckpts);
    expect_reads(m, spec);
    train_pt(m, 2);
    train_pt(twin, 2);
    expect_twins(m, twin);
    shd_close(own);
    shd_close(s);
    fixture_stop(&daemons);
    remove_ckpts();
    spec_free(spec);
}

static int give(void *ctx, uint32_t unit, enum shd_array array, float *values)
{
    (void)ctx, (void)unit, (void)array;
    for (uint32_t i = 0; i < 777; i++)
        values[i] = (float)i - 300.25f;
    return 0;
}

TEST(a_put_is_published_in_codes)
{
    struct spec *spec = parsed(&models[0]);
    struct shd_err e = { 0 };
    uint8_t arrays[PT_UNITS] = { 0 };
    arrays[PT_UNITS - 1] = SHD_PUT_PARAMS;
    const struct shd_put_options put = { .size = sizeof put, .arrays = arrays, .fill = give };
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *own = attach_here();
    shd_model *m = open_pt_of(s, &models[0]), *twin = open_pt_of(own, &models[0]);
    EXPECT_OK(shd_put(m, &put, NULL, &e), &e);
    EXPECT_OK(shd_put(twin, &put, NULL, &e), &e);
    expect_reads(m, spec);
    expect_reads(twin, spec);
    train_pt(m, 1);
    train_pt(twin, 1);
    expect_twins(m, twin);
    shd_close(own);
    shd_close(s);
    fixture_stop(&daemons);
    spec_free(spec);
}

/* -- Bytes ---------------------------------------------------------------------------------------
 */

TEST(published_are_the_codes_and_whole_pages)
{
    struct shd_err e = { 0 };
    for (size_t i = 0; i < ARRAY_SIZE(models); i++)
        for (uint32_t owner = 0; owner < 3; owner++) {
            struct spec *spec = parsed(&models[i]);
            struct shardmap *map;
            uint64_t at = 0;
            EXPECT_OK(shardmap_new(spec, owner, 3, &map, &e), &e);
            for (uint32_t u = 0; u < spec->unit_count; u++) {
                const uint64_t tiles = map->slice[u].elems / 2048;
                const uint64_t bytes = tiles * (spec->codec == CODEC_INT4 ? 1024 + 64 : 2048 + 64);
                EXPECT_EQ(shardmap_publish_offset_bytes(map, u), at);
                EXPECT_EQ(shardmap_publish_slice_bytes(map, u), layout_align(bytes, 4096));
                EXPECT_EQ(shardmap_publish_sent_bytes(map, u), bytes);
                EXPECT(layout_align(bytes, 4096) <=
                       map->slice[u].elems * dtype_bytes(spec->publish));
                at += layout_align(bytes, 4096);
            }
            EXPECT_EQ(shardmap_publish_bytes(map), at > 0 ? at : 4096);
            for (uint32_t t = 0; t < spec->tensor_count; t++)
                EXPECT_EQ(spec->tensors[t].offset_elems % CODEC_BLOCK_ELEMS, 0);
            shardmap_free(map);
            spec_free(spec);
        }
}

TEST(a_worker_moves_as_many_bytes_as_the_plan_says)
{
    struct shd_err e = { 0 };
    for (size_t i = 0; i < 4; i++) {
        struct spec *spec = parsed(&models[i]);
        struct shd_stats before = { .size = sizeof before }, after = { .size = sizeof after };
        uint64_t fetched = 0, copied = 0;
        fixture_start(&daemons, 2, NULL);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_pt_of(s, &models[i]);
        EXPECT_OK(shd_stats(s, &before, &e), &e);
        for (uint32_t u = 0; u < PT_UNITS; u++) {
            const void *params;
            EXPECT_OK(shd_acquire(m, u, &params, &e), &e);
            shd_release(m, u);
            fetched += plan_unit_fetched_bytes(spec, u);
            copied += codec_bytes(spec->codec, spec->units[u].elems);
        }
        EXPECT_OK(shd_stats(s, &after, &e), &e);
        EXPECT_EQ(after.bytes_fetched - before.bytes_fetched, fetched);
        EXPECT_EQ(after.bytes_copied - before.bytes_copied, copied);
        shd_close(s);
        fixture_stop(&daemons);
        spec_free(spec);
    }
}

/* -- Refused -------------------------------------------------------------------------------------
 */

TEST(codes_are_not_mapped_and_codecs_not_mixed)
{
    struct shd_err e = { 0 };
    const struct shd_policy map = { .size = sizeof map, .path = SHD_PATH_MAP };
    const struct shd_policy copy = { .size = sizeof copy, .path = SHD_PATH_COPY };
    const struct pt_model plain = { .name = "pt", .publish = "bf16" };
    struct pt_model wrong = plain;
    fixture_start(&daemons, 1, NULL);
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_pt_of(s, &models[0]), *none;
    EXPECT_STATUS(shd_set_policy(m, &map, &e), SHD_ENOTSUP);
    EXPECT_HAS(e.text, "codec: int8");
    EXPECT_OK(shd_set_policy(m, &copy, &e), &e);
    EXPECT_STATUS(shd_model_open(other, pt_spec(&plain), &none, &e), SHD_ESPEC);
    EXPECT_HAS(e.text, "codec is 'none', the open model has 'int8'");
    wrong.codec = "int2";
    EXPECT_STATUS(shd_model_open(other, pt_spec(&wrong), &none, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "codec is 'int2', must be none, int8, fp8 or int4");
    wrong.codec = "none\", \"grad_codec\": \"fp8";
    EXPECT_STATUS(shd_model_open(other, pt_spec(&wrong), &none, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "grad_codec is 'fp8', must be none or int8");
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST_MAIN()
