#include "tests/lib/raw_client.h"

#include <errno.h>
#include <unistd.h>
#include <zmq.h>

#include "proto/share/fdpass.h"

struct fixture fixture;

void raw_open(struct raw *r)
{
    char path[300];
    struct shd_err e;
    struct side_msg msg;
    int fd;
    memset(r, 0, sizeof *r);
    snprintf(path, sizeof path, "%s/cpu0.sock", fixture.dir);
    EXPECT_OK(side_connect(path, &r->side, &e), &e);
    EXPECT_OK(side_recv(r->side, RAW_WAIT_MS, &msg, &fd, &e), &e);
    EXPECT_EQ(msg.type, SIDE_WELCOME);
    EXPECT(msg.bytes != 0 && side_welcome_check(&msg, &e) == SHD_OK); /* it says its sizes */
    memcpy(r->token, msg.token, sizeof r->token);
    r->context = zmq_ctx_new();
    r->dealer = zmq_socket(r->context, ZMQ_DEALER);
    const int zero = 0, wait_ms = RAW_WAIT_MS;
    zmq_setsockopt(r->dealer, ZMQ_LINGER, &zero, sizeof zero);
    zmq_setsockopt(r->dealer, ZMQ_RCVTIMEO, &wait_ms, sizeof wait_ms);
    snprintf(path, sizeof path, "ipc://%s/cpu0.zmq", fixture.dir);
    EXPECT_EQ(zmq_connect(r->dealer, path), 0);
}

void raw_close(struct raw *r)
{
    close(r->side);
    zmq_close(r->dealer);
    zmq_ctx_term(r->context);
}

void raw_send(struct raw *r, const void *frame, size_t bytes)
{
    EXPECT_EQ(zmq_send(r->dealer, frame, bytes, 0), (int)bytes);
}

void raw_recv(struct raw *r, struct wire_reply *ret)
{
    static uint8_t frame[64 * 1024];
    struct shd_err e;
    const int bytes = zmq_recv(r->dealer, frame, sizeof frame, 0);
    if (bytes < 0)
        FAIL("no reply: %s", zmq_strerror(errno));
    r->arena = (struct wire_arena){ .base = r->memory, .bytes = sizeof r->memory };
    EXPECT_OK(wire_reply_unpack(frame, (size_t)bytes, &r->arena, ret, &e), &e);
}

size_t raw_pack(struct raw *r, struct wire_request *req, uint8_t *frame, size_t capacity)
{
    struct shd_err e;
    size_t bytes;
    req->seq = ++r->seq;
    if (req->session == 0)
        req->session = r->session;
    EXPECT_OK(wire_request_pack(req, frame, capacity, &bytes, &e), &e);
    return bytes;
}

int raw_ask(struct raw *r, struct wire_request req, struct wire_reply *ret)
{
    uint8_t frame[4096];
    raw_send(r, frame, raw_pack(r, &req, frame, sizeof frame));
    raw_recv(r, ret);
    EXPECT_EQ(ret->seq, r->seq);
    return ret->status;
}

int raw_hello(struct raw *r, uint32_t protocol, enum wire_role role, struct wire_reply *ret)
{
    struct wire_request req = {
        .type = WIRE_HELLO,
        .hello = { .protocol = protocol, .role = role, .name = "raw", .level = r->level }
    };
    memcpy(req.hello.token, r->token, sizeof r->token);
    const int status = raw_ask(r, req, ret);
    if (status == SHD_OK)
        r->session = ret->welcome.session;
    return status;
}

void raw_enter(struct raw *r)
{
    struct wire_reply reply;
    raw_open(r);
    EXPECT_STATUS(raw_hello(r, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
}

uint32_t raw_attach(struct raw *r, uint32_t slots)
{
    struct wire_reply reply;
    EXPECT_EQ(raw_ask(r,
                      (struct wire_request){ .type = WIRE_OPEN_MODEL,
                                             .open_model = { .spec = { (const uint8_t *)spec_json,
                                                                       sizeof spec_json - 1 },
                                                             .name = "",
                                                             .owners = 1,
                                                             .slots = slots } },
                      &reply),
              SHD_OK);
    return reply.layout.model;
}

void raw_expect_silence(struct raw *r, int ms)
{
    uint8_t frame[4096];
    zmq_setsockopt(r->dealer, ZMQ_RCVTIMEO, &ms, sizeof ms);
    EXPECT_EQ(zmq_recv(r->dealer, frame, sizeof frame, 0), -1);
    const int wait_ms = RAW_WAIT_MS;
    zmq_setsockopt(r->dealer, ZMQ_RCVTIMEO, &wait_ms, sizeof wait_ms);
}

void raw_trainer(struct raw *r, uint32_t *ret_handle)
{
    struct wire_reply reply;
    raw_open(r);
    EXPECT_STATUS(raw_hello(r, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    *ret_handle = raw_attach(r, 1);
}

shd_session *trainer;
shd_model *model;

void trainer_start(void)
{
    struct shd_err e;
    fixture_start(&fixture, 1, NULL);
    EXPECT_OK(shd_connect(&(struct shd_options){ .size = sizeof(struct shd_options),
                                                 .address = fixture.address,
                                                 .timeout_ms = TEST_HANG_MS },
                          &trainer, &e),
              &e);
    EXPECT_OK(shd_model_open(trainer, spec_json, &model, &e), &e);
}

void trainer_step(void)
{
    struct shd_err e;
    const void *params;
    float *grad;
    struct shd_result result = { .size = sizeof result };
    EXPECT_OK(shd_acquire(model, 0, &params, &e), &e);
    EXPECT_OK(shd_grad(model, 0, 0, &grad, &e), &e);
    for (int i = 0; i < 64; i++)
        grad[i] = 1;
    EXPECT_OK(shd_return(model, 0, 0, &e), &e);
    shd_release(model, 0);
    EXPECT_OK(shd_commit(model, &(struct shd_update){ .size = sizeof(struct shd_update), .lr = 1 },
                         &result, &e),
              &e);
}

void trainer_stop(uint64_t steps)
{
    EXPECT_EQ(shd_step(model), steps);
    shd_close(trainer);
    fixture_stop(&fixture);
}
