/* Requests that are well-formed and wrong, come twice or late, or are nobody's any more, to a real
 * daemon: each gets a clear error, work goes to who waits for it, and a trainer attached all along
 * goes on and ends with the right step. Bytes that are no requests are test_abuse.c's. */
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/net/session.h"
#include "proto/base/check.h"
#include "proto/share/fdpass.h"
#include "proto/share/spec_segment.h"
#include "proto/share/tally.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec.h"
#include "tests/lib/raw_client.h"

TEST(other_protocol_version_is_refused_with_both_versions)
{
    static struct raw r;
    struct wire_reply reply;
    trainer_start();
    raw_open(&r);
    EXPECT_STATUS(raw_hello(&r, 99, WIRE_TRAINER, &reply), SHD_EPROTO);
    EXPECT_HAS(reply.text, "99");
    EXPECT_HAS(reply.text, "protocol 2");
    raw_close(&r);
    trainer_step();
    trainer_stop(1);
}

TEST(token_session_and_role_are_checked)
{
    static struct raw r, other;
    struct wire_reply reply;
    trainer_start();
    raw_open(&r);
    r.token[3] ^= 1;
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_EAUTH);
    r.token[3] ^= 1;
    EXPECT_STATUS(raw_ask(&r, (struct wire_request){ .type = WIRE_STATUS }, &reply), SHD_EAUTH);
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_READER, &reply), SHD_OK);
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_READER, &reply),
                  SHD_OK); /* doubled on its way */
    raw_open(&other);
    uint8_t own[SHD_TOKEN_BYTES];
    memcpy(own, other.token, sizeof own);
    memcpy(other.token, r.token, sizeof own);
    EXPECT_STATUS(raw_hello(&other, SHD_PROTOCOL, WIRE_READER, &reply), SHD_EAUTH); /* used */
    memcpy(other.token, own, sizeof own);
    EXPECT_STATUS(raw_hello(&other, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    EXPECT_STATUS(
        raw_ask(&other, (struct wire_request){ .type = WIRE_STATUS, .session = r.session }, &reply),
        SHD_EAUTH); /* somebody else's session */
    const uint32_t handle = raw_attach(&r, 0);
    EXPECT_STATUS(
        raw_ask(&r,
                (struct wire_request){ .type = WIRE_RETURN,
                                       .return_grad = { .model = handle, .dtype = SHD_F32 } },
                &reply),
        SHD_EAUTH); /* a reader */
    raw_close(&r);
    raw_close(&other);
    trainer_step();
    trainer_stop(1);
}

TEST(numbers_outside_the_model_are_refused_with_their_values)
{
    static struct raw r;
    struct wire_reply reply;
    trainer_start();
    raw_open(&r);
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    const uint32_t handle = raw_attach(&r, 2);
    struct wire_request req = { .type = WIRE_RETURN,
                                .return_grad = { .model = handle, .dtype = SHD_F32, .unit = 7 } };
    EXPECT_STATUS(raw_ask(&r, req, &reply), SHD_ERANGE);
    EXPECT_HAS(reply.text, "unit 7 of a model with 1");
    req.return_grad.unit = 0;
    req.return_grad.micro = 9;
    EXPECT_STATUS(raw_ask(&r, req, &reply), SHD_ERANGE);
    EXPECT_HAS(reply.text, "micro-batch 9 of a step with 1");
    req.return_grad.micro = 0;
    req.return_grad.dtype = SHD_BF16; /* what its sum is worth would depend on who computed it */
    EXPECT_STATUS(raw_ask(&r, req, &reply), SHD_ESPEC);
    EXPECT_HAS(reply.text, "' is 'bf16', model '");
    EXPECT_HAS(reply.text, "' has grad_dtype 'f32'");
    req.return_grad.dtype = SHD_F32;
    req.return_grad.slot = 2;
    EXPECT_STATUS(raw_ask(&r, req, &reply), SHD_ERANGE);
    EXPECT_HAS(reply.text, "slot 2 of an inbox with 2");
    req.return_grad.slot = 0;
    req.return_grad.step = 5;
    EXPECT_STATUS(raw_ask(&r, req, &reply), SHD_ESTEP);
    EXPECT_HAS(reply.text, "step 5");
    req.return_grad.model = 3;
    EXPECT_STATUS(raw_ask(&r, req, &reply), SHD_ENOENT);
    EXPECT_STATUS(
        raw_ask(&r,
                (struct wire_request){ .type = WIRE_COMMIT,
                                       .commit = { .model = handle, .decision = { .scale = 1 } } },
                &reply),
        SHD_ESTEP); /* not sealed */
    EXPECT_STATUS(raw_ask(&r,
                          (struct wire_request){ .type = WIRE_DIGEST,
                                                 .digest = { .model = handle, .tensor = 1 } },
                          &reply),
                  SHD_ERANGE);
    EXPECT_STATUS(raw_ask(&r,
                          (struct wire_request){ .type = WIRE_DIGEST,
                                                 .digest = { .model = handle, .array = 2 } },
                          &reply),
                  SHD_ERANGE); /* SGD has one moment */
    const struct {
        struct wire_digest digest;
        int status;
        const char *has;
    } ranges[] = {
        { { .tensors = 2 }, SHD_ERANGE, "2 tensors from 0 on of a model with 1" },
        { { .tensors = 1, .array = 1 }, SHD_EINVAL, "of several all arrays are asked for" },
        { { .tensors = 1, .first_leaf = 1 }, SHD_EINVAL, "leaf 1 on" },
        { { .tensors = 1 }, SHD_OK, "" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(ranges); i++) {
        req = (struct wire_request){ .type = WIRE_DIGEST, .digest = ranges[i].digest };
        req.digest.model = handle;
        EXPECT_STATUS(raw_ask(&r, req, &reply), ranges[i].status);
        EXPECT_HAS(reply.text, ranges[i].has);
    }
    EXPECT(reply.leaves.total == 2 && reply.leaves.leaves.bytes == 64); /* parameters, momentum */
    EXPECT_STATUS(
        raw_ask(&r,
                (struct wire_request){ .type = WIRE_FETCH,
                                       .fetch = { .model = handle, .unit = 1, .turn = 1 } },
                &reply),
        SHD_ERANGE); /* the first that is not there */
    EXPECT_HAS(reply.text, "unit 1 of a model with 1");
    raw_close(&r);
    trainer_step();
    trainer_stop(1);
}

TEST(ranges_outside_a_tensor_are_not_counted)
{
    static struct raw r;
    struct wire_reply reply;
    struct wire_request req;
    trainer_start();
    raw_open(&r);
    r.level = WIRE_LEVEL;
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_READER, &reply), SHD_OK);
    const uint32_t handle = raw_attach(&r, 0);
    const struct {
        struct wire_show show;
        int status;
        const char *has;
    } shows[] = {
        { { .tensor = 1, .elems = 1 }, SHD_ERANGE, "tensor 1 of a model with 1" },
        { { .first = 64, .elems = 1 }, SHD_ERANGE, "elements 64 + 1 of a tensor with 64" },
        { { .first = 1, .elems = 64 }, SHD_ERANGE, "elements 1 + 64 of a tensor with 64" },
        { { .first = UINT64_MAX, .elems = 2 }, SHD_ERANGE, "of a tensor with 64" },
        { { .elems = SHD_MODEL_ELEMS_MAX }, SHD_ERANGE, "of a tensor with 64" },
        { { .array = WIRE_SHOW_V, .elems = 1 }, SHD_EINVAL, "unit 'a' has 1 moments, not 2" },
        { { .array = WIRE_SHOW_GRAD, .elems = 1 }, SHD_ENOENT, "holds no gradient at step 0" },
        { { .array = WIRE_SHOW_UPDATE, .elems = 1 }, SHD_ENOENT, "did not update unit 'a'" },
        { { .first = 3, .elems = 61, .values = true }, SHD_OK, "" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(shows); i++) {
        req = (struct wire_request){ .type = WIRE_SHOW, .show = shows[i].show };
        req.show.model = handle;
        EXPECT_STATUS(raw_ask(&r, req, &reply), shows[i].status);
        EXPECT_HAS(reply.text, shows[i].has);
    }
    EXPECT(reply.shown.tally.bytes == TALLY_BYTES && reply.shown.values.bytes == 61 * 4);
    req.show.model = 9;
    EXPECT_STATUS(raw_ask(&r, req, &reply), SHD_ENOENT);
    raw_close(&r);
    trainer_step();
    trainer_stop(1);
}

TEST(digest_of_tensors_of_several_units_has_its_limits)
{
    static char spec[8192];
    struct shd_err e = { 0 };
    struct wire_reply reply;
    struct raw r;
    shd_model *m;
    char *at = spec + sprintf(spec, "{\"name\":\"many\",\"seed\":7,\"micro_batches\":1,"
                                    "\"optimizer\":{\"kind\":\"sgd\"},\"units\":[");
    for (uint32_t u = 0; u < WIRE_RANGE_UNITS_MAX + 1; u++)
        at += sprintf(at, "%s{\"name\":\"u%u\",\"tensors\":[{\"name\":\"t%u\",\"shape\":[%u]}]}",
                      u > 0 ? "," : "", u, u, u == 2 ? WIRE_RANGE_ELEMS_MAX - 64 : 64);
    strcpy(at, "]}");
    trainer_start();
    EXPECT_OK(shd_model_open(trainer, spec, &m, &e), &e);
    raw_open(&r);
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    const struct {
        uint32_t tensor, tensors;
        int status;
        const char *has;
    } ranges[] = {
        { 3, WIRE_RANGE_UNITS_MAX - 2, SHD_OK, "" },
        { 0, 3, SHD_ERANGE, "3 tensors of 262208 elements in 3 units" },
        { 1, 2, SHD_OK, "" },
        { 0, WIRE_RANGE_UNITS_MAX + 1, SHD_ERANGE, "in 33 units, at most 262144 in 32 at once" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(ranges); i++) {
        const struct wire_request req = {
            .type = WIRE_DIGEST,
            .digest = { .model = 2, .tensor = ranges[i].tensor, .tensors = ranges[i].tensors }
        };
        EXPECT_STATUS(raw_ask(&r, req, &reply), ranges[i].status);
        EXPECT_HAS(reply.text, ranges[i].has);
    }
    raw_close(&r);
    trainer_stop(0);
}

TEST(requests_that_come_twice_are_served_once)
{
    static struct raw r;
    struct wire_reply reply;
    uint8_t frame[4096];
    trainer_start();
    raw_open(&r);
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    const uint32_t handle = raw_attach(&r, 2);
    /* Answered: the same answer again, from the session's cache. */
    struct wire_request req = { .type = WIRE_RETURN,
                                .return_grad = { .model = handle, .none = true } };
    size_t bytes = raw_pack(&r, &req, frame, sizeof frame);
    raw_send(&r, frame, bytes);
    raw_recv(&r, &reply);
    EXPECT(reply.type == WIRE_CREDIT && reply.seq == r.seq && !reply.credit.stale);
    raw_send(&r, frame, bytes);
    raw_recv(&r, &reply);
    EXPECT(reply.type == WIRE_CREDIT && reply.seq == r.seq && !reply.credit.stale);
    /* Pending: its copies are ignored. */
    req = (struct wire_request){ .type = WIRE_PREPARE, .prepare = { .model = handle, .step = 1 } };
    EXPECT_STATUS(raw_ask(&r, req, &reply), SHD_ESTEP);
    req = (struct wire_request){ .type = WIRE_LEASE, .lease = { .model = handle, .step = 1 } };
    bytes = raw_pack(&r, &req, frame, sizeof frame);
    for (int i = 0; i < 3; i++)
        raw_send(&r, frame, bytes);
    raw_expect_silence(&r, 50);
    req = (struct wire_request){ .type = WIRE_COMMIT,
                                 .commit = { .model = handle, .decision = { .lr = 1 } } };
    EXPECT_STATUS(
        raw_ask(&r, (struct wire_request){ .type = WIRE_PREPARE, .prepare = { .model = handle } },
                &reply),
        SHD_OK);
    const uint64_t lease_seq = r.seq - 1;
    raw_send(&r, frame, raw_pack(&r, &req, frame, sizeof frame));
    for (int i = 0; i < 2; i++) { /* Committed and, once, Leased */
        raw_recv(&r, &reply);
        EXPECT_EQ(reply.status, SHD_OK);
        EXPECT_EQ(reply.seq, reply.type == WIRE_LEASED ? lease_seq : r.seq);
    }
    raw_expect_silence(&r, 50);
    /* Too long to be kept: served again, with the same inbox. */
    req = (struct wire_request){ .type = WIRE_OPEN_MODEL,
                                 .open_model = { .name = "tiny", .owners = 1, .slots = 2 } };
    EXPECT_STATUS(raw_ask(&r, req, &reply), SHD_EEXIST); /* another one is another one */
    raw_close(&r);
    raw_open(&r);
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    req.session = 0;
    bytes = raw_pack(&r, &req, frame, sizeof frame);
    for (int i = 0; i < 2; i++) {
        raw_send(&r, frame, bytes);
        raw_recv(&r, &reply);
        EXPECT(reply.status == SHD_OK && reply.type == WIRE_LAYOUT && reply.layout.slots == 2);
    }
    req = (struct wire_request){ .type = WIRE_STATUS };
    req.seq = 0;
    struct shd_err e;
    req.session = r.session;
    EXPECT_OK(wire_request_pack(&req, frame, sizeof frame, &bytes, &e), &e);
    raw_send(&r, frame, bytes);
    raw_recv(&r, &reply);
    EXPECT_STATUS(reply.status, SHD_EINVAL);
    raw_close(&r);
    shd_close(trainer);
    fixture_stop(&fixture);
}

TEST(work_of_a_dead_session_goes_to_who_waits_for_it)
{
    static struct raw first, second;
    struct wire_reply reply;
    uint8_t frame[256];
    uint32_t handle;
    trainer_start();
    raw_trainer(&first, &handle);
    raw_trainer(&second, &handle);
    struct wire_request req = { .type = WIRE_LEASE, .lease = { .model = handle } };
    EXPECT_STATUS(raw_ask(&first, req, &reply), SHD_OK);
    EXPECT(reply.type == WIRE_LEASED && reply.leased.what == WIRE_LEASED_GROUP);
    EXPECT_EQ(reply.leased.group, 0);
    raw_send(&second, frame, raw_pack(&second, &req, frame, sizeof frame));
    raw_expect_silence(&second, 100);
    raw_close(&first);
    raw_recv(&second, &reply);
    EXPECT(reply.type == WIRE_LEASED && reply.leased.what == WIRE_LEASED_GROUP);
    EXPECT_EQ(reply.leased.group, 0);
    req = (struct wire_request){ .type = WIRE_LEASE, .lease = { .model = handle, .step = 1 } };
    raw_send(&second, frame, raw_pack(&second, &req, frame, sizeof frame)); /* not begun: wait */
    raw_expect_silence(&second, 20);
    trainer_step();
    raw_recv(&second, &reply);
    EXPECT(reply.leased.what == WIRE_LEASED_GROUP && reply.leased.step == 1);
    req.lease.step = 0;
    EXPECT_STATUS(raw_ask(&second, req, &reply), SHD_OK);
    EXPECT_EQ(reply.leased.what, WIRE_LEASED_OVER);
    raw_close(&second);
    trainer_stop(1);
}

/* Who asks twice is one worker still. */
TEST(sessions_meet_and_not_requests)
{
    static struct raw first, second;
    struct wire_reply reply;
    uint32_t handle;
    uint8_t frame[256];
    trainer_start();
    raw_trainer(&first, &handle);
    raw_trainer(&second, &handle);
    struct wire_request req = { .type = WIRE_LEASE, .lease = { .model = handle, .meet = 2 } };
    const struct wire_request blob = { .type = WIRE_GET_BLOB, .get_blob = { .model = handle } };
    for (int i = 0; i < 2; i++)
        raw_send(&first, frame, raw_pack(&first, &req, frame, sizeof frame));
    EXPECT_STATUS(raw_ask(&first, blob, &reply), SHD_OK);
    EXPECT_EQ(reply.type, WIRE_BLOB); /* nothing was answered before */
    req.session = 0;                  /* of whom it is sent for */
    EXPECT_STATUS(raw_ask(&second, req, &reply), SHD_OK);
    EXPECT(reply.type == WIRE_LEASED && reply.leased.what == WIRE_LEASED_ALL_IN);
    for (int i = 0; i < 2; i++) {
        raw_recv(&first, &reply);
        EXPECT(reply.type == WIRE_LEASED && reply.leased.what == WIRE_LEASED_ALL_IN);
    }
    raw_close(&first);
    raw_close(&second);
    trainer_step();
    trainer_stop(1);
}

TEST(overdue_work_is_handed_out_again_by_time_alone)
{
    static struct raw first, second;
    struct wire_reply reply;
    uint32_t handle;
    trainer_start();
    raw_trainer(&first, &handle);
    raw_trainer(&second, &handle);
    const struct wire_request req = { .type = WIRE_LEASE, .lease = { .model = handle } };
    EXPECT_STATUS(raw_ask(&first, req, &reply), SHD_OK);
    EXPECT_STATUS(raw_ask(&second, req, &reply), SHD_OK); /* a backup, after two seconds or so */
    EXPECT_EQ(reply.leased.what, WIRE_LEASED_GROUP);
    raw_close(&first);
    raw_close(&second);
    trainer_stop(0);
}

/* Fill the kernel queue: one long piece of hashing, behind it as many short ones as it takes. */
#define CROWD    72u /* of 128 requests each: 121 beyond a share, 8,192 of them for all */
#define FLOODERS 10u

static void flood(struct raw *r, uint32_t count, uint32_t handle, uint64_t first_leaf)
{
    uint8_t frame[256];
    struct wire_request req = { .type = WIRE_DIGEST,
                                .digest = { .model = handle, .first_leaf = first_leaf } };
    for (uint32_t i = 0; i < count; i++)
        raw_send(r, frame, raw_pack(r, &req, frame, sizeof frame));
}

static struct wire_request open_spec(const char *json)
{
    return (struct wire_request){
        .type = WIRE_OPEN_MODEL,
        .open_model = { .spec = { (const uint8_t *)json, strlen(json) }, .name = "", .owners = 1 },
    };
}

/* The daemon reads all of them before it has done any. */
TEST(a_session_has_a_share_of_the_digests_of_several_tensors)
{
    static struct raw greedy, other;
    static const char json[] =
        "{\"name\":\"wide\",\"micro_batches\":1,\"optimizer\":{\"kind\":\"sgd\"},\"units\":["
        "{\"name\":\"a\",\"tensors\":[{\"name\":\"w\",\"shape\":[262144]}]}]}";
    struct wire_reply reply;
    uint8_t frame[256];
    int busy = 0;
    trainer_start();
    raw_enter(&greedy);
    raw_enter(&other);
    EXPECT_STATUS(raw_ask(&greedy, open_spec(json), &reply), SHD_OK);
    struct wire_request req = { .type = WIRE_DIGEST,
                                .digest = { .model = reply.layout.model, .tensors = 1 } };
    kill(fixture.pids[0], SIGSTOP);
    for (int i = 0; i < 16; i++)
        raw_send(&greedy, frame, raw_pack(&greedy, &req, frame, sizeof frame));
    req.session = 0; /* of whom it is sent for */
    raw_send(&other, frame, raw_pack(&other, &req, frame, sizeof frame));
    kill(fixture.pids[0], SIGCONT);
    for (int i = 0; i < 16; i++) {
        raw_recv(&greedy, &reply);
        EXPECT(reply.status == SHD_OK || (reply.status == SHD_EBUSY && reply.retry_ms > 0));
        busy += reply.status == SHD_EBUSY;
    }
    EXPECT_EQ(busy, 14);
    raw_recv(&other, &reply);
    EXPECT_EQ(reply.status, SHD_OK);
    raw_close(&greedy);
    raw_close(&other);
    trainer_step();
    trainer_stop(1);
}

TEST(work_waits_and_goes_on_when_others_fill_the_kernel_queue)
{
    static struct raw flooder[FLOODERS], late;
    static const char big_json[] =
        "{\"name\":\"big\",\"micro_batches\":1,\"optimizer\":{\"kind\":\"sgd\"},\"units\":["
        "{\"name\":\"a\",\"tensors\":[{\"name\":\"w\",\"shape\":[16384,2048],"
        "\"trainable\":false}]},"
        "{\"name\":\"b\",\"tensors\":[{\"name\":\"x\",\"shape\":[64]}]}]}";
    static const char late_json[] =
        "{\"name\":\"late\",\"micro_batches\":1,\"optimizer\":{\"kind\":\"sgd\"},\"units\":["
        "{\"name\":\"a\",\"tensors\":[{\"name\":\"w\",\"shape\":[64]}]}]}";
    struct wire_reply reply;
    uint8_t frame[1024];
    trainer_start();
    for (uint32_t i = 0; i < FLOODERS; i++) {
        raw_open(&flooder[i]);
        EXPECT_STATUS(raw_hello(&flooder[i], SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    }
    EXPECT_STATUS(raw_ask(&flooder[0], open_spec(big_json), &reply), SHD_OK);
    const uint32_t handle = reply.layout.model;
    raw_open(&late);
    EXPECT_STATUS(raw_hello(&late, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    do { /* until the last one is refused: it is full */
        flood(&flooder[0], 6, handle, 0);
        for (uint32_t i = 1; i < FLOODERS; i++)
            flood(&flooder[i], 120, handle, 16383);
        for (uint32_t i = 0; i < 120 && reply.status != SHD_EBUSY; i++)
            raw_recv(&flooder[FLOODERS - 1], &reply);
    } while (reply.status != SHD_EBUSY);
    struct wire_request req = open_spec(late_json);
    raw_send(&late, frame, raw_pack(&late, &req, frame, sizeof frame));
    trainer_step();
    raw_recv(&late, &reply);
    EXPECT_STATUS(reply.status, SHD_OK);
    raw_close(&late);
    for (uint32_t i = 0; i < FLOODERS; i++)
        raw_close(&flooder[i]);
    trainer_stop(1);
}

/* Far more requests wait than all sessions together may have beyond their share. */
TEST(requests_that_wait_keep_no_other_session_from_going_on)
{
    static struct raw crowd[CROWD];
    struct wire_reply reply;
    uint8_t frame[256];
    trainer_start();
    for (uint32_t i = 0; i < CROWD; i++) {
        raw_open(&crowd[i]);
        EXPECT_STATUS(raw_hello(&crowd[i], SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
        const uint32_t handle = raw_attach(&crowd[i], 1);
        for (uint32_t k = 0; k < 128; k++) {
            struct wire_request req = { .type = WIRE_LEASE,
                                        .lease = { .model = handle, .step = shd_step(model) } };
            raw_send(&crowd[i], frame, raw_pack(&crowd[i], &req, frame, sizeof frame));
        }
    }
    raw_recv(&crowd[CROWD - 1], &reply); /* its share is used up, and what others leave */
    EXPECT_STATUS(reply.status, SHD_EBUSY);
    EXPECT(reply.retry_ms > 0 && reply.seq > 0);
    trainer_step();
    for (uint32_t i = 0; i < CROWD; i++)
        raw_close(&crowd[i]);
    trainer_stop(1);
}

TEST(tickets_work_once_in_their_own_session)
{
    static struct raw r;
    struct wire_reply reply;
    struct shd_err e;
    struct side_msg msg = { .magic = SIDE_MAGIC, .protocol = SHD_PROTOCOL, .type = SIDE_CLAIM };
    int fd;
    trainer_start();
    raw_open(&r);
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    raw_attach(&r, 1);
    msg.ticket = 1;
    EXPECT_OK(side_send(r.side, &msg, -1, &e), &e);
    EXPECT_OK(side_recv(r.side, RAW_WAIT_MS, &msg, &fd, &e), &e);
    EXPECT(msg.type == SIDE_SEGMENT && fd >= 0);
    close(fd);
    msg = (struct side_msg){
        .magic = SIDE_MAGIC, .protocol = SHD_PROTOCOL, .type = SIDE_CLAIM, .ticket = 1
    };
    EXPECT_OK(side_send(r.side, &msg, -1, &e), &e);
    EXPECT_OK(side_recv(r.side, RAW_WAIT_MS, &msg, &fd, &e), &e);
    EXPECT(msg.type == SIDE_ERROR && msg.status == SHD_ENOENT && fd < 0);
    raw_close(&r);
    trainer_step();
    trainer_stop(1);
}

/* The numbers of a put are no secret once its commit is known: they are no right to end it. */
TEST(put_is_finished_and_dropped_by_who_began_it)
{
    static struct raw r, other;
    static const uint8_t arrays[] = { SHD_PUT_PARAMS };
    struct wire_reply reply;
    uint32_t handle, others;
    trainer_start();
    raw_trainer(&r, &handle);
    raw_trainer(&other, &others);
    EXPECT_EQ(others, handle);
    struct wire_request req = { .type = WIRE_CREATE,
                                .create = { .what = WIRE_CREATE_PUT,
                                            .origin = 77,
                                            .name = "",
                                            .owners = 1,
                                            .model = handle,
                                            .arrays = { arrays, sizeof arrays } } };
    EXPECT_STATUS(raw_ask(&r, req, &reply), SHD_OK);
    EXPECT_EQ(reply.created.what, WIRE_CREATED_YOURS);
    req.create.arrays = (struct wire_bytes){ NULL, 0 };
    req.create.what = WIRE_CREATE_PUT_FULL;
    EXPECT_STATUS(raw_ask(&other, req, &reply), SHD_ENOENT);
    EXPECT_STATUS(raw_ask(&r, req, &reply), SHD_OK);
    EXPECT_EQ(reply.created.what, WIRE_CREATED_FULL);
    req.create.what = WIRE_CREATE_PUT_DROP;
    EXPECT_STATUS(raw_ask(&other, req, &reply), SHD_ENOENT);
    EXPECT_STATUS(raw_ask(&r, req, &reply), SHD_OK);
    EXPECT_EQ(reply.created.what, WIRE_CREATED_DROPPED);
    raw_close(&other);
    raw_close(&r);
    trainer_step();
    trainer_stop(1);
}

/* -- Metrics ------------------------------------------------------------------------------------
 */

static struct wire_request report(uint32_t handle, uint32_t micro, const char *names)
{
    return (struct wire_request){ .type = WIRE_RETURN,
                                  .return_grad = { .model = handle,
                                                   .micro = micro,
                                                   .none = true,
                                                   .metrics = { 1 },
                                                   .metric_count = 1,
                                                   .metric_names = names } };
}

/* An unknown field would end the session of a library that is older than it. */
TEST(replies_say_how_many_have_reported_to_who_knows_the_field)
{
    static struct raw old, r, later;
    struct wire_reply reply;
    uint32_t handle;
    const struct wire_request open = {
        .type = WIRE_OPEN_MODEL, .open_model = { .name = "tiny", .owners = 1, .spec_apart = true }
    };
    trainer_start();
    raw_trainer(&old, &handle);
    struct wire_request prepare = { .type = WIRE_PREPARE, .prepare = { .model = handle } };
    EXPECT_STATUS(raw_ask(&old, report(handle, 0, "loss"), &reply), SHD_OK);
    EXPECT_STATUS(raw_ask(&old, prepare, &reply), SHD_OK);
    EXPECT(reply.prepared.metric_count == 1 && reply.prepared.reported == 0);
    raw_enter(&r);
    EXPECT_STATUS(raw_ask(&r, open, &reply), SHD_OK);
    EXPECT_STATUS(raw_ask(&r, prepare, &reply), SHD_OK);
    EXPECT(reply.prepared.metric_count == 1 && reply.prepared.reported == 1);
    raw_open(&later);
    later.level = WIRE_LEVEL + 1; /* of builds to come; it tells its level, and need say no more */
    EXPECT_STATUS(raw_hello(&later, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    EXPECT_STATUS(raw_ask(&later, prepare, &reply), SHD_OK);
    EXPECT_EQ(reply.prepared.reported, 1);
    raw_close(&old);
    raw_close(&r);
    raw_close(&later);
    trainer_step();
    trainer_stop(1);
}

TEST(names_of_metrics_outlive_the_message_where_a_gradient_waits)
{
    static const char json[] =
        "{\"name\":\"pair\",\"seed\":7,\"micro_batches\":2,\"optimizer\":{\"kind\":\"sgd\"},"
        "\"units\":[{\"name\":\"a\",\"tensors\":[{\"name\":\"w\",\"shape\":[64]}]}]}";
    static struct raw r, holder;
    struct wire_reply reply;
    uint8_t frame[256];
    struct wire_request drain = { .type = WIRE_DRAIN };
    const struct wire_request other = { .type = WIRE_GET_BLOB, .get_blob = { .model = 77 } };
    const struct wire_request open = { .type = WIRE_OPEN_MODEL,
                                       .open_model = {
                                           .spec = { (const uint8_t *)json, sizeof json - 1 },
                                           .name = "",
                                           .owners = 1,
                                           .slots = 1 } };
    trainer_start();
    raw_enter(&r);
    raw_enter(&holder);
    EXPECT_STATUS(raw_ask(&r, open, &reply), SHD_OK);
    const uint32_t handle = reply.layout.model;
    EXPECT_STATUS(raw_ask(&holder, drain, &reply), SHD_OK);
    for (uint32_t micro = 0; micro < 2; micro++) {
        struct wire_request req = report(handle, micro, micro == 0 ? "loss" : "ruin");
        raw_send(&r, frame, raw_pack(&r, &req, frame, sizeof frame));
    }
    EXPECT_STATUS(raw_ask(&r, other, &reply), SHD_ENOENT); /* both wait */
    drain.drain.off = true;
    EXPECT_STATUS(raw_ask(&holder, drain, &reply), SHD_OK);
    raw_recv(&r, &reply);
    EXPECT_EQ(reply.type, WIRE_CREDIT);
    raw_recv(&r, &reply);
    EXPECT_STATUS(reply.status, SHD_EINVAL);
    EXPECT_HAS(reply.text, "metrics 'ruin' of micro-batch 1 in a step in which micro-batch 0 has "
                           "'loss'");
    raw_close(&holder);
    raw_close(&r);
    trainer_step();
    trainer_stop(1);
}

static int fill_zeros(void *ctx, uint32_t unit, enum shd_array array, float *values)
{
    (void)ctx;
    (void)unit;
    (void)array;
    memset(values, 0, 64 * sizeof *values);
    return 0;
}

/* A checkpoint without them would go on with others. Whose library knows them has to name a
 * directory that is there. */
TEST(counts_of_units_are_not_left_out_of_a_checkpoint)
{
    const struct shd_put_options put = { .size = sizeof put,
                                         .arrays = (const uint8_t[]){ SHD_PUT_PARAMS },
                                         .fill = fill_zeros,
                                         .unit_updates = (const uint64_t[]){ 5 } };
    const uint32_t levels[] = { WIRE_LEVEL_COUNTS - 1, WIRE_LEVEL };
    struct shd_err e = { 0 };
    trainer_start();
    EXPECT_OK(shd_put(model, &put, NULL, &e), &e);
    for (size_t i = 0; i < ARRAY_SIZE(levels); i++) {
        static struct raw r;
        struct wire_reply reply;
        raw_open(&r);
        r.level = levels[i];
        EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
        const struct wire_request save = {
            .type = WIRE_CHECKPOINT,
            .checkpoint = { .model = raw_attach(&r, 0), .step = 1, .path = "/nowhere" }
        };
        EXPECT_STATUS(raw_ask(&r, save, &reply), i == 0 ? SHD_ENOTSUP : SHD_ENOENT);
        EXPECT_HAS(reply.text, i == 0 ? "different numbers of updates" : "/nowhere");
        raw_close(&r);
    }
    trainer_stop(1);
}

/* Steps far ahead, unknown models, what was not pinned; each session has one pin of a model,
 * however often it asks, and what it has goes with it. */
TEST(pins_that_are_wrong_doubled_or_left_behind)
{
    static struct raw r, other, third;
    struct wire_reply reply, again;
    uint8_t frame[512];
    trainer_start();
    trainer_step(); /* and what that makes */
    const int fds = count_fds(fixture.pids[0]), maps = count_segment_maps(fixture.pids[0]);
    raw_open(&r);
    r.level = WIRE_LEVEL;
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_READER, &reply), SHD_OK);
    const uint32_t handle = raw_attach(&r, 0);
    struct wire_request pin = { .type = WIRE_PIN, .pin = { .model = handle + 1 } };
    struct wire_request unpin = { .type = WIRE_UNPIN, .unpin = { .model = handle + 1 } };
    EXPECT_STATUS(raw_ask(&r, pin, &reply), SHD_ENOENT);
    EXPECT_STATUS(raw_ask(&r, unpin, &reply), SHD_ENOENT);
    unpin.unpin.model = pin.pin.model = handle;
    EXPECT_STATUS(raw_ask(&r, unpin, &reply), SHD_OK); /* nothing */
    pin.pin.step = UINT64_MAX;
    raw_send(&r, frame, raw_pack(&r, &pin, frame, sizeof frame)); /* waits */
    raw_send(&r, frame, raw_pack(&r, &pin, frame, sizeof frame)); /* in its place */
    raw_recv(&r, &reply);
    EXPECT_STATUS(reply.status, SHD_ESTEP);
    EXPECT_HAS(reply.text, "asks for another step");
    raw_send(&r, frame, raw_pack(&r, &unpin, frame, sizeof frame));
    raw_recv(&r, &reply); /* the second's answer comes first */
    EXPECT_STATUS(reply.status, SHD_ESTEP);
    EXPECT_HAS(reply.text, "lets go of it");
    raw_recv(&r, &reply);
    EXPECT_STATUS(reply.status, SHD_OK);
    pin.pin.step = 1;
    EXPECT_STATUS(raw_ask(&r, pin, &reply), SHD_OK);
    EXPECT_EQ(reply.type, WIRE_PINNED);
    trainer_step();
    for (int i = 0; i < 40; i++) { /* no more of anything */
        EXPECT_STATUS(raw_ask(&r, pin, &again), SHD_OK);
        EXPECT_EQ(again.pinned.ticket, reply.pinned.ticket);
        EXPECT_EQ(again.pinned.segment, reply.pinned.segment);
    }
    for (uint64_t step = 2; step < 21; step++) { /* its memory serves for others, too */
        pin.pin.step = step;
        EXPECT_STATUS(raw_ask(&r, pin, &again), SHD_OK);
        EXPECT_EQ(again.pinned.step, step);
        EXPECT_EQ(again.pinned.segment, reply.pinned.segment);
        trainer_step();
    }
    EXPECT_STATUS(raw_ask(&r, pin, &again), SHD_OK);
    pin.pin.step = 3;
    EXPECT_STATUS(raw_ask(&r, pin, &again), SHD_ESTEP);
    EXPECT_STATUS(raw_ask(&r, unpin, &reply), SHD_OK);
    EXPECT_STATUS(raw_ask(&r, unpin, &reply), SHD_OK);
    pin.pin.step = UINT64_MAX - 1;
    raw_send(&r, frame, raw_pack(&r, &pin, frame, sizeof frame));
    raw_enter(&other);
    raw_attach(&other, 0);
    pin.pin.step = UINT64_MAX - 2;
    pin.session = 0;
    raw_send(&other, frame, raw_pack(&other, &pin, frame, sizeof frame));
    raw_open(&third);
    third.level = WIRE_LEVEL;
    EXPECT_STATUS(raw_hello(&third, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    raw_attach(&third, 0);
    pin.pin.step = 21;
    pin.session = unpin.session = 0;
    const uint64_t end_ms = test_now_ms() + TEST_HANG_MS;
    while (raw_ask(&third, pin, &reply) == SHD_OK && test_now_ms() < end_ms)
        EXPECT_STATUS(raw_ask(&third, unpin, &reply), SHD_OK); /* those two are on their way */
    EXPECT_STATUS(reply.status, SHD_EBUSY);
    EXPECT_HAS(reply.text, "2 at most may be");
    raw_close(&r);
    raw_close(&other);
    raw_close(&third);
    trainer_step();
    expect_daemon_idle(fixture.pids[0], fds, maps);
    trainer_stop(22);
}

TEST_MAIN()
