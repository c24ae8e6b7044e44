/* Models of many tensors against real daemons: specs that no message holds, and digests, for which
 * many tensors are asked for at once. */
#include <errno.h>
#include <sys/wait.h>

#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/sys.h"
#include "proto/spec/spec.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

#define LARGE_UNITS 40u
#define LARGE_EACH  500u /* tensors of a unit */
#define LARGE_ELEMS 3u

/* As text it has 1.3 MB, canonical twice that. */
static char *large_spec(void)
{
    const size_t room = (size_t)LARGE_UNITS * LARGE_EACH * 80;
    char *text = malloc(room);
    size_t used = (size_t)snprintf(text, room,
                                   "{\"name\":\"large\",\"micro_batches\":1,\"optimizer\":{"
                                   "\"kind\":\"sgd\",\"momentum\":0.5},\"units\":[");
    for (unsigned u = 0; u < LARGE_UNITS; u++) {
        used += (size_t)snprintf(text + used, room - used,
                                 "%s{\"name\":\"layers.%u\",\"tensors\":[", u > 0 ? "," : "", u);
        for (unsigned t = 0; t < LARGE_EACH; t++)
            used += (size_t)snprintf(text + used, room - used,
                                     "%s{\"name\":\"layers.%u.experts.%u.bias\",\"shape\":[%u]}",
                                     t > 0 ? "," : "", u, t, LARGE_ELEMS);
        used += (size_t)snprintf(text + used, room - used, "]}");
    }
    used += (size_t)snprintf(text + used, room - used, "]}");
    CHECK(used < room && used > SPEC_MESSAGE_BYTES_MAX);
    return text;
}

static void write_tensors(float *unit, float first)
{
    for (uint32_t t = 0; t < LARGE_EACH; t++)
        for (uint32_t i = 0; i < LARGE_ELEMS; i++)
            unit[t * SHD_TENSOR_ALIGN_ELEMS + i] = first + (float)(t * LARGE_ELEMS + i);
}

static int fill_large(void *ctx, uint32_t unit, float *values)
{
    (void)ctx;
    write_tensors(values, (float)unit);
    return 0;
}

static void step_large(shd_model *m)
{
    struct shd_err e = { 0 };
    const struct shd_update update = { .size = sizeof update, .lr = 0.25 };
    for (uint32_t u = 0; u < LARGE_UNITS; u++) {
        float *grad;
        EXPECT_OK(shd_grad(m, 0, u, &grad, &e), &e);
        memset(grad, 0, shd_unit_elems(m, u) * sizeof *grad);
        write_tensors(grad, (float)shd_step(m) - (float)u);
        EXPECT_OK(shd_return(m, 0, u, &e), &e);
    }
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
}

static shd_model *make_large(shd_session *s, const char *spec)
{
    struct shd_err e = { 0 };
    const struct shd_open_options o = { .size = sizeof o, .spec_json = spec, .fill = fill_large };
    shd_model *m;
    bool created = false;
    EXPECT_OK(shd_model_open_with(s, &o, &m, &created, &e), &e);
    EXPECT(created);
    return m;
}

/* By name, from another session, which has never seen its spec. */
static shd_model *attach_large(shd_session *s)
{
    struct shd_err e = { 0 };
    struct shd_tensor tensor = { .size = sizeof tensor };
    shd_model *m;
    EXPECT_OK(shd_model_attach(s, "large", &m, &e), &e);
    EXPECT_EQ(shd_tensors(m), LARGE_UNITS * LARGE_EACH);
    EXPECT_OK(shd_tensor_find(m, "layers.39.experts.499.bias", &tensor, &e), &e);
    EXPECT(tensor.unit == 39 && tensor.elems == LARGE_ELEMS);
    EXPECT_STATUS(shd_tensor_find(m, "layers.40.experts.0.bias", &tensor, &e), SHD_ENOENT);
    return m;
}

/* By shd_digest(), which asks for many tensors at once, and by a checkpoint. */
static void expect_digest(shd_model *m, const char *want)
{
    char got[65];
    struct shd_stats before = { .size = sizeof before }, after = before;
    shd_stats(m->session, &before, NULL);
    digest_of(m, got);
    shd_stats(m->session, &after, NULL);
    EXPECT_STR(got, want);
    EXPECT(after.requests - before.requests <= LARGE_UNITS * 2);
    make_ckpts();
    EXPECT_STR(save_ok(m, 0).digest, want);
}

TEST(model_of_20000_tensors_is_as_any_other)
{
    char *spec = large_spec();
    char want[65];
    struct shd_err e = { 0 };
    shd_session *s, *other;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = make_large(s, spec);
    for (int i = 0; i < 3; i++)
        step_large(m);
    digest_of(m, want);
    shd_close(s);

    fixture_start_kept(&daemons, 2, "");
    s = attach(PATIENT_MS);
    m = make_large(s, spec); /* Create */
    step_large(m);
    other = attach(PATIENT_MS);
    shd_model *same = open_toy(other, spec); /* OpenModel */
    EXPECT_EQ(shd_step(same), 1);
    shd_close(other);
    fixture_restart(&daemons, 1);
    step_large(m);
    shd_close(s);
    fixture_restart(&daemons, 0);
    s = attach(PATIENT_MS);
    m = attach_large(s);
    step_large(m);
    expect_digest(m, want);
    shd_close(s);
    fixture_stop(&daemons);

    fixture_start(&daemons, 1, NULL);
    s = attach(PATIENT_MS);
    m = restore_ok(s, ckpts); /* Restore */
    EXPECT_EQ(shd_tensors(m), LARGE_UNITS * LARGE_EACH);
    expect_digest(m, want);
    shd_close(s);
    fixture_stop(&daemons);
    remove_ckpts();
    free(spec);
}

TEST(owners_that_take_no_large_specs_are_named)
{
    char *spec = large_spec();
    struct shd_err e = { 0 };
    shd_model *m;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    s->hub->links[1].peer.level = WIRE_LEVEL_BASE; /* as if its welcome had said nothing */
    EXPECT_STATUS(shd_model_open(s, spec, &m, &e), SHD_ENOTSUP);
    EXPECT_HAS(e.text, "daemon cpu1");
    EXPECT_HAS(e.text, "takes specs of 786432 bytes at most, this model's has 2");
    EXPECT_HAS(e.text, "it is of an older version");
    open_toy(s, toy_spec("f32", TOY_ADAMW)); /* small ones go on */
    shd_close(s);
    s = attach(PATIENT_MS);
    open_toy(s, spec);
    shd_close(s);
    fixture_stop(&daemons);
    free(spec);
}

static int (*reopen)(void *ctx, struct link *link, struct shd_err *e);

static int reopen_older(void *ctx, struct link *link, struct shd_err *e)
{
    link->peer.level = WIRE_LEVEL_BASE; /* as if its welcome had said nothing */
    return reopen(ctx, link, e);
}

/* What waits for a daemon that is gone may be more than its successor's build knows. */
TEST(a_request_that_a_successor_is_too_old_for_fails_alone)
{
    char *spec = large_spec();
    struct shd_err e = { 0 };
    shd_model *m;
    fixture_start_kept(&daemons, 1, "");
    shd_session *s = attach(PATIENT_MS);
    reopen = s->hub->reopen;
    s->hub->reopen = reopen_older;
    fixture_restart(&daemons, 0);
    EXPECT_STATUS(shd_model_open(s, spec, &m, &e), SHD_ENOTSUP);
    EXPECT_HAS(e.text, "daemon cpu0");
    EXPECT_HAS(e.text, "it is of an older version");
    open_toy(s, toy_spec("f32", TOY_ADAMW));
    shd_close(s);
    fixture_stop(&daemons);
    free(spec);
}

static int refused_sends;

static int refuse_sends(enum sys_kind kind)
{
    if (kind != SYS_SEND || refused_sends == 0)
        return 0;
    refused_sends--;
    return ETOOMANYREFS;
}

/* Other processes of the user may have as many descriptors on their way as there may be. */
TEST(spec_that_cannot_be_passed_now_is_passed_later)
{
    char *spec = large_spec();
    struct shd_err e = { 0 };
    shd_model *m;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    refused_sends = 3;
    sys_fault = refuse_sends;
    const int r = shd_model_open(s, spec, &m, &e);
    sys_fault = NULL;
    EXPECT_OK(r, &e);
    EXPECT_EQ(refused_sends, 0);
    shd_close(s);
    fixture_stop(&daemons);
    free(spec);
}

/* -- Digests of many tensors --------------------------------------------------------------------
 */

/* Tensors of all sizes: some share a block or begin in the middle of one, some have many, some
 * owners have none of; frozen units and means have one array. */
static const char mixed_spec[] =
    "{\"name\":\"mixed\",\"seed\":5,\"micro_batches\":1,\"optimizer\":{\"kind\":\"adamw\","
    "\"beta1\":0.9,\"beta2\":0.99,\"eps\":1e-8},\"groups\":[{\"name\":\"g\"},"
    "{\"name\":\"running\",\"optimizer\":{\"kind\":\"mean\"}}],\"units\":["
    "{\"name\":\"a\",\"tensors\":[{\"name\":\"a0\",\"shape\":[3],\"group\":\"g\"},"
    "{\"name\":\"a1\",\"shape\":[2040],\"group\":\"g\",\"init\":[\"normal\",0,1]},"
    "{\"name\":\"a2\",\"shape\":[9,2048],\"group\":\"g\",\"init\":[\"normal\",0,1]},"
    "{\"name\":\"a3\",\"shape\":[1],\"group\":\"g\"},"
    "{\"name\":\"a4\",\"shape\":[300001],\"group\":\"g\",\"init\":[\"uniform\",0,1]},"
    "{\"name\":\"a5\",\"shape\":[5000],\"group\":\"g\",\"init\":[\"normal\",0,1]},"
    "{\"name\":\"a6\",\"shape\":[262000],\"group\":\"g\",\"init\":[\"normal\",0,1]}]},"
    "{\"name\":\"b\",\"tensors\":[{\"name\":\"b0\",\"shape\":[700],\"group\":\"g\","
    "\"trainable\":false,\"init\":[\"normal\",0,1]},{\"name\":\"b1\",\"shape\":[8000],"
    "\"group\":\"g\",\"trainable\":false,\"init\":[\"normal\",0,1]}]},"
    "{\"name\":\"c\",\"tensors\":[{\"name\":\"c0\",\"shape\":[40],\"group\":\"running\","
    "\"init\":[\"normal\",0,1]}]}]}";

TEST(digest_is_the_same_asked_for_by_ranges_or_by_tensors)
{
    char want[65], got[65];
    struct shd_err e = { 0 };
    shd_session *s;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    digest_of(open_toy(s, mixed_spec), want);
    shd_close(s);
    for (int owners = 1; owners <= 3; owners++) {
        /* Of several units, of one, of none: one owner is of an older build. */
        static const uint32_t levels[] = { WIRE_LEVEL, WIRE_LEVEL_STATES - 1, WIRE_LEVEL_TOLD };
        uint64_t asked[ARRAY_SIZE(levels)];
        fixture_start(&daemons, owners, NULL);
        s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, mixed_spec);
        for (size_t i = 0; i < ARRAY_SIZE(levels); i++) {
            const uint64_t before = s->hub->requests;
            s->hub->links[owners - 1].peer.level = levels[i];
            digest_of(m, got);
            EXPECT_STR(got, want);
            asked[i] = s->hub->requests - before;
        }
        EXPECT(asked[0] < asked[1] && asked[1] < asked[2]);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

/* Wherever they are: segments made, passed, named, offered, claimed. */
TEST(clients_killed_while_they_open_a_large_model_leave_nothing)
{
    uint64_t seed = test_seed(4);
    char *spec = large_spec();
    int status;
    fixture_start(&daemons, 1, NULL);
    shd_session *s = attach(PATIENT_MS);
    const uint64_t start_ms = test_now_ms();
    shd_model *m = open_toy(s, spec);
    const uint64_t took_ms = test_now_ms() - start_ms;
    const int fds = count_fds(daemons.pids[0]), maps = count_segment_maps(daemons.pids[0]);
    for (int i = 0; i < 8; i++) {
        const pid_t pid = test_fork();
        if (pid == 0) {
            struct shd_err e;
            shd_session *own;
            shd_model *same;
            if (try_connect(daemons.address, PATIENT_MS, &own, &e) == SHD_OK)
                shd_model_open(own, spec, &same, &e);
            _exit(0);
        }
        sleep_ms((long)(test_random(&seed) % (took_ms + 1)));
        kill(pid, SIGKILL);
        waitpid(pid, &status, 0);
    }
    expect_daemon_idle(daemons.pids[0], fds, maps);
    step_large(m);
    shd_close(s);
    fixture_stop(&daemons);
    free(spec);
}

TEST_MAIN()
