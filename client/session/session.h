/* A session, as the parts of the client see it (client/shd.h has it opaque). */
#ifndef SHD_CLIENT_SESSION_H
#define SHD_CLIENT_SESSION_H

#include "proto/base/dtype.h"
#include "proto/base/status.h"

/* After the two above: it repeats parts of them for those who have nothing else. */
#include "client/shd.h"

struct control_ops;
struct hub;
struct kern;
struct owner_gpu;
struct reader_ops;

struct shd_session {
    const struct control_ops *control; /* borrowed: who its owners are, remote or local */
    const struct reader_ops *reader;   /* borrowed: of its models, unless policy says otherwise */
    struct hub *hub;                   /* owned; NULL: the owner is in this process */
    struct kern *kern; /* owned; the worker's device. Host: NULL until something is summed here */
    bool on_gpu;       /* the worker's arrays are in the memory of GPU `ordinal` */
    uint32_t ordinal;
    struct owner_gpu *gpus; /* owned, [gpu_count]: a host worker's, for what GPU owners have */
    uint32_t gpu_count;
    uint64_t timeout_ns; /* of each wait */
    uint32_t slots;      /* asked for; 0: as the plan needs */
    uint64_t wait_ns;    /* counters of struct shd_stats */
    uint64_t bytes_mapped;
    uint64_t bytes_copied;
    uint64_t bytes_unpinned;
    uint64_t units_acquired;
    uint64_t units_returned;
    uint64_t bytes_fetched;
    uint64_t bytes_returned;
    uint64_t live_bytes; /* now, of all models; its maximum is next */
    uint64_t live_bytes_max;
    uint64_t plan_misses;
    struct shd_model *models;  /* owned list */
    struct shd_model *opening; /* borrowed: not in the list yet */
};

/* session->kern, started on first use. */
int session_kern(struct shd_session *s, uint32_t threads, struct shd_err *e);

/* Where the worker's arrays are: its GPU; NULL: host memory. */
struct kern *session_gpu(const struct shd_session *s);

/* Held bytes came (or went, when not more). */
void session_live(struct shd_session *s, uint64_t bytes, bool more);

#endif
