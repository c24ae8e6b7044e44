/* A network that loses, doubles, delays and reorders: a proxy between real clients and real daemons
 * passes their messages on, seeded. Each request must still count exactly once: the digest at the
 * end is that of undisturbed training in one process.
 *
 * The proxy is a process with a directory of its own: DEVICE.zmq is the proxy's, DEVICE.sock a link
 * to the daemon's, whose side channel is a socket of this host and loses nothing. */
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <zmq.h>

#include "proto/base/clock.h"
#include "tests/lib/client_remote.h"

#define DAEMONS     2
#define CLIENTS_MAX 8u
#define PENDING_MAX 4096u
#define PARTS_MAX   4u

struct odds { /* one in so many messages; 0: never */
    uint32_t drop, twice, late;
    uint32_t late_ms_max;
    bool first_reply_late; /* that to Hello, so that the second one's overtakes it */
};

struct counts { /* shared with the proxy */
    _Atomic uint64_t passed, dropped, doubled, late;
};
static struct counts *counts;

struct client { /* of one daemon */
    uint8_t identity[64];
    size_t identity_bytes;
    void *dealer; /* its connection to the daemon */
    uint64_t replies;
};

struct lane { /* one daemon's */
    void *front;
    struct client clients[CLIENTS_MAX];
    uint32_t client_count;
    char endpoint[400];
};

struct message {
    zmq_msg_t parts[PARTS_MAX]; /* without identity */
    uint32_t part_count;
    uint64_t hold_ns, due_ns;
    struct lane *lane;
    uint32_t client;
    bool to_daemon;
};

struct proxy {
    void *zmq;
    struct lane lanes[DAEMONS];
    struct message pending[PENDING_MAX]; /* in order of arrival */
    uint32_t pending_count;
    struct odds odds;
    uint64_t rng;
};

static bool one_in(struct proxy *p, uint32_t n)
{
    return n > 0 && test_random(&p->rng) % n == 0;
}

static void enqueue(struct proxy *p, struct message *m)
{
    CHECK(p->pending_count < PENDING_MAX);
    m->due_ns = clock_now_ns() + m->hold_ns;
    if (one_in(p, p->odds.late)) {
        m->due_ns += test_random(&p->rng) % (p->odds.late_ms_max * NS_PER_MS);
        counts->late++;
    }
    p->pending[p->pending_count++] = *m;
}

static void message_close(struct message *m)
{
    for (uint32_t i = 0; i < m->part_count; i++)
        zmq_msg_close(&m->parts[i]);
}

static struct message copy_of(struct message *m)
{
    struct message copy = *m;
    for (uint32_t i = 0; i < m->part_count; i++) {
        zmq_msg_init(&copy.parts[i]);
        CHECK(zmq_msg_copy(&copy.parts[i], &m->parts[i]) == 0);
    }
    return copy;
}

/* What becomes of a message that has arrived. */
static void meet_fate(struct proxy *p, struct message *m)
{
    const bool first = !m->to_daemon && m->lane->clients[m->client].replies++ == 0;
    m->hold_ns = first && p->odds.first_reply_late ? 50 * NS_PER_MS : 0;
    if (one_in(p, p->odds.drop)) {
        counts->dropped++;
        message_close(m);
        return;
    }
    if (one_in(p, p->odds.twice)) {
        struct message copy = copy_of(m);
        enqueue(p, &copy);
        counts->doubled++;
    }
    enqueue(p, m);
    counts->passed++;
}

/* The client with this identity; a new one gets a connection of its own. */
static uint32_t client_of(struct proxy *p, struct lane *lane, zmq_msg_t *identity)
{
    const size_t bytes = zmq_msg_size(identity);
    for (uint32_t i = 0; i < lane->client_count; i++)
        if (lane->clients[i].identity_bytes == bytes &&
            memcmp(lane->clients[i].identity, zmq_msg_data(identity), bytes) == 0)
            return i;
    CHECK(lane->client_count < CLIENTS_MAX && bytes <= sizeof lane->clients[0].identity);
    struct client *c = &lane->clients[lane->client_count];
    const int none = 0;
    memcpy(c->identity, zmq_msg_data(identity), bytes);
    c->identity_bytes = bytes;
    c->dealer = zmq_socket(p->zmq, ZMQ_DEALER);
    CHECK(c->dealer != NULL && zmq_setsockopt(c->dealer, ZMQ_LINGER, &none, sizeof none) == 0);
    CHECK(zmq_connect(c->dealer, lane->endpoint) == 0);
    return lane->client_count++;
}

/* All parts of one message that waits at socket; false: none. */
static bool take(struct proxy *p, void *socket, struct message *m)
{
    zmq_msg_t identity;
    m->part_count = 0;
    zmq_msg_init(&identity);
    if (m->to_daemon) {
        if (zmq_msg_recv(&identity, socket, ZMQ_DONTWAIT) < 0)
            return false;
        m->client = client_of(p, m->lane, &identity);
        zmq_msg_close(&identity);
    }
    do {
        CHECK(m->part_count < PARTS_MAX);
        zmq_msg_init(&m->parts[m->part_count]);
        if (zmq_msg_recv(&m->parts[m->part_count], socket, ZMQ_DONTWAIT) < 0)
            return false;
        m->part_count++;
    } while (zmq_msg_more(&m->parts[m->part_count - 1]) != 0);
    return true;
}

static void pass_on(struct message *m)
{
    struct client *c = &m->lane->clients[m->client];
    void *socket = m->to_daemon ? c->dealer : m->lane->front;
    if (!m->to_daemon)
        zmq_send(socket, c->identity, c->identity_bytes, ZMQ_SNDMORE | ZMQ_DONTWAIT);
    for (uint32_t i = 0; i < m->part_count; i++)
        zmq_msg_send(&m->parts[i], socket,
                     ZMQ_DONTWAIT | (i + 1 < m->part_count ? ZMQ_SNDMORE : 0));
    message_close(m); /* who is gone, loses it */
}

/* Everything due; returns ms to the next one, at most 20. */
static long flush(struct proxy *p)
{
    uint32_t left = 0;
    uint64_t next_ns = UINT64_C(20) * NS_PER_MS;
    const uint64_t now = clock_now_ns();
    for (uint32_t i = 0; i < p->pending_count; i++) {
        struct message *m = &p->pending[i];
        if (m->due_ns <= now) {
            pass_on(m);
            continue;
        }
        if (m->due_ns - now < next_ns)
            next_ns = m->due_ns - now;
        p->pending[left++] = *m;
    }
    p->pending_count = left;
    return (long)(next_ns / NS_PER_MS) + 1;
}

static void poll_once(struct proxy *p, long timeout_ms)
{
    zmq_pollitem_t items[DAEMONS * (CLIENTS_MAX + 1)];
    int count = 0;
    for (int l = 0; l < DAEMONS; l++) {
        items[count++] = (zmq_pollitem_t){ .socket = p->lanes[l].front, .events = ZMQ_POLLIN };
        for (uint32_t c = 0; c < p->lanes[l].client_count; c++)
            items[count++] = (zmq_pollitem_t){ .socket = p->lanes[l].clients[c].dealer,
                                               .events = ZMQ_POLLIN };
    }
    CHECK(zmq_poll(items, count, timeout_ms) >= 0);
    for (int l = 0; l < DAEMONS; l++) {
        struct lane *lane = &p->lanes[l];
        struct message m = { .lane = lane, .to_daemon = true };
        while (take(p, lane->front, &m))
            meet_fate(p, &m);
        m.to_daemon = false;
        for (m.client = 0; m.client < lane->client_count; m.client++)
            while (take(p, lane->clients[m.client].dealer, &m))
                meet_fate(p, &m);
    }
}

__attribute__((noreturn)) static void be_proxy(const char *dir, struct odds odds, uint64_t seed)
{
    static struct proxy p;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    p = (struct proxy){ .zmq = zmq_ctx_new(), .odds = odds, .rng = seed };
    for (int l = 0; l < DAEMONS; l++) {
        char endpoint[400];
        p.lanes[l].front = zmq_socket(p.zmq, ZMQ_ROUTER);
        snprintf(endpoint, sizeof endpoint, "ipc://%s/cpu%d.zmq", dir, l);
        snprintf(p.lanes[l].endpoint, sizeof p.lanes[l].endpoint, "ipc://%s/cpu%d.zmq", daemons.dir,
                 l);
        CHECK(zmq_bind(p.lanes[l].front, endpoint) == 0);
    }
    for (;;)
        poll_once(&p, flush(&p));
}

/* -- The test ------------------------------------------------------------------------------------
 */

struct network {
    char dir[280];
    char address[320];
    pid_t proxy;
};

static void network_up(struct network *n, struct odds odds, uint64_t seed)
{
    char at[340], to[340];
    fixture_start(&daemons, DAEMONS, NULL);
    counts = mmap(NULL, sizeof *counts, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(counts != MAP_FAILED);
    snprintf(n->dir, sizeof n->dir, "%s-net", daemons.dir);
    CHECK(mkdir(n->dir, 0700) == 0);
    snprintf(n->address, sizeof n->address, "%s?cpu0,cpu1", n->dir);
    for (int l = 0; l < DAEMONS; l++) {
        snprintf(at, sizeof at, "%s/cpu%d.sock", n->dir, l);
        snprintf(to, sizeof to, "%s/cpu%d.sock", daemons.dir, l);
        CHECK(symlink(to, at) == 0);
    }
    n->proxy = fork();
    CHECK(n->proxy >= 0);
    if (n->proxy == 0)
        be_proxy(n->dir, odds, seed);
}

static void network_down(struct network *n)
{
    char path[340];
    kill(n->proxy, SIGKILL);
    waitpid(n->proxy, NULL, 0);
    for (int l = 0; l < DAEMONS; l++) {
        snprintf(path, sizeof path, "%s/cpu%d.sock", n->dir, l);
        unlink(path);
        snprintf(path, sizeof path, "%s/cpu%d.zmq", n->dir, l);
        unlink(path);
    }
    CHECK(rmdir(n->dir) == 0);
    printf("passed %" PRIu64 ", dropped %" PRIu64 ", doubled %" PRIu64 ", late %" PRIu64 "\n",
           counts->passed, counts->dropped, counts->doubled, counts->late);
    fixture_stop(&daemons);
}

/* Micro-batches worker, worker + workers, ... to the end; 0: with the wanted digest. */
static int train(const char *address, uint32_t worker, uint32_t workers, uint32_t steps,
                 const char *want)
{
    uint32_t micros[TOY_MICROS], count = 0;
    char got[65] = "";
    struct shd_err e = { 0 };
    shd_session *s = NULL;
    shd_model *m;
    for (uint32_t i = worker; i < TOY_MICROS; i += workers)
        micros[count++] = i;
    int r = try_connect(address, TEST_HANG_MS, &s, &e);
    if (r == SHD_OK)
        r = shd_model_open(s, toy_spec("f32", TOY_ADAMW), &m, &e);
    while (r == SHD_OK && shd_step(m) < steps)
        r = toy_step(m, micros, count, NULL, &e);
    if (r == SHD_OK)
        r = shd_digest(m, got, NULL, &e);
    if (r != SHD_OK)
        fprintf(stderr, "worker %u: %s\n", worker, e.text);
    if (s != NULL)
        shd_close(s);
    return r != SHD_OK ? 1 : strcmp(got, want) != 0 ? 2 : 0;
}

static void train_over(struct odds odds, uint64_t seed, uint32_t workers, uint32_t steps)
{
    struct network n;
    char want[65];
    pid_t pids[4];
    int status[4];
    seed = test_seed(seed);
    setenv("SHD_RING", "off", 1); /* what goes by a ring meets no network */
    toy_reference(toy_spec("f32", TOY_ADAMW), steps, want);
    network_up(&n, odds, seed);
    for (uint32_t w = 0; w < workers; w++) {
        pids[w] = fork();
        CHECK(pids[w] >= 0);
        if (pids[w] == 0)
            _exit(train(n.address, w, workers, steps, want));
    }
    for (uint32_t w = 0; w < workers; w++)
        CHECK(waitpid(pids[w], &status[w], 0) == pids[w]);
    const bool happened = (odds.drop == 0 || counts->dropped > 0) &&
                          (odds.twice == 0 || counts->doubled > 0) &&
                          (odds.late == 0 || counts->late > 0);
    network_down(&n);
    for (uint32_t w = 0; w < workers; w++)
        EXPECT_EQ(status[w], 0);
    EXPECT(happened);
}

TEST(doubled_messages_count_once)
{
    train_over((struct odds){ .twice = 2 }, 0x2f1, 2, 20);
}

/* Hello comes before there is a session that knows repeats. */
TEST(hello_doubled_is_welcome_twice)
{
    train_over((struct odds){ .twice = 1, .first_reply_late = true }, 0x2f0, 1, 1);
}

TEST(reordered_messages_give_the_same_bits)
{
    train_over((struct odds){ .twice = 4, .late = 2, .late_ms_max = 5 }, 0x2f2, 2, 10);
}

/* Each loss costs its sender two seconds of waiting. */
TEST(lost_messages_are_sent_again_and_count_once)
{
    train_over((struct odds){ .drop = 60, .twice = 8, .late = 4, .late_ms_max = 10 }, 0x2f3, 2, 5);
}

TEST_MAIN()
