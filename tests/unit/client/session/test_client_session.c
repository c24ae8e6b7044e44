/* The client against a daemon that lies: a forked child that speaks the protocol correctly up to
 * one trick. Each trick must end in a clear error of the right kind that names the daemon, and
 * leave no descriptor and no mapping behind. Without a trick the same fake is accepted. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zmq.h>

#include "client/paths/map.h"
#include "client/session/address.h"
#include "client/session/where.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/board.h"
#include "proto/share/fdpass.h"
#include "proto/spec/spec_json.h"
#include "tests/lib/client_toy.h"
#include "tests/lib/fixture.h"
#include "tests/lib/test.h"

enum trick {
    HONEST,
    OTHER_DEVICE,     /* Welcome is from another device */
    GARBAGE,          /* OpenModel's reply is no protobuf */
    TWO_FRAMES,       /* ... has a second frame */
    OTHER_SEQ,        /* ... answers another request */
    OTHER_TYPE,       /* ... is a Credit */
    OTHER_OWNER,      /* Layout: owner 1 of 2 */
    OTHER_SLOTS,      /* Layout: one slot more */
    OTHER_SLOT_BYTES, /* Layout: slots of twice the size */
    OTHER_SPEC,       /* Layout: another model's spec */
    BROKEN_SPEC,      /* Layout: the spec is not JSON */
    LARGER_PUBLISH,   /* Layout: publish segment a page too large */
    PUBLISH_TWICE,
    NO_BOARD,
    OTHER_KIND,   /* side channel passes an inbox for a publish segment */
    UNSEALED,     /* memfd without seals */
    SHORT_FILE,   /* memfd shorter than announced */
    OTHER_BOARD,  /* board for another number of units */
    NOT_A_BOARD,  /* zeros */
    SIDE_REFUSES, /* side channel answers a claim with an error */
    HANGS_UP,     /* after Hello */
    BUSY_TWICE,   /* OpenModel is served when it is asked for the third time */
    LATE_TWICE,   /* Hello finds its session ended, until it is said on the third connection */
};

struct fake {
    enum trick trick;
    uint32_t refusals;
    struct side_msg welcome; /* what it says of its build */
    uint32_t told;           /* the level that Hello has to say then */
    bool late;               /* the session of the Hello at hand has ended */
    char dir[64];
    int listen_fd, side_fd;
    void *router;
    struct spec *spec;
    struct shardmap *map;
    struct segment segments[WIRE_SEGMENTS_MAX];
    struct wire_layout layout;
    char *json;
    uint8_t frame[65536];
    _Alignas(16) uint8_t arena[WIRE_ARENA_BYTES];
};

static void add_segment(struct fake *f, enum segment_kind kind, uint64_t bytes)
{
    struct shd_err e = { 0 };
    const uint32_t i = f->layout.segment_count++;
    EXPECT_OK(segment_new("shardd-fake", kind, bytes, &f->segments[i], &e), &e);
    f->layout.segments[i] = (struct wire_segment){ .kind = kind,
                                                   .ticket = i + 1,
                                                   .bytes = f->segments[i].bytes };
}

static void make_layout(struct fake *f, uint32_t slots)
{
    struct shd_err e = { 0 };
    const char *json = toy_spec("f32", TOY_ADAMW);
    EXPECT_OK(spec_parse(json, strlen(json), &f->spec, &e), &e);
    EXPECT_OK(spec_dump(f->spec, &f->json, &e), &e);
    EXPECT_OK(shardmap_new(f->spec, 0, 1, &f->map, &e), &e);
    const char *shown = f->trick == OTHER_SPEC    ? toy_other_spec('7')
                        : f->trick == BROKEN_SPEC ? "{"
                                                  : f->json;
    f->layout = (struct wire_layout){ .model = 1,
                                      .spec = { (const uint8_t *)shown, strlen(shown) },
                                      .owner = f->trick == OTHER_OWNER,
                                      .owners = f->trick == OTHER_OWNER ? 2 : 1,
                                      .slots = slots + (f->trick == OTHER_SLOTS),
                                      .slot_bytes = f->map->slot_bytes
                                                    << (f->trick == OTHER_SLOT_BYTES) };
    add_segment(f, SEGMENT_PUBLISH,
                shardmap_publish_bytes(f->map) + (f->trick == LARGER_PUBLISH ? SHD_PAGE_BYTES : 0));
    if (f->trick == PUBLISH_TWICE)
        add_segment(f, SEGMENT_PUBLISH, shardmap_publish_bytes(f->map));
    if (f->trick != NO_BOARD) {
        add_segment(f, SEGMENT_BOARD, board_bytes(f->spec->unit_count));
        struct board *b = f->segments[f->layout.segment_count - 1].base;
        if (f->trick != NOT_A_BOARD)
            board_init(b, f->spec->unit_count - (f->trick == OTHER_BOARD));
    }
    add_segment(f, SEGMENT_INBOX, shardmap_inbox_bytes(f->map, slots));
}

static int odd_memfd(const struct fake *f, uint64_t bytes)
{
    const int fd = memfd_create("shardd-fake", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    const uint64_t size = f->trick == SHORT_FILE ? bytes - SHD_PAGE_BYTES : bytes;
    EXPECT(fd >= 0 && ftruncate(fd, (off_t)size) == 0);
    if (f->trick == SHORT_FILE)
        EXPECT(fcntl(fd, F_ADD_SEALS,
                     F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | F_SEAL_FUTURE_WRITE) == 0);
    return fd;
}

static void answer_claim(struct fake *f)
{
    struct shd_err e = { 0 };
    struct side_msg msg;
    if (side_recv(f->side_fd, 0, &msg, NULL, &e) != SHD_OK)
        _exit(0); /* the client has gone */
    const struct wire_segment *s = &f->layout.segments[msg.ticket - 1];
    int fd = f->segments[msg.ticket - 1].fd;
    msg.type = SIDE_SEGMENT;
    msg.kind = f->trick == OTHER_KIND ? SEGMENT_INBOX : s->kind;
    msg.bytes = s->bytes;
    if (f->trick == UNSEALED || f->trick == SHORT_FILE)
        fd = odd_memfd(f, s->bytes);
    if (f->trick == SIDE_REFUSES) {
        msg.type = SIDE_ERROR;
        msg.status = SHD_EBUSY;
        strcpy(msg.text, "not today");
        fd = -1;
    }
    EXPECT_OK(side_send(f->side_fd, &msg, fd, &e), &e);
}

static void fill_reply(struct fake *f, const struct wire_request *request, struct wire_reply *reply)
{
    *reply = (struct wire_reply){ .seq = request->seq, .text = "" };
    if (request->type == WIRE_HELLO && f->trick == LATE_TWICE && f->refusals < 2) {
        f->refusals++;
        f->late = true;
        reply->status = SHD_EAUTH;
        reply->text = "unknown or used session token";
    } else if (request->type == WIRE_HELLO) {
        reply->type = WIRE_WELCOME;
        reply->welcome = (struct wire_welcome){ .session = 77,
                                                .device = f->trick == OTHER_DEVICE ? "gpu9"
                                                                                   : "cpu0" };
    } else if (request->type == WIRE_OPEN_MODEL && f->trick == BUSY_TWICE && f->refusals < 2) {
        f->refusals++;
        reply->status = SHD_EBUSY;
        reply->text = "no place";
        reply->retry_ms = 5;
    } else if (request->type == WIRE_OPEN_MODEL) {
        make_layout(f, request->open_model.slots);
        reply->type = f->trick == OTHER_TYPE ? WIRE_CREDIT : WIRE_LAYOUT;
        if (reply->type == WIRE_LAYOUT)
            reply->layout = f->layout;
        else
            reply->credit = (struct wire_credit){ .slot = 0 };
        reply->seq += f->trick == OTHER_SEQ;
    }
}

static void accept_side(struct fake *f)
{
    struct shd_err e;
    f->welcome.type = SIDE_WELCOME;
    f->side_fd = accept(f->listen_fd, NULL, NULL);
    CHECK(side_send(f->side_fd, &f->welcome, -1, &e) == SHD_OK);
}

static void answer_request(struct fake *f)
{
    uint8_t identity[64];
    struct shd_err e = { 0 };
    struct wire_request request;
    struct wire_reply reply;
    const int identity_bytes = zmq_recv(f->router, identity, sizeof identity, 0);
    const int bytes = zmq_recv(f->router, f->frame, sizeof f->frame, 0);
    struct wire_arena arena = { f->arena, sizeof f->arena, 0 };
    EXPECT(identity_bytes > 0 && bytes > 0);
    EXPECT_OK(wire_request_unpack(f->frame, (size_t)bytes, &arena, &request, &e), &e);
    if (request.type == WIRE_HELLO)
        EXPECT_EQ(request.hello.level, f->told);
    if (request.type == WIRE_OPEN_MODEL)
        EXPECT_EQ(request.open_model.spec_apart, f->told > 0 || f->welcome.kind == SEGMENT_SPEC);
    fill_reply(f, &request, &reply);
    size_t used;
    EXPECT_OK(wire_reply_pack(&reply, f->frame, sizeof f->frame, &used, &e), &e);
    const bool open = request.type == WIRE_OPEN_MODEL;
    if (open && f->trick == GARBAGE)
        memset(f->frame, 0xff, used);
    const bool more = open && f->trick == TWO_FRAMES;
    zmq_send(f->router, identity, (size_t)identity_bytes, ZMQ_SNDMORE);
    zmq_send(f->router, f->frame, used, more ? ZMQ_SNDMORE : 0);
    if (more)
        zmq_send(f->router, "more", 4, 0);
    if (f->late) {
        struct pollfd gone = { .fd = f->side_fd, .events = POLLIN };
        f->late = false;
        poll(&gone, 1, -1); /* the client has read the answer */
        close(f->side_fd);
        accept_side(f);
    }
    if (request.type == WIRE_HELLO && f->trick == HANGS_UP) {
        sleep_ms(100);
        _exit(0);
    }
}

__attribute__((noreturn)) static void be_fake(struct fake *f)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    char endpoint[128];
    void *context = zmq_ctx_new();
    f->router = zmq_socket(context, ZMQ_ROUTER);
    snprintf(endpoint, sizeof endpoint, "ipc://%s/cpu0.zmq", f->dir);
    CHECK(zmq_bind(f->router, endpoint) == 0);
    accept_side(f);
    for (;;) {
        zmq_pollitem_t items[] = { { .socket = f->router, .events = ZMQ_POLLIN },
                                   { .fd = f->side_fd, .events = ZMQ_POLLIN } };
        CHECK(zmq_poll(items, 2, -1) >= 0);
        if (items[1].revents != 0)
            answer_claim(f);
        else if (items[0].revents != 0)
            answer_request(f);
    }
}

static pid_t start_fake(struct fake *f)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    strcpy(f->dir, "/tmp/shd-fake-XXXXXX");
    CHECK(mkdtemp(f->dir) != NULL);
    snprintf(a.sun_path, sizeof a.sun_path, "%s/cpu0.sock", f->dir);
    f->listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    CHECK(f->listen_fd >= 0 && bind(f->listen_fd, (const struct sockaddr *)&a, sizeof a) == 0 &&
          listen(f->listen_fd, 1) == 0);
    fflush(stdout);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0)
        be_fake(f);
    close(f->listen_fd);
    return pid;
}

static int attach(const struct fake *f, struct shd_err *e)
{
    /* One that has gone is waited for as long as one may. */
    const uint64_t wait_ms = f->trick == HANGS_UP ? test_paced(2000) : TEST_HANG_MS;
    const struct shd_options options = { .size = sizeof options,
                                         .address = f->dir,
                                         .timeout_ms = wait_ms };
    shd_session *s;
    shd_model *m = NULL;
    int r = shd_connect(&options, &s, e);
    if (r != SHD_OK)
        return r;
    r = shd_model_open(s, toy_spec("f32", TOY_ADAMW), &m, e);
    shd_close(s);
    return r;
}

static struct fake f;

static void expect_so(int status, const char *has)
{
    const enum trick trick = f.trick;
    char command[128];
    struct shd_err e = { 0 };
    const int fds = count_fds(getpid()), maps = count_segment_maps(getpid());
    const pid_t pid = start_fake(&f);
    const int r = attach(&f, &e);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    snprintf(command, sizeof command, "rm -rf %s", f.dir);
    EXPECT_EQ(system(command), 0);
    if (r != status)
        FAIL("trick %d: expected %s, got %s: %s", (int)trick, status_name(status), status_name(r),
             e.text);
    if (status != SHD_OK) {
        EXPECT_HAS(e.text, "cpu0");
        EXPECT_HAS(e.text, has);
    }
    EXPECT_EQ(count_fds(getpid()), fds);
    EXPECT_EQ(count_segment_maps(getpid()), maps);
}

static void expect_trick(enum trick trick, int status, const char *has)
{
    f = (struct fake){ .trick = trick };
    expect_so(status, has);
}

/* A field that it does not know would end the session. */
TEST(a_daemon_is_told_what_its_build_knows)
{
    static const struct {
        uint32_t kind;
        uint64_t level;
        uint32_t told;
    } builds[] = {
        { 0, 0, 0 },            /* before specs in segments */
        { SEGMENT_SPEC, 0, 0 }, /* before levels were told */
        { SEGMENT_SPEC, WIRE_LEVEL_TOLD, WIRE_LEVEL },
        { SEGMENT_SPEC, UINT64_MAX, WIRE_LEVEL }, /* to come */
    };
    for (size_t i = 0; i < ARRAY_SIZE(builds); i++) {
        f = (struct fake){ .welcome = { .kind = builds[i].kind, .ticket = builds[i].level },
                           .told = builds[i].told };
        expect_so(SHD_OK, "");
    }
}

TEST(what_a_daemon_has_no_place_for_is_asked_again)
{
    expect_trick(BUSY_TWICE, SHD_OK, "");
}

TEST(hello_that_came_too_late_is_said_again)
{
    expect_trick(LATE_TWICE, SHD_OK, "");
}

TEST(honest_fake_is_accepted)
{
    expect_trick(HONEST, SHD_OK, "");
}

TEST(strange_replies_are_refused)
{
    expect_trick(OTHER_DEVICE, SHD_EPROTO, "says it is device 'gpu9'");
    expect_trick(GARBAGE, SHD_EPROTO, "not understood");
    expect_trick(TWO_FRAMES, SHD_EPROTO, "several frames");
    expect_trick(OTHER_SEQ, SHD_EPROTO, "which was not asked");
    expect_trick(OTHER_TYPE, SHD_EPROTO, "answered OpenModel with a reply of type");
    expect_trick(HANGS_UP, SHD_EGONE, "is gone");
}

TEST(layouts_that_contradict_the_spec_are_refused)
{
    expect_trick(OTHER_OWNER, SHD_EPROTO, "is owner 1 of 2, not 0 of 1");
    expect_trick(OTHER_SLOTS, SHD_EPROTO, "made 4 gradient slots, not 3");
    expect_trick(OTHER_SLOT_BYTES, SHD_ESEGMENT, "the spec makes them");
    expect_trick(OTHER_SPEC, SHD_ESPEC, "4097");
    expect_trick(BROKEN_SPEC, SHD_EINVAL, "has another model");
    expect_trick(LARGER_PUBLISH, SHD_ESEGMENT, "the spec makes it");
    expect_trick(PUBLISH_TWICE, SHD_EPROTO, "offers two publish segments");
    expect_trick(NO_BOARD, SHD_EPROTO, "offers segments");
}

TEST(segments_are_checked_before_they_are_mapped)
{
    expect_trick(OTHER_KIND, SHD_EPROTO, "got segment kind 3");
    expect_trick(UNSEALED, SHD_ESEGMENT, "seals");
    expect_trick(SHORT_FILE, SHD_ESEGMENT, "needs");
    expect_trick(OTHER_BOARD, SHD_ESEGMENT, "board has 3 units, the model 4");
    expect_trick(NOT_A_BOARD, SHD_ESEGMENT, "board magic");
    expect_trick(SIDE_REFUSES, SHD_EBUSY, "not today");
}

/* Addresses: the grammar, and listing a runtime directory. */

static char dir[64];

static void make_dir(void)
{
    strcpy(dir, "/tmp/shd-address-XXXXXX");
    EXPECT(mkdtemp(dir) != NULL);
}

static void put_file(const char *name)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    const int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    EXPECT(fd >= 0);
    close(fd);
}

static void remove_dir(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", dir);
    EXPECT_EQ(system(command), 0);
}

static int parse(const char *text, struct address *a, struct shd_err *e)
{
    *e = (struct shd_err){ 0 };
    return address_parse(text, a, e);
}

TEST(natural_order)
{
    static const char *const sorted[] = { "cpu",    "cpu0",  "cpu1", "cpu2",   "cpu9",   "cpu10",
                                          "cpu10a", "cpu11", "gpu0", "gpu0.1", "gpu00.2" };
    for (size_t i = 0; i < ARRAY_SIZE(sorted); i++)
        for (size_t j = 0; j < ARRAY_SIZE(sorted); j++) {
            const int order = address_compare(sorted[i], sorted[j]);
            EXPECT(i < j ? order < 0 : i > j ? order > 0 : order == 0);
        }
    EXPECT(address_compare("cpu1", "cpu01") != 0);
}

TEST(pairs_are_owners_and_then_their_replicas)
{
    static const char *const wrong[][2] = {
        { "/d?cpu0+cpu2,cpu1", "device 'cpu1' in the address has no replica, and others have" },
        { "/d?cpu0,cpu1+cpu2", "device 'cpu0' in the address has no replica" },
        { "/d?cpu0+cpu0", "device 'cpu0' is in the address twice" },
        { "/d?cpu0+cpu1,cpu1+cpu0", "device 'cpu1' is in the address twice" },
        { "/d?cpu0+", "empty device name" },
        { "/d?+cpu0", "empty device name" },
        { "/d?a+b+c", "device name 'b+c'" },
    };
    struct address a;
    struct shd_err e;
    EXPECT_OK(parse("/d?cpu0+cpu2,cpu3+cpu1", &a, &e), &e);
    EXPECT(a.count == 4 && a.owners == 2);
    EXPECT_STR(a.devices[0], "cpu0");
    EXPECT_STR(a.devices[1], "cpu3");
    EXPECT_STR(a.devices[2], "cpu2");
    EXPECT_STR(a.devices[3], "cpu1");
    address_free(&a);
    EXPECT_OK(parse("/d?cpu1,cpu0", &a, &e), &e);
    EXPECT(a.count == 2 && a.owners == 2);
    address_free(&a);
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        EXPECT_STATUS(parse(wrong[i][0], &a, &e), SHD_EINVAL);
        EXPECT_HAS(e.text, wrong[i][1]);
    }
}

TEST(bare_directory_lists_its_daemons_in_order)
{
    struct address a;
    struct shd_err e;
    make_dir();
    put_file("cpu10.sock");
    put_file("cpu2.sock");
    put_file("cpu2.zmq");
    put_file("cpu2.lock");
    put_file(".hidden.sock");
    put_file(".sock");
    put_file("cpu0.sock");
    EXPECT_OK(parse(dir, &a, &e), &e);
    EXPECT_EQ(a.count, 3);
    EXPECT_STR(a.devices[0], "cpu0");
    EXPECT_STR(a.devices[1], "cpu2");
    EXPECT_STR(a.devices[2], "cpu10");
    EXPECT_STR(a.dir, dir);
    address_free(&a);
    address_free(&a);
    remove_dir();
}

/* Else each daemon of a pair would be an owner, of half of it. */
TEST(a_bare_directory_of_pairs_is_refused)
{
    struct address a;
    struct shd_err e;
    char text[100];
    make_dir();
    put_file("cpu0.sock");
    put_file("cpu2.sock");
    put_file("replicas.json");
    EXPECT_STATUS(parse(dir, &a, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "are pairs (replicas.json)");
    snprintf(text, sizeof text, "%s?cpu0+cpu2", dir);
    EXPECT_OK(parse(text, &a, &e), &e);
    address_free(&a);
    remove_dir();
}

TEST(device_list_keeps_its_order)
{
    struct address a;
    struct shd_err e;
    EXPECT_OK(parse("/run/x?cpu1,cpu0,gpu-0.a_b", &a, &e), &e);
    EXPECT(!a.local && a.count == 3);
    EXPECT_STR(a.devices[0], "cpu1");
    EXPECT_STR(a.devices[2], "gpu-0.a_b");
    EXPECT_STR(a.dir, "/run/x");
    address_free(&a);
    EXPECT_OK(parse("/run/x?cpu10,cpu1", &a, &e), &e); /* not the same name twice */
    EXPECT_EQ(a.count, 2);
    address_free(&a);
}

TEST(local)
{
    struct address a;
    struct shd_err e;
    EXPECT_OK(parse("local:", &a, &e), &e);
    EXPECT(a.local && a.count == 0);
    address_free(&a);
    EXPECT_STATUS(parse("local:2", &a, &e), SHD_EINVAL);
}

TEST(null_is_the_environment_then_the_default)
{
    char nothing_runs_here[] = "/tmp/shd-where-XXXXXX";
    struct address a;
    struct shd_err e;
    EXPECT(mkdtemp(nothing_runs_here) != NULL);
    setenv("XDG_RUNTIME_DIR", nothing_runs_here, 1);
    setenv(WHERE_ENV, "local:", 1);
    EXPECT_OK(parse(NULL, &a, &e), &e);
    EXPECT(a.local);
    setenv(WHERE_ENV, "", 1);
    EXPECT(parse(NULL, &a, &e) != SHD_OK || strcmp(a.dir, WHERE_DEFAULT) == 0);
    unsetenv(WHERE_ENV);
    unsetenv("XDG_RUNTIME_DIR");
    rmdir(nothing_runs_here);
}

TEST(bad_addresses_say_what_would_be_right)
{
    static const struct {
        const char *text;
        int status;
        const char *has;
    } cases[] = {
        { "?cpu0", SHD_EINVAL, "names no directory" },
        { "/run/x?", SHD_EINVAL, "DIR?cpu0,cpu1" },
        { "/run/x?cpu0,", SHD_EINVAL, "empty device name" },
        { "/run/x?cpu0,cpu0", SHD_EINVAL, "'cpu0' is in the address twice" },
        { "/run/x?cpu0/../y", SHD_EINVAL, "only letters" },
        { "/nowhere/at/all", SHD_ENOENT, "'/nowhere/at/all'" },
        { "/etc/passwd", SHD_ENOENT, "'/etc/passwd'" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct address a = { .count = 99 };
        struct shd_err e;
        EXPECT_STATUS(parse(cases[i].text, &a, &e), cases[i].status);
        EXPECT_HAS(e.text, cases[i].has);
        EXPECT_EQ(a.count, 99);
    }
}

TEST(empty_directory_names_the_command)
{
    struct address a;
    struct shd_err e;
    make_dir();
    EXPECT_STATUS(parse(dir, &a, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "shardd --device cpu0 --runtime-dir");
    EXPECT_HAS(e.text, dir);
    remove_dir();
}

TEST(socket_paths_have_a_limit)
{
    struct address a;
    struct shd_err e;
    char text[200];
    snprintf(text, sizeof text, "/%0100d?cpu0", 0); /* 101 + "/cpu0.sock" */
    EXPECT_STATUS(parse(text, &a, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "at most 107");
}

static int fail_at;

static int fail_nth(enum sys_kind kind)
{
    return kind == SYS_ALLOC && --fail_at == 0 ? ENOMEM : 0;
}

TEST(nth_failed_allocation_is_an_error)
{
    int n = 0, r;
    do {
        struct address a = { 0 };
        struct shd_err e;
        fail_at = ++n;
        sys_fault = fail_nth;
        r = parse("/run/x?cpu0,cpu1", &a, &e);
        sys_fault = NULL;
        EXPECT(r == SHD_OK || r == SHD_ENOMEM);
        address_free(&a);
    } while (r != SHD_OK);
    EXPECT(n > 4);
}

TEST_MAIN()
