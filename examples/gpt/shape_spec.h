/* shape_spec.h: the model as the JSON spec of shd_model_open(). */
#ifndef GPT_SHAPE_SPEC_H
#define GPT_SHAPE_SPEC_H

#include "examples/gpt/shape.h"

/* The parts of the spec that do not follow from the shape. */
struct gpt_spec {
    const char *optimizer; /* "adamw", "sgd" or "lion" */
    uint64_t seed;
    uint32_t micro_batches, accumulate;
    enum shd_dtype publish;
    double weight_decay; /* of matrices; biases and norms have none */
};

/* The model spec of shd_model_open(), as JSON; free() it. NULL: no memory. */
char *gpt_spec_json(const struct gpt_shape *shape, const struct gpt_spec *spec);

#endif
