/* Work by lease, as single calls: the same bits under every policy, whoever dies, with several
 * leases at once, and nothing lost by a wait that is broken off. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/session/session.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

#define STEPS 6u

struct worker {
    shd_session *s;
    shd_model *m;
    struct toy toy;
    uint32_t ahead;   /* leases it takes before it computes one */
    uint32_t dies_at; /* its so-many-th micro-batch, half returned; UINT32_MAX: never */
    uint32_t micros[TOY_MICROS];
    uint32_t count; /* of them, leased */
    uint32_t done;  /* micro-batches ever */
};

/* 1: others have gone on. */
static int compute(struct worker *w, uint32_t micro, struct shd_err *e)
{
    double metrics[SHD_METRICS_MAX];
    int r = shd_report(w->m, micro, metrics, toy_metrics(NULL, micro, metrics), e);
    for (uint32_t u = shd_units(w->m); r == SHD_OK && u-- > 0;) {
        const void *params;
        float *grad;
        if (w->done == w->dies_at && u == 1)
            raise(SIGKILL);
        r = shd_acquire(w->m, 0, NULL, e);
        if (r != SHD_OK)
            return r;
        r = shd_acquire(w->m, u, &params, e);
        if (r == SHD_OK)
            r = shd_grad(w->m, micro, u, &grad, e);
        if (r == SHD_OK)
            toy_backward(&w->toy, micro, u, params, grad);
        if (r == SHD_OK)
            r = shd_return(w->m, micro, u, e);
        if (r == SHD_OK || shd_params(w->m, u) != NULL)
            shd_release(w->m, u);
        shd_release(w->m, 0);
    }
    w->done++;
    return r;
}

static int fill(struct worker *w, enum shd_lease_what *ret_what, struct shd_err *e)
{
    *ret_what = SHD_LEASE_MICRO;
    while (w->count < w->ahead && *ret_what == SHD_LEASE_MICRO) {
        const int r = shd_lease(w->m, ret_what, &w->micros[w->count], e);
        if (r != SHD_OK)
            return r;
        w->count += *ret_what == SHD_LEASE_MICRO;
    }
    return SHD_OK;
}

/* One step; what of it this worker does not get others do. */
static int lease_step(struct worker *w, struct shd_err *e)
{
    const struct shd_update update = toy_update(shd_step(w->m));
    enum shd_lease_what what = SHD_LEASE_MICRO;
    int r = SHD_OK;
    w->count = 0;
    while (r == SHD_OK && what != SHD_LEASE_ALL_IN && what != SHD_LEASE_OVER) {
        r = fill(w, &what, e);
        if (r == SHD_OK && w->count > 0) {
            r = compute(w, w->micros[0], e);
            if (r == SHD_ESTEP) /* overtaken: embed's array may be out */
                shd_unlease(w->m, w->micros[0], e);
            memmove(w->micros, w->micros + 1, --w->count * sizeof *w->micros);
        }
        if (r == SHD_OK && w->count > 0 && what == SHD_LEASE_ALL_IN)
            what = SHD_LEASE_NOTHING;
    }
    return r == SHD_OK || r == SHD_ESTEP ? shd_commit(w->m, &update, NULL, e) : r;
}

static void work(struct worker *w, const struct shd_policy *policy)
{
    w->s = attach(PATIENT_MS);
    w->m = open_toy(w->s, toy_spec("f32", TOY_ADAMW));
    w->toy = (struct toy){ .m = w->m, .fail_micro = -1 };
    MUST_OK(shd_set_policy(w->m, policy, &e));
    while (shd_step(w->m) < STEPS)
        MUST_OK(lease_step(w, &e));
    shd_close(w->s);
    _exit(0);
}

static void expect_bits(const struct shd_policy *policy)
{
    char want[65], got[65];
    int status;
    pid_t pids[3];
    toy_reference(toy_spec("f32", TOY_ADAMW), STEPS, want);
    fixture_start_kept(&daemons, 2, "");
    for (uint32_t i = 0; i < ARRAY_SIZE(pids); i++) {
        pids[i] = test_fork();
        struct worker w = { .ahead = 1 + i, .dies_at = i == 1 ? 3 : UINT32_MAX };
        if (pids[i] == 0)
            work(&w, policy);
    }
    fixture_restart(&daemons, 1);
    for (uint32_t i = 0; i < ARRAY_SIZE(pids); i++) {
        EXPECT(waitpid(pids[i], &status, 0) == pids[i]);
        if (i != 1) /* else it may have had no work that could kill it */
            EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    EXPECT_EQ(shd_step(m), STEPS);
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(same_bits_as_a_fixed_share_under_each_policy_and_through_kills)
{
    for (int strategy = SHD_ZERO3; strategy <= SHD_DDP; strategy++)
        expect_bits(
            &(struct shd_policy){ .size = sizeof(struct shd_policy),
                                  .strategy = (enum shd_strategy)strategy,
                                  .path = strategy == SHD_ZERO3 ? SHD_PATH_COPY : SHD_PATH_AUTO });
}

static uint32_t lease_one(shd_model *m)
{
    struct shd_err e = { 0 };
    enum shd_lease_what what;
    uint32_t micro = 99;
    EXPECT_OK(shd_lease(m, &what, &micro, &e), &e);
    return what == SHD_LEASE_MICRO ? micro : 100 + (uint32_t)what;
}

static uint32_t stops; /* calls of idle until it does */

static int on_idle(void *ctx)
{
    (void)ctx;
    return stops > 0 && --stops == 0;
}

static void return_none(shd_model *m, uint32_t micro)
{
    struct shd_err e = { 0 };
    for (uint32_t u = 0; u < shd_units(m); u++)
        EXPECT_OK(shd_return_none(m, micro, u, &e), &e);
}

/* At all owners, which hear of it one after the other: what one of them lacks it hands out. */
static void await_all_in(void)
{
    bool all = false;
    while (!all) {
        shd_session *s = attach(PATIENT_MS);
        const shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
        all = true;
        for (uint32_t i = 0; i < TOY_MICROS; i++)
            all = all && shd_is_in(m, i);
        shd_close(s);
    }
}

TEST(several_leases_are_held_given_back_and_waited_for)
{
    struct shd_err e = { 0 };
    const struct shd_update update = toy_update(0);
    shd_session *other;
    fixture_start(&daemons, 2, NULL);
    const struct shd_options options = { .size = sizeof options,
                                         .address = daemons.address,
                                         .timeout_ms = PATIENT_MS,
                                         .idle = on_idle };
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    EXPECT_OK(shd_connect(&options, &other, &e), &e);
    shd_model *late = open_toy(other, toy_spec("f32", TOY_ADAMW));
    for (uint32_t i = 0; i < TOY_MICROS; i++)
        EXPECT_EQ(lease_one(m), i);
    EXPECT_EQ(lease_one(m), 100 + SHD_LEASE_NOTHING); /* its own: no wait */
    enum shd_lease_what what;
    uint32_t micro;
    for (int again = 0; again < 3; again++) {
        stops = 2;
        EXPECT_STATUS(shd_lease(late, &what, &micro, &e), SHD_ECANCELED);
    }
    EXPECT_OK(shd_unlease(m, 2, &e), &e); /* goes to the question that was broken off */
    sleep_ms(100);
    EXPECT_EQ(lease_one(late), 2);
    EXPECT_STATUS(shd_unlease(m, TOY_MICROS, &e), SHD_ERANGE);
    EXPECT_OK(shd_unlease(m, 2, &e), &e); /* not held: a no-op */
    EXPECT_OK(shd_unlease(late, 2, &e), &e);
    EXPECT_EQ(lease_one(late), 2);
    for (uint32_t i = 0; i < TOY_MICROS; i++)
        return_none(i == 2 ? late : m, i);
    await_all_in();
    EXPECT_EQ(lease_one(m), 100 + SHD_LEASE_ALL_IN);
    EXPECT_EQ(lease_one(late), 100 + SHD_LEASE_ALL_IN);
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
    EXPECT_OK(shd_commit(late, &update, NULL, &e), &e);
    EXPECT_EQ(lease_one(late), 0);
    return_none(m, 0);
    return_none(late, 0);
    shd_close(other);
    EXPECT_EQ(lease_one(m), 1);
    shd_close(s);
    fixture_stop(&daemons);
}

/* What was given back is unanswered, too, and holds no slot. */
TEST(gradient_that_holds_the_slot_is_named_where_a_lease_was_given_back)
{
    struct shd_err e = { 0 };
    shd_session *s;
    float *grad;
    fixture_start(&daemons, 2, NULL);
    const struct shd_options options = {
        .size = sizeof options, .address = daemons.address, .timeout_ms = PATIENT_MS, .slots = 1
    };
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    for (uint32_t i = 0; i < TOY_MICROS; i++)
        EXPECT_EQ(lease_one(m), i);
    EXPECT_OK(shd_grad(m, 0, 2, &grad, &e), &e); /* the first one asks for inboxes */
    memset(grad, 0, m->spec->units[2].elems * sizeof *grad);
    kill(daemons.pids[1], SIGSTOP);
    EXPECT_OK(shd_unlease(m, TOY_MICROS - 1, &e), &e);
    EXPECT_OK(shd_return(m, 0, 2, &e), &e);
    limit_waits(s, test_paced(300));
    EXPECT_STATUS(shd_grad(m, 0, 1, &grad, &e), SHD_ETIMEDOUT);
    EXPECT_HAS(e.text, "still holds unit 2, micro-batch 0 after");
    kill(daemons.pids[1], SIGCONT);
    shd_close(s);
    fixture_stop(&daemons);
}

/* What a predecessor has returned a worker with a fixed share leaves out. */
TEST(what_is_in_is_known)
{
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    return_none(m, 1);
    EXPECT(!shd_is_in(m, 1)); /* its own, it knows itself */
    shd_close(s);
    s = attach(PATIENT_MS);
    m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    EXPECT(!shd_is_in(m, 0) && shd_is_in(m, 1) && !shd_is_in(m, 2) && !shd_is_in(m, TOY_MICROS));
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(leases_in_this_process_and_of_groups)
{
    struct shd_err e = { 0 };
    shd_session *s;
    const struct pt_model groups = { .name = "groups", .publish = "f32", .accumulate = 2 };
    const struct shd_update update = toy_update(0);
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m;
    EXPECT_OK(shd_model_open(s, pt_spec(&groups), &m, &e), &e);
    const uint32_t count = shd_micro_batches(m) / 2;
    for (uint32_t i = 0; i < count; i++)
        EXPECT_EQ(lease_one(m), 2 * i);
    EXPECT_EQ(lease_one(m), 100 + SHD_LEASE_NOTHING);
    EXPECT_OK(shd_unlease(m, 3, &e), &e); /* the second of its group */
    EXPECT_EQ(lease_one(m), 2);
    for (uint32_t i = 0; i < 2 * count; i++)
        return_none(m, i);
    EXPECT_EQ(lease_one(m), 100 + SHD_LEASE_ALL_IN);
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
    EXPECT_EQ(lease_one(m), 0);
    shd_close(s);
}

TEST_MAIN()
