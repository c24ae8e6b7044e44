/* Bad input to a real daemon over real sockets: each gets a clear error, costs its sender at most
 * its own session, and a trainer attached all along goes on and ends with the right step. */
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <zmq.h>

#include "client/shd.h"
#include "daemon/daemon.h"
#include "daemon/net/session.h"
#include "tests/lib/http_ask.h"
#include "tests/lib/raw_client.h"

/* -- The trainer that must not notice --------------------------------------------------------- */

static shd_session *trainer;
static shd_model *model;

static void trainer_start(void)
{
    struct shd_err e;
    fixture_start(&fixture, 1, NULL);
    EXPECT_OK(shd_connect(&(struct shd_options){ .size = sizeof(struct shd_options),
                                                 .address = fixture.dir,
                                                 .timeout_ms = TEST_HANG_MS },
                          &trainer, &e),
              &e);
    EXPECT_OK(shd_model_open(trainer, spec_json, &model, &e), &e);
}

static void trainer_step(void)
{
    struct shd_err e;
    const void *params;
    float *grad;
    struct shd_result result;
    EXPECT_OK(shd_acquire(model, 0, &params, &e), &e);
    EXPECT_OK(shd_grad(model, 0, 0, &grad, &e), &e);
    for (int i = 0; i < 64; i++)
        grad[i] = 1;
    EXPECT_OK(shd_return(model, 0, 0, &e), &e);
    shd_release(model, 0);
    EXPECT_OK(shd_commit(model, &(struct shd_update){ .size = sizeof(struct shd_update), .lr = 1 },
                         &result, &e),
              &e);
}

static void trainer_stop(uint64_t steps)
{
    EXPECT_EQ(shd_step(model), steps);
    shd_close(trainer);
    fixture_stop(&fixture);
}

/* -- Tests ------------------------------------------------------------------------------------ */

TEST(other_protocol_version_is_refused_with_both_versions)
{
    static struct raw r;
    struct wire_reply reply;
    trainer_start();
    raw_open(&r);
    EXPECT_STATUS(raw_hello(&r, 99, WIRE_TRAINER, &reply), SHD_EPROTO);
    EXPECT_HAS(reply.text, "99");
    EXPECT_HAS(reply.text, "protocol 2");
    raw_close(&r);
    trainer_step();
    trainer_stop(1);
}

TEST(token_session_and_role_are_checked)
{
    static struct raw r, other;
    struct wire_reply reply;
    trainer_start();
    raw_open(&r);
    r.token[3] ^= 1;
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_EAUTH);
    r.token[3] ^= 1;
    EXPECT_STATUS(raw_ask(&r, (struct wire_request){ .type = WIRE_STATUS }, &reply), SHD_EAUTH);
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_READER, &reply), SHD_OK);
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_READER, &reply),
                  SHD_OK); /* doubled on its way */
    raw_open(&other);
    uint8_t own[SHD_TOKEN_BYTES];
    memcpy(own, other.token, sizeof own);
    memcpy(other.token, r.token, sizeof own);
    EXPECT_STATUS(raw_hello(&other, SHD_PROTOCOL, WIRE_READER, &reply), SHD_EAUTH); /* used */
    memcpy(other.token, own, sizeof own);
    EXPECT_STATUS(raw_hello(&other, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    EXPECT_STATUS(
        raw_ask(&other, (struct wire_request){ .type = WIRE_STATUS, .session = r.session }, &reply),
        SHD_EAUTH); /* somebody else's session */
    const uint32_t handle = raw_attach(&r, 0);
    EXPECT_STATUS(
        raw_ask(&r,
                (struct wire_request){ .type = WIRE_RETURN,
                                       .return_grad = { .model = handle, .dtype = SHD_F32 } },
                &reply),
        SHD_EAUTH); /* a reader */
    raw_close(&r);
    raw_close(&other);
    trainer_step();
    trainer_stop(1);
}

TEST(numbers_outside_the_model_are_refused_with_their_values)
{
    static struct raw r;
    struct wire_reply reply;
    trainer_start();
    raw_open(&r);
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    const uint32_t handle = raw_attach(&r, 2);
    struct wire_request req = { .type = WIRE_RETURN,
                                .return_grad = { .model = handle, .dtype = SHD_F32, .unit = 7 } };
    EXPECT_STATUS(raw_ask(&r, req, &reply), SHD_ERANGE);
    EXPECT_HAS(reply.text, "unit 7 of a model with 1");
    req.return_grad.unit = 0;
    req.return_grad.micro = 9;
    EXPECT_STATUS(raw_ask(&r, req, &reply), SHD_ERANGE);
    EXPECT_HAS(reply.text, "micro-batch 9 of a step with 1");
    req.return_grad.micro = 0;
    req.return_grad.slot = 2;
    EXPECT_STATUS(raw_ask(&r, req, &reply), SHD_ERANGE);
    EXPECT_HAS(reply.text, "slot 2 of an inbox with 2");
    req.return_grad.slot = 0;
    req.return_grad.step = 5;
    EXPECT_STATUS(raw_ask(&r, req, &reply), SHD_ESTEP);
    EXPECT_HAS(reply.text, "step 5");
    req.return_grad.model = 3;
    EXPECT_STATUS(raw_ask(&r, req, &reply), SHD_ENOENT);
    EXPECT_STATUS(
        raw_ask(&r,
                (struct wire_request){ .type = WIRE_COMMIT,
                                       .commit = { .model = handle, .decision = { .scale = 1 } } },
                &reply),
        SHD_ESTEP); /* not sealed */
    EXPECT_STATUS(raw_ask(&r,
                          (struct wire_request){ .type = WIRE_DIGEST,
                                                 .digest = { .model = handle, .tensor = 1 } },
                          &reply),
                  SHD_ERANGE);
    EXPECT_STATUS(raw_ask(&r,
                          (struct wire_request){ .type = WIRE_DIGEST,
                                                 .digest = { .model = handle, .array = 2 } },
                          &reply),
                  SHD_ERANGE); /* SGD has one moment */
    raw_close(&r);
    trainer_step();
    trainer_stop(1);
}

TEST(requests_that_come_twice_are_served_once)
{
    static struct raw r;
    struct wire_reply reply;
    uint8_t frame[4096];
    trainer_start();
    raw_open(&r);
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    const uint32_t handle = raw_attach(&r, 2);
    /* Answered: the same answer again, from the session's cache. */
    struct wire_request req = { .type = WIRE_RETURN,
                                .return_grad = { .model = handle, .none = true } };
    size_t bytes = raw_pack(&r, &req, frame, sizeof frame);
    raw_send(&r, frame, bytes);
    raw_recv(&r, &reply);
    EXPECT(reply.type == WIRE_CREDIT && reply.seq == r.seq && !reply.credit.stale);
    raw_send(&r, frame, bytes);
    raw_recv(&r, &reply);
    EXPECT(reply.type == WIRE_CREDIT && reply.seq == r.seq && !reply.credit.stale);
    /* Pending: its copies are ignored. */
    req = (struct wire_request){ .type = WIRE_PREPARE, .prepare = { .model = handle, .step = 1 } };
    EXPECT_STATUS(raw_ask(&r, req, &reply), SHD_ESTEP);
    req = (struct wire_request){ .type = WIRE_LEASE, .lease = { .model = handle, .step = 1 } };
    bytes = raw_pack(&r, &req, frame, sizeof frame);
    for (int i = 0; i < 3; i++)
        raw_send(&r, frame, bytes);
    raw_expect_silence(&r, 50);
    req = (struct wire_request){ .type = WIRE_COMMIT,
                                 .commit = { .model = handle, .decision = { .lr = 1 } } };
    EXPECT_STATUS(
        raw_ask(&r, (struct wire_request){ .type = WIRE_PREPARE, .prepare = { .model = handle } },
                &reply),
        SHD_OK);
    const uint64_t lease_seq = r.seq - 1;
    raw_send(&r, frame, raw_pack(&r, &req, frame, sizeof frame));
    for (int i = 0; i < 2; i++) { /* Committed and, once, Leased */
        raw_recv(&r, &reply);
        EXPECT_EQ(reply.status, SHD_OK);
        EXPECT_EQ(reply.seq, reply.type == WIRE_LEASED ? lease_seq : r.seq);
    }
    raw_expect_silence(&r, 50);
    /* Too long to be kept: served again, with the same inbox. */
    req = (struct wire_request){ .type = WIRE_OPEN_MODEL,
                                 .open_model = { .name = "tiny", .owners = 1, .slots = 2 } };
    EXPECT_STATUS(raw_ask(&r, req, &reply), SHD_EEXIST); /* another one is another one */
    raw_close(&r);
    raw_open(&r);
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    req.session = 0;
    bytes = raw_pack(&r, &req, frame, sizeof frame);
    for (int i = 0; i < 2; i++) {
        raw_send(&r, frame, bytes);
        raw_recv(&r, &reply);
        EXPECT(reply.status == SHD_OK && reply.type == WIRE_LAYOUT && reply.layout.slots == 2);
    }
    req = (struct wire_request){ .type = WIRE_STATUS };
    req.seq = 0;
    struct shd_err e;
    req.session = r.session;
    EXPECT_OK(wire_request_pack(&req, frame, sizeof frame, &bytes, &e), &e);
    raw_send(&r, frame, bytes);
    raw_recv(&r, &reply);
    EXPECT_STATUS(reply.status, SHD_EINVAL);
    raw_close(&r);
    shd_close(trainer);
    fixture_stop(&fixture);
}

TEST(work_of_a_dead_session_goes_to_who_waits_for_it)
{
    static struct raw first, second;
    struct wire_reply reply;
    uint8_t frame[256];
    uint32_t handle;
    trainer_start();
    raw_trainer(&first, &handle);
    raw_trainer(&second, &handle);
    struct wire_request req = { .type = WIRE_LEASE, .lease = { .model = handle } };
    EXPECT_STATUS(raw_ask(&first, req, &reply), SHD_OK);
    EXPECT(reply.type == WIRE_LEASED && reply.leased.what == WIRE_LEASED_GROUP);
    EXPECT_EQ(reply.leased.group, 0);
    raw_send(&second, frame, raw_pack(&second, &req, frame, sizeof frame));
    raw_expect_silence(&second, 100);
    raw_close(&first);
    raw_recv(&second, &reply);
    EXPECT(reply.type == WIRE_LEASED && reply.leased.what == WIRE_LEASED_GROUP);
    EXPECT_EQ(reply.leased.group, 0);
    req = (struct wire_request){ .type = WIRE_LEASE, .lease = { .model = handle, .step = 1 } };
    raw_send(&second, frame, raw_pack(&second, &req, frame, sizeof frame)); /* not begun: wait */
    raw_expect_silence(&second, 20);
    trainer_step();
    raw_recv(&second, &reply);
    EXPECT(reply.leased.what == WIRE_LEASED_GROUP && reply.leased.step == 1);
    req.lease.step = 0;
    EXPECT_STATUS(raw_ask(&second, req, &reply), SHD_OK);
    EXPECT_EQ(reply.leased.what, WIRE_LEASED_OVER);
    raw_close(&second);
    trainer_stop(1);
}

TEST(overdue_work_is_handed_out_again_by_time_alone)
{
    static struct raw first, second;
    struct wire_reply reply;
    uint32_t handle;
    trainer_start();
    raw_trainer(&first, &handle);
    raw_trainer(&second, &handle);
    const struct wire_request req = { .type = WIRE_LEASE, .lease = { .model = handle } };
    EXPECT_STATUS(raw_ask(&first, req, &reply), SHD_OK);
    EXPECT_STATUS(raw_ask(&second, req, &reply), SHD_OK); /* a backup, after two seconds or so */
    EXPECT_EQ(reply.leased.what, WIRE_LEASED_GROUP);
    raw_close(&first);
    raw_close(&second);
    trainer_stop(0);
}

/* Fill the kernel queue: one long piece of hashing, behind it as many short ones as it takes. */
#define FLOODERS 10u

static void flood(struct raw *r, uint32_t count, uint32_t handle, uint64_t first_leaf)
{
    uint8_t frame[256];
    struct wire_request req = { .type = WIRE_DIGEST,
                                .digest = { .model = handle, .first_leaf = first_leaf } };
    for (uint32_t i = 0; i < count; i++)
        raw_send(r, frame, raw_pack(r, &req, frame, sizeof frame));
}

static struct wire_request open_spec(const char *json)
{
    return (struct wire_request){
        .type = WIRE_OPEN_MODEL,
        .open_model = { .spec = { (const uint8_t *)json, strlen(json) }, .name = "", .owners = 1 },
    };
}

TEST(work_waits_and_goes_on_when_others_fill_the_kernel_queue)
{
    static struct raw flooder[FLOODERS], late;
    static const char big_json[] =
        "{\"name\":\"big\",\"micro_batches\":1,\"optimizer\":{\"kind\":\"sgd\"},\"units\":["
        "{\"name\":\"a\",\"tensors\":[{\"name\":\"w\",\"shape\":[16384,2048],"
        "\"trainable\":false}]},"
        "{\"name\":\"b\",\"tensors\":[{\"name\":\"x\",\"shape\":[64]}]}]}";
    static const char late_json[] =
        "{\"name\":\"late\",\"micro_batches\":1,\"optimizer\":{\"kind\":\"sgd\"},\"units\":["
        "{\"name\":\"a\",\"tensors\":[{\"name\":\"w\",\"shape\":[64]}]}]}";
    struct wire_reply reply;
    uint8_t frame[1024];
    trainer_start();
    for (uint32_t i = 0; i < FLOODERS; i++) {
        raw_open(&flooder[i]);
        EXPECT_STATUS(raw_hello(&flooder[i], SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    }
    EXPECT_STATUS(raw_ask(&flooder[0], open_spec(big_json), &reply), SHD_OK);
    const uint32_t handle = reply.layout.model;
    raw_open(&late);
    EXPECT_STATUS(raw_hello(&late, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    do { /* until the last one is refused: it is full */
        flood(&flooder[0], 6, handle, 0);
        for (uint32_t i = 1; i < FLOODERS; i++)
            flood(&flooder[i], 120, handle, 16383);
        for (uint32_t i = 0; i < 120 && reply.status != SHD_EBUSY; i++)
            raw_recv(&flooder[FLOODERS - 1], &reply);
    } while (reply.status != SHD_EBUSY);
    struct wire_request req = open_spec(late_json);
    raw_send(&late, frame, raw_pack(&late, &req, frame, sizeof frame));
    trainer_step();
    raw_recv(&late, &reply);
    EXPECT_STATUS(reply.status, SHD_OK);
    raw_close(&late);
    for (uint32_t i = 0; i < FLOODERS; i++)
        raw_close(&flooder[i]);
    trainer_stop(1);
}

TEST(tickets_work_once_in_their_own_session)
{
    static struct raw r;
    struct wire_reply reply;
    struct shd_err e;
    struct side_msg msg = { .magic = SIDE_MAGIC, .protocol = SHD_PROTOCOL, .type = SIDE_CLAIM };
    int fd;
    trainer_start();
    raw_open(&r);
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    raw_attach(&r, 1);
    msg.ticket = 1;
    EXPECT_OK(side_send(r.side, &msg, -1, &e), &e);
    EXPECT_OK(side_recv(r.side, RAW_WAIT_MS, &msg, &fd, &e), &e);
    EXPECT(msg.type == SIDE_SEGMENT && fd >= 0);
    close(fd);
    msg = (struct side_msg){
        .magic = SIDE_MAGIC, .protocol = SHD_PROTOCOL, .type = SIDE_CLAIM, .ticket = 1
    };
    EXPECT_OK(side_send(r.side, &msg, -1, &e), &e);
    EXPECT_OK(side_recv(r.side, RAW_WAIT_MS, &msg, &fd, &e), &e);
    EXPECT(msg.type == SIDE_ERROR && msg.status == SHD_ENOENT && fd < 0);
    raw_close(&r);
    trainer_step();
    trainer_stop(1);
}

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
    uint64_t seed = 20261121;
    printf("seed %" PRIu64 "\n", seed);
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
