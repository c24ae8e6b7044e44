/* Shared by test_adopt.c and test_adopt_state.c: toy models trained by daemons with a keeper, and
 * what each step came to. */
#ifndef SHD_TESTS_ADOPT_TOY_H
#define SHD_TESTS_ADOPT_TOY_H

#include "tests/lib/client_remote.h"
#include "tests/lib/client_toy.h"

#define STEPS      6u
#define TIMEOUT_MS TEST_HANG_MS

struct kind {
    const char *optimizer; /* JSON of optimizer */
    const char *publish;
    bool frozen, routed;
    uint64_t overflow_step;
    bool ema;
    const char *whole; /* as pt_model's */
};

static const struct kind kinds[] = {
    { TOY_ADAMW, "f32", true, true, 1, false, NULL },
    { TOY_ADAMW, "bf16", false, false, UINT64_MAX, false, NULL },
    { TOY_SGD, "f32", false, true, 0, false, NULL },
    { TOY_LION, "f16", true, false, 2, false, NULL },
    { TOY_ADAMW, "bf16", true, true, 1, true, NULL },
    { TOY_SGD, "f32", false, true, UINT64_MAX, true, NULL },
    { TOY_ADAMW ", \"moments\": \"int8\"", "bf16", true, true, 1, true, NULL },
    { TOY_ADAMW, "f32", true, true, 1, false, "muon" },
    { TOY_SGD, "bf16", false, true, UINT64_MAX, true, "muon" },
    { TOY_ADAMW, "bf16", false, true, 2, true, "lamb" },
    { TOY_ADAMW, "f32", true, true, 1, false, "adafactor" },
    { TOY_ADAMW, "f32\", \"codec\": \"int4", false, true, UINT64_MAX, true, "muon" },
    { TOY_ADAMW, "bf16\", \"codec\": \"int8", true, true, 1, true, NULL },
};

const char *kind_spec(const struct kind *k);

struct past { /* what each step came to */
    struct shd_result result[STEPS];
    bool known[STEPS];
    char hex[65];
};

extern long compute_ms;              /* of each forward and backward */
extern _Atomic uint32_t adopt_steps; /* that train_step() has finished so far */

struct pt_run run_of(const struct kind *k);

int train_step(shd_model *m, struct pt_run *run, struct past *past, struct shd_err *e);

/* Attach and train till the end or till something breaks. True: done. */
bool adopt_train(const char *address, const struct kind *k, struct past *past, struct shd_err *e);

void reference(const struct kind *k, struct past *ret);

void adopt_expect_same(const struct past *got, const struct past *want);

#endif
