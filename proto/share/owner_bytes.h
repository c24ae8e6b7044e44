/* The memory that an owner needs for a model, segment by segment: the one function of it, which the
 * daemon admits by, `shardctl plan` predicts by, and /status agrees with to the byte.
 *
 * owner_bytes() is of owners in host memory. Of one on a GPU owner_gpu_bytes() says what lies on
 * the GPU; ledger and board are the host's there, too. Pure.
 */
#ifndef SHD_OWNER_BYTES_H
#define SHD_OWNER_BYTES_H

#include <stdbool.h>
#include <stdint.h>

struct shardmap;

struct owner_ask {
    uint64_t spec_bytes;  /* of its canonical JSON, without NUL */
    uint32_t returns;     /* gradients of a unit in a step: spec_returns(), the most */
    uint32_t sessions;    /* that train it, each with */
    uint32_t slots;       /* so many slots; 0: none */
    bool keeper;          /* a successor may adopt it: memory is kept spare for that */
    bool on_file;         /* the state is: `shardd --state file:DIR` */
    bool publish_on_file; /* so is what is published, and what is spare of it */
};

struct owner_bytes {
    uint64_t state, ledger, publish, board; /* from the beginning, wherever they are */
    uint64_t spec;                          /* that no message holds: its segment; else 0 */
    uint64_t inbox;                         /* of all sessions */
    uint64_t spare;
    uint64_t window; /* of a state on a file: so much of it is in memory at most, with the room
                      * for an update, which always is; else 0 */
    uint64_t file, publish_file; /* on files, else 0 */
    uint64_t all;                /* of these, in memory */
    uint64_t spill_max;          /* more, at most, while gradients wait for slow workers */
};

struct owner_bytes owner_bytes(const struct shardmap *map, const struct owner_ask *ask);

/* Of a state on a file, in memory and being written back: three times what the largest unit has in
 * it, one that is computed, one that is read and one that is written; or all of it. */
uint64_t owner_window_bytes(const struct shardmap *map);

/* What the driver hands out memory by: its answer on all GPUs so far
 * (cuMemGetAllocationGranularity; daemons go by the answer). */
#define GPU_GRANULE_BYTES (UINT64_C(2) << 20)

/* Of each process, and of each device that one has opened, for parts of work in flight
 * (kernels/cuda/device.h: CUDA_FLIGHT of CUDA_STAGE_BYTES; checked in trail.c). */
#define GPU_STAGING_BYTES (UINT64_C(16) << 20)

/* Of each process: the driver's own, code and stacks of kernels. It differs by GPU and driver, some
 * hundred MB (nvidia-smi shows it); this is to be on the safe side. */
#define GPU_CONTEXT_BYTES (UINT64_C(512) << 20)

/* Of the trail behind a state's arrays, but for chunks (kernels/cuda/args.h, checked in trail.c).
 */
#define GPU_TRAIL_BYTES       UINT64_C(31621120)
#define GPU_TRAIL_CHUNK_BYTES UINT64_C(16)

struct owner_gpu_bytes {
    uint64_t state, publish, inbox; /* in granules, as /status has them */
    uint64_t spare;                 /* a second publish, of a successor beside workers that read */
    uint64_t staging;
    uint64_t all; /* of these; the context comes on top */
};

struct owner_gpu_bytes owner_gpu_bytes(const struct shardmap *map, const struct owner_ask *ask);

/* The ledger, whole pages (daemon/core/ledger.h lays it out). */
uint64_t owner_ledger_bytes(const struct shardmap *map, const struct owner_ask *ask);

#endif
