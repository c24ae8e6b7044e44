/* Read a safetensors header: 8 bytes little-endian header size, then JSON that gives each tensor's
 * dtype, shape and place in the data behind it (https://github.com/huggingface/safetensors). Only
 * the header is read, and nothing in it is believed: sizes are bounded, shapes multiplied with
 * overflow in mind, places checked against shape, dtype, each other and the size of the file. */
#include <errno.h>
#include <inttypes.h>
#include <regex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "client/ctl/plan.h"
#include "client/wrap.h"
#include "proto/check.h"
#include "proto/dtype.h"

#define HEADER_BYTES_MAX UINT64_C(100000000) /* as the reference implementation */

struct dtype_row {
    const char *name;
    uint64_t bytes;
    enum shd_dtype publish; /* 0: not something to train */
};

static const struct dtype_row dtypes[] = {
    { "F64", 8, SHD_F32 },
    { "F32", 4, SHD_F32 },
    { "F16", 2, SHD_F16 },
    { "BF16", 2, SHD_BF16 },
    { "F8_E4M3", 1, SHD_BF16 },
    { "F8_E5M2", 1, SHD_BF16 },
    { "I64", 8, 0 },
    { "I32", 4, 0 },
    { "I16", 2, 0 },
    { "I8", 1, 0 },
    { "U64", 8, 0 },
    { "U32", 4, 0 },
    { "U16", 2, 0 },
    { "U8", 1, 0 },
    { "BOOL", 1, 0 },
};

struct place { /* of a tensor's bytes, in the data */
    uint64_t begin, end;
    const char *name; /* borrowed from the document */
};

struct header {
    const struct plan_ask *ask;  /* borrowed */
    json_t *root;                /* owned */
    uint64_t data_bytes;         /* behind the header */
    struct wrap_tensor *tensors; /* owned; names borrowed from root or ask */
    struct place *places;        /* owned */
    uint32_t tensor_count, place_count;
    uint64_t elems_of[SHD_F16 + 1]; /* by publish dtype: the largest decides */
    char *alias;                    /* owned: name in --tie */
    struct shd_err *e;
};

/* -- The file -------------------------------------------------------------------------------- */

static int parse_header(struct header *h, const char *text, size_t bytes)
{
    json_error_t why;
    h->root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &why);
    if (h->root == NULL)
        return err_set(h->e, SHD_EINVAL, "header, line %d column %d: %s", why.line, why.column,
                       why.text);
    if (!json_is_object(h->root))
        return err_set(h->e, SHD_EINVAL, "header is not a JSON object");
    return SHD_OK;
}

static int read_json(struct header *h, FILE *f)
{
    uint8_t size[8];
    struct stat st;
    if (fstat(fileno(f), &st) < 0 || !S_ISREG(st.st_mode))
        return err_set(h->e, SHD_EINVAL, "not a regular file");
    if (fread(size, 1, sizeof size, f) != sizeof size)
        return err_set(h->e, SHD_EINVAL, "has %jd bytes, too few for a header",
                       (intmax_t)st.st_size);
    uint64_t bytes = 0;
    for (unsigned i = 0; i < sizeof size; i++)
        bytes |= (uint64_t)size[i] << (8 * i);
    const uint64_t rest = (uint64_t)st.st_size - sizeof size;
    if (bytes > HEADER_BYTES_MAX || bytes > rest)
        return err_set(h->e, SHD_ERANGE,
                       "header claims %" PRIu64 " bytes, the file has %" PRIu64
                       " behind its size and %" PRIu64 " are the limit",
                       bytes, rest, HEADER_BYTES_MAX);
    char *text = malloc(bytes + 1);
    if (text == NULL)
        return err_set(h->e, SHD_ENOMEM, "no memory for a header of %" PRIu64 " bytes", bytes);
    h->data_bytes = rest - bytes;
    int r = fread(text, 1, bytes, f) == bytes ? SHD_OK
                                              : err_set(h->e, SHD_EIO, "cannot read the header");
    if (r == SHD_OK)
        r = parse_header(h, text, bytes);
    free(text);
    return r;
}

/* -- Tensors --------------------------------------------------------------------------------- */

static int bad(const struct header *h, const char *name, const char *what)
{
    return err_set(h->e, SHD_EINVAL, "tensor '%.120s': %s", name, what);
}

static bool get_u64(const json_t *v, uint64_t *ret_value)
{
    if (!json_is_integer(v) || json_integer_value(v) < 0)
        return false;
    *ret_value = (uint64_t)json_integer_value(v);
    return true;
}

static const struct dtype_row *find_dtype(const json_t *v)
{
    const char *name = json_is_string(v) ? json_string_value(v) : "";
    for (size_t i = 0; i < ARRAY_SIZE(dtypes); i++)
        if (strcmp(dtypes[i].name, name) == 0)
            return &dtypes[i];
    return NULL;
}

/* Elements; 0 with *h->e set when the shape will not do. */
static uint64_t read_shape(const struct header *h, const char *name, const json_t *shape,
                           struct wrap_tensor *t)
{
    uint64_t elems = 1;
    if (!json_is_array(shape) || json_array_size(shape) > SPEC_RANK_MAX)
        return bad(h, name, "shape is not an array of at most 8 numbers"), 0;
    t->rank = (uint32_t)json_array_size(shape);
    for (uint32_t d = 0; d < t->rank; d++) {
        if (!get_u64(json_array_get(shape, d), &t->shape[d]) || t->shape[d] == 0 ||
            t->shape[d] > SHD_MODEL_ELEMS_MAX / elems)
            return bad(h, name, "shape has a size that is not from 1 to 2^48 elements in all"), 0;
        elems *= t->shape[d];
    }
    return elems;
}

static int read_place(struct header *h, const char *name, const json_t *offsets, uint64_t bytes)
{
    struct place p = { .name = name };
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 ||
        !get_u64(json_array_get(offsets, 0), &p.begin) ||
        !get_u64(json_array_get(offsets, 1), &p.end))
        return bad(h, name, "data_offsets is not [begin, end]");
    if (p.begin > p.end || p.end - p.begin != bytes)
        return err_set(h->e, SHD_EINVAL,
                       "tensor '%.80s': data_offsets %" PRIu64 " to %" PRIu64
                       ", its shape and dtype need %" PRIu64 " bytes",
                       name, p.begin, p.end, bytes);
    if (p.end > h->data_bytes)
        return err_set(h->e, SHD_ERANGE,
                       "tensor '%.80s' ends at byte %" PRIu64 " of %" PRIu64 ": the file is cut",
                       name, p.end, h->data_bytes);
    h->places[h->place_count++] = p;
    return SHD_OK;
}

static int read_tensor(struct header *h, const char *name, const json_t *v)
{
    const struct dtype_row *dtype = find_dtype(json_object_get(v, "dtype"));
    struct wrap_tensor t = { .name = name, .tied_to = WRAP_UNTIED };
    if (dtype == NULL)
        return bad(h, name, "dtype is not known");
    const uint64_t elems = read_shape(h, name, json_object_get(v, "shape"), &t);
    if (elems == 0)
        return SHD_EINVAL;
    const int r = read_place(h, name, json_object_get(v, "data_offsets"), elems * dtype->bytes);
    if (r != SHD_OK || dtype->publish == 0)
        return r; /* integers are tables and buffers, nothing to train */
    if (h->tensor_count == SHD_TENSORS_MAX)
        return err_set(h->e, SHD_ERANGE, "more than %u tensors", SHD_TENSORS_MAX);
    h->elems_of[dtype->publish] += elems;
    h->tensors[h->tensor_count++] = t;
    return SHD_OK;
}

static int by_begin(const void *a, const void *b)
{
    const struct place *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

static int read_tensors(struct header *h)
{
    const size_t count = json_object_size(h->root);
    const char *name;
    json_t *v;
    int r = SHD_OK;
    h->tensors = calloc(SHD_TENSORS_MAX + 1, sizeof *h->tensors);
    h->places = calloc(count + 1, sizeof *h->places);
    if (h->tensors == NULL || h->places == NULL)
        return err_set(h->e, SHD_ENOMEM, "no memory for %zu tensors", count);
    json_object_foreach(h->root, name, v)
    {
        if (r == SHD_OK && strcmp(name, "__metadata__") != 0)
            r = read_tensor(h, name, v);
    }
    if (r != SHD_OK)
        return r;
    qsort(h->places, h->place_count, sizeof *h->places, by_begin);
    for (uint32_t i = 1; i < h->place_count; i++)
        if (h->places[i].begin < h->places[i - 1].end)
            return err_set(h->e, SHD_EINVAL, "tensors '%.90s' and '%.90s' overlap",
                           h->places[i - 1].name, h->places[i].name);
    return SHD_OK;
}

/* -- Units ----------------------------------------------------------------------------------- */

/* --tie ALIAS=TENSOR: files hold tied tensors once. */
static int add_alias(struct header *h)
{
    const char *tie = h->ask->tie, *equals = strchr(tie, '=');
    if (equals == NULL || equals == tie)
        return err_set(h->e, SHD_EINVAL, "--tie is '%.100s', takes ALIAS=TENSOR", tie);
    for (uint32_t i = 0; i < h->tensor_count; i++) {
        CHECK(h->tensors[i].name != NULL);
        if (strcmp(h->tensors[i].name, equals + 1) != 0)
            continue;
        h->alias = strndup(tie, (size_t)(equals - tie));
        if (h->alias == NULL)
            return err_set(h->e, SHD_ENOMEM, "no memory for --tie");
        struct wrap_tensor alias = h->tensors[i];
        alias.name = h->alias;
        alias.tied_to = i;
        h->tensors[h->tensor_count++] = alias;
        return SHD_OK;
    }
    return err_set(h->e, SHD_ENOENT, "--tie: there is no tensor '%.100s' to tie to", equals + 1);
}

static int mark_frozen(struct header *h)
{
    regex_t regex;
    if (regcomp(&regex, h->ask->frozen, REG_EXTENDED | REG_NOSUB) != 0)
        return err_set(h->e, SHD_EINVAL, "--frozen '%.100s' is no POSIX extended expression",
                       h->ask->frozen);
    uint32_t trainable = 0;
    for (uint32_t i = 0; i < h->tensor_count; i++) {
        h->tensors[i].frozen = regexec(&regex, h->tensors[i].name, 0, NULL, 0) == 0;
        trainable += !h->tensors[i].frozen;
    }
    regfree(&regex);
    if (trainable == 0)
        return err_set(h->e, SHD_EINVAL, "--frozen '%.100s' leaves nothing to train",
                       h->ask->frozen);
    return SHD_OK;
}

static int make_spec(struct header *h, struct spec **ret_spec)
{
    const struct plan_ask *ask = h->ask;
    int r = ask->frozen != NULL ? mark_frozen(h) : SHD_OK;
    if (r == SHD_OK && ask->tie != NULL)
        r = add_alias(h);
    struct wrap wrap = { 0 };
    const struct wrap_rule rule = { .patterns = &ask->wrap,
                                    .pattern_count = ask->wrap != NULL,
                                    .unit_elems_min = ask->unit_elems_min,
                                    .sort = true };
    if (r == SHD_OK)
        r = wrap_build(h->tensors, h->tensor_count, &rule, &wrap, h->e);
    const char *slash = strrchr(ask->safetensors, '/');
    struct wrap_model model = { .name = slash != NULL ? slash + 1 : ask->safetensors,
                                .accumulate = ask->accumulate > 0 ? ask->accumulate : 1,
                                .publish = SHD_F32 };
    for (int d = SHD_F32; d <= SHD_F16; d++)
        if (h->elems_of[d] > h->elems_of[model.publish])
            model.publish = (enum shd_dtype)d;
    const uint64_t micros = (ask->micros > 0 ? ask->micros : (uint64_t)model.accumulate) *
                            ask->workers;
    model.micro_batches = (uint32_t)micros;
    if (r == SHD_OK && micros > SHD_MICROS_MAX)
        r = err_set(h->e, SHD_ERANGE, "%" PRIu64 " micro-batches a step, at most %u", micros,
                    SHD_MICROS_MAX);
    if (r == SHD_OK)
        r = wrap_spec(h->tensors, h->tensor_count, &wrap, &model, ret_spec, h->e);
    wrap_deinit(&wrap);
    return r;
}

int plan_safetensors(const struct plan_ask *ask, struct spec **ret_spec, struct shd_err *e)
{
    struct header h = { .ask = ask, .e = e };
    FILE *f = fopen(ask->safetensors, "rb");
    if (f == NULL)
        return err_sys(e, SHD_ENOENT, "open '%s'", ask->safetensors);
    int r = read_json(&h, f);
    fclose(f);
    if (r == SHD_OK)
        r = read_tensors(&h);
    if (r == SHD_OK)
        r = make_spec(&h, ret_spec);
    free(h.tensors);
    free(h.places);
    free(h.alias);
    json_decref(h.root);
    return r == SHD_OK ? r : err_prefix(e, "%s", ask->safetensors);
}
