/* Bad input to a real daemon over real sockets: each gets a clear error, costs its sender at most
 * its own session, and a trainer attached all along goes on and ends with the right step. */
#include <sys/resource.h>
#include <sys/wait.h>
#include <zmq.h>

#include "daemon/base/state.h"
#include "daemon/daemon.h"
#include "daemon/net/session.h"
#include "proto/share/fdpass.h"
#include "tests/lib/fixture.h"
#include "tests/lib/raw_client.h"

TEST(garbage_loses_its_session_and_nothing_else)
{
    static struct raw r;
    struct wire_reply reply;
    trainer_start();
    raw_open(&r);
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    raw_send(&r, "\xff\xff\xff\xff garbage", 12);
    raw_recv(&r, &reply);
    EXPECT(reply.status != SHD_OK && reply.text[0] != '\0');
    EXPECT_STATUS(raw_ask(&r, (struct wire_request){ .type = WIRE_STATUS }, &reply), SHD_EAUTH);
    raw_close(&r);
    trainer_step();
    trainer_stop(1);
}

/* Without a session, so that nothing ends: the log is spared, and says so to who asks. */
TEST(flood_of_garbage_is_not_a_flood_of_lines)
{
    static struct raw r;
    struct wire_reply reply;
    trainer_start();
    raw_open(&r);
    for (int i = 0; i < 500; i++) {
        raw_send(&r, "\xff\xff\xff\xff garbage", 12);
        raw_recv(&r, &reply);
        EXPECT(reply.status != SHD_OK);
    }
    raw_close(&r);
    struct http_reply metrics = http_get(&fixture, 0, "/metrics");
    const char *dropped = strstr(metrics.body, "\nshardd_dropped_events_total{");
    const long count = dropped != NULL ? strtol(strstr(dropped, "} ") + 2, NULL, 10) : -1;
    free(metrics.text);
    EXPECT_EQ(metrics.code, 200);
    EXPECT(count >= 400);
    trainer_step();
    trainer_stop(1);
}

TEST(truncated_mutated_oversized_and_split_messages_do_no_harm)
{
    static struct raw r;
    static uint8_t frame[4096], huge[2 * 1024 * 1024];
    struct wire_reply reply;
    uint64_t seed = test_seed(20261121);
    trainer_start();
    for (int round = 0; round < 40; round++) {
        raw_open(&r);
        EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
        const uint32_t handle = raw_attach(&r, 2);
        for (int i = 0; i < 25; i++) {
            struct wire_request req = { .type = WIRE_PREPARE, .prepare = { .model = handle } };
            if (i % 2 == 0)
                req = (struct wire_request){
                    .type = WIRE_RETURN,
                    .return_grad = { .model = handle, .dtype = SHD_F32, .none = true, .step = 1000 }
                };
            size_t bytes = raw_pack(&r, &req, frame, sizeof frame);
            if (i % 3 == 0)
                bytes = test_random(&seed) % bytes;
            else
                frame[test_random(&seed) % bytes] ^= (uint8_t)(1u << test_random(&seed) % 8);
            raw_send(&r, frame, bytes);
        }
        if (round % 10 == 0) {
            zmq_send(r.dealer, "a", 1, ZMQ_SNDMORE); /* two frames where one belongs */
            zmq_send(r.dealer, "b", 1, 0);
            zmq_send(r.dealer, huge, sizeof huge, 0);
        }
        raw_close(&r);
        if (round % 10 == 0)
            trainer_step();
    }
    trainer_stop(4);
}

TEST(request_with_a_frame_too_many_is_not_served)
{
    static struct raw r;
    struct wire_reply reply;
    struct wire_request ask = { .type = WIRE_STATUS };
    uint8_t frame[4096];
    trainer_start();
    raw_open(&r);
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_READER, &reply), SHD_OK);
    const size_t bytes = raw_pack(&r, &ask, frame, sizeof frame);
    EXPECT_EQ(zmq_send(r.dealer, frame, bytes, ZMQ_SNDMORE), (int)bytes);
    EXPECT_EQ(zmq_send(r.dealer, "more", 4, 0), 4);
    /* The first answer is that of the next request. */
    EXPECT_STATUS(raw_ask(&r, (struct wire_request){ .type = WIRE_STATUS }, &reply), SHD_OK);
    raw_close(&r);
    trainer_step();
    trainer_stop(1);
}

TEST(client_that_hangs_up_in_the_middle_is_forgotten)
{
    static struct raw r;
    struct wire_reply reply;
    trainer_start();
    sleep_ms(50);
    const int fds = count_fds(fixture.pids[0]), maps = count_segment_maps(fixture.pids[0]);
    for (int i = 0; i < 30; i++) {
        raw_open(&r);
        if (i % 3 > 0)
            EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
        if (i % 3 > 1) {
            const uint32_t handle = raw_attach(&r, 2);
            uint8_t frame[256]; /* a Prepare that stays pending */
            struct wire_request req = { .type = WIRE_PREPARE,
                                        .prepare = { .model = handle, .step = shd_step(model) } };
            raw_send(&r, frame, raw_pack(&r, &req, frame, sizeof frame));
        }
        raw_close(&r);
    }
    trainer_step();
    expect_daemon_idle(fixture.pids[0], fds, maps);
    trainer_stop(1);
}

TEST(sessions_beyond_the_limit_are_refused)
{
    static int fds[SESSIONS_MAX + 8];
    struct rlimit limit;
    struct shd_err e;
    char path[300];
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = limit.rlim_max;
    if (limit.rlim_max < 4 * SESSIONS_MAX || setrlimit(RLIMIT_NOFILE, &limit) != 0)
        SKIP("the descriptor limit is %ju", (uintmax_t)limit.rlim_max);
    trainer_start(); /* one session */
    snprintf(path, sizeof path, "%s/cpu0.sock", fixture.dir);
    struct side_msg msg;
    int passed, count = 0, refused = 0;
    for (uint32_t i = 0; i < SESSIONS_MAX + 8; i++) {
        EXPECT_OK(side_connect(path, &fds[count], &e), &e);
        EXPECT_OK(side_recv(fds[count], RAW_WAIT_MS, &msg, &passed, &e), &e);
        count++;
        if (msg.type == SIDE_ERROR) {
            EXPECT_EQ(msg.status, SHD_EBUSY);
            EXPECT_HAS(msg.text, "1024");
            refused++;
        }
    }
    EXPECT_EQ(refused, 9);
    trainer_step();
    while (count > 0)
        close(fds[--count]);
    trainer_stop(1);
}

TEST(out_of_descriptors_is_said_and_survived)
{
    struct shd_err e;
    struct side_msg msg;
    char path[300];
    int fds[64], passed, count = 0;
    trainer_start();
    const struct rlimit low = { 40, 4096 };
    EXPECT_EQ(prlimit(fixture.pids[0], RLIMIT_NOFILE, &low, NULL), 0);
    snprintf(path, sizeof path, "%s/cpu0.sock", fixture.dir);
    do {
        CHECK(count < 64);
        EXPECT_OK(side_connect(path, &fds[count], &e), &e);
        EXPECT_OK(side_recv(fds[count], RAW_WAIT_MS, &msg, &passed, &e), &e);
        count++;
    } while (msg.type == SIDE_WELCOME);
    EXPECT_EQ(msg.status, SHD_ENOMEM);
    EXPECT_HAS(msg.text, "descriptors");
    trainer_step();
    while (count > 0)
        close(fds[--count]);
    trainer_stop(1);
}

TEST(second_daemon_of_a_device_is_refused_and_leaves_the_first_alone)
{
    struct daemon *second;
    struct shd_err e;
    trainer_start();
    const struct daemon_config config = { .device = "cpu0", .runtime_dir = fixture.dir };
    EXPECT_STATUS(daemon_new(&config, &second, &e), SHD_EEXIST);
    EXPECT_HAS(e.text, "another shardd has device cpu0");
    trainer_step();
    trainer_stop(1);
}

TEST(foreign_uid_is_refused_by_name)
{
    if (getuid() != 0)
        SKIP("needs root to become somebody else");
    trainer_start();
    EXPECT_EQ(chmod(fixture.dir, 0755), 0); /* let the other user reach the socket at all */
    char path[300];
    snprintf(path, sizeof path, "%s/cpu0.sock", fixture.dir);
    EXPECT_EQ(chmod(path, 0666), 0);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        struct shd_err e;
        struct side_msg msg;
        int fd, passed;
        if (setgid(65534) != 0 || setuid(65534) != 0 || side_connect(path, &fd, &e) != SHD_OK ||
            side_recv(fd, RAW_WAIT_MS, &msg, &passed, &e) != SHD_OK)
            _exit(1);
        _exit(msg.type == SIDE_ERROR && msg.status == SHD_EAUTH && strstr(msg.text, "65534") != NULL
                  ? 0
                  : 2);
    }
    int status;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    trainer_step();
    trainer_stop(1);
}

TEST_MAIN()
