/* As many sessions as a daemon has places for: who trains goes on, one more is refused with the
 * numbers, places of those that went are taken anew, and all of it costs what docs/operations.md
 * says. */
#include <sys/resource.h>
#include <unistd.h>
#include <zmq.h>

#include "daemon/base/state.h"
#include "proto/share/fdpass.h"
#include "tests/lib/raw_client.h"

#define OTHERS      (SESSIONS_MAX - 1) /* the trainer has one */
#define DESCRIPTORS (4u * SESSIONS_MAX + 256u)
#define IDLE_KIB    16 /* of a session that has made one request, at most */

static int sides[OTHERS];
static void *context, *dealers[OTHERS];
static struct raw one; /* of them, in turns */

/* They share a context: a thread each would be too many. */
static void begin(uint32_t i)
{
    const int zero = 0, wait_ms = RAW_WAIT_MS;
    char name[WIRE_NAME_BYTES_MAX];
    struct wire_request hello = {
        .type = WIRE_HELLO, .hello = { .protocol = SHD_PROTOCOL, .role = WIRE_READER, .name = name }
    };
    struct wire_reply reply;
    struct side_msg msg;
    struct shd_err e;
    char path[300];
    int fd;
    snprintf(path, sizeof path, "%s/cpu0.sock", fixture.dir);
    EXPECT_OK(side_connect(path, &sides[i], &e), &e);
    EXPECT_OK(side_recv(sides[i], RAW_WAIT_MS, &msg, &fd, &e), &e);
    EXPECT_EQ(msg.type, SIDE_WELCOME);
    dealers[i] = zmq_socket(context, ZMQ_DEALER);
    CHECK(dealers[i] != NULL);
    zmq_setsockopt(dealers[i], ZMQ_LINGER, &zero, sizeof zero);
    zmq_setsockopt(dealers[i], ZMQ_RCVTIMEO, &wait_ms, sizeof wait_ms);
    snprintf(path, sizeof path, "ipc://%s/cpu0.zmq", fixture.dir);
    EXPECT_EQ(zmq_connect(dealers[i], path), 0);
    one.side = sides[i];
    one.dealer = dealers[i];
    one.session = one.seq = 0;
    memcpy(hello.hello.token, msg.token, sizeof msg.token);
    snprintf(name, sizeof name, "%0120u", i); /* all of them: more than a frame takes */
    EXPECT_STATUS(raw_ask(&one, hello, &reply), SHD_OK);
}

static void end(uint32_t i)
{
    close(sides[i]);
    zmq_close(dealers[i]);
}

static void expect_refused(void)
{
    struct side_msg msg;
    struct shd_err e;
    char path[300], text[64];
    int side, fd;
    snprintf(path, sizeof path, "%s/cpu0.sock", fixture.dir);
    EXPECT_OK(side_connect(path, &side, &e), &e);
    EXPECT_OK(side_recv(side, RAW_WAIT_MS, &msg, &fd, &e), &e);
    EXPECT_EQ(msg.type, SIDE_ERROR);
    EXPECT_EQ(msg.status, SHD_EBUSY);
    snprintf(text, sizeof text, "too many sessions (%u of %u), the most there", SESSIONS_MAX,
             SESSIONS_MAX);
    EXPECT_HAS(msg.text, text);
    close(side);
}

/* A list, or where that fits no frame its length. */
static uint32_t sessions_shown(void)
{
    static const char key[] = "\"sessions\":";
    struct shd_err e;
    char *json;
    EXPECT_OK(shd_status(trainer, 0, &json, &e), &e);
    const char *list = strstr(json, key);
    CHECK(list != NULL);
    uint32_t count = (uint32_t)strtoul(list + strlen(key), NULL, 10);
    for (const char *at = json; (at = strstr(at, "\"role\":")) != NULL; at++)
        count++;
    free(json);
    return count;
}

TEST(all_places_are_taken_and_who_trains_goes_on)
{
    struct rlimit files;
    CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
    if (files.rlim_max < DESCRIPTORS)
        SKIP("needs %u descriptors", DESCRIPTORS);
    files.rlim_cur = files.rlim_max;
    CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0);
    trainer_start();
    trainer_step();
    context = zmq_ctx_new();
    CHECK(zmq_ctx_set(context, ZMQ_MAX_SOCKETS, SESSIONS_MAX + 64) == 0);
    const long rss = rss_kib(fixture.pids[0]);
    for (uint32_t i = 0; i < OTHERS; i++)
        begin(i);
    const long more = rss_kib(fixture.pids[0]) - rss;
    printf("  %u sessions: %ld KiB more\n", OTHERS, more);
#ifndef __SANITIZE_ADDRESS__
    EXPECT(more < (long)OTHERS * IDLE_KIB);
#endif
    expect_refused();
    trainer_step();
    EXPECT_EQ(sessions_shown(), SESSIONS_MAX); /* without a list of them */
    for (uint32_t i = 0; i < OTHERS; i += 2)
        end(i);
    EXPECT_SOON(sessions_shown() == SESSIONS_MAX / 2);
    for (uint32_t i = 0; i < OTHERS; i += 2)
        begin(i);
    expect_refused();
    trainer_step();
    for (uint32_t i = 0; i < OTHERS; i++)
        end(i);
    EXPECT_SOON(sessions_shown() == 1);
    zmq_ctx_term(context);
    trainer_step();
    trainer_stop(4);
}

TEST_MAIN()
