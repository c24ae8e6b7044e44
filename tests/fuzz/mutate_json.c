/* See mutate_json.h: one value of the document is replaced, doubled, dropped or renamed. */
#include "tests/fuzz/mutate_json.h"

#include <jansson.h>
#include <stdlib.h>

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
    static const char *const keys[] = { "name", "shape", "uses", "group", "dtype", "x", "seed" };
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
#ifdef SHD_FUZZ
    unsigned rng = seed;
    json_t *root = json_loadb((const char *)data, size, 0, NULL);
    if (root == NULL || random_next(&rng) % 4 == 0) {
        json_decref(root);
        return LLVMFuzzerMutate(data, size, max);
    }
    for (unsigned n = random_next(&rng) % 3 + 1; n > 0; n--)
        mutate(root, &rng);
    char *text = json_dumps(root, JSON_COMPACT | JSON_SORT_KEYS * (seed & 1));
    json_decref(root);
    const size_t bytes = text != NULL ? strlen(text) : 0;
    if (bytes > 0 && bytes <= max) {
        memcpy(data, text, bytes);
        size = bytes;
    }
    free(text);
#else
    (void)mutate;
    (void)data;
    (void)max;
    (void)seed;
#endif
    return size;
}
