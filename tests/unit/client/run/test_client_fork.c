/* Children of fork() that live on: a loader's workers, say. Their parent's sessions are not theirs,
 * and its death is seen although they have its descriptors. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/paths/map.h"
#include "client/session/hub.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

static bool daemon_knows(int index, pid_t pid)
{
    char word[32];
    struct http_reply reply = http_get(&daemons, index, "/status");
    snprintf(word, sizeof word, "\"pid\":%d,", (int)pid);
    const bool known = reply.body != NULL && strstr(reply.body, word) != NULL;
    free(reply.text);
    return known;
}

/* -- Deaths ----------------------------------------------------------------------------------- */

/* A worker that has a session, and a child that outlives it; how: by the C library's fork(), or by
 * the bare system call, of which no handler knows. *ret_child is killed by the caller. */
static pid_t worker_with_child(bool bare, pid_t *ret_child)
{
    int pipes[2];
    EXPECT(pipe(pipes) == 0);
    const pid_t worker = test_fork();
    if (worker == 0) {
        shd_session *s = NULL;
        shd_model *m;
        struct shd_err why = { 0 };
        MUST(try_connect(daemons.address, PATIENT_MS, &s, &why) == SHD_OK);
        MUST_OK(shd_model_open(s, toy_spec("f32", TOY_ADAMW), &m, &e));
        MUST_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e)); /* it has rings now */
        const pid_t child = bare ? (pid_t)syscall(SYS_fork) : fork();
        MUST(child >= 0);
        if (child == 0) {
            for (;;)
                pause();
        }
        MUST(write(pipes[1], &child, sizeof child) == sizeof child);
        for (;;)
            pause();
    }
    EXPECT(read(pipes[0], ret_child, sizeof *ret_child) == sizeof *ret_child);
    close(pipes[0]);
    close(pipes[1]);
    return worker;
}

static void expect_death_seen(bool bare)
{
    pid_t child;
    const pid_t worker = worker_with_child(bare, &child);
    EXPECT(daemon_knows(0, worker) && daemon_knows(1, worker));
    kill(worker, SIGKILL);
    waitpid(worker, NULL, 0);
    EXPECT_SOON(!daemon_knows(0, worker) && !daemon_knows(1, worker));
    EXPECT(kill(child, 0) == 0);
    kill(child, SIGKILL);
}

TEST(death_is_seen_while_a_child_lives)
{
    fixture_start(&daemons, 2, NULL);
    expect_death_seen(/* bare= */ false);
    expect_death_seen(/* bare= */ true);
    fixture_stop(&daemons);
}

/* -- What a child may do ---------------------------------------------------------------------- */

struct parent {
    shd_session *s;
    shd_model *m;
    float *grad;
    int side_fd, board_fd;
    const void *requests; /* of its ring at owner 0 */
};

static void must_refuse(int status, const struct shd_err *e)
{
    char whose[64];
    snprintf(whose, sizeof whose, "session of process %d", (int)getppid());
    MUST(status == SHD_EINVAL);
    MUST(strstr(e->text, whose) != NULL);
}

static void must_refuse_steps(struct parent *p)
{
    struct shd_err e = { 0 };
    struct shd_result result = { .size = sizeof result };
    const struct shd_update update = toy_update(0);
    const struct shd_policy policy = { .size = sizeof policy };
    const double metric = 1;
    float *grad;
    must_refuse(shd_acquire(p->m, 0, NULL, &e), &e);
    must_refuse(shd_grad(p->m, 0, 0, &grad, &e), &e);
    must_refuse(shd_return(p->m, 0, 0, &e), &e);
    must_refuse(shd_return_none(p->m, 0, 1, &e), &e);
    must_refuse(shd_report(p->m, 0, &metric, 1, &e), &e);
    must_refuse(shd_commit(p->m, &update, &result, &e), &e);
    must_refuse(shd_set_policy(p->m, &policy, &e), &e);
    must_refuse(toy_step(p->m, toy_all_micros, TOY_MICROS, &result, &e), &e);
}

static void must_refuse_looks(struct parent *p)
{
    struct shd_err e = { 0 };
    shd_model *m;
    uint64_t from = 0;
    uint32_t count;
    struct shd_step_row row = { .size = sizeof row };
    char hex[65], *json;
    size_t bytes;
    bool done;
    must_refuse(shd_model_open(p->s, toy_spec("f32", TOY_ADAMW), &m, &e), &e);
    must_refuse(shd_model_attach(p->s, NULL, &m, &e), &e);
    must_refuse(shd_blob(p->m, hex, sizeof hex, &bytes, &e), &e);
    must_refuse(shd_history(p->m, &from, &row, 1, &count, &e), &e);
    must_refuse(shd_digest(p->m, hex, NULL, &e), &e);
    must_refuse(shd_status(p->s, 0, &json, &e), &e);
    must_refuse(shd_checkpoint(p->m, "/nowhere", NULL, NULL, &e), &e);
    must_refuse(shd_checkpoint_poll(p->m, &done, NULL, &e), &e);
    must_refuse(shd_restore(p->s, "/nowhere", NULL, NULL, &e), &e);
}

static void be_child(struct parent *p)
{
    int pipes[2];
    must_refuse_steps(p);
    must_refuse_looks(p);
    shd_release(p->m, 0);
    shd_model_close(p->m);
    shd_close(p->s);
    MUST(fcntl(p->side_fd, F_GETFD) < 0 && fcntl(p->board_fd, F_GETFD) < 0);
    MUST(pipe(pipes) == 0); /* the system reads the array, so that no signal ends us */
    MUST(write(pipes[1], p->grad, sizeof *p->grad) < 0 && errno == EFAULT);
    MUST(write(pipes[1], p->requests, 1) < 0 && errno == EFAULT);
    struct shd_err why = { 0 };
    shd_session *own = NULL;
    MUST(try_connect(daemons.address, PATIENT_MS, &own, &why) == SHD_OK);
    shd_model *m;
    MUST_OK(shd_model_open(own, toy_spec("f32", TOY_ADAMW), &m, &e));
    MUST_OK(shd_acquire(m, 0, NULL, &e));
    shd_close(own);
    _exit(0);
}

static struct parent be_parent(void)
{
    struct shd_err e = { 0 };
    struct parent p = { .s = attach(PATIENT_MS) };
    p.m = open_toy(p.s, toy_spec("f32", TOY_ADAMW));
    train_steps(p.m, 1);
    EXPECT_OK(shd_acquire(p.m, 0, NULL, &e), &e);
    EXPECT_OK(shd_grad(p.m, 0, 0, &p.grad, &e), &e);
    p.side_fd = p.s->hub->links[0].side_fd;
    p.board_fd = p.m->map->owners[0].board.fd;
    EXPECT_EQ(p.s->hub->links[0].ring.state, LINK_RING_OPEN);
    p.requests = p.s->hub->links[0].ring.requests.base;
    return p;
}

TEST(child_has_no_part_in_its_parents_session)
{
    char want[65], got[65];
    toy_reference(toy_spec("f32", TOY_ADAMW), 3, want);
    fixture_start(&daemons, 2, NULL);
    struct parent p = be_parent();
    const pid_t child = test_fork();
    if (child == 0)
        be_child(&p);
    expect_well(child);
    shd_release(p.m, 0);
    train_steps(p.m, 2); /* with the array that was handed out */
    digest_of(p.m, got);
    EXPECT_STR(got, want);
    shd_close(p.s);
    fixture_stop(&daemons);
}

/* As a data loader's: it lives while its parent goes on, and calls what it must not, unless no
 * handler knows of it. It ends when the pipe does. */
static pid_t loader(const struct parent *p, bool bare, const int pipes[2])
{
    char byte;
    const pid_t child = bare ? (pid_t)syscall(SYS_fork) : test_fork();
    EXPECT(child >= 0);
    if (child > 0)
        return child;
    close(pipes[1]);
    do {
        struct shd_err e = { 0 };
        if (bare)
            continue;
        must_refuse(shd_acquire(p->m, 0, NULL, &e), &e);
        must_refuse(shd_return_none(p->m, 0, 1, &e), &e);
    } while (read(pipes[0], &byte, 1) > 0);
    if (!bare)
        shd_close(p->s);
    _exit(0);
}

TEST(loaders_that_live_on_change_nothing)
{
    char want[65], got[65];
    int pipes[2];
    pid_t children[4];
    toy_reference(toy_spec("f32", TOY_ADAMW), 8, want);
    fixture_start(&daemons, 2, NULL);
    struct parent p = { .s = attach(PATIENT_MS) };
    p.m = open_toy(p.s, toy_spec("f32", TOY_ADAMW));
    train_steps(p.m, 1);
    EXPECT(pipe(pipes) == 0);
    for (int i = 0; i < 4; i++)
        children[i] = loader(&p, /* bare= */ i % 2 == 1, pipes);
    close(pipes[0]);
    for (int i = 0; i < 6; i++) {
        EXPECT(write(pipes[1], "go on", 4) == 4);
        train_steps(p.m, 1);
    }
    close(pipes[1]);
    for (int i = 0; i < 4; i++) {
        expect_well(children[i]);
    }
    train_steps(p.m, 1);
    EXPECT_EQ(p.s->hub->links[0].ring.state, LINK_RING_OPEN);
    EXPECT_EQ(p.s->hub->links[0].epoch + p.s->hub->links[1].epoch, 0);
    digest_of(p.m, got);
    EXPECT_STR(got, want);
    shd_close(p.s);
    fixture_stop(&daemons);
}

#define FORKS 12

struct forker {
    struct parent *p;
    uint32_t clean; /* children that ended as they should */
};

static void *fork_again_and_again(void *ctx)
{
    struct forker *f = ctx;
    for (int i = 0; i < FORKS; i++) {
        struct shd_err e = { 0 };
        int status = -1;
        const pid_t child = fork();
        if (child == 0) {
            must_refuse(shd_acquire(f->p->m, 0, NULL, &e), &e);
            shd_close(f->p->s);
            _exit(0);
        }
        waitpid(child, &status, 0);
        f->clean += WIFEXITED(status) && WEXITSTATUS(status) == 0;
    }
    return NULL;
}

/* The lock on the directory is the child's, too. */
TEST(child_of_while_a_checkpoint_was_saved_is_in_no_ones_way)
{
    struct shd_err e = { 0 };
    int pipes[2];
    bool done = false;
    fixture_start(&daemons, 2, NULL);
    make_ckpts();
    struct parent p = be_parent();
    shd_release(p.m, 0);
    EXPECT(pipe(pipes) == 0);
    EXPECT_OK(shd_checkpoint_begin(p.m, ckpts, NULL, &e), &e);
    const pid_t child = loader(&p, /* bare= */ false, pipes);
    close(pipes[0]);
    while (!done) {
        const int r = shd_checkpoint_poll(p.m, &done, NULL, &e);
        EXPECT_OK(r, &e);
    }
    train_steps(p.m, 1);
    save_ok(p.m, 0);
    close(pipes[1]);
    expect_well(child);
    shd_close(p.s);
    remove_ckpts();
    fixture_stop(&daemons);
}

TEST(another_thread_may_fork_in_the_middle_of_steps)
{
    char want[65], got[65];
    pthread_t thread;
    toy_reference(toy_spec("f32", TOY_ADAMW), 12, want);
    fixture_start(&daemons, 2, NULL);
    struct parent p = { .s = attach(PATIENT_MS) };
    p.m = open_toy(p.s, toy_spec("f32", TOY_ADAMW));
    struct forker forker = { .p = &p };
    EXPECT(pthread_create(&thread, NULL, fork_again_and_again, &forker) == 0);
    train_steps(p.m, 12);
    pthread_join(thread, NULL);
    EXPECT_EQ(forker.clean, FORKS);
    digest_of(p.m, got);
    EXPECT_STR(got, want);
    shd_close(p.s);
    fixture_stop(&daemons);
}

TEST(session_in_this_process_is_refused_in_a_child_too)
{
    struct shd_err e = { 0 };
    struct parent p = { .grad = NULL };
    EXPECT_OK(try_connect("local:", PATIENT_MS, &p.s, &e), &e);
    p.m = open_toy(p.s, toy_spec("f32", TOY_ADAMW));
    const pid_t child = test_fork();
    if (child == 0) {
        must_refuse_steps(&p);
        shd_close(p.s);
        _exit(0);
    }
    expect_well(child);
    train_steps(p.m, 1);
    shd_close(p.s);
}

TEST_MAIN()
