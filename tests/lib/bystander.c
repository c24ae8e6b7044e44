#include "tests/lib/bystander.h"

shd_session *trainer;
shd_model *model;

void trainer_start(void)
{
    struct shd_err e;
    fixture_start(&fixture, 1, NULL);
    EXPECT_OK(shd_connect(&(struct shd_options){ .size = sizeof(struct shd_options),
                                                 .address = fixture.dir,
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
    struct shd_result result;
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
