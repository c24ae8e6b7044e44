/* Targets whose input is JSON: a spec, and a safetensors file. */
#include "tests/fuzz/json.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/ctl/plan/plan_source.h"
#include "proto/spec/spec.h"
#include "proto/spec/spec_json.h"
#include "proto/spec/spec_text.h"
#include "tests/fuzz/fuzz.h"

struct pick { /* the left-th value inside a container, found by a walk */
    unsigned left;
    json_t *container;
    const char *key; /* in an object */
    size_t index;    /* in an array */
};

static unsigned random_next(unsigned *rng)
{
    *rng = *rng * 1664525u + 1013904223u;
    return *rng >> 8;
}

static bool walk(json_t *v, struct pick *pick)
{
    const char *key;
    json_t *member;
    size_t i;
    json_object_foreach(v, key, member)
    {
        if (pick->left-- == 0) {
            *pick = (struct pick){ .container = v, .key = key };
            return true;
        }
        if (walk(member, pick))
            return true;
    }
    json_array_foreach(v, i, member)
    {
        if (pick->left-- == 0) {
            *pick = (struct pick){ .container = v, .index = i };
            return true;
        }
        if (walk(member, pick))
            return true;
    }
    return false;
}

static json_t *special(unsigned *rng)
{
    static const json_int_t ints[] = { 0,
                                       1,
                                       2,
                                       -1,
                                       3,
                                       4096,
                                       1 << 16,
                                       1 << 20,
                                       1 << 24,
                                       INT32_MAX,
                                       (json_int_t)1 << 32,
                                       (json_int_t)1 << 48,
                                       INT64_MAX,
                                       INT64_MIN };
    static const double reals[] = { 0.5, -0.0, 1e308, 1e-320, 3.4e38, 0.999999999, -1.5 };
    static const char *const texts[] = {
        "",     "embed", "wte", "f32",    "BF16", "F32",  "adamw",
        "lion", "const", "a/b", "normal", "\n",   "name", "default"
    };
    switch (random_next(rng) % 6) {
    case 0:
        return json_real(reals[random_next(rng) % ARRAY_SIZE(reals)]);
    case 1:
        return json_string(texts[random_next(rng) % ARRAY_SIZE(texts)]);
    case 2:
        return random_next(rng) % 2 != 0 ? json_array() : json_object();
    case 3:
        return random_next(rng) % 2 != 0 ? json_null() : json_true();
    default:
        return json_integer(ints[random_next(rng) % ARRAY_SIZE(ints)]);
    }
}

/* Any value of the document, copied. */
static json_t *another(json_t *root, unsigned *rng)
{
    struct pick p = { .left = random_next(rng) % 64 };
    if (!walk(root, &p))
        return special(rng);
    return json_deep_copy(p.key != NULL ? json_object_get(p.container, p.key)
                                        : json_array_get(p.container, p.index));
}

static void in_object(const struct pick *p, json_t *value, unsigned *rng)
{
    static const char *const keys[] = { "name",  "shape", "uses", "group",
                                        "dtype", "tiles", "x",    "seed" };
    char key[64];
    snprintf(key, sizeof key, "%s", p->key);
    switch (random_next(rng) % 4) {
    case 0:
        json_object_del(p->container, key);
        break;
    case 1: /* under another name */
        json_object_set(p->container, keys[random_next(rng) % ARRAY_SIZE(keys)], value);
        break;
    default:
        json_object_set(p->container, key, value);
        break;
    }
}

static void in_array(const struct pick *p, json_t *value, unsigned *rng)
{
    switch (random_next(rng) % 4) {
    case 0:
        json_array_remove(p->container, p->index);
        break;
    case 1:
        json_array_insert(p->container, p->index, value);
        break;
    default:
        json_array_set(p->container, p->index, value);
        break;
    }
}

static void mutate(json_t *root, unsigned *rng)
{
    struct pick p = { .left = random_next(rng) % 64 };
    while (!walk(root, &p) && p.left > 0)
        p = (struct pick){ .left = random_next(rng) % (64 - (p.left < 63 ? p.left : 63)) };
    if (p.container == NULL)
        return;
    json_t *value = random_next(rng) % 3 == 0 ? another(root, rng) : special(rng);
    (p.key != NULL ? in_object : in_array)(&p, value, rng);
    json_decref(value);
}

size_t mutate_json(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    unsigned rng = seed;
    json_t *root = json_loadb((const char *)data, size, 0, NULL);
    if (root == NULL || random_next(&rng) % 4 == 0) {
        json_decref(root);
        return fuzz_mutate(data, size, max);
    }
    for (unsigned n = random_next(&rng) % 3 + 1; n > 0; n--)
        mutate(root, &rng);
    char *text = json_dumps(root, JSON_COMPACT | JSON_SORT_KEYS * (seed & 1));
    json_decref(root);
    const size_t bytes = text != NULL ? strlen(text) : 0;
    if (bytes > 0 && bytes <= max) {
        memcpy(data, text, bytes); /* NOLINT(bugprone-not-null-terminated-result): bytes, no text */
        size = bytes;
    }
    free(text);
    return size;
}

/* -- spec ----------------------------------------------------------------------------------------
 */

/* A model's description as anybody may send it: what is no JSON to jansson is none here, and
 * nothing else is; what parses can be dumped, parses to the same again, and its layout can be asked
 * for. Input: the JSON. */

static void check_spec(const struct spec *s)
{
    uint64_t elems = 0;
    CHECK(s->unit_count >= 1 && s->unit_count <= SHD_UNITS_MAX);
    CHECK(s->group_count >= 1 && s->group_count <= SHD_GROUPS_MAX);
    CHECK((unsigned)s->codec <= CODECS && (unsigned)s->grad_codec <= CODEC_INT8);
    CHECK(s->micro_batches >= 1 && s->micro_batches <= SHD_MICROS_MAX);
    CHECK(spec_returns(s) * s->accumulate == s->micro_batches && spec_moments(s) <= 2);
    for (uint32_t i = 0; i < s->tensor_count; i++) {
        const struct spec_tensor *t = &s->tensors[i];
        CHECK(t->unit < s->unit_count && t->group < s->group_count && t->rank <= SPEC_RANK_MAX);
        CHECK(t->elems > 0 && t->offset_elems + t->elems <= s->units[t->unit].elems);
        elems += t->elems;
        (void)spec_tensor_key(s, t);
    }
    CHECK(elems == s->elems && elems <= SHD_MODEL_ELEMS_MAX);
    for (uint32_t u = 0; u < s->unit_count; u++) {
        CHECK(s->units[u].elems % SHD_BLOCK_ELEMS == 0 && s->units[u].tensor_count > 0);
        for (uint32_t i = 0; i < s->units[u].uses_count; i++)
            CHECK(s->units[u].uses[i] < s->unit_count && s->units[u].uses[i] != u);
    }
}

/* Dumping makes the text canonical, and so longer than the limit now and then. */
static void round_trip(const struct spec *s)
{
    struct shd_err e = { 0 };
    struct spec *again;
    char *text, *text_again;
    const int r = spec_dump(s, &text, &e);
    if (r != SHD_OK) {
        CHECK(r == SHD_ERANGE);
        return;
    }
    CHECK(spec_parse(text, strlen(text), &again, &e) == SHD_OK);
    CHECK(spec_compare(s, again, &e) == SHD_OK && spec_compare(again, s, &e) == SHD_OK);
    CHECK(spec_dump(again, &text_again, &e) == SHD_OK && strcmp(text, text_again) == 0);
    check_spec(again);
    spec_free(again);
    free(text);
    free(text_again);
}

static void check_well_formed(const char *json, size_t bytes)
{
    struct shd_err e = { 0 };
    struct text_doc doc;
    const int r = text_read("spec", json, bytes, &doc, &e);
    if (r != SHD_OK && strncmp(e.text, "JSON has", 8) == 0) /* more than is looked at */
        return;
    json_t *root = json_loadb(json, bytes, JSON_REJECT_DUPLICATES, NULL);
    CHECK((root != NULL) == (r == SHD_OK) || memchr(json, 0, bytes) != NULL);
    json_decref(root);
    if (r == SHD_OK)
        text_free(&doc);
}

static int spec_input(const uint8_t *data, size_t size)
{
    struct shd_err e = { 0 };
    struct spec *spec;
    check_well_formed((const char *)data, size);
    const int r = spec_parse((const char *)data, size, &spec, &e);
    if (r != SHD_OK) {
        fuzz_check_refusal(r, &e);
        return 0;
    }
    check_spec(spec);
    round_trip(spec);
    spec_free(spec);
    return 0;
}

static const char *const specs[] = {
    "{\"name\":\"m\",\"micro_batches\":1,\"optimizer\":{\"kind\":\"sgd\"},"
    "\"units\":[{\"name\":\"u\",\"tensors\":[{\"name\":\"t\",\"shape\":[3]}]}]}",
    "{\"name\":\"gpt\",\"seed\":1,\"micro_batches\":4,\"accumulate\":2,\"publish\":\"bf16\","
    "\"optimizer\":{\"kind\":\"adamw\",\"beta1\":0.9,\"beta2\":0.95,\"eps\":1e-8},"
    "\"groups\":[{\"name\":\"decay\",\"weight_decay\":0.1},{\"name\":\"plain\",\"lr_scale\":2}],"
    "\"units\":[{\"name\":\"embed\",\"tensors\":[{\"name\":\"wte\",\"shape\":[256,128],"
    "\"group\":\"decay\",\"init\":[\"normal\",0,0.02]}]},"
    "{\"name\":\"h.0\",\"tensors\":[{\"name\":\"a\",\"shape\":[5000],\"group\":\"plain\","
    "\"trainable\":false}]},"
    "{\"name\":\"head\",\"uses\":[\"embed\"],\"tensors\":[{\"name\":\"ln_f\",\"shape\":[],"
    "\"group\":\"plain\",\"init\":[\"const\",1]},{\"name\":\"w\",\"shape\":[2,3,4],"
    "\"group\":\"decay\",\"init\":[\"uniform\",-1,1]}]}]}",
    "{\"name\":\"c\",\"micro_batches\":1,\"codec\":\"int4\",\"grad_codec\":\"int8\","
    "\"optimizer\":{\"kind\":\"sgd\"},\"units\":[{\"name\":\"u\",\"tensors\":["
    "{\"name\":\"t\",\"shape\":[65]},{\"name\":\"b\",\"shape\":[1]}]}]}",
    "{\"name\":\"l\",\"micro_batches\":8,\"optimizer\":{\"kind\":\"lion\",\"beta1\":0.9},"
    "\"publish\":\"f16\",\"units\":[{\"name\":\"u\",\"tensors\":[{\"name\":\"t\","
    "\"shape\":[1048576,268435456]}]}]}",
    "{\"name\":\"t\",\"micro_batches\":2,\"optimizer\":{\"kind\":\"sgd\"},"
    "\"units\":[{\"name\":\"a\",\"tiles\":3,\"tensors\":[{\"name\":\"w\",\"shape\":[7,5]},"
    "{\"name\":\"b\",\"shape\":[4]}]},{\"name\":\"z\",\"uses\":[\"a\"],\"tiles\":2,"
    "\"tensors\":[{\"name\":\"y\",\"shape\":[2,3]}]}]}",
};

static size_t spec_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    if (index >= ARRAY_SIZE(specs) || strlen(specs[index]) > bytes_max)
        return 0;
    memcpy(buf, specs[index], strlen(specs[index]));
    return strlen(specs[index]);
}

static size_t spec_mutate(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    return mutate_json(data, size, max, seed);
}

const struct fuzz_target fuzz_spec = { "spec", spec_input, spec_seed, spec_mutate };

/* A safetensors file from anywhere, as shardctl plan reads it: a spec or an error. Input: how it is
 * asked for (1 byte), how much longer than the input the file is (4 bytes), then the file. */

#define HEAD_BYTES 5u

static int safetensors_input(const uint8_t *data, size_t size)
{
    static int file = -1;
    static char path[64];
    struct fuzz_in in = { data, size };
    struct shd_err e = { 0 };
    struct spec *spec;
    if (file < 0) {
        file = memfd_create("fuzz", MFD_CLOEXEC);
        CHECK(file >= 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    }
    const uint8_t how = fuzz_u8(&in);
    const uint64_t more_bytes = fuzz_u32(&in);
    CHECK(ftruncate(file, 0) == 0);
    CHECK(pwrite(file, in.at, in.left, 0) == (ssize_t)in.left);
    CHECK(ftruncate(file, (off_t)(in.left + more_bytes)) == 0);
    const struct plan_ask ask = { .safetensors = path,
                                  .tie = (how & 1) != 0 ? "head.weight=wte.weight" : NULL,
                                  .frozen = (how & 2) != 0 ? "^h\\.0\\." : NULL,
                                  .wrap = (how & 4) != 0 ? "h\\.[0-9]+" : NULL,
                                  .unit_elems_min = (how & 8) != 0 ? 1000 : 0,
                                  .accumulate = (how & 16) != 0 ? 2 : 0,
                                  .workers = 1 };
    const int r = plan_safetensors(&ask, &spec, &e);
    if (r == SHD_OK) {
        CHECK(spec->tensor_count > 0 && spec->elems <= SHD_MODEL_ELEMS_MAX);
        spec_free(spec);
    } else {
        fuzz_check_refusal(r, &e);
    }
    return 0;
}

static size_t put_file(uint8_t *buf, size_t max, const char *json, uint8_t how, uint32_t more_bytes)
{
    const size_t bytes = strlen(json);
    if (HEAD_BYTES + 8 + bytes > max)
        return 0;
    buf[0] = how;
    memcpy(buf + 1, &more_bytes, 4);
    const uint64_t header_bytes = bytes;
    memcpy(buf + HEAD_BYTES, &header_bytes, 8);
    for (size_t i = 0; i < bytes; i++) /* without its NUL */
        buf[HEAD_BYTES + 8 + i] = (uint8_t)json[i];
    return HEAD_BYTES + 8 + bytes;
}

static const char *const headers[] = {
    "{\"__metadata__\":{\"format\":\"pt\"},\"wte.weight\":{\"dtype\":\"F32\",\"shape\":[16,8],"
    "\"data_offsets\":[0,512]},\"h.0.w\":{\"dtype\":\"F32\",\"shape\":[64],"
    "\"data_offsets\":[512,768]},\"h.1.w\":{\"dtype\":\"F32\",\"shape\":[2,4,8],"
    "\"data_offsets\":[768,1024]},\"ids\":{\"dtype\":\"I64\",\"shape\":[],"
    "\"data_offsets\":[1024,1032]}}",
    "{\"a\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[0,6]}}",
    "{\"a\":{\"dtype\":\"F16\",\"shape\":[0],\"data_offsets\":[0,0]}}",
};

static size_t safetensors_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    if (index >= 2 * ARRAY_SIZE(headers))
        return 0;
    return put_file(buf, bytes_max, headers[index / 2], index % 2 != 0 ? 0x1f : 0, 1032);
}

/* The header's size follows its text, mostly. */
static size_t safetensors_mutate(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    if (seed % 16 == 0 || size < HEAD_BYTES + 8 || max < HEAD_BYTES + 16)
        return fuzz_mutate(data, size, max);
    if (seed % 8 == 1)
        data[seed / 8 % HEAD_BYTES] = (uint8_t)(seed >> 8);
    uint64_t bytes;
    memcpy(&bytes, data + HEAD_BYTES, 8);
    if (bytes > size - HEAD_BYTES - 8)
        bytes = size - HEAD_BYTES - 8;
    bytes = mutate_json(data + HEAD_BYTES + 8, bytes, max - HEAD_BYTES - 8, seed / 16);
    memcpy(data + HEAD_BYTES, &bytes, 8);
    return HEAD_BYTES + 8 + bytes;
}

const struct fuzz_target fuzz_safetensors = { "safetensors", safetensors_input, safetensors_seed,
                                              safetensors_mutate };
