/* shd.h: the one public header of libshd, the client of the shardd training-state service.
 *
 * Parameters and optimizer state live in daemons (`shardd`, one per device), not in your training
 * process. A model is cut into *units*, the groups of tensors you want to hold at the same time
 * (typically one per layer). Your process is a *worker*; for each *micro-batch* it acquires a
 * unit's parameters, computes, writes the unit's gradient and returns it to its owners; when all
 * micro-batches of the *step* are in, shd_commit() clips, updates and moves the model on to the
 * next step. shd_run_step() does all that around your callbacks. On one host nothing is copied: the
 * arrays are the owners' memory, mapped side by side. Results do not depend on the number of
 * daemons or workers, to the bit. examples/minimal.c is a whole worker.
 *
 * Threads: a session and its models belong to one thread at a time. The arrays may be read and
 * written by any thread between the calls that hand them out and take them back.
 *
 * fork(): a child (a loader of data, say) has no part in its parent's sessions. Calls refuse them
 * there with SHD_EINVAL, closing them does nothing, and gradient arrays are not mapped.
 *
 * Errors: functions that return int return SHD_OK (0) or a negative code and then fill *e (may be
 * NULL) with a sentence that names the values. Out-parameters are untouched then. A daemon that
 * dies and is started again (its memory was kept for it) is no error: calls wait, attach to it anew
 * and go on; arrays that are handed out stay valid and keep their contents. A wait for who lives,
 * however slow, or for a daemon whose memory somebody keeps, has no end, unless
 * shd_options.timeout_ms or $SHARDD_TIMEOUT sets one; its error names who was waited for. Final for
 * the session are SHD_EGONE: it did not come back in time, or its keeper is gone; SHD_ENOENT,
 * SHD_ESTEP: it came without its state.
 *
 * What _connect and _open return is yours until the matching close; pointers that acquire and grad
 * hand out are borrowed until release and return. Structs with a `size` may grow: zero-initialise,
 * set size to sizeof, set what you care for. So may those that the library fills: it writes as much
 * as their size says, and refuses one larger than its own (SHD_EINVAL).
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
    SHD_ECANCELED = -17, /* shd_options.idle broke the wait off: call again to go on */
    SHD_ERESET = -18,    /* the open step was reset (shd_reset_step()), or the model went back
                          * (shd_model_rewind()): compute it again, at shd_step() */
    SHD_ESTOPPED = -19,  /* a guard has stopped training: shd_model_set() with guard=go-on; or this
                          * is a worker of `shardctl replay`, whose step is made */
    SHD_EMOVED = -20,    /* the model has other owners now (`shardctl reshard`), and this session
                          * cannot go along: open it there */
};
struct shd_err {
    int code;       /* one of enum shd_status */
    char text[256]; /* always terminated */
};
#endif
#ifndef SHD_PUBLIC_DTYPE
#define SHD_PUBLIC_DTYPE
enum shd_dtype { SHD_F32 = 1, SHD_BF16 = 2, SHD_F16 = 3 };
#endif
typedef struct shd_session shd_session;
typedef struct shd_model shd_model;
SHD_API const char *shd_version(void); /* of the library that runs; SHD_VERSION: of this header */
SHD_API const char *shd_status_name(int code); /* "SHD_ESTEP", say; "SHD_UNKNOWN" for others */

/* -- Session --------------------------------------------------------------------------------- */
/* What may be worth a line in a program's log; see shd_options.event. */
enum shd_event_kind {
    SHD_EVENT_WAITS = 1, /* every 10 s of a wait: who it is for */
    SHD_EVENT_GONE = 2,  /* a daemon has gone; calls wait for its successor */
    SHD_EVENT_BACK = 3,  /* and is back, after so many seconds */
    SHD_EVENT_OVERTAKEN =
        4,               /* others have committed `step`: this worker goes on with the open one */
    SHD_EVENT_RESET = 5, /* another worker has reset `step`: this one computes it again */
};
struct shd_event {
    size_t size; /* the library's */
    enum shd_event_kind kind;
    const char *daemon; /* its device, as "cpu0"; "": about no daemon */
    const char *text;   /* one line without its end */
    double seconds;     /* WAITS: so far; BACK: it was away */
    uint64_t step;      /* OVERTAKEN, RESET */
};
struct shd_options {
    size_t size;
    const char *address; /* NULL: $SHARDD_ADDRESS, else where this user's only `shardctl up` or
                          * `run` is, else /run/shardd. Either a runtime directory ("DIR": every
                          * daemon in it, or "DIR?cpu0,cpu1"; "DIR?cpu0+cpu2,cpu3+cpu1": pairs, each
                          * with one slice, as `shardctl host --replicas 2` prints them), or
                          * "local:", owners inside this process: no daemon, same bits. */
    const char *name;    /* shown by `shardctl status`; NULL: the program's name */
    uint32_t slots;      /* gradients in flight to each owner, 1..64; 0: as the plan needs */
    uint32_t threads;    /* "local:" only: threads that apply updates; 0: one */
    uint64_t timeout_ms; /* bound of each wait; 0: $SHARDD_TIMEOUT seconds, else none, but 60,000
                          * for the return of a daemon whose memory nobody keeps */
    const char *device;  /* where your arrays are: NULL or "host", or "cuda:N" */
    /* Every 10 s of a wait: a line without its end that says who it is for, and what to do; and one
     * where another process trains a model with this one's $RANK. NULL: written to stderr. Call
     * nothing of this library from it. */
    void (*waits)(void *ctx, const char *line);
    void *waits_ctx;
    /* Called on the waiting thread at least every 100 ms of every wait, shd_connect()'s too.
     * Nonzero breaks the wait off: the call ends with SHD_ECANCELED, nothing is lost, and the same
     * call goes on where it was (a checkpoint's files are written anew). NULL: none. Call nothing
     * of this library from it. */
    int (*idle)(void *ctx);
    void *idle_ctx;
    /* Called in the middle of calls; *event is valid meanwhile. With it, and without `waits`,
     * nothing is written to stderr. NULL: none. Call nothing of this library from it. */
    void (*event)(void *ctx, const struct shd_event *event);
    void *event_ctx;
    bool reader; /* only looks, shd_pin() above all: no gradients, no steps (SHD_EAUTH) */
};
/* "cuda:N", as the CUDA runtime counts: arrays are addresses of that GPU, in its primary context.
 * The library's own work is done when a call returns. Yours has to be when you hand something back:
 * name the stream that it is on (shd_set_stream()), or synchronise it before shd_return() and
 * shd_release(), and before a call that may wait. While a call runs, launch nothing on the model's
 * arrays: they may be remapped. */

/* Attach to the daemons at an address. They accept their own uid, root, and members of the socket
 * directory's group if it is open to that group. A daemon that the address names, or that left its
 * socket, is waited for as long as timeout_ms says; without a limit up to 10 s, 60 s where its
 * process lives, and without end where it was there before, and its keeper is. Errors: SHD_ENOENT
 * nothing there; SHD_EAUTH refused; SHD_EPROTO another version; SHD_EGONE, SHD_ETIMEDOUT;
 * SHD_ENOTSUP no such GPU, or no kernels. */
SHD_API int shd_connect(const struct shd_options *o, shd_session **ret_session, struct shd_err *e);
/* Detach and free, with its models. Arrays handed out become invalid. NULL is a no-op. */
SHD_API void shd_close(shd_session *s);
SHD_API uint32_t shd_owners(const shd_session *s); /* daemons of this session; "local:" is 1 */

/* -- Model ----------------------------------------------------------------------------------- */
/* Create the model a JSON spec describes, or attach to it if its daemons hold it already; then
 * the spec must be the same one (SHD_ESPEC names the first tensor and field that differ).
 * SHD_ENOENT: a session still puts its start values (shd_model_open_with() waits for it).
 *
 *   { "name": "gpt", "micro_batches": 4, "optimizer": { "kind": "adamw" }, "units": [
 *       { "name": "embed", "tensors": [ { "name": "wte", "shape": [256, 128] } ] },
 *       { "name": "head", "uses": ["embed"], "tensors": [ { "name": "ln", "shape": [128] } ] } ] }
 *
 * docs/protocol.md has every field. List units in forward order: so they are applied and become
 * readable. micro_batches, M: a step is the mean of so many; [[0, 4], [1000, 8]]: 4, from step 1000
 * on 8 (shd_micro_batches() says what the open step has); micro_batches_max: so many can be set by
 * shd_model_set(). accumulate, a, an integer that divides M
 * (1): a worker sums the gradients of micro-batches k a to k a + a - 1 and returns them once.
 * uses: units whose tensors this one reads too (tied weights), returned after the last use. A group
 * may have "optimizer": { "kind": "muon" }, lamb or adafactor; its units are whole at one owner
 * each. */
SHD_API int shd_model_open(shd_session *s, const char *spec_json, shd_model **ret_model,
                           struct shd_err *e);
/* Attach to a model the daemons hold, by name (NULL: the only one there). */
SHD_API int shd_model_attach(shd_session *s, const char *name, shd_model **ret_model,
                             struct shd_err *e);
/* Either of the two, with start values of the program's and with waits. */
struct shd_open_options {
    size_t size;
    const char *spec_json; /* NULL: attach to name */
    const char *name;      /* NULL: the only one */
    /* No such model yet: wait so long for another session to make it, then SHD_ETIMEDOUT. 0: attach
     * without a wait (SHD_ENOENT); with spec_json, wait for a session that is making it as for any
     * other (shd_options.timeout_ms). */
    uint64_t wait_ms;
    /* Start values of a model that no daemon has: of each unit in order, frozen ones too, into
     * values[unit elements] (host memory; each tensor at its shd_tensor.offset_elems, the gaps are
     * the library's). Called in one session only: the first that opens; the others wait, and if it
     * dies the next is asked. Nobody sees the model before its last unit is in. Units come from 0
     * again when a daemon died meanwhile. Call nothing of this session from it. Nonzero: give up,
     * SHD_EINTERNAL. NULL: what the spec says. */
    int (*fill)(void *ctx, uint32_t unit, float *values);
    void *ctx;
};
/* *ret_created (may be NULL): it was made by this call, with `fill`. Errors beside those of _open
 * and _attach: SHD_ENOTSUP a daemon is of an older version; SHD_ETIMEDOUT. */
SHD_API int shd_model_open_with(shd_session *s, const struct shd_open_options *options,
                                shd_model **ret_model, bool *ret_created, struct shd_err *e);
/* Unmap and free the model's client side; the daemons keep the model. NULL is a no-op. */
SHD_API void shd_model_close(shd_model *m);

SHD_API const char *shd_model_name(const shd_model *m);
SHD_API const char *shd_model_spec(shd_model *m); /* canonical JSON, borrowed; NULL: no memory */
SHD_API uint64_t shd_step(const shd_model *m);    /* the open one, as this worker knows */
SHD_API uint32_t shd_micro_batches(const shd_model *m); /* M of the open step */
SHD_API uint32_t shd_accumulate(const shd_model *m);    /* a of the spec: returns per step = M/a */
SHD_API enum shd_dtype shd_param_dtype(const shd_model *m);
SHD_API uint32_t shd_units(const shd_model *m);
SHD_API const char *shd_unit_name(const shd_model *m, uint32_t unit); /* borrowed; NULL: no such */
SHD_API bool shd_unit_frozen(const shd_model *m, uint32_t unit);
SHD_API uint64_t shd_unit_elems(const shd_model *m, uint32_t unit); /* of its array, gaps and all */
struct shd_tensor {
    size_t size;
    const char *name;      /* borrowed from the model */
    uint32_t unit;         /* index of its unit */
    uint64_t offset_elems; /* of its first element in the unit's array; a multiple of 32 */
    uint64_t elems;
    bool statistics; /* Adafactor's, of its unit: the owners' alone, gradients leave it zero */
};
/* By name (SHD_ENOENT: there is none); by index, in spec order. */
SHD_API int shd_tensor_find(const shd_model *m, const char *name, struct shd_tensor *ret_tensor,
                            struct shd_err *e);
SHD_API uint32_t shd_tensors(const shd_model *m);
SHD_API int shd_tensor_get(const shd_model *m, uint32_t index, struct shd_tensor *ret_tensor,
                           struct shd_err *e);

/* From a flat list of tensors to a spec: which of them are fetched together. By layer (names up to
 * their first number, as "h.3"), or by patterns, POSIX extended regular expressions of which the
 * first that matches counts: the matched text is the unit. What nothing claims (embeddings, the
 * head) forms units of neighbours. Frozen tensors get units of their own, which the others use; a
 * tied one is stored once, and the unit it falls into uses the unit of the other. */
struct shd_wrap_tensor {
    size_t size;           /* of each in the list */
    const char *name;      /* unique */
    const uint64_t *shape; /* [rank] */
    uint32_t rank;         /* at most 8; 0: one element */
    uint32_t tied_to;      /* index of the tensor whose second name this is; UINT32_MAX: none */
    bool frozen;
};
struct shd_wrap_rule {
    size_t size;
    const char *model;           /* its name */
    uint32_t micro_batches;      /* 0: 1 */
    uint32_t accumulate;         /* 0: 1 */
    enum shd_dtype publish;      /* 0: fp32 */
    const char *const *patterns; /* [pattern_count] */
    uint32_t pattern_count;      /* 0: by layer */
    uint64_t unit_elems_min;     /* join neighbours until a unit has so many; 0: do not */
    bool sort; /* the list is in no order that means anything (files are sorted by name); else it
                * is in forward order, and stays so */
};
/* *ret_spec_json is the spec, with AdamW, one group and initial values 0, for you to go on from;
 * yours: free() it. Errors name the tensor or pattern: SHD_EINVAL; SHD_ERANGE too many. */
SHD_API int shd_wrap(const struct shd_wrap_tensor *tensors, uint32_t count,
                     const struct shd_wrap_rule *rule, char **ret_spec_json, struct shd_err *e);

/* -- Policy ---------------------------------------------------------------------------------- */
/* How this worker runs its steps: what it holds when, how bytes move. Results do not depend on it,
 * to the bit. docs/schedules.md draws each, `shardctl plan` counts costs. */
enum shd_strategy {
    SHD_ZERO3 = 0, /* FULL_SHARD: free after forward, fetch again for backward */
    SHD_ZERO2 = 1, /* SHARD_GRAD_OP: keep from forward to backward */
    SHD_ZERO1 = 2, /* keep all parameters for the step; return each unit as its backward ends */
    SHD_DDP = 3,   /* keep all parameters for the step; return when the whole backward is done */
};
enum shd_backward_prefetch {
    SHD_PREFETCH_PRE = 0,  /* fetch the next unit before BACKWARD of this one */
    SHD_PREFETCH_POST = 1, /* after it, and after this one is freed, before its gradient returns */
    SHD_PREFETCH_NONE = 2,
};
enum shd_path {
    SHD_PATH_AUTO = 0, /* map where that is possible, else copy, else nccl */
    SHD_PATH_MAP = 1,  /* the owners' memory in place: all in host memory, or one GPU for both */
    SHD_PATH_COPY = 2, /* fixed slots of this process; bytes move on a transfer thread */
    SHD_PATH_NCCL = 3, /* as copy, but by NCCL from and to owners on other GPUs */
};
enum shd_sums { /* of a model with accumulate > 1, who sums the micro-batches of a group */
                SHD_SUMS_OWN = 0, /* the worker that computes them, all of them */
                /* Workers of this host together, that attach by the same directory: all of them
                 * share each group of the host, in ascending order, and its sum is returned once.
                 * Fixed shares alone, in host memory; they have `accumulate` gradients of the model
                 * in common, in /dev/shm. Same bits. */
                SHD_SUMS_HOST = 1,
};
struct shd_policy {
    size_t size;
    enum shd_strategy strategy;
    uint32_t forward_prefetch; /* units fetched ahead of the one that computes; 0: none */
    enum shd_backward_prefetch backward_prefetch;
    uint32_t max_live_units; /* hard bound on units held at once; 0: none */
    uint64_t max_live_bytes; /* hard bound on their bytes; 0: none */
    enum shd_path path;
    enum shd_dtype grad_dtype; /* 0, or what the model's spec says: others are SHD_ESPEC */
    enum shd_sums sums;
};
/* Before the first gradient or step of the model; default: zero3, one unit ahead both ways, auto.
 * SHD_ERANGE names the smallest bound that could be met; SHD_ENOTSUP says why a path cannot be. */
SHD_API int shd_set_policy(shd_model *m, const struct shd_policy *policy, struct shd_err *e);
/* Operations of your own: a plan in JSON, as `shardctl plan --ops` prints one for you to change
 * (docs/schedules.md has the schema). It is checked as shardctl does, and what shd_run_step*() does
 * from here on; the same bits come of it. It takes the place of a policy, but for the path of the
 * last one, which stays; and a policy takes its place. A step of other than its number of
 * micro-batches is its beginning, or the plan over and over again. Where shd_compute.next names
 * units in another order, that is planned by the strategy that the plan is of (zero3 for "own").
 * SHD_EINVAL, SHD_ERANGE name the operation or the field and what it must be; SHD_ESPEC: it is for
 * other units, or another grad_dtype. */
SHD_API int shd_set_plan(shd_model *m, const char *plan_json, struct shd_err *e);
SHD_API enum shd_path shd_path(const shd_model *m); /* in use: never auto; "local:" is map */

/* -- Stream order ---------------------------------------------------------------------------- */
/* On a GPU: from here on the model's calls are in the order of the work on this stream, a
 * cudaStream_t or CUstream of shd_options.device (NULL: its default stream), and nothing has to be
 * synchronised; the callbacks of shd_run_step() need not either. shd_return() and shd_release()
 * come back at once and hold for when all is done that the stream has been given by then: owners
 * are told in whatever call of the model follows that, and shd_commit(), shd_put() and shd_meet()
 * wait for the rest. What shd_acquire() and shd_grad() hand out is for work given from then on;
 * they wait, on the host as ever, for owners, and where the stream is behind by as many gradients
 * as there are slots. shd_reset_step(), shd_unlease() and closing wait for the stream, and drop
 * what owners were not told.
 *
 * Another stream: call it again, before the call that is to be in its order. To go by an event,
 * name a stream that waits for it (cudaStreamWaitEvent()). A stream may be destroyed once another
 * one is named, or the model closed. Work that fails is an error (SHD_EIO) of what is called next,
 * for good. SHD_ENOTSUP: arrays are in host memory; SHD_EINVAL: no stream of that GPU. */
SHD_API int shd_set_stream(shd_model *m, void *cuda_stream, struct shd_err *e);

/* -- One micro-batch, by single calls --------------------------------------------------------- */
/* Who computes which of the step's M micro-batches is yours to say (by rank, for one), here and
 * with shd_run_step(): the step ends when each is in. With shd_run_step_elastic() owners say it. */

/* Parameters of unit at the open step, [unit elements] of shd_param_dtype(), read-only. Waits
 * until every owner has published that step. Calls nest: one release per acquire. */
SHD_API int shd_acquire(shd_model *m, uint32_t unit, const void **ret_params, struct shd_err *e);
SHD_API void shd_release(shd_model *m, uint32_t unit);

/* An array of the unit's shape, fp32, for its gradient of this micro-batch alone (the library sums
 * `accumulate`). Contents are undefined, except that gaps between tensors are zero and must stay
 * so: write every element of every tensor. Waits while the owners still hold all slots. Again
 * before shd_return(): the same array (a tied tensor's second use adds to it). */
SHD_API int shd_grad(shd_model *m, uint32_t micro, uint32_t unit, float **ret_grad,
                     struct shd_err *e);
/* Hand the gradient over. Each (step, micro, unit) counts once; repeats are dropped. Owners sum a
 * unit's in ascending micro order, so hand them over in that order. Of a unit whose group is a mean
 * (docs/protocol.md) it is values, and their mean becomes the unit's. */
SHD_API int shd_return(shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e);
/* The unit took no part in this micro-batch: counts as zeros, moves nothing. */
SHD_API int shd_return_none(shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e);

/* shd_grad(), copy, shd_return() in one call, for gradients that lie in arrays of their own: each
 * tensor of the unit becomes scale times its part (fp32, one rounding), those without a part or
 * with NULL zeros. A slot is taken for the copy alone, so any number of units may be returned late.
 * Host memory only. After SHD_ECANCELED or SHD_ETIMEDOUT it can be called again, alike. */
struct shd_part {
    size_t size;
    uint32_t tensor;        /* index, as shd_tensor_get()'s; of this unit, each once */
    enum shd_dtype dtype;   /* of data */
    const void *data;       /* the tensor's shape, read during the call; NULL: zeros */
    const int64_t *strides; /* of each dimension, in elements; NULL: contiguous */
};
SHD_API int shd_return_parts(shd_model *m, uint32_t micro, uint32_t unit,
                             const struct shd_part *parts, uint32_t count, double scale,
                             struct shd_err *e);

/* Give up all gradients of the open step, everybody's, and begin it again: an exception ended a
 * micro-batch of which units are returned already. What this worker had handed out, leased or
 * reported is dropped, too. Other workers that have returned something learn of it by SHD_ERESET,
 * from whatever call they make next: they, too, compute their micro-batches of the step again
 * (shd_run_step*() does so itself). Exact through kills; repeat it after an error. SHD_ESTEP: the
 * step's commit has begun, or was made: its gradients count, go on with shd_commit(). */
SHD_API int shd_reset_step(shd_model *m, struct shd_err *e);

#define SHD_METRICS_MAX 4
/* Numbers of one micro-batch (its loss, say): summed over the step's in ascending order and given
 * back by shd_commit(). Before its last return (with accumulate > 1: the last of its group). */
SHD_API int shd_report(shd_model *m, uint32_t micro, const double *metrics, uint32_t count,
                       struct shd_err *e);
/* The same, and what they are called, in their order ("loss, accuracy"; printable, 127 bytes at
 * most): of two workers that report others, or in another order, in the same step the second is
 * refused (SHD_EINVAL, from a call that comes later), with both names. */
SHD_API int shd_report_named(shd_model *m, uint32_t micro, const char *names, const double *metrics,
                             uint32_t count, struct shd_err *e);

/* -- One step -------------------------------------------------------------------------------- */
#define SHD_BLOB_BYTES_MAX ((size_t)768 * 1024)
/* Rates of one parameter group for one step; NaN: what the spec (of lr, shd_update) says. */
struct shd_rates { /* without a size: it stays as it is */
    double lr;     /* as it is: not times the group's lr_scale */
    double weight_decay;
    double beta1, beta2; /* SGD: beta1 is the momentum, and beta2 NaN */
};
struct shd_update {
    size_t size;
    double lr;         /* times the group's lr_scale */
    double clip_norm;  /* 0: no clipping; else scale so that the global norm is at most this */
    double loss_scale; /* 0 or 1: none; else gradients are divided by it */
    bool dynamic_loss_scale; /* keep the scale with the model instead: shd_loss_scale() */
    const void *blob;  /* your own state, kept with the step: the first worker's; NULL: as is */
    size_t blob_bytes; /* at most SHD_BLOB_BYTES_MAX */
    /* What the sum of the step's gradients is divided by, before norm and clipping. 0: M; 1 + i:
     * the step's sum of metric i (tokens, samples); where that is not above 0 and finite the step
     * is skipped, as with gradients that are not finite. */
    uint32_t divide_by;
    /* [group_count], in the order of the spec's groups; a schedule of its own for each. NULL, 0:
     * the spec's. SHD_ERANGE, SHD_EINVAL name the group and the rate. */
    const struct shd_rates *groups;
    uint32_t group_count;
};
enum shd_guard { /* rules of the spec's "guard" (docs/states.md) */
                 SHD_GUARD_NONE,
                 SHD_GUARD_NORM_ABOVE,
                 SHD_GUARD_NORM_ZSCORE,
                 SHD_GUARD_LOSS_ZSCORE,
                 SHD_GUARD_UNIT_ABOVE,  /* norm_above of units: cause_unit is which */
                 SHD_GUARD_UNIT_ZSCORE, /* norm_zscore of units, likewise */
};
struct shd_result {
    size_t size;
    uint64_t step;    /* the step that was committed: the model is at step + 1 now (see over) */
    double grad_norm; /* of the mean gradient (divide_by says what that is), before clipping */
    bool over; /* this worker was late, nothing else is known; the model is at the open step */
    bool
        skipped; /* a gradient was inf or NaN, or see guard: parameters and moments are unchanged */
    uint32_t reported; /* micro-batches with metrics; 0: not known (daemons of an older version) */
    double metrics[SHD_METRICS_MAX]; /* sums over the micro-batches */
    uint32_t computed; /* micro-batches this worker computed; by shd_run_step*() only */
    bool left;      /* after shd_leave(): this worker did not wait for the step to be committed */
    bool stopped;   /* and nothing is trained from here on: shd_commit() is SHD_ESTOPPED */
    uint32_t guard; /* enum shd_guard: the rule that skipped the step */
    double guard_value; /* its norm or its loss (which may be NaN), */
    double guard_bound; /* and what that is above */
    bool
        rewound; /* shd_model_rewind(): what was computed counts for nothing, go on at shd_step() */
    uint64_t guard_step; /* rewound: 1 + the step for which the model's guard (with the action
                          * "rewind") has it go back; 0: somebody did. Others go to shd_step(), too;
                          * whoever loads data can leave that step's out. The same step is skipped
                          * where it is above the limit once more. */
    /* Of a step that was skipped for its norm, or for gradients that were not finite: 1 + the unit
     * whose mean gradient has the largest norm, or the first that is not finite; 0: not known. */
    uint32_t cause_unit;
    double cause_norm; /* its norm; infinite: not finite */
    /* Of a model with guard_audit: 1 + the first of the micro-batches (of accumulate) that brought
     * most of that unit's sum of squares, or what is not finite; 0: not known, as where a daemon
     * was restarted in the step. shd_history() has whose it was. */
    uint32_t cause_micro;
    double cause_share; /* so much of the sum of squares */
};
/* Wait until all units of all M micro-batches are in, then apply their mean gradient. Every worker
 * calls it with the same update; the first decision to arrive counts, on all owners. Returns once
 * that is recorded; the next shd_acquire() waits for the units themselves. */
SHD_API int shd_commit(shd_model *m, const struct shd_update *update, struct shd_result *ret_result,
                       struct shd_err *e);
/* Dynamic loss scaling (fp16): multiply the loss of the open step by this, alike for all workers.
 * From 65,536; a non-finite gradient skips the step and halves it, 2,000 good steps double it. */
SHD_API double shd_loss_scale(const shd_model *m);
/* The blob of the last committed step into buf[room]; *ret_bytes is its size (0: none). */
SHD_API int shd_blob(shd_model *m, void *buf, size_t room, size_t *ret_bytes, struct shd_err *e);

/* -- Changing what is trained ------------------------------------------------------------------ */
/* Change hyperparameters of a model that trains, with its moments kept: "lr_scale.GROUP=0.5
 * weight_decay.GROUP=0.1 betas.GROUP=0.9,0.95 eps.GROUP=1e-6 clip_norm=1 micro_batches=8", with the
 * spec's names of groups; of SGD momentum.GROUP; beta1 and beta2 alone, too. A key without a group:
 * of all groups. "spec" for a value: not set any more; "now": what waits of it for its step is
 * given up (with `from`: of that step). Or JSON: {"lr_scale.GROUP": 0.5, "betas.GROUP": [0.9,
 * 0.95]}, null for "spec". "guard=go-on", alone: what a guard has stopped is trained again. What is
 * set is in force from one step on, at all owners, whoever commits, through kills and checkpoints.
 * It comes before what the spec and struct shd_update say; lr_scale takes the place of the spec's,
 * and multiplies a rate that the update gives for the group. Workers still open the model with its
 * spec. micro_batches is M of a step, at most the spec's micro_batches_max and a multiple of a;
 * each step has shd_micro_batches(), and leases, accordingly.
 *
 * from: the step to change it from; 0: the first that can be, the open one, or the next where that
 * is about to be committed, or micro_batches are changed. *ret_from (may be NULL): that step, or an
 * earlier one where all of it was so already. Several can wait, each for its step. Errors:
 * SHD_EINVAL what cannot be changed, with the reason, or no such setting or group; SHD_ERANGE a
 * value; SHD_ESTEP `from` is over; SHD_EBUSY too many wait; SHD_ENOTSUP a daemon or a worker of an
 * older build, or a model that was opened by one. */
SHD_API int shd_model_set(shd_model *m, const char *settings, uint64_t from, uint64_t *ret_from,
                          struct shd_err *e);
/* What is set: {"now": {"lr_scale.decay": {"value": 0.5, "from": 10}}, "next": null or {"from":
 * 100, "settings": {"clip_norm": 1.0}}, and where more wait "later": [{"from": 200, ...}]}.
 * *ret_json is yours: free() it. */
SHD_API int shd_settings(shd_model *m, char **ret_json, struct shd_err *e);

/* -- History ---------------------------------------------------------------------------------- */
/* What a committed step came to, whoever committed it. Owners keep the last 65,536 of them, through
 * restarts; a model that was restored has those from its checkpoint's step on. */
struct shd_step_row {
    size_t size;      /* of the first in a list, by the caller: that of each */
    uint64_t step;    /* that was committed: as in shd_result */
    uint64_t time_ns; /* when, since 1970 */
    double metrics[SHD_METRICS_MAX];
    uint32_t metric_count;
    bool skipped;                     /* a gradient was not finite, it was a put, or see guard */
    uint16_t reported;                /* as in shd_result */
    double grad_norm, lr, loss_scale; /* loss_scale: at least 1 */
    uint32_t guard;                   /* enum shd_guard: the rule that skipped it */
    double guard_bound;               /* rounded to fp32: what its norm or loss is above */
    /* As in shd_result, of the last 512 steps; else 0. */
    uint32_t cause_unit, cause_micro;
    double cause_norm, cause_share;
    uint32_t cause_pid;    /* of the worker that sent the micro-batch; 0: not known, */
    uint32_t cause_rank;   /* 1 + its $RANK; 0: it has none, */
    char cause_worker[80]; /* and its name (shd_options.name) */
};
/* Up to room rows from step *from on, ascending, of owner 0; *from becomes the step to go on with.
 * No rows: there are none yet. */
SHD_API int shd_history(shd_model *m, uint64_t *from, struct shd_step_row *rows, uint32_t room,
                        uint32_t *ret_count, struct shd_err *e);

/* -- Running a schedule ---------------------------------------------------------------------- */
/* Instead of the calls above in an order of your own, let the library run a *plan*, made from your
 * model and a policy (docs/schedules.md). You supply the compute, and keep what forward leaves for
 * backward: a micro-batch's backwards follow its forwards before the next one begins, so one set of
 * activations will do. It lives until the next first forward: a micro-batch may be dropped. */
struct shd_compute {
    size_t size;
    void *ctx;
    /* Forward of a unit for micro-batch micro. params: the unit's parameters; those of units it
     * `uses` by shd_params(). Return 0, or nonzero to stop the run with SHD_EINTERNAL. */
    int (*forward)(void *ctx, uint32_t micro, uint32_t unit, const void *params);
    /* Write the unit's gradient to grad ([unit elements], fp32; NULL: it is frozen). That of units
     * it uses by shd_grad(): the first user in backward order writes, the others add. */
    int (*backward)(void *ctx, uint32_t micro, uint32_t unit, const void *params, float *grad);
    /* NULL, or fill in at most SHD_METRICS_MAX and return how many; after the first backward. */
    uint32_t (*metrics)(void *ctx, uint32_t micro, double *ret_metrics);
    /* NULL: all units in order. Else (mixture of experts, stochastic depth) the unit whose forward
     * runs after `unit` (UINT32_MAX: the first), or UINT32_MAX at the end. Units left out are
     * returned as "took no part"; backward runs in reverse. What no plan foresaw is fetched
     * directly and counted (shd_stats.plan_misses), and the plan is recorded anew. */
    uint32_t (*next)(void *ctx, uint32_t micro, uint32_t unit);
};

/* Run one step's micro-batches micros[count] (ascending), this worker's share, then commit. In the
 * first step after the model was opened, those that are in at all owners already are left out. */
SHD_API int shd_run_step(shd_model *m, const uint32_t *micros, uint32_t count,
                         const struct shd_compute *compute, const struct shd_update *update,
                         struct shd_result *ret_result, struct shd_err *e);
/* The same without a fixed share: the owners hand out the step's micro-batches one by one (groups
 * of `accumulate`) to whoever asks; call it while shd_step() is below where you want to be. What a
 * worker had in hand when it died or left, or holds far longer than others need, is handed to
 * another: it counts once, and who was overtaken goes on with the next step. Same bits. */
SHD_API int shd_run_step_elastic(shd_model *m, const struct shd_compute *compute,
                                 const struct shd_update *update, struct shd_result *ret_result,
                                 struct shd_err *e);
/* In its callbacks: return what is at hand, then end the call without another lease and without
 * the commit, which others will do (shd_result.left). */
SHD_API void shd_leave(shd_model *m);

/* -- Work by lease ---------------------------------------------------------------------------- */
/* What shd_run_step_elastic() does, by single calls, under any policy: lease, compute and return,
 * lease again, and shd_commit() when all is in or the step is over. Same bits. */
enum shd_lease_what {
    SHD_LEASE_MICRO = 0,   /* compute *ret_micro to *ret_micro + shd_accumulate() - 1, return all */
    SHD_LEASE_ALL_IN = 1,  /* nothing is left of the step: commit it */
    SHD_LEASE_OVER = 2,    /* others have committed it: shd_commit() tells how it ended */
    SHD_LEASE_NOTHING = 3, /* more than what is leased here: return that first */
};
/* Ask for work of the open step. Waits while all that is left is at other workers, for one of them
 * may die; not while something leased before is not returned yet (SHD_LEASE_NOTHING). Several may
 * be leased at once: to load their data ahead. Of a model with verify_every gradients of what is
 * not leased are refused (SHD_EINVAL): nobody else would compute them. */
SHD_API int shd_lease(shd_model *m, enum shd_lease_what *ret_what, uint32_t *ret_micro,
                      struct shd_err *e);
/* Give back a leased micro-batch (its group) that will not be computed: this worker leaves, failed,
 * or was overtaken (shd_acquire() says SHD_ESTEP). Its arrays that are handed out are dropped; what
 * was returned of it counts. Nothing leased: no more than that. */
SHD_API int shd_unlease(shd_model *m, uint32_t micro, struct shd_err *e);
/* Was micro-batch micro of the open step in at all owners when the model was opened? A worker with
 * a fixed share leaves it out, for a predecessor has returned it. One whose gradients still waited
 * in slots for those of earlier micro-batches was not: a daemon that is killed then has lost them.
 * Whoever returns it again does work that is dropped where it was not needed. */
SHD_API bool shd_is_in(const shd_model *m, uint32_t micro);
SHD_API uint64_t shd_unit_misses(const shd_model *m, uint32_t unit); /* its shd_stats.plan_misses */
/* Parameters of a unit that is acquired now (by shd_acquire() or the running plan); else NULL. */
SHD_API const void *shd_params(const shd_model *m, uint32_t unit);

/* -- Saving and restoring -------------------------------------------------------------------- */
/* Save exactly one step of the model while training goes on, as DIR/step-000000000100, which
 * DIR/LATEST names when everything is on disk; whatever fails before leaves the earlier ones as
 * they were. The daemons write: DIR is a path on their hosts, which the caller has to see as well.
 * The weights are safetensors (docs/checkpoints.md). */
struct shd_checkpoint_options {
    size_t size;
    uint32_t keep;       /* afterwards remove the oldest ones but so many; 0: remove none */
    uint64_t timeout_ms; /* once the step is reached; 0: 600,000 */
    uint64_t step;       /* this one, or the first possible after it; 0: the one that is open */
};
struct shd_checkpointed {
    size_t size;
    uint64_t step, updates, bytes; /* bytes: of its files */
    char digest[65];               /* as shd_digest() would give it at that step */
    char name[32];                 /* "step-000000000100" */
};
/* Save and wait. Errors: SHD_EBUSY another one saves there, or this model; SHD_EEXIST DIR holds
 * steps later than the model's: another run's; SHD_ENOMEM no room for what changed before it was
 * written; SHD_EIO the disk; SHD_ETIMEDOUT. */
SHD_API int shd_checkpoint(shd_model *m, const char *dir,
                           const struct shd_checkpoint_options *options,
                           struct shd_checkpointed *ret_saved, struct shd_err *e);
/* Without waiting: begin, then poll (once a step will do) until *ret_done, or what went wrong;
 * ret_saved may be NULL. Closing the model breaks it off. */
SHD_API int shd_checkpoint_begin(shd_model *m, const char *dir,
                                 const struct shd_checkpoint_options *options, struct shd_err *e);
SHD_API int shd_checkpoint_poll(shd_model *m, bool *ret_done, struct shd_checkpointed *ret_saved,
                                struct shd_err *e);

/* Make the daemons, however many, all or none, open a model from a checkpoint: path is one, or a
 * directory whose LATEST counts. Every byte is checked. With `weights`: the parameters of
 * spec_json's model, by tensor name, from a safetensors file or a directory with model.safetensors
 * or its index, of any tool (F32, BF16, F16, F64), at step 0. Then shd_model_attach() or _open().
 * With `replace` a model that is open gives way to it; the daemons end for that, and their keepers
 * start successors, which have it. Other models go on; sessions that have this one open end.
 * Errors: SHD_EEXIST the model is open; SHD_EBUSY it is to be replaced, and this session has it
 * open, or somebody trains or saves it, without `force`; SHD_ENOTSUP likewise, and there are no
 * keepers; SHD_ENOENT; SHD_EINVAL damaged, or tensors missing or of other shapes, named. */
struct shd_restore_options {
    size_t size;
    bool weights;
    const char *spec_json; /* with weights; of a checkpoint NULL, or its own but for tiles */
    uint64_t timeout_ms;   /* 0: 3,600,000 */
    bool replace;          /* also where the model is open: then nobody may be training it */
    bool force;            /* with replace: also where somebody trains or saves it: that ends */
};
struct shd_restored {
    size_t size;
    uint64_t step;
    uint64_t bytes; /* read by all daemons */
    char model[128];
};
SHD_API int shd_restore(shd_session *s, const char *path, const struct shd_restore_options *options,
                        struct shd_restored *ret_restored, struct shd_err *e);

/* Drop a model: it is gone at all its owners or, where this fails, at none, whatever dies
 * meanwhile, and its memory is given back. Sessions that have it open end with SHD_ENOENT and a
 * sentence, readers as well; what they have mapped stays readable. Other models go on. `force`:
 * also where somebody trains, saves or digests it. The same again where a daemon was away: it goes
 * on. Errors: SHD_ENOENT there is no such model; SHD_EBUSY somebody trains, saves or digests it, or
 * it is open in this session; SHD_ESPEC these are not the daemons that have it, in their order;
 * SHD_ENOTSUP a daemon of an older version; SHD_ETIMEDOUT: dropped, when the text says so, but not
 * all memory is given back. */
struct shd_drop_options {
    size_t size;
    bool force;
};
SHD_API int shd_model_drop(shd_session *s, const char *name, const struct shd_drop_options *options,
                           struct shd_err *e);

/* Make a second model, `name`, of what m is at its open step: the same spec but for the name, the
 * same parameters, moments, counts, decision and blob, at all owners or, where this fails, at none.
 * Training of m goes on, and waits for as long as the owners copy its state in memory; nothing is
 * written to disk. Memory as for m is needed; parameters of frozen units are given back then, where
 * both can have one copy of them (docs/states.md). *ret_step (may be NULL): the step.
 * Both go on from there by themselves. The history is not copied. Then shd_model_open() or
 * _attach(). Errors: SHD_EEXIST there is a model of that name; SHD_ENOENT a session is making one;
 * SHD_ENOMEM; SHD_ENOTSUP a daemon of an older version; SHD_EINVAL the name; SHD_ESTEP steps are
 * too quick. */
SHD_API int shd_model_fork(shd_model *m, const char *name, uint64_t *ret_step, struct shd_err *e);
/* The same of another step, and with another setting, from its first step on:
 *
 * exact   as of `step` and no other: the open one, or one of which all owners have a snapshot
 *         (below). What is set is as it was then. SHD_ESTEP tells which steps there are.
 * set     what the fork has that m has not: settings as shd_model_set() takes, and fields of the
 *         spec that lay out no array: micro_batches, accumulate, verify_every, publish, grad_dtype,
 *         guard, eps, ema, ema_warmup; "micro_batches=8 lr_scale.decay=0.5 publish=bf16", or a JSON
 *         object. Borrowed. NULL: nothing.
 *
 * Errors beside those: SHD_EINVAL, SHD_ERANGE `set`; SHD_EBUSY other settings wait for a later
 * step. */
struct shd_fork_options {
    size_t size;
    bool exact;
    uint64_t step; /* with exact */
    const char *set;
};
SHD_API int shd_model_fork_with(shd_model *m, const char *name,
                                const struct shd_fork_options *options, uint64_t *ret_step,
                                struct shd_err *e);

/* Snapshots: exactly one step (parameters, moments, counts, the last decision, the blob, what is
 * set), kept in the owners' memory while training goes on, through restarts of daemons. Each takes
 * as much memory as the state (docs/states.md). Of all that there are the last `keep` stay, 2 at
 * first. */
#define SHD_SNAPSHOTS_MAX 8
struct shd_snapshot_row {
    size_t size; /* of the first in a list, by the caller: that of each */
    uint64_t step;
    uint64_t bytes;   /* of all owners */
    uint64_t time_ns; /* when, since 1970 */
};
/* Keep the open step, or the first possible after it, which *ret_step (may be NULL) is. Errors:
 * SHD_ENOMEM the owners have no room; SHD_ENOTSUP "local:", a daemon of an older version, or a
 * model that was opened by one. */
SHD_API int shd_snapshot(shd_model *m, uint64_t *ret_step, struct shd_err *e);
/* From here on keep each step that is a multiple of `every` (0: none by itself), and the last
 * `keep` of all, at most SHD_SNAPSHOTS_MAX - 1 (0: as it is). */
SHD_API int shd_snapshot_every(shd_model *m, uint64_t every, uint32_t keep, struct shd_err *e);
/* Those that all owners have, ascending: up to room rows; *ret_count of them there are. */
SHD_API int shd_snapshots(shd_model *m, struct shd_snapshot_row *rows, uint32_t room,
                          uint32_t *ret_count, struct shd_err *e);
/* Go back to a snapshot, at all owners or, where this fails, at none: the model is at step `to`
 * (SHD_REWIND_LATEST: that of the last one) as it was then, and the history after it is gone.
 * Workers go on without a restart: shd_commit() and shd_run_step*() say `rewound`, other calls
 * SHD_ERESET; shd_step() is where they are then, and what they had of the step before counts for
 * nothing. What readers have pinned stays. Exact through kills; repeat it after an error. Errors:
 * SHD_ENOENT there is no such snapshot; SHD_ESTEP other sessions rewind it; SHD_EBUSY a daemon is
 * being drained; SHD_ENOTSUP as shd_snapshot(), or a worker of an older build, or one
 * on the path nccl, trains it. */
#define SHD_REWIND_LATEST UINT64_MAX
SHD_API int shd_model_rewind(shd_model *m, uint64_t to, uint64_t *ret_step, struct shd_err *e);

/* -- Looking --------------------------------------------------------------------------------- */
/* SHA-256 of parameters and optimizer state, the same for any number of owners (docs/protocol.md),
 * as 64 hex digits and NUL. Waits until no update runs; SHD_ESTEP if the step moved meanwhile. */
SHD_API int shd_digest(shd_model *m, char ret_hex[65], uint64_t *ret_step, struct shd_err *e);

/* What the owners hold of a unit: [unit elements], fp32, into host memory. Masters have all bits
 * also where workers read bf16. As of *ret_step, the open step, after *ret_updates updates of the
 * unit (the t of Adam's bias correction); either may be NULL. Waits until no update runs. Several
 * units are of one step when ret_step says so: ask between commits. SHD_EINVAL: there is no such
 * moment. */
enum shd_array {
    SHD_PARAMS = 0,
    SHD_MOMENT1 = 1,
    SHD_MOMENT2 = 2,
    SHD_GRADIENT = 3, /* with the next, shd_tensor_stats() and _values() alone */
    SHD_UPDATE = 4,
    SHD_EMA = 5, /* the parameters' moving average, of a model with "ema" in its spec */
};
SHD_API int shd_get(shd_model *m, uint32_t unit, enum shd_array array, float *ret_values,
                    uint64_t *ret_step, uint64_t *ret_updates, struct shd_err *e);

/* What a tensor's values come to, over all its owners, while training goes on: each counts its part
 * beside its work, no element leaves it, no worker waits. Of one step and the same bits for any
 * number of owners. Beside the arrays of shd_get():
 *
 *   SHD_GRADIENT  the sum of what was returned, as the owners hold it: not divided by the
 *                 micro-batches, loss scale and clipping in it. Of the open step so far, as soon as
 *                 one micro-batch is in; before that of the last committed one. of_step and
 *                 micro_batches say which. SHD_ENOENT: it holds neither
 *   SHD_UPDATE    by how much the last committed step changed the parameters: from the moments and
 *                 rates that it was made with (kernels/delta.h has the formula), for AdamW, Adam,
 *                 and SGD with plain momentum. SHD_ENOTSUP: of other optimizers, and from
 *                 moments in 8 bits, this cannot be told. SHD_ENOENT: the step was skipped or a
 *                 put, or the unit frozen, a mean or idle
 *
 * Waits until no update runs, and counts again where the model went on meanwhile: SHD_EBUSY when it
 * always does. */
#define SHD_STATS_BINS      277 /* bin i: magnitudes from 2^(i - 149) up to twice that */
#define SHD_STATS_QUANTILES 7   /* 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99 */
struct shd_tensor_stats {
    size_t size;
    uint64_t step, updates; /* as shd_get() */
    uint64_t of_step;       /* SHD_GRADIENT, with the next */
    uint64_t micro_batches; /* in the sum, from the first one on; all of them: the whole step's */
    uint64_t elems, zeros, nans, infs;
    double min, max, mean, rms; /* of the finite ones; NaN: there is none */
    double update_ratio; /* SHD_UPDATE: the update's norm over that of the parameters after it */
    double quantiles[SHD_STATS_QUANTILES]; /* to a bin, linear inside */
    uint64_t below[SHD_STATS_BINS];        /* zero, by bins; */
    uint64_t above[SHD_STATS_BINS];        /* zeros and what is not finite are in none */
};
SHD_API int shd_tensor_stats(shd_model *m, const char *name, enum shd_array array,
                             struct shd_tensor_stats *ret_stats, struct shd_err *e);
/* Elements first to first + elems - 1 of a tensor, at most SHD_VALUES_MAX, of one step: as above.
 */
#define SHD_VALUES_MAX 131072
SHD_API int shd_tensor_values(shd_model *m, const char *name, enum shd_array array, uint64_t first,
                              uint64_t elems, float *ret_values, uint64_t *ret_step,
                              struct shd_err *e);

/* What units came to in a step, over all owners, beside training: no worker sends or waits for
 * anything. Owners know the last 255 steps (fewer of models with more than 370 units, one at least)
 * that they have seen since they were started. The same bits for any number of owners. */
#define SHD_LAST_STEP UINT64_MAX
struct shd_unit_stats { /* NaN: not known, or it has none; infinite: not finite */
    size_t size;
    double grad_norm; /* of its mean gradient, before clipping */
    /* Of its parameters, and the norm of its update over that: as of measured_step. */
    double weight_norm, update_ratio;
};
struct shd_unit_step {
    size_t size;
    uint64_t step;
    uint64_t measured_step; /* each 8th is: the last one up to the step */
    bool skipped;
    uint32_t guard; /* enum shd_guard: the rule that skipped it */
};
/* Units first to first + count - 1 in that step, or the last one that all owners know. ret_stats
 * [count]: the first one's size counts for all. ret_step may be NULL. Errors: SHD_ERANGE no such
 * units; SHD_ENOENT the step is not over, or an owner does not know it (any more); SHD_ENOTSUP
 * "local:", or a daemon of an older build. */
SHD_API int shd_unit_stats(shd_model *m, uint64_t step, uint32_t first, uint32_t count,
                           struct shd_unit_stats *ret_stats, struct shd_unit_step *ret_step,
                           struct shd_err *e);

/* Replace what the owners hold: fp32 masters (what workers read follows) or moments, of one unit or
 * of many, all of it at all owners or nothing, whatever is killed meanwhile. A put is a step of its
 * own: it takes the place of the open one, of which nothing may be returned yet, and the model goes
 * on to the next; its gradients are none, shd_step_row.skipped is set. So a worker that has read
 * the parameters of before cannot have its gradient counted: its commit says `over`. Where several
 * workers train, each calls it between the same two steps, with the same values: the first counts.
 * Where a sample's place depends on the step, take shd_step() - shd_puts(). */
enum shd_put_bits {
    SHD_PUT_PARAMS = 1,
    SHD_PUT_MOMENT1 = 2,
    SHD_PUT_MOMENT2 = 4,
    SHD_PUT_EMA = 32, /* without it the average stays what it is, whatever is put */
};
struct shd_put_options {
    size_t size;
    const uint8_t *arrays; /* [shd_units()]: of each unit what is put: SHD_PUT_ bits, or 0 */
    /* Write that array of that unit: values[unit elements], host memory, each tensor at its
     * shd_tensor.offset_elems. Called for each, unit by unit; from the first again when a daemon
     * died meanwhile. Call nothing of this session from it. Nonzero: give up, SHD_EINTERNAL, and
     * nothing is put. */
    int (*fill)(void *ctx, uint32_t unit, enum shd_array array, float *values);
    void *ctx;
    bool set_updates; /* let so many updates count as applied: the t of Adam's bias correction */
    uint64_t updates;
    const uint64_t *unit_updates; /* [shd_units()]: of each unit so many; of one that is not trained
                                   * it says nothing. NULL: `updates` of all */
};
/* *ret_counts (may be NULL): these values are there; else another worker's put was first, and its
 * are. Errors: SHD_EBUSY gradients of the step are in, or a unit is acquired here; SHD_ESTEP other
 * workers committed the step; SHD_EINVAL an array that a unit does not have; SHD_ENOMEM the owners
 * have no room to keep both for a moment; SHD_ENOTSUP unit_updates at daemons of an older build, or
 * of a model that was opened by one. */
SHD_API int shd_put(shd_model *m, const struct shd_put_options *options, bool *ret_counts,
                    struct shd_err *e);
SHD_API uint64_t shd_puts(const shd_model *m); /* committed steps that were puts */
/* Wait until so many workers, this one included, wait so in the open step: what each has read until
 * here no put of the others has replaced. Nobody waits once something of the step was returned, by
 * a worker that does not come (it was started again behind this point), or once the step is over.
 * Errors: SHD_ERESET as shd_commit(); SHD_ENOTSUP a daemon of an older version. */
SHD_API int shd_meet(shd_model *m, uint32_t workers, struct shd_err *e);

/* -- Merging now and then ---------------------------------------------------------------------- */
/* Local SGD, DiLoCo: groups of workers train a model each, on daemons of their own, and now and
 * then an *outer* model, which all groups reach, takes what each has changed, by SGD with
 * Nesterov's momentum; its parameters become theirs, moments stay. Of a group's steps each multiple
 * of every + 1, step 0 too, is a merge (a put) in place of training. All of it is in the two
 * models' steps: whoever is killed, wherever, begins again and changes no bit. docs/local-steps.md.
 */
struct shd_merge_options {
    size_t size;
    uint64_t every;         /* steps of training between two merges, > 0 */
    uint32_t group, groups; /* this one, from 0, of so many when the outer model was made */
    uint64_t joined;        /* a group that came later: the outer's step at its step 0 */
    double lr, momentum;    /* the outer optimizer's; 0: 0.7, 0.9 */
    bool average;           /* instead: the mean of the groups' parameters */
    bool follows;           /* another worker of this group merges: wait until it has */
};
/* Make or open the outer model (name NULL: the inner's with ".outer") of inner's tensors, in a
 * session of its own, with host arrays. Its start values are those of whoever opens it first. */
SHD_API int shd_outer_open(shd_session *s, shd_model *inner, const char *name,
                           const struct shd_merge_options *merge, shd_model **ret_outer,
                           struct shd_err *e);
/* Call it before each step, all workers of a group with the same values: merges, if the open step
 * is one, and waits for the other groups (*ret_merged, may be NULL). outer: NULL with `follows`.
 * Where several workers merge, the first counts. After SHD_ECANCELED call it again. Errors beside
 * those of its parts: SHD_ESTEP the two models are not at steps of one training; SHD_ERANGE the
 * outer model's micro-batches (shd_model_set()) are fewer groups; SHD_ESPEC other tensors. */
SHD_API int shd_merge(shd_model *inner, shd_model *outer, const struct shd_merge_options *merge,
                      bool *ret_merged, struct shd_err *e);

/* Whose parameters an address lies in, mapped ones of this process: the model, the tensor and which
 * of its elements (behind the last: a gap); NULL: nobody's. Reads pointers and takes no lock, so a
 * signal handler may call it where no other thread opens or closes anything just then. */
SHD_API shd_model *shd_what(const void *address, struct shd_tensor *ret_tensor, uint64_t *ret_elem);
/* A write to parameters, which are mapped read-only, ends a process by SIGSEGV. From here on such a
 * process says first, on stderr, which tensor it was; then it ends as it would have, through a
 * handler that was there before, if any. Again: on top of one that was set since. SHD_EIO. */
SHD_API int shd_explain_writes(struct shd_err *e);

/* -- Reading while others train --------------------------------------------------------------- */
/* The step whose parameters a unit has; UINT64_MAX while they are being changed. What was read in
 * place between two calls with the same answer (but that one) is whole: a seqlock. */
SHD_API uint64_t shd_unit_version(const shd_model *m, uint32_t unit);
/* Copy the parameters of all units, all of one step, which is *ret_step, while other workers go on:
 * to[unit] takes elements up to the end of the unit's last tensor, of shd_param_dtype(); NULL
 * leaves the unit out. Does not move this worker's step. Begins again where others were quicker:
 * SHD_EBUSY when they always are. SHD_ENOTSUP: owners' memory is a GPU's. */
SHD_API int shd_read_step(shd_model *m, void *const *to, uint64_t *ret_step, struct shd_err *e);

/* Pin a step: what owners publish of all units, of exactly that step, is kept for this session to
 * read in place, however others train on, stop or die; shd_acquire() has the open step alone.
 * Owners copy it beside training, which waits for no reader, also not for one that is stopped.
 * docs/states.md says what it costs: memory as of all parameters once more, while anybody has the
 * step pinned. Pins of one step are shared. A session has one of a model: the next takes the place
 * of the last, whose arrays are void from the call on. A pin says nothing of gradients: resets of
 * the open step do not change it, and a put is a step like others. */
struct shd_pin_options {
    size_t size;
    uint64_t step;       /* this one, or the first possible after it; 0: the latest */
    uint64_t every;      /* of those, only multiples of it; 0: any */
    bool exact;          /* this one, and no other: SHD_ESTEP where it is over */
    bool wait;           /* where two other steps are pinned: for one to go; else SHD_EBUSY */
    uint64_t timeout_ms; /* of the wait for a step to come; 0: without end */
    bool ema;            /* not the parameters but their moving average, in the same type; of units
                          * that have none (frozen ones, means) the parameters */
};
/* Wait until all owners have it, and map it. NULL: the latest. To follow training, let `from` be
 * the step after the last one. Errors, after which nothing is pinned: SHD_ENOMEM owners have no
 * room, with the numbers; SHD_ETIMEDOUT; SHD_ENOTSUP "local:", or a daemon of an older version;
 * SHD_EINVAL `ema` of a model that has none. */
SHD_API int shd_pin(shd_model *m, const struct shd_pin_options *options, uint64_t *ret_step,
                    struct shd_err *e);
/* Of the pinned step: [unit elements] of shd_param_dtype(), read-only, in host memory. Borrowed
 * until shd_unpin(), the next shd_pin(), or closing. NULL: nothing is pinned, or no such unit. */
SHD_API const void *shd_pinned(const shd_model *m, uint32_t unit);
SHD_API void shd_unpin(shd_model *m); /* nothing pinned: a no-op */

/* Counters of this session since it connected. */
struct shd_stats {
    size_t size;
    uint64_t wait_ns;      /* in acquire, grad and commit, waiting for owners or workers */
    uint64_t bytes_mapped; /* address space mapped to owners' memory */
    uint64_t bytes_copied; /* parameters and gradients: 0 on the mapped path with fp32 gradients
                            * and accumulate 1 (else they are converted or summed here first) */
    uint64_t units_acquired, units_returned;
    uint64_t requests;       /* messages sent */
    uint64_t bytes_fetched;  /* parameters: copied; on the mapped path what a copy would move */
    uint64_t bytes_returned; /* gradients, likewise */
    uint64_t live_bytes_max; /* parameters and gradients held at once, likewise */
    uint64_t plan_misses;    /* fetches no plan foresaw, and planned ones not used */
    uint64_t bytes_unpinned; /* owners' host memory that could not be pinned: slower to a GPU */
};
SHD_API int shd_stats(const shd_session *s, struct shd_stats *ret_stats, struct shd_err *e);

/* Each daemon's status as one JSON document (docs/status.md; of "local:" device, kernels and models
 * alone), owner by index. The string is yours: free() it. */
SHD_API int shd_status(shd_session *s, uint32_t owner, char **ret_json, struct shd_err *e);

#ifdef __cplusplus
}
#endif
#endif
