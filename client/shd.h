/* shd.h: the one public header of libshd, the client of the shardd training-state service.
 *
 * The idea. Parameters and optimizer state live in daemons (`shardd`, one per device), not in
 * your training process. A model is cut into *units*, the groups of tensors you want to hold at
 * the same time (typically one per layer). Your process is a *worker*; for each *micro-batch* it
 *
 *     shd_acquire(unit)  read the unit's current parameters, one contiguous array
 *     ... forward, backward ...
 *     shd_grad(unit)     get an array of the same shape to write the unit's gradient into
 *     shd_return(unit)   hand that gradient to its owners
 *     shd_release(unit)  the parameters are no longer needed
 *
 * and, when all micro-batches of the *step* are in, shd_commit() clips, updates and moves the
 * model on to the next step. On one host nothing is copied: the arrays are the owners' memory,
 * mapped side by side. Results do not depend on the number of daemons or workers, to the bit.
 *
 *     struct shd_err e;
 *     shd_session *s; shd_model *m;
 *     if (shd_connect(&(struct shd_options){ .size = sizeof(struct shd_options) }, &s, &e) ||
 *         shd_model_open(s, spec_json, &m, &e))
 *         return fprintf(stderr, "%s\n", e.text), 1;
 *
 * Threads: a session and its models belong to one thread at a time. The arrays may be read and
 * written by any thread between the calls that hand them out and take them back.
 *
 * Errors: every function that returns int returns SHD_OK (0) or a negative code and then fills
 * *e (may be NULL) with a sentence that names the values. Out-parameters are untouched then.
 * Every wait is bounded by shd_options.timeout_ms and its error names who was waited for.
 *
 * A daemon that dies and is started again (its memory was kept for it) is not an error: calls wait
 * for it, at most timeout_ms, attach to it anew and go on; arrays that are handed out stay valid
 * and keep their contents. SHD_EGONE: it did not come back in time; SHD_ENOENT or SHD_ESTEP: it
 * came back without its state. These are final for the session.
 *
 * Ownership: what a _new/_connect/_open call returns is yours until the matching close. Pointers
 * handed out by acquire and grad are borrowed until release and return.
 */
#ifndef SHD_H
#define SHD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SHD_API     __attribute__((visibility("default")))
#define SHD_VERSION "0.1.0"

#ifndef SHD_PUBLIC_STATUS /* shardd's own sources may have these from proto/; a test compares */
#define SHD_PUBLIC_STATUS
enum shd_status {
    SHD_OK = 0,
    SHD_EINVAL = -1,     /* invalid argument or malformed input */
    SHD_ERANGE = -2,     /* value outside its limits */
    SHD_EPROTO = -3,     /* message or protocol version not understood */
    SHD_EAUTH = -4,      /* peer is not allowed to do this */
    SHD_ENOENT = -5,     /* no such model, unit, tensor, file or daemon */
    SHD_EEXIST = -6,     /* already there */
    SHD_ESPEC = -7,      /* model spec differs from the open model */
    SHD_ESTEP = -8,      /* step is not the open step */
    SHD_EBUSY = -9,      /* a limit on concurrent work is reached; retry later */
    SHD_ENOMEM = -10,    /* out of memory, descriptors or mappings */
    SHD_EIO = -11,       /* system call or transport failed */
    SHD_EGONE = -12,     /* daemon is gone and did not come back */
    SHD_ETIMEDOUT = -13, /* deadline passed */
    SHD_ESEGMENT = -14,  /* segment has the wrong size or seals */
    SHD_ENOTSUP = -15,   /* not supported here */
    SHD_EINTERNAL = -16, /* internal error */
};
struct shd_err {
    int code;       /* one of enum shd_status */
    char text[256]; /* always terminated */
};
#endif

#ifndef SHD_PUBLIC_DTYPE
#define SHD_PUBLIC_DTYPE
enum shd_dtype {
    SHD_F32 = 1,
    SHD_BF16 = 2,
    SHD_F16 = 3,
};
#endif

typedef struct shd_session shd_session;
typedef struct shd_model shd_model;

/* "SHD_ESTEP" for SHD_ESTEP, "SHD_UNKNOWN" for a code this library does not know. */
SHD_API const char *shd_status_name(int code);

/* -- Session --------------------------------------------------------------------------------- */

struct shd_options {
    size_t size;         /* sizeof(struct shd_options): lets the struct grow */
    const char *address; /* NULL: $SHARDD_ADDRESS, else /run/shardd. Either a runtime directory
                          * ("/run/shardd": every daemon in it, or "/run/shardd?cpu0,cpu1"), or
                          * "local:", owners inside this process: no daemon, same bits. */
    const char *name;    /* shown by `shardctl status`; NULL: the program's name */
    uint32_t slots;      /* gradients in flight to each owner, 1..64; 0: as the plan needs */
    uint32_t threads;    /* "local:" only: threads that apply updates; 0: one */
    uint64_t timeout_ms; /* bound of each wait; 0: 60,000 */
    const char *device;  /* where your arrays are: NULL or "host", or "cuda:N", see below */
};

/* device "cuda:N": the arrays that acquire, params and grad hand out are addresses of that GPU (N
 * as the CUDA runtime and PyTorch count, in the primary context that they use). The library waits
 * for its own work, so after shd_acquire() any stream may read. Yours has to be done when you hand
 * something back: synchronise the stream that wrote a gradient before shd_return(), the one that
 * read a unit before shd_release(). While a call runs, launch nothing on arrays of the model from
 * other threads: a daemon that came back may be mapped anew. */

/* Attach to the daemons at an address. They accept their own uid, root, and members of the
 * socket directory's group if it is open to that group. A daemon that the address names, or that
 * left its socket, is waited for, up to 10 s. Errors: SHD_ENOENT nothing there; SHD_EAUTH
 * refused; SHD_EPROTO another protocol version; SHD_EGONE, SHD_ETIMEDOUT, SHD_ENOMEM; for
 * a GPU SHD_ENOTSUP: no driver, no such GPU, or a build without kernels for it. */
SHD_API int shd_connect(const struct shd_options *options, shd_session **ret_session,
                        struct shd_err *e);

/* Detach and free, with its models. Arrays handed out become invalid. NULL is a no-op. */
SHD_API void shd_close(shd_session *s);

/* Daemons this session is attached to ("local:" counts as 1). */
SHD_API uint32_t shd_owners(const shd_session *s);

/* -- Model ----------------------------------------------------------------------------------- */

/* Create the model a JSON spec describes, or attach to it if its daemons hold it already; then
 * the spec must be the same one (SHD_ESPEC names the first tensor and field that differ).
 *
 *   { "name": "gpt", "seed": 1, "micro_batches": 4, "publish": "f32",
 *     "optimizer": { "kind": "adamw", "beta1": 0.9, "beta2": 0.95, "eps": 1e-8 },
 *     "groups": [ { "name": "decay", "weight_decay": 0.1 }, { "name": "plain" } ],
 *     "units": [
 *       { "name": "embed", "tensors": [
 *         { "name": "wte", "shape": [256, 128], "group": "decay", "init": ["normal", 0, 0.02] }
 *       ] },
 *       { "name": "head", "uses": ["embed"], "tensors": [
 *         { "name": "ln_f.weight", "shape": [128], "group": "plain", "init": ["const", 1] }
 *       ] }
 *     ] }
 *
 *   optimizer.kind  "adamw" (beta1, beta2, eps), "sgd" (momentum), "lion" (beta1, beta2).
 *   accumulate      a: a worker sums the gradients of a micro-batches and returns them once
 *                   ("local:a"); micro_batches must be a multiple of it. Default 1.
 *   trainable       per tensor, default true; a unit's tensors are all trainable or all frozen.
 *                   Frozen ones have no gradient and no optimizer state; they are fetched.
 *   groups          weight_decay and lr_scale per tensor; lr itself comes with each commit.
 *   init            ["const", a] | ["normal", mean, std] | ["uniform", low, high], drawn by the
 *                   owners from (seed, tensor name, element index); default ["const", 0].
 *   uses            units whose tensors this unit reads as well (tied weights): they stay
 *                   acquired, and their gradient is returned after the last use.
 *
 * docs/protocol.md has every field. Units are applied, and become readable for the next step, in
 * the order listed: list them in forward order. */
SHD_API int shd_model_open(shd_session *s, const char *spec_json, shd_model **ret_model,
                           struct shd_err *e);

/* Attach to a model the daemons already hold, by name (NULL: the only one there). */
SHD_API int shd_model_attach(shd_session *s, const char *name, shd_model **ret_model,
                             struct shd_err *e);

/* Unmap and free the model's client side; the daemons keep the model. NULL is a no-op. */
SHD_API void shd_model_close(shd_model *m);

SHD_API const char *shd_model_name(const shd_model *m);
SHD_API const char *shd_model_spec(shd_model *m); /* canonical JSON, borrowed; NULL: no memory */
SHD_API uint64_t shd_step(const shd_model *m);    /* the open one, as this worker knows */
SHD_API uint32_t shd_micro_batches(const shd_model *m); /* M of the spec */
SHD_API uint32_t shd_accumulate(const shd_model *m);    /* a of the spec: returns per step = M/a */
SHD_API bool shd_unit_frozen(const shd_model *m, uint32_t unit);
SHD_API uint32_t shd_units(const shd_model *m);
SHD_API const char *shd_unit_name(const shd_model *m, uint32_t unit); /* borrowed; NULL: no such */
SHD_API enum shd_dtype shd_param_dtype(const shd_model *m);

struct shd_tensor {
    const char *name;      /* borrowed from the model */
    uint32_t unit;         /* index of its unit */
    uint64_t offset_elems; /* of its first element in the unit's array; a multiple of 32 */
    uint64_t elems;
};

/* Look up by name / index. SHD_ENOENT when there is none. */
SHD_API int shd_tensor_find(const shd_model *m, const char *name, struct shd_tensor *ret_tensor,
                            struct shd_err *e);
SHD_API uint32_t shd_tensors(const shd_model *m);
SHD_API void shd_tensor_get(const shd_model *m, uint32_t index, struct shd_tensor *ret_tensor);

/* -- Policy ---------------------------------------------------------------------------------- */

/* How this worker runs its steps: what it holds when, how bytes move. Results do not depend on it
 * (grad_dtype apart), to the bit. docs/schedules.md draws each; `shardctl plan` prints one with
 * its costs before you run it. Zero-initialise, set size, change what you care for. */
enum shd_strategy {
    SHD_ZERO3 = 0,  /* FULL_SHARD: free after forward, fetch again for backward */
    SHD_ZERO2 = 1,  /* SHARD_GRAD_OP: keep from forward to backward */
    SHD_ZERO1 = 2,  /* keep all parameters for the step; return each unit as its backward ends */
    SHD_DDP = 3,    /* keep all parameters for the step; return when the whole backward is done */
    SHD_HYBRID = 4, /* needs replica groups: SHD_ENOTSUP in this version */
};
enum shd_backward_prefetch {
    SHD_PREFETCH_PRE = 0,  /* fetch the next unit before BACKWARD of this one */
    SHD_PREFETCH_POST = 1, /* after it, and after this one is freed, before its gradient returns */
    SHD_PREFETCH_NONE = 2,
};
enum shd_path {
    SHD_PATH_AUTO = 0, /* map where that is possible, else copy, else nccl */
    SHD_PATH_MAP = 1,  /* read and write the owners' memory in place: worker and owners in host
                        * memory, or the worker and one owner on the same GPU */
    SHD_PATH_COPY = 2, /* fixed slots of this process; bytes move on a transfer thread */
    SHD_PATH_NCCL = 3, /* as copy, but from and to owners on other GPUs than the worker's by NCCL:
                        * for GPUs that cannot reach each other's memory */
};

struct shd_policy {
    size_t size; /* sizeof(struct shd_policy) */
    enum shd_strategy strategy;
    uint32_t forward_prefetch; /* units fetched ahead of the one that computes; 0: none */
    enum shd_backward_prefetch backward_prefetch;
    uint32_t max_live_units; /* hard bound on units held at once; 0: none */
    uint64_t max_live_bytes; /* hard bound on their bytes; 0: none */
    enum shd_path path;
    enum shd_dtype grad_dtype; /* of returned gradients: 0 or SHD_F32, SHD_BF16, SHD_F16 */
    uint64_t fetch_delay_ns;   /* copy path: added to each fetch; a slow link, for benches */
};

/* Set before the first gradient or step of the model; default: zero3, one unit ahead both ways,
 * auto path. SHD_EINVAL names field and number; SHD_ERANGE: the bound cannot be met, and the
 * smallest that could; SHD_ENOTSUP: why this path cannot be. */
SHD_API int shd_set_policy(shd_model *m, const struct shd_policy *policy, struct shd_err *e);

/* The path in use, never SHD_PATH_AUTO ("local:" reports SHD_PATH_MAP). */
SHD_API enum shd_path shd_path(const shd_model *m);

/* -- One micro-batch ------------------------------------------------------------------------- */

/* Parameters of unit at the open step, [unit elements] of shd_param_dtype(), read-only. Waits
 * until every owner has published that step. Calls nest: one release per acquire. */
SHD_API int shd_acquire(shd_model *m, uint32_t unit, const void **ret_params, struct shd_err *e);
SHD_API void shd_release(shd_model *m, uint32_t unit);

/* An array of the unit's shape, fp32, for its gradient of micro-batch micro (with accumulate > 1
 * each micro-batch writes its own; the library sums). Contents are
 * undefined, except that gaps between tensors are zero and must stay so: write every element of
 * every tensor. Waits while the owners still hold all slots. Calling it again before shd_return()
 * gives the same array (a tied tensor's second use adds to it). */
SHD_API int shd_grad(shd_model *m, uint32_t micro, uint32_t unit, float **ret_grad,
                     struct shd_err *e);

/* Hand the gradient over. Each (step, micro, unit) counts once; repeats are dropped. Owners sum
 * in ascending micro order per unit, so hand micro-batches in ascending order. */
SHD_API int shd_return(shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e);

/* The unit took no part in this micro-batch: counts as zeros, moves nothing. */
SHD_API int shd_return_none(shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e);

/* Numbers of one micro-batch (its loss, say), at most 4: summed over the step's micro-batches in
 * ascending order and given back by shd_commit(). Call before the micro-batch's last return (with
 * accumulation local:a: before the first of its group); once something is returned the first ones
 * stay. SHD_EINVAL: too late. */
#define SHD_METRICS_MAX 4
SHD_API int shd_report(shd_model *m, uint32_t micro, const double *metrics, uint32_t count,
                       struct shd_err *e);

/* -- One step -------------------------------------------------------------------------------- */

struct shd_update {
    size_t size;       /* sizeof(struct shd_update) */
    double lr;         /* times the group's lr_scale */
    double clip_norm;  /* 0: no clipping; else scale so that the global norm is at most this */
    double loss_scale; /* 0 or 1: none; else gradients are divided by it */
    bool dynamic_loss_scale; /* keep the scale with the model instead: shd_loss_scale() */
    const void *blob;        /* your own state, committed with the step; NULL keeps the last one.
                              * Of several workers' that of the first to commit counts */
    size_t blob_bytes;       /* at most SHD_BLOB_BYTES_MAX */
};
#define SHD_BLOB_BYTES_MAX ((size_t)768 * 1024)

struct shd_result {
    uint64_t step;    /* the step that was committed: the model is at step + 1 now (see over) */
    double grad_norm; /* of the mean gradient, before clipping */
    bool over;        /* it was committed long ago, nothing else is known: this worker was late. Go
                       * on: the model is at the owners' open step now, maybe several further */
    bool skipped;     /* a gradient was inf or NaN: parameters and moments are unchanged */
    double metrics[SHD_METRICS_MAX]; /* sums over the micro-batches */
    uint32_t computed; /* micro-batches this worker computed; by shd_run_step*() only */
    bool left; /* after shd_leave(): this worker did not wait for the step to be committed */
};

/* Dynamic loss scaling (fp16): multiply the loss of the open step's micro-batches by this. Starts
 * at 65,536; a step with a non-finite gradient is skipped and halves it, 2,000 good steps in a row
 * double it. It is derived from the recorded decisions, so it is the same for all workers and is
 * committed with the step. */
SHD_API double shd_loss_scale(const shd_model *m);

/* Wait until all units of all M micro-batches are in, whoever computed them, then commit. Every
 * worker calls it with the same update; the first decision to arrive counts, on all owners. The
 * gradient applied is the mean over micro-batches. Returns once the decision is recorded; the
 * next shd_acquire() waits for the units themselves. */
SHD_API int shd_commit(shd_model *m, const struct shd_update *update, struct shd_result *ret_result,
                       struct shd_err *e);

/* The blob of the last committed step into buf[capacity]; *ret_bytes is its size (0: none). */
SHD_API int shd_blob(shd_model *m, void *buf, size_t capacity, size_t *ret_bytes,
                     struct shd_err *e);

/* -- Running a schedule ---------------------------------------------------------------------- */

/* Instead of the calls above in an order of your own, let the library run a *plan*: an array of
 * operations made from your model and a policy (docs/schedules.md). You supply the compute. */
struct shd_compute {
    void *ctx;
    /* Forward of a unit for micro-batch micro. params: the unit's parameters; those of units it
     * `uses` by shd_params(). Return 0, or nonzero to stop the run with SHD_EINTERNAL. */
    int (*forward)(void *ctx, uint32_t micro, uint32_t unit, const void *params);
    /* Backward: write the unit's gradient to grad ([unit elements], fp32). The gradient of units
     * it uses by shd_grad(): the first user in backward order writes, the others add. */
    int (*backward)(void *ctx, uint32_t micro, uint32_t unit, const void *params, float *grad);
    /* Numbers of the micro-batch, after its backward of the last unit ended the forward part.
     * May be NULL. Fill at most SHD_METRICS_MAX, return how many. */
    uint32_t (*metrics)(void *ctx, uint32_t micro, double *ret_metrics);
    /* For models whose units vary from one micro-batch to the next (mixture of experts, stochastic
     * depth): the unit whose forward runs after `unit` (UINT32_MAX: the first), or UINT32_MAX at
     * the end. Units left out are returned as "took no part"; backward runs in the reverse of what
     * really ran. NULL: all units in order. A departure from the plan is served by a direct fetch,
     * counted (shd_stats.plan_misses), and the plan is recorded anew. */
    uint32_t (*next)(void *ctx, uint32_t micro, uint32_t unit);
};

/* Run one step's micro-batches micros[count] (ascending) of this worker, then commit. In the first
 * step after the model was opened, those that are in at all owners already are left out. */
SHD_API int shd_run_step(shd_model *m, const uint32_t *micros, uint32_t count,
                         const struct shd_compute *compute, const struct shd_update *update,
                         struct shd_result *ret_result, struct shd_err *e);

/* The same without a fixed share: the owners hand out the step's micro-batches one by one (groups
 * of `accumulate`) to whoever asks. Workers may come, go and be slow as they like; call it in a
 * loop while shd_step() is below where you want to be. What a worker had in hand when it died, or
 * holds far longer than others need, is handed to another: if both return it, it counts once. A
 * worker that was overtaken so drops what it computes and goes on with the next step. To leave,
 * stop calling: what is in hand goes back when the session ends. The result's bits are the same. */
SHD_API int shd_run_step_elastic(shd_model *m, const struct shd_compute *compute,
                                 const struct shd_update *update, struct shd_result *ret_result,
                                 struct shd_err *e);

/* For the callbacks of shd_run_step_elastic(): return what is at hand, then end the call without
 * another lease and without the commit, which others will do (shd_result.left). */
SHD_API void shd_leave(shd_model *m);

/* How often, since the model was opened, the plan was wrong about a unit: fetched it and it did
 * not run, or did not fetch it and it did. shd_stats.plan_misses is the sum. */
SHD_API uint64_t shd_unit_misses(const shd_model *m, uint32_t unit);

/* Parameters of a unit that is acquired now (by shd_acquire() or the running plan); else NULL. */
SHD_API const void *shd_params(const shd_model *m, uint32_t unit);

/* -- Saving and restoring -------------------------------------------------------------------- */

/* Save exactly one step of the model, parameters, optimizer state, decision and blob, while
 * training goes on. It becomes DIR/step-000000000100 when everything is on disk, and DIR/LATEST
 * names it; whatever fails or dies before leaves the earlier ones as they were. The daemons write
 * the files, so DIR is a path on their hosts; whoever saves is on one of them or shares the file
 * system. The weights are safetensors that other tools load. docs/checkpoints.md has the format. */
struct shd_checkpoint_options {
    size_t size;         /* sizeof(struct shd_checkpoint_options) */
    uint32_t keep;       /* afterwards remove the oldest ones but so many; 0: remove none */
    uint64_t timeout_ms; /* once the step is reached; 0: 600,000 */
    uint64_t step;       /* this one, or the first possible after it; 0: the one that is open */
};
struct shd_checkpointed {
    uint64_t step, updates;
    uint64_t bytes;  /* of its files */
    char digest[65]; /* as shd_digest() would give it at that step */
    char name[32];   /* "step-000000000100" */
};

/* Save and wait. Errors: SHD_EBUSY another process saves there, or saves this model; SHD_ENOMEM the
 * state changed faster than it could be written and there is no room to keep the rest aside;
 * SHD_EIO the disk; SHD_ETIMEDOUT. */
SHD_API int shd_checkpoint(shd_model *m, const char *dir,
                           const struct shd_checkpoint_options *options,
                           struct shd_checkpointed *ret_saved, struct shd_err *e);

/* The same without waiting, for trainers: begin, then poll now and then (once a step will do) until
 * it is done: SHD_OK with *ret_done, or what went wrong; ret_saved may be NULL. Closing the model
 * breaks it off. */
SHD_API int shd_checkpoint_begin(shd_model *m, const char *dir,
                                 const struct shd_checkpoint_options *options, struct shd_err *e);
SHD_API int shd_checkpoint_poll(shd_model *m, bool *ret_done, struct shd_checkpointed *ret_saved,
                                struct shd_err *e);

/* Make the daemons of a session, however many, open a model from a checkpoint: path is one, or a
 * directory whose LATEST counts. Every byte is checked. With `weights`: parameters alone, by tensor
 * name, from a safetensors file or a directory with model.safetensors or its index, of any tool
 * (F32, BF16, F16, F64); spec_json says what model it is; it starts at step 0. All daemons open it
 * or none. Then shd_model_attach() or _open(). Errors: SHD_EEXIST the model is open; SHD_ENOENT;
 * SHD_EINVAL damaged, or tensors missing or of other shapes, named. */
struct shd_restore_options {
    size_t size; /* sizeof(struct shd_restore_options) */
    bool weights;
    const char *spec_json; /* with weights */
    uint64_t timeout_ms;   /* 0: 3,600,000 */
};
struct shd_restored {
    uint64_t step;
    uint64_t bytes; /* read by all daemons */
    char model[128];
};
SHD_API int shd_restore(shd_session *s, const char *path, const struct shd_restore_options *options,
                        struct shd_restored *ret_restored, struct shd_err *e);

/* -- Looking --------------------------------------------------------------------------------- */

/* SHA-256 over parameters and optimizer state in tensor order, independent of the number of
 * owners (docs/protocol.md has the exact definition), as 64 hex digits and NUL. Waits until no
 * update is running; SHD_ESTEP if the step moved meanwhile. */
SHD_API int shd_digest(shd_model *m, char ret_hex[65], uint64_t *ret_step, struct shd_err *e);

/* Counters of this session since it connected. */
struct shd_stats {
    uint64_t wait_ns;      /* in acquire, grad and commit, waiting for owners or workers */
    uint64_t bytes_mapped; /* address space mapped to owners' memory */
    uint64_t bytes_copied; /* parameters and gradients moved by copying: 0 on the mapped path */
    uint64_t units_acquired;
    uint64_t units_returned;
    uint64_t requests;       /* messages sent */
    uint64_t bytes_fetched;  /* parameters: copied; on the mapped path what a copy would move */
    uint64_t bytes_returned; /* gradients, likewise */
    uint64_t live_bytes_max; /* parameters and gradients held at once, likewise */
    uint64_t plan_misses;    /* fetches no plan foresaw, and planned ones not used */
    uint64_t
        bytes_unpinned; /* owners' host memory that could not be pinned: a GPU copies it slower */
};
SHD_API void shd_stats(const shd_session *s, struct shd_stats *ret_stats);

/* Each daemon's status as one JSON document (schema 1 of docs/protocol.md; /status of its HTTP
 * socket says more), owner by index. The string is yours: free() it. */
SHD_API int shd_status(shd_session *s, uint32_t owner, char **ret_json, struct shd_err *e);

#ifdef __cplusplus
}
#endif

#endif
