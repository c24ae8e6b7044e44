/* A model that gets other owners while it is open: each call of a worker that learns of it goes
 * along, and says that the model has gone back; what is mapped of parameters stays where it is, and
 * shows those of the step. Who cannot go along ends with a line that says where the model is. */
#include "client/checkpoint/reshard.h"

#include <pthread.h>
#include <string.h>

#include "client/paths/moved.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "tests/lib/client_remote.h"

#define TOY  toy_spec("f32", TOY_ADAMW)
#define SAVE 2u /* the step that the others have */
#define END  5u

static const char *at(const char *devices)
{
    static char texts[4][400];
    static unsigned next;
    char *text = texts[next++ % 4];
    snprintf(text, sizeof texts[0], "%s?%s", daemons.dir, devices);
    return text;
}

static shd_session *attach_at(const char *devices)
{
    struct shd_err e;
    shd_session *s;
    EXPECT_OK(try_connect(at(devices), PATIENT_MS, &s, &e), &e);
    return s;
}

static void start(int count)
{
    make_ckpts();
    fixture_start_kept(&daemons, count, "");
}

static void stop(void)
{
    fixture_stop(&daemons);
    remove_ckpts();
}

/* That the toy was there: it is made there anew. */
static void forget(const char *devices)
{
    struct shd_err e = { 0 };
    shd_session *s = attach_at(devices);
    EXPECT_OK(shd_model_drop(s, "toy", NULL, &e), &e);
    shd_close(s);
}

struct beside {
    shd_model *m; /* trained on, once the step is saved; NULL: none */
    uint32_t lines;
};

/* Called as it is saved, and as it is decided. */
static void say(void *ctx, const char *line)
{
    struct beside *b = ctx;
    if (b->lines++ > 0 || b->m == NULL)
        return;
    EXPECT_HAS(line, "is saved at step");
    train_steps(b->m, 1);
}

static int move(const char *model, const char *from, const char *to, shd_model *m,
                struct shd_err *e)
{
    struct beside beside = { .m = m };
    struct resharded done = { .step = 0 };
    const struct reshard r = {
        .address = at(from), .to = to, .dir = ckpts, .model = model, .say = say, .ctx = &beside
    };
    return reshard_model(&r, &done, e);
}

static void move_ok(const char *model, const char *from, const char *to, shd_model *m)
{
    struct shd_err e = { 0 };
    EXPECT_OK(move(model, from, to, m, &e), &e);
}

/* -- Calls ------------------------------------------------------------------------------------- */

enum step_call { GRAD, RETURN, RETURN_NONE, RETURN_PARTS, LEASE, RESET, COMMIT, STEP, CALLS };

static uint32_t tensor_of(const shd_model *m, uint32_t unit)
{
    struct shd_tensor tensor = { .size = sizeof tensor };
    uint32_t index = 0;
    while (shd_tensor_get(m, index, &tensor, NULL) == SHD_OK && tensor.unit != unit)
        index++;
    return index;
}

static int make_call(shd_model *m, enum step_call call, struct shd_result *result,
                     struct shd_err *e)
{
    const struct shd_part part = {
        .size = sizeof part, .tensor = tensor_of(m, 1), .dtype = SHD_F32, .data = NULL
    };
    const struct shd_update update = toy_update(shd_step(m));
    enum shd_lease_what what;
    uint32_t micro;
    float *grad;
    switch (call) {
    case GRAD:
        return shd_grad(m, 0, 1, &grad, e);
    case RETURN:
        return shd_return(m, 1, 1, e);
    case RETURN_NONE:
        return shd_return_none(m, 0, 1, e);
    case RETURN_PARTS:
        return shd_return_parts(m, 0, 1, &part, 1, 1, e);
    case LEASE:
        return shd_lease(m, &what, &micro, e);
    case RESET:
        return shd_reset_step(m, e);
    case COMMIT:
        return shd_commit(m, &update, result, e);
    case STEP:
        return toy_step(m, toy_all_micros, TOY_MICROS, result, e);
    case CALLS:
        break;
    }
    return SHD_EINTERNAL;
}

static void expect_gone_back(shd_model *m, enum step_call call)
{
    struct shd_result result = { .size = sizeof result };
    struct shd_err e = { 0 };
    const int r = make_call(m, call, &result, &e);
    if (call == COMMIT || call == STEP) {
        EXPECT_OK(r, &e);
        EXPECT(result.rewound);
    } else if (call == RESET) {
        EXPECT_OK(r, &e);
    } else {
        EXPECT_STATUS(r, SHD_ERESET);
        EXPECT_HAS(e.text, "has other owners, cpu0,cpu1,cpu2: it is at step 2, and this worker was "
                           "at step 3");
    }
    EXPECT_EQ(shd_step(m), SAVE);
}

TEST(each_call_goes_along_and_says_that_the_model_has_gone_back)
{
    char saved[65], want[65], got[65];
    toy_reference(TOY, SAVE, saved);
    toy_reference(TOY, END, want);
    start(3);
    for (enum step_call call = GRAD; call < CALLS; call++) {
        struct shd_err e = { 0 };
        shd_session *s = attach_at("cpu0,cpu1");
        shd_model *m = open_toy(s, TOY);
        train_steps(m, SAVE);
        move_ok("toy", "cpu0,cpu1", "cpu0,cpu1,cpu2", m);
        EXPECT_EQ(shd_step(m), SAVE + 1);
        expect_gone_back(m, call);
        EXPECT_EQ(shd_owners(s), 3);
        if (call == GRAD) {
            digest_of(m, got);
            EXPECT_STR(got, saved);
        }
        train_steps(m, END - SAVE);
        digest_of(m, got);
        EXPECT_STR(got, want);
        shd_model_close(m);
        EXPECT_OK(shd_model_drop(s, "toy", NULL, &e), &e);
        shd_close(s);
        forget("cpu0,cpu1");
    }
    stop();
}

/* They are another owner's pages by then, at the places of before. */
TEST(parameters_stay_where_they_are_and_show_the_step)
{
    static const char *const dtypes[] = { "f32", "bf16" };
    start(4);
    for (int i = 0; i < 2; i++) {
        struct shd_err e = { 0 };
        const char *spec = toy_spec(dtypes[i], TOY_ADAMW);
        const void *params[8];
        uint8_t *kept[8];
        char want[65], got[65];
        toy_reference(spec, END, want);
        shd_session *s = attach_at("cpu1,cpu0,cpu3");
        shd_model *m = open_toy(s, spec);
        const uint32_t units = shd_units(m);
        CHECK(units <= 8);
        train_steps(m, SAVE);
        for (uint32_t u = 0; u < units; u++) {
            const size_t bytes = shd_unit_elems(m, u) * (i == 0 ? 4 : 2);
            EXPECT_OK(shd_acquire(m, u, &params[u], &e), &e);
            kept[u] = malloc(bytes);
            CHECK(kept[u] != NULL);
            memcpy(kept[u], params[u], bytes);
        }
        move_ok(NULL, "cpu1,cpu0,cpu3", "cpu2,cpu0", m);
        struct shd_result result = { .size = sizeof result };
        EXPECT_OK(make_call(m, COMMIT, &result, &e), &e);
        EXPECT(result.rewound);
        for (uint32_t u = 0; u < units; u++) {
            const size_t bytes = shd_unit_elems(m, u) * (i == 0 ? 4 : 2);
            EXPECT(shd_params(m, u) == params[u]);
            EXPECT(memcmp(params[u], kept[u], bytes) == 0);
            shd_release(m, u);
            free(kept[u]);
        }
        train_steps(m, END - SAVE);
        digest_of(m, got);
        EXPECT_STR(got, want);
        shd_model_close(m);
        EXPECT_OK(shd_model_drop(s, "toy", NULL, &e), &e);
        shd_close(s);
        forget("cpu1,cpu0,cpu3");
    }
    stop();
}

/* Whole units have another owner each time, moments in 8 bits and sums in the worker go along. */
TEST(models_of_all_kinds_move)
{
    static const struct pt_model models[] = {
        { .name = "plain", .accumulate = 2, .frozen = true, .ema = true },
        { .name = "placed", .placed = true, .publish = "bf16", .mean = true },
        { .name = "int8", .int8 = true, .placed = true },
        { .name = "muon", .whole = "muon" },
        { .name = "lamb", .whole = "lamb", .placed = true },
        { .name = "adafactor", .whole = "adafactor" },
    };
    start(3);
    for (size_t i = 0; i < ARRAY_SIZE(models); i++) {
        const char *spec = pt_spec(&models[i]);
        struct pt_run run = { .steps = 6 };
        struct shd_err e = { 0 };
        char want[65], got[65];
        shd_model *m;
        pt_reference(spec, &run, want);
        shd_session *s = attach_at("cpu0,cpu1");
        EXPECT_OK(shd_model_open(s, spec, &m, &e), &e);
        while (shd_step(m) < run.steps) {
            struct shd_result result = { .size = sizeof result };
            if (shd_step(m) == 1 && shd_owners(s) == 2)
                move_ok(models[i].name, "cpu0,cpu1", "cpu2,cpu1,cpu0", NULL);
            if (shd_step(m) == 4 && shd_owners(s) == 3)
                move_ok(models[i].name, "cpu2,cpu1,cpu0", "cpu1", NULL);
            const uint32_t owners = shd_owners(s);
            EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, &result, &e), &e);
            EXPECT_EQ(result.rewound, shd_owners(s) != owners);
        }
        EXPECT_EQ(shd_owners(s), 1);
        EXPECT_OK(shd_digest(m, got, NULL, &e), &e);
        EXPECT_STR(got, want);
        shd_close(s);
    }
    stop();
}

/* -- Later ------------------------------------------------------------------------------------- */

TEST(who_comes_later_is_led_from_owners_to_owners_through_restarts)
{
    struct shd_err e = { 0 };
    char want[65], got[65];
    shd_model *m;
    toy_reference(TOY, END, want);
    start(4);
    shd_session *s = attach_at("cpu0,cpu1");
    train_steps(open_toy(s, TOY), SAVE);
    shd_close(s);
    move_ok("toy", "cpu0,cpu1", "cpu2,cpu1", NULL);
    move_ok("toy", "cpu2,cpu1", "cpu3", NULL);
    for (int i = 0; i < 4; i++)
        fixture_restart(&daemons, i);
    s = attach_at("cpu0,cpu1");
    m = open_toy(s, TOY); /* with a spec, by which none is made */
    EXPECT_EQ(shd_owners(s), 1);
    EXPECT_EQ(shd_step(m), SAVE);
    train_steps(m, END - SAVE);
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_session *other = attach_at("cpu0,cpu1");
    EXPECT_OK(shd_model_attach(other, "", &m, &e), &e); /* nor need its name be known */
    EXPECT_STR(shd_model_name(m), "toy");
    shd_close(other);
    EXPECT_STATUS(move("toy", "cpu0,cpu1", "cpu1", NULL, &e), SHD_EMOVED);
    EXPECT_HAS(e.text, "has moved to cpu2,cpu1 at step 2 before: move it from there");
    shd_close(s);
    stop();
}

TEST(what_was_dropped_where_it_went_is_made_there_until_a_drop_where_it_was)
{
    struct shd_err e = { 0 };
    shd_model *m;
    start(3);
    shd_session *s = attach_at("cpu0,cpu1"), *there = attach_at("cpu2"), *old;
    m = open_toy(s, TOY);
    train_steps(m, 1);
    move_ok("toy", "cpu0,cpu1", "cpu2", NULL);
    EXPECT_OK(shd_model_drop(there, "toy", NULL, &e), &e);
    EXPECT_STATUS(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "model 'toy' was dropped at cpu2, to which it had moved");
    shd_close(s);
    old = attach_at("cpu0,cpu1");
    EXPECT_STATUS(shd_model_attach(old, "toy", &m, &e), SHD_ENOENT);
    shd_close(old);
    old = attach_at("cpu0,cpu1");
    EXPECT_EQ(shd_step(open_toy(old, TOY)), 0);
    EXPECT_EQ(shd_owners(old), 1);
    shd_close(old);
    EXPECT_OK(shd_model_drop(there, "toy", NULL, &e), &e);
    old = attach_at("cpu0,cpu1");
    EXPECT_OK(shd_model_drop(old, "toy", NULL, &e), &e);
    EXPECT_STATUS(shd_model_drop(old, "toy", NULL, &e), SHD_ENOENT);
    EXPECT_EQ(shd_step(open_toy(old, TOY)), 0);
    EXPECT_EQ(shd_owners(old), 2);
    shd_close(old);
    shd_close(there);
    stop();
}

/* -- Not --------------------------------------------------------------------------------------- */

TEST(who_cannot_go_along_ends_with_where_the_model_is)
{
    struct shd_err e = { 0 };
    const struct shd_policy policy = { .size = sizeof policy, .path = SHD_PATH_COPY };
    struct shd_result result = { .size = sizeof result };
    shd_session *reader;
    shd_model *read;
    uint64_t step;
    start(3);
    shd_session *s = attach_at("cpu0,cpu1");
    shd_model *m = open_toy(s, TOY);
    EXPECT_OK(shd_set_policy(m, &policy, &e), &e);
    train_steps(m, SAVE);
    const struct shd_options options = {
        .size = sizeof options, .address = at("cpu0,cpu1"), .timeout_ms = PATIENT_MS, .reader = true
    };
    EXPECT_OK(shd_connect(&options, &reader, &e), &e);
    EXPECT_OK(shd_model_attach(reader, "toy", &read, &e), &e);
    move_ok("toy", "cpu0,cpu1", "cpu2", m);
    EXPECT_STATUS(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), SHD_EMOVED);
    EXPECT_HAS(e.text, "model 'toy' has moved to cpu2, as of step 2, and this worker cannot go "
                       "along, for it works on copies of parameters: start it again there");
    EXPECT_STATUS(shd_pin(read, NULL, &step, &e), SHD_EMOVED);
    EXPECT_HAS(e.text, "has moved to cpu2, as of step 2: open it there");
    shd_close(reader);
    shd_close(s);
    stop();
}

/* Another worker of the host may be in the midst of a sum of the step that is given up. */
TEST(workers_that_sum_together_end_with_where_the_model_is)
{
    struct shd_err e = { 0 };
    const struct shd_policy policy = { .size = sizeof policy, .sums = SHD_SUMS_HOST };
    const struct pt_model model = { .name = "sums", .accumulate = 2 };
    struct pt_run run = { .policy = policy, .t = { .overflow_step = UINT64_MAX } };
    shd_model *m;
    start(3);
    shd_session *s = attach_at("cpu0,cpu1");
    EXPECT_OK(shd_model_open(s, pt_spec(&model), &m, &e), &e);
    EXPECT_OK(shd_set_policy(m, &policy, &e), &e);
    for (uint32_t k = 0; k < SAVE; k++)
        EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    move_ok("sums", "cpu0,cpu1", "cpu2", NULL);
    EXPECT_STATUS(pt_step(m, &run, toy_all_micros, TOY_MICROS, NULL, &e), SHD_EMOVED);
    EXPECT_HAS(e.text, "for it sums with the other workers of its host");
    shd_close(s);
    stop();
}

TEST(a_worker_of_two_models_is_named_before_anything_is_done)
{
    struct shd_err e = { 0 };
    const struct pt_model other = { .name = "other" };
    shd_model *m, *second;
    start(3);
    shd_session *s = attach_at("cpu0,cpu1");
    m = open_toy(s, TOY);
    EXPECT_OK(shd_model_open(s, pt_spec(&other), &second, &e), &e);
    train_steps(m, 1);
    EXPECT_STATUS(move("toy", "cpu0,cpu1", "cpu2", NULL, &e), SHD_EBUSY);
    EXPECT_HAS(e.text, "trains 2 models in one session");
    EXPECT_STATUS(move(NULL, "cpu0,cpu1", "cpu2", NULL, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "has 2 models, name one");
    train_steps(m, 1);
    EXPECT_EQ(shd_step(m), 2);
    EXPECT_EQ(shell("[ -z \"$(ls -A '%s')\" ]", ckpts), 0);
    shd_close(s);
    stop();
}

/* Of a daemon in both sets, which has both for a while. */
TEST(memory_that_is_not_there_is_refused_before_anything_is_done)
{
    struct shd_err e = { 0 };
    EXPECT_OK(quota_parse("uid:*=16MiB", &daemons.quota, &e), &e);
    start(3);
    shd_session *s = attach_at("cpu0,cpu1");
    shd_model *m = open_toy(s, TOY);
    train_steps(m, 1);
    EXPECT_STATUS(move("toy", "cpu0,cpu1", "cpu0", NULL, &e), SHD_ENOMEM);
    EXPECT_HAS(e.text, "cpu0");
    train_steps(m, 1);
    EXPECT_EQ(shd_step(m), 2);
    shd_close(s);
    stop();
    daemons.quota = (struct quota_config){ 0 };
}

/* -- Killed ------------------------------------------------------------------------------------ */

#ifdef SHD_FAIL_POINTS
/* Every daemon, as it comes there: before and after the store that decides, or opens it. */
TEST(daemons_that_are_killed_around_their_stores_have_it_at_the_one_or_the_other)
{
    static const char *const points[] = { "drop:gone:before;", "drop:gone:after;",
                                          "restore:ready:before;", "restore:ready:after;",
                                          "drop:free:before;" };
    char want[65], got[65];
    toy_reference(TOY, END, want);
    for (size_t i = 0; i < ARRAY_SIZE(points); i++) {
        struct shd_result result = { .size = sizeof result };
        struct shd_err e = { 0 };
        make_ckpts();
        fixture_start_kept(&daemons, 3, points[i]);
        shd_session *s = attach_at("cpu0,cpu1");
        shd_model *m = open_toy(s, TOY);
        train_steps(m, SAVE);
        move_ok("toy", "cpu0,cpu1", "cpu1,cpu2,cpu0", m);
        EXPECT(fixture_ask(&daemons, KEEPER_STARTS, 1, "") > 1);
        EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
        EXPECT(result.rewound);
        EXPECT_EQ(shd_owners(s), 3);
        EXPECT_EQ(shd_step(m), SAVE);
        train_steps(m, END - SAVE);
        digest_of(m, got);
        EXPECT_STR(got, want);
        shd_close(s);
        stop();
    }
}

static void *start_when_ended(void *unused)
{
    (void)unused;
    fixture_ask(&daemons, KEEPER_WAIT, 0, "");
    fixture_succeed(&daemons, 0, "");
    return NULL;
}

static void *start_later(void *unused)
{
    (void)unused;
    sleep_ms(500);
    fixture_succeed(&daemons, 0, "");
    return NULL;
}

static void restart_with(int index, const char *fail)
{
    fixture_ask(&daemons, KEEPER_KILL, index, "");
    fixture_succeed(&daemons, index, fail);
}

static bool restarted, looked;

/* Owner 0 dies when it was told, and once it has dropped its part it knows where the model is. */
static void restart_owner_0(const char *name)
{
    struct moved_word word = { .away = false };
    struct shd_err e = { 0 };
    if (strcmp(name, "reshard:told") == 0 && !restarted) {
        restarted = true;
        restart_with(0, "");
    }
    if (strcmp(name, "reshard:decided") != 0)
        return;
    looked = true;
    shd_session *s = attach_at("cpu0");
    EXPECT_OK(moved_look(s->hub, 0, "toy", &word, &e), &e);
    EXPECT(word.away);
    EXPECT_STR(word.to, "cpu1,cpu2");
    moved_word_free(&word);
    shd_close(s);
}

/* The other old owner, which has been told, does not say so before it has dropped its part. */
TEST(an_owner_that_died_when_it_was_told_is_told_again)
{
    start(3);
    shd_session *s = attach_at("cpu0,cpu1");
    shd_model *m = open_toy(s, TOY);
    train_steps(m, SAVE);
    restarted = looked = false;
    fail_point_hook = restart_owner_0;
    move_ok("toy", "cpu0,cpu1", "cpu1,cpu2", NULL);
    fail_point_hook = NULL;
    EXPECT(restarted && looked);
    expect_gone_back(m, STEP);
    shd_close(s);
    stop();
}

/* Who could say where it is is away, and the other old owner, which died before it had dropped its
 * part, has another one by now, and no word of where it comes from. */
TEST(a_worker_that_finds_another_part_asks_where_its_own_is)
{
    struct shd_result result = { .size = sizeof result };
    struct shd_err e = { 0 };
    char want[65], got[65];
    pthread_t starter;
    toy_reference(TOY, END, want);
    start(3);
    restart_with(0, "drop:gone:after"); /* nobody is told */
    restart_with(1, "drop:gone:before;");
    shd_session *s = attach_at("cpu0,cpu1");
    shd_model *m = open_toy(s, TOY);
    train_steps(m, SAVE);
    CHECK(pthread_create(&starter, NULL, start_when_ended, NULL) == 0);
    move_ok("toy", "cpu0,cpu1", "cpu1,cpu2,cpu0", NULL);
    pthread_join(starter, NULL);
    EXPECT(fixture_ask(&daemons, KEEPER_STARTS, 1, "") > 2);
    fixture_ask(&daemons, KEEPER_KILL, 0, "");
    CHECK(pthread_create(&starter, NULL, start_later, NULL) == 0);
    const int r = toy_step(m, toy_all_micros, TOY_MICROS, &result, &e);
    pthread_join(starter, NULL);
    EXPECT_OK(r, &e);
    EXPECT_EQ(shd_owners(s), 3);
    train_steps(m, END - (uint32_t)shd_step(m));
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(s);
    stop();
}
#endif

TEST_MAIN()
