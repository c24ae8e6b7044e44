/* What tests of proto/ share: specs as text, connected sockets, random frames. */
#ifndef SHD_TESTS_PROTO_UTIL_H
#define SHD_TESTS_PROTO_UTIL_H

#include <unistd.h>

#include "proto/share/fdpass.h"
#include "proto/spec/spec.h"
#include "proto/spec/spec_json.h"
#include "proto/wire/wire.h"
#include "tests/lib/test.h"

/* The example of client/shd.h. */
__attribute__((unused)) static const char example[] =
    "{ \"name\": \"gpt\", \"seed\": 1, \"micro_batches\": 4, \"publish\": \"f32\","
    "  \"optimizer\": { \"kind\": \"adamw\", \"beta1\": 0.9, \"beta2\": 0.95, \"eps\": 1e-8 },"
    "  \"groups\": [ { \"name\": \"decay\", \"weight_decay\": 0.1 }, { \"name\": \"plain\" } ],"
    "  \"units\": ["
    "    { \"name\": \"embed\", \"tensors\": ["
    "      { \"name\": \"wte\", \"shape\": [256, 128], \"group\": \"decay\","
    "        \"init\": [\"normal\", 0, 0.02] } ] },"
    "    { \"name\": \"head\", \"uses\": [\"embed\"], \"tensors\": ["
    "      { \"name\": \"ln_f.weight\", \"shape\": [128], \"group\": \"plain\","
    "        \"init\": [\"const\", 1] } ] } ] }";

struct spec *parse(const char *json);

/* Single quotes become double ones: JSON in C source stays readable. */
__attribute__((format(printf, 1, 2))) char *quoted(const char *fmt, ...);

#define HEAD        "'name':'m','micro_batches':1,'optimizer':{'kind':'sgd'}"
#define SMALL_UNITS "'units':[{'name':'u','tensors':[{'name':'t','shape':[3]}]}]"

/* Connected sockets and counted descriptors, for the tests of proto/share/fdpass.h. */
int fds_open(void);

struct side_msg msg_of(uint32_t type);

void pair_new(int ret_fds[2]);

void pair_free(const int fds[2]);

int child_status(pid_t pid);

/* A random valid request and reply; name is storage for one name. */
struct wire_request random_request(uint64_t *seed, enum wire_request_type type,
                                   char name[WIRE_NAME_BYTES_MAX]);

struct wire_reply random_reply(uint64_t *seed, enum wire_reply_type type,
                               char name[WIRE_NAME_BYTES_MAX]);

/* An arena of exactly `bytes` bytes of heap, so that a checker sees every byte past its end. */
struct wire_arena arena_new(size_t bytes);

#endif
