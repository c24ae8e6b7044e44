/* Bad input to a real daemon over real sockets: each gets a clear error, costs its sender at most
 * its own session, and a trainer attached all along goes on and ends with the right step. */
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <zmq.h>

#include "daemon/base/state.h"
#include "daemon/daemon.h"
#include "daemon/net/session.h"
#include "daemon/net/zmtp.h"
#include "proto/share/fdpass.h"
#include "tests/lib/child.h"
#include "tests/lib/fixture.h"
#include "tests/lib/raw_client.h"

#define PLAIN_MAX 1000u /* connections that say nothing */

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
    const struct wire_request status = { .type = WIRE_STATUS,
                                         .seq = r.seq + 1,
                                         .session = r.session };
    uint8_t frame[256];
    size_t bytes;
    struct shd_err e;
    char byte;
    EXPECT_OK(wire_request_pack(&status, frame, sizeof frame, &bytes, &e), &e);
    EXPECT_EQ(recv(r.side, &byte, 1, 0), 0); /* it hung up, and says no more than that: */
    raw_send(&r, frame, bytes);
    raw_expect_silence(&r, 300);
    r.session += UINT64_C(1) << 32; /* one that never was */
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
    trainer_step(); /* it has its ring, too */
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
    trainer_stop(2);
}

/* -- Descriptors and places ---------------------------------------------------------------------
 */

/* A trainer's daemon that has so few that (96 - 48) / 4 sessions are what it takes. */
static void few_descriptors(void)
{
    struct rlimit limit, low;
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    low = (struct rlimit){ 96, limit.rlim_max };
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
    trainer_start();
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

static bool many_descriptors_here(void)
{
    struct rlimit limit;
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = limit.rlim_max;
    return limit.rlim_max >= 2 * PLAIN_MAX && setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

TEST(sessions_beyond_what_descriptors_allow_are_refused_with_the_numbers)
{
    static struct raw sessions[11];
    struct wire_reply reply;
    struct shd_err e;
    struct side_msg msg;
    char path[300];
    int fd, passed;
    few_descriptors(); /* and one session */
    for (int i = 0; i < 11; i++) {
        raw_open(&sessions[i]);
        EXPECT_STATUS(raw_hello(&sessions[i], SHD_PROTOCOL, WIRE_READER, &reply), SHD_OK);
    }
    snprintf(path, sizeof path, "%s/cpu0.sock", fixture.dir);
    EXPECT_OK(side_connect(path, &fd, &e), &e);
    EXPECT_OK(side_recv(fd, RAW_WAIT_MS, &msg, &passed, &e), &e);
    EXPECT_EQ(msg.type, SIDE_ERROR);
    EXPECT_EQ(msg.status, SHD_EBUSY);
    EXPECT_HAS(msg.text, "too many sessions (12 of 12); raise LimitNOFILE=");
    close(fd);
    trainer_step();
    for (int i = 0; i < 11; i++)
        raw_close(&sessions[i]);
    trainer_stop(1);
}

/* More than one user may have waiting: each newcomer takes the place of its oldest. */
TEST(sessions_that_say_no_hello_are_in_nobodys_way)
{
    static int fds[600];
    static struct raw r;
    struct wire_reply reply;
    struct shd_err e;
    char path[300];
    struct side_msg msg;
    int passed;
    if (!many_descriptors_here())
        SKIP("needs %u descriptors", 2 * PLAIN_MAX);
    trainer_start();
    snprintf(path, sizeof path, "%s/cpu0.sock", fixture.dir);
    for (size_t i = 0; i < ARRAY_SIZE(fds); i++) {
        EXPECT_OK(side_connect(path, &fds[i], &e), &e);
        EXPECT_OK(side_recv(fds[i], RAW_WAIT_MS, &msg, &passed, &e), &e);
        EXPECT_EQ(msg.type, SIDE_WELCOME);
    }
    trainer_step();
    raw_open(&r);
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_READER, &reply), SHD_OK);
    raw_close(&r);
    for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
        close(fds[i]);
    trainer_step();
    trainer_stop(2);
}

static int plain_connect(const char *suffix)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    snprintf(a.sun_path, sizeof a.sun_path, "%.90s/cpu0.%s", fixture.dir, suffix);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT(fd >= 0 && connect(fd, (const struct sockaddr *)&a, sizeof a) == 0);
    return fd;
}

/* ZeroMQ's own socket would abort() the daemon as the descriptors run out. */
TEST(connections_without_end_cost_a_daemon_nothing)
{
    static int fds[PLAIN_MAX];
    static struct raw r;
    struct wire_reply reply;
    if (!many_descriptors_here())
        SKIP("needs %u descriptors", 2 * PLAIN_MAX);
    few_descriptors();
    for (size_t i = 0; i < ARRAY_SIZE(fds); i++) {
        fds[i] = plain_connect(i % 8 == 0 ? "status" : "zmq");
        if (i % 500 == 0)
            trainer_step();
    }
    raw_open(&r);
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    raw_attach(&r, 2); /* descriptors for its inbox are there, too */
    raw_close(&r);
    for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
        close(fds[i]);
    trainer_step();
    trainer_stop(PLAIN_MAX / 500 + 1);
}

static void expect_hung_up(int fd)
{
    uint8_t bytes[256];
    struct pollfd p = { .fd = fd, .events = POLLIN };
    ssize_t n;
    do {
        EXPECT_EQ(poll(&p, 1, RAW_WAIT_MS), 1);
        n = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
    } while (n > 0);
    EXPECT(n == 0 || errno == ECONNRESET);
    close(fd);
}

TEST(connection_that_says_no_hello_is_hung_up_on)
{
    struct shd_err e;
    char path[300];
    int fd;
    trainer_start();
    const int plain = plain_connect("zmq"), half = plain_connect("zmq");
    EXPECT_EQ(send(half, "\xff", 1, 0), 1);
    snprintf(path, sizeof path, "%s/cpu0.sock", fixture.dir);
    EXPECT_OK(side_connect(path, &fd, &e), &e);
    trainer_step();
    expect_hung_up(plain);
    expect_hung_up(half);
    expect_hung_up(fd);
    trainer_step(); /* one that has said it stays */
    trainer_stop(2);
}

/* -- ZMTP by hand -------------------------------------------------------------------------------
 */

static void say_opening(int fd, size_t bytes_each)
{
    static const uint8_t dealer[6] = { 'D', 'E', 'A', 'L', 'E', 'R' };
    uint8_t opening[ZMTP_OPENING_BYTES];
    zmtp_opening(opening);
    memcpy(opening + sizeof opening - sizeof dealer, dealer, sizeof dealer);
    for (size_t i = 0; i < sizeof opening; i += bytes_each)
        EXPECT_EQ(send(fd, opening + i, bytes_each, MSG_NOSIGNAL), (ssize_t)bytes_each);
}

/* A session of r, whose requests go by a plain socket, byte by byte. */
static int plain_session(struct raw *r)
{
    struct wire_request hello = {
        .type = WIRE_HELLO,
        .hello = { .protocol = SHD_PROTOCOL, .role = WIRE_READER, .name = "plain" }
    };
    struct wire_reply reply;
    struct shd_err e;
    uint8_t frame[512];
    raw_open(r);
    const int fd = plain_connect("zmq");
    say_opening(fd, 1);
    memcpy(hello.hello.token, r->token, sizeof r->token);
    const size_t bytes = raw_pack(r, &hello, frame + 2, sizeof frame - 2);
    frame[0] = 0;
    frame[1] = (uint8_t)bytes;
    for (size_t i = 0; i < bytes + 2; i++)
        EXPECT_EQ(send(fd, frame + i, 1, MSG_NOSIGNAL), 1);
    /* The daemon's opening has 94 bytes, then comes a header of 2 and the welcome. */
    EXPECT_EQ(recv(fd, frame, 96, MSG_WAITALL), 96);
    EXPECT(memcmp(frame + 88, "ROUTER", 6) == 0);
    const size_t answer = frame[95];
    EXPECT_EQ(recv(fd, frame, answer, MSG_WAITALL), (ssize_t)answer);
    r->arena = (struct wire_arena){ .base = r->memory, .bytes = sizeof r->memory };
    EXPECT_OK(wire_reply_unpack(frame, answer, &r->arena, &reply, &e), &e);
    EXPECT_EQ(reply.status, SHD_OK);
    r->session = reply.welcome.session;
    return fd;
}

/* Nothing of it is read, until the daemon takes no more or has hung up. What it keeps is bounded,
 * and a session that reads later gets its answers. */
TEST(replies_that_are_not_read_are_bounded_in_bytes)
{
    static struct raw r;
    uint8_t frame[64], answers[4096];
    trainer_start();
    const long before_kib = rss_kib(fixture.pids[0]);
    const int fd = plain_session(&r);
    const struct pollfd writable = { .fd = fd, .events = POLLOUT };
    uint32_t sent = 0;
    for (struct pollfd p = writable; poll(&p, 1, 200) > 0 && (p.revents & POLLHUP) == 0;
         p = writable) {
        struct wire_request req = { .type = WIRE_STATUS };
        const size_t bytes = raw_pack(&r, &req, frame + 2, sizeof frame - 2);
        frame[0] = 0;
        frame[1] = (uint8_t)bytes;
        EXPECT_EQ(send(fd, frame, bytes + 2, MSG_NOSIGNAL), (ssize_t)bytes + 2);
        EXPECT(++sent < 1000000);
    }
    trainer_step();
    EXPECT(TEST_SANITIZED || rss_kib(fixture.pids[0]) - before_kib < 8 * 1024);
    size_t got = 0;
    for (ssize_t n = 1; n > 0 && got < 256u * sent; got += (size_t)n)
        n = recv(fd, answers, sizeof answers, 0);
    EXPECT(got >= 256u * sent); /* it went on as they were read */
    close(fd);
    raw_close(&r);
    trainer_step();
    trainer_stop(2);
}

TEST(message_that_is_too_large_is_not_read)
{
    static struct raw r;
    uint8_t large[] = { 2, 0, 0, 0, 0, 0, 0x10, 0, 1 };
    trainer_start();
    int fd = plain_session(&r);
    EXPECT_EQ(send(fd, large, sizeof large, MSG_NOSIGNAL), (ssize_t)sizeof large);
    expect_hung_up(fd);
    raw_close(&r);
    fd = plain_connect("zmq"); /* without a session much less is too large */
    say_opening(fd, ZMTP_OPENING_BYTES);
    large[6] = 0;
    large[7] = 0x10;
    EXPECT_EQ(send(fd, large, sizeof large, MSG_NOSIGNAL), (ssize_t)sizeof large);
    expect_hung_up(fd);
    trainer_step();
    trainer_stop(1);
}

/* A session may send more than who has none: what is begun when it ends is held to that. */
TEST(message_begun_in_a_session_that_ends_is_too_large)
{
    static struct raw r;
    static uint8_t large[100000] = { 2, 0, 0, 0, 0, 0, 1, 0x80, 0 };
    struct wire_reply reply;
    trainer_start();
    const int fd = plain_session(&r);
    EXPECT_EQ(send(fd, large, 200, MSG_NOSIGNAL), 200);
    trainer_step(); /* the daemon has read it */
    raw_close(&r);
    trainer_step();                                          /* and has ended the session */
    send(fd, large + 200, sizeof large - 200, MSG_NOSIGNAL); /* or was hung up on */
    expect_hung_up(fd);
    raw_open(&r);
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_READER, &reply), SHD_OK);
    raw_close(&r);
    trainer_step();
    trainer_stop(3);
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
    expect_well(child);
    trainer_step();
    trainer_stop(1);
}

/* -- Two users -----------------------------------------------------------------------------------
 */

#define OTHER_USER 61234 /* and its group; 65534 would stand for any that is not known */
#define FLOOD      600   /* more than the 512 that a user may have waiting */

static bool is_hung_up(int fd, int wait_ms)
{
    struct pollfd p = { .fd = fd, .events = POLLRDHUP };
    return poll(&p, 1, wait_ms) == 1;
}

/* As another user, a member of the directory's group: come in at both doors, say nothing, and see
 * the oldest hung up on. Its exit code; told tells us of it, and end when to end. */
static int flood(int told, int end)
{
    static int side[FLOOD], plain[FLOOD];
    char path[300], byte = 0;
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    struct shd_err e;
    snprintf(path, sizeof path, "%s/cpu0.sock", fixture.dir);
    snprintf(a.sun_path, sizeof a.sun_path, "%.90s/cpu0.zmq", fixture.dir);
    if (setgroups(0, NULL) != 0 || setgid(OTHER_USER) != 0 || setuid(OTHER_USER) != 0)
        return 1;
    for (int i = 0; i < FLOOD; i++) {
        struct side_msg msg;
        int passed;
        plain[i] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(plain[i], (const struct sockaddr *)&a, sizeof a) != 0 ||
            side_connect(path, &side[i], &e) != SHD_OK ||
            side_recv(side[i], RAW_WAIT_MS, &msg, &passed, &e) != SHD_OK ||
            msg.type != SIDE_WELCOME)
            return 2;
    }
    if (!is_hung_up(side[0], RAW_WAIT_MS) || !is_hung_up(plain[0], RAW_WAIT_MS))
        return 3;
    if (write(told, "", 1) != 1)
        return 4;
    return read(end, &byte, 1) == 0 ? 0 : 5;
}

/* Whoever floods pushes out its own: what we had waiting before it, and so is older, waits on. */
TEST(user_that_floods_both_doors_pushes_out_nobody_elses)
{
    static struct raw r;
    struct wire_reply reply;
    struct shd_err e;
    char path[300], byte;
    int told[2], end[2], ours, status;
    if (getuid() != 0)
        SKIP("needs root to become somebody else");
    if (!many_descriptors_here())
        SKIP("needs %u descriptors", 2 * PLAIN_MAX);
    trainer_start();
    EXPECT_EQ(chown(fixture.dir, (uid_t)-1, OTHER_USER), 0);
    EXPECT_EQ(chmod(fixture.dir, 0750), 0);
    for (size_t i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/cpu0.%s", fixture.dir, i == 0 ? "zmq" : "sock");
        EXPECT_EQ(chown(path, (uid_t)-1, OTHER_USER), 0);
    }
    CHECK(pipe2(told, O_CLOEXEC) == 0 && pipe2(end, O_CLOEXEC) == 0);
    const uint64_t since_ms = test_now_ms();
    const int plain = plain_connect("zmq");
    EXPECT_OK(side_connect(path, &ours, &e), &e);
    fflush(NULL);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        close(end[1]);
        _exit(flood(told[1], end[0]));
    }
    close(told[1]);
    EXPECT_EQ(read(told[0], &byte, 1), 1);
    const bool kept = !is_hung_up(plain, 0) && !is_hung_up(ours, 0);
    EXPECT(kept ||
           test_now_ms() - since_ms >= 4500); /* at 5 s both have waited too long for a Hello */
    raw_open(&r);
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_READER, &reply), SHD_OK);
    raw_close(&r);
    trainer_step();
    close(end[1]);
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 0);
    close(end[0]);
    close(told[0]);
    close(plain);
    close(ours);
    trainer_stop(1);
}

/* A session that calls itself so; what its Hello came to. */
static int hello_as(const char *name)
{
    static struct raw r;
    struct wire_reply reply;
    struct wire_request req = {
        .type = WIRE_HELLO,
        .hello = { .protocol = SHD_PROTOCOL, .role = WIRE_TRAINER, .name = name }
    };
    raw_open(&r);
    memcpy(req.hello.token, r.token, sizeof r.token);
    const int status = raw_ask(&r, req, &reply);
    raw_close(&r);
    return status;
}

/* All of it is printable, so it is a name; in the log it is one value. */
TEST(client_adds_nothing_to_the_log_by_its_name)
{
    static char log[64 * 1024];
    FILE *file = tmpfile();
    const int terminal = dup(STDERR_FILENO);
    const char *verbose = getenv("TEST_VERBOSE");
    CHECK(file != NULL && terminal >= 0 && dup2(fileno(file), STDERR_FILENO) >= 0);
    setenv("TEST_VERBOSE", "1", 1);
    trainer_start();
    CHECK(dup2(terminal, STDERR_FILENO) >= 0);
    if (verbose == NULL)
        unsetenv("TEST_VERBOSE");
    close(terminal);
    EXPECT_STATUS(hello_as("x uid=0 why=\"gone\" do=\"rm /\""), SHD_OK);
    trainer_step();
    trainer_stop(1);
    rewind(file);
    log[fread(log, 1, sizeof log - 1, file)] = '\0';
    fclose(file);
    EXPECT_HAS(log, " role=trainer name=\"x uid=0 why=\\\"gone\\\" do=\\\"rm /\\\"\"\n");
    EXPECT_HAS(log, " name=\"x uid=0 why=\\\"gone\\\" do=\\\"rm /\\\"\" why=\"it hung up\"\n");
}

TEST_MAIN()
