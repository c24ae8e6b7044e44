/* Internal to spec_json.c and spec_write.c: a step's micro-batches, as one number or by steps. */
#ifndef SHD_SPEC_RAMP_H
#define SHD_SPEC_RAMP_H

#include <stdint.h>

#include <jansson.h>

#include "proto/base/status.h"
#include "proto/spec/spec.h"
#include "proto/spec/spec_node.h"

/* "micro_batches": 4, or [[0, 4], [1000, 8]], from which step on so many; "micro_batches_max": 16,
 * so many can be set while the model is trained (settings.h). */
int spec_ramp_parse(struct spec *s, const struct node *root, struct shd_err *e);

/* accumulate, a, is of n: it divides each number. */
int spec_ramp_check(const struct spec *s, const struct node *n, uint64_t a, struct shd_err *e);

/* As it was; NULL: no memory. */
json_t *spec_ramp_json(const struct spec *s);

#endif
