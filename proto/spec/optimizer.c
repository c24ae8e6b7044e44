/* See optimizer.h. */
#include "proto/spec/optimizer.h"

const struct spec_optimizer_row spec_optimizer_rows[SPEC_OPTIMIZERS + 1] = {
    [SPEC_ADAMW] = { .kind = "adamw",
                     .moments = 2,
                     .beta1_key = "beta1",
                     .beta2_key = "beta2",
                     .eps_key = "eps",
                     .beta1 = 0.9,
                     .beta2 = 0.999,
                     .eps = 1e-8 },
    [SPEC_SGD] = { .kind = "sgd", .moments = 1, .beta1_key = "momentum" },
    [SPEC_LION] = { .kind = "lion",
                    .moments = 1,
                    .beta1_key = "beta1",
                    .beta2_key = "beta2",
                    .beta1 = 0.9,
                    .beta2 = 0.99 },
};
