/* shape.h: which tensors the model has, and where they lie in their units.
 *
 * Units in forward order: 0 "embed" (wte, wpe), 1..layers "h.0".. (one block each), layers + 1
 * "head" (ln_f; its output matrix is wte again). Names and shapes are GPT-2's as Hugging Face
 * stores them: weights are [in, out].
 */
#ifndef GPT_SHAPE_H
#define GPT_SHAPE_H

#include <stdint.h>

#include "client/shd.h"

#define GPT_VOCAB 256 /* bytes */

/* Limits of what --layers and the others take. */
#define GPT_LAYERS_MAX 1024
#define GPT_DIM_MAX    16384
#define GPT_SEQ_MAX    8192
#define GPT_BATCH_MAX  4096

struct gpt_shape {
    uint32_t layers, dim, heads, seq;
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
    BLOCK_FC_W, /* [dim, 4 dim] */
    BLOCK_FC_B,
    BLOCK_MLP_W, /* [4 dim, dim] */
    BLOCK_MLP_B,
    BLOCK_TENSORS
};
enum gpt_head_tensor { HEAD_LN_W, HEAD_LN_B, HEAD_TENSORS };

/* Offset of each tensor's first element in its unit's array, and the arrays' sizes. */
struct gpt_layout {
    uint64_t embed[EMBED_TENSORS], block[BLOCK_TENSORS], head[HEAD_TENSORS];
    uint64_t embed_elems, block_elems, head_elems;
};

/* One tensor of the model. */
struct gpt_tensor {
    char name[48];
    uint32_t unit;
    uint32_t index;   /* one of the enums above */
    uint64_t dims[2]; /* dims[1] is 0 for vectors */
    uint64_t elems;
    double init_const; /* for vectors */
    double init_std;   /* for matrices: normal(0, init_std) */
};

#define GPT_UNIT_EMBED 0u
uint32_t gpt_units(const struct gpt_shape *shape);
uint32_t gpt_tensors(const struct gpt_shape *shape);
uint64_t gpt_parameters(const struct gpt_shape *shape);

/* Tensor by position, index < gpt_tensors(): the order of the spec. */
void gpt_tensor_at(const struct gpt_shape *shape, uint32_t index, struct gpt_tensor *ret_tensor);

/* Within the limits above, and dim a multiple of heads? SHD_ERANGE names the number that is not. */
int gpt_shape_check(const struct gpt_shape *shape, struct shd_err *e);

/* The layout by shd.h's rule: tensors in order, each at the next multiple of 32 elements. */
void gpt_layout_compute(const struct gpt_shape *shape, struct gpt_layout *ret_layout);

/* The layout the daemons use. Errors: as shd_tensor_find(); SHD_ESPEC when blocks differ. */
int gpt_layout_load(const struct gpt_shape *shape, const shd_model *m,
                    struct gpt_layout *ret_layout, struct shd_err *e);

/* What else the spec says. */
struct gpt_spec {
    const char *optimizer; /* "adamw", "sgd" or "lion" */
    uint64_t seed;
    uint32_t micro_batches;
    double weight_decay; /* of matrices; biases and norms have none */
};

/* The model spec of shd_model_open(), as JSON; free() it. NULL: no memory. */
char *gpt_spec_json(const struct gpt_shape *shape, const struct gpt_spec *spec);

#endif
