/* introduce.h: what rank 0 prints before the first step: of what model, by whom, and how. */
#ifndef GPT_INTRODUCE_H
#define GPT_INTRODUCE_H

#include "client/shd.h"
#include "examples/gpt/compute.h"
#include "examples/gpt/progress.h"

/* The model alone. */
void introduce_model(struct progress *p, const struct compute *c);

/* All of it; compute is ready to run. */
void introduce(struct progress *p, const struct compute *c, const shd_session *session);

#endif
