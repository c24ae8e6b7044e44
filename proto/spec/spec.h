/* A model's description: its units, tensors, parameter groups and optimizer, parsed once from
 * JSON and the same struct in daemons, workers and tools.
 *
 * JSON (client/shd.h shows an example; docs/protocol.md lists every field) is what users write
 * and what OpenModel carries or points to. Everything is checked here: names, shapes, limits,
 * references; errors name the JSON path ("units[3].tensors[0].shape") and the value. Unknown fields
 * are errors: a misspelt option must not be dropped in silence.
 */
#ifndef SHD_SPEC_H
#define SHD_SPEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/dtype.h"
#include "proto/base/status.h"
#include "proto/spec/layout.h"
#include "proto/spec/optimizer.h"

#define SPEC_JSON_BYTES_MAX ((size_t)64 << 20)
#define SPEC_MESSAGE_BYTES_MAX                                                 \
    ((size_t)768 * 1024)          /* more take a segment: share/spec_segment.h \
                                   */
#define SPEC_NAME_BYTES_MAX  128u /* with NUL; printable ASCII without space, '/', '"' or '\' */
#define SPEC_RANK_MAX        8u
#define SPEC_USES_MAX        16u
#define SPEC_AUDIT_BYTES     88u /* of a gradient, with guard_audit: share/parts.h */
#define SPEC_AUDIT_BYTES_MAX (UINT64_C(64) << 20) /* of all that a step has */
#define SPEC_BETA_MAX        0x1.fffffep-1        /* largest fp32 below 1 */

enum spec_init { SPEC_INIT_CONST = 1, SPEC_INIT_NORMAL = 2, SPEC_INIT_UNIFORM = 3 };

struct spec_init_row {
    const char *kind;
    uint32_t numbers; /* that follow the kind: 1 or 2 */
};

#define SPEC_INITS 3 /* ids 1..3 */
extern const struct spec_init_row spec_init_rows[SPEC_INITS + 1];

struct adafactor_rule;
struct muon_rule;
struct ramp;

struct spec_lamb { /* LAMB's of a group */
    double beta1, beta2, eps;
};

struct spec_group {
    char *name;          /* owned, unique */
    double lr_scale;     /* default 1 */
    double weight_decay; /* default 0 */
    bool skips_idle;     /* "idle": units that took no part in a step are not updated */
    bool mean;           /* "optimizer": its tensors become the mean of what is returned of them */
    struct muon_rule *muon; /* owned: "optimizer", of matrices; NULL: it is another */
    struct spec_lamb *lamb; /* owned: "optimizer", of whole tensors; NULL: it is another */
    struct adafactor_rule *adafactor; /* owned: likewise, of whole units; NULL: it is another */
};

struct spec_tensor {
    char *name; /* owned, unique in the model */
    char *of;   /* owned: the tensor it is rows of (spec_tiles.h); NULL: it is not cut */
    uint64_t of_rows, first_row; /* how many that one has; the first of them that it is */
    uint32_t rank;
    uint64_t shape[SPEC_RANK_MAX]; /* each > 0 */
    uint64_t elems;                /* product of shape */
    uint32_t group;                /* index into groups */
    uint32_t unit;                 /* index of its unit */
    uint64_t offset_elems;         /* in the unit; multiple of spec_tensor_align() */
    enum spec_init init;
    bool trainable;        /* the same for all tensors of a unit but its statistics */
    bool statistics;       /* Adafactor's of the unit, its last tensor: not in the JSON */
    double init_a, init_b; /* const: a; normal: mean, std; uniform: low, high */
};

struct spec_unit {
    char *name;            /* owned, unique */
    uint32_t first_tensor; /* its tensors are spec.tensors[first_tensor .. + tensor_count) */
    uint32_t tensor_count; /* > 0 */
    uint64_t elems;        /* end of the last tensor, padded to SHD_BLOCK_ELEMS */
    uint32_t uses[SPEC_USES_MAX];
    uint32_t uses_count;
    uint32_t tile, tiles; /* it is that one of so many; tiles 0: it is not cut */
    bool frozen;          /* its tensors are not trainable: no gradient, no optimizer state */
    bool skips_idle;      /* its tensors' groups do, all of them; of a frozen one it says nothing */
    bool mean;            /* its tensors' groups do: returned are values, in fp32; no moments */
    bool whole;           /* "place": it is of one owner, whole (share/deal.h); where `wholes` */
    bool wholes;          /* some of its tensors are updated as a whole */
    bool adafactor;       /* all are, by Adafactor: no moments; the last one is its statistics */
};

struct spec_torch {     /* in torch's order alone */
    bool coupled_decay; /* weight decay is part of the gradient */
    bool nesterov;      /* of SGD, with the next */
    double dampening;
};

struct guard;

struct spec {
    char *name;
    uint64_t seed;
    uint32_t micro_batches;    /* the most of a step, which memory is laid out for: >= ramp's */
    struct ramp *ramp;         /* owned: M of each step, 1..SHD_MICROS_MAX; NULL, one row: of all */
    uint32_t accumulate;       /* micro-batches per returned gradient; divides each M */
    bool guard_audit;          /* owners keep which micro-batch brought how much of a gradient */
    uint64_t verify_every;     /* of these steps, one group is computed by two workers; 0: never */
    enum shd_dtype publish;    /* what workers read */
    enum codec codec;          /* how that travels */
    enum shd_dtype grad_dtype; /* of gradients as workers return them; default fp32 */
    enum codec grad_codec;     /* instead, but for means: none, or int8 */
    enum spec_optimizer optimizer;
    double beta1, beta2, eps; /* SGD: beta1 is the momentum; Lion: beta1, beta2 */
    bool int8;                /* moments are in 8 bits (optimizer.h) */
    struct spec_torch torch;
    double ema;          /* decay of the parameters' moving average; 0: there is none */
    bool ema_warmup;     /* it grows to that decay */
    struct guard *guard; /* owned: which steps are skipped; NULL: no rules */
    struct spec_group *groups;
    uint32_t group_count; /* 1..SHD_GROUPS_MAX; a spec without groups has one, "default" */
    struct spec_unit *units;
    uint32_t unit_count; /* 1..SHD_UNITS_MAX */
    struct spec_tensor *tensors;
    uint32_t tensor_count;  /* in unit order */
    uint32_t *by_name;      /* owned: their indices in order of names, of a spec that was parsed */
    uint32_t trained_units; /* not frozen; of a spec that was parsed */
    uint64_t elems;         /* sum over tensors, without padding */
    _Atomic uint32_t more;  /* references, beside the first one */
};

/* One more who has it, and spec_free()s it: the last one does. Any thread. */
struct spec *spec_ref(const struct spec *spec);
void spec_free(struct spec *spec); /* NULL is a no-op */

/* The tensor of this name, of a spec that was parsed. False: there is none. */
bool spec_find_tensor(const struct spec *spec, const char *name, uint32_t *ret_index);

/* The name of a unit in the JSON: without "/TILE". */
void spec_unit_whole_name(const struct spec_unit *unit, char ret_name[SPEC_NAME_BYTES_MAX]);

/* -- The tensor in the JSON that a tensor is, or is rows of --------------------------------- */

const char *spec_whole_name(const struct spec_tensor *t);
uint64_t spec_whole_size(const struct spec_tensor *t, uint32_t d); /* shape[d] of it */
uint64_t spec_whole_first(const struct spec_tensor *t);            /* t's first element in it */
uint64_t spec_whole_elems(const struct spec_tensor *t);

/* The first of its tiles, or it is not cut: one of a whole one's parts that stands for it. */
bool spec_whole_begins(const struct spec_tensor *t);

/* Is rank and shape its? */
bool spec_whole_is(const struct spec_tensor *t, uint32_t rank, const uint64_t *shape);

/* SHD_OK when asked describes the same model as open; else SHD_ESPEC with the first difference,
 * tensor and field named with both values: "tensor 'h.0.mlp.c_fc.weight': shape[1] is 512, the
 * open model has 1024". */
int spec_compare(const struct spec *open, const struct spec *asked, struct shd_err *e);

/* M of a step. */
uint32_t spec_micro_batches(const struct spec *spec, uint64_t step);

/* The most gradients an owner gets of each trainable unit in a step: micro_batches / accumulate.
 * Return's micro counts these. */
uint32_t spec_returns(const struct spec *spec);

/* Moment arrays the optimizer keeps per parameter: AdamW 2, SGD and Lion 1. Of a unit: 0 where it
 * is frozen, a mean or Adafactor's. */
uint32_t spec_moments(const struct spec *spec);
uint32_t spec_unit_moments(const struct spec *spec, uint32_t unit);

/* The arrays that are state, numbered in this order: parameters, moments, and their moving
 * average, which has the last number. Of a unit: parameters alone where it is frozen or a mean. */
uint32_t spec_arrays(const struct spec *spec);
uint32_t spec_unit_arrays(const struct spec *spec, uint32_t unit);

/* How an array of those is kept. They are fp32, but for moments where these are in 8 bits. */
enum quant spec_array_quant(const struct spec *spec, uint32_t array);

/* Where tensors begin in a unit: at multiples of so many elements. */
uint32_t spec_tensor_align(const struct spec *spec);

/* The number of the moving average, where there is one; else the number of arrays. */
uint32_t spec_ema_array(const struct spec *spec);
bool spec_unit_ema(const struct spec *spec, uint32_t unit);

/* What updates a group's tensors. */
enum spec_optimizer spec_group_optimizer(const struct spec *spec, uint32_t group);

/* Is this a matrix that Muon updates? One of the tensors that are updated as a whole, by it or
 * LAMB? And is there any? */
bool spec_is_matrix(const struct spec *spec, const struct spec_tensor *tensor);
bool spec_is_whole(const struct spec *spec, const struct spec_tensor *tensor);
bool spec_has_whole(const struct spec *spec);

/* What updates a unit, but for those, and in which type its gradients come. */
enum spec_optimizer spec_unit_optimizer(const struct spec *spec, uint32_t unit);
enum shd_dtype spec_unit_grad_dtype(const struct spec *spec, uint32_t unit);
enum codec spec_unit_grad_codec(const struct spec *spec, uint32_t unit);

/* Philox key of a tensor's initial values: first 8 bytes, little-endian, of
 * SHA-256(seed as 8 bytes little-endian, then the name without NUL), of the whole tensor's name. */
uint64_t spec_tensor_key(const struct spec *spec, const struct spec_tensor *tensor);

/* The shortest decimal that reads back as x. */
void spec_real_text(double x, char ret_text[32]);

#endif
