/* Auto-wrap: group a flat list of tensors into units. Pure but for allocations.
 *
 * Where one unit ends and the next begins decides what is fetched together: too small and every
 * fetch is latency, too large and memory is wasted. Three rules:
 *
 *   by layer     tensors that agree up to the first number in their name are a unit:
 *                "h.3.attn.c_attn.weight" goes to "h.3", "model.layers.12.mlp.up.weight" to
 *                "model.layers.12"
 *   by pattern   POSIX extended regular expressions, the first that matches counts; the matched
 *                text is the unit: "^h\.[0-9]+\.experts\.[0-9]+" makes each expert one
 *   by size      after either: neighbours are joined until a unit has so many elements
 *
 * Tensors that no layer or pattern claims (embeddings, the last norm, the head) form units of
 * neighbours. Frozen and trainable tensors never share a unit: where a group has both, the frozen
 * ones get a unit of their own, named "...:frozen", which the other one `uses`. A tied tensor (an
 * alias: a second name for another tensor's elements) is not stored again; the unit it falls into
 * uses the unit of the tensor it stands for.
 */
#ifndef SHD_WRAP_H
#define SHD_WRAP_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/dtype.h"
#include "proto/base/status.h"
#include "proto/spec/spec.h"

#define WRAP_UNTIED UINT32_MAX

struct wrap_tensor {
    const char *name; /* borrowed; unique; as a spec's names are */
    uint32_t rank;
    uint64_t shape[SPEC_RANK_MAX];
    bool frozen;
    uint32_t tied_to; /* index of the tensor this is an alias of; WRAP_UNTIED: none */
};

struct wrap_rule {
    const char *const *patterns; /* borrowed, [pattern_count] */
    uint32_t pattern_count;      /* 0: by layer */
    uint64_t unit_elems_min;     /* 0: do not join */
    /* The list is in no order that means anything (files are sorted by name): numbers are put in
     * ascending order, what has "emb", "wte" or "wpe" in its name before, other leftovers behind.
     * Without this the list is in forward order and stays so. */
    bool sort;
};

struct wrap_unit {
    char name[SPEC_NAME_BYTES_MAX];
    bool frozen;
    uint64_t elems; /* without padding */
    uint32_t uses[SPEC_USES_MAX];
    uint32_t uses_count;
};

struct wrap {
    struct wrap_unit *units; /* owned, in forward order */
    uint32_t unit_count;
    uint32_t *unit_of; /* owned, [tensors]: an alias has the unit that reads it */
};

/* Natural order: as memcmp(), but numbers inside compare by value, "h.2" before "h.10". 0 does not
 * say that they are equal: "h.1" and "h.01" have one place. */
int wrap_compare_names(const char *a, size_t a_bytes, const char *b, size_t b_bytes);

/* Errors name the tensor or pattern: SHD_EINVAL a name twice, empty or with characters a spec does
 * not take, an alias of itself or of another alias or of other shape, a bad pattern; SHD_ERANGE
 * more than SHD_UNITS_MAX units, SHD_TENSORS_MAX tensors, SHD_MODEL_ELEMS_MAX elements or
 * SPEC_USES_MAX uses; SHD_ENOMEM. */
int wrap_build(const struct wrap_tensor *tensors, uint32_t count, const struct wrap_rule *rule,
               struct wrap *ret_wrap, struct shd_err *e);
void wrap_deinit(struct wrap *wrap);

/* A spec with these units, AdamW, one parameter group, initial values 0: what a planner needs, and
 * what spec_dump() writes down for the user to go on from. */
struct wrap_model {
    const char *name;
    uint32_t micro_batches, accumulate;
    enum shd_dtype publish;
};
int wrap_spec(const struct wrap_tensor *tensors, uint32_t count, const struct wrap *wrap,
              const struct wrap_model *model, struct spec **ret_spec, struct shd_err *e);

#endif
