/* A worker made by hand, for daemons of any device: it speaks the protocol itself, and writes
 * gradients and reads parameters through the daemon's own kind of device (kernels/kern.h), so that
 * it can attach where no client maps yet. One session per owner; gradients depend on what was
 * published, so that a wrong byte anywhere shows in the end.
 *
 * Everything returns false when the daemon is gone (the caller tries again) and ends the process
 * when it says something it must not. For a process of its own: see hand_fork().
 */
#ifndef SHD_TESTS_HAND_WORKER_H
#define SHD_TESTS_HAND_WORKER_H

#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include <zmq.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cuda/cuda.h"
#include "proto/base/check.h"
#include "proto/share/board.h"
#include "proto/share/fdpass.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec_json.h"
#include "proto/wire/wire.h"
#include "tests/lib/child.h"
#include "tests/lib/fixture.h"

#define HAND_DIGEST_BYTES (256u * 1024u)
#define HAND_REPLY_MS     ((int)TEST_HANG_MS)
#define HAND_OWNERS_MAX   4u
#define HAND_ASKS_MAX     4u

struct hand_digest { /* all leaves of all owners, and what they have published */
    uint64_t step;
    size_t bytes;
    uint8_t leaf[HAND_DIGEST_BYTES];
};

struct hand_shared { /* between a worker's process and the test's */
    struct hand_digest digest;
    _Atomic uint64_t step;      /* how far it is */
    uint32_t opened;            /* how often a session was opened */
    int answers[HAND_ASKS_MAX]; /* to OpenModel, of a worker that only asks */
    char text[512];             /* of the last one */
};

struct hand { /* one owner */
    const char *dir, *device;
    uint32_t owner, owners;
    const struct spec *spec; /* borrowed */
    const char *json;
    struct shardmap *map; /* owned */
    struct kern *kern;    /* borrowed: of the daemon's kind */
    int side;             /* -1: no session */
    void *context, *dealer;
    uint64_t session, seq;
    _Alignas(16) uint8_t memory[256 * 1024];
    uint8_t frame[64 * 1024];
    uint32_t model, slots;
    uint64_t step;
    uint8_t in[SHD_MICROS_MAX / 8];
    struct segment inbox, publish, board, activity;
    enum segment_place place;
    uint8_t uuid[16];
};

#define HAND_DIE(...)                                         \
    do {                                                      \
        fprintf(stderr, "%s:%d: hand: ", __FILE__, __LINE__); \
        fprintf(stderr, __VA_ARGS__);                         \
        fputc('\n', stderr);                                  \
        _exit(3);                                             \
    } while (0)

static void hand_close(struct hand *h)
{
    if (h->side < 0)
        return;
    close(h->side);
    zmq_close(h->dealer);
    zmq_ctx_term(h->context);
    h->kern->ops->segment_close(h->kern, &h->inbox);
    h->kern->ops->segment_close(h->kern, &h->publish);
    segment_close(&h->board);
    segment_close(&h->activity);
    h->side = -1;
}

/* -- Asking -------------------------------------------------------------------------------------
 */

static bool hand_recv(struct hand *h, struct wire_reply *ret)
{
    struct shd_err e;
    zmq_pollitem_t items[] = { { .socket = h->dealer, .events = ZMQ_POLLIN },
                               { .fd = h->side, .events = ZMQ_POLLIN } };
    if (zmq_poll(items, 2, HAND_REPLY_MS) <= 0)
        HAND_DIE("%s does not answer", h->device);
    if ((items[0].revents & ZMQ_POLLIN) == 0)
        return false; /* nothing is said here unasked: it hung up */
    const int bytes = zmq_recv(h->dealer, h->frame, sizeof h->frame, 0);
    struct wire_arena arena = { .base = h->memory, .bytes = sizeof h->memory };
    if (bytes < 0 || wire_reply_unpack(h->frame, (size_t)bytes, &arena, ret, &e) != SHD_OK)
        HAND_DIE("%s: a reply of %d bytes", h->device, bytes);
    return true;
}

/* *ret points into h until the next one. */
static bool hand_ask(struct hand *h, struct wire_request *req, struct wire_reply *ret)
{
    static uint8_t frame[64 * 1024];
    struct shd_err e;
    size_t bytes;
    req->seq = ++h->seq;
    req->session = h->session;
    if (wire_request_pack(req, frame, sizeof frame, &bytes, &e) != SHD_OK)
        HAND_DIE("pack: %s", e.text);
    if (zmq_send(h->dealer, frame, bytes, 0) != (int)bytes)
        HAND_DIE("send: %s", zmq_strerror(errno));
    do {
        if (!hand_recv(h, ret))
            return false;
    } while (ret->seq != h->seq);
    /* ZeroMQ has found the successor before our side channel's end was seen. */
    return ret->status != SHD_EAUTH || h->session == 0;
}

/* One that must succeed. */
static bool hand_do(struct hand *h, struct wire_request *req, struct wire_reply *ret)
{
    if (!hand_ask(h, req, ret))
        return false;
    if (ret->status == SHD_EGONE)
        return false;
    if (ret->status != SHD_OK)
        HAND_DIE("%s answers request %d: %s", h->device, (int)req->type, ret->text);
    return true;
}

/* -- Opening ------------------------------------------------------------------------------------
 */

static bool hand_connect(struct hand *h)
{
    char path[300];
    struct shd_err e;
    struct side_msg msg;
    snprintf(path, sizeof path, "%s/%s.sock", h->dir, h->device);
    if (side_connect(path, &h->side, &e) != SHD_OK) {
        h->side = -1;
        return false;
    }
    if (side_recv(h->side, HAND_REPLY_MS, &msg, NULL, &e) != SHD_OK || msg.type != SIDE_WELCOME) {
        close(h->side);
        h->side = -1;
        return false;
    }
    h->context = zmq_ctx_new();
    h->dealer = zmq_socket(h->context, ZMQ_DEALER);
    const int zero = 0;
    zmq_setsockopt(h->dealer, ZMQ_LINGER, &zero, sizeof zero);
    snprintf(path, sizeof path, "ipc://%s/%s.zmq", h->dir, h->device);
    if (zmq_connect(h->dealer, path) != 0)
        HAND_DIE("connect: %s", zmq_strerror(errno));
    h->session = h->seq = 0;
    h->inbox = h->publish = h->board = h->activity = SEGMENT_CLOSED;
    struct wire_request req = {
        .type = WIRE_HELLO,
        .hello = { .protocol = SHD_PROTOCOL, .role = WIRE_TRAINER, .name = "hand" }
    };
    struct wire_reply reply;
    memcpy(req.hello.token, msg.token, sizeof req.hello.token);
    if (!hand_do(h, &req, &reply))
        return false;
    h->session = reply.welcome.session;
    return true;
}

static bool hand_claim(struct hand *h, const struct wire_segment *s)
{
    struct side_msg msg = { .type = SIDE_CLAIM, .ticket = s->ticket };
    struct shd_err e = { 0 };
    int fd, r;
    if (side_send(h->side, &msg, -1, &e) != SHD_OK ||
        side_recv(h->side, HAND_REPLY_MS, &msg, &fd, &e) != SHD_OK || msg.type != SIDE_SEGMENT)
        return false;
    const bool on_host = s->kind == SEGMENT_BOARD || s->kind == SEGMENT_ACTIVITY;
    if (s->place != (on_host ? SEGMENT_HOST : h->kern->ops->place))
        HAND_DIE("%s segment is at place %d", segment_kind_name(s->kind), (int)s->place);
    if (s->kind == SEGMENT_ACTIVITY)
        r = segment_map(fd, s->kind, s->bytes, &h->activity, &e);
    else if (s->kind == SEGMENT_BOARD)
        r = segment_map(fd, s->kind, s->bytes, &h->board, &e);
    else
        r = h->kern->ops->segment_map(h->kern, fd, s->kind, s->bytes, NULL,
                                      s->kind == SEGMENT_INBOX ? &h->inbox : &h->publish, &e);
    if (r != SHD_OK)
        HAND_DIE("map %s segment: %s", segment_kind_name(s->kind), e.text);
    return true;
}

static struct wire_request hand_open_request(const struct hand *h)
{
    return (
        struct wire_request){ .type = WIRE_OPEN_MODEL,
                              .open_model = { .spec = { (const uint8_t *)h->json, strlen(h->json) },
                                              .name = "",
                                              .owner = h->owner,
                                              .owners = h->owners,
                                              .slots = h->slots } };
}

static bool hand_open_model(struct hand *h)
{
    struct wire_request req = hand_open_request(h);
    struct wire_reply reply;
    if (!hand_do(h, &req, &reply))
        return false;
    const struct wire_layout *layout = &reply.layout;
    const size_t uuid_bytes = h->kern->ops->place == SEGMENT_CUDA ? 16 : 0;
    if (layout->device.bytes != uuid_bytes ||
        (uuid_bytes > 0 && memcmp(layout->device.data, h->kern->ops->uuid, uuid_bytes) != 0))
        HAND_DIE("layout names another device");
    h->model = layout->model;
    h->step = layout->step;
    memset(h->in, 0, sizeof h->in);
    memcpy(h->in, layout->in.data, layout->in.bytes);
    for (uint32_t i = 0; i < layout->segment_count; i++)
        if (!hand_claim(h, &layout->segments[i]))
            return false;
    return true;
}

/* A session with the model open; waits for a daemon that is not there yet. */
static void hand_open(struct hand *h)
{
    for (uint64_t i = 0; i < test_paced(2000); i++) {
        if (hand_connect(h) && hand_open_model(h))
            return;
        hand_close(h);
        sleep_ms(10);
    }
    HAND_DIE("no daemon at %s/%s", h->dir, h->device);
}

/* -- Steps --------------------------------------------------------------------------------------
 */

static void hand_copy(struct hand *h, void *to, const void *from, uint64_t bytes)
{
    const struct kern_copy copy = { .to = to, .from = from, .bytes = bytes };
    struct kern_waiter w;
    struct shd_err e;
    kern_waiter_init(&w);
    if (kern_copy(h->kern, &copy, &w.done, &e) != SHD_OK || kern_wait(&w) != SHD_OK)
        HAND_DIE("copy of %" PRIu64 " bytes", bytes);
}

static float hand_noise(uint64_t step, uint32_t micro, uint32_t unit, uint64_t elem)
{
    uint64_t x = (step * 131 + micro) * 1000003 + unit * 7919 + elem * UINT64_C(0x9e3779b97f4a7c15);
    x ^= x >> 29;
    x *= UINT64_C(0xbf58476d1ce4e5b9);
    x ^= x >> 32;
    return (float)(int32_t)(uint32_t)x * 0x1p-36f;
}

static float hand_f32_of(uint16_t bf16)
{
    const uint32_t bits = (uint32_t)bf16 << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static uint16_t hand_bf16_of(float f) /* towards zero: any will do */
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return (uint16_t)(bits >> 16);
}

/* The unit's gradient into a slot: noise, and a pull towards zero of what was published (bf16). */
static void hand_write_grad(struct hand *h, uint32_t unit, uint32_t micro, uint32_t slot,
                            enum shd_dtype dtype)
{
    static float grad[1 << 20];
    static uint16_t half[1 << 20], param[1 << 20];
    const struct slice slice = h->map->slice[unit];
    CHECK(slice.elems <= ARRAY_SIZE(grad));
    hand_copy(h, param, (uint8_t *)h->publish.base + shardmap_publish_offset_bytes(h->map, unit),
              slice.elems * sizeof *param);
    for (uint64_t i = 0; i < slice.elems; i++) {
        grad[i] = hand_noise(h->step, micro, unit, slice.first_elem + i) +
                  0.125f * hand_f32_of(param[i]);
        half[i] = hand_bf16_of(grad[i]);
    }
    hand_copy(h, (uint8_t *)h->inbox.base + shardmap_slot_offset_bytes(h->map, slot),
              dtype == SHD_F32 ? (const void *)grad : half, slice.elems * dtype_bytes(dtype));
}

static bool hand_return(struct hand *h, uint32_t unit, uint32_t micro)
{
    const enum shd_dtype dtype = h->spec->grad_dtype;
    struct wire_request req = { .type = WIRE_RETURN,
                                .return_grad = { .model = h->model,
                                                 .step = h->step,
                                                 .micro = micro,
                                                 .unit = unit,
                                                 .dtype = dtype } };
    struct wire_reply reply;
    if (h->map->slice[unit].elems > 0)
        hand_write_grad(h, unit, micro, 0, dtype);
    return hand_do(h, &req, &reply);
}

/* Until the unit's parameters of this step can be read; false: the daemon has died meanwhile. */
static bool hand_await(struct hand *h, uint32_t unit)
{
    struct pollfd p = { .fd = h->side };
    for (int i = 0; i < HAND_REPLY_MS / 20; i++) {
        if (board_wait(h->board.base, unit, h->step, UINT64_C(20000000)) == SHD_OK)
            return true;
        if (poll(&p, 1, 0) > 0)
            return false;
    }
    HAND_DIE("%s: unit %" PRIu32 " does not reach step %" PRIu64, h->device, unit, h->step);
}

/* All gradients of the step that are not in; last first where there is nothing but spilling for
 * them to go on. */
static bool hand_gradients(struct hand *h, bool backwards)
{
    const uint32_t micros = spec_returns(h->spec);
    for (uint32_t i = 0; i < micros; i++) {
        const uint32_t micro = backwards ? micros - 1 - i : i;
        if ((h->in[micro / 8] >> micro % 8 & 1) != 0)
            continue;
        for (uint32_t unit = 0; unit < h->spec->unit_count; unit++)
            if (!h->spec->units[unit].frozen &&
                (!hand_await(h, unit) || !hand_return(h, unit, micro)))
                return false;
    }
    return true;
}

static bool hand_commit(struct hand *h)
{
    struct wire_request prepare = { .type = WIRE_PREPARE,
                                    .prepare = { .model = h->model, .step = h->step } };
    struct wire_request commit = {
        .type = WIRE_COMMIT,
        .commit = { .model = h->model, .step = h->step, .decision = { .scale = 0.25f, .lr = 0.01 } }
    };
    struct wire_reply reply;
    if (!hand_do(h, &prepare, &reply))
        return false;
    if (!reply.prepared.over && !reply.prepared.finite)
        HAND_DIE("step %" PRIu64 " is not finite", h->step);
    if (!hand_do(h, &commit, &reply))
        return false;
    h->step++;
    memset(h->in, 0, sizeof h->in);
    return true;
}

/* -- The end ------------------------------------------------------------------------------------
 */

static bool hand_leaves(struct hand *h, struct hand_digest *d, uint32_t tensor, uint32_t array)
{
    uint64_t total = 1;
    for (uint64_t at = 0; at < total;) {
        struct wire_request req = {
            .type = WIRE_DIGEST,
            .digest = { .model = h->model, .tensor = tensor, .array = array, .first_leaf = at }
        };
        struct wire_reply reply;
        if (!hand_do(h, &req, &reply))
            return false;
        const struct wire_leaves *l = &reply.leaves;
        total = l->total;
        if (d->bytes + l->leaves.bytes > sizeof d->leaf || l->step != h->step)
            HAND_DIE("leaves of step %" PRIu64 ", have %zu bytes", l->step, d->bytes);
        if (l->leaves.bytes > 0)
            memcpy(d->leaf + d->bytes, l->leaves.data, l->leaves.bytes);
        d->bytes += l->leaves.bytes;
        at += l->leaves.bytes / 32;
        if (l->leaves.bytes == 0)
            break;
    }
    return true;
}

/* Parameters, moments, and a hash of what is published, by FNV-1a. */
static bool hand_add_digest(struct hand *h, struct hand_digest *d)
{
    static uint16_t param[1 << 20];
    for (uint32_t t = 0; t < h->spec->tensor_count; t++) {
        const uint32_t arrays = h->spec->tensors[t].trainable ? 1 + spec_moments(h->spec) : 1;
        for (uint32_t a = 0; a < arrays; a++)
            if (!hand_leaves(h, d, t, a))
                return false;
    }
    for (uint32_t u = 0; u < h->spec->unit_count; u++) {
        uint64_t hash = UINT64_C(0xcbf29ce484222325);
        const uint64_t elems = h->map->slice[u].elems;
        if (!hand_await(h, u))
            return false;
        hand_copy(h, param, (uint8_t *)h->publish.base + shardmap_publish_offset_bytes(h->map, u),
                  elems * sizeof *param);
        for (uint64_t i = 0; i < elems; i++)
            hash = (hash ^ param[i]) * UINT64_C(0x100000001b3);
        CHECK(d->bytes + sizeof hash <= sizeof d->leaf);
        memcpy(d->leaf + d->bytes, &hash, sizeof hash);
        d->bytes += sizeof hash;
    }
    return true;
}

/* -- A process of it ----------------------------------------------------------------------------
 */

struct hand_job {
    const char *dir;
    const char *devices[HAND_OWNERS_MAX];
    uint32_t owners, steps, slots;
    uint32_t asks; /* not 0: ask so often for the model, from the first owner, and that is all */
    bool backwards;
    const char *json;
    struct hand_shared *shared;
};

static void hand_reopen(struct hand *h, struct hand_shared *shared)
{
    hand_close(h);
    hand_open(h);
    shared->opened++;
}

/* Owners one after the other in each step: each decides the same, for itself. */
static void hand_train(struct hand *hands, const struct hand_job *job)
{
    for (uint64_t step = 0; step < job->steps; step++) {
        for (uint32_t i = 0; i < job->owners; i++) {
            struct hand *h = &hands[i];
            if (h->side < 0)
                hand_reopen(h, job->shared);
            while (h->step <= step)
                if (!hand_gradients(h, job->backwards) || !hand_commit(h))
                    hand_reopen(h, job->shared);
        }
        atomic_store(&job->shared->step, step + 1);
    }
}

static struct kern *hand_device(const char *device)
{
    struct shd_err e = { 0 };
    struct kern *kern = NULL;
    const int r = strncmp(device, "gpu", 3) == 0
                      ? kern_cuda_new((uint32_t)atoi(device + 3), &kern, &e)
                      : kern_cpu_new(&(struct kern_config){ .threads = 1 }, &kern, &e);
    if (r != SHD_OK)
        HAND_DIE("device %s: %s", device, e.text);
    return kern;
}

/* Ask, and note what is said. */
static void hand_only_ask(struct hand *h, const struct hand_job *job)
{
    struct wire_reply reply;
    for (uint32_t i = 0; i < job->asks; i++) {
        if (!hand_connect(h))
            HAND_DIE("no daemon %s", h->device);
        struct wire_request req = hand_open_request(h);
        if (!hand_ask(h, &req, &reply))
            HAND_DIE("%s is gone", h->device);
        job->shared->answers[i] = reply.status;
        snprintf(job->shared->text, sizeof job->shared->text, "%s", reply.text);
        hand_close(h);
    }
}

static void hand_work(const struct hand_job *job)
{
    static struct hand hands[HAND_OWNERS_MAX];
    struct spec *spec;
    struct shd_err e;
    if (spec_parse(job->json, strlen(job->json), &spec, &e) != SHD_OK)
        HAND_DIE("spec: %s", e.text);
    for (uint32_t i = 0; i < job->owners; i++) {
        hands[i] = (struct hand){ .dir = job->dir,
                                  .device = job->devices[i],
                                  .owner = i,
                                  .owners = job->owners,
                                  .spec = spec,
                                  .json = job->json,
                                  .slots = job->slots,
                                  .side = -1 };
        hands[i].kern = hand_device(job->devices[i]);
        if (shardmap_new(spec, i, job->owners, &hands[i].map, &e) != SHD_OK)
            HAND_DIE("map: %s", e.text);
    }
    if (job->asks > 0)
        hand_only_ask(&hands[0], job);
    else
        hand_train(hands, job);
    struct hand_digest *d = &job->shared->digest;
    for (uint32_t i = 0; i < job->owners && job->asks == 0; i++) {
        const size_t before = d->bytes;
        if (hands[i].side < 0)
            hand_reopen(&hands[i], job->shared);
        while (!hand_add_digest(&hands[i], d)) {
            d->bytes = before;
            hand_reopen(&hands[i], job->shared);
        }
        d->step = hands[i].step;
    }
    for (uint32_t i = 0; i < job->owners; i++) {
        hand_close(&hands[i]);
        hands[i].kern->ops->free(hands[i].kern);
        shardmap_free(hands[i].map);
    }
    spec_free(spec);
}

/* Start one in a process of its own, which alone has the device: a process that has one must not
 * fork, and the test forks daemons. */
__attribute__((unused)) static pid_t hand_fork(const struct hand_job *job)
{
    const pid_t pid = test_fork();
    if (pid > 0)
        return pid;
    hand_work(job);
    exit(0);
}

#endif
