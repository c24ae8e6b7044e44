/* See spec_text.h. */
#include "proto/spec/spec_text.h"

#include <errno.h>
#include <inttypes.h>
#include <locale.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "proto/base/check.h"
#include "proto/base/status.h"
#include "proto/base/sys.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec.h"

#define DEPTH_MAX     2048u /* jansson's: of values in each other */
#define SAFE_DIGITS   18u   /* so many fit into 64 bits */
#define COMPARED_KEYS 16u   /* an object with more has one that no spec has */
#define VALUES_MAX    ((UINT32_C(1) << 28) - 1)

/* Per tensor: itself, shape and init; per unit: itself, uses and tensors. */
#define CONTAINERS_MAX (4 * (uint64_t)(SHD_TENSORS_MAX + SHD_UNITS_MAX))
/* Per tensor at most 5 fields, 8 sizes, 3 of init; per unit 3 fields and its uses. */
#define COMMAS_MAX (24 * (uint64_t)(SHD_TENSORS_MAX + SHD_UNITS_MAX))
_Static_assert(2 * (CONTAINERS_MAX + COMMAS_MAX) + 1 <= VALUES_MAX, "a span has room for them");

struct reader {
    char *p;                   /* the text ends with a NUL, which is no part of JSON */
    struct text_value *values; /* [room] */
    uint64_t room;
    uint32_t used;
    uint32_t open[DEPTH_MAX]; /* the arrays and objects that we are in: values */
    uint32_t depth;
    bool foreign; /* it has bytes beyond ASCII */
};

/* What a value is preceded by is a comma, a colon, or the beginning of what it is in. */
int text_check_amount(const char *json, size_t bytes, uint64_t *ret_values, struct shd_err *e)
{
    uint64_t containers = 0, commas = 0;
    bool text = false;
    for (size_t i = 0; i < bytes; i++) {
        if (text) {
            if (json[i] == '\\')
                i++;
            else
                text = json[i] != '"';
            continue;
        }
        text = json[i] == '"';
        containers += json[i] == '{' || json[i] == '[';
        commas += json[i] == ',';
    }
    if (containers > CONTAINERS_MAX)
        return err_set(e, SHD_ERANGE,
                       "JSON has %" PRIu64 " arrays and objects, the limit is %" PRIu64, containers,
                       CONTAINERS_MAX);
    if (commas > COMMAS_MAX)
        return err_set(e, SHD_ERANGE, "JSON has %" PRIu64 " commas, the limit is %" PRIu64, commas,
                       COMMAS_MAX);
    *ret_values = 2 * (containers + commas) + 1;
    return SHD_OK;
}

static void skip_space(struct reader *r)
{
    while (*r->p == ' ' || *r->p == '\n' || *r->p == '\t' || *r->p == '\r')
        r->p++;
}

static struct text_value *add(struct reader *r, enum text_kind kind)
{
    CHECK(r->used < r->room); /* text_check_amount() */
    struct text_value *v = &r->values[r->used++];
    *v = (struct text_value){ .at = r->p, .span = 1, .kind = kind & 15u };
    return v;
}

/* -- Strings ------------------------------------------------------------------------------------
 */

static bool read_hex(const char *p, uint32_t *ret_code)
{
    uint32_t code = 0;
    for (int i = 0; i < 4; i++) {
        const char c = p[i];
        if (c >= '0' && c <= '9')
            code = code << 4 | (uint32_t)(c - '0');
        else if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f')
            code = code << 4 | (uint32_t)((c | 0x20) - 'a' + 10);
        else
            return false;
    }
    *ret_code = code;
    return true;
}

static char *put_utf8(char *to, uint32_t code)
{
    if (code < 0x80) {
        *to++ = (char)code;
    } else if (code < 0x800) {
        *to++ = (char)(0xc0 | code >> 6);
        *to++ = (char)(0x80 | (code & 0x3f));
    } else if (code < 0x10000) {
        *to++ = (char)(0xe0 | code >> 12);
        *to++ = (char)(0x80 | (code >> 6 & 0x3f));
        *to++ = (char)(0x80 | (code & 0x3f));
    } else {
        *to++ = (char)(0xf0 | code >> 18);
        *to++ = (char)(0x80 | (code >> 12 & 0x3f));
        *to++ = (char)(0x80 | (code >> 6 & 0x3f));
        *to++ = (char)(0x80 | (code & 0x3f));
    }
    return to;
}

/* At the u of \uXXXX, which a second one follows where it is half of a pair. */
static bool read_code(struct reader *r, uint32_t *ret_code)
{
    uint32_t high, low;
    if (!read_hex(r->p + 1, &high) || high == 0)
        return false;
    r->p += 5;
    *ret_code = high;
    if (high < 0xd800 || high > 0xdfff)
        return true;
    if (high > 0xdbff || r->p[0] != '\\' || r->p[1] != 'u' || !read_hex(r->p + 2, &low) ||
        low < 0xdc00 || low > 0xdfff)
        return false;
    r->p += 6;
    *ret_code = 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
    return true;
}

/* At the backslash. What it stands for is never longer. */
static bool read_escape(struct reader *r, char **to)
{
    static const char names[] = "\"\\/bfnrt", stands_for[] = "\"\\/\b\f\n\r\t";
    uint32_t code;
    r->p++;
    if (*r->p == 'u') {
        if (!read_code(r, &code))
            return false;
        *to = put_utf8(*to, code);
        return true;
    }
    const char *name = *r->p != '\0' ? strchr(names, *r->p) : NULL;
    if (name == NULL)
        return false;
    *(*to)++ = stands_for[name - names];
    r->p++;
    return true;
}

/* At the first quotation mark. */
static bool read_string(struct reader *r)
{
    struct text_value *v = add(r, TEXT_STRING);
    char *to = ++r->p;
    v->at = to;
    while (*r->p != '"') {
        const unsigned char c = (unsigned char)*r->p;
        if (c < 0x20) /* the end of the text, too */
            return false;
        r->foreign = r->foreign || c >= 0x80;
        if (c == '\\') {
            if (!read_escape(r, &to))
                return false;
        } else {
            *to++ = *r->p++;
        }
    }
    r->p++;
    *to = '\0';
    return true;
}

/* -- Numbers and words --------------------------------------------------------------------------
 */

static size_t skip_digits(struct reader *r)
{
    const char *from = r->p;
    while (*r->p >= '0' && *r->p <= '9')
        r->p++;
    return (size_t)(r->p - from);
}

double text_real(const struct text_value *number)
{
    /* The C library has this one ready: nothing is allocated. */
    const locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    const double x = c != (locale_t)0 ? strtod_l(number->at, NULL, c) : strtod(number->at, NULL);
    if (c != (locale_t)0)
        freelocale(c);
    return x;
}

static bool read_number(struct reader *r)
{
    struct text_value *v = add(r, TEXT_INTEGER);
    r->p += *r->p == '-';
    const bool zero = *r->p == '0';
    const size_t digits = skip_digits(r);
    if (digits == 0 || (zero && digits > 1))
        return false;
    if (*r->p == '.') {
        v->kind = TEXT_REAL;
        r->p++;
        if (skip_digits(r) == 0)
            return false;
    }
    if (*r->p == 'e' || *r->p == 'E') {
        v->kind = TEXT_REAL;
        r->p++;
        r->p += *r->p == '-' || *r->p == '+';
        if (skip_digits(r) == 0)
            return false;
    }
    if (v->kind == TEXT_REAL)
        return isfinite(text_real(v));
    if (digits <= SAFE_DIGITS)
        return true;
    errno = 0;
    (void)strtoll(v->at, NULL, 10);
    return errno == 0;
}

static bool read_word(struct reader *r, const char *word, enum text_kind kind)
{
    const size_t bytes = strlen(word);
    if (strncmp(r->p, word, bytes) != 0)
        return false;
    add(r, kind);
    r->p += bytes;
    return true;
}

static bool read_scalar(struct reader *r)
{
    if (r->depth == DEPTH_MAX)
        return false;
    switch (*r->p) {
    case '"':
        return read_string(r);
    case 't':
        return read_word(r, "true", TEXT_TRUE);
    case 'f':
        return read_word(r, "false", TEXT_FALSE);
    case 'n':
        return read_word(r, "null", TEXT_NULL);
    default:
        return read_number(r);
    }
}

/* -- Arrays and objects -------------------------------------------------------------------------
 */

static struct text_value *innermost(struct reader *r)
{
    return r->depth > 0 ? &r->values[r->open[r->depth - 1]] : NULL;
}

static bool keys_differ(const struct text_value *object)
{
    const struct text_value *keys[COMPARED_KEYS];
    const struct text_value *v = object + 1;
    for (uint32_t i = 0; i < object->count && i < COMPARED_KEYS; i++) {
        for (uint32_t k = 0; k < i; k++)
            if (strcmp(keys[k]->at, v->at) == 0)
                return false;
        keys[i] = v;
        v += 1 + v[1].span;
    }
    return true;
}

static bool end_innermost(struct reader *r)
{
    struct text_value *v = innermost(r);
    r->p++;
    r->depth--;
    v->span = (r->used - (uint32_t)(v - r->values)) & VALUES_MAX;
    return v->kind == TEXT_ARRAY || keys_differ(v);
}

static bool begin_inner(struct reader *r)
{
    if (r->depth == DEPTH_MAX)
        return false;
    r->open[r->depth++] = r->used;
    add(r, *r->p == '{' ? TEXT_OBJECT : TEXT_ARRAY);
    r->p++;
    return true;
}

static bool read_key(struct reader *r)
{
    if (*r->p != '"' || !read_string(r))
        return false;
    skip_space(r);
    if (*r->p != ':')
        return false;
    r->p++;
    skip_space(r);
    return true;
}

/* Behind a value: what ends here, up to the comma that another one follows. *ret_more: false at the
 * end of the document. */
static bool end_value(struct reader *r, bool *ret_more)
{
    for (;;) {
        struct text_value *in = innermost(r);
        skip_space(r);
        *ret_more = in != NULL;
        if (in == NULL)
            return true;
        in->count++;
        if (*r->p == ',') {
            r->p++;
            skip_space(r);
            return true;
        }
        if (*r->p != (in->kind == TEXT_OBJECT ? '}' : ']') || !end_innermost(r))
            return false;
    }
}

/* All of it, without recursion. False: it is no JSON, or none that is read here. */
static bool read_all(struct reader *r)
{
    bool more = true;
    skip_space(r);
    if (*r->p != '{' && *r->p != '[')
        return false;
    while (more) {
        const struct text_value *in = innermost(r);
        if (in != NULL && in->kind == TEXT_OBJECT && !read_key(r))
            return false;
        if (*r->p == '{' || *r->p == '[') {
            const char end = *r->p == '{' ? '}' : ']';
            if (!begin_inner(r))
                return false;
            skip_space(r);
            if (*r->p != end)
                continue;
            if (!end_innermost(r))
                return false;
        } else if (!read_scalar(r)) {
            return false;
        }
        if (!end_value(r, &more))
            return false;
    }
    return true;
}

/* -- The document -------------------------------------------------------------------------------
 */

/* What jansson says of it. SHD_OK: nothing. */
static int explain(const char *what, const char *json, size_t bytes, struct shd_err *e)
{
    json_error_t why;
    json_t *root = json_loadb(json, bytes, JSON_REJECT_DUPLICATES, &why);
    if (root != NULL) {
        json_decref(root);
        return SHD_OK;
    }
    switch (json_error_code(&why)) {
    case json_error_out_of_memory:
        return err_set(e, SHD_ENOMEM, "out of memory while reading the %s", what);
    case json_error_numeric_overflow:
        return err_set(e, SHD_ERANGE,
                       "%s line %d column %d: %.100s: integers (seeds too) end at 2^63-1, reals "
                       "must be finite",
                       what, why.line, why.column, why.text);
    default:
        return err_set(e, SHD_EINVAL, "%s line %d column %d: %s", what, why.line, why.column,
                       why.text);
    }
}

int text_read(const char *what, const char *json, size_t bytes, struct text_doc *ret_doc,
              struct shd_err *e)
{
    struct reader r = { 0 };
    int status = text_check_amount(json, bytes, &r.room, e);
    if (status != SHD_OK)
        return status;
    struct text_doc doc = { .values = sys_malloc(r.room * sizeof *doc.values),
                            .text = sys_malloc(bytes + 1) };
    if (doc.values == NULL || doc.text == NULL) {
        text_free(&doc);
        return err_set(e, SHD_ENOMEM, "out of memory while reading the %s", what);
    }
    memcpy(doc.text, json, bytes);
    doc.text[bytes] = '\0';
    r.p = doc.text;
    r.values = doc.values;
    const bool read = read_all(&r) && r.p == doc.text + bytes;
    if (!read || r.foreign) /* whether it is UTF-8 */
        status = explain(what, json, bytes, e);
    if (status == SHD_OK && !read) /* it overlooks a NUL behind a number */
        status = err_set(e, SHD_EINVAL, "%s byte %zu: no JSON", what, (size_t)(r.p - doc.text));
    if (status == SHD_OK)
        *ret_doc = doc;
    else
        text_free(&doc);
    return status;
}

void text_free(struct text_doc *doc)
{
    free(doc->values);
    free(doc->text);
    *doc = (struct text_doc){ 0 };
}

const struct text_value *text_member(const struct text_value *object, const char *key)
{
    if (object == NULL || object->kind != TEXT_OBJECT)
        return NULL;
    const struct text_value *v = object + 1;
    for (uint32_t i = 0; i < object->count; i++, v += 1 + v[1].span)
        if (strcmp(v->at, key) == 0)
            return v + 1;
    return NULL;
}
