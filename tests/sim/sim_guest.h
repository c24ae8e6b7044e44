/* Guests of the simulator: sessions beside the workers'. Two pin steps and read them; one makes a
 * fork of the model; that one and another look whether it is there, and drop it.
 *
 * Real are the cores: what of a step is copied when (sweep.h), and whether a model is there
 * (presence.h). Modelled are the shells: pins and their memory, the making of a fork, who holds
 * what is dropped; and the clients, which ask all owners, and ask a successor again. Guests are
 * killed, their messages come twice; the daemons die and stall as ever.
 *
 * What must be: what is read of a pin is exactly the step that was asked for, at all owners, as
 * long as it is mapped, whoever dies; a fork is of one step, and there at all owners or at none.
 */
#ifndef SHD_SIM_GUEST_H
#define SHD_SIM_GUEST_H

#include "daemon/core/presence.h"
#include "daemon/core/sweep.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"
#include "tests/sim/sim.h"

#define SIM_READERS        2u
#define SIM_GUESTS         6u /* the third makes forks, the last two have the model go back */
#define SIM_RETURNERS_FROM 4u
#define SIM_PINS           2u /* of a daemon */
#define SIM_MEMORIES       (SIM_PINS + SIM_READERS * 2)
#define SIM_ON_WAY         4096u /* messages; a power of 2 */
#define SIM_FLAT           (SIM_UNITS * SIM_BLOCKS)

enum sim_ask_kind {
    ASK_PIN = 1,
    ASK_UNPIN,
    ASK_BEGIN,
    ASK_FORK,
    ASK_FULL,
    ASK_OPEN,
    ASK_LOOK, /* is it there? */
    ASK_HOLD,
    ASK_GO,
    ASK_UNDO,
    ASK_SNAPSHOT,
    ASK_EVERY, /* step: so many; origin: are kept */
    ASK_LIST,
    ASK_REWIND,
};

struct sim_ask {
    enum sim_ask_kind kind;
    uint64_t step;
    uint64_t origin, first; /* as the requests of the same names */
    bool told;
    struct wire_rewind rewind;
};

enum sim_word { WORD_NONE, WORD_OPEN, WORD_OTHERS, WORD_YOURS, WORD_HELD, WORD_GONE, WORD_KEPT };

struct sim_told {
    int status;
    enum sim_word word;
    uint64_t step, origin, instance;
    uint32_t memory; /* ASK_PIN */
    struct wire_rewound rewound;
    uint64_t steps[LEDGER_SNAPSHOTS]; /* ASK_LIST: */
    uint32_t count;
};

struct sim_passing { /* a request, or its answer */
    uint64_t number;
    uint32_t guest, daemon;
    uint64_t guest_gen, daemon_gen, seq;
    struct sim_ask ask;
    struct sim_told told;
};

/* -- A daemon's side ----------------------------------------------------------------------------
 */

struct sim_memory { /* of a pin; there as long as the daemon or a reader has it */
    uint32_t users;
    uint64_t blocks[SIM_FLAT];
};

enum sim_pin_state { SIM_PIN_FREE, SIM_PIN_ARMED, SIM_PIN_COPYING, SIM_PIN_READY };

struct sim_pin {
    enum sim_pin_state state;
    uint64_t step;
    uint32_t holders, asking;  /* a bit per guest */
    uint64_t seq[SIM_READERS]; /* of its question */
    uint64_t rewound;          /* COPYING, READY: the run that the step is of */
    uint32_t memory;
    struct sweep sweep;
    uint32_t in_queue; /* pieces */
};

enum sim_part_state { PART_NONE, PART_FILLING, PART_FULL, PART_OPEN };

struct sim_part { /* of the fork */
    /* outlives the daemon */
    bool kept;
    struct ledger_head head;
    uint64_t step;
    uint64_t mark; /* of the run that the step is of: sim_mark() */
    uint64_t blocks[SIM_FLAT];
    /* dies with it */
    enum sim_part_state state;
    uint32_t maker, holder; /* guests; SIM_NOBODY: none */
    uint64_t origin;
    bool copying, copied;
    struct sim_passing waits; /* ASK_FORK of a step to come, or until it is copied; seq 0: none */
};

struct sim_host {
    uint64_t served[SIM_GUESTS]; /* the last number */
    struct shardmap map;
    struct slice slice[SIM_UNITS];
    uint64_t base_elem[SIM_UNITS];
    struct sim_memory memory[SIM_MEMORIES]; /* outlives it */
    struct sim_pin pins[SIM_PINS];
    struct sim_part part;
    uint64_t promised; /* owner 0: the origin that was said to be there; 0: none */
};

/* -- A guest's side -----------------------------------------------------------------------------
 */

struct sim_thread { /* to a daemon */
    bool waits, in;
    uint64_t seq;
    struct sim_ask ask;
    struct sim_told told;
    uint64_t told_gen; /* of the daemon */
    uint64_t last_ns;  /* nothing overtakes */
    uint32_t mapped;   /* memory, + 1; 0: none */
    uint64_t hash;     /* of what is mapped */
};

struct sim_guest {
    bool alive;
    uint64_t gen, seq;
    uint32_t doing; /* as its kind has it; 0: pausing */
    uint64_t since_ns;
    uint64_t step, lead; /* asked for */
    uint64_t origin, first;
    uint64_t timer;          /* the number of the one that counts */
    struct rewind_turn turn; /* of who has the model go back, with the next */
    uint32_t in;             /* a bit per owner that has answered what the turn asks now */
    bool follows;            /* it only has owners follow */
    struct rewind_mark mark; /* when it asked all owners for one step */
    struct sim_thread thread[SIM_DAEMONS];
};

struct sim_guests {
    struct sim_guest guest[SIM_GUESTS];
    struct sim_host host[SIM_DAEMONS];
    struct sim_passing passing[SIM_ON_WAY];
    uint64_t passed;
};

/* sim_guest.c: the way between them */
void sim_guests_begin(struct sim *s);
void sim_guests_free(struct sim *s);
void sim_guests_check(struct sim *s, uint64_t bound_ns);
void sim_guest_fault(struct sim *s);
void sim_guest_event(struct sim *s, const struct sim_event *event);
void sim_guest_after(struct sim *s, const struct sim_guest *g, uint64_t delay_ns);
void sim_guest_ask(struct sim *s, struct sim_guest *g, uint32_t daemon, const struct sim_ask *ask);
void sim_guest_ask_all(struct sim *s, struct sim_guest *g, uint32_t first,
                       const struct sim_ask *ask);
bool sim_guest_all_in(const struct sim *s, const struct sim_guest *g);
void sim_host_serve(struct sim *s, struct sim_daemon *d, uint64_t number);
void sim_host_answer(struct sim *s, struct sim_daemon *d, const struct sim_passing *p,
                     const struct sim_told *told);
void sim_host_start(struct sim *s, struct sim_daemon *d);
void sim_host_kill(struct sim *s, struct sim_daemon *d);
void sim_host_gone(struct sim *s, struct sim_daemon *d, uint32_t guest);
void sim_host_moved(struct sim *s, struct sim_daemon *d);
uint64_t sim_hash_of(const struct sim *s, uint32_t owner, const uint64_t *blocks);
uint32_t sim_flat_count(const struct sim *s, uint32_t owner);

/* sim_pin.c */
void sim_pin_serve(struct sim *s, struct sim_daemon *d, const struct sim_passing *p);
void sim_pin_gone(struct sim *s, struct sim_daemon *d, uint32_t guest);
void sim_pin_kill(struct sim *s, struct sim_daemon *d);
void sim_pins_moved(struct sim *s, struct sim_daemon *d);
void sim_pins_before_update(struct sim *s, struct sim_daemon *d, uint32_t unit);
void sim_pin_copied(struct sim *s, struct sim_daemon *d, uint32_t pin);
void sim_reader_go_on(struct sim *s, struct sim_guest *g, bool timer);
void sim_reader_unmap(struct sim *s, struct sim_guest *g);

/* sim_fork.c */
void sim_fork_serve(struct sim *s, struct sim_daemon *d, const struct sim_passing *p);
void sim_fork_gone(struct sim *s, struct sim_daemon *d, uint32_t guest);
void sim_fork_start(struct sim *s, struct sim_daemon *d);
void sim_fork_moved(struct sim *s, struct sim_daemon *d);
void sim_fork_copied(struct sim *s, struct sim_daemon *d);
void sim_fork_check(struct sim *s);
void sim_forker_go_on(struct sim *s, struct sim_guest *g, bool timer);

#endif
