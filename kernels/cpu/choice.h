/* Which of two instruction sets does one kind of work sooner: judged by chunks of it that both did
 * in turn. Pure: times in, choice out.
 *
 * No set is the quicker one everywhere, and most of this work is bound by memory, where the widest
 * one is as good as any. So that one stays unless the other is clearly quicker: by more than 3 % in
 * the median of pairs, and in three pairs of four, which of 16 pairs of equals 4 in 100 are by
 * chance. Medians of pairs of neighbours, because a chunk now and then takes many times as long
 * when the processor is busy, and what is slow for a while is slow for both.
 */
#ifndef SHD_KERNELS_CPU_CHOICE_H
#define SHD_KERNELS_CPU_CHOICE_H

#include <stdbool.h>
#include <stdint.h>

#define CHOICE_PAIRS      16u
#define CHOICE_PAIRS_MIN  12u    /* in so many the other one has to be quicker, */
#define CHOICE_RATIO_MAX  0.97   /* and in the median take so much of the widest one's time */
#define CHOICE_SPOILT_MAX 16384u /* chunks that were disturbed, before it is given up */

enum choice_side { CHOICE_WIDEST, CHOICE_OTHER, CHOICE_SIDES };

struct choice { /* zero at first */
    uint32_t samples, spoilt;
    float ns[CHOICE_SIDES][CHOICE_PAIRS];
};

struct choice_verdict {
    enum choice_side taken;
    double ns[CHOICE_SIDES]; /* medians */
    double ratio;            /* of the other one's time over the widest one's, median of pairs */
};

/* Who does the next chunk that is timed: each pair in the other order than the last. */
enum choice_side choice_turn(const struct choice *c);

/* The one whose turn it was took so long. Only while it is not over. */
void choice_add(struct choice *c, uint64_t ns);

/* Its time says nothing: the same one again. */
void choice_spoil(struct choice *c);

/* There is nothing left to time: all pairs are there, or too many chunks were spoilt. */
bool choice_over(const struct choice *c);

/* False: it was given up, the widest one stays, *ret is untouched. Only when it is over. */
bool choice_judge(const struct choice *c, struct choice_verdict *ret);

#endif
