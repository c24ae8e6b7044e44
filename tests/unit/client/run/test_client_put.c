/* Values in the place of what owners hold: the same bits on any number of owners and in this
 * process, and nobody trains on with what was there before. Who is killed in it is
 * test_client_put_kill.c's. */
#include <signal.h>
#include <sys/resource.h>

#include "client/paths/map.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "tests/lib/put_toy.h"

TEST(a_put_has_the_same_bits_on_any_number_of_owners)
{
    struct shd_err e = { 0 };
    char want[65], old[65], got[65];
    shd_session *s;
    put_reference(2, /* put= */ true, 2, want);
    put_reference(2, /* put= */ false, 3, old);
    EXPECT(strcmp(want, old) != 0);
    for (int count = 0; count <= 3; count++) {
        if (count > 0)
            fixture_start(&daemons, count, NULL);
        EXPECT_OK(try_connect(count > 0 ? daemons.address : "local:", PATIENT_MS, &s, &e), &e);
        shd_model *m = open_pt(s);
        train_pt(m, 2);
        EXPECT_EQ(shd_puts(m), 0);
        put_ok(m, 9);
        EXPECT_EQ(shd_step(m), 3);
        EXPECT_EQ(shd_puts(m), 1);
        expect_put(m, 9);
        train_pt(m, 2);
        digest_of(m, got);
        EXPECT_STR(got, want);
        struct shd_step_row rows[8] = { { .size = sizeof *rows } };
        uint64_t from = 0;
        uint32_t found = 0;
        EXPECT_OK(shd_history(m, &from, rows, 8, &found, &e), &e);
        EXPECT_EQ(found, 5);
        EXPECT(rows[2].skipped && rows[2].grad_norm == 0 && !rows[3].skipped);
        shd_close(s);
        if (count > 0)
            fixture_stop(&daemons);
    }
}

/* Masters and published copies: a reader that is there all the time sees the put as a step. */
TEST(readers_and_later_workers_see_it)
{
    struct shd_err e = { 0 };
    char hex[65];
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_pt(s), *reader;
    EXPECT_OK(shd_model_attach(other, "put", &reader, &e), &e);
    uint16_t *seen = calloc(shd_unit_elems(m, 6), sizeof *seen);
    void *to[PT_UNITS] = { [6] = seen };
    uint64_t step = 0;
    put_ok(m, 9);
    EXPECT_OK(shd_read_step(reader, to, &step, &e), &e);
    EXPECT_EQ(step, 1);
    uint32_t bits;
    const float first = value_of(9, 6, SHD_PARAMS, 0);
    memcpy(&bits, &first, sizeof bits);
    EXPECT(seen[0] == bits >> 16 || seen[0] == (bits >> 16) + 1);
    free(seen);
    shd_close(s);
    s = attach(PATIENT_MS);
    m = open_pt(s);
    EXPECT_EQ(shd_step(m), 1);
    EXPECT_EQ(shd_puts(m), 1);
    expect_put(m, 9);
    put_ok(m, 10); /* one after the other */
    expect_put(m, 10);
    EXPECT_EQ(shd_puts(m), 2);
    digest_of(m, hex);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(puts_and_updates_go_through_a_checkpoint)
{
    char before[65], after[65];
    make_ckpts();
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_pt(s);
    train_pt(m, 1);
    put_ok(m, 9);
    EXPECT_STR(save_ok(m, 0).name, "step-000000000002");
    digest_of(m, before);
    shd_close(s);
    fixture_stop(&daemons);
    fixture_start(&daemons, 1, NULL);
    s = attach(PATIENT_MS);
    m = restore_ok(s, ckpts);
    EXPECT_EQ(shd_puts(m), 1);
    EXPECT(shd_loss_scale(m) == 65536); /* as if there had been no put */
    expect_put(m, 9);
    digest_of(m, after);
    EXPECT_STR(after, before);
    train_pt(m, 1);
    shd_close(s);
    fixture_stop(&daemons);
    remove_ckpts();
}

TEST(updates_of_units_need_daemons_that_know_them)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_pt(s);
    struct values v = values_of(m, 9);
    s->hub->links[1].peer.level = WIRE_LEVEL_COUNTS - 1; /* as an older one tells */
    EXPECT_STATUS(put_some(m, &v, NULL, &e), SHD_ENOTSUP);
    EXPECT_HAS(e.text, "of an older build");
    EXPECT_EQ(shd_step(m), 0);
    s->hub->links[1].peer.level = WIRE_LEVEL;
    put_ok(m, 9);
    shd_close(s);
    fixture_stop(&daemons);
}

/* Not each as it can, for then its slices would have other numbers than the others'. */
TEST(owners_of_builds_that_differ_count_alike)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    s->hub->links[1].peer.level = WIRE_LEVEL_COUNTS - 1; /* as an older one tells */
    shd_model *m = open_pt(s);
    struct values v = values_of(m, 9);
    s->hub->links[1].peer.level = WIRE_LEVEL;
    EXPECT_STATUS(put_some(m, &v, NULL, &e), SHD_ENOTSUP);
    EXPECT_HAS(e.text, "has one for all");
    EXPECT_EQ(shd_step(m), 0);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- What is refused ----------------------------------------------------------------------------
 */

static void expect_unchanged(shd_model *m, const char *hex, uint64_t step)
{
    char got[65];
    digest_of(m, got);
    EXPECT_STR(got, hex);
    EXPECT_EQ(shd_step(m), step);
    EXPECT_EQ(shd_puts(m), 0);
}

TEST(what_cannot_be_put_is_refused_and_changes_nothing)
{
    struct shd_err e = { 0 };
    uint8_t arrays[PT_UNITS] = { 0 };
    for (int count = 0; count <= 2; count += 2) {
        char hex[65];
        shd_session *s;
        const void *params;
        float *grad;
        if (count > 0)
            fixture_start(&daemons, count, NULL);
        EXPECT_OK(try_connect(count > 0 ? daemons.address : "local:", PATIENT_MS, &s, &e), &e);
        shd_model *m = open_pt(s);
        struct values v = values_of(m, 9);
        struct shd_put_options o = {
            .size = sizeof o, .arrays = arrays, .fill = fill_values, .ctx = &v
        };
        train_pt(m, 1);
        digest_of(m, hex);
        EXPECT_STATUS(shd_put(m, &o, NULL, &e), SHD_EINVAL);
        EXPECT_HAS(e.text, "a put of nothing");
        arrays[2] = SHD_PUT_MOMENT1;
        EXPECT_STATUS(shd_put(m, &o, NULL, &e), SHD_EINVAL);
        EXPECT_HAS(e.text, "unit 'h1'");
        EXPECT_HAS(e.text, "it is frozen");
        arrays[2] = 8;
        EXPECT_STATUS(shd_put(m, &o, NULL, &e), SHD_EINVAL);
        arrays[2] = 0;
        o.fill = NULL;
        EXPECT_STATUS(shd_put(m, &o, NULL, &e), SHD_EINVAL);
        o = (struct shd_put_options){ .size = 3 };
        EXPECT_STATUS(shd_put(m, &o, NULL, &e), SHD_EINVAL);
        const uint64_t too_many[PT_UNITS] = { [1] = UINT64_C(1) << 33 };
        o = (struct shd_put_options){ .size = sizeof o,
                                      .arrays = some_arrays,
                                      .fill = fill_values,
                                      .ctx = &v,
                                      .unit_updates = too_many };
        EXPECT_STATUS(shd_put(m, &o, NULL, &e), SHD_ERANGE);
        EXPECT_HAS(e.text, "8589934592 updates of unit 'h0'");
        v.fail_at = 2;
        EXPECT_STATUS(put_some(m, &v, NULL, &e), SHD_EINTERNAL);
        EXPECT_HAS(e.text, "gave up with 7: nothing is put");
        v = values_of(m, 9);
        EXPECT_OK(shd_acquire(m, 1, &params, &e), &e);
        EXPECT_STATUS(put_some(m, &v, NULL, &e), SHD_EBUSY);
        EXPECT_HAS(e.text, "unit 'h0' is acquired");
        shd_release(m, 1);
        EXPECT_OK(shd_grad(m, 0, 1, &grad, &e), &e);
        EXPECT_STATUS(put_some(m, &v, NULL, &e), SHD_EBUSY);
        EXPECT_HAS(e.text, "a gradient of unit 'h0' is handed out");
        expect_unchanged(m, hex, 1);
        EXPECT_OK(shd_return_none(m, 0, 1, &e), &e);
        EXPECT_STATUS(put_some(m, &v, NULL, &e), SHD_EBUSY);
        EXPECT_HAS(e.text, "step 1 has begun");
        expect_unchanged(m, hex, 1);
        shd_close(s);
        if (count > 0)
            fixture_stop(&daemons);
    }
}

/* -- Several workers ----------------------------------------------------------------------------
 */

/* All of them put between the same two steps; the first counts. */
TEST(of_several_workers_that_put_the_first_counts)
{
    struct shd_err e = { 0 };
    bool counts = true;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_pt(s), *late = open_pt(other);
    put_ok(m, 9);
    struct values v = values_of(late, 10);
    EXPECT_OK(put_some(late, &v, &counts, &e), &e);
    EXPECT(!counts);
    EXPECT_EQ(v.calls, 0);
    EXPECT_EQ(shd_step(late), 1);
    EXPECT_EQ(shd_puts(late), 1);
    expect_put(late, 9);
    train_pt(m, 1);
    v = values_of(late, 10); /* of a step that others have committed by gradients */
    EXPECT_STATUS(put_some(late, &v, &counts, &e), SHD_ESTEP);
    EXPECT_HAS(e.text, "step 1 was committed by other workers before the put, and step 2 is open");
    EXPECT_EQ(shd_step(late), 2);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

/* Its gradients were of other parameters: they count nowhere, and its commit says so. */
TEST(a_worker_that_knows_nothing_of_a_put_is_overtaken)
{
    struct shd_err e = { 0 };
    char want[65], got[65];
    put_reference(1, /* put= */ true, 1, want);
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_pt(s);
    train_pt(m, 1);
    shd_model *late = open_pt(other);
    struct shd_result result = { .size = sizeof result };
    const struct shd_update update = toy_update(1);
    put_ok(m, 9);
    return_all(late, 1);
    EXPECT_OK(shd_commit(late, &update, &result, &e), &e);
    EXPECT(result.over);
    EXPECT_EQ(shd_step(late), 2);
    EXPECT_EQ(shd_puts(late), 1);
    expect_put(late, 9);
    train_pt(m, 1);
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

/* Nobody puts before all have come, unless one does not come any more. A wait that is to end by
 * itself is shorter than what it takes to find out who holds it up, whatever the machine. */
TEST(workers_wait_for_each_other_before_a_put)
{
    struct shd_err e = { 0 };
    bool counts = true;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_pt(s), *late = open_pt(other);
    limit_waits(s, 100);
    struct values v = values_of(late, 10);
    EXPECT_STATUS(shd_meet(m, 0, &e), SHD_ERANGE);
    s->hub->links[0].peer.level = WIRE_LEVEL_TOLD;
    EXPECT_STATUS(shd_meet(m, 2, &e), SHD_ENOTSUP);
    EXPECT_HAS(e.text, "does not let workers wait for each other: it is of an older version");
    s->hub->links[0].peer.level = WIRE_LEVEL;
    EXPECT_STATUS(shd_meet(m, 2, &e), SHD_ETIMEDOUT);
    EXPECT_HAS(e.text, "other workers have not come to the same point");
    limit_waits(s, PATIENT_MS);
    EXPECT_OK(shd_meet(late, 2, &e), &e);
    EXPECT_OK(shd_meet(m, 2, &e), &e); /* its question goes on */
    put_ok(m, 9);
    limit_waits(s, 100);
    EXPECT_STATUS(shd_meet(m, 2, &e), SHD_ETIMEDOUT); /* in the next step, to which the other */
    limit_waits(s, PATIENT_MS);                       /* has not come: its own is over */
    EXPECT_OK(shd_meet(late, 2, &e), &e);
    EXPECT_OK(put_some(late, &v, &counts, &e), &e);
    EXPECT(!counts);
    return_all(late, 1); /* it does not come */
    EXPECT_OK(shd_meet(m, 2, &e), &e);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

static void survive_limits(int index)
{
    (void)index;
    signal(SIGXFSZ, SIG_IGN);
}

/* Its gradient waits for an earlier one, and there is no memory to put it aside. */
TEST(who_does_not_come_is_seen_by_a_gradient_that_only_waits)
{
    const struct rlimit none = { 0, 0 };
    struct shd_err e = { 0 };
    float *grad;
    fixture_start(&daemons, 2, survive_limits);
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_pt(s), *late = open_pt(other);
    for (int i = 0; i < 2; i++)
        CHECK(prlimit(daemons.pids[i], RLIMIT_FSIZE, &none, NULL) == 0);
    limit_waits(s, test_paced(100));
    EXPECT_STATUS(shd_meet(m, 2, &e), SHD_ETIMEDOUT);
    EXPECT_OK(shd_grad(late, 1, 0, &grad, &e), &e);
    memset(grad, 0, shd_unit_elems(late, 0) * sizeof *grad);
    EXPECT_OK(shd_return(late, 1, 0, &e), &e);
    limit_waits(s, PATIENT_MS);
    EXPECT_OK(shd_meet(m, 2, &e), &e);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- What lies in the way -----------------------------------------------------------------------
 */

static uint32_t was_reset;

static void reset_answered(struct link *link, const struct call *call,
                           const struct wire_reply *reply)
{
    (void)link;
    (void)call;
    EXPECT_EQ(reply->status, SHD_OK);
    was_reset++;
}

static int make_reset(struct link *link, const struct call *call, struct wire_request *ret_request,
                      struct shd_err *e)
{
    const shd_model *m = call->ctx;
    (void)e;
    ret_request->type = WIRE_RESET;
    ret_request->reset = (struct wire_reset){ .model = m->map->owners[link->index].layout.handle,
                                              .step = shd_step(m),
                                              .attempt = m->in.attempt + 1 };
    return SHD_OK;
}

/* Its worker was killed when one owner had granted it: the other still has the gradients. */
TEST(reset_that_only_one_owner_has_heard_of_keeps_no_put_away)
{
    struct shd_err e = { 0 };
    char want[65], got[65];
    put_reference(1, /* put= */ true, 1, want);
    for (uint32_t granted = 0; granted < 2; granted++) {
        fixture_start(&daemons, 2, NULL);
        shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
        shd_model *m = open_pt(s);
        train_pt(m, 1);
        shd_model *late = open_pt(other);
        const struct call call = { .make = make_reset, .fn = reset_answered, .ctx = late };
        return_all(late, 2); /* waits */
        return_all(late, 0);
        EXPECT_OK(hub_ask(&other->hub->links[granted], &call, &e), &e);
        for (was_reset = 0; was_reset == 0;)
            EXPECT_OK(hub_poll(other->hub, 20 * NS_PER_MS, &e), &e);
        put_ok(m, 9);
        expect_put(m, 9);
        train_pt(m, 1);
        digest_of(m, got);
        EXPECT_STR(got, want);
        shd_close(other);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

/* The keeper takes so long that the session gives up before it has answered. */
TEST(put_that_is_given_up_while_it_is_stored_is_dropped_at_once)
{
    struct shd_err e = { 0 };
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS), *hasty = attach(PATIENT_MS);
    shd_model *m = open_pt(hasty), *other = open_pt(s);
    struct values v = values_of(m, 9);
    limit_waits(hasty, test_paced(500));
    kill(daemons.keeper, SIGSTOP);
    EXPECT_STATUS(put_some(m, &v, NULL, &e), SHD_ETIMEDOUT);
    kill(daemons.keeper, SIGCONT);
    for (int d = 0; d < 2; d++) /* ledger, state, spare */
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_COUNT, d, "") == 3);
    put_ok(other, 9);
    shd_close(hasty);
    shd_close(s);
    fixture_stop(&daemons);
}

/* An owner reads what it was given, and that it is given up, when it goes on. */
static int give_up_where_one_is_silent(void *ctx, uint32_t unit, enum shd_array array,
                                       float *values)
{
    const int *silent = ctx;
    (void)unit;
    (void)array;
    (void)values;
    kill(daemons.pids[*silent], SIGSTOP);
    return 7;
}

TEST(put_that_is_given_up_waits_for_no_silent_owner)
{
    for (int silent = 0; silent < 2; silent++) {
        struct shd_err e = { 0 };
        const struct shd_put_options o = { .size = sizeof o,
                                           .arrays = some_arrays,
                                           .fill = give_up_where_one_is_silent,
                                           .ctx = &silent };
        fixture_start(&daemons, 2, NULL);
        shd_session *s = attach(PATIENT_MS), *late = attach(PATIENT_MS);
        shd_model *m = open_pt(s), *other = open_pt(late);
        const uint64_t start_ms = test_now_ms();
        EXPECT_STATUS(shd_put(m, &o, NULL, &e), SHD_EINTERNAL);
        EXPECT(test_now_ms() - start_ms < PATIENT_MS / 2);
        kill(daemons.pids[silent], SIGCONT);
        put_ok(other, 9);
        train_pt(m, 1);
        shd_close(late);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

/* With accumulate 2 the library sums here first. */
TEST(gradient_that_is_summed_in_the_worker_keeps_a_put_away)
{
    static const struct pt_model two = {
        .name = "put", .publish = "bf16", .frozen = true, .accumulate = 2
    };
    struct shd_err e = { 0 };
    bool counts = false;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m;
    float *grad;
    EXPECT_OK(shd_model_open(s, pt_spec(&two), &m, &e), &e);
    struct values v = values_of(m, 9);
    for (uint32_t returned = 0; returned < 2; returned++) {
        if (returned)
            EXPECT_OK(shd_return(m, 0, 1, &e), &e);
        else
            EXPECT_OK(shd_grad(m, 0, 1, &grad, &e), &e);
        EXPECT_STATUS(put_some(m, &v, &counts, &e), SHD_EBUSY);
        EXPECT_HAS(e.text, "a gradient of unit 'h0' is handed out, or summed here");
    }
    EXPECT_EQ(shd_step(m), 0);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(numbers_reported_before_anothers_put_are_not_of_the_next_step)
{
    struct shd_err e = { 0 };
    bool counts = true;
    const double before = 5, after = 7;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_pt(s), *late = open_pt(other);
    put_ok(m, 9);
    EXPECT_OK(shd_report(late, 1, &before, 1, &e), &e);
    struct values v = values_of(late, 10);
    EXPECT_OK(put_some(late, &v, &counts, &e), &e);
    EXPECT(!counts);
    EXPECT_OK(shd_report(late, 1, &after, 1, &e), &e);
    EXPECT_EQ(late->reports[1].metrics[0], after);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

static int commit_that_counts(shd_model *m, uint64_t puts, struct shd_err *e)
{
    const struct shd_update update = toy_update(shd_step(m));
    struct shd_result result = { .size = sizeof result };
    for (uint32_t i = 0; i < TOY_MICROS; i++)
        return_all(m, i);
    const uint64_t right = m->decision.puts;
    m->decision.puts = puts; /* as an older library, or a hostile worker, says it */
    const int r = shd_commit(m, &update, &result, e);
    m->decision.puts = right;
    return r;
}

TEST(commit_that_counts_puts_otherwise_is_refused_and_loses_nothing)
{
    struct shd_err e = { 0 };
    fixture_start_kept(&daemons, 1, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_pt(s);
    put_ok(m, 9);
    EXPECT_STATUS(commit_that_counts(m, 0, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "counts 0 puts");
    EXPECT_HAS(e.text, "the model counts 1");
    shd_close(s);
    fixture_restart(&daemons, 0);
    s = attach(PATIENT_MS);
    m = open_pt(s);
    EXPECT_EQ(shd_step(m), 1);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(updates_may_be_set_to_the_highest_number_and_counted_on)
{
    const uint64_t most[PT_UNITS] = { 1, [1] = (UINT64_C(1) << 33) - 1 };
    struct shd_err e = { 0 };
    bool counts;
    fixture_start_kept(&daemons, 1, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_pt(s);
    struct values v = values_of(m, 9);
    const struct shd_put_options o = { .size = sizeof o,
                                       .arrays = some_arrays,
                                       .fill = fill_values,
                                       .ctx = &v,
                                       .set_updates = true,
                                       .updates = (UINT64_C(1) << 33) - 1,
                                       .unit_updates = most };
    EXPECT_OK(shd_put(m, &o, &counts, &e), &e);
    train_pt(m, 1);
    shd_close(s);
    fixture_restart(&daemons, 0);
    s = attach(PATIENT_MS);
    m = open_pt(s);
    EXPECT_EQ(shd_step(m), 2);
    shd_close(s);
    fixture_stop(&daemons);
}

static uint32_t drained;

static void drain_answered(struct link *link, const struct call *call,
                           const struct wire_reply *reply)
{
    (void)link;
    (void)call;
    drained += reply->status == SHD_OK;
}

static int make_drain(struct link *link, const struct call *call, struct wire_request *ret_request,
                      struct shd_err *e)
{
    (void)link;
    (void)call;
    (void)e;
    ret_request->type = WIRE_DRAIN;
    return SHD_OK;
}

TEST(drain_holds_a_put)
{
    struct shd_err e = { 0 };
    bool counts = false;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *holder = attach(PATIENT_MS);
    shd_session *hasty = attach(PATIENT_MS);
    shd_model *first = open_pt(s);
    train_pt(first, 1);
    shd_model *m = open_pt(hasty);
    const struct call call = { .make = make_drain, .fn = drain_answered, .ctx = &drained };
    for (uint32_t i = 0; i < 2; i++)
        EXPECT_OK(hub_ask(&holder->hub->links[i], &call, &e), &e);
    while (drained < 2)
        EXPECT_OK(hub_poll(holder->hub, 20 * NS_PER_MS, &e), &e);
    struct values v = values_of(m, 9);
    limit_waits(hasty, test_paced(500));
    EXPECT_STATUS(put_some(m, &v, &counts, &e), SHD_ETIMEDOUT);
    EXPECT_EQ(shd_unit_version(first, 0), 1);
    shd_close(hasty);
    shd_close(holder);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST_MAIN()
