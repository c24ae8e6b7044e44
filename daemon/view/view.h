/* The view: what a daemon shows of itself, for any thread to read.
 *
 * The loop thread copies what it has into a snapshot (view_take.c) when somebody has asked, at most
 * ten times a second; nobody asks, nothing is done. A snapshot never changes and is counted; all
 * the rest, sentences and JSON, is made of it on the HTTP thread, which so can answer while the
 * loop is stuck: with the last one, whose age it tells.
 *
 *   view_request() ──uv_async──▶ loop: take, publish ──eventfd──▶ HTTP thread: view_get(), render
 *
 * Snapshots hold pointers into models' specs: models live as long as the daemon, and the HTTP
 * thread ends before them. Failure: no memory for a snapshot: the last one stays.
 */
#ifndef SHD_VIEW_H
#define SHD_VIEW_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <jansson.h>
#include <uv.h>

#include "daemon/base/task.h"
#include "daemon/core/lease.h"
#include "daemon/core/step.h"
#include "daemon/model/checkpoint.h"
#include "daemon/model/metrics.h"
#include "proto/share/activity.h"
#include "proto/spec/spec.h"
#include "proto/wire/wire.h"

struct adopt;
struct daemon;

#define VIEW_SCHEMA            2
#define VIEW_INTERVAL_NS       UINT64_C(100000000) /* between two snapshots, at least */
#define VIEW_MISSING_MAX       64u                 /* missing groups that are looked into */
#define VIEW_SPAN_SESSIONS_MAX 256u                /* whose spans a trace has: 32 KiB each */

/* -- A process ----------------------------------------------------------------------------------
 */

struct view_process {
    char state;          /* of /proc/PID/stat */
    uint64_t start_time; /* in clock ticks since boot */
};

/* False: there is none. A few microseconds. */
bool view_process_read(pid_t pid, struct view_process *ret_process);

/* "running", "sleeping", "stopped", "gone"; also "gone" when pid is another process by now, and
 * "unknown" when start_time is 0. */
const char *view_process_state(pid_t pid, uint64_t start_time);

/* -- A snapshot ---------------------------------------------------------------------------------
 */

struct view_unit {
    uint64_t elems, version;
    uint32_t returned;
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

enum view_waiting_what { VIEW_WAITS_PREPARE, VIEW_WAITS_LEASE, VIEW_WAITS_TURN };

struct view_waiting { /* a request without an answer */
    enum view_waiting_what what;
    uint64_t session, since_ns, step;
    uint32_t unit, group; /* TURN: what waits */
    uint32_t needs;       /* TURN: the group it waits for */
};

struct view_transfer { /* a turn of a link of NCCL, or (JOIN) two that are being made */
    enum wire_request_type type;
    uint64_t session, since_ns;
    uint64_t begun_ns;    /* both ends have it at hand since then; 0: not yet */
    uint64_t timeout_ns;  /* from then */
    uint64_t step;        /* FETCH, RETURN, with the next two */
    uint32_t unit, group; /* group: RETURN */
    uint32_t model;       /* handle */
};

struct view_model {
    const struct spec *spec; /* borrowed: lives as long as the daemon */
    uint32_t handle, owner, owners;
    uint64_t elems;
    bool ready, adopted;
    int status; /* SHD_OK, or why it is not ready */
    uint64_t step, collecting, updates;
    enum step_phase phase;
    uint64_t expected, returned, waiting;
    struct {
        uint64_t state, publish, inbox, board, ledger, spill, spilled;
    } bytes;
    struct step_prepared record;
    struct metrics_model metrics; /* without senders */
    struct metrics_rates rates;
    bool saves; /* a checkpoint is being written: */
    struct checkpoint_progress checkpoint;
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
    const char *role;
    char name[WIRE_NAME_BYTES_MAX];
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

struct view_snapshot {
    _Atomic uint32_t refs;
    const struct daemon *daemon; /* borrowed: only what never changes is read through it */
    uint64_t taken_ns;
    double time_s, uptime_s;
    bool draining;
    uint64_t requests, bad_frames, dropped_replies, repeated_replies;
    struct metrics_daemon metrics;
    struct view_model *models; /* owned, [model_count] */
    uint32_t model_count;
    struct view_session *sessions; /* owned, [session_count] */
    uint32_t session_count;
    struct view_transfer *transfers; /* owned */
    uint32_t transfer_count;
    uint32_t spans_left_out; /* sessions beyond VIEW_SPAN_SESSIONS_MAX */
};

/* view_take.c. Loop thread. NULL: no memory. */
struct view_snapshot *view_take(struct daemon *d, bool with_spans);
void view_unref(struct view_snapshot *s); /* any thread; NULL is a no-op */

const struct view_session *view_session_find(const struct view_snapshot *s, uint64_t id);

/* -- Rendering: HTTP thread, or whoever has a snapshot ------------------------------------------
 */

/* view_json.c: docs/status.md. NULL: no memory. */
json_t *view_json(const struct view_snapshot *s, uint64_t now_ns);
json_t *view_adopted(const struct adopt *a);

/* view_waits.c: the waits of all models, longest first. longest: per kind in seconds. */
enum view_wait_kind {
    VIEW_WAIT_GRADIENTS,
    VIEW_WAIT_TURN,
    VIEW_WAIT_UNIT,
    VIEW_WAIT_SLOT,
    VIEW_WAIT_COMMIT,
    VIEW_WAIT_TRANSFER,
    VIEW_WAIT_JOIN,
    VIEW_WAIT_KINDS,
};
const char *view_wait_kind_name(enum view_wait_kind kind);
json_t *view_waits(const struct view_snapshot *s, double ret_longest_s[VIEW_WAIT_KINDS]);

/* metrics_text.c: Prometheus text. Errors: SHD_ENOMEM. */
int metrics_text(const struct view_snapshot *s, char **ret_text, size_t *ret_bytes,
                 struct shd_err *e);

/* -- Publication --------------------------------------------------------------------------------
 */

struct view {
    struct daemon *daemon;
    uv_async_t async;     /* somebody asks */
    uv_timer_t heartbeat; /* says that the loop turns; later: takes what was asked for too soon */
    uv_timer_t later;
    bool handles_ready;
    _Atomic uint64_t beat_ns;
    _Atomic bool wanted, wanted_spans;
    int event_fd;          /* owned: written after each publication */
    pthread_mutex_t mutex; /* guards the next two */
    struct view_snapshot *last, *last_spans;
};

/* view_notify.c: the service manager's watchdog, fed after each self-probe that came back (loop,
 * kernel queue, and the loop again), and its STATUS= line. Nothing here ever blocks: a manager that
 * does not read loses what it would have been told. */
struct view_notify {
    uv_timer_t timer; /* of the watchdog; runs where one is wanted */
    struct task probe;
    float *scratch;     /* owned, the device's: written by the probe, read by nobody */
    bool probing;       /* the last one has not come back */
    uint64_t status_ns; /* when STATUS= was sent last */
    int fd;             /* owned socket; -1: no manager */
};
int view_notify_init(struct daemon *d, struct shd_err *e);
void view_notify_deinit(struct daemon *d);

/* A step went on: say so, once a second at most. */
void view_notify_step(struct model *m);

/* It drains, or does not any more. */
void view_notify_drain(struct daemon *d);

int view_init(struct daemon *d, struct shd_err *e);
void view_deinit(struct daemon *d); /* no reader is left; handles are closed by the loop's end */

/* Any thread: a new snapshot, please; event_fd tells when it is there. */
void view_request(struct view *v, bool with_spans);

/* Any thread: a reference to the last one, or NULL. */
struct view_snapshot *view_get(struct view *v, bool with_spans);

/* Any thread: nobody needs the last one with spans any more; it is large. */
void view_forget_spans(struct view *v);

/* Any thread: since when the loop has not turned. */
uint64_t view_beat_age_ns(const struct view *v);

#endif
