/* A spec from wrapped tensors. */
#ifndef SHD_WRAP_SPEC_H
#define SHD_WRAP_SPEC_H

#include "client/plan/wrap.h"

/* A spec with these units, AdamW, one parameter group, initial values 0: what a planner needs, and
 * what spec_dump() writes down for the user to go on from. */
struct wrap_model {
    const char *name;
    uint32_t micro_batches, accumulate;
    enum shd_dtype publish;
};
int wrap_spec(const struct wrap_tensor *tensors, uint32_t count, const struct wrap *wrap,
              const struct wrap_model *model, struct spec **ret_spec, struct shd_err *e);

#endif
