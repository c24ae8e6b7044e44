/* A daemon that dies at every point there is, and comes back: fake owners, of which owner 0 ends
 * itself before or after a request, a reply or a claim (tests/lib/fake_owner.h).
 * Whatever the point, the run ends in time, every gradient counts once with the bytes the worker
 * wrote, arrays that were handed out keep theirs, and nothing is left open. */
#include <sys/mman.h>
#include <sys/wait.h>

#include "client/paths/decide.h"
#include "client/paths/map.h"
#include "client/paths/path.h"
#include "client/session/hub.h"
#include "tests/lib/fake_owner.h"

/* -- The worker -------------------------------------------------------------------------------- */

/* Wait, as a worker in its own calls would, until what died is back. */
static void breathe(shd_model *m)
{
    struct shd_err e = { 0 };
    for (int i = 0; i < 3 || m->session->hub->down_count > 0; i++) {
        if (m->session->control->poll(m, &e) != SHD_OK)
            return; /* the next call says so */
        sleep_ms(1);
    }
}

static void write_grad(const shd_model *m, uint32_t micro, uint32_t unit, float *grad,
                       uint64_t from, uint64_t to)
{
    for (uint64_t i = from; i < to; i++)
        grad[i] = grad_at(shd_step(m), micro, unit, i);
}

static bool params_right(uint64_t step, uint32_t unit, uint64_t elems, const float *params)
{
    for (uint64_t i = 0; i < elems; i++)
        if (params[i] != param_at(step, unit, i))
            return false;
    return true;
}

/* One unit's part of a micro-batch: what is held must outlive a daemon. */
static int one_unit(shd_model *m, uint32_t micro, uint32_t unit, bool slow, struct shd_err *e)
{
    const uint64_t elems = m->spec->units[unit].elems;
    const void *params;
    float *grad;
    int r = shd_acquire(m, unit, &params, e);
    if (r == SHD_OK && !params_right(m->step, unit, elems, params))
        FAIL("parameters of step %" PRIu64 ", unit %u are wrong", m->step, unit);
    if (r == SHD_OK)
        r = shd_grad(m, micro, unit, &grad, e);
    if (r != SHD_OK)
        return r;
    write_grad(m, micro, unit, grad, 0, elems / 2);
    if (slow)
        breathe(m);
    if (!params_right(m->step, unit, elems, params))
        FAIL("held parameters changed");
    write_grad(m, micro, unit, grad, elems / 2, elems);
    shd_release(m, unit);
    return shd_return(m, micro, unit, e);
}

static int by_hand(shd_model *m, bool slow, struct shd_err *e)
{
    int r = SHD_OK;
    while (r == SHD_OK && m->step < STEPS) {
        char blob[] = "cursor 0";
        blob[7] = (char)('0' + m->step);
        const struct shd_update update = {
            .size = sizeof update, .lr = 0.5, .blob = blob, .blob_bytes = sizeof blob
        };
        for (uint32_t micro = 0; r == SHD_OK && micro < MICROS; micro++)
            for (uint32_t unit = UNITS; r == SHD_OK && unit-- > 0;)
                r = one_unit(m, micro, unit, slow, e);
        if (r == SHD_OK)
            r = shd_commit(m, &update, NULL, e);
    }
    return r;
}

static int forward(void *ctx, uint32_t micro, uint32_t unit, const void *params)
{
    const shd_model *m = ctx;
    (void)micro;
    return !params_right(m->step, unit, m->spec->units[unit].elems, params);
}

static int backward(void *ctx, uint32_t micro, uint32_t unit, const void *params, float *grad)
{
    const shd_model *m = ctx;
    write_grad(m, micro, unit, grad, 0, m->spec->units[unit].elems);
    return forward(ctx, micro, unit, params);
}

static int by_lease(shd_model *m, struct shd_err *e)
{
    const struct shd_compute compute = {
        .size = sizeof compute, .ctx = m, .forward = forward, .backward = backward
    };
    const struct shd_update update = {
        .size = sizeof update, .lr = 0.5, .blob = "cursor 2", .blob_bytes = 9
    };
    int r = SHD_OK;
    while (r == SHD_OK && m->step < STEPS)
        r = shd_run_step_elastic(m, &compute, &update, NULL, e);
    return r;
}

enum how { BY_HAND, BY_HAND_SLOWLY, BY_COPY, BY_LEASE, HOWS };

static int train(enum how how, uint64_t timeout_ms, struct shd_err *e)
{
    char address[128];
    snprintf(address, sizeof address, "%s?cpu0,cpu1", world->dir);
    const struct shd_options options = {
        .size = sizeof options, .address = address, .timeout_ms = timeout_ms, .slots = 2
    };
    const struct shd_policy policy = { .size = sizeof policy, .path = SHD_PATH_COPY };
    shd_session *s;
    shd_model *m;
    int r = shd_connect(&options, &s, e);
    if (r != SHD_OK)
        return r;
    r = shd_model_open(s, spec_json, &m, e);
    if (r == SHD_OK && how == BY_COPY)
        r = shd_set_policy(m, &policy, e);
    if (r == SHD_OK)
        r = how == BY_LEASE ? by_lease(m, e) : by_hand(m, how == BY_HAND_SLOWLY, e);
    shd_close(s);
    return r;
}

/* -- Runs -------------------------------------------------------------------------------------- */

static void clear_world(void)
{
    if (world == NULL)
        world = mmap(NULL, sizeof *world, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                     0);
    CHECK(world != MAP_FAILED);
    memset(world, 0, sizeof *world);
    world->die_at[0] = world->die_at[1] = world->drop_at = world->expel_at = NOBODY;
}

static int run(enum how how, uint64_t timeout_ms, struct shd_err *e)
{
    pid_t keepers[OWNERS];
    char command[128];
    *e = (struct shd_err){ 0 };
    strcpy(world->dir, "/tmp/shd-again-XXXXXX");
    CHECK(mkdtemp(world->dir) != NULL);
    for (uint32_t i = 0; i < OWNERS; i++)
        keepers[i] = start_keeper(i);
    const int fds = count_fds(getpid()), maps = count_segment_maps(getpid());
    const int r = train(how, timeout_ms, e);
    const int fds_left = count_fds(getpid()), maps_left = count_segment_maps(getpid());
    for (uint32_t i = 0; i < OWNERS; i++) {
        kill(keepers[i], SIGKILL); /* and its fake with it */
        waitpid(keepers[i], NULL, 0);
    }
    snprintf(command, sizeof command, "rm -rf %s", world->dir);
    EXPECT_EQ(system(command), 0);
    EXPECT_EQ(fds_left, fds);
    EXPECT_EQ(maps_left, maps);
    return r;
}

static void expect_right(enum how how)
{
    struct shd_err e;
    const int r = run(how, TEST_HANG_MS, &e);
    if (r != SHD_OK)
        FAIL("way %d, death at %" PRId64 " %" PRId64 ": %s: %s", (int)how,
             (int64_t)world->die_at[0], (int64_t)world->die_at[1], status_name(r), e.text);
    EXPECT(!world->wrong);
    for (uint32_t i = 0; i < OWNERS; i++) {
        const struct owner_state *o = &world->owner[i];
        EXPECT_EQ(o->step, STEPS);
        EXPECT_STR(o->blob, "cursor 2");
        for (uint32_t step = 0; step < STEPS; step++) {
            EXPECT(decision_equal(&o->decision[step], &world->owner[0].decision[step]));
            for (uint32_t micro = 0; micro < MICROS; micro++)
                for (uint32_t u = 0; u < UNITS; u++)
                    EXPECT_EQ(o->counted[step][micro][u], 1);
        }
    }
}

/* A process that AddressSanitizer looks at is slow to fork, and six are for each point: there each
 * way has every fourth point, and all four ways together have them all. */
#ifdef __SANITIZE_ADDRESS__
#define POINTS_APART HOWS
#else
#define POINTS_APART 1
#endif

static void die_everywhere(enum how how)
{
    uint64_t point_count = 0;
    for (uint64_t at = how % POINTS_APART;; at += POINTS_APART) {
        clear_world();
        world->die_at[0] = at;
        expect_right(how);
        if (world->deaths == 0)
            break;
        EXPECT_EQ(world->deaths, 1);
        point_count++;
    }
    printf("  %" PRIu64 " points\n", point_count);
    EXPECT(point_count > 50 / POINTS_APART);
}

TEST(death_at_every_point_is_survived)
{
    die_everywhere(BY_HAND);
}

TEST(death_at_every_point_with_slots_held)
{
    die_everywhere(BY_HAND_SLOWLY);
}

TEST(death_at_every_point_on_the_copy_path)
{
    die_everywhere(BY_COPY);
}

TEST(death_at_every_point_with_leased_work)
{
    die_everywhere(BY_LEASE);
}

TEST(death_while_it_is_coming_back)
{
    uint64_t seed = test_seed(42);
    for (int i = 0; i < 60 / (int)POINTS_APART; i++) {
        clear_world();
        world->die_at[0] = test_random(&seed) % 80;
        world->die_at[1] = world->die_at[0] + 1 + test_random(&seed) % 12;
        expect_right((enum how)(i % HOWS));
        EXPECT(world->deaths <= 2);
    }
}

TEST(sessions_that_the_daemon_ends_are_opened_again)
{
    for (int how = BY_HAND; how < HOWS; how++)
        for (uint64_t at = 2; at < 14; at++) {
            clear_world();
            world->expel_at = at;
            expect_right((enum how)how);
            EXPECT_EQ(world->deaths, 1);
        }
}

TEST(lost_requests_are_sent_again)
{
    for (uint64_t at = 2; at < 12; at += 3) { /* an OpenModel is not: its answer takes time */
        clear_world();
        world->drop_at = at;
        expect_right(BY_HAND);
        EXPECT(world->requests > at);
        EXPECT_EQ(world->deaths, 0);
    }
}

static void expect_end(enum how how, uint64_t timeout_ms, int status, const char *has)
{
    struct shd_err e;
    EXPECT_STATUS(run(how, timeout_ms, &e), status);
    EXPECT_HAS(e.text, "daemon cpu0");
    EXPECT_HAS(e.text, has);
}

TEST(successor_without_the_model_is_final)
{
    clear_world();
    world->die_at[0] = 30;
    world->forget = true;
    expect_end(BY_HAND_SLOWLY, TEST_HANG_MS, SHD_ENOENT,
               "came back without model '" RUN_NAME "': its state is lost; restore a checkpoint");
}

TEST(no_successor_ends_in_time)
{
    clear_world();
    world->die_at[0] = 30;
    world->stay_away = true;
    expect_end(BY_HAND, test_paced(500), SHD_EGONE, "is gone: lost at ");
}

TEST_MAIN()
