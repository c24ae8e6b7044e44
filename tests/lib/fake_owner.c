#include "tests/lib/fake_owner.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <zmq.h>

#include "proto/share/board.h"
#include "proto/share/fdpass.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec.h"
#include "proto/spec/spec_json.h"

#define DIED    42
#define PENDING 64u
#define IDLE_MS 1

/* -- What outlives a fake ---------------------------------------------------------------------- */

struct world *world;

float param_at(uint64_t step, uint32_t unit, uint64_t elem)
{
    return (float)(step * 100000 + unit * 10000 + elem % 7919);
}

float grad_at(uint64_t step, uint32_t micro, uint32_t unit, uint64_t elem)
{
    return (float)(step * 1000000 + micro * 100000 + unit * 50000 + elem % 7919);
}

/* -- The fake ---------------------------------------------------------------------------------- */

struct fake {
    uint32_t index;
    struct owner_state *state;
    int listen_fd, side_fd;
    void *router;
    struct spec *spec;
    struct shardmap *map;
    struct segment publish, board, inbox;
    uint8_t identity[64];
    size_t identity_bytes;
    struct wire_request pending[PENDING]; /* answered when idle, or when it can be */
    uint32_t pending_count;
    uint8_t frame[65536];
    _Alignas(16) uint8_t arena[WIRE_ARENA_BYTES];
};

/* A point to die at. */
static void point(const struct fake *f)
{
    if (f->index != 0)
        return;
    const uint64_t now = world->events++;
    if (now != world->die_at[0] && now != world->die_at[1])
        return;
    world->deaths++;
    _exit(DIED);
}

static void publish_step(struct fake *f)
{
    const uint64_t step = f->state->step;
    for (uint32_t u = 0; u < UNITS; u++) {
        const struct slice s = f->map->slice[u];
        float *at = (float *)((uint8_t *)f->publish.base +
                              shardmap_publish_offset_bytes(f->map, u));
        for (uint64_t i = 0; i < s.elems; i++)
            at[i] = param_at(step, u, s.first_elem + i);
        board_publish(f->board.base, u, step);
    }
    board_set_step(f->board.base, step, 0);
}

static void make_model(struct fake *f)
{
    struct shd_err e;
    CHECK(spec_parse(spec_json, strlen(spec_json), &f->spec, &e) == SHD_OK);
    CHECK(shardmap_new(f->spec, f->index, OWNERS, &f->map, &e) == SHD_OK);
    CHECK(segment_new("shardd-fake", SEGMENT_PUBLISH, shardmap_publish_bytes(f->map), &f->publish,
                      &e) == SHD_OK);
    CHECK(segment_new("shardd-fake", SEGMENT_BOARD, board_bytes(UNITS), &f->board, &e) == SHD_OK);
    board_init(f->board.base, UNITS);
    publish_step(f);
}

static bool all_in(const struct owner_state *o, uint64_t step, uint32_t micro)
{
    for (uint32_t u = 0; u < UNITS; u++)
        if (o->counted[step][micro][u] == 0)
            return false;
    return true;
}

static bool sealed(const struct owner_state *o, uint64_t step)
{
    for (uint32_t micro = 0; micro < MICROS; micro++)
        if (!all_in(o, step, micro))
            return false;
    return true;
}

static void take_grad(struct fake *f, const struct wire_return *r)
{
    struct owner_state *o = f->state;
    const struct slice s = f->map->slice[r->unit];
    if (r->step != o->step || o->counted[r->step][r->micro][r->unit] > 0)
        return; /* stale */
    const float *at = (const float *)((const uint8_t *)f->inbox.base +
                                      shardmap_slot_offset_bytes(f->map, r->slot));
    for (uint64_t i = 0; !r->none && i < s.elems; i++)
        if (at[i] != grad_at(r->step, r->micro, r->unit, s.first_elem + i))
            world->wrong = true;
    o->counted[r->step][r->micro][r->unit]++;
}

static void fill_layout(struct fake *f, const struct wire_request *request,
                        struct wire_reply *reply)
{
    static char *json;
    const uint32_t slots = request->open_model.slots;
    struct shd_err e;
    if (json == NULL)
        CHECK(spec_dump(f->spec, &json, &e) == SHD_OK);
    reply->type = WIRE_LAYOUT;
    reply->layout = (struct wire_layout){
        .model = world->deaths + 5, /* a successor numbers its models anew */
        .step = f->state->step,
        .spec = { (const uint8_t *)json, strlen(json) },
        .owner = f->index,
        .owners = OWNERS,
        .slots = slots,
        .slot_bytes = f->map->slot_bytes,
        .segments = { { .kind = SEGMENT_PUBLISH, .ticket = 1, .bytes = f->publish.bytes },
                      { .kind = SEGMENT_BOARD, .ticket = 2, .bytes = f->board.bytes } },
        .segment_count = 2,
    };
    if (f->state->step > 0) {
        reply->layout.has_decision = true;
        reply->layout.decision = f->state->decision[f->state->step - 1];
    }
    if (slots == 0)
        return;
    if (f->inbox.base == NULL)
        CHECK(segment_new("shardd-fake", SEGMENT_INBOX, shardmap_inbox_bytes(f->map, slots),
                          &f->inbox, &e) == SHD_OK);
    reply->layout.segments[reply->layout.segment_count++] = (struct wire_segment){
        .kind = SEGMENT_INBOX, .ticket = 3, .bytes = f->inbox.bytes
    };
}

static void fill_leased(const struct fake *f, uint64_t step, struct wire_reply *reply)
{
    reply->type = WIRE_LEASED;
    reply->leased = (struct wire_leased){ .step = step, .what = WIRE_LEASED_ALL_IN };
    if (step < f->state->step)
        reply->leased.what = WIRE_LEASED_OVER;
    for (uint32_t micro = 0; step == f->state->step && micro < MICROS; micro++)
        if (!all_in(f->state, step, micro)) {
            reply->leased.what = WIRE_LEASED_GROUP;
            reply->leased.group = micro;
            return;
        }
}

static void fill_prepared(const struct fake *f, uint64_t step, struct wire_reply *reply)
{
    reply->type = WIRE_PREPARED;
    reply->prepared = (struct wire_prepared){ .step = step, .finite = true };
    fixsum_init(&reply->prepared.sum);
    fixsum_add(&reply->prepared.sum, (double)(step + 1));
    fixsum_carry(&reply->prepared.sum);
    reply->prepared.has_decision = f->state->decided[step];
    reply->prepared.decision = f->state->decision[step];
}

static void commit(struct fake *f, const struct wire_commit *c, struct wire_reply *reply)
{
    struct owner_state *o = f->state;
    if (!o->decided[c->step]) {
        o->decision[c->step] = c->decision;
        CHECK(c->has_blob && c->blob.bytes < sizeof o->blob);
        memcpy(o->blob, c->blob.data, c->blob.bytes);
        o->decided[c->step] = true;
        o->step = c->step + 1;
        publish_step(f);
    }
    reply->type = WIRE_COMMITTED;
    reply->committed = (struct wire_committed){ .step = c->step, .decision = o->decision[c->step] };
}

static void fill_reply(struct fake *f, const struct wire_request *request, struct wire_reply *reply)
{
    *reply = (struct wire_reply){ .seq = request->seq, .text = "" };
    switch (request->type) {
    case WIRE_HELLO:
        reply->type = WIRE_WELCOME;
        reply->welcome = (struct wire_welcome){ .session = 77,
                                                .device = f->index == 0 ? "cpu0" : "cpu1" };
        break;
    case WIRE_OPEN_MODEL:
        fill_layout(f, request, reply);
        if (world->forget && world->deaths > 0) {
            reply->type = WIRE_REPLY_NONE;
            reply->status = SHD_ENOENT;
            reply->text = "no such model";
        }
        break;
    case WIRE_RETURN:
        take_grad(f, &request->return_grad);
        reply->type = WIRE_CREDIT;
        reply->credit.slot = request->return_grad.slot;
        break;
    case WIRE_PREPARE:
        fill_prepared(f, request->prepare.step, reply);
        break;
    case WIRE_COMMIT:
        commit(f, &request->commit, reply);
        break;
    case WIRE_LEASE:
        fill_leased(f, request->lease.step, reply);
        break;
    default:
        break; /* Detach: status alone */
    }
}

static void answer(struct fake *f, const struct wire_request *request)
{
    struct wire_reply reply;
    struct shd_err e;
    size_t used;
    fill_reply(f, request, &reply);
    CHECK(wire_reply_pack(&reply, f->frame, sizeof f->frame, &used, &e) == SHD_OK);
    point(f);
    zmq_send(f->router, f->identity, f->identity_bytes, ZMQ_SNDMORE);
    zmq_send(f->router, f->frame, used, 0);
    if (f->index == 0 && (world->events == world->die_at[0] || world->events == world->die_at[1]))
        sleep_ms(20); /* let the reply out */
    point(f);
}

/* The session is ended as a daemon does it: by hanging up. What comes then is of nobody it knows.
 */
__attribute__((noreturn)) static void expel(struct fake *f, const struct wire_request *request)
{
    const struct wire_reply reply = { .seq = request->seq,
                                      .status = SHD_EAUTH,
                                      .text = "no open session" };
    struct shd_err e;
    size_t used;
    CHECK(wire_reply_pack(&reply, f->frame, sizeof f->frame, &used, &e) == SHD_OK);
    close(f->side_fd);
    zmq_send(f->router, f->identity, f->identity_bytes, ZMQ_SNDMORE);
    zmq_send(f->router, f->frame, used, 0);
    sleep_ms(20); /* let the reply out */
    world->deaths++;
    _exit(DIED);
}

/* Credits come late, and Prepare waits until all is in. */
static bool can_answer(const struct fake *f, const struct wire_request *request, bool idle)
{
    if (request->type == WIRE_PREPARE && request->prepare.step == f->state->step)
        return sealed(f->state, request->prepare.step);
    return request->type != WIRE_RETURN || idle;
}

static void answer_pending(struct fake *f, bool idle)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < f->pending_count; i++)
        if (can_answer(f, &f->pending[i], idle))
            answer(f, &f->pending[i]);
        else
            f->pending[kept++] = f->pending[i];
    f->pending_count = kept;
}

static void receive(struct fake *f)
{
    struct shd_err e = { 0 };
    struct wire_request request;
    const int identity_bytes = zmq_recv(f->router, f->identity, sizeof f->identity, 0);
    const int bytes = zmq_recv(f->router, f->frame, sizeof f->frame, 0);
    struct wire_arena arena = { f->arena, sizeof f->arena, 0 };
    CHECK(identity_bytes > 0 && bytes > 0);
    f->identity_bytes = (size_t)identity_bytes;
    CHECK(wire_request_unpack(f->frame, (size_t)bytes, &arena, &request, &e) == SHD_OK);
    point(f);
    const uint64_t number = f->index == 0 ? world->requests++ : NOBODY - 1;
    if (number == world->expel_at)
        expel(f, &request);
    if (number == world->drop_at)
        return; /* lost on the way */
    if (can_answer(f, &request, /* idle= */ false)) {
        answer(f, &request);
    } else {
        CHECK(f->pending_count < PENDING);
        f->pending[f->pending_count++] = request;
    }
    answer_pending(f, /* idle= */ false);
}

static void answer_claim(struct fake *f)
{
    const struct segment *segments[] = { &f->publish, &f->board, &f->inbox };
    const enum segment_kind kinds[] = { SEGMENT_PUBLISH, SEGMENT_BOARD, SEGMENT_INBOX };
    struct shd_err e = { 0 };
    struct side_msg msg;
    if (side_recv(f->side_fd, 0, &msg, NULL, &e) != SHD_OK)
        _exit(0); /* the client has gone */
    point(f);
    const uint64_t i = msg.ticket - 1;
    msg.type = SIDE_SEGMENT;
    msg.kind = kinds[i];
    msg.bytes = segments[i]->bytes;
    CHECK(side_send(f->side_fd, &msg, segments[i]->fd, &e) == SHD_OK);
    point(f);
}

__attribute__((noreturn)) static void be_fake(uint32_t index, pid_t keeper)
{
    static struct fake f;
    char endpoint[128];
    struct shd_err e;
    const struct side_msg welcome = { .type = SIDE_WELCOME };
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != keeper)
        _exit(1); /* killed before that */
    f = (struct fake){ .index = index, .state = &world->owner[index] };
    make_model(&f);
    snprintf(endpoint, sizeof endpoint, "ipc://%s/cpu%u.zmq", world->dir, index);
    f.router = zmq_socket(zmq_ctx_new(), ZMQ_ROUTER);
    CHECK(zmq_bind(f.router, endpoint) == 0);
    snprintf(endpoint, sizeof endpoint, "%s/cpu%u.sock", world->dir, index);
    CHECK(side_listen(endpoint, &f.listen_fd, &e) == SHD_OK);
    struct pollfd p = { .fd = f.listen_fd, .events = POLLIN };
    poll(&p, 1, -1);
    f.side_fd = accept4(f.listen_fd, NULL, NULL, SOCK_CLOEXEC);
    point(&f);
    CHECK(side_send(f.side_fd, &welcome, -1, &e) == SHD_OK);
    for (;;) {
        zmq_pollitem_t items[] = { { .socket = f.router, .events = ZMQ_POLLIN },
                                   { .fd = f.side_fd, .events = ZMQ_POLLIN } };
        CHECK(zmq_poll(items, 2, f.pending_count > 0 ? IDLE_MS : -1) >= 0);
        if (items[1].revents != 0)
            answer_claim(&f);
        else if (items[0].revents != 0)
            receive(&f);
        else
            answer_pending(&f, /* idle= */ true);
    }
}

pid_t start_keeper(uint32_t index)
{
    const pid_t keeper = test_fork();
    if (keeper > 0)
        return keeper;
    for (;;) {
        int status;
        const pid_t self = getpid(), pid = fork();
        CHECK(pid >= 0);
        if (pid == 0)
            be_fake(index, self);
        CHECK(waitpid(pid, &status, 0) == pid);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != DIED || world->stay_away)
            _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
    }
}
