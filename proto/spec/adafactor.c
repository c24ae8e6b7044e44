/* See adafactor.h. */
#include "proto/spec/adafactor.h"

#include "proto/spec/layout.h"
#include "proto/spec/spec.h"

const struct adafactor_rule adafactor_default = {
    .beta2_decay = -0.8,
    .eps1 = 0x1p-23, /* torch.finfo(torch.float32).eps */
    .eps2 = 1e-3,
    .d = 1,
};

struct adafactor_shape adafactor_shape(const struct spec_tensor *tensor)
{
    const uint32_t rank = tensor->rank;
    if (rank < 2)
        return (struct adafactor_shape){ .batch = 1, .cols = tensor->elems };
    struct adafactor_shape shape = { .rows = tensor->shape[rank - 2],
                                     .cols = tensor->shape[rank - 1] };
    shape.batch = tensor->elems / (shape.rows * shape.cols);
    return shape;
}

uint64_t adafactor_elems(const struct adafactor_shape *shape)
{
    return shape->batch * (shape->rows + shape->cols);
}

uint64_t adafactor_offset_elems(const struct spec *spec, uint32_t unit, uint32_t index)
{
    const struct spec_tensor *tensors = &spec->tensors[spec->units[unit].first_tensor];
    uint64_t at = 0;
    for (uint32_t i = 0; i < index; i++) {
        const struct adafactor_shape shape = adafactor_shape(&tensors[i]);
        at += layout_align(adafactor_elems(&shape), SHD_TENSOR_ALIGN_ELEMS);
    }
    return at;
}
