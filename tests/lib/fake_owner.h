/* Owners that die at a chosen point and come back, for tests of the client: fake daemons in forked
 * children. Their state lies in memory shared with the test, as a keeper's would; a successor makes
 * new segments and hands out new handles. They check every gradient's bytes and count it. */
#ifndef SHD_FAKE_OWNER_H
#define SHD_FAKE_OWNER_H

#include "proto/wire/wire.h"
#include "tests/lib/child.h"
#include "tests/lib/fixture.h"
#include "tests/lib/test.h"

#define OWNERS   2u
#define UNITS    2u
#define MICROS   3u
#define STEPS    3u
#define NOBODY   UINT64_MAX
#define RUN_NAME "again"

static const char spec_json[] =
    "{\"name\":\"" RUN_NAME "\",\"micro_batches\":3,"
    "\"optimizer\":{\"kind\":\"sgd\",\"momentum\":0},\"units\":["
    "{\"name\":\"a\",\"tensors\":[{\"name\":\"a.w\",\"shape\":[8192]}]},"
    "{\"name\":\"b\",\"tensors\":[{\"name\":\"b.w\",\"shape\":[4096]}]}]}";

struct owner_state {
    uint64_t step;                          /* open */
    uint32_t counted[STEPS][MICROS][UNITS]; /* how often the gradient was taken: 0 or 1 */
    struct decision decision[STEPS];
    bool decided[STEPS];
    char blob[16];
};

struct world {
    struct owner_state owner[OWNERS];
    uint64_t events;    /* of owner 0 */
    uint64_t die_at[2]; /* events; NOBODY: never */
    uint64_t drop_at;   /* request of owner 0 that is not answered */
    uint64_t expel_at;  /* request of owner 0 that finds its session ended */
    uint64_t requests;  /* of owner 0 */
    uint32_t deaths;
    bool forget;    /* the successor has lost the model */
    bool stay_away; /* there is no successor */
    bool wrong;     /* a gradient was not what the worker wrote */
    char dir[64];
};

extern struct world *world; /* shared mapping */

/* Bytes of parameters and gradients: functions of where they belong. */
float param_at(uint64_t step, uint32_t unit, uint64_t elem);

float grad_at(uint64_t step, uint32_t micro, uint32_t unit, uint64_t elem);

/* Starts a successor whenever the fake died by itself. */
pid_t start_keeper(uint32_t index);

#endif
