/* A deterministic simulator of daemons and workers: one seed, virtual time, one queue of events,
 * no threads and no I/O.
 *
 * Real are: the step core, ledger, lease and replies of the daemon; turn and decide of the worker.
 * Modelled are the shells around them (requests, sessions, kernel queue, segments; slots, resends,
 * reconnects), the network, clocks and whatever kills. What outlives a process is kept exactly as
 * far as it came: accumulators and parameters by block, with the trail of kernels/kern.h.
 *
 * Happy path: sim_new(), sim_run() to the end, sim_free(). Whatever contradicts a promise of
 * DESIGN.md section 1 ends the run with its name, what it is about, and the last events around it.
 */
#ifndef SHD_SIM_H
#define SHD_SIM_H

#include <setjmp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "client/paths/turn.h"
#include "daemon/core/lease.h"
#include "daemon/core/ledger.h"
#include "daemon/core/replies.h"
#include "daemon/core/step.h"
#include "daemon/core/step_commit.h"
#include "daemon/core/step_put.h"
#include "daemon/core/step_reset.h"
#include "daemon/core/verify.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/share/guard_window.h"
#include "proto/spec/ramp.h"
#include "proto/spec/settings.h"
#include "tests/sim/sim_back.h"
#include "tests/sim/sim_bug.h"
#include "tests/sim/sim_model.h"
#include "tests/sim/sim_replica.h"

#define SIM_DAEMONS  4u /* owners */
#define SIM_WORKERS  5u
#define SIM_SLOTS    2u
#define SIM_SESSIONS 24u
#define SIM_OPS      192u
#define SIM_KERNELS  64u
#define SIM_CALLS    64u
#define SIM_ANSWERS  64u
#define SIM_TRACE    8192u
#define SIM_ROUNDS   65536u /* a rewind leaves some two thousand out */
#define SIM_NOBODY   UINT32_MAX
#define SIM_SETTINGS (1 + SETTINGS_RATES + 2)  /* of one group */
#define SIM_LIMITS   (2 * GUARD_LIMIT_NUMBERS) /* of two rules */

#define US UINT64_C(1000)
#define MS UINT64_C(1000000)
#define S  UINT64_C(1000000000)

#define SIM_RESEND_NS (2 * S)

/* -- What is asked for --------------------------------------------------------------------------
 */

enum sim_fault { /* bits */
                 SIM_KILL_WORKER = 1 << 0,
                 SIM_KILL_DAEMON = 1 << 1,
                 SIM_KILL_POINT = 1 << 2, /* a daemon, at a fail point */
                 SIM_KILL_BOTH = 1 << 3,
                 SIM_NEW_JOB =
                     1 << 4, /* all workers die; their successors want another learning rate */
                 SIM_STALL = 1 << 5,
                 SIM_PARTITION = 1 << 6,
                 SIM_RESET = 1 << 7, /* a connection breaks, both ends live */
                 SIM_LOSS = 1 << 8,
                 SIM_DOUBLE = 1 << 9,
                 SIM_REORDER = 1 << 10,
                 SIM_SLOW = 1 << 11, /* small queues: a stalled peer loses messages */
                 SIM_CLOCK = 1 << 12,
                 SIM_LEAVE = 1 << 13,
                 SIM_KEEPER = 1 << 14,  /* a daemon dies and its segments go with it */
                 SIM_GIVE_UP = 1 << 15, /* workers return what they do not stand by, and reset */
                 SIM_HOST = 1 << 16,    /* with replicas: a host dies for good */
                 SIM_CUT = 1 << 17,     /* what is sent between two hosts is lost */
                 SIM_ARBITER = 1 << 18, /* the arbiter cannot be reached */
};

enum sim_guard_kind {
    SIM_GUARD_NONE,
    SIM_GUARD_SCORES, /* skips steps whose norm is far from those before */
    SIM_GUARD_SKIPS,  /* there are bad batches, and it skips their steps */
    SIM_GUARD_STOPS,  /* likewise, and stops training */
    SIM_GUARDS,
    SIM_GUARD_UNITS = SIM_GUARDS, /* in the place of SCORES, now and then: of single units */
};

struct sim_config {
    uint64_t seed;
    uint64_t model_seed; /* gradients, decisions: the result depends on this one alone */
    uint32_t daemons, workers, units, micros, steps;
    uint32_t faults;                  /* enum sim_fault */
    uint64_t fault_gap_ns, kernel_ns; /* at most, between two faults; of a block */
    uint64_t events_max;
    bool lease; /* else workers have ranks */
    bool frozen;
    bool puts;       /* some steps are puts, if who wants them is first */
    bool apart;      /* each worker would have another learning rate */
    bool sets;       /* somebody changes settings */
    bool guests;     /* steps are pinned, forks made and dropped */
    bool ramp;       /* steps have different numbers of micro-batches, at most `micros` */
    uint32_t guard;  /* enum sim_guard_kind */
    bool rewinds;    /* snapshots are made, and the model goes back to them */
    uint64_t verify; /* with leases, of so many steps one is verified; 0: none */
    bool replicas;   /* each slice is at two daemons: sim_replica.h */
    uint32_t hosts;  /* then: 2 or 3 */
    uint64_t patience_ns;
    uint32_t wrong; /* plus 1: the worker whose hashes are others than they should be; 0: none */
};

struct sim_scenario {
    const char *name;
    uint32_t faults;
    bool replicas;
};
extern const struct sim_scenario sim_scenarios[];
extern const uint32_t sim_scenario_count;

/* Everything else from the seed. */
struct sim_config sim_config_of(const struct sim_scenario *scenario, uint64_t seed);

/* The same, with few steps and many faults: hosts are soon lost. */
void sim_config_shorten(struct sim_config *config);

enum sim_outcome { SIM_DONE, SIM_LOST, SIM_BROKEN };

struct sim_result {
    enum sim_outcome outcome;
    uint64_t events;
    uint64_t digest; /* of all final parameters, the same for any number of owners */
    uint32_t kills;
    uint64_t compared, compared_wrong; /* pairs of copies; with the wrong worker's */
    uint64_t named;                    /* differences that were said */
    uint64_t pins, forks, drops;       /* that guests brought to their end */
    uint64_t stops;                    /* by guards, that ended */
    uint64_t snapshots, rewinds;       /* of an owner; of the model */
    uint64_t outs, succeeded, anew;    /* views; owners' places taken; workers that began anew */
    char promise[16];                  /* BROKEN: its name */
    uint32_t daemon, worker;           /* BROKEN: whose it is, or SIM_NOBODY */
    char text[256];
};

/* trace: print every event. */
struct sim_result sim_run(const struct sim_config *config, bool trace);

/* The last events around what broke in the last run that did, on stderr. */
void sim_print_end(void);

/* How often a daemon was killed at this fail point, in this process. */
uint64_t sim_killed_at(const char *point);

/* The digest of an undisturbed run: computed, not simulated. */
uint64_t sim_expected_digest(const struct sim_config *config);

/* -- What passes between processes --------------------------------------------------------------
 */

enum sim_kind {
    SIM_ATTACH = 1,
    SIM_LAYOUT,
    SIM_RETURN,
    SIM_PREPARE,
    SIM_COMMIT,
    SIM_LEASE,
    SIM_RESET_STEP,
    SIM_REWIND,
    SIM_PUT, /* one begins */
    SIM_DETACH,
    SIM_HANGUP,
};

struct sim_request {
    enum sim_kind kind;
    uint64_t step;
    uint32_t unit, micro, slot;
    bool none;
    uint64_t attempt;
    bool agreed; /* RESET_STEP */
    uint64_t blob;
    uint32_t unit_sums; /* PREPARE */
    double norm;        /* COMMIT */
    bool has_norms;
    double unit_norms[SIM_UNITS];
    struct decision decision;
    bool recorded;
    uint64_t put_line; /* with a put: the rewind that whoever makes it has gone along with */
    struct wire_rewind rewind;
    uint64_t view; /* ATTACH: its number */
};

struct sim_layout {
    uint64_t session;
    uint64_t instance; /* of the owner's model */
    uint64_t step, attempt;
    uint32_t in; /* a bit per micro-batch */
    bool has_decision;
    struct decision decision;
    uint32_t seat; /* where the session's inbox is */
};

struct sim_reply {
    enum sim_kind kind;
    int status;
    uint64_t step;
    bool stale;
    enum lease_answer lease;
    uint32_t group;
    union {
        struct wire_prepared prepared;
        struct wire_committed committed;
        struct sim_layout layout;
        struct wire_rewound rewound;
        struct {
            uint64_t attempt;
            enum step_reset_answer answer;
        } reset;
    };
    double settings[SIM_SETTINGS];               /* with prepared.settings.bytes > 0 */
    double limits[SIM_LIMITS];                   /* with prepared.guard.bytes > 0 */
    uint8_t unit_sums[SIM_UNITS * FIXSUM_BYTES]; /* with prepared.unit_sums.bytes > 0 */
    double unit_limits[SIM_UNITS];               /* with prepared.unit_limits.bytes > 0 */
    double unit_norms[SIM_UNITS];                /* with prepared.unit_norms.bytes > 0 */
};
/* Rates that a decision of the simulator has at most, and no eps; without the room for more,
 * replies are kept. */
#define SIM_RATES (1 * DECISION_RATES)
#define SIM_NO_RATES                                                             \
    (sizeof(double) * (DECISION_GROUPS_MAX * (DECISION_RATES + 1) - SIM_RATES) + \
     sizeof(((struct decision *)0)->eps_count))
_Static_assert(offsetof(struct decision, eps) ==
                       offsetof(struct decision, rates) + sizeof(((struct decision *)0)->rates) &&
                   offsetof(struct decision, eps_count) ==
                       offsetof(struct decision, eps) + sizeof(((struct decision *)0)->eps),
               "eps lie behind them, and their count");
#define SIM_KEPT_END \
    (offsetof(struct sim_reply, prepared.reported) + sizeof(uint32_t)) /* with more none is */
#define SIM_KEPT_BYTES (SIM_KEPT_END - SIM_NO_RATES)
_Static_assert(SIM_KEPT_BYTES <= REPLIES_BYTES_MAX, "replies are kept");
_Static_assert(SIM_KEPT_END >= offsetof(struct sim_reply, layout) + sizeof(struct sim_layout),
               "the others are shorter");

struct sim_msg {
    bool to_daemon;
    uint32_t daemon, worker;
    uint64_t daemon_gen, worker_gen;
    uint64_t session, seq; /* ATTACH: the number of the attempt */
    union {
        struct sim_request request;
        struct sim_reply reply;
    };
};

enum sim_event_kind {
    EV_MSG,
    EV_KERNEL,
    EV_KERNEL_DONE,
    EV_SPILL,
    EV_SPILLED,
    EV_LEASE_TIMER,
    EV_START_DAEMON,
    EV_WAKE,
    EV_COMPUTED,
    EV_RESEND,
    EV_ATTACH,
    EV_START_WORKER,
    EV_FAULT,
    EV_SET,
    EV_GO_ON,
    EV_BACK, /* arg 1: memory for a snapshot is made */
    EV_ASK,  /* a guest's, sim_guest.h */
    EV_ANSWER,
    EV_GUEST,
    EV_GUEST_AGAIN,
    EV_GUEST_GONE,
    EV_LOOK,  /* a worker's, at the view */
    EV_CLAIM, /* arg: the number of the one that counts */
    EV_POLLED,
    EV_HOSTS, /* who looks after hosts does so */
};

struct sim_event {
    uint64_t at_ns, order;
    enum sim_event_kind kind;
    uint32_t who;
    uint64_t gen;
    uint64_t arg;
};

/* -- Processes ----------------------------------------------------------------------------------
 */

struct sim_wait { /* a request that is answered later */
    uint64_t seq;
    enum sim_kind kind;
    uint64_t step, attempt;
    uint32_t unit_sums;
    uint64_t blob; /* COMMIT, with the next */
    double norm;
    bool has_norms;
    double unit_norms[SIM_UNITS];
    struct decision decision;
    bool recorded;
    uint64_t put_line;
};

struct sim_session {
    uint64_t id; /* 0: free */
    bool open;
    uint32_t worker;
    uint64_t worker_gen, attempt;
    uint64_t view; /* that its worker has told */
    uint32_t refs; /* gradients that still lie in its slots */
    struct replies *replies;
    uint64_t slot[SIM_SLOTS];  /* what is written there: sim_tag() */
    struct sim_wait waits[64]; /* some of them forgotten by who asked */
    uint32_t wait_count;
};

struct sim_op { /* a Return that is not credited */
    bool used;
    uint32_t seat;
    uint64_t session, seq, step;
    uint32_t unit, micro, slot;
};

enum sim_copy_what { SIM_COPY_PIN, SIM_COPY_FORK, SIM_COPY_SNAPSHOT, SIM_COPY_BACK };
struct sim_copy {
    enum sim_copy_what what;
    uint32_t pin;
};

struct sim_kernel {
    struct step_action action;
    uint64_t step, round, op, decision;
    uint64_t put;   /* APPLY: of values that wait; 0: none */
    uint64_t *grad; /* the slot */
    struct step_word done;
    uint32_t block, end; /* of the unit: next one, end */
    bool summing;
    uint64_t *copy_to; /* NULL: it is no copy. Else blocks are counted over all units */
    struct sim_copy copy;
};

struct sim_daemon {
    bool alive, fresh;
    uint64_t gen, stalled_until_ns;
    int64_t clock_ns; /* its clock is so far from the true time */
    uint32_t held;    /* messages that wait for a stall's end */
    uint32_t point_left;
    uint64_t instance; /* of its model: another one each time it is made */
    /* outlives it */
    void *ledger_memory;
    uint64_t ledger_bytes;
    uint64_t acc[SIM_UNITS][SIM_BLOCKS], param[SIM_UNITS][SIM_BLOCKS], word[SIM_UNITS][SIM_BLOCKS];
    uint64_t spill[SIM_UNITS][SIM_MICROS];
    uint64_t board[SIM_UNITS], board_attempt;
    uint64_t put, put_line; /* whose values wait; 0: none. Origins of puts are random, here each of
                             * a step has one number: no put is another rewind's */
    /* for checks: what was promised */
    uint64_t commits_seen;
    uint64_t credited_round;
    uint32_t credited[SIM_UNITS]; /* a bit per micro-batch of that round */
    uint64_t lost_gen;            /* its keeper was lost: what was promised before is void */
    struct sim_back back;         /* part of it outlives the daemon */
    /* dies with it */
    uint64_t view; /* the newest that it was told */
    struct ledger ledger;
    struct step *core;
    struct lease *lease;
    void *core_memory, *lease_memory, *verify_memory;
    struct verify *verify; /* NULL: nothing is */
    struct sim_session sessions[SIM_SESSIONS];
    struct sim_op ops[SIM_OPS]; /* by ref; [0] is not used */
    struct sim_kernel kernels[SIM_KERNELS];
    uint64_t kernel_first, kernel_done, kernel_last;
    uint64_t lease_timer; /* the number of the one that counts */
    struct {              /* 1 + the round that the unit's sum is of; 0: of none */
        uint64_t round;
        struct fixsum sum;
        bool finite;
    } summed[SIM_UNITS];
    bool adopted; /* what a predecessor left */
    struct sim_stray stray;
};

struct sim_call {
    bool used, sent;
    uint64_t seq, sent_ns;
    bool written; /* its gradient lies in its slot */
    uint64_t tag;
    struct sim_request request;
};

struct sim_link {
    bool up;
    uint64_t daemon_gen, session, attempt, seq;
    uint32_t seat;
    struct sim_layout layout;
    bool layout_asked, layout_new;
    struct sim_call calls[SIM_CALLS];
    bool slot_taken[SIM_SLOTS];
    uint64_t answered_seq[SIM_ANSWERS], answered_hash[SIM_ANSWERS];
    uint32_t give_unit; /* the next unit to hand over, + 1; 0: done */
};

enum sim_work {
    WORK_ATTACHING,
    WORK_LOOKING, /* layouts are asked for again */
    WORK_SETTLING,
    WORK_BOARD,
    WORK_PUTTING,
    WORK_LEASING,
    WORK_COMPUTING,
    WORK_RETURNING,
    WORK_TURN,
    WORK_STOPPED, /* by a guard: Prepare is asked again */
    WORK_RESETTING,
    WORK_GOING_BACK, /* the model, or owners that have not gone yet */
    WORK_FINISHED,
};

struct sim_worker {
    bool alive;
    uint64_t gen, stalled_until_ns;
    uint32_t held;
    uint32_t job; /* learning rates differ */
    bool eager;   /* does not wait for credits */
    enum sim_work work;
    uint64_t since_ns; /* in this state or with this step */
    uint64_t step;
    uint32_t ask_owner; /* a member, as all that goes by turns */
    uint32_t asked;     /* LEASING: that the question at hand is for */
    bool asking;
    uint32_t micro;
    uint32_t computed;              /* a bit per micro-batch of the step that was handed over */
    bool torn;                      /* parameters changed while it computed */
    uint64_t owns[SIM_MEMBERS];     /* SETTLING: of each daemon its own attempt */
    struct sim_layout settles;      /* SETTLING: of the first that is ahead, as it was */
    uint32_t settles_gone;          /* SETTLING: who was gone */
    uint64_t attempt, settled_step; /* a predecessor may have returned some of that */
    bool gives_up;                  /* it will have the step reset */
    uint32_t spoilt_from; /* computes what it will give up, and returns units from this on; 0: no */
    uint64_t rewound;     /* the rewind that it has gone along with: its attempt; 0: none */
    uint64_t seen;        /* the last one, when it began to settle */
    bool told_reset;      /* it must look whether the model went back */
    struct sim_returning returning;
    bool agreed;     /* RESETTING: an owner has granted it */
    uint64_t wanted; /* that attempt */
    uint32_t told;   /* a bit per owner that has been asked; answered: */
    uint32_t followed;
    bool has_last;
    struct decision last;
    uint32_t put_micros; /* of the step behind a put, as owner 0 has said */
    bool put_begun;      /* all members have room for its values, */
    uint64_t written_ns; /* which are written by then; */
    bool put_twice;      /* owner 0 and its replica have recorded it */
    bool heedless;       /* knows nothing of puts */
    bool no_put;         /* the step has begun without one */
    uint32_t looks;
    struct turn *turn;
    uint32_t anew; /* turn_anew(), as far as what it asked before is dropped; */
    bool polls;    /* that is to come: it is in the middle of a look at its sockets */
    double unit_norms[SIM_UNITS]; /* the turn's */
    _Alignas(16) uint8_t turn_memory[65536];
    struct sim_link link[SIM_MEMBERS];
    struct sim_view view;
};

struct sim_setter { /* who changes settings, and what must be */
    struct settings_kept kept;
    bool asking;            /* not answered: */
    struct settings change; /* of micro_batches alone, or of others */
    uint64_t at, id;
    uint64_t without_end, with_first; /* steps seen meanwhile: below the one without, */
                                      /* from the other on with it */
};

struct sim_guests; /* sim_guest.h */

struct sim_trace {
    uint64_t at_ns;
    const char *what;
    uint32_t daemon, worker;
    uint64_t step;
    uint32_t unit, micro;
};

struct sim {
    struct sim_config config;
    uint64_t random, now_ns, order, last_session;
    struct sim_event *heap;
    uint32_t heap_count, heap_room;
    struct sim_msg *msg;
    uint32_t *msg_free;
    uint32_t msg_free_count, msg_room;
    struct sim_daemon daemon[SIM_MEMBERS];
    struct sim_worker worker[SIM_WORKERS];
    struct sim_cluster cluster;
    uint64_t cut_until_ns[SIM_MEMBERS][SIM_WORKERS];
    bool frozen[SIM_UNITS];
    bool skips_idle[SIM_UNITS];
    bool means[SIM_UNITS];
    uint32_t blocks[SIM_UNITS];
    uint32_t job;
    uint64_t job_ready_ns; /* all connections of the job before are gone */
    /* what must be: grows with the decisions */
    struct ramp ramp;
    struct sim_line line[2];                  /* by era & 1 */
    uint64_t era;                             /* so often the model went back: */
    struct rewind_seen gone[SIM_REWINDS + 2]; /* [0]: nowhere */
    struct history_slot history[SIM_HISTORY];
    uint64_t gone_on; /* what a guard stopped at so many commits, it was said, is to go on */
    struct sim_setter setter;
    struct sim_guests *guests;          /* owned; NULL: none */
    bool spoilt[SIM_ROUNDS];            /* something is in that does not count */
    uint64_t must_give_up[SIM_WORKERS]; /* the attempt in which it returned such; 0: none */
    uint64_t last_fault_ns, last_decided_ns, give_up_step;
    uint32_t give_ups; /* made in that step */
    bool kept_lost;
    struct sim_daemon *running;
    jmp_buf killed;
    sigjmp_buf stopped;
    struct sim_result result;
    bool print;
    struct sim_trace trace[SIM_TRACE];
    uint64_t trace_count;
};

/* sim_queue.c: randomness, events, messages */
uint64_t sim_random(struct sim *s);
uint64_t sim_below(struct sim *s, uint64_t n);
bool sim_chance(struct sim *s, uint32_t per_mille);
void sim_at(struct sim *s, uint64_t delay_ns, struct sim_event event);
bool sim_pop(struct sim *s, struct sim_event *ret_event);
void sim_requeue(struct sim *s, const struct sim_event *event, uint64_t at_ns);
void sim_send(struct sim *s, const struct sim_msg *msg);
void sim_deliver(struct sim *s, const struct sim_msg *msg, uint64_t delay_ns); /* for sure */
void sim_msg_done(struct sim *s, uint64_t index);
void sim_note(struct sim *s, const char *what, uint32_t daemon, uint32_t worker, uint64_t step,
              uint32_t unit, uint32_t micro);
void sim_print_trace(FILE *out, const struct sim_trace *t);
void sim_deinit(struct sim *s);

/* sim_check.c: what must be, and what happens when it is not */
_Noreturn void sim_broken(struct sim *s, const char *promise, uint32_t daemon, uint32_t worker,
                          const char *format, ...) __attribute__((format(printf, 5, 6)));
_Noreturn void sim_lost(struct sim *s, const char *why);
uint64_t sim_round(uint64_t step, uint64_t attempt);
void sim_check_sum(struct sim *s, const struct sim_daemon *d, uint32_t unit, uint64_t step,
                   uint32_t next);
void sim_check_params(struct sim *s, const struct sim_daemon *d, uint32_t unit, uint64_t version);
void sim_check_decision(struct sim *s, struct sim_daemon *d, uint64_t step,
                        const struct decision *decision);
void sim_check_prepared(struct sim *s, const struct sim_daemon *d, const struct step_prepared *p);
void sim_check_credited(struct sim *s, const struct sim_daemon *d);
void sim_check_progress(struct sim *s);
void sim_check_end(struct sim *s);

/* sim_daemon.c: a daemon's loop */
void sim_daemon_take(struct sim *s, struct sim_daemon *d, const struct step_actions *actions);
void sim_daemon_after(struct sim *s, const struct sim_daemon *d, uint64_t delay_ns,
                      enum sim_event_kind kind, uint64_t arg);
void sim_daemon_moved(struct sim *s, struct sim_daemon *d); /* whoever waits for it asks again */
void sim_daemon_wake(struct sim *s);                        /* the workers */

/* sim_life.c: kernels */
void sim_kernel_queue(struct sim *s, struct sim_daemon *d, const struct step_action *a);
/* Of blocks first <= … < end of all that the daemon has of the parameters. */
void sim_kernel_copy(struct sim *s, struct sim_daemon *d, uint64_t *to, struct sim_copy copy,
                     uint32_t first, uint32_t end);
void sim_kernel_event(struct sim *s, struct sim_daemon *d);

/* sim_life.c, but for the event */
void sim_daemon_start(struct sim *s, struct sim_daemon *d);
void sim_daemon_core(struct sim *s, struct sim_daemon *d); /* at what its ledger says */
uint64_t *sim_flat_param(const struct sim *s, struct sim_daemon *d, uint32_t flat);
/* But for waits past wait_count, which nobody reads: they are nearly all of it. */
void sim_session_clear(struct sim_session *ses);
void sim_daemon_kill(struct sim *s, struct sim_daemon *d);
void sim_daemon_event(struct sim *s, struct sim_daemon *d, const struct sim_event *event);
void sim_daemon_deinit(struct sim_daemon *d);
void sim_daemon_wipe(struct sim *s, struct sim_daemon *d);

/* sim_guard.c */
enum sim_bad { SIM_BAD_NONE, SIM_BAD_NORM, SIM_BAD_LOSS };
const struct guard *sim_guard(const struct sim *s); /* NULL: none */
enum sim_bad sim_bad(const struct sim *s, uint64_t step);
void sim_guard_check(struct sim *s, uint32_t owner, uint64_t step, const struct decision *decision,
                     double norm);
void sim_daemon_go_on(struct sim *s, struct sim_daemon *d);
void sim_go_on_event(struct sim *s);

/* sim_set.c */
#define SIM_SETTINGS_SINCE 64u /* what was asked for may hold since so many steps */
void sim_set_event(struct sim *s);
void sim_daemon_set(struct sim *s, struct sim_daemon *d);
bool sim_settings(const struct sim *s, uint64_t step, uint32_t which, struct settings *ret_settings,
                  uint32_t *ret_micros);
void sim_settings_seen(struct sim *s, uint64_t step, bool with);

/* sim_verify.c */
void sim_verify_start(struct sim *s, struct sim_daemon *d, bool fresh);
void sim_verify_return(struct sim *s, struct sim_daemon *d, const struct sim_session *ses,
                       const struct sim_request *q);
void sim_verify_check_end(struct sim *s);

/* sim_link.c: what a worker has with each daemon */
void sim_link_attach(struct sim *s, struct sim_worker *w, uint32_t owner);
void sim_link_attached(struct sim *s, struct sim_worker *w, const struct sim_msg *msg);
void sim_link_hung_up(struct sim *s, struct sim_worker *w, uint32_t owner);
bool sim_link_take_slot(struct sim_link *l, uint32_t *ret_slot);
void sim_link_ask(struct sim *s, struct sim_worker *w, uint32_t owner,
                  const struct sim_request *request, uint64_t tag);
void sim_link_send(struct sim *s, const struct sim_worker *w, uint32_t owner, uint64_t seq,
                   const struct sim_request *request);
void sim_link_resend(struct sim *s, struct sim_worker *w);
void sim_link_credited(struct sim *s, struct sim_link *l, const struct sim_call *c,
                       const struct sim_msg *msg);
bool sim_link_returns_open(const struct sim *s, const struct sim_worker *w);
void sim_link_forget_turn(struct sim_worker *w);
void sim_link_forget_lease(struct sim_worker *w);
void sim_link_forget(struct sim_worker *w, enum sim_kind kind);
void sim_worker_after(struct sim *s, const struct sim_worker *w, uint64_t delay_ns,
                      enum sim_event_kind kind, uint64_t arg);
bool sim_link_first_answer(struct sim *s, struct sim_link *l, const struct sim_msg *msg);
void sim_link_retire(struct sim *s, struct sim_worker *w, uint32_t daemon, uint32_t heir);

/* sim_worker.c */
void sim_worker_start(struct sim *s, struct sim_worker *w);
void sim_worker_kill(struct sim *s, struct sim_worker *w);
void sim_worker_leave(struct sim *s, struct sim_worker *w);
void sim_worker_event(struct sim *s, struct sim_worker *w, const struct sim_event *event);
void sim_worker_enter(struct sim *s, struct sim_worker *w, enum sim_work work);
const char *sim_work_name(enum sim_work work);
bool sim_worker_give(struct sim *s, struct sim_worker *w, uint32_t owner, uint32_t unit);
void sim_worker_put_anew(struct sim_worker *w);
/* What the turn has a Prepare or a Commit say now: at first, and where it is sent anew. */
void sim_worker_pack(const struct sim *s, const struct sim_worker *w, uint32_t daemon,
                     struct sim_request *q);

/* The newest states, and those that this owner must go through. */
static inline const struct sim_line *sim_line(const struct sim *s)
{
    return &s->line[s->era & 1];
}
static inline const struct sim_line *sim_line_of(const struct sim *s, const struct sim_daemon *d)
{
    CHECK(d->back.era == s->era || d->back.era + 1 == s->era);
    return &s->line[d->back.era & 1];
}
/* A state of this version is that of another with the same mark, in whatever line. */
static inline uint64_t sim_mark(const struct sim_line *line, uint64_t version)
{
    return version > 0 ? line->salt[version - 1] : 0;
}

static inline uint32_t sim_daemon_index(const struct sim *s, const struct sim_daemon *d)
{
    return (uint32_t)(d - s->daemon);
}
/* Daemons; and whose slice one has. */
static inline uint32_t sim_members(const struct sim *s)
{
    return s->config.replicas ? 2 * s->config.daemons : s->config.daemons;
}
static inline uint32_t sim_owner_index(const struct sim *s, const struct sim_daemon *d)
{
    return sim_daemon_index(s, d) % s->config.daemons;
}
/* Of the step that the worker is at, as it knows. */
static inline uint32_t sim_worker_micros(const struct sim *s, const struct sim_worker *w)
{
    return sim_micros_after(s, w->step, w->has_last ? &w->last : NULL);
}
static inline uint32_t sim_worker_index(const struct sim *s, const struct sim_worker *w)
{
    return (uint32_t)(w - s->worker);
}

#endif
