/* shape.h: which units and tensors the model has, and where tensors lie in their units.
 *
 * Units in forward order: "embed" (wte, wpe), the layers, "head" (ln_f; its output matrix is wte
 * again). A layer is
 *
 *   dense      "h.0": the whole block
 *   experts    "h.0": attention and router; then "h.0.expert.0" .., the MLPs one token in E goes to
 *   adapters   "h.0": the whole block, frozen; then "h.0.lora": two low-rank factors for each of
 *              its matrices, which uses "h.0". It is the second that computes the block. Embed and
 *              head are frozen too.
 *
 *   tiles      each matrix and norm, matrices cut by their rows: shape_tiles.h
 *
 * Names and shapes are GPT-2's as Hugging Face stores them: weights are [in, out].
 */
#ifndef GPT_SHAPE_H
#define GPT_SHAPE_H

#include <stdbool.h>
#include <stdint.h>

#include "client/shd.h"

#define GPT_VOCAB 256 /* bytes */

/* Limits of what --layers and the others take. */
#define GPT_LAYERS_MAX 1024
#define GPT_DIM_MAX    16384
#define GPT_SEQ_MAX    8192
#define GPT_BATCH_MAX  4096
#define GPT_MODEL_NAME "gpt"

#define GPT_EXPERTS_MAX 256
#define GPT_TILES_MAX   GPT_VOCAB
#define GPT_UNITS_MAX   4096 /* of a spec */

struct gpt_shape {
    uint32_t layers, dim, heads, seq;
    uint32_t experts; /* of each layer; 0: dense */
    uint32_t rank;    /* of the adapters; 0: none. Not with experts */
    uint32_t tiles;   /* of each matrix; 0: none. Not with either, nor on a GPU; not 1 */
};

enum gpt_unit_kind {
    GPT_EMBED,
    GPT_BLOCK,
    GPT_EXPERT,
    GPT_LORA,
    GPT_HEAD,
    GPT_TILED_LN1, /* in the place of a block, all of these: a weight and its bias each */
    GPT_TILED_ATTN,
    GPT_TILED_PROJ,
    GPT_TILED_LN2,
    GPT_TILED_FC,
    GPT_TILED_MLP,
    GPT_TILED_LM, /* the output matrix alone, [vocabulary, dim] */
    GPT_UNIT_KINDS
};

enum gpt_embed_tensor { EMBED_WTE, EMBED_WPE, EMBED_TENSORS };
enum gpt_block_tensor {
    BLOCK_LN1_W,
    BLOCK_LN1_B,
    BLOCK_ATTN_W, /* [dim, 3 dim] */
    BLOCK_ATTN_B,
    BLOCK_PROJ_W, /* [dim, dim] */
    BLOCK_PROJ_B,
    BLOCK_LN2_W,
    BLOCK_LN2_B,
    BLOCK_FC_W, /* [dim, 4 dim]; this and the next three: not with experts */
    BLOCK_FC_B,
    BLOCK_MLP_W, /* [4 dim, dim] */
    BLOCK_MLP_B,
    BLOCK_ROUTER_W, /* [dim, experts]; with experts only */
    BLOCK_ROUTER_B,
    BLOCK_TENSORS
};
enum gpt_expert_tensor { EXPERT_FC_W, EXPERT_FC_B, EXPERT_MLP_W, EXPERT_MLP_B, EXPERT_TENSORS };
enum gpt_lora_tensor { /* a: [in, rank], b: [rank, out] */
                       LORA_ATTN_A,
                       LORA_ATTN_B,
                       LORA_PROJ_A,
                       LORA_PROJ_B,
                       LORA_FC_A,
                       LORA_FC_B,
                       LORA_MLP_A,
                       LORA_MLP_B,
                       LORA_TENSORS
};
enum gpt_head_tensor { HEAD_LN_W, HEAD_LN_B, HEAD_TENSORS };
#define GPT_KIND_TENSORS_MAX BLOCK_TENSORS

/* The matrices of a block: each has a bias, the tensor behind the weight, and may have an adapter,
 * whose second factor is the tensor behind its first. */
enum gpt_matrix { GPT_ATTN, GPT_PROJ, GPT_FC, GPT_MLP, GPT_MATRICES };
extern const struct gpt_matrix_row {
    enum gpt_block_tensor weight;
    enum gpt_lora_tensor low;
    uint32_t in, out; /* multiples of dim */
} gpt_matrices[GPT_MATRICES];

/* Offset of each tensor's first element in its unit's array, and the arrays' sizes: the same for
 * all units of a kind. */
struct gpt_layout {
    uint64_t at[GPT_UNIT_KINDS][GPT_KIND_TENSORS_MAX];
    uint64_t elems[GPT_UNIT_KINDS];
};

struct gpt_unit {
    enum gpt_unit_kind kind;
    uint32_t layer, expert; /* 0 where there is none; the tile of a model in tiles */
};

/* One tensor of the model. */
struct gpt_tensor {
    char name[48];
    uint32_t unit, tiles;    /* the first of so many, which have equal parts of its rows */
    enum gpt_unit_kind kind; /* of the unit */
    uint32_t index;          /* one of the enums above */
    uint64_t dims[2];        /* dims[1] is 0 for vectors */
    uint64_t elems;
    double init_const; /* for vectors, and matrices without init_std */
    double init_std;   /* for matrices: normal(0, init_std) */
};

#define GPT_UNIT_EMBED 0u
#define GPT_UNIT_NONE  UINT32_MAX
uint32_t gpt_units(const struct gpt_shape *shape);
uint32_t gpt_tensors(const struct gpt_shape *shape);
uint64_t gpt_parameters(const struct gpt_shape *shape);
uint64_t gpt_parameters_trained(const struct gpt_shape *shape);

/* From an index (< gpt_units()) to the unit, and back. */
struct gpt_unit gpt_unit_at(const struct gpt_shape *shape, uint32_t unit);
uint32_t gpt_unit_find(const struct gpt_shape *shape, struct gpt_unit unit);

/* The unit whose parameters this one reads as well: embed for the head (the tied matrix), the
 * block for its adapters; else GPT_UNIT_NONE. */
uint32_t gpt_unit_uses(const struct gpt_shape *shape, uint32_t unit);

/* Has no gradient. */
bool gpt_kind_frozen(const struct gpt_shape *shape, enum gpt_unit_kind kind);

uint64_t gpt_unit_elems(const struct gpt_shape *shape, const struct gpt_layout *layout,
                        uint32_t unit);

/* Tensor by position, index < gpt_tensors(): the order of the spec. Whole ones. */
void gpt_tensor_at(const struct gpt_shape *shape, uint32_t index, struct gpt_tensor *ret_tensor);

/* Within the limits above, and dim a multiple of heads? SHD_ERANGE names the number that is not. */
int gpt_shape_check(const struct gpt_shape *shape, struct shd_err *e);

/* The layout the daemons use. Errors: as shd_tensor_find(); SHD_ESPEC when units of a kind
 * differ. */
int gpt_layout_load(const struct gpt_shape *shape, const shd_model *m,
                    struct gpt_layout *ret_layout, struct shd_err *e);

/* The parts of the spec that do not follow from the shape. */
struct gpt_spec {
    const char *optimizer; /* "adamw", "sgd", "lion", "muon" or "lamb" */
    bool int8;             /* its moments are in 8 bits: not of the last two */
    uint64_t seed;
    uint32_t micro_batches, accumulate;
    uint64_t verify_every;              /* 0: never */
    enum shd_dtype publish, grad_dtype; /* 0: fp32 */
    const char *codec;      /* of what is published: "none" or NULL, "int8", "fp8", "int4" */
    const char *grad_codec; /* of gradients: likewise, or "int8" */
    double weight_decay;    /* of matrices; biases and norms have none */
    double ema;             /* of parameters, its decay; 0: none */
};

/* The model spec of shd_model_open(), as JSON; free() it. NULL: no memory. */
char *gpt_spec_json(const struct gpt_shape *shape, const struct gpt_spec *spec);

#endif
