/* A snapshot: all that a daemon shows of itself, at one moment. It never changes once it is
 * published, and its references are counted. A model that is shown may be dropped meanwhile; what
 * the snapshot has of it, its spec, is counted, too. */
#ifndef SHD_SNAPSHOT_H
#define SHD_SNAPSHOT_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "daemon/core/step.h"
#include "daemon/model/checkpoint.h"
#include "daemon/model/metrics.h"
#include "proto/share/activity.h"
#include "proto/spec/spec.h"

struct adopt;
struct daemon;
struct verify_state;

#define VIEW_MISSING_MAX 64u  /* missing groups that are looked into */
#define VIEW_NAME_BYTES  128u /* of a session */
#define VIEW_KERNELS_MAX 32u
#define VIEW_PINS_MAX    2u   /* PINS_MAX */
#define VIEW_HOME_BYTES  520u /* KEEPER_HOME_BYTES */

struct view_unit {
    uint64_t elems, version;
    uint32_t returned;
    uint64_t norm_step; /* plus 1: that grad_norm is of; 0: it is not known */
    double grad_norm;   /* of the mean gradient's part that is here; NaN: not finite */
    struct {
        uint64_t step;         /* plus 1; 0: none was measured */
        double update, weight; /* norms of the part that is here; NaN: not finite */
    } changed;                 /* by the update that was measured last */
};

struct view_lease {
    uint32_t group;
    bool backup;
    uint64_t session, since_ns;
};

struct view_missing { /* a group that has not come in for the step being collected */
    uint32_t group;
    uint64_t holder[2]; /* session ids; 0: nobody has it on lease */
    struct metrics_sender sender;
};

enum view_waiting_what {
    VIEW_WAITS_PREPARE,
    VIEW_WAITS_LEASE,
    VIEW_WAITS_MEET,
    VIEW_WAITS_TURN,
};

struct view_waiting { /* a request without an answer */
    enum view_waiting_what what;
    uint64_t session, since_ns, step;
    uint32_t unit, group; /* TURN: what waits */
    uint32_t needs;       /* TURN: the group it waits for */
};

enum view_transfer_what { VIEW_JOIN, VIEW_FETCH, VIEW_RETURN };

struct view_transfer { /* over a link of NCCL; JOIN: the two links are being made */
    enum view_transfer_what what;
    uint64_t session, since_ns;
    uint64_t begun_ns;    /* both ends have it at hand since then; 0: not yet */
    uint64_t timeout_ns;  /* from then */
    uint64_t step;        /* FETCH, RETURN, with the next two */
    uint32_t unit, group; /* group: RETURN */
    uint32_t model;       /* handle */
};

struct view_pin { /* a step that readers have pinned */
    uint64_t step, bytes;
    uint32_t sessions;
    bool ready;
    uint64_t began_ns; /* by taken_ns' clock; 0: it is to come */
};

struct view_maker { /* of a model; not known: a build of before has made it */
    bool known;
    uint32_t uid, gid;
};

struct view_model {
    struct spec *spec;              /* counted */
    uint32_t handle, owner, owners; /* handle 0: it is being filled */
    uint64_t elems;
    bool ready, adopted;
    int status; /* SHD_OK, or why it is not ready */
    uint64_t step, collecting, updates;
    uint64_t hold_step; /* the first that does not begin, while it drains */
    enum step_phase phase;
    uint32_t returns; /* of the step: gradients that each unit gets */
    uint64_t expected, returned, waiting;
    struct {
        uint64_t state, publish, inbox, board, ledger, spec, spill, spilled, spare, huge, snapshots;
        uint64_t file_state, file_publish; /* on files: of such a state `state` is in memory, */
        uint64_t file_snapshots;           /* and of what is published nothing that counts */
        uint64_t common, common_counted;   /* frozen units that forks have as well; here */
        uint64_t counted;                  /* for quotas, */
        struct view_maker maker;           /* of whom */
    } bytes;
    struct {
        struct step_prepared sealed;
        struct step_result committed;
        struct step_stopped stopped;
        struct step_cause sealed_cause, stopped_cause; /* unit 0: not known */
        uint64_t is_stopped; /* 0 or 1: training, at owner 0 until it goes on */
        char *settings;      /* owned: JSON, of the one that is collected; NULL: nothing is set */
        struct verify_state *verified; /* owned; NULL: the model has none that are */
    } last;                            /* steps */
    struct metrics_model metrics;      /* without senders; its norms are counted */
    struct metrics_rates rates;
    struct {
        bool saves; /* a checkpoint is being written: */
        struct checkpoint_progress checkpoint;
        struct view_pin pins[VIEW_PINS_MAX];
        uint32_t pin_count;
    } captures;
    struct view_unit *units; /* owned, [spec->unit_count] */
    struct view_lease *leases;
    uint32_t lease_count;
    struct view_missing *missing;
    uint32_t missing_count; /* listed; there may be more */
    uint32_t missing_total;
    struct view_waiting *waiting_list;
    uint32_t waiting_count;
};

struct view_session {
    uint64_t id;
    uint32_t index; /* in the table, as traces name it */
    pid_t pid;
    uid_t uid;
    uint64_t start_time, since_ns;
    uint32_t rank; /* plus 1; 0: none */
    const char *role;
    char name[VIEW_NAME_BYTES];
    const char *path; /* NULL: not known */
    uint32_t slots, slots_waiting, requests_pending;
    uint32_t model;          /* handle of the model it is busy with; 0: none */
    uint32_t prepared_model; /* it asked Prepare of this model, */
    uint64_t prepared_step;  /* and step */
    bool trains;
    struct activity_span now;    /* what: ACTIVITY_SILENT when it says nothing */
    struct activity_span *spans; /* owned; NULL unless asked for */
    uint32_t span_count;
};

struct view_daemon { /* what never changes */
    const char *device, *place, *isa, *keeper;
    const char *gpu; /* its product name; NULL: the host */
    char gpu_uuid[48];
    uint32_t threads;
    const struct adopt *adopt; /* borrowed: it was over before anybody could ask */
    char state_home[VIEW_HOME_BYTES], publish_home[VIEW_HOME_BYTES],
        snapshots_home[VIEW_HOME_BYTES];
};

struct view_kernel {                 /* a kind of work that was timed by two instruction sets */
    const char *work, *isa, *beside; /* the device's; isa was taken */
    double ns, beside_ns;            /* an element */
    double ratio;
};

struct view_quota {
    char who[48]; /* "uid:1000" */
    uint64_t used, limit;
};

struct view_snapshot {
    _Atomic uint32_t refs;
    struct view_daemon daemon;
    uint64_t taken_ns;
    double time_s, uptime_s;
    bool draining;
    uint64_t restored_bytes,
        restore_bytes; /* of what is being restored: done, all; 0: nothing is */
    uint64_t requests, bad_frames, dropped_replies, repeated_replies;
    struct view_kernel kernels[VIEW_KERNELS_MAX];
    uint32_t kernel_count;
    uint64_t ring_bytes;
    struct view_quota *quotas; /* owned, [quota_count] */
    uint32_t quota_count;
    struct metrics_daemon metrics;
    struct view_model *models; /* owned, [model_count] */
    uint32_t model_count;
    struct view_session *sessions; /* owned, [session_count] */
    uint32_t session_count;
    struct view_transfer *transfers; /* owned */
    uint32_t transfer_count;
    uint32_t spans_left_out; /* sessions beyond VIEW_SPAN_SESSIONS_MAX */
};

struct view_daemon view_daemon_of(const struct daemon *d);

/* The device's choices of instruction sets so far; returns how many. */
uint32_t view_kernels_of(const struct daemon *d, struct view_kernel ret[VIEW_KERNELS_MAX]);

/* The loss of the last committed step: its first metric, as a mean over micro-batches; NaN when
 * there is none. */
double view_loss(const struct view_model *vm);

/* The model of a handle, or of its place (model.h); NULL: it was dropped. */
const struct view_model *view_model_find(const struct view_snapshot *s, uint32_t handle);
const struct view_model *view_model_at(const struct view_snapshot *s, uint32_t place);

const struct view_session *view_session_find(const struct view_snapshot *s, uint64_t id);

#endif
