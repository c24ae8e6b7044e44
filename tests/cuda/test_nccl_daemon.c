/* What a daemon answers to requests of the NCCL path that are wrong, broken off or doubled; by hand
 * (hand_worker.h), on the shims of tests/cuda: nothing here ran on hardware, nor by NCCL. */
#include <sys/wait.h>

#include "proto/spec/spec_json.h"
#include "tests/cuda/hand_worker.h"
#include "tests/lib/child.h"
#include "tests/lib/fixture.h"

static struct fixture daemons;
static _Atomic int *under_way; /* shared: there is something to wait for */

static const char json[] =
    "{\"name\":\"toy\",\"seed\":3,\"micro_batches\":2,\"optimizer\":{\"kind\":\"sgd\"},\"units\":["
    "{\"name\":\"a\",\"tensors\":[{\"name\":\"a.w\",\"shape\":[300,70]}]},"
    "{\"name\":\"z\",\"tensors\":[{\"name\":\"z.w\",\"shape\":[33]}]}]}";

/* Owner `owner` of two, without an inbox or with one. */
static void by_hand_open(struct hand *h, const char *device, uint32_t owner, uint32_t slots)
{
    struct shd_err e;
    struct spec *spec;
    if (spec_parse(json, strlen(json), &spec, &e) != SHD_OK)
        HAND_DIE("%s", e.text);
    h->dir = daemons.dir;
    h->device = device;
    h->owner = owner;
    h->owners = 2;
    h->spec = spec;
    h->json = json;
    h->slots = slots;
    h->side = -1;
    h->kern = hand_device(device);
    hand_open(h);
}

static void by_hand_close(struct hand *h)
{
    hand_close(h);
    h->kern->ops->free(h->kern);
    spec_free((struct spec *)(uintptr_t)h->spec);
}

static void expect(struct hand *h, struct wire_request req, int status, const char *text)
{
    struct wire_reply reply;
    if (!hand_ask(h, &req, &reply))
        HAND_DIE("%s hung up", h->device);
    if (reply.status != status || strstr(reply.text, text) == NULL)
        HAND_DIE("request %d: %s '%s', not %s '%s'", (int)req.type, status_name(reply.status),
                 reply.text, status_name(status), text);
}

static void send_only(struct hand *h, struct wire_request req)
{
    static uint8_t frame[4096];
    struct shd_err e;
    size_t bytes;
    req.seq = ++h->seq;
    req.session = h->session;
    if (wire_request_pack(&req, frame, sizeof frame, &bytes, &e) != SHD_OK ||
        zmq_send(h->dealer, frame, bytes, 0) != (int)bytes)
        HAND_DIE("send");
}

static struct wire_request join_of(const struct hand *h)
{
    struct wire_request req = { .type = WIRE_JOIN, .join = { .model = h->model } };
    memset(req.join.down, 'x', 40); /* the address of nobody */
    memset(req.join.up, 'y', 40);
    return req;
}

static struct wire_request fetch_of(const struct hand *h, uint32_t unit)
{
    return (struct wire_request){ .type = WIRE_FETCH,
                                  .fetch = { .model = h->model, .unit = unit, .turn = 1 } };
}

static struct wire_request return_of(const struct hand *h, uint32_t unit)
{
    return (struct wire_request){
        .type = WIRE_RETURN,
        .return_grad = { .model = h->model, .unit = unit, .dtype = SHD_F32, .turn = 1 }
    };
}

static void wrong(void)
{
    static struct hand h, host;
    by_hand_open(&h, "gpu0", 0, 1);
    by_hand_open(&host, "cpu0", 1, 0);
    expect(&host, join_of(&host), SHD_ENOTSUP, "device cpu0 is host memory");
    expect(&h, fetch_of(&h, 0), SHD_EINVAL, "has not joined model 'toy'");
    expect(&h, return_of(&h, 0), SHD_EINVAL, "has not joined model 'toy'");
    expect(&h, fetch_of(&h, 2), SHD_ERANGE, "unit 2 of a model with 2");
    struct wire_request req = join_of(&h);
    req.join.model = 7;
    expect(&h, req, SHD_ENOENT, "handle 7");
    /* One that never comes about; then everything else is as it was. */
    send_only(&h, join_of(&h));
    expect(&h, fetch_of(&h, 2), SHD_ERANGE, "unit 2");
    req = return_of(&h, 0);
    req.return_grad.none = true;
    expect(&h, req, SHD_EINVAL, "nothing to be sent");
    req = return_of(&h, 0);
    req.return_grad.turn = 0;
    expect(&h, req, SHD_OK, "");
    by_hand_close(&h);
    by_hand_close(&host);
}

/* Joins and turns that wait for ever end with the one who asked, or with the next Join. */
static void broken_off(void)
{
    static struct hand h;
    for (int i = 0; i < 5; i++) {
        memset(&h, 0, sizeof h);
        by_hand_open(&h, "gpu0", 0, 1);
        send_only(&h, join_of(&h));
        struct wire_request req = return_of(&h, 0);
        req.return_grad.turn = 2;
        send_only(&h, req); /* takes the slot, and waits */
        send_only(&h, fetch_of(&h, 0));
        if (i % 2 != 0)
            sleep_ms(20);
        send_only(&h, join_of(&h));
        struct wire_reply reply = { .status = SHD_OK };
        for (int gone = 0; gone < 3; gone++) /* the first Join, the Return, the Fetch */
            if (!hand_recv(&h, &reply) || reply.status != SHD_EGONE)
                HAND_DIE("reply %d: %s", gone, status_name(reply.status));
        send_only(&h, fetch_of(&h, 0));
        by_hand_close(&h);
    }
    memset(&h, 0, sizeof h);
    by_hand_open(&h, "gpu0", 0, 1);
    struct wire_request req = return_of(&h, 0);
    req.return_grad.turn = 0;
    expect(&h, req, SHD_OK, ""); /* it serves as before */
    send_only(&h, join_of(&h));
    by_hand_close(&h);
}

static pid_t start(void (*run)(void))
{
    const pid_t pid = test_fork();
    if (pid > 0)
        return pid;
    alarm((unsigned)(2 * TEST_HANG_MS / 1000));
    run();
    _exit(0);
}

static void in_child(void (*run)(void))
{
    const pid_t pid = start(run);
    expect_well(pid);
}

TEST(wrong_requests_are_refused_with_their_values)
{
    daemons.devices[0] = "gpu0";
    daemons.devices[1] = "cpu0";
    fixture_start(&daemons, 2, NULL);
    in_child(wrong);
    fixture_stop(&daemons); /* which says so if a daemon does not end in order */
}

TEST(what_waits_for_ever_ends_with_its_session)
{
    daemons.devices[0] = "gpu0";
    daemons.devices[1] = "cpu0";
    fixture_start(&daemons, 2, NULL);
    in_child(broken_off);
    fixture_stop(&daemons);
}

/* The daemon ends while a join and turns are under way. */
static void left_waiting(void)
{
    static struct hand h;
    by_hand_open(&h, "gpu0", 0, 1);
    send_only(&h, join_of(&h));
    send_only(&h, return_of(&h, 0));
    send_only(&h, fetch_of(&h, 0));
    *under_way = 1;
    struct wire_reply reply;
    while (hand_recv(&h, &reply))
        continue;
    by_hand_close(&h);
}

static char text[2][65536]; /* of /status and /metrics */

static bool shown(const char *want)
{
    static const char *const paths[] = { "/status", "/metrics" };
    for (int i = 0; i < 2; i++) {
        struct http_reply r = http_get(&daemons, 0, paths[i]);
        snprintf(text[i], sizeof text[i], "%s", r.body);
        free(r.text);
    }
    return strstr(text[0], want) != NULL;
}

/* The daemon has begun to join, and waits for the worker; the turns behind it are nobody's yet. */
static void expect_join_shown(pid_t pid)
{
    char want[64];
    snprintf(want, sizeof want, " s for hand (pid %d, ", (int)pid);
    EXPECT_SOON(shown(want));
    EXPECT_HAS(text[0], "\"kind\":\"join\"");
    EXPECT_HAS(text[0], want);
    EXPECT_HAS(text[0], ") to connect by NCCL; given up after 60 s\"");
    EXPECT(strstr(text[0], "\"transfer\"") == NULL);
    EXPECT_HAS(text[1], "shardd_wait_seconds{device=\"gpu0\",kind=\"join\"} 0.");
    EXPECT_HAS(text[1], "kind=\"transfer\"} 0.000000");
}

TEST(a_daemon_ends_whatever_is_under_way)
{
    daemons.devices[0] = "gpu0";
    daemons.devices[1] = "cpu0";
    fixture_start(&daemons, 2, NULL);
    under_way = mmap(NULL, sizeof *under_way, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                     -1, 0);
    CHECK(under_way != MAP_FAILED);
    const pid_t pid = start(left_waiting);
    while (*under_way == 0)
        sleep_ms(1);
    expect_join_shown(pid);
    fixture_stop(&daemons);
    expect_well(pid);
    munmap((void *)under_way, sizeof *under_way);
}

TEST_MAIN()
