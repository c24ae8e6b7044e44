/* sample.h: text from the model, one byte after the other.
 *
 * Incremental: keys and values of past positions are kept, so that a byte costs one row through
 * the model. When the window of seq positions is full it starts again with its last half.
 * Deterministic: byte i is drawn with number i of (seed), whatever the number of threads.
 */
#ifndef GPT_SAMPLE_H
#define GPT_SAMPLE_H

#include <stdint.h>

#include "client/shd.h"
#include "examples/gpt/pool.h"
#include "examples/gpt/shape.h"

struct sampler;

/* params: [units], borrowed until sampler_free(), as is pool. SHD_ENOMEM. */
int sampler_new(const struct gpt_shape *shape, const struct gpt_layout *layout, struct pool *pool,
                const float *const *params, struct sampler **ret_sampler, struct shd_err *e);
void sampler_free(struct sampler *s);

/* Append one byte to the window; returns the logits of what follows it, [GPT_VOCAB], borrowed
 * until the next call. */
const float *sampler_feed(struct sampler *s, uint8_t byte);

struct sample_options {
    uint64_t seed;
    double temperature; /* 0: always the likeliest byte */
    uint8_t first;      /* the byte the text follows */
};

/* Fill ret_text[count]. */
void sampler_text(struct sampler *s, const struct sample_options *options, uint8_t *ret_text,
                  uint64_t count);

#endif
