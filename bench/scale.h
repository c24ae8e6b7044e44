/* The parts of bench_scale: a step of H hosts with G daemons and G workers each, as one worker, one
 * daemon and one host's relay have it, by the code that those run.
 *
 * Real: messages (proto/wire), the daemon's step core with its ledger, its replies and its leases,
 * the worker's turn over all owners, the relay's look at each message and its frames' heads, who
 * owns what. Simulated: all other processes; sockets, TLS, rings, threads and wakes; gradients and
 * kernels, which are over as soon as they are begun. So processor time is that of the bookkeeping
 * alone: what bytes take is bench_bulk's and bench_update's, what a request takes with its system
 * calls is bench_control's. */
#ifndef SHD_BENCH_SCALE_H
#define SHD_BENCH_SCALE_H

#include <stdint.h>

#include "proto/base/status.h"
#include "proto/wire/wire.h"

#define SCALE_FRAME_BYTES 4096u /* of a Prepared, the longest that a step has */

struct shardmap;
struct spec;

struct scale {
    uint32_t hosts, gpus, micros; /* micros: of a worker, each returned by itself */
    uint64_t seed;                /* of the order in which gradients come */
    struct spec *spec;            /* owned */
    struct shardmap **maps;       /* owned, [scale_owners()]: each owner's */
};

static inline uint32_t scale_owners(const struct scale *s)
{
    return s->hosts * s->gpus;
}

/* The spec of a model of so many units of so many elements each, as JSON (the caller frees it). */
char *scale_spec(uint32_t units, uint64_t elems, uint32_t micro_batches);

/* spec_json of scale_spec(). Errors: SHD_ERANGE as of spec_parse() and shardmap_new(), SHD_ENOMEM.
 */
int scale_init(struct scale *s, const char *spec_json, struct shd_err *e);
void scale_deinit(struct scale *s);

struct scale_frame {
    uint8_t bytes[SCALE_FRAME_BYTES];
    size_t used;
};

/* Requests as a worker makes them, packed; these errors are ours. */
void scale_pack(const struct wire_request *request, struct scale_frame *ret_frame);
struct wire_request scale_return(uint64_t step, uint32_t micro, uint32_t unit);
struct wire_request scale_prepare(uint64_t step);
struct wire_request scale_commit(uint64_t step, const struct decision *decision);

/* Of this thread. */
uint64_t scale_cpu_ns(void);

/* -- A daemon ---------------------------------------------------------------------------------- */

struct scale_daemon {
    uint64_t requests, replies;               /* of a step */
    uint64_t served_again;                    /* Prepares that had to wait for others' gradients */
    uint64_t waited;                          /* gradients that came before their turn */
    uint64_t returns_ns, commit_ns, lease_ns; /* processor time of a step; leases apart */
    uint64_t leases;                          /* asked for and answered, in an elastic step */
    uint64_t session_bytes;                   /* of memory, each */
    uint64_t core_bytes, ledger_bytes;        /* of the model, the gradients' state aside */
    struct scale_frame prepared, committed, credit; /* of its last step, as a worker gets them */
};

/* Steps of owner 0 with all workers, until each of them has its decision; the figures are of the
 * quickest of `rounds`. Errors: SHD_ERANGE more than a ledger holds, SHD_ENOMEM. */
int scale_daemon(const struct scale *s, uint32_t rounds, struct scale_daemon *ret,
                 struct shd_err *e);

/* -- A worker ---------------------------------------------------------------------------------- */

struct scale_worker {
    uint64_t requests, replies;     /* of a step */
    uint64_t returns_ns, commit_ns; /* processor time */
    uint64_t turn_bytes;
};

/* Its returns to all owners, their credits, its turn. daemon: what each owner answers. */
int scale_worker(const struct scale *s, const struct scale_daemon *daemon, uint32_t rounds,
                 struct scale_worker *ret, struct shd_err *e);

/* -- A relay ----------------------------------------------------------------------------------- */

struct scale_relay {
    uint64_t in, out;           /* of a step: requests and slices, as `shardctl plan` counts */
    uint64_t replies, frames;   /* beside them, and heads that were made or read, both ways */
    uint64_t cpu_ns;            /* for all of it */
    uint64_t sessions, mirrors; /* connections: of workers there and here, of models likewise */
};

/* The relay of host `host`. */
int scale_relay(const struct scale *s, uint32_t host, const struct scale_daemon *daemon,
                struct scale_relay *ret, struct shd_err *e);

/* -- Two relays and a daemon that run ---------------------------------------------------------- */

struct scale_process {
    double us;  /* processor time of a request and its reply */
    double kib; /* of memory of its own for each session: without what it shares with others */
};

struct scale_real {
    uint64_t requests;                      /* that were answered, with their replies */
    struct scale_process near, far, daemon; /* the workers' relay, the daemon's, the daemon */
};

/* shardd --relay twice, shardd beside one of them, and in this process so many workers beside the
 * other one, who train a model of small units (one block each) for `steps` steps, by TLS over
 * loopback. Errors: of whatever does not start, or answers otherwise. */
int scale_real(uint32_t sessions, uint32_t units, uint32_t steps, struct scale_real *ret,
               struct shd_err *e);

#endif
