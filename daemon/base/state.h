/* The state that the parts of a daemon share: pointers to one another, and little else. daemon.c
 * owns all of it, makes it in order and frees it in reverse. Whoever needs more of a part than its
 * pointer includes that part's header; this one includes none.
 *
 * The loop thread owns every part and never blocks: optimizer work runs on the kernel device's
 * threads, spec parsing and model creation on libuv's pool; both report back to the loop.
 */
#ifndef SHD_STATE_H
#define SHD_STATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct adopt;
struct comm;
struct daemon;
struct keeper;
struct kern;
struct mailbox;
struct metrics_daemon;
struct model;
struct notify;
struct op;
struct op_pool;
struct open_queue;
struct quota;
struct request;
struct restore;
struct session;
struct session_table;
struct task_queue;
struct uv_loop_s;
struct uv_timer_s;
struct view;

#define DAEMON_MODELS_MAX       64u
#define SESSIONS_MAX            4096u
#define DAEMON_DEVICE_BYTES_MAX 32u
#define DAEMON_DIR_BYTES_MAX    512u

/* Calls of a part to those above it, which it does not know. Set before anything starts. */
struct daemon_hooks {
    /* A frame came, of the session with this connection: by it, or by the session's ring. */
    void (*frame)(struct daemon *d, uint64_t conn, bool by_ring, const void *frame, size_t bytes);
    void (*woken)(struct session *s); /* by its client: something is in its ring */
    /* A unit is published: who sleeps until it is has to be woken (board_awaited()). */
    void (*published)(struct daemon *d, uint64_t awaited);
    const struct request *const *requests; /* by type: the handler, and who may send it */
    /* A session has ended, as it was open or not yet; its claims go. */
    void (*session_ended)(struct session *s, bool was_open);
    void (*kernel_room)(struct daemon *d); /* its queue was full, completions were delivered */
    void (*model_moved)(struct model *m, bool phase_changed); /* or gradients are in */
    void (*device_failed)(struct daemon *d);                  /* work came back with SHD_EIO */
    void (*succeed)(struct daemon *d); /* end, for a successor to go on with what is kept */
};

struct daemon_restore {
    struct restore *work; /* NULL when idle */
    const char *parked;   /* borrowed: the name of its model once that is read; NULL: none */
    _Atomic uint64_t bytes_done, bytes_total; /* of the model's arrays; total 0: none are read */
};

struct daemon_timers { /* running while somebody waits */
    struct uv_timer_s *spill, *lease;
};

struct daemon {
    const struct daemon_hooks *hooks;
    char device[DAEMON_DEVICE_BYTES_MAX];
    char runtime_dir[DAEMON_DIR_BYTES_MAX];
    uint32_t threads;
    uint64_t started_ns;      /* uv_hrtime() */
    struct uv_loop_s *loop;   /* NULL before it is there */
    struct kern *kern;        /* all models' memory and work */
    struct task_queue *tasks; /* completions from other threads */
    struct keeper *keeper;
    struct op_pool *ops;
    struct mailbox *mailbox;
    struct session_table *sessions;
    struct model *models[DAEMON_MODELS_MAX]; /* handle = index + 1 */
    uint32_t model_count;
    struct open_queue *open; /* OpenModel requests */
    struct quota *quota;     /* of all models' memory */
    struct daemon_restore restore;
    struct adopt *adopt;
    struct comm *comm; /* NCCL's thread; NULL: nobody has asked for it */
    struct metrics_daemon *metrics;
    struct view *view;
    struct notify *notify;
    struct daemon_timers timers;
    uint64_t drain_session;   /* who drains this device; 0: nobody */
    struct op *drain_waiting; /* its DRAIN, until we are between two steps */
    uint64_t requests;        /* since start */
    bool kernel_full;         /* somebody found its queue full, and waits */
    bool stopping;            /* daemon_free() is under way: begin nothing new */
    bool failed;              /* the device did */
    bool kept;                /* a service manager has the models' memory */
};

#endif
