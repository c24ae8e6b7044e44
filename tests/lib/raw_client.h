/* A client made by hand, frame by frame, for tests of what no well-behaved one sends. */
#ifndef SHD_TESTS_RAW_CLIENT_H
#define SHD_TESTS_RAW_CLIENT_H

#include "client/shd.h"
#include "proto/wire/wire.h"
#include "tests/lib/fixture.h"
#include "tests/lib/test.h"

extern struct fixture fixture;

static const char spec_json[] =
    "{\"name\":\"tiny\",\"seed\":7,\"micro_batches\":1,\"optimizer\":{\"kind\":\"sgd\"},"
    "\"units\":[{\"name\":\"a\",\"tensors\":[{\"name\":\"w\",\"shape\":[64]}]}]}";

#define RAW_WAIT_MS ((int)TEST_HANG_MS)

struct raw {
    int side;
    void *context, *dealer;
    uint8_t token[WIRE_TOKEN_BYTES];
    uint64_t session, seq;
    uint32_t level; /* that raw_hello() tells: none, unless it is set */
    _Alignas(16) uint8_t memory[256 * 1024];
    struct wire_arena arena;
};

void raw_open(struct raw *r);

void raw_close(struct raw *r);

void raw_send(struct raw *r, const void *frame, size_t bytes);

/* The next reply; *ret points into r until the next call. */
void raw_recv(struct raw *r, struct wire_reply *ret);

size_t raw_pack(struct raw *r, struct wire_request *req, uint8_t *frame, size_t capacity);

int raw_ask(struct raw *r, struct wire_request req, struct wire_reply *ret);

int raw_hello(struct raw *r, uint32_t protocol, enum wire_role role, struct wire_reply *ret);

/* raw_open(), and Hello as a trainer. */
void raw_enter(struct raw *r);

uint32_t raw_attach(struct raw *r, uint32_t slots);

void raw_expect_silence(struct raw *r, int ms);

void raw_trainer(struct raw *r, uint32_t *ret_handle);

/* A trainer of the model of spec_json on one daemon, attached all along while others misbehave: it
 * must not notice. */
extern shd_session *trainer;
extern shd_model *model;

void trainer_start(void); /* and the daemon */

void trainer_step(void);

void trainer_stop(uint64_t steps); /* so many were taken; ends the daemon, too */

#endif
