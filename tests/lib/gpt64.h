/* The reference model's fp64 twin: the same sources under other names (examples/gpt/real.h). */
#ifndef SHD_TESTS_GPT64_H
#define SHD_TESTS_GPT64_H

#include "tests/lib/gpt_whole.h"

struct gpt64;
int gpt64_new(const struct gpt_shape *shape, const struct gpt_layout *layout, uint32_t batch,
              bool recompute, struct pool *pool, struct gpt64 **ret_gpt, struct shd_err *e);
void gpt64_free(struct gpt64 *g);
double gpt64_whole(struct gpt64 *g, const uint8_t *windows, const double *const *params,
                   double *const *grads);

#endif
