/* Bytes between two relays, over real sockets: frames, who is let in, and peers that send nonsense,
 * nothing, or do not read; payloads within TLS, and by UCX where that is installed. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <openssl/ssl.h>

#include "daemon/relay/bulk.h"
#include "daemon/relay/bulk_ucx.h"
#include "proto/share/listen.h"
#include "tests/lib/test.h"

#define SHORT_NS (20 * NS_PER_S)

/* -- Two hosts in a directory of their own ----------------------------------------------------- */

struct hosts {
    char dir[64], file[96];
    int listener;
    struct bulk_keys *a, *b; /* a listens */
};

static struct hosts hosts;

/* A test of either way is a function, with a TEST each. */
#define TEST_OF_BOTH(id)                    \
    static void of_##id(enum cluster_bulk); \
    TEST(id)                                \
    {                                       \
        of_##id(CLUSTER_TCP);               \
    }                                       \
    TEST(id##_by_ucx)                       \
    {                                       \
        need_ucx();                         \
        of_##id(CLUSTER_UCX);               \
    }                                       \
    static void of_##id(enum cluster_bulk way)

static void need_ucx(void)
{
    struct shd_err e = { 0 };
    if (ucx_path.load(&e) != SHD_OK)
        SKIP("%s", e.text);
}

static void add_host(struct cluster *cluster, const char *name, const char *address)
{
    struct cluster_host host = { .name = "" };
    struct shd_err e = { 0 };
    char path[128];
    snprintf(host.name, sizeof host.name, "%s", name);
    snprintf(host.address, sizeof host.address, "%s", address);
    EXPECT_OK(cluster_key_path(hosts.file, name, path, sizeof path, &e), &e);
    unlink(path);
    EXPECT_OK(cluster_key_new(path, host.key, &e), &e);
    EXPECT_OK(cluster_add(cluster, &host, &e), &e);
}

/* The file says another way from now on; b's keys are made anew. */
static void change_way(enum cluster_bulk way)
{
    struct cluster cluster;
    struct shd_err e = { 0 };
    EXPECT_OK(cluster_load(hosts.file, &cluster, &e), &e);
    cluster.bulk = way;
    EXPECT_OK(cluster_save(hosts.file, &cluster, &e), &e);
    cluster_free(&cluster);
    bulk_keys_free(hosts.b);
    EXPECT_OK(bulk_keys_new(hosts.file, "b", &hosts.b, &e), &e);
}

static void make_hosts_of(enum cluster_bulk way)
{
    struct cluster cluster = { .bulk = way };
    struct shd_err e = { 0 };
    char name[LISTEN_NAME_BYTES];
    bool remote;
    signal(SIGPIPE, SIG_IGN);
    strcpy(hosts.dir, "/tmp/shd-bulk.XXXXXX");
    EXPECT(mkdtemp(hosts.dir) != NULL);
    snprintf(hosts.file, sizeof hosts.file, "%s/cluster.json", hosts.dir);
    EXPECT_OK(listen_tcp("127.0.0.1:0", 0, &hosts.listener, &remote, &e), &e);
    EXPECT_OK(listen_name(hosts.listener, name, &e), &e);
    add_host(&cluster, "a", name);
    add_host(&cluster, "b", "127.0.0.1:1");
    EXPECT_OK(cluster_save(hosts.file, &cluster, &e), &e);
    cluster_free(&cluster);
    EXPECT_OK(bulk_keys_new(hosts.file, "a", &hosts.a, &e), &e);
    EXPECT_OK(bulk_keys_new(hosts.file, "b", &hosts.b, &e), &e);
}

static void make_hosts(void)
{
    make_hosts_of(CLUSTER_TCP);
}

static void end_hosts(void)
{
    char command[128];
    bulk_keys_free(hosts.a);
    bulk_keys_free(hosts.b);
    close(hosts.listener);
    snprintf(command, sizeof command, "rm -r %s", hosts.dir);
    EXPECT_EQ(system(command), 0);
}

static int accept_one(void)
{
    struct pollfd p = { .fd = hosts.listener, .events = POLLIN };
    EXPECT(poll(&p, 1, (int)TEST_HANG_MS) == 1);
    const int fd = accept4(hosts.listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    EXPECT(fd >= 0);
    return fd;
}

struct dialer { /* a thread that dials as host b */
    pthread_t thread;
    const struct bulk_keys *keys;
    const char *name;
    struct bulk *bulk;
    struct shd_err e;
    int status;
};

static void *dial_main(void *arg)
{
    struct dialer *d = arg;
    d->status = bulk_dial(d->keys, d->name, SHORT_NS, &d->bulk, &d->e);
    return NULL;
}

/* Both ends; the acceptor's status is returned, its end is *ret_a (NULL: none). */
static int meet(struct dialer *d, struct bulk **ret_a, struct shd_err *e)
{
    *ret_a = NULL;
    EXPECT(pthread_create(&d->thread, NULL, dial_main, d) == 0);
    const int status = bulk_accept(hosts.a, accept_one(), SHORT_NS, ret_a, e);
    pthread_join(d->thread, NULL);
    return status;
}

/* -- Frames ------------------------------------------------------------------------------------ */

#define MEMORY_BYTES ((uint64_t)9 << 20) /* three pieces by UCX */

struct sink { /* takes frames of up to MEMORY_BYTES into memory */
    uint8_t *memory;
    struct bulk_head last;
    uint32_t frames;
};

static int sink_place(void *ctx, const struct bulk_head *head, void **ret_to, struct shd_err *e)
{
    struct sink *s = ctx;
    if (head->at > MEMORY_BYTES || head->bytes > MEMORY_BYTES - head->at)
        return err_set(e, SHD_ERANGE, "bytes outside the segment");
    *ret_to = s->memory + head->at;
    return SHD_OK;
}

static int sink_done(void *ctx, const struct bulk_head *head, void *payload, struct shd_err *e)
{
    struct sink *s = ctx;
    (void)payload;
    (void)e;
    s->last = *head;
    s->frames++;
    return SHD_OK;
}

static void sink_init(struct sink *s, struct bulk *bulk)
{
    const struct bulk_hooks hooks = { .place = sink_place, .done = sink_done, .ctx = s };
    *s = (struct sink){ .memory = calloc(1, MEMORY_BYTES) };
    bulk_set_hooks(bulk, &hooks);
}

static int receive_until(struct bulk *bulk, const struct sink *s, uint32_t frames,
                         struct shd_err *e)
{
    const uint64_t end = test_now_ms() + TEST_HANG_MS;
    int r = SHD_OK;
    while (r >= SHD_OK && s->frames < frames) {
        struct pollfd p = { .fd = bulk_fd(bulk), .events = POLLIN };
        poll(&p, 1, 100);
        r = bulk_receive(bulk, e);
        if (test_now_ms() > end)
            FAIL("only %u of %u frames came", s->frames, frames);
    }
    return r < SHD_OK ? r : SHD_OK;
}

struct pair {
    struct bulk *a, *b;
    struct sink at_a, at_b;
};

static void pair_open(struct pair *p, enum cluster_bulk way)
{
    struct dialer d = { .keys = hosts.b, .name = "a" };
    struct shd_err e = { 0 };
    make_hosts_of(way);
    d.keys = hosts.b;
    EXPECT_OK(meet(&d, &p->a, &e), &e);
    EXPECT_OK(d.status, &d.e);
    p->b = d.bulk;
    EXPECT_STR(bulk_peer(p->a), "b");
    EXPECT_STR(bulk_peer(p->b), "a");
    sink_init(&p->at_a, p->a);
    sink_init(&p->at_b, p->b);
}

static void pair_close(struct pair *p)
{
    bulk_close(p->a);
    bulk_close(p->b);
    free(p->at_a.memory);
    free(p->at_b.memory);
    end_hosts();
}

struct sender { /* a thread that sends a frame: far more than all buffers hold, perhaps */
    pthread_t thread;
    struct bulk *bulk;
    struct bulk_head head;
    const void *data;
    int status;
    struct shd_err e;
};

static void *send_main(void *arg)
{
    struct sender *s = arg;
    s->status = bulk_send(s->bulk, &s->head, s->data, &s->e);
    return NULL;
}

TEST_OF_BOTH(frames_of_all_sizes_come_to_their_place)
{
    static const uint64_t sizes[] = { 0, 1, 8191, 8192, 8193, 65536, (1 << 20) + 3, (8 << 20) + 1 };
    struct pair p;
    struct shd_err e = { 0 };
    pair_open(&p, way);
    uint8_t *data = malloc(MEMORY_BYTES);
    uint64_t state = 7;
    for (uint64_t i = 0; i < MEMORY_BYTES; i++)
        data[i] = (uint8_t)test_random(&state);
    for (uint32_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const struct bulk_head head = { .type = 65535,
                                        .index = UINT32_MAX - i,
                                        .id = UINT64_MAX - i,
                                        .at = 4096 * i,
                                        .bytes = sizes[i] };
        struct sender b = { .bulk = p.b, .head = head, .data = data };
        EXPECT(pthread_create(&b.thread, NULL, send_main, &b) == 0);
        EXPECT_OK(receive_until(p.a, &p.at_a, i + 1, &e), &e);
        pthread_join(b.thread, NULL);
        EXPECT_OK(b.status, &b.e);
        EXPECT(memcmp(&p.at_a.last, &head, sizeof head) == 0);
        EXPECT(memcmp(p.at_a.memory + head.at, data, sizes[i]) == 0);
    }
    EXPECT_EQ(bulk_bytes(p.a), bulk_bytes(p.b));
    free(data);
    pair_close(&p);
}

struct flood { /* a thread that sends so many frames */
    struct bulk *bulk;
    const struct sink *sink;
    uint32_t frames;
    int status;
    struct shd_err e;
};

static void *flood_main(void *arg)
{
    struct flood *f = arg;
    const struct bulk_head head = { .type = 5, .bytes = MEMORY_BYTES };
    static uint8_t data[MEMORY_BYTES];
    for (uint32_t i = 0; f->status == SHD_OK && i < f->frames; i++)
        f->status = bulk_send(f->bulk, &head, data, &f->e);
    while (f->status >= SHD_OK && f->sink->frames < f->frames) {
        struct pollfd p = { .fd = bulk_fd(f->bulk), .events = POLLIN };
        poll(&p, 1, 100);
        f->status = bulk_receive(f->bulk, &f->e);
    }
    return NULL;
}

static void *flood_until_refused(void *arg)
{
    struct flood *f = arg;
    const struct bulk_head head = { .type = 5, .bytes = MEMORY_BYTES };
    static uint8_t data[MEMORY_BYTES];
    memset(data, 0x5a, sizeof data);
    while (f->status == SHD_OK)
        f->status = bulk_send(f->bulk, &head, data, &f->e);
    return NULL;
}

static bool is_all(const uint8_t *memory, uint8_t byte)
{
    return memory[0] == byte && memcmp(memory, memory + 1, MEMORY_BYTES - 1) == 0;
}

TEST_OF_BOTH(memory_may_go_once_payloads_have_ended)
{
    struct pair p;
    struct shd_err e = { 0 };
    pthread_t thread;
    pair_open(&p, way);
    struct flood f = { .bulk = p.b };
    EXPECT(pthread_create(&thread, NULL, flood_until_refused, &f) == 0);
    const uint64_t end = test_now_ms() + TEST_HANG_MS;
    while (((const volatile uint8_t *)p.at_a.memory)[0] == 0) {
        EXPECT(bulk_receive(p.a, &e) >= SHD_OK);
        EXPECT(test_now_ms() < end);
    }
    bulk_end(p.a);
    memset(p.at_a.memory, 1, MEMORY_BYTES);
    bulk_close(p.a);
    p.a = NULL;
    EXPECT(is_all(p.at_a.memory, 1));
    pthread_join(thread, NULL);
    EXPECT(f.status < SHD_OK);
    EXPECT(is_all(p.at_a.memory, 1));
    pair_close(&p);
}

/* As a hook it takes two seconds for each frame, of which far more are under way. */
static int place_slowly(void *ctx, const struct bulk_head *head, void **ret_to, struct shd_err *e)
{
    const uint64_t end_ns = clock_now_ns() + 2 * NS_PER_S;
    while (clock_now_ns() < end_ns)
        poll(NULL, 0, 100);
    return sink_place(ctx, head, ret_to, e);
}

/* Its caller would come to bulk_tick() too late, and be taken for dead. */
TEST_OF_BOTH(who_receives_without_a_pause_is_back_within_a_frame)
{
    struct pair p;
    struct shd_err e = { 0 };
    pthread_t thread;
    pair_open(&p, way);
    const struct bulk_hooks hooks = { .place = place_slowly, .done = sink_done, .ctx = &p.at_a };
    bulk_set_hooks(p.a, &hooks);
    struct flood f = { .bulk = p.b };
    EXPECT(pthread_create(&thread, NULL, flood_until_refused, &f) == 0);
    int r = SHD_OK;
    const uint64_t end = test_now_ms() + TEST_HANG_MS;
    while (r == SHD_OK && test_now_ms() < end) /* its head comes first, perhaps in parts */
        r = bulk_receive(p.a, &e);
    EXPECT_STATUS(r, SHD_PENDING);
    EXPECT_EQ(p.at_a.frames, 0);
    EXPECT_OK(receive_until(p.a, &p.at_a, 2, &e), &e); /* in whose middle it goes on */
    EXPECT(is_all(p.at_a.memory, 0x5a));
    bulk_close(p.a);
    p.a = NULL;
    pthread_join(thread, NULL);
    pair_close(&p);
}

/* a's socket, which bulk_fd() is not by UCX. */
static int fd_of_a(void)
{
    struct sockaddr_in at, own;
    socklen_t bytes = sizeof at;
    EXPECT(getsockname(hosts.listener, (struct sockaddr *)&at, &bytes) == 0);
    for (int fd = 3; fd < 1024; fd++) {
        bytes = sizeof own;
        if (fd != hosts.listener && getsockname(fd, (struct sockaddr *)&own, &bytes) == 0 &&
            own.sin_family == AF_INET && own.sin_port == at.sin_port)
            return fd;
    }
    FAIL("a has no socket");
}

/* Far more than all buffers between them hold: who only sent would wait for the other for ever. */
TEST_OF_BOTH(two_that_send_to_each_other_never_wait_for_each_other)
{
    struct pair p;
    pthread_t thread;
    pair_open(&p, way);
    struct flood a = { .bulk = p.a, .sink = &p.at_a, .frames = 4 };
    struct flood b = { .bulk = p.b, .sink = &p.at_b, .frames = 4 };
    EXPECT(pthread_create(&thread, NULL, flood_main, &a) == 0);
    flood_main(&b);
    pthread_join(thread, NULL);
    EXPECT(a.status >= SHD_OK && b.status >= SHD_OK);
    EXPECT_EQ(p.at_a.frames, 4);
    EXPECT_EQ(p.at_b.frames, 4);
    pair_close(&p);
}

TEST_OF_BOTH(a_refused_place_ends_the_connection_for_good)
{
    static const struct bulk_head wrong[] = {
        { .type = 3, .at = MEMORY_BYTES + 1 },
        { .type = 3, .at = MEMORY_BYTES, .bytes = 1 },
        { .type = 3, .at = UINT64_MAX, .bytes = 2 }, /* the sum wraps */
        { .type = 3, .bytes = MEMORY_BYTES + 1 },
    };
    for (uint32_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        struct pair p;
        struct shd_err e = { 0 };
        pair_open(&p, way);
        /* Without its payload: the head is refused before any of it is there. */
        struct bulk_head head = wrong[i];
        uint8_t *data = calloc(1, MEMORY_BYTES + 1);
        if (head.bytes <= 2)
            EXPECT_OK(bulk_send(p.b, &head, data, &e), &e);
        else
            bulk_send(p.b, &head, data, &e); /* the peer may hang up in the middle */
        EXPECT_STATUS(receive_until(p.a, &p.at_a, 1, &e), SHD_ERANGE);
        EXPECT_STATUS(bulk_receive(p.a, &e), SHD_ERANGE);
        head = (struct bulk_head){ .type = 3 };
        EXPECT_STATUS(bulk_send(p.a, &head, NULL, &e), SHD_ERANGE);
        free(data);
        pair_close(&p);
    }
}

/* -- Who is let in ----------------------------------------------------------------------------- */

TEST(a_host_that_was_taken_out_of_the_file_makes_no_connection_any_more)
{
    struct cluster cluster;
    struct dialer d = { .name = "a" };
    struct shd_err e = { 0 };
    struct bulk *bulk;
    make_hosts();
    d.keys = hosts.b;
    EXPECT_OK(cluster_load(hosts.file, &cluster, &e), &e);
    EXPECT_OK(cluster_remove(&cluster, "b", &e), &e);
    EXPECT_OK(cluster_save(hosts.file, &cluster, &e), &e);
    cluster_free(&cluster);
    EXPECT_STATUS(meet(&d, &bulk, &e), SHD_EAUTH);
    EXPECT_HAS(e.text, "no host's of this cluster");
    bulk_close(d.bulk);
    end_hosts();
}

TEST(who_answers_with_another_hosts_key_is_hung_up_on)
{
    struct dialer d = { .name = "a" };
    struct shd_err e = { 0 };
    struct bulk *bulk;
    make_hosts();
    bulk_keys_free(hosts.a); /* b answers in its place */
    EXPECT_OK(bulk_keys_new(hosts.file, "b", &hosts.a, &e), &e);
    d.keys = hosts.b;
    EXPECT(meet(&d, &bulk, &e) != SHD_OK);
    EXPECT_STATUS(d.status, SHD_EAUTH);
    EXPECT_HAS(d.e.text, "it has the key of host 'b', not of 'a'");
    bulk_close(bulk);
    end_hosts();
}

TEST(a_key_file_that_others_may_read_is_refused)
{
    char path[128];
    struct bulk_keys *keys;
    struct shd_err e = { 0 };
    make_hosts();
    EXPECT_OK(cluster_key_path(hosts.file, "b", path, sizeof path, &e), &e);
    EXPECT(chmod(path, 0640) == 0);
    EXPECT_STATUS(bulk_keys_new(hosts.file, "b", &keys, &e), SHD_EAUTH);
    EXPECT_HAS(e.text, "0640");
    end_hosts();
}

TEST(a_key_that_is_not_the_one_in_the_file_is_refused)
{
    char path[128];
    uint8_t key[CLUSTER_KEY_BYTES];
    struct bulk_keys *keys;
    struct shd_err e = { 0 };
    make_hosts();
    EXPECT_OK(cluster_key_path(hosts.file, "b", path, sizeof path, &e), &e);
    EXPECT(unlink(path) == 0);
    EXPECT_OK(cluster_key_new(path, key, &e), &e);
    EXPECT_STATUS(bulk_keys_new(hosts.file, "b", &keys, &e), SHD_EAUTH);
    end_hosts();
}

/* -- Strangers --------------------------------------------------------------------------------- */

static int dial_raw(void)
{
    struct sockaddr_in to;
    socklen_t bytes = sizeof to;
    EXPECT(getsockname(hosts.listener, (struct sockaddr *)&to, &bytes) == 0);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT(connect(fd, (struct sockaddr *)&to, sizeof to) == 0);
    return fd;
}

TEST(garbage_instead_of_tls_is_refused)
{
    static const char *const said[] = { "GET / HTTP/1.1\r\n\r\n", "\x16\x03\x01\xff\xff garbage",
                                        "" };
    make_hosts();
    for (uint32_t i = 0; i < 3; i++) {
        struct bulk *bulk;
        struct shd_err e = { 0 };
        const int fd = dial_raw();
        EXPECT(write(fd, said[i], strlen(said[i])) == (ssize_t)strlen(said[i]));
        shutdown(fd, SHUT_WR);
        EXPECT(bulk_accept(hosts.a, accept_one(), SHORT_NS, &bulk, &e) < 0);
        close(fd);
    }
    end_hosts();
}

TEST(a_stranger_that_says_nothing_has_its_time)
{
    struct bulk *bulk;
    struct shd_err e = { 0 };
    make_hosts();
    const int fd = dial_raw();
    EXPECT_STATUS(bulk_accept(hosts.a, accept_one(), NS_PER_S, &bulk, &e), SHD_ETIMEDOUT);
    close(fd);
    end_hosts();
}

/* A client of TLS 1.3 without a certificate, or of an older TLS, as OpenSSL makes them. */
static void dial_tls(int version, int *ret_fd, SSL **ret_tls)
{
    SSL_CTX *ctx = SSL_CTX_new(TLS_client_method());
    EXPECT(SSL_CTX_set_max_proto_version(ctx, version) == 1);
    *ret_fd = dial_raw();
    *ret_tls = SSL_new(ctx);
    SSL_CTX_free(ctx);
    SSL_set_fd(*ret_tls, *ret_fd);
}

static void *connect_main(void *tls)
{
    char byte;
    if (SSL_connect(tls) == 1)
        SSL_read(tls, &byte, 1); /* TLS 1.3 tells a client late */
    return NULL;
}

TEST(tls_without_a_key_or_of_another_version_is_refused)
{
    static const int versions[] = { TLS1_2_VERSION, TLS1_3_VERSION };
    make_hosts();
    for (uint32_t i = 0; i < 2; i++) {
        struct bulk *bulk;
        struct shd_err e = { 0 };
        pthread_t thread;
        int fd;
        SSL *tls;
        dial_tls(versions[i], &fd, &tls);
        EXPECT(pthread_create(&thread, NULL, connect_main, tls) == 0);
        EXPECT_STATUS(bulk_accept(hosts.a, accept_one(), SHORT_NS, &bulk, &e), SHD_EPROTO);
        pthread_join(thread, NULL);
        SSL_free(tls);
        close(fd);
    }
    end_hosts();
}

/* -- Peers that are there and do nothing ------------------------------------------------------- */

TEST_OF_BOTH(a_transfer_that_nobody_takes_has_a_deadline)
{
    struct pair p;
    struct shd_err e = { 0 };
    pair_open(&p, way);
    const struct bulk_head head = { .type = 5, .bytes = MEMORY_BYTES };
    uint8_t *data = calloc(1, MEMORY_BYTES);
    const uint64_t begun = clock_now_ns();
    int r = SHD_OK;
    while (r == SHD_OK) /* until all buffers between them are full */
        r = bulk_send(p.b, &head, data, &e);
    EXPECT_STATUS(r, SHD_ETIMEDOUT);
    EXPECT(clock_now_ns() - begun >= BULK_STALL_NS / 2); /* the kernel's deadline is the shorter */
    EXPECT_HAS(e.text, "host a");
    EXPECT_STATUS(bulk_tick(p.b, &e), SHD_ETIMEDOUT);
    free(data);
    pair_close(&p);
}

TEST_OF_BOTH(a_silent_peer_is_noticed_and_one_that_ticks_is_not)
{
    struct pair p;
    struct shd_err e = { 0 };
    pair_open(&p, way);
    const uint64_t begun = clock_now_ns();
    while (clock_now_ns() - begun < BULK_STALL_NS + 2 * NS_PER_S) {
        EXPECT_OK(bulk_tick(p.a, &e), &e);
        EXPECT(bulk_receive(p.b, &e) >= SHD_OK);
        EXPECT_OK(bulk_tick(p.b, &e), &e);
        EXPECT(bulk_receive(p.a, &e) >= SHD_OK);
        sleep_ms(50);
    }
    int r;
    while ((r = bulk_tick(p.a, &e)) == SHD_OK) /* b says nothing any more */
        sleep_ms(50);
    EXPECT_STATUS(r, SHD_ETIMEDOUT);
    EXPECT_HAS(e.text, "host b has said nothing");
    pair_close(&p);
}

TEST_OF_BOTH(a_peer_that_is_gone_is_noticed)
{
    struct pair p;
    struct shd_err e = { 0 };
    pair_open(&p, way);
    bulk_close(p.a);
    p.a = NULL;
    EXPECT_STATUS(receive_until(p.b, &p.at_b, 1, &e), SHD_EGONE);
    pair_close(&p);
}

/* As one that was killed: its kernel hangs up, and nothing else is said. */
TEST_OF_BOTH(a_peer_that_is_gone_in_the_middle_of_a_payload_is_noticed)
{
    struct pair p;
    struct shd_err e = { 0 };
    pthread_t thread;
    pair_open(&p, way);
    struct flood b = { .bulk = p.b, .sink = &p.at_b, .frames = 1000 };
    EXPECT(pthread_create(&thread, NULL, flood_main, &b) == 0);
    EXPECT_OK(receive_until(p.a, &p.at_a, 2, &e), &e);
    EXPECT(shutdown(fd_of_a(), SHUT_RDWR) == 0);
    pthread_join(thread, NULL);
    EXPECT_STATUS(b.status, SHD_EGONE);
    EXPECT_HAS(b.e.text, "host a");
    EXPECT_STATUS(receive_until(p.a, &p.at_a, 1000, &e), SHD_EGONE);
    pair_close(&p);
}

/* -- UCX --------------------------------------------------------------------------------------- */

static void meets_another_way(enum cluster_bulk way_of_b)
{
    struct dialer d = { .name = "a" };
    struct shd_err e = { 0 };
    struct bulk *bulk;
    make_hosts_of(way_of_b == CLUSTER_TCP ? CLUSTER_UCX : CLUSTER_TCP);
    change_way(way_of_b);
    d.keys = hosts.b;
    EXPECT_STATUS(meet(&d, &bulk, &e), SHD_EPROTO);
    EXPECT_HAS(e.text, way_of_b == CLUSTER_TCP ? "another bulk than this host's, \"ucx\""
                                               : "another bulk than this host's, \"tcp\"");
    EXPECT_STATUS(d.status, SHD_EPROTO);
    EXPECT_HAS(d.e.text, way_of_b == CLUSTER_TCP ? "another bulk than this host's, \"tcp\""
                                                 : "another bulk than this host's, \"ucx\"");
    end_hosts();
}

TEST(hosts_with_different_ways_are_told_so)
{
    need_ucx();
    meets_another_way(CLUSTER_TCP);
    meets_another_way(CLUSTER_UCX);
}

struct ends { /* of UCX alone, both this thread's: b sends to a */
    void *a, *b;
    struct bulk_hello of_a, of_b;
};

static void ends_open(struct ends *u)
{
    struct shd_err e = { 0 };
    need_ucx();
    EXPECT_OK(ucx_path.open(&u->a, &u->of_a, &e), &e);
    EXPECT_OK(ucx_path.open(&u->b, &u->of_b, &e), &e);
}

static void ends_close(struct ends *u)
{
    ucx_path.close(u->b, /* gently= */ false);
    ucx_path.close(u->a, /* gently= */ false);
}

/* b sends so much, and a wants that much, until b has sent or a has failed: what a says. */
static int send_and_receive(struct ends *u, uint64_t sent, uint64_t wanted, uint64_t *ret_got,
                            struct shd_err *e)
{
    static uint8_t from[65536], to[65536];
    uint64_t done = 0;
    const uint64_t end = test_now_ms() + TEST_HANG_MS;
    int r = SHD_PENDING;
    *ret_got = 0;
    memset(from, 'x', sizeof from);
    memset(to, 0, sizeof to);
    while (r == SHD_PENDING && done == 0) {
        struct shd_err why = { 0 };
        EXPECT(ucx_path.send(u->b, from, sent, &done, &why) >= SHD_OK);
        r = ucx_path.receive(u->a, to, wanted, ret_got, e);
        EXPECT(test_now_ms() < end);
    }
    for (uint32_t i = 0; r == SHD_PENDING && i < 100; i++) {
        r = ucx_path.receive(u->a, to, wanted, ret_got, e);
        sleep_ms(1);
    }
    EXPECT(*ret_got == wanted ? memcmp(from, to, wanted) == 0 : to[0] == 0);
    return r;
}

TEST(what_has_not_the_token_of_the_connection_is_refused_by_ucx)
{
    for (uint32_t bit = 0; bit < 128; bit += 21) {
        struct ends u;
        struct shd_err e = { 0 };
        uint64_t got;
        ends_open(&u);
        EXPECT_OK(ucx_path.join(u.a, &u.of_b, &e), &e);
        u.of_a.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
        EXPECT_OK(ucx_path.join(u.b, &u.of_a, &e), &e);
        EXPECT_EQ(send_and_receive(&u, 65536, 65536, &got, &e), SHD_PENDING);
        EXPECT_EQ(got, 0);
        ends_close(&u);
    }
}

TEST(a_piece_that_is_longer_or_shorter_than_what_is_due_is_refused_by_ucx)
{
    static const uint64_t sent[] = { 65535, 65536, 1 };
    for (uint32_t i = 0; i < 3; i++) {
        struct ends u;
        struct shd_err e = { 0 };
        uint64_t got;
        ends_open(&u);
        EXPECT_OK(ucx_path.join(u.a, &u.of_b, &e), &e);
        EXPECT_OK(ucx_path.join(u.b, &u.of_a, &e), &e);
        EXPECT_EQ(send_and_receive(&u, sent[i], 65536, &got, &e),
                  sent[i] == 65536 ? SHD_OK : SHD_EPROTO);
        ends_close(&u);
    }
}

/* Of this process, but for hosts' own: to each of them, so much nonsense. */
static uint32_t say_nonsense_to_listeners(uint64_t *state)
{
    uint32_t told = 0;
    for (int fd = 3; fd < 1024; fd++) {
        struct sockaddr_in at;
        socklen_t bytes = sizeof at, size = sizeof(int);
        int listens = 0;
        uint8_t nonsense[4096];
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0 ||
            getsockname(fd, (struct sockaddr *)&at, &bytes) != 0 || at.sin_family != AF_INET)
            continue;
        const int to = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        for (uint32_t i = 0; i < sizeof nonsense; i++)
            nonsense[i] = (uint8_t)test_random(state);
        if (connect(to, (struct sockaddr *)&at, sizeof at) == 0)
            told += send(to, nonsense, sizeof nonsense, MSG_NOSIGNAL) > 0;
        close(to);
    }
    return told;
}

TEST(nonsense_at_the_port_of_ucx_hinders_nobody)
{
    uint64_t state = 11;
    for (uint32_t i = 0; i < 8; i++) {
        struct ends u;
        struct shd_err e = { 0 };
        uint64_t got;
        ends_open(&u);
        EXPECT(say_nonsense_to_listeners(&state) > 0);
        EXPECT_OK(ucx_path.join(u.a, &u.of_b, &e), &e);
        EXPECT_OK(ucx_path.join(u.b, &u.of_a, &e), &e);
        say_nonsense_to_listeners(&state);
        EXPECT_OK(send_and_receive(&u, 65536, 65536, &got, &e), &e);
        ends_close(&u);
    }
}

TEST(a_hello_that_is_no_token_and_address_is_refused_by_ucx)
{
    struct ends u;
    struct shd_err e = { 0 };
    ends_open(&u);
    u.of_b.bytes = 16;
    EXPECT_STATUS(ucx_path.join(u.a, &u.of_b, &e), SHD_EPROTO);
    ends_close(&u);
}

TEST_MAIN()
