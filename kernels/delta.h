/* The last update of parameters, from what it has left: moments, parameters and the rates it was
 * made with. For who looks at a model; plain C on host memory, any thread.
 *
 * Each of these optimizers' last line is p' = keep * p + a (kernels/optimizers.h), where a depends
 * on the moments after the update alone:
 *
 *     AdamW                  a = -rate * m / (sqrt(v) * unbias + eps)
 *     Adam, AdamW of torch   a =  rate * m / (sqrt(v) / unbias + eps)     rate is negative
 *     SGD                    a = -rate * m
 *     SGD of torch           a =  rate * m          with a momentum, and not Nesterov's
 *
 * so that p' - p = (a - (1 - keep) * p') / keep, here in fp64 and rounded to fp32 once. That is the
 * update without its own last rounding: from p' - p as it was stored it differs by at most half an
 * ulp of p' and what rounding a in fp32 came to. Lion's sign, and SGD's gradient where no momentum
 * has it, are not in what is left; nor are moments that were rounded to 8 bits since.
 */
#ifndef SHD_KERN_DELTA_H
#define SHD_KERN_DELTA_H

#include <stdint.h>

#include "kernels/shared.h"
#include "proto/base/status.h"

struct decision;
struct spec;
struct tally;

struct delta_rule {
    enum spec_optimizer kind;
    struct kern_rates rates; /* the scale is of no account */
};

/* How the last update of a tensor's unit was made: by this decision, which was for one and no put,
 * as the unit's updates-th. Errors: SHD_ENOTSUP why it cannot be told. */
int delta_rule_of(const struct spec *spec, uint32_t tensor, const struct decision *decision,
                  uint64_t updates, struct delta_rule *ret_rule, struct shd_err *e);

struct delta { /* arrays are fp32 [elems], as they are after the update */
    const struct delta_rule *rule;
    const float *p, *m, *v; /* v: where the optimizer has one */
    uint64_t elems;
};

/* out[elems] */
void delta_of(const struct delta *d, float *out);

/* Add the update, and what it led to, to t; head_elems: as tally_add(). */
void delta_tally(const struct delta *d, uint64_t head_elems, struct tally *t);

#endif
