/* Verifying what workers compute: in every n-th step one group of micro-batches is computed by two
 * of them, and each gradient's hash is compared with that of the same unit by the other. Correct
 * workers give the same bits, so a difference is a fault of one of the two. Pure: hashes come in
 * with each event; what is leased to whom lease.h decides, which asks here.
 *
 *     verify_wants() → the shell hashes the gradient, before it counts → verify_take()
 *
 * Which group: the first one in the n-th step, the next one in the 2n-th, and so on; the same at
 * all owners without a word.
 *
 * Two cannot tell which of them is wrong. Where a third copy comes, whoever differs from two that
 * agree is *wrong*; lease.h has one computed after a difference, where there is a third worker.
 * Where there is none, counts per worker remain: who has differed from two others, of two ranks, is
 * a *suspect*. A worker is a process: in a new session it has its copy still; the copy of one that
 * died is compared but speaks against nobody, for its successor may be as wrong.
 *
 * No difference is: a worker that died, with any part of its gradients returned; what came in
 * before a reset; what comes when a Prepare of the step was answered, or a put of it has begun, for
 * from then on another owner may be overwriting the parameters that a late worker still reads. A
 * reset ends what was prepared, and no put. Nothing of it outlives the process: in the step that a
 * successor finds nothing is compared (`blind`).
 */
#ifndef SHD_VERIFY_H
#define SHD_VERIFY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct step;
struct verify; /* lives in caller's memory */

#define VERIFY_COPIES     4u /* of a group, by different sessions; further ones are not looked at */
#define VERIFY_RECENT     8u /* differences that are remembered */
#define VERIFY_WORKERS    64u /* that are counted apart: the ones seen last */
#define VERIFY_HASH_BYTES 16u
#define VERIFY_NAME_BYTES 64u

struct verify_worker { /* who computed a copy */
    uint64_t session;  /* > 0 */
    int64_t pid;
    uint64_t start_time; /* of the process: with pid, the same one in its next session */
    uint32_t rank;       /* plus 1; 0: it has none */
    char name[VERIFY_NAME_BYTES];
};

enum verify_verdict {
    VERIFY_UNKNOWN, /* one of the two */
    VERIFY_FIRST,   /* worker[0] is wrong: the other has a third one's bits */
    VERIFY_SECOND,
};

struct verify_difference { /* of two copies of one group */
    uint64_t step;
    uint32_t group, unit, units; /* unit: the first that differs, of so many so far */
    struct verify_worker worker[2];
    enum verify_verdict verdict;
};

struct verify_count { /* of one worker */
    struct verify_worker worker;
    uint64_t compared, differences, wrong; /* copies of others that its own were compared with */
    uint64_t last_step;                    /* plus 1: that it was looked at in; 0: none */
    struct verify_worker partner;          /* the first it differed from; session 0: nobody */
    bool suspect; /* it has differed from workers of two ranks, or is wrong */
};

struct verify_state { /* for those who look */
    uint64_t every;
    uint64_t compared;    /* pairs of whole copies, */
    uint64_t differences; /* and those of them in which a unit differed */
    uint64_t missed;      /* steps that were to be verified and had no two whole copies here */
    struct verify_difference recent[VERIFY_RECENT]; /* the last first */
    uint32_t recent_count;
    struct verify_count workers[VERIFY_WORKERS];
    uint32_t worker_count;
};

/* Of `every` steps one is verified, of models with so many groups. False: not this one. */
bool verify_group_of(uint64_t every, uint32_t groups, uint64_t step, uint32_t *ret_group);

struct verify_shape {
    uint64_t every;   /* > 0 */
    uint32_t units;   /* of the model; of them so many */
    uint32_t trained; /* return gradients */
    bool first; /* of the owners: the one that hands work out. The others compare what comes */
    bool blind; /* nothing of the step at hand is looked at: others may have seen some of it */
};

size_t verify_bytes(const struct verify_shape *shape);

/* In memory of verify_bytes() aligned to 16. core: for its step at hand, where it is blind. */
struct verify *verify_init(void *memory, const struct verify_shape *shape, const struct step *core);

/* Is a gradient of this group to be hashed, if it is of the step and attempt being collected? */
bool verify_wants(struct verify *v, const struct step *core, uint64_t step, uint32_t group);

/* A gradient of a group that is wanted, of this session, about to be given to the core. hash
 * [VERIFY_HASH_BYTES]; NULL with `none`: the unit took no part; NULL without: it is not known, and
 * the worker's copy is not compared as a whole. True: it is the first unit in which these two
 * workers' copies differ, as ret_found says. */
bool verify_take(struct verify *v, const struct step *core, const struct verify_worker *worker,
                 uint32_t unit, const uint8_t *hash, bool none,
                 struct verify_difference *ret_found);

/* A Prepare of this step is answered. */
void verify_close(struct verify *v, const struct step *core, uint64_t step);

/* A put of this step begins, which may be committed in whatever attempt comes. */
void verify_close_put(struct verify *v, const struct step *core, uint64_t step);

/* The session is gone: its copies stay, but nobody waits for the rest of them. */
void verify_forget(struct verify *v, uint64_t session);

/* -- For who hands the work out (lease.h) -------------------------------------------------------
 */

/* The group that is verified in the step being collected, as long as a copy can still count. */
bool verify_now(struct verify *v, const struct step *core, uint32_t *ret_group);

bool verify_at_hand(const struct verify *v, uint32_t *ret_group); /* as of the last event */

/* So many copies, of different sessions, are wanted of it: 2 at the first owner; 3 at all where
 * the copies of two differ; 0: as many as come. */
uint32_t verify_wanted(const struct verify *v);

uint32_t verify_whole(const struct verify *v);                  /* copies that are */
bool verify_is_whole(const struct verify *v, uint64_t session); /* its copy */
bool verify_partial(const struct verify *v);                    /* some copy is coming */
bool verify_has_room(const struct verify *v); /* for one more, by whoever has none */
uint64_t verify_last_step(const struct verify *v, uint64_t session); /* as verify_count */

const struct verify_state *verify_look(const struct verify *v);

#endif
