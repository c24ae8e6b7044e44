/* Snapshots of the simulated model, and going back to them.
 *
 * Real are the cores: which snapshots there are (snapshot_set.h), who holds, goes and follows, and
 * what is written then (step_rewind.h); and whom a session asks what (rewind_turn.h). Modelled are
 * the shells: a snapshot's memory and its copy, the copy back by kernels, that requests are to be
 * asked again meanwhile, the boards.
 *
 * Two guests make snapshots, change how many are kept, and have the model go back; so do workers,
 * in the middle of a step. Whoever sees by the boards that some owners have gone back has the
 * others follow. Anybody may be killed at any message, and owners between any two blocks.
 *
 * What must be: all owners go, or none; each is then at exactly the step that was kept, and from
 * there on at what a run on the same data makes that never went further. Rounds (step_reset.h)
 * never come again.
 */
#ifndef SHD_SIM_BACK_H
#define SHD_SIM_BACK_H

#include <stdbool.h>
#include <stdint.h>

#include "client/paths/rewind_turn.h"
#include "daemon/core/ledger.h"
#include "daemon/core/snapshot_set.h"
#include "daemon/core/step_rewind.h"
#include "tests/sim/sim_model.h"

#define SIM_REWINDS 12u /* of a run, so that it ends */

struct sim;
struct sim_ask;
struct sim_daemon;
struct sim_guest;
struct sim_msg;
struct sim_passing;
struct sim_told;
struct sim_worker;

struct sim_snapshot {
    bool ready; /* written last: all of it is there */
    struct rewind_record record;
    struct rewind_more more;
    _Alignas(8) uint8_t window[SIM_WINDOW_ROWS * 8 * (2 + SIM_UNITS)]; /* a guard's */
    uint64_t updates[SIM_UNITS];
    uint8_t blob[16];
    uint64_t blocks[SIM_UNITS * SIM_BLOCKS];
};

enum sim_back_state { BACK_NONE, BACK_DROPPING, BACK_COPYING, BACK_COPIED };

struct sim_back { /* a daemon's */
    /* outlives it */
    struct sim_snapshot snapshots[LEDGER_SNAPSHOTS];
    struct rewind_seen board;
    bool unpublished; /* nothing can be read */
    /* for checks */
    uint64_t era;   /* rewinds that it has gone along with */
    uint64_t round; /* the last that it has begun */
    /* dies with it */
    struct snapshot_set set;
    bool making; /* memory */
    enum sim_back_state state;
};

struct sim_returning { /* a worker's */
    struct rewind_turn turn;
    uint32_t asked;    /* a bit per owner that is asked, and has not answered */
    uint32_t in;       /* that has answered */
    bool wanted;       /* it is to have the model go back, when it comes to that */
    bool asks;         /* it does; else it only has others follow */
    uint64_t again_ns; /* who is busy is asked again then */
};

/* A daemon's side */
void sim_back_start(struct sim *s, struct sim_daemon *d);
void sim_back_started(struct sim *s, struct sim_daemon *d);
void sim_back_kill(struct sim_daemon *d);
void sim_back_event(struct sim *s, struct sim_daemon *d, bool memory_made);
void sim_back_moved(struct sim *s, struct sim_daemon *d);
void sim_back_copied(struct sim *s, struct sim_daemon *d, bool back);
void sim_back_serve(struct sim *s, struct sim_daemon *d, const struct sim_passing *p);
/* SHD_EBUSY: ask again. */
int sim_back_ask(struct sim *s, struct sim_daemon *d, const struct wire_rewind *q,
                 struct wire_rewound *ret_rewound);
/* Requests are to be asked again. */
static inline bool sim_back_busy(const struct sim_back *b)
{
    return b->state != BACK_NONE;
}

/* For checks */
void sim_back_round(struct sim *s, struct sim_daemon *d);
void sim_back_check_end(struct sim *s, const struct sim_daemon *d);

/* By the boards */
struct rewind_seen sim_back_seen(const struct sim *s, bool *ret_apart);
struct rewind_mark sim_back_mark(const struct sim *s);

/* sim_return.c: who asks */
void sim_returner_go_on(struct sim *s, struct sim_guest *g, bool timer);
/* True: the worker has something else to do now. */
bool sim_return_look(struct sim *s, struct sim_worker *w);
void sim_return_follow(struct sim *s, struct sim_worker *w);
bool sim_return_run(struct sim *s, struct sim_worker *w);
void sim_return_reply(struct sim *s, struct sim_worker *w, const struct sim_msg *msg);

#endif
