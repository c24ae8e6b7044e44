/* Shared by the tests of trails: memory that outlives a process, and a script of operations on it
 * that each process can take up where the last one was stopped. */
#ifndef SHD_TESTS_KERN_TRAIL_UTIL_H
#define SHD_TESTS_KERN_TRAIL_UTIL_H

#include "tests/lib/kern_util.h"

#define ELEMS          (164 * BLOCK) /* chunks with a short last one; above the streaming threshold */
#define CHUNKS         6u            /* kern_trail_chunks(ELEMS) */
#define ALL_CHUNKS     (3 * CHUNKS)
#define SCRIPT_OPS     20u
#define SCRIPT_UPDATES 5u  /* that take turns, the fourth of them a mean */
#define OP_INT8        16u /* the update in 8 bits, of AdamW */

/* One mapping, as a segment: the trail, then the arrays. */
struct marks {
    _Atomic uint64_t done;               /* the script's last finished operation */
    _Atomic uint64_t phase;              /* of a child, see there */
    _Atomic uint64_t wrong;              /* operation whose sum was wrong in a child */
    _Atomic uint64_t chunks[ALL_CHUNKS]; /* of acc, of the parameters, of their average */
};

struct world {
    uint8_t *base;
    uint64_t bytes;
    struct kern_trail_area *area;
    struct marks *marks;
    float *acc, *p, *m, *v, *e; /* [ELEMS] */
    struct kern_array q[2];     /* behind them: moments in 8 bits */
};

/* What operations read, the same in every process, and where they publish. */
#define INPUT_RUNS_MAX 8u

struct inputs {
    uint64_t acc_elems;         /* accumulated of ELEMS */
    uint64_t update_elems;      /* updated of them */
    bool averages;              /* updates but a mean's keep one */
    bool here;                  /* on the caller's thread; the device is idle and they are few */
    struct kern_change *change; /* of updates; NULL: they are not measured */
    const struct kern_run *runs;
    uint32_t run_count;
    float grad[3][ELEMS]; /* of each dtype, in room for the widest */
    float publish[ELEMS];
    struct kern_run blocks[INPUT_RUNS_MAX]; /* of an update in 8 bits, as long as it is queued */
};

struct world world_new(void);

void world_free(struct world *w);

/* The script's start. */
void world_reset(const struct world *w);

/* Whole runs with gaps, odd borders and both groups; owned by the caller's process. */
struct inputs *inputs_new(void);

struct kern_trail trail_of(const struct world *w, uint64_t op, uint64_t first_chunk);

/* Run the script's operation op, 1..: a first accumulate, one without and one with a sum, an
 * update; the optimizers and the dtypes take turns. Returns the status it finished with. */
int script_run(struct kern *k, const struct world *w, struct inputs *in, uint64_t op, bool trail,
               struct kern_sum *ret_sum);

/* Of acc, p, m, v, e and the moments in 8 bits. */
uint64_t world_digest(const struct world *w);

/* What the script does undisturbed, without a trail. */
struct script {
    uint64_t digest[SCRIPT_OPS + 1];
    struct kern_sum sum[SCRIPT_OPS + 1];
};

void script_record(const struct world *w, struct inputs *in, struct script *ret);

bool same_sum(const struct kern_sum *a, const struct kern_sum *b);

#endif
