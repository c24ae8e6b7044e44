/* Internal to spec_json.c: typed, range-checked reading of a JSON document whose errors name the
 * path of the value. Getters leave *ret untouched on failure; an absent value is an error, so
 * optional fields are asked for by node.json first. A path is written when an error needs it. */
#ifndef SHD_SPEC_NODE_H
#define SHD_SPEC_NODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"
#include "proto/spec/spec_text.h"

#define NODE_PATH_BYTES 112

/* A JSON value and where it is. json is NULL when it is absent. Borrowed: from the document, and
 * from its parent, which stays where it is as long as this one is used. */
struct node {
    const struct text_value *json;
    const struct node *parent; /* NULL: the document itself */
    const char *key;           /* in an object; NULL: an item of an array */
    uint32_t index;            /* in an array */
};

struct node_path {
    char text[NODE_PATH_BYTES]; /* "units[3].tensors[0].shape"; "spec" for the document itself */
};

struct node_path node_path(const struct node *n);

struct node_range {
    double min, max;
};

struct node node_field(const struct node *object, const char *key);

/* An item of an array, which takes as long as there are items before it, and the item behind it. */
struct node node_item(const struct node *array, uint32_t index);
struct node node_next(const struct node *item);

/* n is an object whose every key is one of known[count] (NULLs match nothing). */
int node_object(const struct node *n, const char *const *known, size_t count, struct shd_err *e);

/* n is an array of min to max entries. */
int node_array(const struct node *n, uint32_t min, uint32_t max, uint32_t *ret_count,
               struct shd_err *e);

int node_u64(const struct node *n, uint64_t min, uint64_t max, uint64_t *ret_value,
             struct shd_err *e);
int node_bool(const struct node *n, bool *ret_value, struct shd_err *e);
int node_real(const struct node *n, struct node_range range, double *ret_value, struct shd_err *e);

/* *ret_text is borrowed from the document. */
int node_text(const struct node *n, const char **ret_text, struct shd_err *e);

/* A name as spec.h allows them, copied to *slot (which its owner frees, also after an error). */
int node_name(const struct node *n, char **slot, struct shd_err *e);

/* The errors "is missing" / "must be WANTED, is ...", and SHD_ENOMEM. */
int node_wrong_type(const struct node *n, const char *wanted, struct shd_err *e);
int node_no_memory(struct shd_err *e);

#endif
