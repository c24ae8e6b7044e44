/* progress.h: what rank 0 prints while it trains.
 *
 * On a terminal a live line is rewritten in place under the lasting lines; elsewhere, and with
 * TERM=dumb, there are only lasting lines. Colours only on a terminal without NO_COLOR.
 */
#ifndef GPT_PROGRESS_H
#define GPT_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "client/shd.h"

struct progress {
    FILE *out;         /* borrowed */
    FILE *json;        /* owned; NULL: none */
    bool live, colour; /* a terminal; with colours */
    bool shown;        /* a live line is on the screen */
    uint64_t steps, first_step, log_every;
    uint64_t step_bytes;            /* of text, over all workers */
    uint64_t start_ns;              /* of the run */
    uint64_t mark_ns, mark_wait_ns; /* at the last lasting line */
    uint64_t mark_step;
    uint64_t last_ns; /* the end of the last step */
};

/* One finished step. */
struct progress_step {
    uint64_t step; /* updates after it: 1.. */
    double loss, norm, lr;
    double loss_scale; /* of its gradients; 1: none */
    bool skipped;
    bool by_others;              /* this worker was slow, or came later: it has no counters of it */
    uint64_t begin_ns, end_ns;   /* of the step */
    struct shd_stats begin, end; /* this worker's counters then */
    const uint64_t *forward_ns;  /* [units] this worker's compute in the step, borrowed */
    const uint64_t *backward_ns;
    uint32_t units;
};

/* json_path NULL: none. Errors: SHD_EIO when it cannot be written. */
int progress_init(struct progress *p, FILE *out, const char *json_path, struct shd_err *e);
void progress_deinit(struct progress *p);

/* Before the first step, with the counters as they are then. */
void progress_begin(struct progress *p, uint64_t first_step, uint64_t wait_ns);

/* Rates and shares of the next line are of what comes from here on: counters begin anew. */
void progress_mark(struct progress *p, uint64_t step, uint64_t wait_ns);

void progress_step(struct progress *p, const struct progress_step *s);

/* The held-out loss of a step, for --json. */
void progress_held_out(struct progress *p, uint64_t step, double loss);

/* A lasting line of its own. */
void progress_note(struct progress *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Bytes of a sample; what a terminal might not survive is shown as '?'. */
void progress_text(struct progress *p, const uint8_t *text, uint64_t count);

#endif
