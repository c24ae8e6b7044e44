/* The simulation of steps: its actors, which do one task at a time, and what owners do. Workers and
 * the clock are plan_time.c's. */
#ifndef SHD_PLAN_SIM_H
#define SHD_PLAN_SIM_H

#include <stdbool.h>
#include <stdint.h>

#include "client/plan/plan_time.h"

struct sim_actor {
    double sleep_ns, run_ns; /* left of its task: first this, then that on `threads` processors */
    uint32_t threads;
    bool busy, kernel;
};

enum sim_part { SIM_COMPUTE, SIM_FETCH, SIM_RETURN, SIM_UPDATE, SIM_WAIT, SIM_PARTS };

struct sim_worker {
    uint32_t at; /* in plan->ops */
    uint64_t step;
    bool begun;   /* the operation at hand has its task behind it */
    bool blocked; /* it waits, as: */
    enum sim_part why;
    double since_ns; /* what is before is counted */
    uint32_t sent;   /* gradients that owners have not summed yet */
    uint32_t held;   /* slots with a gradient in progress */
    double part_ns[SIM_PARTS];
    uint8_t *fetched;   /* [units]: 1 on its way, 2 here */
    uint8_t *open;      /* [units]: its gradient is in progress */
    uint32_t *returned; /* [units]: groups of this step */
    uint32_t *left;     /* [units * groups]: owners that have not summed it */
    uint32_t *queue;    /* [units + 1]: a ring, of units to be copied */
    uint32_t first, last;
};

struct sim_job {
    uint32_t unit;
    uint32_t group; /* UINT32_MAX: the update */
};

struct sim_ring {
    struct sim_job *jobs; /* owned, [room] */
    uint32_t room, first, last;
};

struct sim_owner {
    struct shardmap *map;
    uint64_t step;
    uint32_t summed, expected;
    uint64_t *version;              /* [units] */
    uint32_t *next;                 /* [units]: the group whose turn it is */
    bool *arrived;                  /* [units * groups] */
    struct sim_ring requests, jobs; /* for its event loop; for its compute threads */
};

struct sim {
    const struct spec *spec; /* borrowed, with the rest of the question */
    const struct plan *plan;
    const struct plan_rates *rates;
    const struct plan_shape *shape;
    const struct plan_compute *compute;
    enum shd_dtype grad_dtype;
    double far;      /* 0: the model is in caches, 1: in memory */
    bool staged;     /* a gradient needs a slot only when it is returned */
    uint32_t groups; /* of a step, all workers' */
    double now_ns;
    struct sim_actor *actors; /* [2 * workers + 2 * daemons]: workers, their transfer threads,
                               * owners' event loops, their compute threads */
    struct sim_worker *workers;
    struct sim_owner *owners;
};

/* Actors of a simulation, and the transfer thread of a worker among them. */
uint32_t sim_actors(const struct sim *s);
struct sim_actor *sim_copier(struct sim *s, uint32_t worker);

/* Give an actor that has none a task. */
void sim_start(struct sim_actor *a, double sleep_ns, double run_ns);

/* Of an element, for a model of this size. */
double sim_rate_ns(const struct sim *s, struct plan_rate r);

/* An owner gets a gradient; the commit of a step, the first of which counts. */
void sim_take(struct sim *s, uint32_t owner, struct sim_job job);
void sim_commit(struct sim *s, uint32_t owner, uint64_t step);

/* Its event loop, its compute threads have done a task. */
void sim_loop_done(struct sim *s, uint32_t owner);
void sim_kernels_done(struct sim *s, uint32_t owner);

/* Make actors, workers and owners: the question is filled in. After an error, too, sim_free().
 * Errors: SHD_ENOMEM. */
int sim_new(struct sim *s, struct shd_err *e);
void sim_free(struct sim *s);

#endif
