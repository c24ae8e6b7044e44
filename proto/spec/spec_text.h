/* Internal to spec_node.c: a JSON document as one array of values, in the order of the text.
 *
 * Happy path: text_read() copies the text, ends its strings in place, and notes where each value
 * is; two allocations, whatever the document has. A value is followed by what is in it, so
 * value + span is its next sibling; in an object key and value take turns.
 *
 * Failure: what jansson does not take is not taken here, and the error is jansson's: line, column
 * and what it found. So a document is either read here, some ten times as fast, or explained
 * there. Nothing in it is trusted. */
#ifndef SHD_SPEC_TEXT_H
#define SHD_SPEC_TEXT_H

#include <stddef.h>
#include <stdint.h>

struct shd_err;

enum text_kind {
    TEXT_OBJECT,
    TEXT_ARRAY,
    TEXT_STRING,
    TEXT_INTEGER, /* of 64 bits */
    TEXT_REAL,    /* finite */
    TEXT_TRUE,
    TEXT_FALSE,
    TEXT_NULL,
};

struct text_value {
    const char *at;     /* a string, with NUL; a number's digits */
    uint32_t count;     /* of an array or object: items or members */
    uint32_t span : 28; /* values from here to its end, this one included */
    uint32_t kind : 4;  /* enum text_kind */
};

struct text_doc {
    struct text_value *values; /* owned; the first is the document */
    char *text;                /* owned */
};

/* Whether json[bytes] has no more arrays, objects and values than a spec can have; *ret_values: no
 * more than so many values. SHD_ERANGE names both numbers. */
int text_check_amount(const char *json, size_t bytes, uint64_t *ret_values, struct shd_err *e);

/* Read json[bytes] (NUL not needed). what: errors name it so, as "spec". Errors: SHD_EINVAL,
 * SHD_ERANGE, SHD_ENOMEM. */
int text_read(const char *what, const char *json, size_t bytes, struct text_doc *ret_doc,
              struct shd_err *e);
void text_free(struct text_doc *doc); /* one of zeros is a no-op */

/* The value of a key, of an object; NULL: it has none. */
const struct text_value *text_member(const struct text_value *object, const char *key);

double text_real(const struct text_value *number); /* in whichever locale */

#endif
