/* Specs that clients pass in segments, to a real daemon: each is taken once and whole, what is not
 * what it is said to be is refused, and nothing of it stays. */
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/net/session.h"
#include "proto/base/check.h"
#include "proto/share/fdpass.h"
#include "proto/share/spec_segment.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec.h"
#include "tests/lib/raw_client.h"

#define TICKET UINT64_C(0x70617373) /* any number */

static void pass(struct raw *r, int fd, uint64_t ticket, enum segment_kind kind)
{
    struct shd_err e = { 0 };
    const struct side_msg msg = {
        .type = SIDE_SEGMENT, .ticket = ticket, .kind = kind, .bytes = SHD_PAGE_BYTES
    };
    EXPECT_OK(side_send(r->side, &msg, fd, &e), &e);
}

/* With blanks behind it, for a small one is no segment's. */
static struct segment segment_of_spec(const char *json, struct spec_stub *ret_stub)
{
    struct shd_err e = { 0 };
    struct segment segment;
    char padded[SPEC_SEGMENT_BYTES_MIN];
    memset(padded, ' ', sizeof padded);
    for (size_t i = 0; json[i] != '\0'; i++)
        padded[i] = json[i];
    EXPECT_OK(spec_stub_of(padded, sizeof padded, ret_stub, &e), &e);
    EXPECT_OK(spec_segment_new(padded, sizeof padded, &segment, &e), &e);
    return segment;
}

static int open_passed(struct raw *r, const struct spec_stub *stub, uint64_t ticket,
                       struct wire_reply *ret)
{
    struct wire_request req = { .type = WIRE_OPEN_MODEL,
                                .open_model = { .name = "",
                                                .owners = 1,
                                                .spec_at = { .ticket = ticket,
                                                             .bytes = stub->bytes,
                                                             .sum = { stub->sum, 32 } } } };
    return raw_ask(r, req, ret);
}

/* A spec that no message holds. */
static char *many_tensors(void)
{
    const uint32_t count = 12000;
    char *json = malloc(count * 100 + 400), *at = json;
    CHECK(json != NULL);
    at += sprintf(at, "{\"name\":\"many\",\"micro_batches\":1,\"optimizer\":{\"kind\":\"sgd\"},"
                      "\"units\":[{\"name\":\"u\",\"tensors\":[");
    for (uint32_t i = 0; i < count; i++)
        at += sprintf(at, "%s{\"name\":\"%048u\",\"shape\":[1]}", i > 0 ? "," : "", i);
    strcpy(at, "]}]}");
    return json;
}

TEST(spec_in_a_segment_opens_a_model)
{
    static struct raw r;
    struct wire_reply reply;
    struct spec_stub stub;
    trainer_start();
    raw_enter(&r);
    struct segment segment = segment_of_spec(spec_json, &stub);
    pass(&r, segment.fd, TICKET, SEGMENT_SPEC);
    EXPECT_STATUS(open_passed(&r, &stub, TICKET, &reply), SHD_OK);
    EXPECT(reply.type == WIRE_LAYOUT && reply.layout.spec_bytes == 0); /* small: in the message */
    EXPECT_STATUS(open_passed(&r, &stub, TICKET, &reply), SHD_ENOENT); /* it is taken */
    pass(&r, segment.fd, TICKET, SEGMENT_SPEC);
    pass(&r, segment.fd, TICKET + 1, SEGMENT_SPEC);
    EXPECT_STATUS(open_passed(&r, &stub, TICKET + 1, &reply), SHD_OK); /* in the other's place */
    EXPECT_STATUS(open_passed(&r, &stub, TICKET, &reply), SHD_ENOENT);
    segment_close(&segment);
    raw_close(&r);
    trainer_step();
    trainer_stop(1);
}

TEST(specs_in_segments_that_are_not_what_is_said_are_refused)
{
    static struct raw r;
    struct wire_reply reply;
    struct spec_stub stub, other, lie;
    int pipes[2];
    trainer_start();
    raw_enter(&r);
    struct segment segment = segment_of_spec(spec_json, &stub);
    struct segment broken = segment_of_spec("{\"nome\":", &other);
    EXPECT_STATUS(open_passed(&r, &stub, TICKET, &reply), SHD_ENOENT);
    EXPECT_HAS(reply.text, "no segment was passed under ticket 0000000070617373");

    pass(&r, segment.fd, TICKET, SEGMENT_SPEC);
    EXPECT_STATUS(open_passed(&r, &stub, TICKET + 5, &reply), SHD_ENOENT);
    EXPECT_STATUS(open_passed(&r, &other, TICKET, &reply), SHD_ESEGMENT);
    EXPECT_HAS(reply.text, "spec of 4096 bytes has SHA-256 ");
    EXPECT_HAS(reply.text, "..., said was ");

    lie = stub;
    lie.bytes = segment.bytes + 1;
    pass(&r, segment.fd, TICKET, SEGMENT_SPEC);
    EXPECT_STATUS(open_passed(&r, &lie, TICKET, &reply), SHD_ESEGMENT);
    EXPECT_HAS(reply.text, "spec segment has 4096 bytes, needs 8192");
    lie.bytes = SPEC_JSON_BYTES_MAX;
    pass(&r, segment.fd, TICKET, SEGMENT_SPEC);
    EXPECT_STATUS(open_passed(&r, &lie, TICKET, &reply), SHD_ESEGMENT);
    EXPECT_HAS(reply.text, "spec segment has 4096 bytes, needs 67108864");
    lie.bytes = 1;
    pass(&r, segment.fd, TICKET, SEGMENT_SPEC);
    EXPECT_STATUS(open_passed(&r, &lie, TICKET, &reply), SHD_ERANGE);
    EXPECT_HAS(reply.text,
               "a spec of 1 bytes in a segment, must be 4096 to 67108864: a smaller one");
    lie.bytes = 0;
    pass(&r, segment.fd, TICKET, SEGMENT_SPEC);
    EXPECT_STATUS(open_passed(&r, &lie, TICKET, &reply), SHD_EINVAL);
    EXPECT_HAS(reply.text, "a spec in a segment, of 0 bytes and with a sum of 32");

    pass(&r, broken.fd, TICKET, SEGMENT_SPEC);
    EXPECT_STATUS(open_passed(&r, &other, TICKET, &reply), SHD_EINVAL);
    EXPECT_HAS(reply.text, "spec line 1");

    ((char *)segment.base)[9]++; /* by its maker, once it is passed */
    pass(&r, segment.fd, TICKET, SEGMENT_SPEC);
    EXPECT_STATUS(open_passed(&r, &stub, TICKET, &reply), SHD_ESEGMENT);

    const int plain = memfd_create("plain", MFD_CLOEXEC);
    CHECK(plain >= 0 && ftruncate(plain, SHD_PAGE_BYTES) == 0 && pipe(pipes) == 0);
    pass(&r, plain, TICKET, SEGMENT_SPEC);
    EXPECT_STATUS(open_passed(&r, &stub, TICKET, &reply), SHD_ESEGMENT);
    EXPECT_HAS(reply.text, "spec segment has seals");
    pass(&r, pipes[0], TICKET, SEGMENT_SPEC); /* who reads it would wait */
    EXPECT_STATUS(open_passed(&r, &stub, TICKET, &reply), SHD_ESEGMENT);
    EXPECT_HAS(reply.text, "is not a memfd");
    close(plain);
    close(pipes[0]);
    close(pipes[1]);
    segment_close(&segment);
    segment_close(&broken);
    raw_close(&r);
    trainer_step();
    trainer_stop(1);
}

/* As those before segments were known, which say nothing of themselves. */
TEST(sessions_of_an_older_build_are_refused_what_they_cannot_be_told)
{
    static struct raw old, r;
    struct wire_reply reply;
    struct shd_err e = { 0 };
    shd_model *large;
    char *spec = many_tensors();
    struct wire_request open = { .type = WIRE_OPEN_MODEL,
                                 .open_model = { .name = "many", .owners = 1, .slots = 1 } };
    trainer_start();
    EXPECT_OK(shd_model_open(trainer, spec, &large, &e), &e);
    raw_enter(&old);
    EXPECT_STATUS(raw_ask(&old, open, &reply), SHD_ENOTSUP);
    EXPECT_HAS(reply.text, "model 'many' has a spec of ");
    EXPECT_HAS(reply.text, " bytes, messages hold 786432");
    raw_open(&r);
    r.level = WIRE_LEVEL;
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    EXPECT_STATUS(raw_ask(&r, open, &reply), SHD_OK);
    EXPECT(reply.layout.spec_bytes > 786432 && reply.layout.spec.bytes == 0);
    raw_close(&old);
    raw_close(&r);
    shd_model_close(large);
    free(spec);
    trainer_step();
    trainer_stop(1);
}

TEST(requests_say_of_a_spec_one_place)
{
    static struct raw r;
    struct wire_reply reply;
    struct spec_stub stub;
    char json[sizeof spec_json];
    trainer_start();
    raw_enter(&r);
    memcpy(json, spec_json, sizeof json);
    strstr(json, "tiny")[0] = 'T'; /* it is not open */
    struct segment segment = segment_of_spec(json, &stub);
    const struct wire_spec_at at = { TICKET, stub.bytes, { stub.sum, 32 } };
    struct wire_request both = { .type = WIRE_CREATE,
                                 .create = { .what = WIRE_CREATE_BEGIN,
                                             .origin = 1,
                                             .name = "Tiny",
                                             .spec = { (const uint8_t *)spec_json, 10 },
                                             .owners = 1,
                                             .spec_at = at } };
    pass(&r, segment.fd, TICKET, SEGMENT_SPEC);
    EXPECT_STATUS(raw_ask(&r, both, &reply), SHD_EINVAL);
    EXPECT_HAS(reply.text, "a spec in the message, and one in a segment");
    struct wire_request no_sum = { .type = WIRE_RESTORE,
                                   .restore = { .path = "/nowhere", .owners = 1, .spec_at = at } };
    no_sum.restore.spec_at.sum.bytes = 0;
    pass(&r, segment.fd, TICKET, SEGMENT_SPEC);
    EXPECT_STATUS(raw_ask(&r, no_sum, &reply), SHD_EINVAL);
    EXPECT_HAS(reply.text, "with a sum of 0");
    struct wire_request none = no_sum;
    none.restore.spec_at = (struct wire_spec_at){ 0 };
    EXPECT_STATUS(raw_ask(&r, none, &reply), SHD_EINVAL);
    EXPECT_HAS(reply.text, "a model without a spec cannot be restored");
    struct wire_request restore = none; /* its path outlives the message */
    restore.restore.spec_at = at;
    pass(&r, segment.fd, TICKET, SEGMENT_SPEC);
    EXPECT(raw_ask(&r, restore, &reply) != SHD_OK);
    EXPECT_HAS(reply.text, "/nowhere");
    segment_close(&segment);
    raw_close(&r);
    trainer_step();
    trainer_stop(1);
}

TEST(sessions_that_pass_what_is_no_spec_end)
{
    static struct raw r;
    struct spec_stub stub;
    struct shd_err e;
    struct side_msg msg;
    trainer_start();
    struct segment segment = segment_of_spec(spec_json, &stub);
    raw_enter(&r);
    pass(&r, segment.fd, TICKET, SEGMENT_STAGE);
    EXPECT_STATUS(side_recv(r.side, RAW_WAIT_MS, &msg, NULL, &e), SHD_EGONE);
    raw_close(&r);
    raw_open(&r); /* who has said no Hello passes nothing */
    pass(&r, segment.fd, TICKET, SEGMENT_SPEC);
    EXPECT_STATUS(side_recv(r.side, RAW_WAIT_MS, &msg, NULL, &e), SHD_EGONE);
    raw_close(&r);
    segment_close(&segment);
    trainer_step();
    trainer_stop(1);
}

/* Until the daemon has read all that was sent there. */
static void await_side(struct raw *r)
{
    struct shd_err e = { 0 };
    struct side_msg msg = { .type = SIDE_CLAIM };
    EXPECT_OK(side_send(r->side, &msg, -1, &e), &e);
    EXPECT_OK(side_recv(r->side, RAW_WAIT_MS, &msg, NULL, &e), &e);
    EXPECT_EQ(msg.type, SIDE_ERROR); /* 0 is no ticket */
}

/* Those that pass and never ask, or die first: nothing of theirs stays, and others find a place. */
TEST(segments_that_are_passed_and_not_asked_for_go)
{
    static struct raw r[SESSIONS_PASSED_MAX + 1];
    struct wire_reply reply;
    struct spec_stub stub;
    trainer_start();
    struct segment segment = segment_of_spec(spec_json, &stub);
    const int fds = count_fds(fixture.pids[0]), maps = count_segment_maps(fixture.pids[0]);
    for (int i = 0; i < 100; i++) {
        raw_enter(&r[0]);
        pass(&r[0], segment.fd, TICKET, SEGMENT_SPEC);
        raw_close(&r[0]);
    }
    expect_daemon_idle(fixture.pids[0], fds, maps);
    for (uint32_t i = 0; i < ARRAY_SIZE(r); i++) {
        raw_enter(&r[i]);
        pass(&r[i], segment.fd, TICKET, SEGMENT_SPEC);
        await_side(&r[i]);
    }
    EXPECT_STATUS(open_passed(&r[0], &stub, TICKET, &reply), SHD_EBUSY); /* the oldest */
    EXPECT(reply.retry_ms > 0); /* others are at it, too: no fault of this one */
    EXPECT_HAS(reply.text, "(at most 64 wait): pass it again");
    EXPECT_STATUS(open_passed(&r[0], &stub, TICKET, &reply), SHD_ENOENT); /* it has not */
    EXPECT_STATUS(open_passed(&r[ARRAY_SIZE(r) - 1], &stub, TICKET, &reply), SHD_OK);
    EXPECT_STATUS(open_passed(&r[1], &stub, TICKET, &reply), SHD_OK);
    pass(&r[0], segment.fd, TICKET, SEGMENT_SPEC);
    EXPECT_STATUS(open_passed(&r[0], &stub, TICKET, &reply), SHD_OK);
    for (uint32_t i = 0; i < ARRAY_SIZE(r); i++)
        raw_close(&r[i]);
    expect_daemon_idle(fixture.pids[0], fds, maps);
    segment_close(&segment);
    trainer_step();
    trainer_stop(1);
}

TEST_MAIN()
