/* SET and FORK as no well-behaved client sends them, and clients of builds that know no settings.
 */
#include <string.h>

#include "proto/base/check.h"
#include "proto/share/fdpass.h"
#include "tests/lib/raw_client.h"

#define NUMBERS 5u /* of a model with one group, */
#define MORE    2u /* and behind them */

static struct wire_request set_more(uint32_t handle, const double *more, size_t bytes)
{
    static double none[NUMBERS];
    for (uint32_t i = 0; i < NUMBERS; i++)
        none[i] = (double)NAN;
    return (struct wire_request){ .type = WIRE_SET,
                                  .set = { .model = handle,
                                           .change = { (const uint8_t *)none, sizeof none },
                                           .more = { (const uint8_t *)more, bytes } } };
}

static struct wire_request set_of(uint32_t handle, const double *numbers, size_t bytes)
{
    return (struct wire_request){
        .type = WIRE_SET, .set = { .model = handle, .change = { (const uint8_t *)numbers, bytes } }
    };
}

static void expect_set(struct raw *r, uint32_t handle, const double *numbers, size_t bytes,
                       int status, const char *why)
{
    struct wire_reply reply;
    EXPECT_STATUS(raw_ask(r, set_of(handle, numbers, bytes), &reply), status);
    EXPECT_HAS(reply.text, why);
}

static void clear(double numbers[2 * NUMBERS])
{
    for (uint32_t i = 0; i < 2 * NUMBERS; i++)
        numbers[i] = (double)NAN;
}

static void enter(struct raw *r, uint32_t level, enum wire_role role)
{
    struct wire_reply reply;
    raw_open(r);
    r->level = level;
    EXPECT_STATUS(raw_hello(r, SHD_PROTOCOL, role, &reply), SHD_OK);
}

TEST(bad_changes_are_refused_and_change_nothing)
{
    static struct raw r;
    double numbers[2 * NUMBERS];
    const size_t whole = NUMBERS * sizeof *numbers;
    struct wire_reply reply;
    trainer_start();
    enter(&r, WIRE_LEVEL, WIRE_TRAINER);
    const uint32_t handle = raw_attach(&r, 0);
    clear(numbers);
    numbers[1] = 0.5;
    expect_set(&r, handle + 1, numbers, whole, SHD_ENOENT, "no open model");
    expect_set(&r, handle, numbers, 0, SHD_EINVAL, "no setting is given");
    expect_set(&r, handle, numbers, whole - 8, SHD_EPROTO, "no settings");
    expect_set(&r, handle, numbers, whole + 4 * 8, SHD_EINVAL, "of 2 groups, model 'tiny' has 1");
    numbers[4] = 0.5; /* beta2, of SGD */
    expect_set(&r, handle, numbers, whole, SHD_EINVAL, "its optimizer is sgd");
    numbers[4] = -1;
    expect_set(&r, handle, numbers, whole, SHD_EINVAL, "its optimizer is sgd");
    clear(numbers);
    numbers[1] = -0.5;
    expect_set(&r, handle, numbers, whole, SHD_EPROTO, "no settings");
    numbers[1] = 1;
    struct wire_request late = set_of(handle, numbers, whole);
    late.set.from = UINT64_MAX;
    EXPECT_STATUS(raw_ask(&r, late, &reply), SHD_ERANGE);
    const struct wire_request look = { .type = WIRE_SET, .set = { .model = handle, .look = true } };
    EXPECT_STATUS(raw_ask(&r, look, &reply), SHD_OK);
    EXPECT_EQ(reply.type, WIRE_SET_ANSWER);
    EXPECT(memmem(reply.set_answer.json.data, reply.set_answer.json.bytes, "{\"now\":{},", 10) !=
           NULL);
    trainer_step();
    raw_close(&r);
    trainer_stop(1);
}

/* Numbers that older builds do not know: micro_batches, and eps, which SGD does not have. */
TEST(bad_micro_batches_are_refused_and_change_nothing)
{
    static struct raw r;
    static const struct {
        double more[MORE];
        size_t count;
        int status;
        const char *why;
    } cases[] = {
        { { 1, NAN }, 1, SHD_EPROTO, "no settings" },
        { { 1.5, NAN }, MORE, SHD_EPROTO, "no settings" },
        { { -3, NAN }, MORE, SHD_EPROTO, "no settings" },
        { { 0, NAN }, MORE, SHD_EPROTO, "no settings" },
        { { 4097, NAN }, MORE, SHD_EPROTO, "no settings" },
        { { 2, NAN }, MORE, SHD_ERANGE, "laid out for 1" },
        { { NAN, 1e-3 }, MORE, SHD_EINVAL, "its optimizer is sgd" },
    };
    struct wire_reply reply;
    trainer_start();
    enter(&r, WIRE_LEVEL, WIRE_TRAINER);
    const uint32_t handle = raw_attach(&r, 0);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        const struct wire_request bad = set_more(handle, cases[i].more,
                                                 cases[i].count * sizeof(double));
        EXPECT_STATUS(raw_ask(&r, bad, &reply), cases[i].status);
        EXPECT_HAS(reply.text, cases[i].why);
    }
    trainer_step();
    raw_close(&r);
    trainer_stop(1);
}

TEST(readers_look_and_do_not_change)
{
    static struct raw r;
    double numbers[2 * NUMBERS];
    struct wire_reply reply;
    trainer_start();
    enter(&r, WIRE_LEVEL, WIRE_READER);
    const uint32_t handle = raw_attach(&r, 0);
    clear(numbers);
    numbers[0] = 1;
    expect_set(&r, handle, numbers, NUMBERS * sizeof *numbers, SHD_EAUTH, "reader");
    const struct wire_request look = { .type = WIRE_SET, .set = { .model = handle, .look = true } };
    EXPECT_STATUS(raw_ask(&r, look, &reply), SHD_OK);
    raw_close(&r);
    trainer_stop(0);
}

/* One that has an inbox is a worker: it would be refused in the middle of its step. */
TEST(worker_of_an_older_build_is_named_before_anything_is_set)
{
    static struct raw old;
    struct shd_err e = { 0 };
    trainer_start();
    enter(&old, WIRE_LEVEL_STATES - 1, WIRE_TRAINER);
    raw_attach(&old, 1);
    EXPECT_STATUS(shd_model_set(model, "clip_norm=1", 0, NULL, &e), SHD_ENOTSUP);
    EXPECT_HAS(e.text, "is of an older build, which knows no settings");
    raw_close(&old);
    EXPECT_SOON(shd_model_set(model, "clip_norm=1", 0, NULL, &e) == SHD_OK);
    enter(&old, WIRE_LEVEL_AUDITS - 1, WIRE_TRAINER);
    raw_attach(&old, 1);
    EXPECT_OK(shd_model_set(model, "clip_norm=2", 0, NULL, &e), &e);
    EXPECT_STATUS(shd_model_set(model, "micro_batches=1", 0, NULL, &e), SHD_ENOTSUP);
    EXPECT_HAS(e.text, "which knows no micro_batches or eps that are set");
    raw_close(&old);
    EXPECT_SOON(shd_model_set(model, "micro_batches=1", 0, NULL, &e) == SHD_OK);
    trainer_stop(0);
}

/* Who comes later is told by name, instead of deciding a step without what is set. */
TEST(older_builds_are_not_given_a_step_without_its_settings)
{
    static struct raw old;
    struct wire_reply reply;
    struct shd_err e = { 0 };
    float *grad;
    trainer_start();
    EXPECT_OK(shd_model_set(model, "lr_scale=0.5", 0, NULL, &e), &e);
    enter(&old, WIRE_LEVEL_STATES - 1, WIRE_TRAINER);
    const uint32_t handle = raw_attach(&old, 0);
    EXPECT_OK(shd_grad(model, 0, 0, &grad, &e), &e);
    memset(grad, 0, 64 * sizeof *grad);
    EXPECT_OK(shd_return(model, 0, 0, &e), &e);
    const struct wire_request prepare = { .type = WIRE_PREPARE, .prepare = { .model = handle } };
    EXPECT_STATUS(raw_ask(&old, prepare, &reply), SHD_ENOTSUP);
    EXPECT_HAS(reply.text, "prepared.settings is of feature level");
    const struct wire_request save = { .type = WIRE_CHECKPOINT,
                                       .checkpoint = { .model = handle, .path = "/nowhere" } };
    EXPECT_STATUS(raw_ask(&old, save, &reply), SHD_ENOTSUP);
    EXPECT_HAS(reply.text, "has settings, which the library that saves it does not know of");
    raw_close(&old);
    trainer_stop(0);
}

/* Nor the number of micro-batches of the step behind it: it would tell the others none. */
TEST(older_builds_are_not_given_a_decision_without_its_micro_batches)
{
    static struct raw old;
    struct wire_reply reply;
    struct shd_err e = { 0 };
    trainer_start();
    EXPECT_OK(shd_model_set(model, "micro_batches=1", 0, NULL, &e), &e);
    enter(&old, WIRE_LEVEL_AUDITS - 1, WIRE_TRAINER);
    const uint32_t handle = raw_attach(&old, 0);
    trainer_step();
    const struct wire_request prepare = { .type = WIRE_PREPARE, .prepare = { .model = handle } };
    EXPECT_STATUS(raw_ask(&old, prepare, &reply), SHD_ENOTSUP);
    EXPECT_HAS(reply.text, "decision.micro_batches is of feature level");
    const struct wire_request open = { .type = WIRE_OPEN_MODEL,
                                       .open_model = { .name = "", .owners = 1 } };
    EXPECT_STATUS(raw_ask(&old, open, &reply), SHD_ENOTSUP);
    raw_close(&old);
    trainer_stop(1);
}

/* -- FORK ---------------------------------------------------------------------------------------
 */

static int fork_twin(struct raw *r, const struct wire_fork *fork, struct wire_reply *reply)
{
    return raw_ask(r, (struct wire_request){ .type = WIRE_FORK, .fork = *fork }, reply);
}

/* Of steps that there are not, and with settings that are none: nothing is forked, and what is
 * right is forked after all. */
TEST(bad_forks_are_refused_and_a_good_one_is_made_by_the_same_session)
{
    static struct raw r;
    struct wire_reply reply;
    char json[sizeof spec_json];
    double numbers[2 * NUMBERS];
    trainer_start();
    trainer_step();
    enter(&r, WIRE_LEVEL, WIRE_TRAINER);
    const uint32_t handle = raw_attach(&r, 0);
    memcpy(json, spec_json, sizeof json);
    strstr(json, "tiny")[0] = 'T';
    struct wire_request begin = { .type = WIRE_CREATE,
                                  .create = { .what = WIRE_CREATE_BEGIN,
                                              .origin = 7,
                                              .name = "Tiny",
                                              .spec = { (const uint8_t *)json, sizeof json - 1 },
                                              .owners = 1 } };
    EXPECT_STATUS(raw_ask(&r, begin, &reply), SHD_OK);
    struct wire_fork fork = { .origin = 7, .model = handle, .step = 0 };
    EXPECT_STATUS(fork_twin(&r, &fork, &reply), SHD_ESTEP);
    EXPECT_HAS(reply.text, "the open step is 1, and there is no snapshot of that");
    fork.step = 1;
    fork.origin = 8;
    EXPECT_STATUS(fork_twin(&r, &fork, &reply), SHD_ENOENT);
    fork.origin = 7;
    clear(numbers);
    numbers[1] = 0.5;
    fork.settings = (struct wire_bytes){ (const uint8_t *)numbers, (NUMBERS - 1) * 8 };
    EXPECT_STATUS(fork_twin(&r, &fork, &reply), SHD_EPROTO);
    fork.settings.bytes = 9 * 8;
    EXPECT_STATUS(fork_twin(&r, &fork, &reply), SHD_EINVAL);
    fork.settings.bytes = NUMBERS * 8;
    numbers[4] = 0.5; /* beta2, of SGD */
    EXPECT_STATUS(fork_twin(&r, &fork, &reply), SHD_EINVAL);
    EXPECT_HAS(reply.text, "its optimizer is sgd");
    begin.create = (struct wire_create){
        .what = WIRE_CREATE_FULL, .origin = 7, .name = "", .owners = 1
    };
    EXPECT_STATUS(raw_ask(&r, begin, &reply), SHD_EINVAL);
    EXPECT_HAS(reply.text, "was not put");
    numbers[4] = (double)NAN;
    EXPECT_STATUS(fork_twin(&r, &fork, &reply), SHD_OK);
    EXPECT_EQ(reply.forked.step, 1);
    EXPECT_STATUS(fork_twin(&r, &fork, &reply), SHD_OK); /* once more, instead */
    EXPECT_STATUS(raw_ask(&r, begin, &reply), SHD_OK);
    EXPECT_EQ(reply.created.what, WIRE_CREATED_FULL);
    EXPECT_STATUS(fork_twin(&r, &fork, &reply), SHD_ENOENT);
    raw_close(&r);
    trainer_step();
    trainer_stop(2);
}

TEST_MAIN()
