/* The drawing of a plan. */
#ifndef SHD_CTL_PLAN_DRAW_H
#define SHD_CTL_PLAN_DRAW_H

#include <stdint.h>
#include <stdio.h>

#include "client/plan/plan.h"
#include "proto/base/status.h"
#include "proto/spec/spec.h"

/* A plan laid out in columns: a fetch, a return and a forward take one each, a backward two;
 * fetches and returns share one link, in the order in which they are issued. */
struct timeline {
    struct timeline_mark *marks; /* owned */
    uint32_t mark_count;
    uint32_t *micro_start;  /* owned, [micros + 1]: first column of each; the last is the end */
    uint32_t *held, *grads; /* owned, [columns] */
    uint32_t columns;
    uint32_t idle; /* columns in which compute waits for a fetch */
};
int timeline_new(const struct plan *plan, const struct spec *spec, struct timeline *ret_timeline,
                 struct shd_err *e);
void timeline_deinit(struct timeline *t);
void timeline_draw(const struct timeline *t, const struct plan *plan, const struct spec *spec,
                   FILE *out);

#endif
