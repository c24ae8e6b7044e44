/* Back to the latest checkpoint where daemons have lost a model, because their host was lost:
 * `shardctl checkpoint --every N --resume`.
 *
 * A model is lost when a daemon that answers has it no more, or anew at step 0, while others are
 * further; or when none has it, and they are other processes than those that had it. What this
 * looks like for a moment while a model is opened, dropped or restored does not last. A model that
 * processes still there have dropped is nobody's loss: it stays dropped. */
#ifndef SHD_CTL_RECOVER_H
#define SHD_CTL_RECOVER_H

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

#include "client/shd.h"

#define RECOVER_DEVICE_BYTES 40u

struct recover_process {
    int64_t pid;
    double start_s; /* since 1970, by its host's clock */
};

struct recover_owner { /* what a daemon says */
    char device[RECOVER_DEVICE_BYTES];
    struct recover_process process;
    bool reads; /* it restores something */
    bool has, ready;
    uint64_t step;
    uint64_t before; /* its step, said before any of the others' `step` */
};

enum recover_state {
    RECOVER_WHOLE,
    RECOVER_NONE, /* at no daemon */
    RECOVER_LOST, /* at some */
    RECOVER_WAIT, /* it is being opened, restored or taken over */
};

/* Pure. A step may end between two owners' words. ret_lost: LOST: the index of the first daemon
 * that has lost it; *ret_step: the latest that one is at, LOST and WHOLE. */
enum recover_state recover_judge(const struct recover_owner *owners, uint32_t count,
                                 uint32_t *ret_lost, uint64_t *ret_step);

struct recover {
    const char *dir;             /* borrowed */
    const char *model;           /* borrowed; NULL: that of the checkpoint */
    bool json;                   /* what was restored, on stdout */
    struct recover_process *had; /* owned, [count]: at which it was seen whole; NULL: never yet */
    uint32_t count;
    bool dropped;        /* by somebody, since then */
    struct shd_err said; /* the last thing on stderr: not said twice */
};

void recover_deinit(struct recover *r);

/* Look, restore what is lost, and return when the model is whole, or dir has no checkpoint to go
 * back to. SHD_PENDING: *stopped was set. Other errors: of the session, which is to be closed. */
int recover_model(struct recover *r, struct shd_session *s, const volatile sig_atomic_t *stopped,
                  struct shd_err *e);

/* Say this on stderr, unless it was the last thing. */
void recover_say(struct recover *r, const struct shd_err *why);

#endif
