/* Saving and restoring on real daemons: the same digest on any number of owners, exactly step K
 * while training goes on, and what the files are. */
#include "tests/lib/checkpoint_util.h"

#include <sys/mman.h>

/* -- There and back -----------------------------------------------------------------------------
 */

/* Train on `from` daemons, save, restore on `to` others, train on: as if nothing had happened. */
static void round_trip(const char *spec, int from, int to)
{
    char half[65], whole[65], got[65];
    toy_reference(spec, 2, half);
    toy_reference(spec, 4, whole);
    make_ckpts();
    fixture_start(&daemons, from, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec);
    train(m, 2);
    const struct shd_checkpointed saved = save_ok(m, 0);
    EXPECT_EQ(saved.step, 2);
    EXPECT_EQ(saved.updates, 2);
    EXPECT_STR(saved.name, "step-000000000002");
    EXPECT_STR(saved.digest, half);
    shd_close(s);
    fixture_stop(&daemons);

    fixture_start(&daemons, to, NULL);
    s = attach(PATIENT_MS);
    m = restore_ok(s, ckpts);
    EXPECT_EQ(shd_step(m), 2);
    digest_of(m, got);
    EXPECT_STR(got, half);
    train(m, 2);
    digest_of(m, got);
    EXPECT_STR(got, whole);
    shd_close(s);
    fixture_stop(&daemons);
    EXPECT_EQ(expect_all_good(), 1);
    remove_ckpts();
}

TEST(digest_survives_any_change_of_owners)
{
    static const int counts[][2] = { { 1, 3 }, { 2, 5 }, { 3, 1 }, { 5, 2 }, { 2, 2 } };
    for (size_t i = 0; i < ARRAY_SIZE(counts); i++)
        round_trip(toy_spec("f32", TOY_ADAMW), counts[i][0], counts[i][1]);
}

TEST(digest_survives_for_each_optimizer_and_dtype)
{
    round_trip(toy_spec("bf16", TOY_SGD), 2, 3);
    round_trip(toy_spec("f16", TOY_LION), 3, 2);
}

TEST(files_split_by_unit_restore_as_well)
{
    checkpoint_file_bytes_max = 30000;
    round_trip(toy_spec("f32", TOY_ADAMW), 2, 3);
    checkpoint_file_bytes_max = UINT64_C(5000000000);
}

TEST_MAIN()
