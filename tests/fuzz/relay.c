/* A relay and another host that says what it likes: frames in any order, at any time, also in the
 * middle of what is sent to it. Nothing is read or written outside the memory that both know, no
 * hook sends, no segment goes while its bytes are under way, and what a relay hands on, to the
 * other or to the daemon, are requests that may pass.
 *
 * Input: a byte (bit 0: the relay is beside a daemon, else in its stead; bit 1: with --files), then
 * steps of a byte and what it needs: the other host's frames, whole or by number; what the worker
 * says, or the daemon. relay.h has what stands for the rest. */
#include "tests/fuzz/relay.h"

#include <stdlib.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/relay/copies.h"
#include "daemon/relay/frames.h"
#include "daemon/relay/relay.h"
#include "daemon/relay/routes.h"
#include "daemon/relay/serve.h"
#include "daemon/relay/stand_in.h"
#include "daemon/relay/strangers.h"
#include "daemon/relay/traffic.h"
#include "proto/share/board.h"
#include "proto/share/segment.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec_json.h"
#include "tests/lib/proto_util.h"

#define STEPS_MAX 400u

struct shardmap *relay_maps[RELAY_SPECS];

static struct strangers strangers;
static struct relay relays[2]; /* by bit 0 of the input */
static struct relay_config configs[2] = { { .runtime_dir = "/tmp", .host = "a" },
                                          { .runtime_dir = "/tmp", .host = "a" } };

struct relay_now relay_now;

static uint8_t arena_bytes[WIRE_ARENA_BYTES];
static struct wire_arena arena = { .base = arena_bytes, .bytes = sizeof arena_bytes };
/* -- What comes out ---------------------------------------------------------------------------- */

static void check_request(const void *body, size_t bytes, bool files)
{
    struct shd_err e = { 0 };
    struct wire_request request;
    arena.used = 0;
    CHECK(wire_request_unpack(body, bytes, &arena, &request, &e) == SHD_OK);
    CHECK(frame_admits(&request, files, &e) == SHD_OK);
    CHECK(request.type != WIRE_HELLO || request.hello.level <= WIRE_LEVEL);
}

/* By the name that the daemon's spec has. */
static void check_counted(const struct wire_layout *layout)
{
    struct traffic_view view;
    bool with_inbox = false, found = false;
    for (uint32_t i = 0; i < layout->segment_count; i++)
        with_inbox |= layout->segments[i].kind == SEGMENT_INBOX;
    const char *name = layout->owners == 1 && layout->slot_bytes == relay_maps[0]->slot_bytes ? "m"
                                                                                              : "n";
    for (const struct traffic *t = traffic_next(&relays[1], NULL, &view); t != NULL;
         t = traffic_next(&relays[1], t, &view))
        found |= strcmp(view.model, name) == 0 && view.live[TRAFFIC_SERVED] > 0;
    CHECK(found || !with_inbox || layout->spec_bytes > 0);
}

/* In a daemon's stead: bytes are a segment's that the other host has announced. */
static void sent(const struct bulk_head *head, const void *payload)
{
    struct shd_err e = { 0 };
    struct wire_reply reply;
    arena.used = 0;
    if (head->type == FRAME_MESSAGE && relay_now.beside) {
        CHECK(wire_reply_unpack(payload, head->bytes, &arena, &reply, &e) == SHD_OK);
        if (reply.status == SHD_OK && reply.type == WIRE_LAYOUT)
            check_counted(&reply.layout);
    } else if (head->type == FRAME_MESSAGE) {
        check_request(payload, head->bytes, /* files= */ true);
    }
    if (head->type != FRAME_BYTES || relay_now.beside)
        return;
    bool found = relay_now.known_count == RELAY_KNOWN_MAX;
    for (uint32_t i = 0; i < relay_now.known_count; i++)
        found |= relay_now.known[i].number == head->id && head->at <= relay_now.known[i].bytes &&
                 head->bytes <= relay_now.known[i].bytes - head->at;
    CHECK(found);
}

static void note_reply(const void *body, size_t bytes)
{
    struct shd_err e = { 0 };
    struct wire_reply reply;
    arena.used = 0;
    CHECK(wire_reply_unpack(body, bytes, &arena, &reply, &e) == SHD_OK);
    relay_now.layouts -= reply.status == SHD_OK && reply.type == WIRE_LAYOUT;
}

/* What the worker or the daemon was told goes, and is looked at. */
static void drain(void)
{
    struct shd_err e = { 0 };
    const uint8_t *body;
    size_t bytes;
    struct zconn *z = relay_now.beside ? &far_daemon.z : &relay_now.worker;
    if (z->fd >= 0)
        zconn_read(z, &e);
    while (z->fd >= 0 && zconn_next(z, &body, &bytes, &e) == SHD_OK)
        if (relay_now.beside)
            check_request(body, bytes, configs[1].files);
        else
            note_reply(body, bytes);
    CHECK(relay_now.layouts <= (int)COPIES_MODELS_MAX);
    struct side_msg msg;
    const int side = relay_now.beside ? far_daemon.side : relay_now.side;
    int fd = -1;
    while (side >= 0 && side_recv(side, 0, &msg, &fd, &e) == SHD_OK) {
        if (fd >= 0)
            close(fd);
        if (msg.type == SIDE_WELCOME)
            relay_now.welcome = msg;
    }
}

static int turn(struct bulk *bulk, struct shd_err *e)
{
    drain();
    if (relay_now.in.left == 0 || ++relay_now.steps > STEPS_MAX)
        return err_set(e, SHD_EGONE, "the input is over");
    return relay_now.beside ? relay_step_beside(bulk, &relay_now.in, e)
                            : relay_step_in_stead(bulk, &relay_now.in, e);
}

/* -- An input ---------------------------------------------------------------------------------- */

static void make_once(void)
{
    static struct routes routes = {
        .items = { { .device = "cpu0", .host = "b" } }, .count = 1, .own = "cpu1", .serves = true
    };
    struct shd_err e = { 0 };
    if (relay_maps[0] != NULL)
        return;
    log_set_level(LOG_LEVEL_ERROR);
    strangers_init(&strangers);
    for (unsigned i = 0; i < RELAY_SPECS; i++) {
        struct spec *spec = NULL;
        CHECK(spec_parse(relay_specs[i], strlen(relay_specs[i]), &spec, &e) == SHD_OK);
        CHECK(shardmap_new(spec, 0, 1, &relay_maps[i], &e) == SHD_OK);
        spec_free(spec);
    }
    for (unsigned i = 0; i < 2; i++) {
        relays[i] = (struct relay){ .config = &configs[i],
                                    .routes = &routes,
                                    .strangers = &strangers };
        CHECK(pthread_mutex_init(&relays[i].lock, NULL) == 0);
    }
}

/* A worker's side channel and, when it has a welcome, its requests. */
static void run_in_stead(void)
{
    struct wire_request hello = { .type = WIRE_HELLO };
    struct stand_in_door *door = calloc(1, sizeof *door);
    struct stand_in_door *requests = calloc(1, sizeof *requests);
    struct shd_err e = { 0 };
    int side[2], fds[2];
    CHECK(door != NULL && requests != NULL);
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, side) == 0);
    relay_now.side = side[1];
    *door = *requests = (struct stand_in_door){ .fd = side[0], .device = "cpu0", .host = "b" };
    stand_in_side(&relays[0], door);
    drain();
    if (relays[0].waiting != NULL) {
        CHECK(relay_now.welcome.type == SIDE_WELCOME && relay_now.welcome.ticket <= WIRE_LEVEL);
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) == 0);
        CHECK(zconn_open(&relay_now.worker, fds[1], /* dealer= */ true, &e) == SHD_OK);
        hello.hello = (struct wire_hello){
            .protocol = SHD_PROTOCOL, .role = WIRE_TRAINER, .name = "w", .level = WIRE_LEVEL + 1
        };
        memcpy(hello.hello.token, relay_now.welcome.token, sizeof hello.hello.token);
        relay_ask(&hello);
        requests->fd = fds[0];
        stand_in_requests(&relays[0], requests);
        zconn_close(&relay_now.worker);
    } else {
        free(requests);
    }
    CHECK(relays[0].waiting == NULL);
    close(relay_now.side);
}

static void run_beside(void)
{
    struct stranger *who = malloc(sizeof *who), next;
    CHECK(who != NULL);
    *who = (struct stranger){ .fd = dup(STDERR_FILENO) };
    CHECK(strangers_come(&strangers, who) && strangers_next(&strangers, &next));
    serve_connection(&relays[1], who);
}

static int relay_input(const uint8_t *data, size_t size)
{
    static const struct far_script script = { turn, sent };
    if (size == 0)
        return 0;
    make_once();
    memset(&relay_now, 0, sizeof relay_now);
    relay_now.in = (struct fuzz_in){ data + 1, size - 1 };
    relay_now.beside = (data[0] & 1) != 0;
    relay_now.side = -1;
    relay_now.worker = ZCONN_CLOSED;
    configs[0].files = configs[1].files = (data[0] & 2) != 0;
    far_begin(&script);
    const int low = fuzz_lowest_free(STDERR_FILENO);
    if (relay_now.beside)
        run_beside();
    else
        run_in_stead();
    far_end();
    CHECK(fuzz_lowest_free(STDERR_FILENO) == low);
    CHECK(relays[relay_now.beside].mirrors == NULL);
    return 0;
}

/* -- Seeds ------------------------------------------------------------------------------------- */

/* Steps of a session in a daemon's stead, then of one beside it. */
#define WELCOME      1, 0
#define MODEL(which) 3, (which) | LAYOUT_INBOX, (which), 7, (which), (which)
#define RETURNS      13, 0, 1, 0, 0, 0, 13, 0, 1, 1, 1, 0
#define STAGE        4, 1, 0
#define STAGES       STAGE, STAGE, STAGE, STAGE, STAGE
#define OPEN         1, FRAME_OPEN_SESSION, 0
#define ASK(type)    2, (type), 1, 2, 3, 4

#define SEED(...)                                                                  \
    {                                                                              \
        (const uint8_t[]){ __VA_ARGS__ }, sizeof((const uint8_t[]){ __VA_ARGS__ }) \
    }

/* What two relays say: a session that trains, one that puts, a board that is set back, and the
 * same from beside the daemon. Then what went wrong once. */
static const struct {
    const uint8_t *bytes;
    size_t count;
} seeds[] = {
    SEED(0, WELCOME),
    SEED(0, WELCOME, MODEL(0), RETURNS),
    SEED(0, WELCOME, MODEL(0), RETURNS, STAGE, 10, 0, 9, 0, 0, 2),
    SEED(0, WELCOME, MODEL(0), MODEL(1), RETURNS, 9, 0, 0, 100, 8, 3, RETURNS, STAGE),
    SEED(0, WELCOME, 3, LAYOUT_APART | LAYOUT_INBOX, 0, 7, 0, 0, RETURNS, 1, 3),
    SEED(0, WELCOME, MODEL(0), 6, FRAME_STATE, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0),
    SEED(0, WELCOME, 0, FRAME_ATTEMPT, 0, 1, 0, 2, 0, 1, 0, 0, 0, 5, 1, 2, 3, 4, 5),
    SEED(0, 0, FRAME_REFUSED, 0, 0, 0, 0, 0, 0, 0, 4, 4, 'g', 'o', 'n', 'e'),
    SEED(1, OPEN, ASK(WIRE_HELLO), 5, 0, LAYOUT_INBOX, 0, 4, 1, 0, 0, 1, 1, ASK(WIRE_RETURN), 5, 3,
         0),
    SEED(3, OPEN, ASK(WIRE_HELLO), 5, 1, 0, 4, 1, 0, 9, 0, 9, ASK(WIRE_PUT), 5, 2, 1,
         ASK(WIRE_CHECKPOINT)),
    SEED(1, OPEN, 5, 0, LAYOUT_APART | LAYOUT_INBOX, 0, ASK(WIRE_CHECKPOINT), ASK(WIRE_DROP)),
    SEED(1, 1, FRAME_OPEN_MODEL, 0),
    SEED(1, 1, FRAME_OPEN_SESSION, 2),
    SEED(0, WELCOME, MODEL(0), 13, 0, 0, 0, 0, 0), /* a frozen unit's gradient */
    /* so many stages while one is sent that the oldest go */
    SEED(0, WELCOME, 4, 1, 3, 8, 17, 10, 0, STAGES, STAGES, STAGES, STAGE, STAGE),
    /* layouts whose mirror never comes */
    SEED(0, WELCOME, 3, 0, 0, 3, 0, 0, 3, 0, 0, 3, 0, 0, 3, 0, 0, 3, 0, 0, 3, 0, 0, 3, 0, 0, 3, 0,
         0),
    /* a request in the middle of a layout */
    SEED(1, OPEN, 3, 1, 5, 0, LAYOUT_INBOX, 0, ASK(WIRE_OPEN_MODEL)),
};

static size_t relay_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    if (index >= ARRAY_SIZE(seeds) || bytes_max < seeds[index].count)
        return 0;
    memcpy(buf, seeds[index].bytes, seeds[index].count);
    return seeds[index].count;
}

const struct fuzz_target fuzz_relay = { "relay", relay_input, relay_seed, NULL };
