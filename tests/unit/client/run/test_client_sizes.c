/* Structs that begin with their size and that the library fills: a program that was compiled
 * against a header with smaller ones is given what it has room for, and not a byte more. */
#include <stddef.h>

#include "tests/lib/client_remote.h"

static shd_session *connect_here(void)
{
    struct shd_err e = { 0 };
    shd_session *s;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    return s;
}

#define GUARD 0xa5

/* A caller's struct of so many bytes, as an older or a newer header has it; behind it are others of
 * its variables. */
struct filled {
    _Alignas(16) uint8_t bytes[1024];
};

static void *filled_begin(struct filled *f, size_t size)
{
    memset(f->bytes, GUARD, sizeof f->bytes);
    memcpy(f->bytes, &size, sizeof size);
    return f->bytes;
}

static void filled_expect(const struct filled *f, size_t size)
{
    size_t now;
    memcpy(&now, f->bytes, sizeof now);
    EXPECT_EQ(now, size);
    for (size_t i = size; i < sizeof f->bytes; i++)
        if (f->bytes[i] != GUARD)
            FAIL("byte %zu was written, the struct has %zu", i, size);
}

static int commit_into(shd_model *m, struct shd_result *result, struct shd_err *e)
{
    const struct shd_update update = toy_update(shd_step(m));
    for (uint32_t micro = 0; micro < TOY_MICROS; micro++)
        for (uint32_t u = 0; u < shd_units(m); u++)
            EXPECT_OK(shd_return_none(m, micro, u, e), e);
    return shd_commit(m, &update, result, e);
}

TEST(caller_of_an_older_header_is_given_what_it_has_room_for)
{
    struct shd_err e = { 0 };
    struct filled f;
    uint64_t elem;
    const void *params;
    shd_session *s = connect_here();
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    const size_t size = offsetof(struct shd_result, over);
    EXPECT_OK(commit_into(m, filled_begin(&f, size), &e), &e);
    filled_expect(&f, size);
    EXPECT_EQ(((struct shd_result *)f.bytes)->step, 0);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, filled_begin(&f, size), &e), &e);
    filled_expect(&f, size);
    EXPECT_EQ(((struct shd_result *)f.bytes)->step, 1);

    const size_t stats = offsetof(struct shd_stats, bytes_copied);
    EXPECT_OK(shd_stats(s, filled_begin(&f, stats), &e), &e);
    filled_expect(&f, stats);
    EXPECT_EQ(((struct shd_stats *)f.bytes)->bytes_mapped, 0); /* it is this process's */

    const size_t tensor = offsetof(struct shd_tensor, offset_elems);
    EXPECT_OK(shd_tensor_get(m, 1, filled_begin(&f, tensor), &e), &e);
    filled_expect(&f, tensor);
    const char *name = ((struct shd_tensor *)f.bytes)->name;
    EXPECT_OK(shd_tensor_find(m, name, filled_begin(&f, tensor), &e), &e);
    filled_expect(&f, tensor);
    EXPECT_OK(shd_acquire(m, 0, &params, &e), &e);
    EXPECT(shd_what(params, filled_begin(&f, tensor), &elem) == m);
    filled_expect(&f, tensor);
    EXPECT(shd_what(params, filled_begin(&f, 0), &elem) == m);
    for (size_t i = sizeof(size_t); i < sizeof f.bytes; i++)
        EXPECT_EQ(f.bytes[i], GUARD);
    shd_release(m, 0);

    const size_t row = offsetof(struct shd_step_row, metrics); /* two of them, in a row */
    uint64_t from = 0;
    uint32_t count = 0;
    EXPECT_OK(shd_history(m, &from, filled_begin(&f, row), 2, &count, &e), &e);
    EXPECT_EQ(count, 2);
    for (uint32_t i = 0; i < count; i++) {
        const struct shd_step_row *at = (const void *)(f.bytes + i * row);
        EXPECT(at->size == row && at->step == i && at->time_ns > 0);
    }
    for (size_t i = count * row; i < sizeof f.bytes; i++)
        EXPECT_EQ(f.bytes[i], GUARD);
    shd_close(s);
}

TEST(size_of_no_struct_of_this_library_is_refused_before_anything_is_done)
{
    static const size_t none[] = { 0, 7, 1000 };
    struct shd_err e = { 0 };
    struct filled f;
    uint64_t from = 0;
    uint32_t count = 9;
    shd_session *s = connect_here();
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    struct toy toy = { .m = m, .fail_micro = -1 };
    struct shd_compute compute = { sizeof compute, &toy, toy_forward, toy_backward, NULL, NULL };
    const struct shd_update update = toy_update(0);
    for (size_t i = 0; i < ARRAY_SIZE(none); i++) {
        filled_begin(&f, none[i]);
        EXPECT_STATUS(commit_into(m, (void *)f.bytes, &e), SHD_EINVAL);
        EXPECT_HAS(e.text, "shd_result.size is ");
        EXPECT_STATUS(toy_step(m, toy_all_micros, TOY_MICROS, (void *)f.bytes, &e), SHD_EINVAL);
        EXPECT_EQ(shd_step(m), 0);
        EXPECT_STATUS(shd_stats(s, (void *)f.bytes, &e), SHD_EINVAL);
        EXPECT_HAS(e.text, "shd_stats.size is ");
        EXPECT_STATUS(shd_tensor_get(m, 0, (void *)f.bytes, &e), SHD_EINVAL);
        EXPECT_STATUS(shd_history(m, &from, (void *)f.bytes, 1, &count, &e), SHD_EINVAL);
        compute.size = none[i];
        EXPECT_STATUS(shd_run_step(m, toy_all_micros, TOY_MICROS, &compute, &update, NULL, &e),
                      SHD_EINVAL);
        EXPECT_HAS(e.text, "shd_compute.size is ");
        for (size_t at = sizeof(size_t); at < sizeof f.bytes; at++)
            EXPECT_EQ(f.bytes[at], GUARD);
    }
    compute.size = offsetof(struct shd_compute, metrics); /* an older one: it has no metrics */
    EXPECT_STATUS(shd_tensor_get(m, shd_tensors(m), (void *)f.bytes, &e), SHD_ERANGE);
    EXPECT_OK(shd_run_step(m, toy_all_micros, TOY_MICROS, &compute, &update, NULL, &e), &e);
    EXPECT_EQ(shd_step(m), 1);
    shd_close(s);
}

TEST(caller_of_an_older_header_is_told_what_it_has_room_for)
{
    struct shd_err e = { 0 };
    struct shd_checkpointed saved = { .size = offsetof(struct shd_checkpointed, digest),
                                      .digest = "mine" };
    struct shd_restored restored = { .size = offsetof(struct shd_restored, model),
                                     .model = "mine" };
    make_ckpts();
    fixture_start(&daemons, 1, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    train_steps(m, 1);
    EXPECT_OK(shd_checkpoint(m, ckpts, NULL, &saved, &e), &e);
    EXPECT(saved.step == 1 && saved.bytes > 0);
    EXPECT_STR(saved.digest, "mine");
    saved.size = sizeof saved + 1;
    EXPECT_STATUS(shd_checkpoint(m, ckpts, NULL, &saved, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "shd_checkpointed.size is ");
    shd_close(s);
    fixture_stop(&daemons);
    fixture_start(&daemons, 1, NULL);
    s = attach(PATIENT_MS);
    EXPECT_OK(shd_restore(s, ckpts, NULL, &restored, &e), &e);
    EXPECT(restored.step == 1 && restored.bytes > 0);
    EXPECT_STR(restored.model, "mine");
    restored.size = 0;
    EXPECT_STATUS(shd_restore(s, ckpts, NULL, &restored, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "shd_restored.size is 0");
    shd_close(s);
    fixture_stop(&daemons);
    remove_ckpts();
}

TEST_MAIN()
