/* A relay and a host of its cluster that does not play by the rules: each is hung up on, the relay
 * and the daemon behind it go on. */
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <openssl/ssl.h>

#include "daemon/relay/bulk.h"
#include "daemon/relay/bulk_ucx.h"
#include "daemon/relay/frames.h"
#include "daemon/relay/relay.h"
#include "daemon/relay/strangers.h"
#include "daemon/relay/zconn.h"
#include "proto/share/fdpass.h"
#include "proto/share/listen.h"
#include "proto/spec/layout.h"
#include "proto/wire/wire.h"
#include "tests/lib/child.h"
#include "tests/lib/fixture.h"

#define SHORT_NS  (20 * NS_PER_S)
#define LINGER_MS 300

/* -- A relay beside a daemon, and this test as the relay of another host
 * --------------------------- */

struct far {
    struct fixture f;
    pid_t relay;
    bool files;   /* before the start */
    bool ucx;     /* before the start: payloads go by it */
    bool lingers; /* before the start: it goes on for a while after its end */
    char file[300];
    struct bulk_keys *keys; /* of host b */
};

static void nothing(void)
{
}

/* Nothing is left of the frames of functions that have returned; threads go on. */
static __attribute__((noinline)) void linger(void)
{
    volatile uint8_t stack[1 << 14];
    for (size_t i = 0; i < sizeof stack; i++)
        stack[i] = 0xa5;
    poll(NULL, 0, LINGER_MS);
}

static void add_host(const char *file, struct cluster *cluster, const char *name, const char *at)
{
    struct cluster_host host = { .name = "" };
    struct shd_err e = { 0 };
    char path[400];
    snprintf(host.name, sizeof host.name, "%s", name);
    snprintf(host.address, sizeof host.address, "%s", at);
    EXPECT_OK(cluster_key_path(file, name, path, sizeof path, &e), &e);
    unlink(path);
    EXPECT_OK(cluster_key_new(path, host.key, &e), &e);
    EXPECT_OK(cluster_add(cluster, &host, &e), &e);
}

/* Of this process alone, so that copies of it can run side by side. */
static void own_address(char name[LISTEN_NAME_BYTES])
{
    const unsigned pid = (unsigned)getpid();
    snprintf(name, LISTEN_NAME_BYTES, "127.%u.%u.%u:7100", 1 + (pid >> 16 & 127), pid >> 8 & 255,
             pid & 255);
}

static void far_start_beside(struct far *far, int daemons)
{
    struct cluster cluster = { 0 };
    struct shd_err e = { 0 };
    char address[LISTEN_NAME_BYTES];
    *far = (struct far){ .files = far->files, .ucx = far->ucx, .lingers = far->lingers };
    cluster.bulk = far->ucx ? CLUSTER_UCX : CLUSTER_TCP;
    signal(SIGPIPE, SIG_IGN);
    fixture_start(&far->f, daemons, NULL);
    snprintf(far->file, sizeof far->file, "%s/keys", far->f.dir);
    EXPECT(mkdir(far->file, 0700) == 0);
    strcat(far->file, "/cluster.json");
    own_address(address);
    add_host(far->file, &cluster, "a", address);
    add_host(far->file, &cluster, "b", "127.0.0.1:1");
    EXPECT_OK(cluster_save(far->file, &cluster, &e), &e);
    cluster_free(&cluster);
    far->relay = test_fork();
    if (far->relay == 0) {
        const struct relay_config config = {
            .runtime_dir = far->f.dir, .cluster = far->file, .host = "a", .files = far->files
        };
        const int r = relay_run(&config, nothing, nothing, &e);
        if (far->lingers)
            linger();
        _exit(r == SHD_OK ? 0 : 1);
    }
    EXPECT_OK(bulk_keys_new(far->file, "b", &far->keys, &e), &e);
}

static void far_start(struct far *far)
{
    far_start_beside(far, 1);
}

static void far_stop(struct far *far)
{
    char command[400];
    int status;
    EXPECT(kill(far->relay, SIGTERM) == 0);
    EXPECT(waitpid(far->relay, &status, 0) == far->relay);
    EXPECT_EQ(status, 0);
    bulk_keys_free(far->keys);
    snprintf(command, sizeof command, "rm -r %s/keys", far->f.dir);
    EXPECT_EQ(system(command), 0);
    fixture_stop(&far->f);
}

struct heard {
    uint8_t bytes[WIRE_FRAME_BYTES_MAX];
    struct bulk_head last;
    uint32_t frames;
};

static struct heard heard;

static int hear(void *ctx, const struct bulk_head *head, void **ret_to, struct shd_err *e)
{
    (void)ctx;
    if (head->bytes > sizeof heard.bytes)
        return err_set(e, SHD_ERANGE, "a long frame");
    *ret_to = heard.bytes;
    return SHD_OK;
}

static int hear_done(void *ctx, const struct bulk_head *head, void *payload, struct shd_err *e)
{
    (void)ctx;
    (void)payload;
    (void)e;
    heard.last = *head;
    heard.frames++;
    return SHD_OK;
}

static struct bulk *dial(const struct far *far)
{
    static const struct bulk_hooks hooks = { .place = hear, .done = hear_done };
    const uint64_t end = test_now_ms() + TEST_HANG_MS;
    struct shd_err e = { 0 };
    struct bulk *bulk;
    while (bulk_dial(far->keys, "a", SHORT_NS, &bulk, &e) != SHD_OK) { /* it is being started */
        if (test_now_ms() > end)
            FAIL("%s", e.text);
        sleep_ms(10);
    }
    bulk_set_hooks(bulk, &hooks);
    heard.frames = 0;
    return bulk;
}

/* SHD_OK: so many frames came; else why the connection ended. */
static int listen_for(struct bulk *bulk, uint32_t frames)
{
    const uint64_t end = test_now_ms() + TEST_HANG_MS;
    struct shd_err e = { 0 };
    int r = SHD_OK;
    while (r >= SHD_OK && heard.frames < frames) {
        struct pollfd p = { .fd = bulk_fd(bulk), .events = POLLIN };
        poll(&p, 1, 100);
        r = bulk_receive(bulk, &e);
        if (r >= SHD_OK)
            r = bulk_tick(bulk, &e);
        if (test_now_ms() > end)
            FAIL("neither %u frames nor an end", frames);
    }
    return heard.frames >= frames ? SHD_OK : r; /* the end may come right behind the last one */
}

static int tell(struct bulk *bulk, struct bulk_head head, const void *payload)
{
    struct shd_err e = { 0 };
    return bulk_send(bulk, &head, payload, &e);
}

static int open_session(struct bulk *bulk, const char *device, uint32_t what)
{
    struct frame_open open = { .device = "" };
    snprintf(open.device, sizeof open.device, "%s", device);
    snprintf(open.model, sizeof open.model, "none");
    return tell(
        bulk,
        (struct bulk_head){ .type = FRAME_OPEN, .index = what, .id = 1, .bytes = sizeof open },
        &open);
}

/* A session whose welcome has come. */
static struct bulk *attach(const struct far *far)
{
    struct bulk *bulk = dial(far);
    EXPECT_EQ(open_session(bulk, "cpu0", FRAME_OPEN_SESSION), SHD_OK);
    EXPECT_EQ(listen_for(bulk, 1), SHD_OK);
    EXPECT_EQ(heard.last.type, FRAME_SIDE);
    EXPECT_EQ(heard.last.bytes, sizeof(struct side_msg));
    return bulk;
}

static int say(struct bulk *bulk, const struct wire_request *request)
{
    static uint8_t frame[WIRE_FRAME_BYTES_MAX];
    struct shd_err e = { 0 };
    size_t bytes;
    EXPECT_OK(wire_request_pack(request, frame, sizeof frame, &bytes, &e), &e);
    return tell(bulk, (struct bulk_head){ .type = FRAME_MESSAGE, .bytes = bytes }, frame);
}

static struct wire_request hello(enum wire_role role)
{
    struct wire_request request = { .seq = 1, .type = WIRE_HELLO };
    struct side_msg welcome;
    memcpy(&welcome, heard.bytes, sizeof welcome);
    request.hello = (struct wire_hello){
        .protocol = SHD_PROTOCOL, .role = role, .name = "far", .level = WIRE_LEVEL
    };
    memcpy(request.hello.token, welcome.token, WIRE_TOKEN_BYTES);
    return request;
}

TEST(what_is_no_open_is_hung_up_on)
{
    static const struct bulk_head wrong[] = {
        { .type = FRAME_MESSAGE, .bytes = 8 },
        { .type = FRAME_OPEN, .index = 1, .bytes = 8 },
        { .type = FRAME_BYTES, .id = 1, .bytes = 8 },
        { .type = FRAME_OPEN, .index = 9, .bytes = sizeof(struct frame_open) }, /* no device */
    };
    static const char *const names[] = { "../cpu0", "cpu0/x", "", "CPU0" };
    static const uint8_t zeros[sizeof(struct frame_open)];
    struct far far = { .files = false };
    far_start(&far);
    for (uint32_t i = 0; i < 4; i++) {
        struct bulk *bulk = dial(&far);
        tell(bulk, wrong[i], zeros);
        EXPECT(listen_for(bulk, 1) != SHD_OK);
        bulk_close(bulk);
        bulk = dial(&far);
        open_session(bulk, names[i], FRAME_OPEN_SESSION);
        EXPECT(listen_for(bulk, 1) != SHD_OK);
        bulk_close(bulk);
    }
    uint8_t endless[sizeof(struct frame_open)];
    memset(endless, 'x', sizeof endless);
    struct bulk *bulk = dial(&far);
    tell(bulk, (struct bulk_head){ .type = FRAME_OPEN, .index = 1, .bytes = sizeof endless },
         endless);
    EXPECT(listen_for(bulk, 1) != SHD_OK);
    bulk_close(bulk);
    bulk_close(attach(&far));
    far_stop(&far);
}

TEST(a_device_or_a_model_that_is_not_there_is_refused_with_the_reason)
{
    struct far far = { .files = false };
    far_start(&far);
    bulk_close(attach(&far)); /* the daemon is up */
    for (uint32_t what = FRAME_OPEN_SESSION; what <= FRAME_OPEN_MODEL; what++) {
        struct bulk *bulk = dial(&far);
        EXPECT_EQ(open_session(bulk, what == FRAME_OPEN_SESSION ? "cpu7" : "cpu0", what), SHD_OK);
        EXPECT_EQ(listen_for(bulk, 1), SHD_OK);
        EXPECT_EQ(heard.last.type, FRAME_REFUSED);
        heard.bytes[heard.last.bytes] = 0;
        EXPECT_HAS((char *)heard.bytes, what == FRAME_OPEN_SESSION ? "cpu7" : "none");
        bulk_close(bulk);
    }
    far_stop(&far);
}

TEST(frames_that_do_not_fit_end_the_session_and_nothing_else)
{
    static const struct bulk_head wrong[] = {
        { .type = FRAME_BYTES, .id = 1, .bytes = 8 },     /* no segment was claimed */
        { .type = FRAME_BYTES, .id = 0, .bytes = 8 },     /* nor has any this number */
        { .type = FRAME_MESSAGE, .bytes = 0 },            /* no request */
        { .type = FRAME_MESSAGE, .bytes = 8 },            /* garbage */
        { .type = FRAME_SEGMENT, .bytes = 8 },            /* not of this side */
        { .type = FRAME_OPEN, .index = 1, .bytes = 192 }, /* once is enough */
        { .type = FRAME_MESSAGE, .bytes = WIRE_FRAME_BYTES_MAX + 1 },
    };
    struct far far = { .files = false };
    far_start(&far);
    uint8_t *garbage = malloc(WIRE_FRAME_BYTES_MAX + 1);
    memset(garbage, 0xff, WIRE_FRAME_BYTES_MAX + 1);
    for (uint32_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        struct bulk *bulk = attach(&far);
        tell(bulk, wrong[i], garbage);
        EXPECT(listen_for(bulk, 2) != SHD_OK);
        bulk_close(bulk);
    }
    free(garbage);
    bulk_close(attach(&far));
    far_stop(&far);
}

TEST(what_works_on_a_daemon_or_its_files_does_not_pass)
{
    struct far far = { .files = false };
    far_start(&far);
    struct bulk *bulk = attach(&far);
    struct wire_request request = hello(WIRE_ADMIN);
    EXPECT_EQ(say(bulk, &request), SHD_OK);
    EXPECT(listen_for(bulk, 2) != SHD_OK);
    bulk_close(bulk);
    static const enum wire_request_type refused[] = { WIRE_DRAIN, WIRE_OPEN_RING };
    for (uint32_t i = 0; i < 2; i++) {
        bulk = attach(&far);
        request = hello(WIRE_TRAINER);
        EXPECT_EQ(say(bulk, &request), SHD_OK);
        EXPECT_EQ(listen_for(bulk, 2), SHD_OK); /* Welcome */
        EXPECT_EQ(heard.last.type, FRAME_MESSAGE);
        request = (struct wire_request){ .seq = 2, .type = refused[i] };
        EXPECT_EQ(say(bulk, &request), SHD_OK);
        EXPECT(listen_for(bulk, 3) != SHD_OK);
        bulk_close(bulk);
    }
    far_stop(&far);
}

/* Asked for a checkpoint, the relay says no, or the daemon that it has no such model; either goes
 * on with the session. */
/* Replicas are made of what passes: a drop goes to both of a pair. */
TEST(drops_pass_and_forks_are_refused_with_what_does_not_work)
{
    const struct wire_request drop = { .type = WIRE_DROP }, fork = { .type = WIRE_FORK };
    struct shd_err e = { 0 };
    EXPECT_OK(frame_admits(&drop, /* files= */ false, &e), &e);
    EXPECT_STATUS(frame_admits(&fork, /* files= */ false, &e), SHD_ENOTSUP);
    EXPECT_HAS(e.text, "as with replicas, has neither forks nor replays");
}

static void ask_for_files(bool files, int status)
{
    struct far far = { .files = files };
    struct wire_reply reply;
    struct shd_err e = { 0 };
    static _Alignas(16) uint8_t memory[WIRE_ARENA_BYTES];
    struct wire_arena arena = { .base = memory, .bytes = sizeof memory };
    far_start(&far);
    struct bulk *bulk = attach(&far);
    struct wire_request request = hello(WIRE_TRAINER);
    EXPECT_EQ(say(bulk, &request), SHD_OK);
    EXPECT_EQ(listen_for(bulk, 2), SHD_OK); /* Welcome */
    EXPECT_OK(wire_reply_unpack(heard.bytes, heard.last.bytes, &arena, &reply, &e), &e);
    request = (struct wire_request){ .seq = 2,
                                     .session = reply.welcome.session,
                                     .type = WIRE_CHECKPOINT };
    request.checkpoint.path = "/tmp/x";
    for (uint32_t i = 0; i < 2; i++, request.seq++) {
        EXPECT_EQ(say(bulk, &request), SHD_OK);
        EXPECT_EQ(listen_for(bulk, 3 + i), SHD_OK);
        arena.used = 0;
        EXPECT_OK(wire_reply_unpack(heard.bytes, heard.last.bytes, &arena, &reply, &e), &e);
        EXPECT_EQ(reply.seq, request.seq);
        EXPECT_EQ(reply.status, status);
        if (!files)
            EXPECT_HAS(reply.text, "--files");
    }
    bulk_close(bulk);
    far_stop(&far);
}

TEST(files_of_the_daemons_host_are_for_others_only_where_its_relay_says_so)
{
    ask_for_files(false, SHD_EAUTH);
    ask_for_files(true, SHD_ENOENT);
}

/* -- Bytes that are half there ----------------------------------------------------------------- */

#define STAGE_BYTES   (UINT64_C(4) << 20)
#define NEWER         20u /* segments: more than a session keeps */
#define FIRST_SEGMENT 1u  /* what both relays call it */
#define ENDS          12u

/* What is done in the middle of a payload: this program's SSL_write() is found before OpenSSL's. */
static struct {
    const uint8_t *payload; /* NULL: nothing */
    uint64_t bytes;
    void (*act)(void);
} middle;

int SSL_write(SSL *tls, const void *data, int bytes)
{
    const uint8_t *at = data;
    size_t written = 0;
    if (middle.payload != NULL && at > middle.payload && at < middle.payload + middle.bytes) {
        middle.payload = NULL;
        middle.act();
    }
    return SSL_write_ex(tls, data, (size_t)bytes, &written) == 1 ? (int)written : 0;
}

/* A daemon that says what this test wants it to, when it wants it. */
static struct fake {
    int side_door, door, side;
    struct zconn z;
    struct segment stages[NEWER + 1];
    uint32_t stage_count;
} fake;

static int fake_accept(int door)
{
    int fd = -1;
    EXPECT_SOON((fd = accept4(door, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0);
    return fd;
}

static void fake_listen(const struct far *far)
{
    struct shd_err e = { 0 };
    char path[300];
    fake = (struct fake){ .z = ZCONN_CLOSED };
    snprintf(path, sizeof path, "%s/cpu0.sock", far->f.dir);
    EXPECT_OK(side_listen(path, &fake.side_door, &e), &e);
    snprintf(path, sizeof path, "%s/cpu0.zmq", far->f.dir);
    EXPECT_OK(listen_unix(path, &fake.door, &e), &e);
}

static void fake_let_in(void)
{
    static const uint8_t token[SHD_TOKEN_BYTES] = { 1 };
    const struct side_msg welcome = side_welcome(token, WIRE_LEVEL);
    struct shd_err e = { 0 };
    fake.side = fake_accept(fake.side_door);
    EXPECT_OK(side_send(fake.side, &welcome, /* pass_fd= */ -1, &e), &e);
    EXPECT_OK(zconn_open(&fake.z, fake_accept(fake.door), /* dealer= */ false, &e), &e);
}

static bool fake_hears(void)
{
    const uint8_t *body;
    size_t bytes;
    struct shd_err e = { 0 };
    EXPECT_OK(zconn_read(&fake.z, &e), &e);
    const int r = zconn_next(&fake.z, &body, &bytes, &e);
    EXPECT(r == SHD_OK || r == SHD_PENDING);
    return r == SHD_OK;
}

/* One stage more, which the relay claims. */
static void fake_stage(struct wire_reply reply, uint64_t bytes)
{
    struct segment *stage = &fake.stages[fake.stage_count++];
    struct side_msg claim, given = { .type = SIDE_SEGMENT, .kind = SEGMENT_STAGE };
    struct shd_err e = { 0 };
    uint8_t frame[1024];
    size_t frame_bytes;
    EXPECT_OK(segment_new("stage", SEGMENT_STAGE, bytes, stage, &e), &e);
    given.ticket = fake.stage_count;
    given.bytes = stage->bytes;
    reply.seq = 1;
    if (reply.type == WIRE_CREATED) {
        reply.created.ticket = given.ticket;
        reply.created.bytes = given.bytes;
    } else {
        reply.got.ticket = given.ticket;
        reply.got.bytes = given.bytes;
    }
    EXPECT_OK(wire_reply_pack(&reply, frame, sizeof frame, &frame_bytes, &e), &e);
    EXPECT_OK(zconn_write(&fake.z, frame, frame_bytes, &e), &e);
    EXPECT_OK(side_recv(fake.side, (int)TEST_HANG_MS, &claim, /* ret_fd= */ NULL, &e), &e);
    EXPECT_EQ(claim.type, SIDE_CLAIM);
    EXPECT_EQ(claim.ticket, given.ticket);
    EXPECT_OK(side_send(fake.side, &given, stage->fd, &e), &e);
}

static bool has_byte(uint64_t at)
{
    return ((const volatile uint8_t *)fake.stages[0].base)[at] != 0;
}

/* Some of the payload is in the stage, the rest is not sent yet: now so many stages come that the
 * oldest have to go. The last claim is served when all before it have their place. */
static void give_newer(void)
{
    EXPECT_SOON(has_byte(0));
    EXPECT(!has_byte(STAGE_BYTES - 1));
    for (uint32_t i = 0; i < NEWER; i++)
        fake_stage((struct wire_reply){ .type = WIRE_GOT, .got.step = 1 }, SHD_PAGE_BYTES);
}

static void fake_end(const struct far *far)
{
    static const char *const names[] = { "cpu0.sock", "cpu0.zmq" };
    for (uint32_t i = 0; i < fake.stage_count; i++)
        segment_close(&fake.stages[i]);
    zconn_close(&fake.z);
    close(fake.side);
    close(fake.side_door);
    close(fake.door);
    for (uint32_t i = 0; i < 2; i++) {
        char path[300];
        snprintf(path, sizeof path, "%s/%s", far->f.dir, names[i]);
        EXPECT(unlink(path) == 0);
    }
}

TEST(a_segment_stays_mapped_while_bytes_come_into_it_however_many_come_after)
{
    const struct wire_reply created = { .type = WIRE_CREATED,
                                        .created = { .what = WIRE_CREATED_YOURS } };
    const struct wire_request status = { .seq = 2, .type = WIRE_STATUS };
    uint8_t *payload = malloc(STAGE_BYTES);
    struct far far = { .files = false };
    memset(payload, 0x5a, STAGE_BYTES);
    far_start_beside(&far, 0);
    fake_listen(&far);
    struct bulk *bulk = dial(&far);
    EXPECT_EQ(open_session(bulk, "cpu0", FRAME_OPEN_SESSION), SHD_OK);
    fake_let_in();
    EXPECT_EQ(listen_for(bulk, 1), SHD_OK);
    fake_stage(created, STAGE_BYTES);
    EXPECT_EQ(listen_for(bulk, 3), SHD_OK); /* SEGMENT, and the reply */
    middle.act = give_newer;
    middle.bytes = STAGE_BYTES;
    middle.payload = payload;
    const struct bulk_head bytes = { .type = FRAME_BYTES,
                                     .id = FIRST_SEGMENT,
                                     .bytes = STAGE_BYTES };
    EXPECT_EQ(tell(bulk, bytes, payload), SHD_OK);
    EXPECT(middle.payload == NULL); /* it was done */
    EXPECT_EQ(say(bulk, &status), SHD_OK);
    EXPECT_SOON(fake_hears()); /* behind the bytes, on one stream */
    EXPECT(memcmp(fake.stages[0].base, payload, STAGE_BYTES) == 0);
    free(payload);
    bulk_close(bulk);
    fake_end(&far);
    far_stop(&far);
}

/* In a process of its own: what has loaded it forks no relay. */
static void need_ucx(void)
{
    struct shd_err e = { 0 };
    int status;
    const pid_t pid = test_fork();
    if (pid == 0)
        _exit(ucx_path.load(&e) == SHD_OK ? 0 : 1);
    EXPECT(waitpid(pid, &status, 0) == pid);
    if (status != 0)
        SKIP("libucp cannot be loaded here");
}

struct sender { /* a thread that sends payloads into a segment until nobody takes them */
    struct bulk *bulk;
    const uint8_t *payload;
};

static void *send_on(void *arg)
{
    const struct sender *s = arg;
    const struct bulk_head bytes = { .type = FRAME_BYTES,
                                     .id = FIRST_SEGMENT,
                                     .bytes = STAGE_BYTES };
    while (tell(s->bulk, bytes, s->payload) == SHD_OK)
        continue;
    return NULL;
}

TEST(a_relay_lives_on_where_a_daemon_ends_as_payloads_come_by_ucx)
{
    static const struct wire_reply created = { .type = WIRE_CREATED,
                                               .created = { .what = WIRE_CREATED_YOURS } };
    struct far far = { .ucx = true };
    uint8_t *payload = malloc(STAGE_BYTES);
    memset(payload, 0x5a, STAGE_BYTES);
    need_ucx();
    far_start_beside(&far, 0);
    for (uint32_t i = 0; i < ENDS; i++) {
        pthread_t thread;
        fake_listen(&far);
        struct sender sender = { dial(&far), payload };
        EXPECT_EQ(open_session(sender.bulk, "cpu0", FRAME_OPEN_SESSION), SHD_OK);
        fake_let_in();
        EXPECT_EQ(listen_for(sender.bulk, 1), SHD_OK);
        fake_stage(created, STAGE_BYTES);
        EXPECT_EQ(listen_for(sender.bulk, 3), SHD_OK); /* SEGMENT, and the reply */
        EXPECT(pthread_create(&thread, NULL, send_on, &sender) == 0);
        EXPECT_SOON(has_byte(0));
        fake_end(&far);
        pthread_join(thread, NULL);
        bulk_close(sender.bulk);
    }
    free(payload);
    far_stop(&far);
}

/* -- Many strangers ----------------------------------------------------------------------------
 */

#define STRANGERS 400u /* more than a relay hears out at a time */
#define ADDRESSES 8u   /* of which they are: more than one has its share */
#define THREADS   300u /* that it may have of them, with some of its own */
#define OF_ONE    600u /* more of one address than are heard, and wait */

static uint32_t threads_of(pid_t pid)
{
    char path[64];
    uint32_t count = 0;
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *dir = opendir(path);
    EXPECT(dir != NULL);
    for (const struct dirent *d = readdir(dir); d != NULL; d = readdir(dir))
        count += d->d_name[0] != '.';
    closedir(dir);
    return count;
}

/* When there have been no more for a while. */
static uint32_t most_threads_of(pid_t pid)
{
    uint32_t most = 0;
    for (uint32_t looks = 0; looks < 50; looks++) {
        const uint32_t now = threads_of(pid);
        if (now > most)
            looks = 0;
        most = now > most ? now : most;
        sleep_ms(10);
    }
    return most;
}

/* From one of several addresses of this host. */
static int connect_silently(uint32_t from)
{
    char name[LISTEN_NAME_BYTES];
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(7100) };
    const struct sockaddr_in own = { .sin_family = AF_INET,
                                     .sin_addr = { htonl(0x7f000101 + from) } };
    own_address(name);
    *strchr(name, ':') = '\0';
    EXPECT(inet_pton(AF_INET, name, &a.sin_addr) == 1);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    EXPECT(fd >= 0);
    EXPECT(bind(fd, (const struct sockaddr *)&own, sizeof own) == 0);
    EXPECT(connect(fd, (const struct sockaddr *)&a, sizeof a) == 0 || errno == EINPROGRESS);
    return fd;
}

/* They have some of its threads and no more; sessions go on, and who belongs to the cluster gets in
 * when the first of them have had their time. */
TEST(strangers_without_number_leave_threads_to_the_others)
{
    const struct wire_request status = { .seq = 2, .type = WIRE_STATUS };
    int fds[STRANGERS];
    struct far far = { .files = false };
    far_start(&far);
    struct bulk *bulk = attach(&far);
    const struct wire_request first = hello(WIRE_READER);
    EXPECT_EQ(say(bulk, &first), SHD_OK);
    EXPECT_EQ(listen_for(bulk, 2), SHD_OK);
    const uint32_t before = threads_of(far.relay);
    for (uint32_t i = 0; i < STRANGERS; i++)
        fds[i] = connect_silently(i % ADDRESSES);
    EXPECT_SOON(threads_of(far.relay) >= before + 200);
    EXPECT(most_threads_of(far.relay) < THREADS);
    EXPECT_EQ(say(bulk, &status), SHD_OK);
    EXPECT_EQ(listen_for(bulk, 3), SHD_OK);
    for (uint32_t i = 0; i < STRANGERS; i++)
        close(fds[i]);
    bulk_close(bulk);
    bulk_close(attach(&far));
    far_stop(&far);
}

static bool is_listened_to(void)
{
    const int fd = connect_silently(0);
    int why = 0;
    socklen_t bytes = sizeof why;
    struct pollfd p = { .fd = fd, .events = POLLOUT };
    poll(&p, 1, -1);
    EXPECT(getsockopt(fd, SOL_SOCKET, SO_ERROR, &why, &bytes) == 0);
    close(fd);
    return why == 0;
}

static uint32_t count_hung_up(const int *fds, uint32_t count)
{
    uint32_t hung_up = 0;
    char byte;
    for (uint32_t i = 0; i < count; i++)
        hung_up += recv(fds[i], &byte, 1, MSG_DONTWAIT | MSG_PEEK) == 0;
    return hung_up;
}

/* Others have the rest of the places: who belongs to the cluster gets in at once. */
TEST(strangers_of_one_address_have_its_share)
{
    int fds[OF_ONE];
    struct far far = { .files = false };
    far_start(&far);
    bulk_close(attach(&far));
    const uint32_t before = threads_of(far.relay);
    for (uint32_t i = 0; i < OF_ONE; i++)
        fds[i] = connect_silently(0);
    EXPECT_SOON(count_hung_up(fds, OF_ONE) >= OF_ONE - STRANGERS_OF_ONE - STRANGERS_WAITING_OF_ONE);
    EXPECT_SOON(threads_of(far.relay) >= before + STRANGERS_OF_ONE - 1);
    EXPECT(most_threads_of(far.relay) <= before + STRANGERS_OF_ONE + 4);
    bulk_close(attach(&far));
    for (uint32_t i = 0; i < OF_ONE; i++)
        close(fds[i]);
    far_stop(&far);
}

TEST(strangers_that_are_heard_at_the_relays_end_do_it_no_harm)
{
    int fds[STRANGERS_OF_ONE];
    struct far far = { .lingers = true };
    far_start(&far);
    bulk_close(attach(&far));
    const uint32_t before = threads_of(far.relay);
    for (uint32_t i = 0; i < STRANGERS_OF_ONE; i++)
        fds[i] = connect_silently(0);
    EXPECT_SOON(threads_of(far.relay) >= before + STRANGERS_OF_ONE - 1);
    EXPECT(kill(far.relay, SIGTERM) == 0);
    EXPECT_SOON(!is_listened_to());
    for (uint32_t i = 0; i < STRANGERS_OF_ONE; i++)
        close(fds[i]);
    far_stop(&far);
}

TEST_MAIN()
